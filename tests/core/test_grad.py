import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fncore import grad, random, tree
from fncore.models import decoder

seeds = st.integers(0, 2**31)


def tokens_of(seed, rows=3, width=6):
    return random.bits(random.key(seed), (rows, width)) % 11


def loss(params, buffers, tokens, config, kernel="fused"):
    """Sum of next-token cross-entropies, and the logits as something carried along."""
    hidden = decoder.apply(params, buffers, tokens, config=config, kernel=kernel).hidden
    logits = decoder.unembed(params, hidden)[:, :-1]
    picked = logits.log_softmax(-1).gather(-1, tokens[:, 1:, None])
    return -picked.sum(), {"logits": logits}


def direction_like(params, seed):
    key = random.key(seed)
    draw = lambda name, leaf: random.normal(random.fold_in(key, name), tuple(leaf.shape), dtype=leaf.dtype)
    return tree.map_named(draw, params)


def dot(left, right):
    return sum((a * b).sum() for a, b in zip(tree.leaves(left), tree.leaves(right), strict=True))


def close(left, right, rtol, atol=0.0):
    for a, b in zip(tree.leaves(left), tree.leaves(right), strict=True):
        torch.testing.assert_close(a, b, rtol=rtol, atol=atol)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("tied", [True, False])
@given(seed=seeds)
def test_value_and_grad_is_that_of_torch_func(tiny, dtype, tied, seed):
    """The value has the same bits. Gradients differ in rounding: `torch.func` differentiates with `create_graph`, where
    PyTorch takes other, twice differentiable formulas for the derivatives of silu and of norms."""
    config, params, buffers = tiny(seed=seed, dtype=dtype, tie_word_embeddings=tied, qk_norm=tied, qkv_bias=True)
    tokens = tokens_of(seed)
    value, aux, grads = grad.value_and_grad(loss)(params, buffers, tokens, config)
    theirs, (their_value, their_aux) = torch.func.grad_and_value(loss, has_aux=True)(params, buffers, tokens, config)
    assert torch.equal(value, their_value)
    assert torch.equal(aux["logits"], their_aux["logits"])
    assert tree.structure(grads) == tree.structure(params)
    for mine, other in zip(tree.leaves(grads), tree.leaves(theirs), strict=True):
        assert mine.dtype == dtype
        assert (mine - other).norm() <= 200 * torch.finfo(dtype).eps * tree.global_norm(theirs)


def test_value_and_grad_has_the_bits_of_backward_and_of_torch_func_where_formulas_agree(tiny):
    config, params, buffers = tiny()
    tokens = tokens_of(2)
    _, _, grads = grad.value_and_grad(loss)(params, buffers, tokens, config)
    watched = tree.map(lambda leaf: leaf.clone().requires_grad_(), params)
    loss(watched, buffers, tokens, config)[0].backward()
    close(grads, tree.map(lambda leaf: leaf.grad, watched), rtol=0)
    head = lambda p: (-torch.nn.functional.linear(p["embed"], p["layers"][0]["mlp"]["up"]).log_softmax(-1).sum(), None)
    close(grad.value_and_grad(head)(params)[2], torch.func.grad(lambda p: head(p)[0])(params), rtol=0)


def test_gradient_by_hand():
    params = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor(3.0)}
    value, aux, grads = grad.value_and_grad(lambda p: ((p["a"] ** 2).sum() * p["b"], p["a"] + 1))(params)
    assert value.item() == 15.0
    assert aux.tolist() == [2.0, 3.0]
    assert grads["a"].tolist() == [6.0, 12.0]
    assert grads["b"].item() == 5.0


def test_an_unused_leaf_gets_exact_zeros():
    params = {"used": torch.ones(2), "unused": torch.ones(3, 2, dtype=torch.float64)}
    _, _, grads = grad.value_and_grad(lambda p: (p["used"].sum(), None))(params)
    assert grads["used"].tolist() == [1.0, 1.0]
    assert torch.equal(grads["unused"], torch.zeros(3, 2, dtype=torch.float64))


