import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fncore import random

seeds = st.integers(-(2**63), 2**63 - 1)
ROOT = random.key(2024)


def every_draw(key):
    """One array of each kind for one key `[..., 2]`."""
    return (
        random.bits(key, (5,)),
        random.uniform(key, (2, 3)),
        random.uniform(key, (3,), dtype=torch.float64),
        random.normal(key, (4,)),
        random.bernoulli(key, 0.4, (6,)),
        random.split(key, 3),
        random.fold_in(key, "purpose"),
        random.categorical(key, LOGITS.expand(*key.shape[:-1], -1)),
    )


LOGITS = torch.tensor([0.3, -1.0, 2.0, -torch.inf, 0.5])


def flips(changed):
    """How often each of 32 output bits differs: words `[N]` give `[32]`."""
    return ((changed[:, None] >> torch.arange(32)) & 1).double().mean(dim=0)


# ---- the generator


@given(seeds)
def test_uniform_has_the_moments_of_the_uniform_distribution(seed):
    x = random.uniform(random.key(seed), (1 << 16,), dtype=torch.float64)
    root = math.sqrt(len(x))
    assert x.min() >= 0
    assert x.max() < 1
    assert abs(x.mean() - 1 / 2) < 5 * math.sqrt(1 / 12) / root
    assert abs(x.var() - 1 / 12) < 5 * math.sqrt(1 / 180) / root
    centred = (x - 0.5) * math.sqrt(12)
    for lag in (1, 2, 3, 4, 8, 32, 256):
        assert abs((centred[:-lag] * centred[lag:]).mean()) < 5 / root


@given(seeds)
def test_uniform_fills_a_grid_of_pairs_evenly(seed):
    """Chi-square over 16 by 16 cells of consecutive numbers: 255 degrees of freedom, six standard deviations."""
    x = random.uniform(random.key(seed), (1 << 15, 2))
    cells = torch.bincount(((x * 16).long() * torch.tensor([16, 1])).sum(-1), minlength=256).double()
    expected = len(x) / 256
    chi = ((cells - expected) ** 2 / expected).sum()
    assert abs(chi - 255) < 6 * math.sqrt(2 * 255)


@given(seeds)
def test_sibling_keys_give_uncorrelated_streams(seed):
    x = random.uniform(random.split(random.key(seed), 64), (1024,), dtype=torch.float64)
    correlation = torch.corrcoef(x)
    correlation.fill_diagonal_(0.0)
    assert correlation.abs().max() < 6.5 / math.sqrt(1024)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_uniform_stays_below_one_in_every_dtype(dtype):
    x = random.uniform(ROOT, (1 << 16,), dtype=dtype)
    assert x.dtype == dtype
    assert x.min() >= 0
    assert x.max() < 1
    assert abs(x.double().mean() - 0.5) < 0.01
    assert random.normal(ROOT, (1 << 16,), dtype=dtype).isfinite().all()


def test_every_bit_of_data_flips_every_bit_of_the_key():
    data = random.bits(random.fold_in(ROOT, "data"), (4096, 2))
    data = (data[:, 0] << 32) | data[:, 1]
    before = random.fold_in(ROOT, data)
    for bit in range(64):
        after = random.fold_in(ROOT, data ^ torch.tensor(1 << bit if bit < 63 else -(2**63)))
        for word in (0, 1):
            assert (flips((before ^ after)[:, word]) - 0.5).abs().max() < 0.05, f"input bit {bit}, word {word}"


def test_every_bit_of_the_key_flips_every_bit_of_the_output():
    keys = random.split(ROOT, 4096)
    for word in (0, 1):
        for bit in range(32):
            other = keys.clone()
            other[:, word] ^= 1 << bit
            assert (flips(random.bits(keys) ^ random.bits(other)) - 0.5).abs().max() < 0.05, f"word {word}, bit {bit}"
            children = random.fold_in(keys, 7) ^ random.fold_in(other, 7)
            assert (flips(children[:, 0]) - 0.5).abs().max() < 0.05, f"word {word}, bit {bit}"
            assert (flips(children[:, 1]) - 0.5).abs().max() < 0.05, f"word {word}, bit {bit}"


def test_keys_of_seeds_purposes_steps_and_ids_never_collide():
    ids = torch.arange(500)
    purposes = ("data", "dropout", "sample", "order", "init")
    keys = [
        random.fold_in(random.fold_in(random.fold_in(random.key(seed), step), purpose), ids)
        for seed in (*range(10), -1, 2**32, 2**63 - 1)
        for step in range(4)
        for purpose in purposes
    ]
    keys = torch.cat([*keys, torch.stack([random.key(seed) for seed in range(1000)])])
    assert len(keys.unique(dim=0)) == len(keys)
    for word in (0, 1):  # each word alone repeats about as rarely as chance has it
        chance = len(keys) ** 2 / 2**33
        assert len(keys) - len(keys[:, word].unique()) < chance + 6 * math.sqrt(chance) + 6


def test_order_of_derivation_matters():
    assert not torch.equal(random.fold_in(random.fold_in(ROOT, 1), 2), random.fold_in(random.fold_in(ROOT, 2), 1))


@given(seeds, st.integers(-(2**63), 2**63 - 1))
def test_words_stay_in_32_bits_and_repeat(seed, data):
    key = random.fold_in(random.key(seed), data)
    assert key.dtype == torch.int64
    assert key.min() >= 0
    assert key.max() < 2**32
    assert torch.equal(key, random.fold_in(random.key(seed), data))
    assert torch.equal(key, random.fold_in(random.key(seed), torch.tensor(data)))


# ---- the same bits, however they are asked for


