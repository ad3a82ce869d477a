"""Token records packed into forward passes, equal prefixes computed once.

Invariant: packing never changes a log-prob. A token's hidden state in a causal model is a function of the
ids before it, so the records of a batch form a tree (a prompt shared by a group, a system prompt shared by
all groups, equal first turns, ...) in which every distinct prefix is one node, its position is its depth,
and it attends to its ancestors and itself. Where a model's attention is anything else, records become
padded rows instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

BLOCK = 256
"""Queries in one dense attention call: larger wastes work on masked pairs, smaller on call overhead."""


@dataclass(frozen=True)
class Item:
    """One record to be scored: its ids and the positions (>= 1, ascending) whose ids carry loss."""

    ids: np.ndarray
    targets: np.ndarray

    def __post_init__(self) -> None:
        if not len(self.targets):
            raise ValueError("a record without loss tokens cannot be packed")
        if self.targets[0] < 1 or self.targets[-1] >= len(self.ids):
            raise ValueError(f"loss positions {self.targets[0]}..{self.targets[-1]} of {len(self.ids)} ids")

    @property
    def inputs(self) -> np.ndarray:
        """The ids the model must read: nothing from the last loss token on is ever needed."""
        return self.ids[: int(self.targets[-1])]


@dataclass(frozen=True)
class AttentionBlock:
    """Queries [start, end) attend to the keys in `keys` (ascending ranges; the last one ends at `end`)."""

    start: int
    end: int
    keys: tuple[tuple[int, int], ...]
    inner: np.ndarray
    """Bool (queries, queries), True = attend: which of the block's own tokens see which. All keys before
    them are ancestors of every query."""


@dataclass
class Pack:
    """One forward pass. N = computed tokens, S = rows that need logits, P = pairs, E = loss tokens."""

    ids: np.ndarray
    """(1, N) for a tree, (rows, length) for padded rows."""
    positions: np.ndarray
    """Same shape as `ids`."""
    attention_mask: np.ndarray | None
    """(rows, length) 1 on real tokens; None for a tree."""
    blocks: list[AttentionBlock]
    """How a tree attends; empty for padded rows."""
    items: list[int]
    """Which items (indices into the packed sequence) are here, in the order of their loss tokens."""
    rows: np.ndarray
    """(S,) indices into the flattened ids whose hidden state predicts a loss token, ascending."""
    pair_row: np.ndarray
    """(P,) index into `rows`, ascending."""
    pair_target: np.ndarray
    """(P,) the predicted id; (row, target) pairs are distinct."""
    entry_pair: np.ndarray
    """(E,) index into the pairs of each loss token, item by item."""
    entry_item: np.ndarray
    """(E,) index into `items`."""
    plain_tokens: int = 0
    """Tokens the same work takes without sharing."""

    @property
    def tokens(self) -> int:
        """Tokens computed, padding included."""
        return int(self.ids.size)


@dataclass
class _Tree:
    """A growing prefix tree in depth-first order."""

    ids: list[np.ndarray] = field(default_factory=list)
    paths: list[np.ndarray] = field(default_factory=list)
    items: list[int] = field(default_factory=list)
    size: int = 0
    plain: int = 0


def _common(a: np.ndarray, b: np.ndarray) -> int:
    """Length of the longest common prefix."""
    n = min(len(a), len(b))
    differs = np.flatnonzero(a[:n] != b[:n])
    return int(differs[0]) if len(differs) else n


def pack_tree(items: Sequence[Item], max_tokens: int) -> list[Pack]:
    """Packs of at most `max_tokens` distinct tokens (one record alone may be longer).

    Records are sorted by their ids, so neighbours share the most, the tree comes out in depth-first
    order, and the order in which records arrive does not matter.
    """
    order = sorted(range(len(items)), key=lambda i: (items[i].inputs.tolist(), i))
    packs: list[Pack] = []
    tree, previous = _Tree(), np.empty(0, dtype=np.int64)
    for index in order:
        inputs = items[index].inputs
        shared = _common(inputs, previous)
        if tree.size and tree.size + len(inputs) - shared > max_tokens:
            packs.append(_finish_tree(tree, items))
            tree, shared = _Tree(), 0
        fresh = np.arange(tree.size, tree.size + len(inputs) - shared)
        tree.paths.append(np.concatenate([tree.paths[-1][:shared], fresh]) if shared else fresh)
        tree.ids.append(inputs[shared:])
        tree.items.append(index)
        tree.size += len(fresh)
        tree.plain += len(inputs)
        previous = inputs
    if tree.size:
        packs.append(_finish_tree(tree, items))
    return packs


def _finish_tree(tree: _Tree, items: Sequence[Item]) -> Pack:
    parent = np.full(tree.size, -1, dtype=np.int64)
    depth = np.zeros(tree.size, dtype=np.int64)
    for path in tree.paths:
        parent[path[1:]] = path[:-1]
        depth[path] = np.arange(len(path))
    sources = [path[items[i].targets - 1] for path, i in zip(tree.paths, tree.items, strict=True)]
    return _with_pairs(
        Pack(
            ids=np.concatenate(tree.ids)[None],
            positions=depth[None],
            attention_mask=None,
            blocks=attention_blocks(parent),
            items=tree.items,
            plain_tokens=tree.plain,
            **_NO_PAIRS,
        ),
        sources,
        items,
    )


def pack_rows(items: Sequence[Item], max_tokens: int) -> list[Pack]:
    """Right-padded rows, rows x length at most `max_tokens` (one record alone may be longer)."""
    order = sorted(range(len(items)), key=lambda i: (len(items[i].inputs), items[i].inputs.tolist(), i))
    packs: list[Pack] = []
    batch: list[int] = []
    for index in order:
        if batch and (len(batch) + 1) * len(items[index].inputs) > max_tokens:
            packs.append(_finish_rows(batch, items))
            batch = []
        batch.append(index)
    if batch:
        packs.append(_finish_rows(batch, items))
    return packs


def _finish_rows(batch: list[int], items: Sequence[Item]) -> Pack:
    length = max(len(items[i].inputs) for i in batch)
    ids = np.zeros((len(batch), length), dtype=np.int64)
    mask = np.zeros((len(batch), length), dtype=np.int64)
    sources = []
    for row, index in enumerate(batch):
        inputs = items[index].inputs
        ids[row, : len(inputs)] = inputs
        mask[row, : len(inputs)] = 1
        sources.append(row * length + items[index].targets - 1)
    return _with_pairs(
        Pack(
            ids=ids,
            positions=np.broadcast_to(np.arange(length), ids.shape).copy(),
            attention_mask=mask,
            blocks=[],
            items=batch,
            plain_tokens=int(mask.sum()),
            **_NO_PAIRS,
        ),
        sources,
        items,
    )


_EMPTY = np.empty(0, dtype=np.int64)
_NO_PAIRS = {name: _EMPTY for name in ("rows", "pair_row", "pair_target", "entry_pair", "entry_item")}


def _with_pairs(pack: Pack, sources: list[np.ndarray], items: Sequence[Item]) -> Pack:
    """Fill in which hidden states predict what; equal (state, id) pairs are scored once."""
    targets = [items[i].ids[items[i].targets] for i in pack.items]
    source, target = np.concatenate(sources), np.concatenate(targets)
    pack.rows = np.unique(source)
    stacked = np.stack([np.searchsorted(pack.rows, source), target])
    pairs, inverse = np.unique(stacked, axis=1, return_inverse=True)
    pack.pair_row, pack.pair_target = pairs[0].copy(), pairs[1].copy()
    pack.entry_pair = inverse.reshape(-1)
    pack.entry_item = np.repeat(np.arange(len(pack.items)), [len(t) for t in targets])
    return pack


def attention_blocks(parent: np.ndarray, block: int = BLOCK) -> list[AttentionBlock]:
    """Cover a tree in depth-first order (`parent[i] < i`, -1 for roots) by dense attention calls.

    A call's queries are one unbranched run of at most `block` nodes, or whole neighbouring subtrees of at
    most `block` nodes together; its keys are their common ancestors and the queries themselves.
    """
    size = len(parent)
    end = np.arange(1, size + 1)
    for i in range(size - 1, -1, -1):  # a subtree is the range [i, end[i])
        if parent[i] >= 0:
            end[parent[i]] = max(end[parent[i]], end[i])
    branching = np.bincount(parent[parent >= 0], minlength=size) > 1
    runs: list[AttentionBlock] = []
    # (first child, end of the parent's subtree, ranges of the ancestors)
    stack: list[tuple[int, int, tuple[tuple[int, int], ...]]] = [(0, size, ())]
    while stack:
        node, stop, ancestors = stack.pop()
        if node >= stop:
            continue
        last = node
        while last < stop and int(end[last]) - node <= block:  # as many small subtrees as fit
            last = int(end[last])
        if last > node:
            runs.append(_block(parent, node, last, ancestors))
            stack.append((last, stop, ancestors))
            continue
        run = node + 1  # too big: its unbranched head, then its children
        while run < end[node] and run - node < block and parent[run] == run - 1 and not branching[run - 1]:
            run += 1
        runs.append(_block(parent, node, run, ancestors))
        stack.append((int(end[node]), stop, ancestors))
        stack.append((run, int(end[node]), _extend(ancestors, node, run)))
    return runs


def _extend(ranges: tuple[tuple[int, int], ...], start: int, end: int) -> tuple[tuple[int, int], ...]:
    if ranges and ranges[-1][1] == start:
        return (*ranges[:-1], (ranges[-1][0], end))
    return (*ranges, (start, end))


def _block(
    parent: np.ndarray, start: int, end: int, ancestors: tuple[tuple[int, int], ...]
) -> AttentionBlock:
    n = end - start
    inner = np.eye(n, dtype=bool)
    for i in range(1, n):  # a node sees what its parent sees, and itself
        p = int(parent[start + i]) - start
        if p >= 0:
            inner[i, : p + 1] |= inner[p, : p + 1]
    return AttentionBlock(start, end, _extend(ancestors, start, end), inner)
