"""The one module that talks to other ranks."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from fncore import nn, tree
from fncore.errors import UserError
from fncore.stats import Peak
from fncore.tree import Tree

Item = TypeVar("Item")
TIMEOUT = timedelta(minutes=10)
CPU = torch.device("cpu")


class PeerLost(UserError):
    """A collective failed because another rank is gone; that rank's own message says why."""


class ReplicasDiffer(UserError):
    """Ranks that must hold the same bits don't."""


@dataclass(frozen=True)
class World:
    """This rank among its peers. With one rank every reduction returns its input, on the same path."""

    rank: int = 0
    size: int = 1
    device: torch.device = CPU
    group: Any = None

    def share(self, items: Sequence[Item]) -> list[Item]:
        """This rank's part of a list that is the same on all ranks: every size-th item from the rank-th on."""
        return list(items[self.rank :: self.size])

    def sum(self, values: Tree) -> Tree:
        """Every tensor leaf added over ranks, the same bits on each. Half-precision leaves are added in float32.

        All leaves of one dtype travel in one flat buffer. Collective: every rank calls it with the same shapes.
        """
        return self._all_reduce(values, dist.ReduceOp.SUM)

    def max(self, values: Tree) -> Tree:
        """Every tensor leaf's elementwise maximum over ranks."""
        return self._all_reduce(values, dist.ReduceOp.MAX)

    def reduce(self, values: Tree) -> Tree:
        """Gradients and metrics of all ranks together: a `Peak` is the maximum, everything else is added."""
        is_peak = lambda node: isinstance(node, Peak)
        nodes, structure = tree.flatten(values, is_leaf=is_peak)
        sums = iter(self.sum([node for node in nodes if not is_peak(node)]))
        peaks = iter(self.max([node for node in nodes if is_peak(node)]))
        return tree.unflatten(structure, [next(peaks) if is_peak(node) else next(sums) for node in nodes])

    def gather(self, value: Tensor) -> list[Tensor]:
        """The tensor of every rank, in the order of ranks; all of one shape and dtype."""
        if self.size == 1:
            return [value]
        sent = value.to(self.device).contiguous()
        parts = [torch.empty_like(sent) for _ in range(self.size)]
        with _peers("gather"):
            dist.all_gather(parts, sent, group=self.group)
        return [part.to(value.device) for part in parts]

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.sum(torch.zeros(1, device=self.device))

    def assert_replicated(self, values: Tree) -> None:
        """Raise `ReplicasDiffer` with the first leaf, and the ranks, whose bits differ from those of the majority."""
        prints = torch.stack(self.gather(fingerprint(values)))  # [ranks, leaves]
        common = prints.mode(dim=0).values
        for index, (name, _) in enumerate(tree.named_leaves(values)):
            ranks = (prints[:, index] != common[index]).nonzero().flatten().tolist()
            if ranks:
                raise ReplicasDiffer(
                    f"replicas differ: leaf {name} of rank {', '.join(map(str, ranks))} has other bits than on most "
                    f"of the {self.size} ranks; some update was not reduced over ranks"
                )

    def _all_reduce(self, values: Tree, op: Any) -> Tree:
        leaves = tree.leaves(values)
        if self.size == 1 or not leaves:
            return values
        out: list[Tensor] = list(leaves)
        dtypes = [nn.wide(leaf.dtype) if leaf.is_floating_point() else torch.int64 for leaf in leaves]
        for dtype in sorted(set(dtypes), key=str):
            chosen = [index for index, own in enumerate(dtypes) if own == dtype]
            flat = torch.cat([leaves[index].reshape(-1).to(self.device, dtype) for index in chosen])
            with _peers("all-reduce"):
                dist.all_reduce(flat, op, group=self.group)
            for index, part in zip(chosen, flat.split([leaves[index].numel() for index in chosen]), strict=True):
                out[index] = part.view(leaves[index].shape).to(leaves[index].device, leaves[index].dtype)
        return tree.unflatten(tree.structure(values), out)


@contextmanager
def _peers(operation: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise PeerLost(f"another rank ended, or none answered within {TIMEOUT}, during {operation}: {error}") from error


def fingerprint(values: Tree) -> Tensor:
    """A 64-bit hash of every leaf's bits, int64 `[leaves]`: equal bits give equal hashes, and any one changed element
    changes its leaf's hash."""
    return torch.stack([_hash(leaf) for leaf in tree.leaves(values)]) if tree.leaves(values) else torch.zeros(0).long()


def _hash(leaf: Tensor, chunk: int = 1 << 20) -> Tensor:
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[leaf.element_size()]
    flat = leaf.detach().contiguous().reshape(-1).view(words)
    odd = 2 * torch.arange(min(chunk, flat.numel()), device=leaf.device) + 1
    total = torch.zeros((), dtype=torch.int64, device=leaf.device)
    for part in flat.split(chunk):
        total = total * 0x100000001B3 + (part.long() * odd[: part.numel()]).sum()
    return total.cpu()


def resolve_device(name: str) -> torch.device:
    """ "auto" is CUDA where there is any, one device a local rank, else the CPU. Raises `UserError` for no device."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda":
        name = f"cuda:{int(os.environ.get('LOCAL_RANK', 0)) % max(torch.cuda.device_count(), 1)}"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UserError(f"--device {name}: no such device; use auto, cpu or cuda") from error
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"--device {name}: not supported; use auto, cpu or cuda")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(f"--device {name}: this machine has {torch.cuda.device_count()} CUDA devices")
    return device


@contextmanager
def open_world(device: str = "auto") -> Iterator[World]:
    """The world that torchrun describes in the environment, or a world of one without it.

    Gloo on CPU, NCCL on CUDA. A clean end closes the group. After an error it is left to the end of the process, which
    closes the connections, so that the other ranks fail at their next collective rather than wait.
    """
    place = resolve_device(device)
    if place.type == "cuda":
        torch.cuda.set_device(place)
    size = int(os.environ.get("WORLD_SIZE", 1))
    if size == 1:
        yield World(device=place)
        return
    dist.init_process_group("nccl" if place.type == "cuda" else "gloo", timeout=TIMEOUT)
    world = World(dist.get_rank(), dist.get_world_size(), place)
    yield world
    world.barrier()
    dist.destroy_process_group()
