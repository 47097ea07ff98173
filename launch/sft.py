"""Supervised fine-tuning on questions and answers of a task, or on conversations.

python launch/sft.py --steps 200
torchrun --standalone --nproc-per-node 2 launch/sft.py --model some-folder --data chats.jsonl
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Annotated, Any, Literal, NamedTuple

import torch
import tyro

from algorithms.logprobs import score
from algorithms.rewards.scorer import Scorer, grade
from algorithms.supervised import cross_entropy
from algorithms.weights import Counts, count, token_mean
from fncore import cli, optim, policy, random
from fncore.batch import Batch, pad, split, take
from fncore.distributed import World, open_world
from fncore.errors import UserError, shorten
from fncore.evaluation import accuracy
from fncore.models import decoder
from fncore.run import Run, default_folder, due, require_finite, require_finite_parameters, require_free
from fncore.sampling.engine import Engine
from fncore.stats import add, report
from fncore.step import TrainState, apply_gradients, gradients
from fncore.text import bpe
from fncore.text.chat import Messages, encode_conversation
from fncore.text.demonstrations import Demonstrations, from_file, from_task
from fncore.text.tasks import Example, load_task

SHOWN = ["nats_per_token", "eval/nats_per_token", "eval/accuracy", "grad_norm", "tokens_per_second"]


@dataclass(frozen=True)
class Config:
    """Train a language model on demonstrations: the answers of a task, or conversations."""

    model: str = "tiny"
    """Hugging Face folder or hub id, .gguf file, "tiny" (the packaged model), or "new": a fresh small decoder with a
    tokenizer made from the data."""
    data: str | None = None
    """JSONL file of conversations. Default: the questions and answers of the task."""
    task: str = "chain_sum"
    """A reasoning-gym task by name, or a JSONL file of prompts and answers."""
    task_config: cli.JsonObject | None = None
    """Settings of the task. Default: two-term sums for chain_sum, the task's own for others."""
    system: str | None = None
    """A system message before each prompt of a task."""
    careless: float = 0.0
    """Share of the task's training answers that are one too high: demonstrations of mixed quality."""

    steps: int = 200
    examples_per_step: int = 64
    """Over all ranks."""
    max_length: int = 512
    """Tokens of a conversation at most; a longer one is an error."""
    lr: float = 1e-3
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "cosine"
    warmup_steps: int = 10
    weight_decay: float = 0.01
    clip_grad: float = 1.0
    """Largest global norm of a gradient."""
    tokens_per_microbatch: int = 16384
    dropout: float = 0.0

    hidden_size: int = 128
    """Of a new model; so are the next three."""
    layers: int = 4
    heads: int = 4
    vocab_size: int = 320

    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """Of computation. Parameters and optimizer state are float32, or float64 with float64."""
    compile: bool = False
    """Compile the decoder's block (needs a C++ compiler on CPU)."""
    device: str = "auto"
    """auto, cpu or cuda; auto is cuda where there is any."""
    seed: int = 0
    """Of examples, dropout and a new model; the number of ranks plays no part."""

    out: str | None = None
    """Run folder, new or empty. Default: runs/sft-DATE-TIME."""
    eval_every: int = 100
    """Steps between evaluations; there is one before the first update and after the last as well. 0: none at all."""
    eval_size: int = 200
    """Held-out problems, or conversations (a tenth of the file at most)."""
    max_new_tokens: int = 16
    """Of a reply to a held-out problem."""
    check_replicas_every: int = 10
    """Steps between comparisons of all ranks' parameters and optimizer state. 0: none."""
    config: Annotated[str | None, tyro.conf.arg(metavar="FILE")] = None
    """Read defaults from a JSON file, such as the config.json of a run."""


