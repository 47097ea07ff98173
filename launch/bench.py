"""Our training step beside another library's, in one process and on the same work.

python launch/bench.py grpo
python launch/bench.py grpo --model SmolLM2-135M-Instruct.Q4_1.gguf --steps 3

The steps of the two sides alternate, so that what else the machine does meets both. The last line is the ratio of
their seconds: above 1 ours is faster.
"""

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import tyro
from rich.console import Console
from rich.table import Table

from algorithms import groups
from algorithms.grpo import VARIANTS, policy_loss
from algorithms.logprobs import score
from algorithms.rewards.scorer import Sample, Scorer
from algorithms.weights import count
from fncore import cli, optim, policy, random, tree
from fncore.batch import split
from fncore.distributed import resolve_device
from fncore.errors import UserError
from fncore.models import decoder
from fncore.sampling.engine import Engine
from fncore.stats import report
from fncore.step import TrainState, apply_gradients, gradients
from fncore.text.tasks import Task, load_task

BETAS, CLIP = (0.9, 0.99), 1.0


@dataclass(frozen=True)
class Config:
    """GRPO steps on two-term sums: ours as launch/grpo.py makes them, and TRL's GRPOTrainer.

    Every completion has exactly --max-new-tokens tokens on both sides: stop tokens end none. Neither side scores old or
    reference log-probabilities: with one update a rollout and no KL, none is needed (--measure-every 0 there).
    """

    algorithm: tyro.conf.Positional[Literal["grpo"]] = "grpo"
    """What to compare."""
    model: str = "tiny"
    """Hugging Face folder, .gguf file, or "tiny", the packaged model."""
    steps: int = 3
    """Measured steps of each side, after one of each to warm up."""
    prompts_per_step: int = 4
    group_size: int = 8
    max_new_tokens: int = 64
    lr: float = 1e-6
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Of computation; parameters are float32 on both sides."""
    trl_batch: int = 8
    """Completions in one forward and backward pass of TRL; 8 is its own default. All of a step's at once is faster."""
    trl_gradient_checkpointing: bool = True
    """TRL's own default, which spares memory; ours keeps its activations."""
    device: str = "auto"
    seed: int = 0


class Seconds(NamedTuple):
    rollout: float  # sampling and rewards
    train: float
    length: float  # mean tokens of a completion


def our_steps(
    config: Config, loaded: policy.Policy, task: Task, scorer: Scorer, device: torch.device
) -> Callable[[int], Seconds]:
    """A function that makes our n-th step, from 0, and says how long it took."""
    dtype = cli.DTYPES[config.dtype]
    buffers = decoder.buffers(loaded.config, device=device, dtype=dtype)
    engine = Engine(loaded.config, buffers, loaded.tokenizer, frozenset(), dtype, config.max_new_tokens)
    score_tokens = partial(score, partial(decoder.forward, config=loaded.config, dtype=dtype))
    variant, optimizer = VARIANTS["grpo"], optim.adamw(config.lr, betas=BETAS, weight_decay=0.0, donate=True)
    loss = policy_loss(score_tokens, variant)
    params = tree.copy(loaded.params)
    state, key = TrainState(params, optimizer.init(params), buffers), random.key(config.seed, device=device)

    def step(number: int) -> Seconds:
        nonlocal state
        start, first = clock(device), number * config.prompts_per_step
        sampled = groups.rollout(
            engine, state.params, task, scorer, range(first, first + config.prompts_per_step),
            group_size=config.group_size, temperature=1.0, key=key,
        )  # fmt: skip
        batch = groups.collate(sampled, group_size=config.group_size, mask_truncated=False, device=device)
        rolled = clock(device)
        mask = batch["mask"]
        batch["advantages"] = variant.advantage(batch["rewards"].view(-1, config.group_size)).view(-1, 1) * mask
        counts = count(mask, batch["group"], budget=config.max_new_tokens)
        batch["weights"] = variant.weights(mask, counts, batch["group"])
        grads, metrics = gradients(loss, state, split(batch, tokens=16384))
        state, _ = apply_gradients(state, grads, optimizer=optimizer, clip=CLIP)
        report(metrics)
        return Seconds(rolled - start, clock(device) - rolled, mask.sum().item() / len(mask))

    return step


