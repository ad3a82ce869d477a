"""The folder of an evaluation: its configuration, its journal, its summary.

Invariants: a record is on disk (fsync) before its episode counts as done; the journal is append-only and
only its last line can be torn; `evaluation.json` and `summary.json` are replaced whole, never edited; one
process at a time writes to a folder; nothing is written into a folder of something else.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import ResourceError, RunExists, TideError
from .result import EpisodeResult

CONFIGURATION, JOURNAL, SUMMARY, EPISODES = "evaluation.json", "journal.jsonl", "summary.json", "episodes"


def write_atomic(path: Path, data: Mapping[str, Any]) -> None:
    """Replace `path` by `data` as JSON: readers see the old content or the new, also after a crash."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            json.dump(data, file, indent=2, ensure_ascii=False, allow_nan=False)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        _sync_folder(path.parent)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise _disk(error, path) from error
    except ValueError:
        temporary.unlink(missing_ok=True)
        raise


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _disk(error: OSError, path: Path) -> TideError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ResourceError(
            "no space left on the disk", where=str(path), fix="free some space and run the same command again"
        )
    return ResourceError(
        f"cannot write: {error.strerror or error}", where=str(path), fix="choose a folder you may write to"
    )


def differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> list[str]:
    """The keys in which two configurations differ, each as `key: old there, new now`."""
    found: list[str] = []
    for key in sorted(set(old) | set(new)):
        a, b = old.get(key), new.get(key)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            found += differences(a, b, f"{prefix}{key}.")
        elif a != b:
            found.append(f"{prefix}{key}: {json.dumps(a)} there, {json.dumps(b)} now")
    return found


def _unborn(path: Path) -> bool:
    """True for what a process leaves that is killed before it has written its configuration."""
    if path.name == JOURNAL:
        return path.stat().st_size == 0
    return path.name.startswith(f".{CONFIGURATION}.")


def check_folder(folder: Path, configuration: Mapping[str, Any], *, resume: bool) -> None:
    """Refuse a folder that this evaluation must not write to. Writes nothing.

    Raises:
        RunExists: it holds something else, or (when resuming) an evaluation with another configuration;
            the text names what differs.
        ResourceError: it is not a folder, or what it holds cannot be read.
    """
    if not folder.exists():
        return
    if not folder.is_dir():
        raise ResourceError("out is not a folder", where=str(folder), fix="choose another one with --out")
    written = folder / CONFIGURATION
    if not written.exists():
        others = sorted(p.name for p in folder.iterdir() if not _unborn(p))
        if others:
            raise RunExists(
                f"the folder holds other files, such as {others[0]}, and no evaluation",
                where=str(folder),
                fix="choose an empty folder with --out",
            )
        return
    if not resume:
        return
    try:
        old = json.loads(written.read_text(encoding="utf-8"))["configuration"]
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise RunExists(
            f"the evaluation's configuration cannot be read: {error}",
            where=str(written),
            fix="choose another folder with --out, or start over with --fresh",
        ) from error
    changed = differences(old, json.loads(json.dumps(configuration)))
    if changed:
        raise RunExists(
            f"the folder holds an evaluation with another configuration ({'; '.join(changed)})",
            where=str(folder),
            fix="choose another folder with --out, or start over with --fresh",
        )