def collate(
    chats: Sequence[tuple[int, Messages]], loaded: policy.Policy, config: Config, device: torch.device
) -> Batch:
    """Conversations, each with its place in the training sequence, as rows; the mask marks the assistant's tokens."""
    encoded = [encode_conversation(loaded.tokenizer, messages, stops=loaded.stops) for _, messages in chats]
    positions = loaded.config.max_position_embeddings
    for (ids, _), (_, messages) in zip(encoded, chats, strict=True):
        policy.check_ids(loaded, ids, messages)
        if len(ids) > min(config.max_length, positions):
            limit = f"--max-length {config.max_length}" if len(ids) > config.max_length else f"the model's {positions}"
            raise UserError(f"an example has {len(ids)} tokens, more than {limit}: {shorten(messages[0]['content'])}")
    tokens = pad([ids for ids, _ in encoded], device=device)
    return {
        "tokens": tokens,
        "mask": pad([labels for _, labels in encoded], device=device).bool(),
        "lengths": torch.tensor([len(ids) for ids, _ in encoded], dtype=torch.int64, device=device),
        "id": torch.tensor([position for position, _ in chats], dtype=torch.int64, device=device),
    }


def weigh(batch: Batch, world: World) -> Batch:
    counts = Counts(*world.sum(count(batch["mask"], batch["id"], budget=1)))
    return {**batch, "weights": token_mean(batch["mask"], counts)}


def main(config: Config) -> None:
    check(config)
    with open_world(config.device) as world:
        if world.rank == 0:
            require_free(config.out)
        if config.data is not None:
            train(config, world, from_file(config.data, seed=config.seed, eval_size=config.eval_size), None)
            return
        task = load_task(config.task, config=config.task_config, seed=config.seed, system=config.system)
        data = from_task(task, seed=config.seed, careless=config.careless, eval_size=config.eval_size)
        with Scorer(["task"], weights=[1.0], task_spec=task.spec()) as scorer:
            train(config, world, data, Quiz(task.heldout(config.eval_size), scorer) if config.eval_size else None)


def check(config: Config) -> None:
    """Raise `UserError` for settings that don't fit together."""
    cli.check_seed(config.seed)
    cli.require(
        config,
        1,
        "steps",
        "examples_per_step",
        "max_length",
        "tokens_per_microbatch",
        "layers",
        "heads",
        "max_new_tokens",
        "hidden_size",
    )
    cli.require(
        config, 0, "eval_every", "eval_size", "check_replicas_every", "warmup_steps", "lr", "careless", "weight_decay"
    )
    if config.careless > 1:
        raise UserError(f"--careless {config.careless}: a share, so 1 at most")
    if not 0 <= config.dropout < 1:
        raise UserError(f"--dropout {config.dropout}: must be at least 0 and below 1")
    if not config.clip_grad > 0:
        raise UserError(f"--clip-grad {config.clip_grad}: must be above 0")


class Quiz(NamedTuple):
    """Held-out problems and what judges the replies to them."""

    examples: list[Example]
    scorer: Scorer


def train(config: Config, world: World, data: Demonstrations, quiz: Quiz | None) -> None:
    dtype = cli.DTYPES[config.dtype]
    loaded = new_policy(config, data, world.device) if config.model == "new" else policy.load(
        config.model, dtype=dtype, device=world.device, dropout=config.dropout
    )  # fmt: skip
    with cli.mistakes():
        block = decoder.compiled_block() if config.compile else decoder.block
        schedule = optim.named_schedule(config.schedule, config.lr, total=config.steps, warm=config.warmup_steps)
    loss = cross_entropy(partial(score, partial(decoder.forward, config=loaded.config, dtype=dtype, block=block)))
    optimizer = optim.adamw(schedule, betas=(0.9, 0.99), weight_decay=config.weight_decay, donate=True)
    buffers = decoder.buffers(loaded.config, device=world.device, dtype=dtype)
    state = TrainState(loaded.params, optimizer.init(loaded.params), buffers)
    engine = Engine(loaded.config, buffers, loaded.tokenizer, loaded.stops, dtype, config.max_new_tokens)
    planned = config.steps * config.examples_per_step  # a thousand of them at most are looked at beforehand
    collate([(n, data.train(n)) for n in world.share(range(min(planned, 1000)))], loaded, config, world.device)
    heldout = collate(list(enumerate(data.heldout)), loaded, config, world.device) if data.heldout else None
    key = random.fold_in(random.key(config.seed, device=world.device), "dropout")

    with Run(
        config.out or default_folder("sft"),
        config,
        total=config.steps,
        active=world.rank == 0,
        provenance={"ranks": world.size, "device": str(world.device)},
    ) as run:
        run.log({"step": 0, **evaluate(config, world, loss, engine, state, heldout, quiz)}, show=SHOWN)
        for step in range(1, config.steps + 1):
            start, lr = time.perf_counter(), schedule(int(state.opt_state.step))
            first = (step - 1) * config.examples_per_step
            chats = [
                (index, data.train(index)) for index in world.share(range(first, first + config.examples_per_step))
            ]
            batch = weigh(collate(chats, loaded, config, world.device), world)
            microbatches = split(batch, tokens=config.tokens_per_microbatch)
            grads, metrics = gradients(loss, state, microbatches, key=random.fold_in(key, step))  # this rank's
            grads, metrics = world.reduce((grads, metrics))  # the explicit all-reduce
            state, grad_norm = apply_gradients(state, grads, optimizer=optimizer, clip=config.clip_grad)
            tokens = int(world.sum(batch["lengths"].sum()))
            record: dict[str, Any] = {"step": step, **report(metrics), "grad_norm": grad_norm.item(), "lr": lr}
            require_finite(record["grad_norm"], step=step, loss=record["loss"])
            record["tokens_per_second"] = tokens / (time.perf_counter() - start)
            record["replicas/equal"] = None
            if due(config.check_replicas_every, step, config.steps):
                world.assert_replicated({"params": state.params, "opt_state": state.opt_state})
                record["replicas/equal"] = True
            if due(config.eval_every, step, config.steps):
                record |= evaluate(config, world, loss, engine, state, heldout, quiz)
            run.log(record, show=SHOWN)
        require_finite_parameters(state.params)
        run.save_model(loaded._replace(params=state.params), card=card(config))
        run.finish()


