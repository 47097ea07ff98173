"""GRPO and its variants on a task with verifiable answers.

python launch/grpo.py
torchrun --standalone --nproc-per-node 2 launch/grpo.py --variant dapo --steps 100
"""

import math
import sys
import time
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple

import torch
import tyro
from torch import Tensor

from algorithms import groups, kl
from algorithms.advantages import Moments, moments, whiten
from algorithms.groups import Group
from algorithms.grpo import VARIANTS, Variant, policy_loss, with_bounds
from algorithms.logprobs import score
from algorithms.rewards.scorer import Scorer, grade
from algorithms.weights import Counts, count
from fncore import cli, optim, policy, random, tree
from fncore.batch import Batch, split
from fncore.distributed import World, open_world
from fncore.errors import UserError
from fncore.evaluation import accuracy
from fncore.models import decoder
from fncore.run import Run, default_folder, due, require_finite, require_finite_parameters, require_free
from fncore.sampling.engine import Engine
from fncore.stats import report
from fncore.step import TrainState, apply_gradients, gradients
from fncore.text.tasks import Example, Task, load_task

SHOWN = [
    "reward/mean",
    "eval/accuracy",
    "kl/ref",
    "entropy",
    "completion/mean_length",
    "seconds/rollout",
    "seconds/train",
]

# In every line of metrics.jsonl, null where nothing was measured.
RECORDED = [
    "step",
    "loss",
    "reward/mean",
    "reward/std",
    "reward/errors",
    "eval/accuracy",
    "log_ratio/max_abs",
    "clip_fraction",
    "kl/ref",
    "entropy",
    "grad_norm",
    "lr",
    "completion/mean_length",
    "completion/truncated",
    "tokens_per_second",
    "seconds/rollout",
    "seconds/train",
    "replicas/equal",
]


@dataclass(frozen=True)
class Config:
    """Train a language model by GRPO, or a variant of it, on a task with verifiable answers."""

    model: str = "tiny"
    """Hugging Face folder or hub id, .gguf file, or "tiny", the packaged model."""
    task: str = "chain_sum"
    """A reasoning-gym task by name, or a JSONL file of prompts and answers."""
    task_config: cli.JsonObject | None = None
    """Settings of the task. Default: two-term sums for chain_sum, the task's own for others."""
    system: str | None = None
    """A system message before each prompt."""
    variant: str = "grpo"
    """A row of the table in algorithms/grpo.py: grpo, dr_grpo, dapo, gspo, cispo, rloo, ... or one of yours."""
    steps: int = 60
    """Rollouts, each with its updates."""
    prompts_per_step: int = 32
    """Over all ranks."""
    group_size: int = 8
    """Completions of each prompt."""
    max_new_tokens: int = 8
    """Tokens of a completion at most, its end token included."""
    temperature: float = 1.0
    """For sampling and for scoring alike. Training samples without top-k or top-p."""

    lr: float = 5e-4
    """Peak learning rate of AdamW. The default suits the packaged model; a real one wants about 1e-5."""
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    """Of the learning rate; wsd is warm up, stay, and decay over the last tenth."""
    warmup_steps: int = 0
    """Updates through which the learning rate rises."""
    weight_decay: float = 0.0
    """Decoupled, on matrices other than the embedding."""
    clip_grad: float = 1.0
    """Largest global norm of a gradient; inf for no clipping."""
    updates_per_rollout: int = 1
    """Optimizer updates on each batch of rollouts; each sees the whole batch."""
    tokens_per_microbatch: int = 16384
    """Of a rank's forward and backward pass, padding counted: a limit on memory that changes no result."""

    clip_low: float | None = None
    """Lower bound of the variant's objective, as a distance from 1. Default: the variant's own."""
    clip_high: float | None = None
    """Upper bound of the variant's objective: a distance from 1, for cispo the largest ratio. Default: its own."""
    kl_coef: float = 0.0
    """Weight of the KL to the starting model."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Of the KL in the loss; its gradient is that of the reverse KL for k2, of the forward KL for k3, 0 for k1."""
    kl_placement: Literal["loss", "reward"] = "loss"
    """Where the KL counts; in the reward it is always k1, summed over the completion."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    truncated: Literal["keep", "mask", "punish"] = "keep"
    """Completions that reach the limit: trained on as they are, left out, or softly punished as they come near it."""
    overlong_buffer: int = 4
    """With "punish": how many tokens before the limit the punishment begins, growing to -1."""
    dynamic_sampling: bool = False
    """Replace prompts whose completions all got the same reward."""
    max_resamples: int = 3
    """With dynamic sampling: how many more rounds of prompts a step may draw."""

    reward: tuple[str, ...] = ("task",)
    """Rewards: "task" (its own verifier), "math" (math-verify), "number" (the last number of the completion is the
    answer), or "module:function" of yours. Held-out accuracy is by the first."""
    reward_weights: tuple[float, ...] = ()
    """One for each reward; default 1."""
    reward_timeout: float = 10.0
    """Seconds that a reward may take for one completion."""
    reward_on_error: float | None = None
    """What a completion scores whose reward fails. Default: the run ends with a message."""

    dropout: float = 0.0
    """Rate of dropout. Ignored unless --no-rollout-eval-mode."""
    rollout_eval_mode: bool = True
    """Dropout off while completions are sampled and scored, so that the ratio is 1 before any update."""
    debug_log_ratio: bool = False
    """Print max and mean |new - old| log-probability on the first minibatch of each step."""
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """Of computation. Parameters and optimizer state are float32, or float64 with float64."""
    compile: bool = False
    """Compile the decoder's block (needs a C++ compiler on CPU)."""
    device: str = "auto"
    """auto, cpu or cuda; auto is cuda where there is any."""
    seed: int = 0
    """Of prompts, completions and dropout; the number of ranks plays no part."""

    out: str | None = None
    """Run folder, new or empty. Default: runs/grpo-DATE-TIME."""
    eval_every: int = 20
    """Steps between evaluations; there is one before the first update and after the last as well. 0: none at all."""
    eval_size: int = 200
    """Held-out problems, answered greedily."""
    check_replicas_every: int = 10
    """Steps between comparisons of all ranks' parameters and optimizer state. 0: none."""
    measure_every: int = 1
    """Steps between logs of kl/ref and log_ratio/* where training does not need them (--kl-coef 0, one update a
    rollout); each costs two forward passes. 0: at step 1 alone."""
    config: Annotated[str | None, tyro.conf.arg(metavar="FILE")] = None
    """Read defaults from a JSON file, such as the config.json of a run."""

    @property
    def needs_old(self) -> bool:
        """Whether the log-probabilities before the first update matter: else they are those of the update itself."""
        in_reward = self.kl_placement == "reward" and self.kl_coef > 0
        return self.updates_per_rollout > 1 or not self.rollout_eval_mode or in_reward or self.debug_log_ratio


