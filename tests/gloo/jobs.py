"""What the ranks of the pool run. Results are plain data: they travel through queues."""

import hashlib
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from algorithms.rewards.scorer import Sample
from fncore import optim, random, tree
from fncore.batch import take
from fncore.distributed import World, fingerprint
from fncore.models import decoder
from fncore.policy import Policy
from fncore.step import TrainState, apply_gradients, gradients
from fncore.text import bpe
from fncore.text.tasks import Example
from launch import grpo
from tests.gloo.pool import Collectives
from tests.laws import problems
from tests.laws.problems import ALGORITHMS, GROUP, MODELS

DTYPES = {"float32": torch.float32, "bfloat16": torch.float32, "float64": torch.float64}


def outcome(state: TrainState, recorded: Collectives, **extra: Any) -> dict[str, Any]:
    return {
        "params": [leaf.double().numpy() for leaf in tree.leaves(state.params)],
        "prints": fingerprint((state.params, state.opt_state, state.buffers)).tolist(),
        "calls": recorded.calls,
        "bytes": recorded.bytes,
        **extra,
    }


def train(
    world: World, algorithm: str, model: str, seed: int, batches: list[list[tuple[int, int]]], dtype: str = "float64"
) -> dict[str, Any]:
    """One update for each batch of row lengths, by the three lines of the step, each rank on its own groups."""
    master = DTYPES[dtype]
    config = MODELS[model]
    params = problems.parameters(config, seed, dtype=master)
    buffers = decoder.buffers(config, device="cpu", dtype=master)
    scores = problems.scorer(config, dtype=getattr(torch, dtype))
    loss = ALGORITHMS[algorithm].loss(scores)
    optimizer = optim.adamw(1e-2, weight_decay=0.1)
    state = TrainState(params, optimizer.init(params), buffers)
    with Collectives() as recorded:
        for step, lengths in enumerate(batches):
            batch = problems.rows(seed + step, lengths)
            mine = world.share(range(len(lengths) // GROUP))
            shard = take(batch, torch.tensor([GROUP * g + k for g in mine for k in range(GROUP)], dtype=torch.int64))
            shard = problems.weigh(ALGORITHMS[algorithm], shard, world.sum)
            grads, metrics = gradients(loss, state, [shard], key=random.fold_in(random.key(seed), step))
            grads, metrics = world.reduce((grads, metrics))
            state, norm = apply_gradients(state, grads, optimizer=optimizer, clip=0.5)
    return outcome(state, recorded, norm=norm.item())


class Quiz:
    """Sums whose questions differ in length, as a task without an import."""

    def train(self, position: int) -> Example:
        a, b = position * 7 % 23, position * 13 % 101
        return Example(position, [{"role": "user", "content": f"{a}+{b}"}], str(a + b))


class HashScorer:
    """Rewards of 0, 1 or 2 that look random and depend on the text alone."""

    rewards, weights = ("task",), (1.0,)

    def score(self, samples: list[Sample]) -> list[dict[str, float]]:
        digest = lambda sample: hashlib.blake2b(repr((sample.index, sample.completion)).encode()).digest()
        return [{"task": float(digest(sample)[0] % 3)} for sample in samples]


def launch(world: World, model: str = "tied", steps: int = 3, **settings: Any) -> dict[str, Any]:
    """The step of launch/grpo.py itself, with a small model, a task and a scorer that need no set-up."""
    defaults = dict(
        dtype="float64", prompts_per_step=5, group_size=3, max_new_tokens=5, lr=1e-2, kl_coef=0.05, steps=steps
    )
    config = grpo.Config(**{**defaults, **settings})
    tokenizer = bpe.train(["1+2", "34+56"], vocab_size=262)
    shape = replace(MODELS[model], vocab_size=len(tokenizer), max_position_embeddings=64, dropout=config.dropout)
    params = problems.parameters(shape, config.seed, dtype=DTYPES[config.dtype], scale=4.0)
    loaded = Policy(shape, params, tokenizer, frozenset({tokenizer.eos_token_id, *range(40, 80)}))
    scorer: Any = HashScorer()
    task: Any = Quiz()
    setup, state = grpo.prepare(config, world, task, scorer, loaded, optim.constant(config.lr))
    records = []
    with Collectives() as recorded:
        for step in range(1, steps + 1):
            state, record, _ = grpo.training_step(setup, state, step)
            records.append(record)
    return outcome(state, recorded, records=records)


def mutated(world: World, mutant: str, job: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Run a job with one deliberate fault in the library."""
    from tests.laws.mutants import MUTANTS

    with MUTANTS[mutant](world):
        return globals()[job](world, *args, **kwargs)


def reduce_values(world: World) -> SimpleNamespace:
    """Every kind of reduction, on values that name their rank."""
    from fncore.stats import Peak, Stat

    mine = torch.tensor([float(world.rank + 1)])
    grads, metrics = world.reduce(
        (
            {"w": mine},
            {"m": Stat(mine.double(), mine.double() * 0 + 4), "p": Peak(mine.double()), "loss": mine.double()},
        )
    )
    return SimpleNamespace(
        grad=grads["w"].item(),
        mean=metrics["m"].mean(),
        peak=metrics["p"].value.item(),
        counts=world.sum({"n": torch.tensor([world.rank + 1]), "b": torch.tensor([True])})["n"].tolist(),
        small=world.sum(torch.full((1,), 1.0 if world.rank == 0 else 2.0**-8, dtype=torch.bfloat16)).item(),
        gathered=[part.item() for part in world.gather(mine)],
        share=world.share(list(range(7))),
    )


def differing(world: World) -> str:
    """One element of one leaf of the last rank is another."""
    from fncore.distributed import ReplicasDiffer

    params = {"a": torch.arange(6.0), "b": {"c": torch.ones(3, 3)}}
    world.assert_replicated(params)
    if world.rank == world.size - 1:
        params["b"]["c"][1, 2] += 2**-20
    try:
        world.assert_replicated(params)
    except ReplicasDiffer as error:
        return str(error)
    return ""