def test_a_function_that_uses_no_leaf_has_zero_gradient_as_in_torch_func():
    params = {"a": torch.ones(2), "b": [torch.ones(3)]}
    constant = lambda p: (torch.tensor(4.0), {})
    value, _, grads = grad.value_and_grad(constant)(params)
    theirs = torch.func.grad(lambda p: constant(p)[0])(params)
    assert value.item() == 4.0
    close(grads, theirs, rtol=0)


def test_params_are_untouched_and_nothing_requires_grad_afterwards(tiny):
    config, params, buffers = tiny()
    before = tree.copy(params)
    versions = [leaf._version for leaf in tree.leaves(params)]
    with torch.no_grad():  # differentiates nonetheless
        value, aux, grads = grad.value_and_grad(loss)(params, buffers, tokens_of(1), config)
        assert not torch.is_grad_enabled()
    assert tree.global_norm(grads) > 0
    close(params, before, rtol=0)
    assert [leaf._version for leaf in tree.leaves(params)] == versions
    for leaf in (value, *tree.leaves((aux, grads, params))):
        assert not leaf.requires_grad
        assert leaf.grad is None


def test_a_parameter_that_requires_grad_collects_none():
    weight = torch.ones(2, requires_grad=True)
    _, _, grads = grad.value_and_grad(lambda p: ((p["w"] * 3).sum(), None))({"w": weight})
    assert grads["w"].tolist() == [3.0, 3.0]
    assert weight.grad is None
    assert weight.requires_grad


@given(seed=seeds)
def test_per_example_grads_sum_to_the_gradient_of_the_batch(tiny, seed):
    config, params, buffers = tiny(seed=seed)
    tokens = tokens_of(seed)
    single = lambda p, row: loss(p, buffers, row[None], config, "math")[0]
    each = grad.per_example_grads(single, params, tokens)
    assert [leaf.shape[0] for leaf in tree.leaves(each)] == [3] * len(tree.leaves(params))
    _, _, whole = grad.value_and_grad(loss)(params, buffers, tokens, config, "math")
    close(tree.map(lambda leaf: leaf.sum(0), each), whole, rtol=1e-9, atol=1e-11)
    _, _, second = grad.value_and_grad(loss)(params, buffers, tokens[1:2], config, "math")
    close(tree.map(lambda leaf: leaf[1], each), second, rtol=1e-9, atol=1e-11)


@given(seed=seeds)
def test_jvp_is_the_slope_along_the_direction(tiny, seed):
    config, params, buffers = tiny(seed=seed)
    function = lambda p: loss(p, buffers, tokens_of(seed), config, "math")[0]
    direction = direction_like(params, seed)
    value, slope = grad.jvp(function, params, direction)
    _, _, grads = grad.value_and_grad(lambda p: (function(p), None))(params)
    torch.testing.assert_close(value, function(params), rtol=1e-12, atol=0)
    torch.testing.assert_close(slope, dot(grads, direction), rtol=1e-9, atol=1e-9)
    step = 1e-5
    ahead, behind = (function(tree.add(params, tree.scale(direction, h))) for h in (step, -step))
    torch.testing.assert_close(slope, (ahead - behind) / (2 * step), rtol=1e-5, atol=1e-4)


@given(seed=seeds)
def test_hvp_is_the_change_of_the_gradient_along_the_direction(tiny, seed):
    config, params, buffers = tiny(seed=seed)
    function = lambda p: loss(p, buffers, tokens_of(seed), config, "math")[0]
    direction = direction_like(params, seed)
    product = grad.hvp(function, params, direction)
    gradient = lambda p: grad.value_and_grad(lambda q: (function(q), None))(p)[2]
    step = 1e-6
    ahead, behind = (gradient(tree.add(params, tree.scale(direction, h))) for h in (step, -step))
    differences = tree.map(lambda a, b: (a - b) / (2 * step), ahead, behind)
    error = tree.global_norm(tree.map(torch.sub, product, differences))
    assert error < 1e-5 * tree.global_norm(product)


def test_hvp_of_a_quadratic_is_its_matrix():
    matrix = torch.tensor([[2.0, 1.0], [1.0, 6.0]])
    product = grad.hvp(lambda p: 0.5 * p["x"] @ matrix @ p["x"], {"x": torch.ones(2)}, {"x": torch.tensor([1.0, -1.0])})
    assert product["x"].tolist() == [1.0, -5.0]