class Setup(NamedTuple):
    """What stays the same from step to step."""

    config: Config
    world: World
    variant: Variant
    task: Task
    scorer: Scorer
    engine: Engine
    score: Any  # (params, buffers, batch, *, key) -> Scores
    loss: Any  # (params, buffers, batch, *, key) -> (total, metrics)
    optimizer: optim.Optimizer
    reference: decoder.Params
    key: Tensor


def training_step(setup: Setup, state: TrainState, step: int) -> tuple[TrainState, dict[str, Any], list[Group]]:
    """Sample, reward, weigh, differentiate, reduce over ranks, update."""
    config, world, start = setup.config, setup.world, time.perf_counter()
    rollouts, drawn = collect(setup, state.params, step)
    batch = groups.collate(
        rollouts, group_size=config.group_size, mask_truncated=config.truncated == "mask", device=world.device
    )
    rolled = time.perf_counter()

    key = random.fold_in(random.fold_in(setup.key, "dropout"), step)
    measured = step == 1 or due(config.measure_every, step, config.steps)
    if measured or config.needs_old:
        batch["old_logprobs"] = rescore(setup, state.params, batch, key=random.fold_in(key, "old"))
    if measured or config.kl_coef > 0:
        batch["ref_logprobs"] = rescore(setup, setup.reference, batch, key=random.fold_in(key, "reference"))
    batch["advantages"] = advantages(setup, batch)
    counts = Counts(*world.sum(count(batch["mask"], batch["group"], budget=config.max_new_tokens)))
    batch["weights"] = setup.variant.weights(batch["mask"], counts, batch["group"])
    microbatches = split(batch, tokens=config.tokens_per_microbatch)

    updates = []
    for update in range(config.updates_per_rollout):
        update_key = None if config.rollout_eval_mode else random.fold_in(key, update)
        grads, metrics = gradients(setup.loss, state, microbatches, key=update_key)  # this rank's
        grads, metrics = world.reduce((grads, metrics))  # the explicit all-reduce
        state, grad_norm = apply_gradients(state, grads, optimizer=setup.optimizer, clip=config.clip_grad)
        updates.append({**report(metrics), "grad_norm": grad_norm.item()})
        require_finite(grad_norm.item(), step=step, loss=updates[-1]["loss"])

    seen = report(world.reduce(groups.metrics(rollouts, rewards=config.reward, device=world.device)))
    end = time.perf_counter()
    record = {
        "step": step,
        **summarize(updates),
        **{name: value for name, value in seen.items() if name not in ("reward/square", "tokens", "groups")},
        "reward/std": max(seen["reward/square"] - seen["reward/mean"] ** 2, 0.0) ** 0.5,
        "completions": f"{seen['completions']:x}",
        "groups/drawn": drawn,
        "groups/kept": int(seen["groups"]),
        "tokens_per_second": seen["tokens"] / (end - start),
        "seconds/rollout": rolled - start,
        "seconds/train": end - rolled,
    }
    return state, record, rollouts


