"""Episodes on disk: one JSON object a line, pictures beside it.

Invariants: a file only grows, and by whole lines (one write each), so a kill can tear only its last line;
that line is cut off by the next writer and passed over by readers. A picture is stored once, as
`images/<content hash>.png`, before the line that names it.

    FOLDER/train.jsonl      one line an episode: place, reward, end, messages; with `tokens` also records
    FOLDER/images/*.png     8-bit RGB, named by content hash (`tiderl.env.images.image_hash`)
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import threading
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..env.ends import EndReason
from ..env.images import decode_image, image_hash
from ..env.messages import Message, jsonable
from ..errors import ResourceError, TideError
from .record import TokenRecord
from .trajectory import Trajectory

IMAGES = "images"
_PART = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_PLAIN = (
    *("episode_id", "task", "group", "ordinal", "member", "seed", "env_id", "split"),
    *("success", "turns", "invalid_actions", "forks", "seconds", "note"),
)


class StoreError(TideError):
    """A file of episodes cannot be read."""


class EpisodeStore:
    """Append-only episodes of one folder. Safe to use from several threads.

    Args:
        folder: made at the first `append`; reading changes nothing.
        tokens: also store token ids, masks, log-probs and versions.
    """

    def __init__(self, folder: str | os.PathLike[str], *, tokens: bool = False) -> None:
        self.folder, self.tokens = Path(folder), tokens
        self._files: dict[str, int] = {}
        self._lock = threading.Lock()

    def append(self, trajectory: Trajectory, *, part: str | None = None) -> None:
        """Write one episode to `part`.jsonl (its split's, unless given); it is on file when this returns.

        Raises:
            ResourceError: the disk is full or the folder cannot be written.
            ValueError: `part` is no plain file name.
        """
        name = part or re.sub(r"[^A-Za-z0-9._-]", "-", trajectory.split).lstrip(".-_") or "episodes"
        if not _PART.fullmatch(name):
            raise ValueError(f"{name!r} is no name for a part: use letters, digits, '.', '_' and '-'")
        with self._lock:
            try:
                file = self._files.get(name)
                if file is None:
                    file = self._files[name] = _open(self.folder / f"{name}.jsonl")
                line = json.dumps(self._row(trajectory), ensure_ascii=False, allow_nan=False)
                _write(file, (line + "\n").encode("utf-8", "replace"))
            except OSError as error:
                raise _disk(error, self.folder) from error

    def close(self) -> None:
        """Close the files; a later `append` opens them again."""
        with self._lock:
            for file in self._files.values():
                os.close(file)
            self._files.clear()

    def __enter__(self) -> EpisodeStore:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def parts(self) -> list[str]:
        """Names of the parts on file."""
        return sorted(path.stem for path in self.folder.glob("*.jsonl"))

    def iterate(
        self, part: str | None = None, *, images: bool = True, latest: bool = False
    ) -> Iterator[Trajectory]:
        """The stored episodes, in the order of their lines.

        Args:
            part: only this one; all parts, by name, when None.
            images: read the pictures; else an image part holds its hash and shape.
            latest: of lines with the same `episode_id`, only the last one.

        Raises:
            StoreError: there is no such part, a line is broken, or a picture is missing or changed.
        """
        for name in self.parts() if part is None else [part]:
            path = self.folder / f"{name}.jsonl"
            last = {row.get("episode_id"): number for number, row in _rows(path)} if latest else {}
            for number, row in _rows(path):
                if not latest or last[row.get("episode_id")] == number:
                    yield self._trajectory(row, path, number, images)

    def _row(self, trajectory: Trajectory) -> dict[str, Any]:
        row = {name: getattr(trajectory, name) for name in _PLAIN}
        row |= {
            "end": trajectory.end.value,
            "valid": trajectory.valid,
            "reward": _finite(trajectory.reward),
            "rewards": [_finite(reward) for reward in trajectory.rewards],
            "sampled_tokens": trajectory.sampled_tokens,
            "oldest_version": trajectory.oldest_version,
            "messages": jsonable(trajectory.messages, self.folder / IMAGES),
        }
        if self.tokens:
            row["records"] = [asdict(record) for record in trajectory.records]
        return row

    def _trajectory(self, row: dict[str, Any], path: Path, number: int, images: bool) -> Trajectory:
        try:
            rewards = [math.nan if reward is None else float(reward) for reward in row["rewards"]]
            records = [
                TokenRecord(**{**record, "turns": [(start, end) for start, end in record["turns"]]})
                for record in row.get("records", ())
            ]
            messages = [self._message(message, images) for message in row["messages"]]
            plain = {name: row[name] for name in _PLAIN}
            end = EndReason(row["end"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise _broken(path, number, f"{type(error).__name__}: {error}") from error
        return Trajectory(**plain, end=end, rewards=rewards, records=records, messages=messages)

    def _message(self, message: Message, images: bool) -> Message:
        content = message.get("content")
        if images and isinstance(content, list):
            message = {**message, "content": [self._part(part) for part in content]}
        return message

    def _part(self, part: dict[str, Any]) -> dict[str, Any]:
        if part.get("type") != "image":
            return part
        path = self.folder / IMAGES / f"{part['sha256']}.png"
        try:
            image = decode_image(path.read_bytes())
        except (OSError, TideError) as error:
            raise StoreError(
                f"a picture of an episode cannot be read: {error}",
                where=str(path),
                fix="restore it, or read the episodes without pictures",
            ) from error
        if image_hash(image) != part["sha256"]:
            raise StoreError(
                "a picture is not the one the episode saw: its content hash differs",
                where=str(path),
                fix="restore it, or read the episodes without pictures",
            )
        return {"type": "image", "image": image}


def _rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number from 1, object) of each whole line."""
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    return  # torn by a kill: its episode was never counted
                try:
                    row = json.loads(line)
                except ValueError as error:
                    raise _broken(path, number, str(error)) from error
                if not isinstance(row, dict):
                    raise _broken(path, number, f"a {type(row).__name__} instead of an object")
                yield number, row
    except FileNotFoundError as error:
        near = ", ".join(sorted(other.stem for other in path.parent.glob("*.jsonl"))) or "none"
        raise StoreError(
            f"there are no episodes called {path.stem!r}",
            where=str(path.parent),
            fix=f"choose one of these parts: {near}",
        ) from error
    except OSError as error:
        raise StoreError(
            f"the episodes cannot be read: {error.strerror}", where=str(path), fix="make the file readable"
        ) from error


def _broken(path: Path, number: int, what: str) -> StoreError:
    return StoreError(
        f"line {number} holds no episode ({what})",
        where=str(path),
        fix="remove that line or restore the file",
    )


def _open(path: Path) -> int:
    """The file opened for appending, its torn last line cut off."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    try:
        size = keep = os.fstat(file).st_size
        while keep and os.pread(file, 1, keep - 1) != b"\n":
            block = os.pread(file, min(65536, keep), max(0, keep - 65536))
            keep = max(0, keep - 65536) + block.rfind(b"\n") + 1 if b"\n" in block else max(0, keep - 65536)
        if keep < size:
            os.ftruncate(file, keep)
    except OSError:
        os.close(file)
        raise
    return file


def _write(file: int, data: bytes) -> None:
    """All of `data`; on failure the file is as it was."""
    start = os.fstat(file).st_size
    view = memoryview(data)
    try:
        while view:
            view = view[os.write(file, view) :]
    except OSError:
        os.ftruncate(file, start)
        raise


def _finite(value: float) -> float | None:
    """JSON knows no nan: it is stored as null."""
    return float(value) if math.isfinite(value) else None


def _disk(error: OSError, folder: Path) -> ResourceError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ResourceError("no space left for episodes", where=str(folder), fix="free some disk space")
    return ResourceError(
        f"episodes cannot be written: {error.strerror}", where=str(folder), fix="make the folder writable"
    )
