"""Faults that real trainers had, as patches of the library: the laws must reject each."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from algorithms import logprobs
from algorithms.advantages import Moments
from algorithms.weights import Counts
from fncore import nn, optim, random, stats, step, tree
from fncore.distributed import World
from launch import grpo
from tests.gloo import pool
from tests.laws import problems

MUTANTS: dict[str, Callable[[World], Any]] = {}


def mutant(function: Callable[[World], Iterator[None]]) -> Callable[[World], Any]:
    MUTANTS[function.__name__] = contextmanager(function)
    return MUTANTS[function.__name__]


@contextmanager
def nothing(world: World) -> Iterator[None]:
    yield


MUTANTS["none"] = nothing  # the laws must accept this one


@mutant
def all_reduce_left_out(world):
    with patch.object(World, "reduce", lambda self, values: values):
        yield


@mutant
def loss_run_around_the_reduction(world):
    """Gradients are reduced, but those that the optimizer gets are the local ones."""
    reduce = World.reduce

    def around(self, values):
        return values[0], reduce(self, values)[1]

    with patch.object(World, "reduce", around):
        yield


@mutant
def mean_of_the_ranks_means(world):
    """Each rank divides by its own counts, and the gradients are averaged."""
    total = World.sum

    def local(self, values):
        if isinstance(values, Counts):
            total(self, values)
            return Counts(*(value * self.size for value in values))
        return total(self, values)

    with patch.object(World, "sum", local):
        yield


@mutant
def whitening_by_rank(world):
    total = World.sum

    def local(self, values):
        summed = total(self, values)
        return values if isinstance(values, Moments) else summed

    with patch.object(World, "sum", local):
        yield


@mutant
def sampling_key_depends_on_the_rank(world):
    rollout = grpo.groups.rollout

    def seeded(*args, key, **kwargs):
        return rollout(*args, key=random.fold_in(key, 42 + world.rank), **kwargs)

    with patch.object(grpo.groups, "rollout", seeded):
        yield


@mutant
def every_rank_samples_the_same_prompts(world):
    with patch.object(World, "share", lambda self, items: list(items)):
        yield


@mutant
def dropout_key_from_the_row_index(world):
    forward = logprobs.score

    def by_row(apply, params, buffers, batch, **kwargs):
        rows = torch.arange(len(batch["id"]), device=batch["id"].device)
        return forward(apply, params, buffers, {**batch, "id": rows}, **kwargs)

    with patch.object(problems, "score", by_row), patch.object(grpo, "score", by_row):
        yield


@mutant
def clipping_before_the_reduction(world):
    reduce = World.reduce

    def clipped(self, values):
        grads, metrics = values
        return reduce(self, (optim.clip_by_global_norm(grads, 0.01)[0], metrics))

    with patch.object(World, "reduce", clipped):
        yield


@mutant
def gradients_averaged_over_microbatches(world):
    add = tree.add

    with patch.object(step.tree, "add", lambda left, right: tree.scale(add(left, right), 0.5)):
        yield


@mutant
def metrics_averaged_over_microbatches(world):
    def average(left, right):
        return {
            name: stats.Stat(torch.tensor((value.mean() + right[name].mean()) / 2).double(), torch.tensor(1.0).double())
            if isinstance(value, stats.Stat)
            else value
            for name, value in left.items()
        }

    with patch.object(stats, "add", average):
        yield


@mutant
def a_collective_that_one_rank_alone_issues(world):
    reduce = World.reduce

    def extra(self, values):
        if self.rank == 0:
            dist.all_reduce(torch.zeros(3), group=pool.GROUPS[1])  # waits for nobody
        return reduce(self, values)

    with patch.object(World, "reduce", extra):
        yield


@mutant
def old_logprobs_in_bfloat16_log_softmax(world):
    rescore = grpo.rescore

    def rounded(setup, params, batch, *, key):
        return rescore(setup, params, batch, key=key).bfloat16().to(torch.float64)

    with patch.object(grpo, "rescore", rounded):
        yield


@mutant
def old_logprobs_shifted_by_one(world):
    rescore = grpo.rescore

    def shifted(setup, params, batch, *, key):
        return rescore(setup, params, batch, key=key).roll(1, dims=1)

    with patch.object(grpo, "rescore", shifted):
        yield


@mutant
def temperature_used_to_sample_alone(world):
    rescore = grpo.rescore

    def cold(setup, params, batch, *, key):
        plain = logprobs.score
        forward = setup.score.args[0]
        return rescore(setup._replace(score=grpo.partial(plain, forward, temperature=1.0)), params, batch, key=key)

    with patch.object(grpo, "rescore", cold):
        yield


@mutant
def dropout_mask_from_the_column(world):
    """The mask of a token depends on its column, so on the padding beside it."""
    original = nn.dropout

    def by_column(x, key, *, rate):
        columns = torch.arange(x.shape[1], device=x.device)
        return original(x, random.fold_in(key[:, :1] * 0, columns), rate=rate)

    with patch.object(nn, "dropout", by_column):
        yield
