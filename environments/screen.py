"""Small pictures drawn with NumPy: a grid of cells with shapes and a cursor.

Invariant: the same arguments draw the same pixels; each cell's background colour tells its column (red)
and row (green), because some vision towers know only relative positions.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

COLOURS = {
    "red": (220, 40, 40),
    "green": (40, 200, 60),
    "blue": (50, 80, 230),
    "yellow": (230, 210, 40),
}
SHAPES = ("square", "circle", "triangle")
WHITE = (255, 255, 255)


@dataclass(frozen=True)
class Item:
    """A coloured shape in a cell (column, row)."""

    colour: str
    shape: str
    cell: tuple[int, int]

    @property
    def name(self) -> str:
        """For example "red square"."""
        return f"{self.colour} {self.shape}"


def shape_mask(shape: str, side: int) -> np.ndarray:
    """A side x side boolean picture of a shape, with a margin of a seventh."""
    y, x = np.mgrid[0:side, 0:side] + 0.5
    margin = max(1, side // 7)
    centre, radius = side / 2, side / 2 - margin
    if shape == "square":
        return (abs(x - centre) <= radius) & (abs(y - centre) <= radius)
    if shape == "circle":
        return (x - centre) ** 2 + (y - centre) ** 2 <= radius**2
    return (abs(x - centre) <= (y - margin) / 2) & (y <= side - margin) & (y >= margin)


def draw(size: int, cells: int, items: Iterable[Item], cursor: tuple[int, int]) -> np.ndarray:
    """The screen, size x size x 3 uint8; `size` is a multiple of `cells`."""
    side = size // cells
    steps = np.arange(cells) * 120 // max(1, cells - 1) + 10
    shade = np.repeat(steps, side).astype(np.uint8)
    picture = np.full((size, size, 3), 60, np.uint8)
    picture[:, :, 0] = shade[None, :]
    picture[:, :, 1] = shade[:, None]
    for item in items:
        column, row = item.cell
        patch = picture[row * side : (row + 1) * side, column * side : (column + 1) * side]
        patch[shape_mask(item.shape, side)] = COLOURS[item.colour]
    width = max(1, side // 7)
    column, row = cursor
    patch = picture[row * side : (row + 1) * side, column * side : (column + 1) * side]
    patch[:width] = patch[-width:] = WHITE
    patch[:, :width] = patch[:, -width:] = WHITE
    return picture