def run_trl(
    config: Config, folder: Path, task: Task, scorer: Scorer, device: torch.device, between: Callable[[int], None]
) -> list[Seconds]:
    """Train by TRL and time its steps; `between(n)` runs after its n-th one, from 0, and is not timed."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    rollouts: list[float] = []
    starts: list[float] = []
    seconds: list[Seconds] = []

    class Timed(GRPOTrainer):
        def _prepare_inputs(self, inputs: Any) -> Any:  # samples and rewards at the first microbatch, then slices
            start = clock(device)
            out = super()._prepare_inputs(inputs)
            rollouts[-1] += clock(device) - start
            return out

    class Stopwatch(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            rollouts.append(0.0)
            starts.append(clock(device))

        def on_step_end(self, *_: Any, **__: Any) -> None:
            took = clock(device) - starts[-1]
            length = trainer._metrics["train"]["completions/mean_length"][-1]
            seconds.append(Seconds(rollouts[-1], took - rollouts[-1], length))
            between(len(seconds) - 1)

    def reward(
        prompts: list[Any], completions: list[Any], answer: list[str], index: list[int], **_: Any
    ) -> list[float]:
        texts = [completion[0]["content"] for completion in completions]
        samples = [Sample(*fields) for fields in zip(prompts, texts, answer, index, strict=True)]
        return [scores["task"] for scores in scorer.score(samples)]

    steps, rows = config.steps + 1, config.prompts_per_step * config.group_size
    examples = [task.train(position) for position in range(steps * config.prompts_per_step)]
    if rows % config.trl_batch:
        raise UserError(f"--trl-batch {config.trl_batch}: must divide the {rows} completions of a step")
    settings = GRPOConfig(
        output_dir=str(folder / "out"),
        max_steps=steps,
        per_device_train_batch_size=config.trl_batch,
        gradient_accumulation_steps=rows // config.trl_batch,
        num_generations=config.group_size,
        max_completion_length=config.max_new_tokens,
        generation_kwargs={"min_new_tokens": config.max_new_tokens},
        temperature=1.0,
        beta=0.0,
        loss_type="grpo",
        learning_rate=config.lr,
        lr_scheduler_type="constant",
        adam_beta1=BETAS[0],
        adam_beta2=BETAS[1],
        max_grad_norm=CLIP,
        bf16=config.dtype == "bfloat16",
        use_cpu=device.type == "cpu",
        gradient_checkpointing=config.trl_gradient_checkpointing,
        dataloader_pin_memory=False,
        shuffle_dataset=False,
        save_strategy="no",
        eval_strategy="no",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=config.seed,
    )
    trainer = Timed(
        model=str(folder / "model"),
        reward_funcs=reward,
        args=settings,
        train_dataset=Dataset.from_list([{"prompt": e.prompt, "answer": e.answer, "index": e.index} for e in examples]),
        callbacks=[Stopwatch()],
    )
    trainer.train()
    return seconds


def clock(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def compare(config: Config) -> None:
    cli.require(config, 1, "steps", "prompts_per_step", "max_new_tokens", "trl_batch")
    cli.require(config, 2, "group_size")
    if missing := [name for name in ("trl", "datasets", "accelerate") if find_spec(name) is None]:
        raise UserError(f'the benchmark needs {", ".join(missing)}: pip install -e ".[bench]"')
    device = resolve_device(config.device)
    task = load_task("chain_sum", seed=config.seed)
    loaded = policy.load(config.model, dtype=cli.DTYPES[config.dtype], device=device)
    ours: list[Seconds] = []
    scorer = Scorer(["task"], weights=[1.0], task_spec=task.spec())
    with scorer, tempfile.TemporaryDirectory() as folder:
        policy.save(Path(folder) / "model", loaded, card="A copy for a benchmark.\n")
        step = our_steps(config, loaded, task, scorer, device)
        theirs = run_trl(config, Path(folder), task, scorer, device, lambda number: ours.append(step(number)))
    show({"fncore": ours[1:], "TRL": theirs[1:]}, f"{config.model} on {device}, {torch.get_num_threads()} threads")


def show(sides: dict[str, list[Seconds]], title: str) -> None:
    table = Table("", "rollout", "training", "step", "tokens a completion", title=f"Seconds a step: {title}")
    steps = {}
    for name, seconds in sides.items():
        rollout, train, length = (sum(column) / len(seconds) for column in zip(*seconds, strict=True))
        steps[name] = rollout + train
        table.add_row(name, f"{rollout:.2f}", f"{train:.2f}", f"{steps[name]:.2f}", f"{length:.1f}")
    Console().print(table)
    print(f"ratio {steps['TRL'] / steps['fncore']:.2f}")


if __name__ == "__main__":
    cli.run(compare, Config)
