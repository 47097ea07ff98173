from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from fncore import batch

ragged = st.lists(st.lists(st.integers(0, 99), max_size=9), max_size=10)
budgets = st.integers(1, 40)


def rows_of(ids):
    """A batch whose rows can be told apart: `row` is `[B]`, `per_token` and `wide` are `[B, T]` and `[B, T, 2]`."""
    tokens = batch.pad(ids)
    index = torch.arange(len(ids))
    per_token = index[:, None] * 1000 + torch.arange(tokens.shape[1])
    return {
        "tokens": tokens,
        "lengths": torch.tensor([len(row) for row in ids], dtype=torch.int64),
        "row": index,
        "per_token": per_token,
        "wide": per_token[..., None].expand(-1, -1, 2),
    }


@given(ragged, st.integers(-5, 5))
def test_pad_keeps_rows_and_fills_the_rest(ids, value):
    out = batch.pad(ids, value=value)
    width = max([1, *map(len, ids)])
    assert out.dtype == torch.int64
    assert out.shape == (len(ids), width)
    assert out.tolist() == [row + [value] * (width - len(row)) for row in ids]


def test_pad_by_hand():
    assert batch.pad([[1, 2, 3], [4]], value=9).tolist() == [[1, 2, 3], [4, 9, 9]]
    assert batch.pad([]).shape == (0, 1)
    assert batch.pad([[]], value=7).tolist() == [[7]]


@given(st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8)), max_size=6), st.integers(0, 8))
def test_spans_are_half_open(bounds, width):
    starts, ends = (torch.tensor([pair[side] for pair in bounds], dtype=torch.int64) for side in (0, 1))
    expected = [[start <= index < end for index in range(width)] for start, end in bounds]
    assert batch.spans(starts, ends, width=width).tolist() == expected


@given(ragged, budgets)
def test_split_puts_every_row_in_one_microbatch_with_all_its_tokens(ids, tokens):
    whole = rows_of(ids)
    parts = batch.split(whole, tokens=tokens)
    assert sorted(row for part in parts for row in part["row"].tolist()) == list(range(len(ids)))
    for part in parts:
        assert part.keys() == whole.keys()
        for position, row in enumerate(part["row"].tolist()):
            length = len(ids[row])
            assert part["lengths"][position] == length
            assert part["tokens"][position, :length].tolist() == ids[row]
            for name in ("per_token", "wide"):
                assert torch.equal(part[name][position, :length], whole[name][row, :length])


@given(ragged, budgets)
def test_split_keeps_the_budget_and_pads_to_the_longest_row_alone(ids, tokens):
    parts = batch.split(rows_of(ids), tokens=tokens)
    assert len(parts) >= 1
    for part in parts:
        rows, width = part["tokens"].shape
        assert width == max([1, *part["lengths"].tolist()])
        assert part["per_token"].shape == (rows, width)
        assert part["wide"].shape == (rows, width, 2)
        assert rows * width <= tokens or rows == 1
    assert all(len(part["row"]) for part in parts) or not ids


@given(ragged, budgets)
def test_neighbouring_microbatches_would_not_fit_together(ids, tokens):
    parts = batch.split(rows_of(ids), tokens=tokens)
    for left, right in pairwise(parts):
        shortest = max(1, int(right["lengths"].min()))
        assert (len(left["row"]) + 1) * shortest > tokens


def test_split_of_no_rows_is_one_empty_microbatch():
    (part,) = batch.split(rows_of([]), tokens=8)
    assert part["tokens"].shape == (0, 1)
    assert part["row"].shape == (0,)


def test_split_by_hand():
    parts = batch.split(rows_of([[1] * 4, [2], [3] * 4, [4] * 2, [5] * 9]), tokens=8)
    assert [part["row"].tolist() for part in parts] == [[1, 3], [0, 2], [4]]
    assert [part["tokens"].shape[1] for part in parts] == [2, 4, 9]


def test_take_narrows_per_token_arrays_alone():
    whole = {
        "tokens": torch.arange(12).view(3, 4),
        "lengths": torch.tensor([4, 2, 1]),
        "prompt": torch.arange(15).view(3, 5),
    }
    out = batch.take(whole, torch.tensor([2, 1]), width=2)
    assert out["tokens"].tolist() == [[8, 9], [4, 5]]
    assert out["lengths"].tolist() == [1, 2]
    assert out["prompt"].shape == (2, 5)
    assert whole["tokens"].shape == (3, 4)


def test_split_counts_the_padding_of_rows_without_tokens():
    parts = batch.split(rows_of([[]] * 9), tokens=4)
    assert [len(part["row"]) for part in parts] == [4, 4, 1]
