import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fncore import optim, random, tree

seeds = st.integers(0, 2**31)
rates = st.floats(1e-4, 0.5)
STEPS = 10
DECAYED = ["layers.0.q", "layers.1.q"]


def draw(seed, label, dtype=torch.float64):
    """A tree of normal numbers, named as a decoder's."""
    key = random.fold_in(random.key(seed), label)
    make = lambda *shape: torch.empty(shape)
    layer = lambda width: {"q": make(width, 3), "q_bias": make(width), "attention_norm": make(3)}
    shapes = {"embed": make(5, 3), "norm": make(3), "layers": [layer(3), layer(4)]}
    fill = lambda name, leaf: random.normal(random.fold_in(key, name), tuple(leaf.shape), dtype=dtype)
    return tree.map_named(fill, shapes)


def ours(optimizer, seed, steps=STEPS):
    params = draw(seed, "params")
    state = optimizer.init(params)
    for step in range(steps):
        params, state = optimizer.update(draw(seed, step), state, params)
    return params, state


def theirs(kind, schedule, seed, *, weight_decay, **options):
    """The same steps by `torch.optim`, the schedule through `LambdaLR`."""
    named = tree.named_leaves(draw(seed, "params"))
    decayed = [leaf for name, leaf in named if name in DECAYED]
    others = [leaf for name, leaf in named if name not in DECAYED]
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = kind(groups, lr=1.0, **options)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
    for step in range(STEPS):
        for (_, leaf), grad in zip(named, tree.leaves(draw(seed, step)), strict=True):
            leaf.grad = grad
        optimizer.step()
        scheduler.step()
    return [leaf for _, leaf in named]


def close(left, right, rtol=1e-12, atol=1e-12):
    for a, b in zip(tree.leaves(left), tree.leaves(right), strict=True):
        torch.testing.assert_close(a, b, rtol=rtol, atol=atol)


def schedules(peak):
    return [
        optim.constant(peak),
        optim.warmup(optim.cosine(peak, total=STEPS - 3, final=peak / 7), steps=3),
        optim.warmup_stable_decay(peak, total=STEPS, warm=2, decay=4),
    ]


# ---- against torch.optim


@given(seeds, rates, st.integers(0, 2), st.sampled_from([0.0, 0.1]), st.sampled_from([(0.9, 0.999), (0.5, 0.8)]))
def test_adamw_takes_the_steps_of_torch(seed, peak, which, weight_decay, betas):
    schedule = schedules(peak)[which]
    params, state = ours(optim.adamw(schedule, betas=betas, eps=1e-6, weight_decay=weight_decay), seed)
    expected = theirs(torch.optim.AdamW, schedule, seed, weight_decay=weight_decay, betas=betas, eps=1e-6)
    close(params, expected)
    assert int(state.step) == STEPS


@given(seeds, rates, st.integers(0, 2), st.sampled_from([0.0, 0.1]), st.sampled_from([0.0, 0.9]))
def test_sgd_takes_the_steps_of_torch(seed, peak, which, weight_decay, momentum):
    schedule = schedules(peak)[which]
    params, _ = ours(optim.sgd(schedule, momentum=momentum, weight_decay=weight_decay), seed)
    close(params, theirs(torch.optim.SGD, schedule, seed, weight_decay=weight_decay, momentum=momentum))


def test_first_steps_by_hand():
    """Adam's first step is lr in the direction of the sign; SGD's is lr times the gradient."""
    params, grads = {"w": torch.tensor([[1.0, -2.0]]).double()}, {"w": torch.tensor([[0.5, -4.0]]).double()}
    for optimizer, expected in (
        (optim.adamw(0.1, weight_decay=0.0, eps=0.0), [[0.9, -1.9]]),
        (optim.adamw(0.1, weight_decay=0.5, eps=0.0), [[0.85, -1.8]]),
        (optim.sgd(0.1), [[0.95, -1.6]]),
        (optim.sgd(0.1, weight_decay=0.5), [[0.9, -1.5]]),
    ):
        got, _ = optimizer.update(grads, optimizer.init(params), params)
        torch.testing.assert_close(got["w"], torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=0)


