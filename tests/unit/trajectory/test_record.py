"""The token record: four arrays that can never differ in length, and a mask that says what was sampled."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiderl.trajectory.record import TokenRecord

spans = st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 9), min_size=1, max_size=5)), max_size=8)


@given(spans)
def test_c39_lengths_agree_and_mask_is_one_exactly_on_sampled_tokens(pieces):
    record = TokenRecord()
    expected = []
    for sampled, ids in pieces:
        if sampled:
            record.append_sampled(ids, [-1.0] * len(ids), [3] * len(ids))
        else:
            record.append_context(ids)
        expected += [int(sampled)] * len(ids)
    assert record.mask == expected
    assert len(record) == len(record.mask) == len(record.logprobs) == len(record.versions)
    assert [version >= 0 for version in record.versions] == [bool(mask) for mask in record.mask]
    assert sum(end - start for start, end in record.turns) == record.loss_tokens == record.sampled_tokens
    assert record.oldest_version == (3 if any(expected) else -1)


@pytest.mark.parametrize(
    ("ids", "logprobs", "versions"),
    [
        ([1, 2], [-1.0], [0, 0]),
        ([1], [-1.0], [0, 0]),
        ([], [], []),
        ([1], [math.nan], [0]),
        ([1], [-math.inf], [0]),
        ([1], [0.5], [0]),
        ([1], [-1.0], [-1]),
    ],
)
def test_c39_faulty_append_raises_and_leaves_the_record_as_it_was(ids, logprobs, versions):
    record = TokenRecord()
    record.append_context([5, 6], ["hash"])
    before = (
        list(record.ids),
        list(record.mask),
        list(record.logprobs),
        list(record.versions),
        list(record.turns),
    )
    with pytest.raises(ValueError):
        record.append_sampled(ids, logprobs, versions)
    assert before == (record.ids, record.mask, record.logprobs, record.versions, record.turns)


def test_masked_copy_carries_no_loss_and_knows_what_was_sampled():
    record = TokenRecord()
    record.append_context([1])
    record.append_sampled([2, 3], [-1.0, -1.0], [4, 5])
    masked = record.masked()
    assert (masked.loss_tokens, masked.sampled_tokens, masked.oldest_version) == (0, 2, 4)
    assert (record.loss_tokens, record.prompt_length) == (2, 1)


def test_images_are_named_in_the_order_of_their_placeholders():
    record = TokenRecord()
    record.append_context([1], ["a", "b"])
    record.append_context([2])
    record.append_context([3], ["a"])
    assert record.images == ["a", "b", "a"]