def collect(setup: Setup, params: decoder.Params, step: int) -> tuple[list[Group], int]:
    """This rank's groups of the step, and how many prompts all ranks drew for them.

    With dynamic sampling, rounds of prompts are drawn until enough groups are informative or the cap is reached. Which
    of them count is decided in the order of positions, on numbers summed over ranks.
    """
    config, world, size = setup.config, setup.world, setup.config.prompts_per_step
    rounds = 1 + config.max_resamples if config.dynamic_sampling else 1
    kept: list[Group] = []
    total = 0
    for number in range(rounds):
        first = ((step - 1) * rounds + number) * size
        sampled = groups.rollout(
            setup.engine, params, setup.task, setup.scorer, world.share(range(first, first + size)),
            group_size=config.group_size, temperature=config.temperature, key=setup.key,
            dropout=not config.rollout_eval_mode,
        )  # fmt: skip
        if config.truncated == "punish":
            sampled = groups.punish_overlong(
                sampled, max_new_tokens=config.max_new_tokens, buffer=config.overlong_buffer
            )
        if not config.dynamic_sampling:
            return sampled, size
        informative = torch.zeros(size, dtype=torch.int64)
        for group in sampled:
            informative[group.position - first] = group.informative
        rank_in_order = world.sum(informative).cumsum(0) + total
        kept += [group for group in sampled if group.informative and rank_in_order[group.position - first] <= size]
        total = int(rank_in_order[-1])
        if total >= size:
            break
    return kept, (number + 1) * size


@torch.no_grad()
def rescore(setup: Setup, params: decoder.Params, batch: Batch, *, key: Tensor) -> Tensor:
    """Log-probabilities `[B, T]` by the function, and in the microbatches, that the loss will use."""
    dtype = policy.master_dtype(cli.DTYPES[setup.config.dtype])
    out = torch.zeros(batch["tokens"].shape, dtype=dtype, device=setup.world.device)
    for part in split(batch, tokens=setup.config.tokens_per_microbatch):
        part_key = None if setup.config.rollout_eval_mode else key
        logprobs = setup.score(params, setup.engine.buffers, part, key=part_key).logprobs
        out[part["row"], : logprobs.shape[1]] = logprobs
    return out


def advantages(setup: Setup, batch: Batch) -> Tensor:
    """The variant's advantages, one a completion, on each of its tokens: `[B, T]`, float64."""
    config, mask, rewards = setup.config, batch["mask"], batch["rewards"]
    if config.kl_placement == "reward" and config.kl_coef > 0:
        penalty = kl.k1(batch["old_logprobs"], batch["ref_logprobs"]).double()
        rewards = rewards - config.kl_coef * torch.where(mask, penalty, 0.0).sum(dim=1)
    values = setup.variant.advantage(rewards.view(-1, config.group_size)).view(-1, 1) * mask
    if setup.variant.whiten:
        values = whiten(values, mask, Moments(*setup.world.sum(moments(values, mask))))
    return values


def summarize(updates: list[dict[str, float]]) -> dict[str, float]:
    """One record of a step's updates: their mean, but for what compares the policy with itself before the first."""
    record = {name: sum(update[name] for update in updates) / len(updates) for name in updates[0]}
    record |= {name: value for name, value in updates[0].items() if name.startswith(("log_ratio/", "kl/"))}
    if "log_ratio/max_abs" in record:
        record["log_ratio/last_max_abs"] = updates[-1]["log_ratio/max_abs"]
    return record


