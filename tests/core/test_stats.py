import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fncore import stats
from fncore.stats import Peak, Stat

pairs = st.lists(st.tuples(st.floats(-100, 100, width=32), st.booleans()), max_size=12)


def columns(rows):
    values = torch.tensor([value for value, _ in rows], dtype=torch.float32)
    return values, torch.tensor([kept for _, kept in rows], dtype=torch.bool)


def metrics(rows):
    values, mask = columns(rows)
    total = torch.where(mask, values, 0.0).double().sum()
    return {"sum": total, "mean": stats.mean(values, mask), "max": stats.peak(values, mask)}


@given(pairs, st.integers(0, 12))
def test_parts_add_up_to_the_whole(rows, cut):
    whole = stats.report(metrics(rows))
    parts = stats.report(stats.add(metrics(rows[:cut]), metrics(rows[cut:])))
    assert whole == pytest.approx(parts, rel=1e-12, abs=1e-12)


@given(pairs)
def test_report_is_plain_arithmetic_over_what_is_kept(rows):
    kept = [value for value, keep in rows if keep]
    got = stats.report(metrics(rows))
    assert got["sum"] == pytest.approx(sum(kept), rel=1e-12, abs=1e-9)
    assert got["mean"] == pytest.approx(sum(kept) / len(kept) if kept else 0.0, rel=1e-12, abs=1e-9)
    assert got["max"] == max(kept, default=0.0)


def test_mean_of_unequal_parts_is_no_mean_of_means():
    left = stats.mean(torch.tensor([1.0, 1.0, 1.0]), torch.ones(3, dtype=torch.bool))
    right = stats.mean(torch.tensor([5.0]), torch.ones(1, dtype=torch.bool))
    assert stats.add({"x": left}, {"x": right})["x"].mean() == 2.0


def test_masked_values_have_no_say_even_where_they_are_not_numbers():
    values = torch.tensor([math.nan, 2.0, math.inf])
    mask = torch.tensor([False, True, False])
    assert stats.mean(values, mask).mean() == 2.0
    assert stats.peak(values, mask).value.item() == 2.0


def test_nothing_counted_is_zero_and_the_largest_of_negatives_is_negative():
    nothing = torch.zeros(2, dtype=torch.bool)
    assert stats.report({"m": stats.mean(torch.ones(2), nothing), "p": stats.peak(torch.ones(2), nothing)}) == {
        "m": 0.0,
        "p": 0.0,
    }
    assert stats.report({"p": stats.peak(torch.tensor([-3.0, -2.0]), ~nothing)}) == {"p": -2.0}


def test_a_plain_number_is_reported_as_it_is():
    got = stats.report({"loss": torch.tensor(-math.inf), "nan": torch.tensor(math.nan), "x": torch.tensor(1.5)})
    assert got["loss"] == -math.inf
    assert math.isnan(got["nan"])
    assert got["x"] == 1.5


def test_means_are_kept_in_float64_and_carry_no_graph():
    values = torch.ones(3, requires_grad=True)
    stat = stats.mean(values, torch.ones(3, dtype=torch.bool))
    assert stat.total.dtype == stat.number.dtype == torch.float64
    assert not stat.total.requires_grad
    assert not stats.peak(values, torch.ones(3, dtype=torch.bool)).value.requires_grad


def test_different_names_do_not_add():
    with pytest.raises(ValueError, match="'y'"):
        stats.add({"x": torch.zeros(())}, {"x": torch.zeros(()), "y": torch.zeros(())})


def test_kinds_add_by_their_own_rule():
    left = {"s": torch.tensor(1.0), "m": Stat(torch.tensor(1.0), torch.tensor(2.0)), "p": Peak(torch.tensor(3.0))}
    right = {"s": torch.tensor(10.0), "m": Stat(torch.tensor(5.0), torch.tensor(1.0)), "p": Peak(torch.tensor(2.0))}
    assert stats.report(stats.add(left, right)) == {"s": 11.0, "m": 2.0, "p": 3.0}
