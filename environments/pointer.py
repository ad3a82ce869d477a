"""`tide/Pointer-v0`: move a cursor over a rendered screen and click the named shape.

Invariant: the text never tells where anything is; only the picture of each turn does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import tiderl
from tiderl.env import messages as m
from tiderl.env.tasks import LazyTasks
from tiderl.errors import EnvironmentFault

from .draws import Draws, draw_in_split
from .screen import COLOURS, SHAPES, Item, draw

SIZES = {"train": 2048, "test": 256}
MOVES = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}


@tiderl.register("tide/Pointer-v0")
class Pointer(tiderl.AgentEnv):
    """Coloured shapes on a screen: move the cursor to the named one and click.

    Reward 1 for a click on the right shape, else 0; a click ends the episode. Each turn's observation
    holds a picture, size x size x 3.

    Args:
        size: pixels of a side, a multiple of `cells`.
        cells: cells of a side; a move goes one cell.
        shapes: how many shapes are on the screen.
        limits: see `AgentEnv`.
    """

    max_turns = 12
    modality = "image"
    splits = tuple(SIZES)
    system: str | None = "You control the cursor on a screen: the white frame. Move it, then click."

    def __init__(self, size: int = 56, cells: int = 4, shapes: int = 3, **limits: Any) -> None:
        super().__init__(**limits)
        if cells < 2 or size % cells or size // cells < 7:
            raise EnvironmentFault(
                f"a screen of {size} pixels cannot hold {cells} cells a side",
                fix="make size a multiple of cells, at least 7 pixels a cell, and cells at least 2",
            )
        if not 1 <= shapes <= min(cells * cells - 1, len(COLOURS) * len(SHAPES)):
            raise EnvironmentFault(f"shapes is {shapes}", fix=f"choose 1 to {min(cells * cells - 1, 12)}")
        if 2 * (cells - 1) + 1 > self.max_turns:
            raise EnvironmentFault(
                f"{cells} cells a side need up to {2 * cells - 1} turns", fix="raise max_turns"
            )
        self.size, self.cells, self.shapes = size, cells, shapes
        self.items: tuple[Item, ...] = ()
        self.target: Item | None = None
        self.cursor = (0, 0)

    def tasks(self, split: str) -> Sequence[Any]:
        key = f"pointer/{self.cells}/{self.shapes}"
        return LazyTasks(
            range(SIZES[split]),
            lambda number: {"id": number, **draw_in_split(f"{key}/{number}", split, self._draw)},
        )

    def _draw(self, draws: Draws) -> tuple[str, dict[str, Any]]:
        places = [(column, row) for column in range(self.cells) for row in range(self.cells)]
        looks = [(colour, shape) for colour in COLOURS for shape in SHAPES]
        cursor, *cells = draws.sample(places, 1 + self.shapes)
        chosen = draws.sample(looks, self.shapes)
        items = [{"colour": c, "shape": s, "cell": cell} for (c, s), cell in zip(chosen, cells, strict=True)]
        task = {"cursor": cursor, "items": items, "target": draws.below(self.shapes)}
        return repr(task), task

    def start(self, task: Any) -> list[Any]:
        self.items = tuple(Item(one["colour"], one["shape"], tuple(one["cell"])) for one in task["items"])
        self.target = self.items[task["target"]]
        self.cursor = tuple(task["cursor"])
        return [f"Click the {self.target.name}.", self.screen()]

    def screen(self) -> Any:
        """The picture now."""
        return draw(self.size, self.cells, self.items, self.cursor)

    @tiderl.tool
    def move(self, direction: Literal["left", "right", "up", "down"]) -> list[Any]:
        """Move the cursor one cell.

        Args:
            direction: where to move.
        """
        column, row = (at + by for at, by in zip(self.cursor, MOVES[direction], strict=True))
        if not (0 <= column < self.cells and 0 <= row < self.cells):
            return ["The cursor is at the edge.", self.screen()]
        self.cursor = (column, row)
        return ["Moved.", self.screen()]

    @tiderl.tool
    def click(self) -> list[Any]:
        """Click where the cursor is."""
        assert self.target is not None
        hit = self.cursor == self.target.cell
        self.finish(1.0 if hit else 0.0)
        return ["Right." if hit else "Wrong.", self.screen()]

    def oracle(self) -> m.Message:
        """Go to the target by column, then by row, then click."""
        assert self.target is not None
        dx, dy = (to - at for to, at in zip(self.target.cell, self.cursor, strict=True))
        if dx:
            call = m.tool_call("move", direction="right" if dx > 0 else "left")
        elif dy:
            call = m.tool_call("move", direction="down" if dy > 0 else "up")
        else:
            call = m.tool_call("click")
        return m.assistant(None, [call])