def evaluate(
    config: Config,
    world: World,
    loss: Any,
    engine: Engine,
    state: TrainState,
    heldout: Batch | None,
    quiz: Quiz | None,
) -> dict[str, float]:
    """Held-out nats per token without dropout, and greedy accuracy where there is a task."""
    if not config.eval_every:
        return {}
    record = {}
    if heldout is not None:
        share = take(heldout, torch.arange(world.rank, len(heldout["id"]), world.size, device=world.device))
        share["weights"] = torch.zeros_like(share["mask"], dtype=torch.float64)
        with torch.no_grad():
            parts = [loss(state.params, state.buffers, b)[1] for b in split(share, tokens=config.tokens_per_microbatch)]
        record["eval/nats_per_token"] = report(world.reduce(reduce(add, parts)))["nats_per_token"]
    if quiz is not None:
        mine = world.share(quiz.examples)
        judge = partial(grade, quiz.scorer)
        right = accuracy(engine, state.params, mine, grade=judge, device=world.device)
        record["eval/accuracy"] = world.sum(right).mean()
    return record


def new_policy(config: Config, data: Demonstrations, device: torch.device) -> policy.Policy:
    """A fresh Qwen3-shaped decoder, and a tokenizer made from the first thousand conversations."""
    texts = [message["content"] for index in range(1000) for message in data.train(index)]
    tokenizer = bpe.train(texts, vocab_size=config.vocab_size)
    if config.hidden_size % config.heads or (config.hidden_size // config.heads) % 2:
        raise UserError(f"--hidden-size {config.hidden_size}: must be an even multiple of --heads {config.heads}")
    shape = decoder.Config(
        vocab_size=len(tokenizer),
        hidden_size=config.hidden_size,
        intermediate_size=3 * config.hidden_size,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.heads // 2 if config.heads % 2 == 0 else config.heads,
        head_dim=config.hidden_size // config.heads,
        max_position_embeddings=max(2048, config.max_length),
        qk_norm=True,
        dropout=config.dropout,
    )
    key = random.fold_in(random.key(config.seed, device=device), "init")
    params = decoder.init(shape, key=key, dtype=policy.master_dtype(cli.DTYPES[config.dtype]))
    return policy.Policy(shape, params, tokenizer, frozenset({tokenizer.eos_token_id}))


def card(config: Config) -> str:
    """The model card's text."""
    what = f"conversations of `{config.data}`" if config.data else f"answers of the task `{config.task}`"
    careless = f", of which {config.careless:.0%} are one too high" if config.careless else ""
    return (
        f"Trained from `{config.model}` by fncore's `launch/sft.py` on {what}{careless}: {config.steps} steps of "
        f"{config.examples_per_step} examples, seed {config.seed}.\n"
    )


if __name__ == "__main__":
    cli.run(main, Config)
