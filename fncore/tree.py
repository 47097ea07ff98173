"""Pytrees: nested dicts, lists and tuples of tensors, over `optree`. `None` is an absent subtree, not a leaf."""

from collections.abc import Callable
from typing import Any

import optree
import torch
from torch import Tensor

Tree = Any

map = optree.tree_map
leaves = optree.tree_leaves
structure = optree.tree_structure
flatten = optree.tree_flatten
unflatten = optree.tree_unflatten


def named_leaves(tree: Tree) -> list[tuple[str, Tensor]]:
    """Every leaf with its dotted path, in the order of `leaves`: `("layers.0.attention.q", tensor)`."""
    paths, values, _ = optree.tree_flatten_with_path(tree)
    return [(".".join(str(part) for part in path), value) for path, value in zip(paths, values, strict=True)]


def map_named(function: Callable[[str, Any], Any], tree: Tree) -> Tree:
    """Apply `function(dotted path, leaf)` to every leaf."""
    return unflatten(structure(tree), [function(name, leaf) for name, leaf in named_leaves(tree)])


def zeros_like(tree: Tree) -> Tree:
    return map(torch.zeros_like, tree)


def add(left: Tree, right: Tree) -> Tree:
    return map(torch.add, left, right)


def scale(tree: Tree, factor: float | Tensor) -> Tree:
    return map(lambda leaf: leaf * factor, tree)


def cast(tree: Tree, dtype: torch.dtype) -> Tree:
    """Floating-point leaves in `dtype`; the others as they are."""
    return map(lambda leaf: leaf.to(dtype) if leaf.is_floating_point() else leaf, tree)


def copy(tree: Tree) -> Tree:
    """The same values in storage of their own."""
    return map(lambda leaf: leaf.detach().clone(), tree)


def global_norm(tree: Tree) -> Tensor:
    """Euclidean norm over all elements of all leaves, `sqrt(sum x^2)`: 0-d, in the leaves' own dtype."""
    norms = [torch.linalg.vector_norm(leaf) for leaf in leaves(tree)]
    return torch.linalg.vector_norm(torch.stack(norms))


def partition(tree: Tree, select: Callable[[str, Tensor], bool]) -> tuple[Tree, Tree]:
    """Two trees of the same shape: the leaves that `select(path, leaf)` takes, and the others; `None` in the gaps.

    This is how a part of a model is frozen: differentiate with respect to the first, `combine` before use.
    """
    taken = map_named(lambda name, leaf: leaf if select(name, leaf) else None, tree)
    rest = map_named(lambda name, leaf: None if select(name, leaf) else leaf, tree)
    return taken, rest


def combine(left: Tree, right: Tree) -> Tree:
    """Undo `partition`. Raises `ValueError` where both trees, or neither, hold a leaf."""

    def choose(a: Any, b: Any) -> Any:
        if (a is None) == (b is None):
            raise ValueError("combine: exactly one of the two trees must hold each leaf")
        return b if a is None else a

    return optree.tree_map(choose, left, right, none_is_leaf=True)