class Journal:
    """Appends records to `journal.jsonl` and knows those of earlier processes. Use as a context manager.

    `records` maps an episode's index to its latest record.
    """

    def __init__(self, folder: Path, configuration: Mapping[str, Any], *, resume: bool = True) -> None:
        """Open (and create) the folder, take it for this process, read what is there.

        Raises:
            RunExists: see `check_folder`; or another process is writing to it; or a line of the journal
                that is not the last one is damaged.
            ResourceError: the folder cannot be written.
        """
        check_folder(folder, configuration, resume=resume)
        self.folder = folder
        self.records: dict[int, EpisodeResult] = {}
        self.process = 1
        existed = folder.exists()
        self._mutex = threading.Lock()
        path = folder / JOURNAL
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise _disk(error, path) from error
        try:
            self._take(path)
            # Checked again now that no other process can change it.
            check_folder(folder, configuration, resume=resume)
            for name in (CONFIGURATION, SUMMARY):
                for left in folder.glob(f".{name}.*"):  # by a process that was killed as it wrote
                    left.unlink(missing_ok=True)
            if not resume:
                self._clear()
            if not (folder / CONFIGURATION).exists():
                write_atomic(folder / CONFIGURATION, {"format": 1, "configuration": dict(configuration)})
            self._read(path)
        except BaseException:
            os.close(self._fd)
            raise
        self._made_folder = not existed

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        with self._mutex:
            if self._fd >= 0:
                os.close(self._fd)  # gives the lock back
                self._fd = -1

    def _take(self, path: Path) -> None:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunExists(
                "another process is writing to this evaluation",
                where=str(path.parent),
                fix="wait for it to end, or choose another folder with --out",
            ) from None

    def _clear(self) -> None:
        # The configuration goes last: a kill in between leaves a folder that is still known as ours.
        os.ftruncate(self._fd, 0)
        (self.folder / SUMMARY).unlink(missing_ok=True)
        shutil.rmtree(self.folder / EPISODES, ignore_errors=True)
        (self.folder / CONFIGURATION).unlink(missing_ok=True)

    def _read(self, path: Path) -> None:
        content = path.read_bytes()
        whole = content.rfind(b"\n") + 1
        if whole != len(content):
            os.ftruncate(self._fd, whole)  # a line that a kill tore; its episode is run again
        for number, line in enumerate(content[:whole].splitlines(), start=1):
            try:
                record = EpisodeResult.from_json(json.loads(line))
            except (ValueError, KeyError, TypeError) as error:
                raise RunExists(
                    f"line {number} of the journal is damaged: {error!r}",
                    where=str(path),
                    fix="remove that line to run its episode again, or start over with --fresh",
                ) from error
            self.records[record.index] = record
            self.process = max(self.process, record.process + 1)

    def append(self, record: EpisodeResult) -> None:
        """Write one record and wait until it is on the disk. Safe to call from any thread.

        After the journal is closed it does nothing: such an episode does not count and is run again.

        Raises:
            ResourceError: the disk is full or gone; the record does not count, and no part of it is left.
        """
        line = json.dumps(record.to_json(), ensure_ascii=False, allow_nan=False).encode() + b"\n"
        with self._mutex:
            if self._fd < 0:
                return
            size = os.fstat(self._fd).st_size
            try:
                view = memoryview(line)
                while view:
                    view = view[os.write(self._fd, view) :]
                os.fsync(self._fd)
            except OSError as error:
                os.ftruncate(self._fd, size)
                raise _disk(error, self.folder / JOURNAL) from error
            self.records[record.index] = record

    def discard(self) -> None:
        """Remove what this evaluation wrote, and the folder when that was ours too.

        For an evaluation in which no episode has ended: a failed start leaves nothing behind.
        """
        self.records.clear()
        for name in (SUMMARY, JOURNAL, CONFIGURATION):
            (self.folder / name).unlink(missing_ok=True)
        shutil.rmtree(self.folder / EPISODES, ignore_errors=True)
        if self._made_folder and self.folder.exists() and not any(self.folder.iterdir()):
            self.folder.rmdir()

    def write_summary(self, summary: Mapping[str, Any]) -> Path:
        """Replace summary.json."""
        path = self.folder / SUMMARY
        write_atomic(path, summary)
        return path


def read_journal(folder: Path) -> dict[int, EpisodeResult]:
    """The latest record of each index, without taking the folder; a torn last line is left out."""
    records: dict[int, EpisodeResult] = {}
    content = (folder / JOURNAL).read_bytes()
    for line in content[: content.rfind(b"\n") + 1].splitlines():
        record = EpisodeResult.from_json(json.loads(line))
        records[record.index] = record
    return records