# ---- pure and donated


@given(seeds, rates, st.integers(0, 2), st.sampled_from([0.0, 0.1]))
def test_donated_and_pure_agree(seed, peak, which, weight_decay):
    options = dict(lr=schedules(peak)[which], weight_decay=weight_decay)
    pure, donated = (ours(optim.adamw(**options, donate=donate), seed) for donate in (False, True))
    close(pure, donated)


def test_donated_writes_into_what_it_is_given():
    optimizer = optim.adamw(0.1, donate=True)
    params = draw(0, "params")
    state = optimizer.init(params)
    got, new_state = optimizer.update(draw(0, 0), state, params)
    assert all(a is b for a, b in zip(tree.leaves(got), tree.leaves(params), strict=True))
    assert all(a is b for a, b in zip(tree.leaves(new_state.mean), tree.leaves(state.mean), strict=True))
    assert (int(state.step), int(new_state.step)) == (0, 1)


@pytest.mark.parametrize("params", [{"matrix": torch.ones(2, 2)}, {"vector": torch.ones(2)}], ids=["matrix", "vector"])
def test_donated_serves_a_tree_of_one_kind_of_leaf(params):
    """All decayed, as in LoRA, or none of them."""
    pure, donated = optim.adamw(0.1), optim.adamw(0.1, donate=True)
    expected, _ = pure.update(params, pure.init(params), params)
    got, _ = donated.update(params, donated.init(params), tree.copy(params))
    close(got, expected, rtol=1e-6)


@pytest.mark.parametrize(
    "optimizer",
    [optim.adamw(0.1, weight_decay=0.1), optim.sgd(0.1, momentum=0.9, weight_decay=0.1)],
    ids=["adamw", "sgd"],
)
def test_pure_update_leaves_its_inputs_alone_and_repeats_itself(optimizer):
    params = draw(3, "params")
    _, state = ours(optimizer, 3, steps=2)
    inputs = (draw(3, 0), state, params)
    before = tree.copy(inputs)
    versions = [leaf._version for leaf in tree.leaves(inputs)]
    first, second = optimizer.update(*inputs), optimizer.update(*inputs)
    assert [leaf._version for leaf in tree.leaves(inputs)] == versions
    close(inputs, before, rtol=0, atol=0)
    close(first, second, rtol=0, atol=0)
    given_storage = {leaf.data_ptr() for leaf in tree.leaves(inputs)}
    assert not given_storage & {leaf.data_ptr() for leaf in tree.leaves(first)}


# ---- what decays


@pytest.mark.parametrize("make", [optim.adamw, optim.sgd])
def test_matrices_alone_decay(make):
    params = draw(1, "params")
    optimizer = make(0.1, weight_decay=0.5)
    got, _ = optimizer.update(tree.zeros_like(params), optimizer.init(params), params)
    for (name, before), after in zip(tree.named_leaves(params), tree.leaves(got), strict=True):
        torch.testing.assert_close(after, before * (0.95 if name in DECAYED else 1.0), rtol=1e-12, atol=0)


@pytest.mark.parametrize("donate", [False, True])
def test_the_caller_chooses_what_decays(donate):
    params = draw(1, "params")
    optimizer = optim.adamw(0.1, weight_decay=0.5, decays=lambda name, leaf: name == "norm", donate=donate)
    got, _ = optimizer.update(tree.zeros_like(params), optimizer.init(params), tree.copy(params))
    for (name, before), after in zip(tree.named_leaves(params), tree.leaves(got), strict=True):
        torch.testing.assert_close(after, before * (0.95 if name == "norm" else 1.0), rtol=1e-12, atol=0)


# ---- clipping


