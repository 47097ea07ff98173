import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fncore import nn, random

seeds = st.integers(0, 2**31)
heads = st.sampled_from([(1, 1), (2, 2), (4, 2), (6, 2), (4, 1)])
kernels = pytest.mark.parametrize("kernel", ["fused", "math"])


def arrays(seed, shapes, dtype=torch.float64):
    keys = random.split(random.key(seed), len(shapes))
    return [random.normal(key, shape, dtype=dtype) for key, shape in zip(keys, shapes)]


def problem(seed, sizes, queries=4, slots=5, rows=2, width=4):
    """q, k, v and a random mask in which some queries see nothing."""
    query_heads, kv_heads = sizes
    q, k, v = arrays(
        seed, [(rows, queries, query_heads, width), (rows, kv_heads, slots, width), (rows, kv_heads, slots, width)]
    )
    mask = random.bernoulli(random.fold_in(random.key(seed), "mask"), 0.4, (rows, queries, slots))
    mask[0, 0] = False
    return q, k, v, mask


def attend(q, k, v, mask):
    """Attention by loops: one query, one head, one softmax at a time."""
    out = torch.zeros_like(q)
    group = q.shape[2] // k.shape[1]
    for b, t, h in torch.cartesian_prod(*(torch.arange(n) for n in q.shape[:3])).tolist():
        seen = mask[b, t].nonzero().flatten()
        if len(seen):
            weights = (k[b, h // group, seen] @ q[b, t, h] / math.sqrt(q.shape[-1])).softmax(-1)
            out[b, t, h] = weights @ v[b, h // group, seen]
    return out


# ---- attention


@kernels
@given(seed=seeds, sizes=heads)
def test_attention_is_a_softmax_over_what_the_mask_allows(kernel, seed, sizes):
    q, k, v, mask = problem(seed, sizes)
    torch.testing.assert_close(
        nn.attention(q, k, v, mask=mask, kernel=kernel), attend(q, k, v, mask), rtol=1e-12, atol=1e-12
    )


@kernels
@given(seed=seeds, sizes=heads)
def test_without_a_mask_attention_is_causal(kernel, seed, sizes):
    q, k, v, _ = problem(seed, sizes, queries=5)
    causal = torch.ones(5, 5, dtype=torch.bool).tril().expand(2, 5, 5)
    out = nn.attention(q, k, v, kernel=kernel)
    torch.testing.assert_close(out, attend(q, k, v, causal), rtol=1e-12, atol=1e-12)


@given(seeds, heads)
def test_kernels_agree_in_value_and_gradient(seed, sizes):
    q, k, v, mask = problem(seed, sizes)
    (weight,) = arrays(seed + 1, [q.shape])

    def run(kernel):
        inputs = [x.clone().requires_grad_() for x in (q, k, v)]
        out = nn.attention(*inputs, mask=mask, kernel=kernel)
        return out, *torch.autograd.grad((out * weight).sum(), inputs)

    for fused, plain in zip(run("fused"), run("math")):
        torch.testing.assert_close(fused, plain, rtol=1e-11, atol=1e-12)


@kernels
@given(seed=seeds, sizes=heads)
def test_grouped_heads_equal_repeated_ones(kernel, seed, sizes):
    q, k, v, mask = problem(seed, sizes)
    repeats = sizes[0] // sizes[1]
    repeated = nn.attention(
        q, k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1), mask=mask, kernel=kernel
    )
    torch.testing.assert_close(nn.attention(q, k, v, mask=mask, kernel=kernel), repeated, rtol=1e-12, atol=1e-12)


@kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_a_query_that_sees_nothing_gets_zero_and_finite_gradients(kernel, dtype):
    q, k, v, mask = problem(0, (4, 2))
    inputs = [x.to(dtype).requires_grad_() for x in (q, k, v)]
    out = nn.attention(*inputs, mask=mask, kernel=kernel)
    grads = torch.autograd.grad(out.float().square().sum(), inputs)
    assert torch.equal(out[0, 0], torch.zeros_like(out[0, 0]))
    assert out[1].abs().sum() > 0
    assert torch.equal(grads[0][0, 0], torch.zeros_like(out[0, 0]))
    assert all(grad.isfinite().all() for grad in grads)


@kernels
def test_masked_slots_have_no_say(kernel):
    q, k, v, mask = problem(5, (4, 2))
    mask[:, :, 3] = False
    before = nn.attention(q, k, v, mask=mask, kernel=kernel)
    k[:, :, 3], v[:, :, 3] = 50.0, -1e4
    assert torch.equal(before, nn.attention(q, k, v, mask=mask, kernel=kernel))


# ---- rope


@given(seeds, st.integers(0, 40), st.integers(0, 40), st.integers(0, 100))
def test_rope_scores_depend_on_distance_alone(seed, left, right, shift):
    q, k = arrays(seed, [(1, 1, 1, 8), (1, 1, 1, 8)])
    frequencies = nn.rope_frequencies(8, theta=10_000.0)

    def turn(x, position):
        angles = position * frequencies[None, None]
        return nn.rope(x, angles.cos(), angles.sin())

    score = lambda a, b: (turn(q, a) * turn(k, b)).sum()
    torch.testing.assert_close(score(left, right), score(left + shift, right + shift), rtol=1e-10, atol=1e-11)
    torch.testing.assert_close(turn(q, left).norm(), q.norm(), rtol=1e-12, atol=0)
    torch.testing.assert_close(turn(q, 0), q, rtol=0, atol=0)


def test_rope_by_hand():
    """A quarter turn takes channel i to channel i + C/2, and that one to minus channel i."""
    x = torch.tensor([1.0, 2.0, 3.0, 4.0]).view(1, 1, 1, 4)
    cos, sin = torch.tensor([0.0, 1.0]).view(1, 1, 2), torch.tensor([1.0, 0.0]).view(1, 1, 2)
    assert nn.rope(x, cos, sin).flatten().tolist() == [-3.0, 2.0, 1.0, 4.0]
    expected = torch.tensor([1.0, 0.1], dtype=torch.float64)
    torch.testing.assert_close(nn.rope_frequencies(4, theta=100.0), expected)


@given(st.floats(1.5, 32), st.floats(0.5, 2), st.floats(2.5, 8), st.integers(64, 8192))
def test_llama3_scaling_is_continuous_and_right_at_both_ends(factor, low, high, length):
    scaling = nn.Llama3Scaling(factor, low, high, length)
    frequency = lambda turns: torch.tensor(turns, dtype=torch.float64) * 2 * math.pi / length
    for turns, expected in ((low * 0.5, 1 / factor), (low, 1 / factor), (high, 1.0), (high * 2, 1.0)):
        ratio = scaling(frequency(turns)) / frequency(turns)
        torch.testing.assert_close(ratio.item(), expected, rtol=1e-9, atol=0)
    middle = frequency((low + high) / 2)
    torch.testing.assert_close((scaling(middle) / middle).item(), (1 + 1 / factor) / 2, rtol=1e-9, atol=0)
    grid = frequency(torch.linspace(low / 2, high * 2, 2001, dtype=torch.float64).tolist())
    scaled = scaling(grid)
    assert (scaled.diff() > 0).all()
    assert (scaled.diff() < 20 * grid.diff().max() * (1 + high / (high - low))).all()


def test_llama3_scaling_is_that_of_llama_3_1():
    scaling = nn.Llama3Scaling(8.0, 1.0, 4.0, 8192)
    plain = nn.rope_frequencies(128, theta=500_000.0)
    scaled = nn.rope_frequencies(128, theta=500_000.0, scaling=scaling)
    for before, after in zip(plain.tolist(), scaled.tolist()):
        wave = 2 * math.pi / before
        if wave > 8192 / 1.0:
            expected = before / 8
        elif wave < 8192 / 4.0:
            expected = before
        else:
            smooth = (8192 / wave - 1.0) / (4.0 - 1.0)
            expected = (1 - smooth) * before / 8 + smooth * before
        assert after == pytest.approx(expected, rel=1e-12)


# ---- norm, mlp, dropout


def test_rms_norm_by_hand():
    got = nn.rms_norm(torch.tensor([[3.0, 4.0, 0.0, 0.0], [0.0] * 4]), torch.tensor([1.0, 2.0, 3.0, 4.0]), eps=0.25)
    root = math.sqrt(25 / 4 + 0.25)
    torch.testing.assert_close(got, torch.tensor([[3 / root, 8 / root, 0.0, 0.0], [0.0] * 4]))


@given(seeds)
def test_rms_norm_in_bfloat16_is_rounded_once_at_the_end(seed):
    (x,) = arrays(seed, [(4, 64)], torch.float32)
    x, weight = (x * 30).bfloat16(), torch.linspace(0.1, 2, 64)
    got = nn.rms_norm(x, weight, eps=1e-6)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got, nn.rms_norm(x.float(), weight, eps=1e-6).bfloat16(), rtol=0, atol=0)


def test_swiglu_by_hand():
    """gate 2, up 3: silu(2) * 3, and down doubles it."""
    one = torch.ones(1, 1)
    got = nn.swiglu(one, gate=2 * one, up=3 * one, down=2 * one)
    assert got.item() == pytest.approx(2 * 3 * 2 / (1 + math.exp(-2)))


@given(seeds, st.integers(1, 4), st.integers(1, 6), st.integers(0, 4))
def test_dropout_of_a_token_depends_on_its_key_alone(seed, rows, width, extra):
    keys = random.split(random.split(random.key(seed), rows), width + extra)
    x = torch.ones(rows, width + extra, 16)
    wide = nn.dropout(x, keys, rate=0.5)
    assert torch.equal(wide[:, :width], nn.dropout(x[:, :width], keys[:, :width], rate=0.5))
    assert torch.equal(wide[-1:], nn.dropout(x[-1:], keys[-1:], rate=0.5))
    for row, token in ((0, 0), (rows - 1, width - 1)):
        alone = nn.dropout(x[row, token][None, None], keys[row, token][None, None], rate=0.5)
        assert torch.equal(wide[row, token], alone[0, 0])


@given(seeds, st.floats(0.05, 0.9))
def test_dropout_keeps_the_mean_and_scales_what_it_keeps(seed, rate):
    keys = random.split(random.key(seed), 64)[None]
    out = nn.dropout(torch.ones(1, 64, 256), keys, rate=rate).double()
    kept = out != 0
    deviation = math.sqrt(rate * (1 - rate) / kept.numel())
    assert abs(kept.double().mean() - (1 - rate)) < 5.5 * deviation
    torch.testing.assert_close(out[kept], torch.full_like(out[kept], 1 / (1 - rate)), rtol=1e-6, atol=0)
    assert (out[0, 0] != out[0, 1]).any()


def test_dropout_stops_the_gradient_where_it_drops():
    keys = random.split(random.key(1), 3)[None]
    x = torch.ones(1, 3, 8, requires_grad=True)
    out = nn.dropout(x, keys, rate=0.5)
    (grad,) = torch.autograd.grad(out.sum(), x)
    assert torch.equal(grad, out)
