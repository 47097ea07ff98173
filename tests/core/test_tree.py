import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fncore import tree

floats = st.floats(-8, 8, width=32)
tensors = st.lists(floats, max_size=4).map(torch.tensor)
trees = st.recursive(
    tensors,
    lambda inner: (
        st.lists(inner, min_size=1, max_size=3)
        | st.dictionaries(st.sampled_from("abcd"), inner, min_size=1, max_size=3)
        | st.tuples(inner, inner)
    ),
    max_leaves=8,
)


def same(left, right):
    """Equal structure and equal values, leaf by leaf."""
    pairs = zip(tree.leaves(left), tree.leaves(right), strict=True)
    return tree.structure(left) == tree.structure(right) and all(torch.equal(a, b) for a, b in pairs)


def test_named_leaves_are_dotted_paths_in_leaf_order():
    nested = {"layers": [{"q": torch.tensor(1.0)}, {"q": torch.tensor(2.0)}], "embed": torch.tensor(3.0)}
    names = [name for name, _ in tree.named_leaves(nested)]
    assert names == ["embed", "layers.0.q", "layers.1.q"]
    assert [leaf.item() for _, leaf in tree.named_leaves(nested)] == [3.0, 1.0, 2.0]
    assert [leaf.item() for leaf in tree.leaves(nested)] == [3.0, 1.0, 2.0]


@given(trees)
def test_flatten_then_unflatten_is_identity(value):
    leaves, structure = tree.flatten(value)
    assert same(value, tree.unflatten(structure, leaves))


@given(trees)
def test_map_named_passes_each_leaf_with_its_own_name(value):
    seen = {}
    out = tree.map_named(lambda name, leaf: (seen.setdefault(name, leaf), leaf * 2)[1], value)
    assert same(out, tree.scale(value, 2))
    assert list(seen) == [name for name, _ in tree.named_leaves(value)]
    assert all(seen[name] is leaf for name, leaf in tree.named_leaves(value))


@given(trees)
def test_add_scale_and_zeros_are_linear(value):
    assert same(tree.add(value, value), tree.scale(value, 2))
    assert same(tree.add(value, tree.zeros_like(value)), value)
    assert same(tree.scale(value, 0.0), tree.zeros_like(value))


@given(trees, st.integers(0, 255))
def test_combine_undoes_partition(value, choice):
    index = {name: position for position, (name, _) in enumerate(tree.named_leaves(value))}
    taken, rest = tree.partition(value, lambda name, leaf: bool(choice >> index[name] & 1))
    assert len(tree.leaves(taken)) == bin(choice & ((1 << len(index)) - 1)).count("1")
    assert len(tree.leaves(taken)) + len(tree.leaves(rest)) == len(index)
    assert same(tree.combine(taken, rest), value)
    assert same(tree.combine(rest, taken), value)


def test_combine_rejects_a_leaf_held_twice_or_not_at_all():
    one = torch.ones(2)
    with pytest.raises(ValueError, match="exactly one"):
        tree.combine({"a": one}, {"a": one})
    with pytest.raises(ValueError, match="exactly one"):
        tree.combine({"a": None}, {"a": None})


def test_global_norm_by_hand():
    norm = tree.global_norm({"a": torch.tensor([3.0, 0.0]), "b": [torch.tensor([[4.0], [12.0]])]})
    assert norm.shape == ()
    assert norm.item() == 13.0


@given(trees)
def test_global_norm_is_that_of_all_elements_in_a_row(value):
    flat = torch.cat([leaf.double().flatten() for leaf in tree.leaves(value)])
    doubles = tree.map(lambda leaf: leaf.double(), value)
    torch.testing.assert_close(tree.global_norm(doubles), flat.norm(), rtol=1e-14, atol=0)


def test_cast_leaves_integers_alone():
    out = tree.cast({"x": torch.ones(2), "n": torch.arange(3)}, torch.bfloat16)
    assert out["x"].dtype == torch.bfloat16
    assert out["n"].dtype == torch.int64


def test_copy_has_storage_of_its_own():
    value = {"x": torch.ones(2, requires_grad=True)}
    copied = tree.copy(value)
    copied["x"].add_(1)
    assert not copied["x"].requires_grad
    assert value["x"].tolist() == [1.0, 1.0]