@given(seeds, st.floats(0.01, 20.0))
def test_clip_is_that_of_torch(seed, max_norm):
    grads = draw(seed, "grads")
    leaves = [torch.zeros_like(leaf) for leaf in tree.leaves(grads)]
    for leaf, value in zip(leaves, tree.leaves(grads), strict=True):
        leaf.grad = value.clone()
    clipped, norm = optim.clip_by_global_norm(grads, max_norm)
    torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(leaves, max_norm), rtol=1e-12, atol=0)
    close(clipped, [leaf.grad for leaf in leaves])
    assert tree.global_norm(clipped) <= max_norm * (1 + 1e-12)
    if norm < max_norm - 1e-5:
        close(clipped, grads, rtol=0, atol=0)
    close(grads, draw(seed, "grads"), rtol=0, atol=0)


def test_clip_by_hand():
    clipped, norm = optim.clip_by_global_norm({"a": torch.tensor([3.0]), "b": torch.tensor([4.0])}, 1.0)
    assert norm.item() == 5.0
    torch.testing.assert_close(torch.cat(tree.leaves(clipped)), torch.tensor([0.6, 0.8]))
    assert optim.clip_by_global_norm({"a": torch.zeros(2)}, 1.0)[0]["a"].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_no_number_shows_in_the_norm(bad):
    _, norm = optim.clip_by_global_norm({"a": torch.tensor([1.0, bad]), "b": torch.tensor([4.0])}, 1.0)
    assert not norm.isfinite()


# ---- schedules


@given(rates, st.integers(2, 50), st.floats(0.0, 0.01))
def test_linear_and_cosine_start_at_the_peak_and_end_at_final(peak, total, final):
    for shape in (optim.linear, optim.cosine):
        schedule = shape(peak, total=total, final=final)
        assert schedule(0) == pytest.approx(peak, rel=1e-12)
        assert schedule(total - 1) == pytest.approx(final, abs=1e-15)
        assert schedule(total + 5) == pytest.approx(final, abs=1e-15)  # and stay there


def test_schedules_by_hand():
    line, half = optim.linear(1.0, total=5, final=0.2), optim.cosine(1.0, total=5, final=0.2)
    assert [line(step) for step in range(5)] == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2])
    assert half(2) == pytest.approx(0.6)
    assert half(1) == pytest.approx(0.2 + 0.8 * 0.5 * (1 + math.sqrt(0.5)))
    rise = optim.warmup(optim.constant(1.0), steps=4)
    assert [rise(step) for step in range(6)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0])
    wsd = optim.warmup_stable_decay(1.0, total=8, warm=2, decay=3, final=0.1)
    assert [wsd(step) for step in range(8)] == pytest.approx([1 / 3, 2 / 3, 1.0, 1.0, 1.0, 0.7, 0.4, 0.1])


@given(st.integers(0, 10), st.integers(1, 10), st.integers(0, 10))
def test_warmup_stable_decay_rises_holds_and_falls(warm, stable, decay):
    total = warm + stable + decay
    rates = [optim.warmup_stable_decay(1.0, total=total, warm=warm, decay=decay)(step) for step in range(total)]
    assert rates[:warm] == pytest.approx([(step + 1) / (warm + 1) for step in range(warm)])
    assert rates[warm : warm + stable] == [1.0] * stable
    assert rates[warm + stable :] == pytest.approx([1 - (step + 1) / decay for step in range(decay)], abs=1e-12)


def test_warmup_stable_decay_rejects_parts_longer_than_the_whole():
    with pytest.raises(ValueError, match="exceed"):
        optim.warmup_stable_decay(1.0, total=5, warm=3, decay=3)


@given(st.sampled_from(["constant", "linear", "cosine", "wsd"]), st.integers(0, 9), st.integers(20, 60))
def test_named_schedules_have_the_first_and_last_rate_that_they_promise(name, warm, total):
    schedule = optim.named_schedule(name, 0.3, total=total, warm=warm)
    assert schedule(0) == pytest.approx(0.3 / (warm + 1))
    assert schedule(warm) == pytest.approx(0.3)
    assert max(schedule(step) for step in range(total)) == pytest.approx(0.3)
    assert schedule(total - 1) == pytest.approx(0.3 if name == "constant" else 0.0, abs=1e-15)
    assert schedule(total - 2) > 0.0


def test_an_unknown_schedule_is_refused():
    with pytest.raises(KeyError):
        optim.named_schedule("exponential", 0.1, total=10)
