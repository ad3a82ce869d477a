"""Prefix trees: every record is there, sees exactly its own past, and nothing is computed twice."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiderl.training.packing import Item, Pack, attention_blocks, pack_rows, pack_tree

IDS = st.lists(st.integers(0, 2), min_size=2, max_size=14)


@st.composite
def items(draw: st.DrawFn) -> list[Item]:
    made = []
    for ids in draw(st.lists(IDS, min_size=1, max_size=8)):
        positions = draw(st.sets(st.integers(1, len(ids) - 1), min_size=1))
        made.append(Item(np.array(ids), np.array(sorted(positions))))
    return made


def visible(pack: Pack) -> np.ndarray:
    """Bool (tokens, tokens): what the blocks let each token attend to."""
    n = pack.ids.shape[1]
    sees = np.zeros((n, n), dtype=bool)
    covered = np.zeros(n, dtype=int)
    for block in pack.blocks:
        keys = np.concatenate([np.arange(a, b) for a, b in block.keys])
        size = block.end - block.start
        assert keys[-size:].tolist() == list(range(block.start, block.end))
        mask = np.concatenate([np.ones((size, len(keys) - size), dtype=bool), block.inner], 1)
        sees[np.ix_(range(block.start, block.end), keys)] = mask
        covered[block.start : block.end] += 1
    assert (covered == 1).all()
    return sees


@settings(max_examples=150)
@given(items(), st.integers(1, 60))
def test_tree_holds_each_record_with_exactly_its_past(records: list[Item], budget: int) -> None:
    packs = pack_tree(records, budget)
    assert sorted(i for p in packs for i in p.items) == list(range(len(records)))
    for pack in packs:
        assert pack.tokens <= budget or len(pack.items) == 1
        sees, ids, depth = visible(pack), pack.ids[0], pack.positions[0]
        prefixes = set()
        for node in range(pack.tokens):
            past = np.flatnonzero(sees[node])
            assert depth[past].tolist() == list(range(int(depth[node]) + 1)), "ancestors, root to itself"
            prefixes.add(tuple(ids[past].tolist()))
        assert len(prefixes) == pack.tokens, "a prefix was computed twice"
        for local, index in enumerate(pack.items):
            item = records[index]
            entries = pack.entry_pair[pack.entry_item == local]
            assert pack.pair_target[entries].tolist() == item.ids[item.targets].tolist()
            for entry, position in zip(entries, item.targets, strict=True):
                past = np.flatnonzero(sees[pack.rows[pack.pair_row[entry]]])
                assert ids[past].tolist() == item.ids[:position].tolist()


@settings(max_examples=60)
@given(items(), st.randoms())
def test_order_of_records_does_not_matter(records: list[Item], random: object) -> None:
    shuffled = list(records)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    for one, two in zip(pack_tree(records, 20), pack_tree(shuffled, 20), strict=True):
        assert one.ids.tolist() == two.ids.tolist()
        assert one.positions.tolist() == two.positions.tolist()


@settings(max_examples=60)
@given(items(), st.integers(1, 60))
def test_padded_rows_hold_each_record(records: list[Item], budget: int) -> None:
    packs = pack_rows(records, budget)
    assert sorted(i for p in packs for i in p.items) == list(range(len(records)))
    for pack in packs:
        assert pack.attention_mask is not None
        assert pack.tokens <= budget or len(pack.items) == 1
        length = pack.ids.shape[1]
        for local, index in enumerate(pack.items):
            item = records[index]
            assert pack.ids[local, : len(item.inputs)].tolist() == item.inputs.tolist()
            assert pack.attention_mask[local].sum() == len(item.inputs)
            entries = pack.entry_pair[pack.entry_item == local]
            assert pack.pair_target[entries].tolist() == item.ids[item.targets].tolist()
            sources = pack.rows[pack.pair_row[entries]]
            assert sources.tolist() == (local * length + item.targets - 1).tolist()


@settings(max_examples=80)
@given(st.integers(1, 40), st.data(), st.integers(1, 12))
def test_blocks_cover_any_tree(size: int, data: st.DataObject, block: int) -> None:
    parent = [-1]
    for i in range(1, size):  # depth-first order: the parent is the last node or one of its ancestors
        path, node = [-1, i - 1], i - 1
        while parent[node] >= 0:
            node = parent[node]
            path.append(node)
        parent.append(data.draw(st.sampled_from(path)))
    expected = np.zeros((size, size), dtype=bool)
    for i in range(size):
        node = i
        while node >= 0:
            expected[i, node] = True
            node = parent[node]
    blocks = attention_blocks(np.array(parent), block)
    assert all(b.end - b.start <= block for b in blocks)
    empty = np.empty(0, dtype=np.int64)
    pack = Pack(np.zeros((1, size)), empty, None, blocks, [], empty, empty, empty, empty, empty)
    np.testing.assert_array_equal(visible(pack), expected)


def test_a_group_shares_its_prompt_and_a_batch_its_system_prompt() -> None:
    system, prompts = list(range(100)), [[200] * 10, [300] * 10]
    records = [
        Item(np.array(system + p + [r] * 5 + [7]), np.array([115]))
        for p in prompts
        for r in (400, 500, 600, 700)
    ]
    (pack,) = pack_tree(records, 10_000)
    assert pack.tokens == 100 + 2 * (10 + 4 * 5)
    assert pack.plain_tokens == 8 * 115


def test_equal_records_are_computed_once_and_each_keeps_its_loss_tokens() -> None:
    record = Item(np.array([1, 2, 3, 4]), np.array([2, 3]))
    (pack,) = pack_tree([record] * 3, 100)
    assert pack.tokens == 3
    assert len(pack.pair_row) == 2
    assert len(pack.entry_pair) == 6


@pytest.mark.parametrize("targets", [[], [0, 1], [1, 4]])
def test_wrong_loss_positions_are_refused(targets: list[int]) -> None:
    with pytest.raises(ValueError):
        Item(np.array([1, 2, 3]), np.array(targets, dtype=np.int64))