@given(seeds, st.integers(1, 6))
def test_batched_draws_equal_single_ones(seed, rows):
    keys = random.split(random.key(seed), rows)
    for together, *alone in zip(every_draw(keys), *(every_draw(key) for key in keys)):
        assert torch.equal(together, torch.stack(alone))


@given(seeds)
def test_two_leading_dimensions_equal_one(seed):
    keys = random.split(random.key(seed), 6)
    for flat, square in zip(every_draw(keys), every_draw(keys.view(2, 3, 2))):
        assert torch.equal(flat, square.flatten(0, 1))


@given(seeds, st.integers(1, 6))
def test_vmap_gives_the_same_bits(seed, rows):
    keys = random.split(random.key(seed), rows)
    for together, mapped in zip(every_draw(keys), torch.func.vmap(every_draw)(keys)):
        assert torch.equal(together, mapped)


@given(seeds)
def test_draws_inside_a_gradient_are_the_same_bits(seed):
    key = random.key(seed)
    _, inside = torch.func.grad(lambda x: (x * 2, every_draw(key)), has_aux=True)(torch.tensor(1.0))
    for eager, traced in zip(every_draw(key), inside):
        assert torch.equal(eager, traced)


def test_no_global_generator_is_read():
    state = torch.random.get_rng_state()
    first = every_draw(ROOT)
    assert torch.equal(state, torch.random.get_rng_state())
    torch.manual_seed(1)
    for a, b in zip(first, every_draw(ROOT)):
        assert torch.equal(a, b)


# ---- distributions


WIDTHS = st.integers(2, 9) | st.integers(120, 400)  # some fill no block of classes, some several


@given(seeds, WIDTHS)
def test_categorical_frequencies_match_softmax(seed, classes):
    """Chi-square, with one class ruled out that must then never be drawn."""
    logits = random.normal(random.key(seed), (classes,)).clamp(-2, 2)
    hole = seed % classes
    logits[hole] = -torch.inf
    num = 1 << 13
    counts = torch.bincount(
        random.categorical(random.split(random.key(seed), num), logits.expand(num, -1)), minlength=classes
    )
    expected = logits.double().softmax(-1) * num
    assert counts[hole] == 0
    kept = expected > 0
    chi = ((counts - expected)[kept] ** 2 / expected[kept]).sum()
    freedom = int(kept.sum()) - 1
    assert chi < freedom + 6 * math.sqrt(2 * freedom) + 12


@given(seeds, st.integers(1, 8), WIDTHS)
def test_categorical_never_draws_what_has_no_probability(seed, rows, classes):
    allowed = random.bernoulli(random.fold_in(random.key(seed), "allowed"), 0.3, (rows, classes))
    allowed[:, seed % classes] = True
    logits = torch.where(allowed, random.normal(random.key(seed), (rows, classes)) * 10, -torch.inf)
    drawn = random.categorical(random.split(random.key(seed), rows), logits)
    assert allowed[torch.arange(rows), drawn].all()


@pytest.mark.parametrize("around", [1, 127, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_categorical_at_the_ends_of_the_unit_interval(dtype, around, monkeypatch):
    """u = 0 takes the first class that is possible, u just below 1 the last, impossible ones on both sides."""
    wall = [-torch.inf] * around
    logits = torch.tensor([[*wall, 0.1, *wall, 0.7, *wall]], dtype=dtype)
    first, last = around, 2 * around + 1
    for number, expected in ((0.0, first), (1 - torch.finfo(dtype).eps / 2, last), (1.0, last)):  # 1: by rounding
        monkeypatch.setattr(random, "uniform", lambda *_, number=number, **__: torch.full((1, 1), number, dtype=dtype))
        assert random.categorical(ROOT[None], logits).tolist() == [expected]


@pytest.mark.parametrize("classes", [5, 300])
def test_categorical_stays_in_range_where_logits_are_not_numbers(classes):
    drawn = random.categorical(random.split(ROOT, 4), torch.full((4, classes), torch.nan))
    assert ((drawn >= 0) & (drawn < classes)).all()


@given(seeds, st.integers(0, 200))
def test_permutation_holds_every_index_once(seed, num):
    assert random.permutation(random.key(seed), num).sort().values.tolist() == list(range(num))


def test_every_order_of_three_is_as_likely():
    orders = torch.stack([random.permutation(key, 3) for key in random.split(ROOT, 3000)])
    counts = torch.bincount((orders * torch.tensor([9, 3, 1])).sum(-1)).double()
    counts = counts[counts > 0]
    assert len(counts) == 6
    assert ((counts - 500) ** 2 / 500).sum() < 25  # 5 degrees of freedom


@given(seeds, st.sampled_from([torch.float32, torch.float64]))
def test_normal_has_the_moments_of_the_normal_distribution(seed, dtype):
    x = random.normal(random.key(seed), (1 << 16,), dtype=dtype).double()
    root = math.sqrt(len(x))
    for power, moment, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs((x**power).mean() - moment) < 5.5 * math.sqrt(variance) / root, f"moment {power}"
    assert abs((x.abs() < 1).double().mean() - 0.6826895) < 5 * 0.4655 / root


@given(seeds, st.floats(0.0, 1.0))
def test_bernoulli_is_true_with_its_probability(seed, probability):
    hits = random.bernoulli(random.key(seed), probability, (1 << 14,)).double().mean()
    assert abs(hits - probability) <= 5.5 * math.sqrt(probability * (1 - probability)) / 128 + 1e-4


def test_bernoulli_of_one_and_zero_are_certain(monkeypatch):
    extremes = torch.tensor([0, 1, 2**31, 2**32 - 1])
    monkeypatch.setattr(random, "bits", lambda *_: extremes)
    assert random.bernoulli(ROOT, 1.0, (4,)).all()
    assert not random.bernoulli(ROOT, 0.0, (4,)).any()
