"""Numbers of a run, on disk as they come.

Invariant: `metrics.jsonl` holds one whole JSON object a line, flushed to disk line by line; a line cut by
a crash is dropped when the run goes on, so no counter ever goes backwards.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

HISTOGRAM = "_histogram"
"""How the name of a metric ends that is a dict of value -> count."""


def read_lines(path: Path) -> list[dict[str, Any]]:
    """All whole lines of a metrics file; a torn last line is left out."""
    if not path.exists():
        return []
    rows = []
    for line in path.read_text().splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows


class MetricsLog:
    """Appends to `metrics.jsonl` and, where it is installed, to TensorBoard's event files.

    Args:
        folder: the run's folder.
        keep: keep only lines whose `update` is at most this (a resumed run); None keeps none.
    """

    def __init__(self, folder: Path, keep: int | None = None) -> None:
        self.path = folder / "metrics.jsonl"
        kept = [r for r in read_lines(self.path) if keep is not None and r["update"] <= keep]
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text("".join(json.dumps(r) + "\n" for r in kept))
        os.replace(temporary, self.path)
        self.rows = kept
        self._file = self.path.open("a")
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            self._board = None
        else:
            purge = None if keep is None else keep + 1
            self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=purge, flush_secs=10)

    def write(self, update: int, values: Mapping[str, Any]) -> None:
        """One line for `update`. Numbers that are not finite become null."""
        row = {"update": update} | {k: plain(v) for k, v in values.items()}
        self.rows.append(dict(row))
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        if self._board is not None:
            del row["update"]
            self._show(row, update)

    def _show(self, values: Mapping[str, Any], update: int, above: str = "") -> None:
        """Numbers as curves, those of a dict as `key/sub`; a `..._histogram` (value -> count) as one."""
        assert self._board is not None
        for key, value in values.items():
            if isinstance(value, Mapping):
                if key.endswith(HISTOGRAM):
                    self._show_histogram(above + key.removesuffix(HISTOGRAM), value, update)
                else:
                    self._show(value, update, f"{above}{key}/")
            elif isinstance(value, bool):
                self._board.add_scalar(above + key, int(value), update)
            elif isinstance(value, (int, float)):
                self._board.add_scalar(above + key, value, update)

    def _show_histogram(self, key: str, counts: Mapping[str, Any], update: int) -> None:
        assert self._board is not None
        values = [float(value) for value, count in counts.items() for _ in range(int(count))]
        if values:
            self._board.add_histogram(f"{key}/histogram", np.array(values), update)

    def close(self) -> None:
        """Flush and close both."""
        self._file.close()
        if self._board is not None:
            self._board.close()


def plain(value: Any) -> Any:
    """As JSON has it: a number that is not finite becomes null, a numpy scalar a number."""
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def write_json(path: Path, data: Any) -> None:
    """Write JSON beside the target and rename it into place."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(plain(data), indent=2) + "\n")
    os.replace(temporary, path)
