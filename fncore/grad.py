"""The only place that differentiates.

`value_and_grad` serves the hot path: `torch.autograd.grad` over detached leaves, the same bits as `backward()` and, up
to rounding, the gradients of `torch.func.grad_and_value` at half its memory. The other three serve what autograd alone
can't, on `torch.func`.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fncore import tree
from fncore.tree import Tree


def value_and_grad(function: Callable[..., tuple[Tensor, Any]]) -> Callable[..., tuple[Tensor, Any, Tree]]:
    """Turn `function(params, ...) -> (value, aux)` into one that returns `(value, aux, d value / d params)`.

    `value` is 0-d; the gradient has the structure, shapes and dtypes of `params`. A leaf that the function does not
    use gets exact zeros, as with `torch.func.grad`. `params` itself is not touched.
    """

    def run(params: Tree, *args: Any, **kwargs: Any) -> tuple[Tensor, Any, Tree]:
        with torch.enable_grad():
            leaves = [leaf.detach().requires_grad_() for leaf in tree.leaves(params)]
            value, aux = function(tree.unflatten(tree.structure(params), leaves), *args, **kwargs)
            if value.requires_grad:
                grads = torch.autograd.grad(value, leaves, materialize_grads=True)
            else:  # no leaf is used at all
                grads = tuple(torch.zeros_like(leaf) for leaf in leaves)
        aux = tree.map(lambda leaf: leaf.detach(), aux)
        return value.detach(), aux, tree.unflatten(tree.structure(params), grads)

    return run


def per_example_grads(function: Callable[..., Tensor], params: Tree, batch: Tree) -> Tree:
    """The gradient of `function(params, example) -> 0-d` for every example: leaves `[B, ...]`.

    `batch` holds tensors `[B, ...]`. The function must be traceable by `torch.func.vmap`: no `.item()`, no shape that
    depends on values.
    """
    with torch.no_grad():
        return torch.func.vmap(torch.func.grad(function), in_dims=(None, 0))(params, batch)


def jvp(function: Callable[[Tree], Tensor], params: Tree, direction: Tree) -> tuple[Tensor, Tensor]:
    """`function(params)` and its derivative along `direction`, in one forward pass."""
    with torch.no_grad():
        both = torch.func.jvp(function, (params,), (direction,))
    return both[0], both[1]


def hvp(function: Callable[[Tree], Tensor], params: Tree, direction: Tree) -> Tree:
    """Hessian times `direction`, `H v`, by forward over reverse: about the price of two gradients.

    The function must have forward derivatives: `attention(..., kernel="math")` does, the fused kernel on CPU does not.
    """
    with torch.no_grad():
        return torch.func.jvp(torch.func.grad(function), (params,), (direction,))[1]