def evaluate(setup: Setup, params: decoder.Params, heldout: list[Example]) -> float | None:
    """Greedy held-out accuracy by the first reward, over all ranks."""
    if not heldout:
        return None
    judge = partial(grade, setup.scorer)
    right = accuracy(setup.engine, params, setup.world.share(heldout), grade=judge, device=setup.world.device)
    return setup.world.sum(right).mean()


def failures(scorer: Scorer, world: World, step: int) -> int:
    """How many rewards failed on all ranks since the last call. Each rank tells of its first one."""
    mine = scorer.failures()
    if mine:
        print(f"step {step}, rank {world.rank}: {mine[0]}", file=sys.stderr, flush=True)
    return int(world.sum(torch.tensor(len(mine))))


def main(config: Config) -> None:
    check(config)
    with open_world(config.device) as world:
        if world.rank == 0:
            require_free(config.out)
        task = load_task(config.task, config=config.task_config, seed=config.seed, system=config.system)
        scorer = Scorer(
            list(config.reward),
            weights=list(config.reward_weights) or [1.0] * len(config.reward),
            task_spec=task.spec(),
            timeout=config.reward_timeout,
            on_error=config.reward_on_error,
        )
        with scorer:
            train(config, world, task, scorer)


def train(config: Config, world: World, task: Task, scorer: Scorer) -> None:
    heldout = task.heldout(config.eval_size) if config.eval_every and config.eval_size else []
    loaded = policy.load(config.model, dtype=cli.DTYPES[config.dtype], device=world.device, dropout=config.dropout)
    planned = config.steps * config.prompts_per_step  # a thousand of them at most are looked at beforehand
    first = [task.train(position).prompt for position in world.share(range(min(planned, 1000)))]
    prompts = [*(example.prompt for example in world.share(heldout)), *first]
    policy.check_prompts(loaded, prompts, max_new_tokens=config.max_new_tokens)
    with cli.mistakes():
        updates = config.steps * config.updates_per_rollout
        schedule = optim.named_schedule(config.schedule, config.lr, total=updates, warm=config.warmup_steps)
    setup, state = prepare(config, world, task, scorer, loaded, schedule)
    facts = {"rewards": scorer.provenance(), "ranks": world.size, "device": str(world.device)}
    opened = Run(
        config.out or default_folder("grpo"), config, total=config.steps, active=world.rank == 0, provenance=facts
    )
    with opened as run:
        measured = {0: evaluate(setup, state.params, heldout)}
        start = {"step": 0, "eval/accuracy": measured[0], "reward/errors": failures(scorer, world, 0)}
        run.log({**dict.fromkeys(RECORDED), **start}, show=SHOWN)
        for step in range(1, config.steps + 1):
            lr = schedule(int(state.opt_state.step))
            state, record, rollouts = training_step(setup, state, step)
            record["lr"] = lr
            record["eval/accuracy"] = record["replicas/equal"] = None
            if due(config.eval_every, step, config.steps):
                record["eval/accuracy"] = measured[step] = evaluate(setup, state.params, heldout)
            record["reward/errors"] = failures(scorer, world, step)
            if due(config.check_replicas_every, step, config.steps):
                world.assert_replicated({"params": state.params, "opt_state": state.opt_state})
                record["replicas/equal"] = True
            run.log(record, show=SHOWN)
            run.samples(sample_records(rollouts[:1], step))
            if config.debug_log_ratio:
                run.say(
                    f"step {step}: |new - old| log-probability on the first minibatch: "
                    f"max {record['log_ratio/max_abs']:.3g}, mean {record['log_ratio/mean_abs']:.3g}"
                )
        require_finite_parameters(state.params)
        run.save_model(loaded._replace(params=state.params), card=card(config, measured, len(heldout)))
        run.finish()


def prepare(
    config: Config, world: World, task: Task, scorer: Scorer, loaded: policy.Policy, schedule: optim.Schedule
) -> tuple[Setup, TrainState]:
    """Everything that the steps share, and the state before the first."""
    dtype = cli.DTYPES[config.dtype]
    with cli.mistakes():
        variant = with_bounds(VARIANTS[config.variant], low=config.clip_low, high=config.clip_high)
        block = decoder.compiled_block() if config.compile else decoder.block
    forward = partial(decoder.forward, config=loaded.config, dtype=dtype, block=block)
    score_tokens = partial(score, forward, temperature=config.temperature)
    loss = policy_loss(
        score_tokens,
        variant,
        kl_estimator=kl.ESTIMATORS[config.kl_estimator],
        kl_coef=config.kl_coef if config.kl_placement == "loss" else 0.0,
        entropy_coef=config.entropy_coef,
    )
    optimizer = optim.adamw(schedule, betas=(0.9, 0.99), weight_decay=config.weight_decay, donate=True)
    buffers = decoder.buffers(loaded.config, device=world.device, dtype=dtype)
    setup = Setup(
        config=config,
        world=world,
        variant=variant,
        task=task,
        scorer=scorer,
        engine=Engine(loaded.config, buffers, loaded.tokenizer, loaded.stops, dtype, config.max_new_tokens),
        score=score_tokens,
        loss=loss,
        optimizer=optimizer,
        reference=decoder.cast(tree.copy(loaded.params), dtype),
        key=random.key(config.seed, device=world.device),
    )
    return setup, TrainState(loaded.params, optimizer.init(loaded.params), buffers)


def sample_records(rollouts: list[Group], step: int) -> list[dict[str, Any]]:
    return [
        {
            "step": step,
            "prompt": group.example.prompt[-1]["content"],
            "completion": text,
            "answer": group.example.answer,
            "reward": reward,
            "scores": scores,
            "truncated": cut,
        }
        for group in rollouts
        for text, reward, scores, cut in zip(group.texts, group.rewards, group.scores, group.truncated, strict=True)
    ]


def card(config: Config, measured: dict[int, float | None], problems: int) -> str:
    """The model card's text."""
    scores = "".join(f"- step {step}: {value:.3f}\n" for step, value in measured.items() if value is not None)
    return (
        f"Trained from `{config.model}` by fncore's `launch/grpo.py`: variant `{config.variant}`, task "
        f"`{config.task}`, {config.steps} steps of {config.prompts_per_step} prompts with "
        f"{config.group_size} completions each, seed {config.seed}.\n\n"
        f"Held-out accuracy (greedy, {problems} problems):\n\n{scores or 'not measured'}\n"
    )


def check(config: Config) -> None:
    """Raise `UserError` for settings that don't fit together."""
    cli.check_seed(config.seed)
    if config.variant not in VARIANTS:
        raise UserError(f"--variant {config.variant}: unknown{cli.nearest(config.variant, VARIANTS)}")
    cli.require(
        config,
        1,
        "steps",
        "prompts_per_step",
        "group_size",
        "max_new_tokens",
        "updates_per_rollout",
        "tokens_per_microbatch",
    )
    cli.require(
        config,
        0,
        "eval_every",
        "eval_size",
        "check_replicas_every",
        "measure_every",
        "max_resamples",
        "warmup_steps",
        "lr",
        "kl_coef",
        "weight_decay",
        "clip_low",
    )
    if not math.isfinite(config.entropy_coef):
        raise UserError(f"--entropy-coef {config.entropy_coef}: must be a finite number")
    if config.clip_high is not None and not 0 < config.clip_high < math.inf:
        raise UserError(f"--clip-high {config.clip_high}: must be above 0 and finite")
    if not 0 <= config.dropout < 1:
        raise UserError(f"--dropout {config.dropout}: must be at least 0 and below 1")
    if not config.clip_grad > 0:
        raise UserError(f"--clip-grad {config.clip_grad}: must be above 0")
    if not 0 < config.temperature < math.inf:
        raise UserError(f"--temperature {config.temperature}: training samples, so it must be above 0 and finite")
    if config.group_size < 2 and VARIANTS[config.variant].needs_group:
        raise UserError(
            f"--group-size {config.group_size}: the advantages of {config.variant} compare the completions of a "
            "prompt, so it takes 2 or more; --variant reinforce_pp works with 1"
        )
    if config.dynamic_sampling and config.group_size < 2:
        raise UserError("--dynamic-sampling compares the completions of a prompt, so it takes --group-size 2 or more")
    if config.reward_weights and len(config.reward_weights) != len(config.reward):
        raise UserError(f"--reward-weights: {len(config.reward_weights)} weights for {len(config.reward)} rewards")
    if config.truncated == "punish" and not 1 <= config.overlong_buffer <= config.max_new_tokens:
        raise UserError(f"--overlong-buffer {config.overlong_buffer}: must be from 1 to --max-new-tokens")


if __name__ == "__main__":
    cli.run(main, Config)
