"""Groups: prompts with their sampled and rewarded completions, and the batch that they make.

Axes: P prompts, G samples of a prompt, B = P * G rows, T tokens.
"""

import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from algorithms.rewards.scorer import Sample, Scorer, Scores, combine
from algorithms.rewards.shaping import overlong_penalty
from fncore import random
from fncore.batch import Batch, pad, spans
from fncore.stats import Metrics, Stat
from fncore.text.tasks import Example, Task


class Group(NamedTuple):
    """One prompt with its G completions. Lists are in the order of the samples."""

    position: int  # in the task's sequence of training examples: the same whatever the number of ranks
    example: Example
    prompt_length: int
    rows: list[list[int]]  # ids of prompt and completion
    truncated: list[bool]
    texts: list[str]
    scores: list[Scores]
    rewards: list[float]

    @property
    def informative(self) -> bool:
        """Whether the rewards tell its completions apart."""
        return len(set(self.rewards)) > 1


def rollout(
    engine: Any,
    params: Any,
    task: Task,
    scorer: Scorer,
    positions: Sequence[int],
    *,
    group_size: int,
    temperature: float,
    key: Tensor,
    dropout: bool = False,
) -> list[Group]:
    """Sample and reward whole groups for the training examples at `positions`, with an engine of `fncore.sampling`.

    Every sample's key is made from `key` and its global id `position * G + g`, so that neither the rank nor the other
    prompts play a part.
    """
    examples = [task.train(position) for position in positions]
    ids = torch.tensor(positions, dtype=torch.int64, device=key.device)[:, None] * group_size
    ids = (ids + torch.arange(group_size, device=key.device)).flatten()
    keys = random.fold_in(random.fold_in(key, "sample"), ids)
    dropout_keys = random.fold_in(random.fold_in(key, "rollout dropout"), ids) if dropout else None
    prompts = [example.prompt for example in examples]
    rollouts = engine(params, prompts, keys=keys, temperature=temperature, dropout_keys=dropout_keys)
    texts, rows, truncated = engine.texts(rollouts), rollouts.rows(), rollouts.truncated.tolist()
    answered = [example for example in examples for _ in range(group_size)]
    scores = scorer.score(
        [Sample(one.prompt, text, one.answer, one.index) for one, text in zip(answered, texts, strict=True)]
    )
    rewards = [combine(each, scorer.weights) for each in scores]
    groups = []
    for index, (position, example) in enumerate(zip(positions, examples, strict=True)):
        part = slice(index * group_size, (index + 1) * group_size)
        length = int(rollouts.prompt_lengths[part.start])
        groups.append(
            Group(position, example, length, rows[part], truncated[part], texts[part], scores[part], rewards[part])
        )
    return groups


def punish_overlong(groups: list[Group], *, max_new_tokens: int, buffer: int) -> list[Group]:
    """DAPO's soft punishment added to the rewards of completions that come near the limit."""

    def punished(group: Group) -> list[float]:
        lengths = torch.tensor([len(row) - group.prompt_length for row in group.rows])
        penalty = overlong_penalty(lengths, max_length=max_new_tokens, buffer=buffer)
        return [reward + extra for reward, extra in zip(group.rewards, penalty.tolist(), strict=True)]

    return [group._replace(rewards=punished(group)) for group in groups]


def collate(groups: list[Group], *, group_size: int, mask_truncated: bool, device: torch.device) -> Batch:
    """Groups as one batch of rows in their order. The mask marks sampled tokens, by recorded lengths.

    mask_truncated: completions without an end token are not trained on (DAPO's overlong filtering).
    """
    rows = [row for group in groups for row in group.rows]

    def column(values: Sequence[Any], dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    lengths = column([len(row) for row in rows])
    position = column([group.position for group in groups for _ in group.rows])
    tokens = pad(rows, device=device)
    mask = spans(column([group.prompt_length for group in groups for _ in group.rows]), lengths, width=tokens.shape[1])
    if mask_truncated:
        mask &= ~column([cut for group in groups for cut in group.truncated], torch.bool)[:, None]
    return {
        "tokens": tokens,
        "mask": mask,
        "lengths": lengths,
        "group": position,
        "id": position * group_size + torch.arange(group_size, device=device).repeat(len(groups)),
        "row": torch.arange(len(rows), device=device),
        "rewards": column([reward for group in groups for reward in group.rewards], torch.float64),
    }


def metrics(groups: list[Group], *, rewards: Sequence[str], device: torch.device) -> Metrics:
    """What to log of the groups, in parts that add over ranks. "completions" is a hash of all sampled ids."""
    rows = [row for group in groups for row in group.rows]
    scores = [score for group in groups for score in group.scores]
    totals = [reward for group in groups for reward in group.rewards]

    def number(value: float) -> Tensor:
        return torch.tensor(float(value), dtype=torch.float64, device=device)

    def mean(values: Sequence[float]) -> Stat:
        return Stat(number(sum(values)), number(len(values)))

    identity = sum(
        zlib.crc32(repr((group.position, sample, row)).encode())
        for group in groups
        for sample, row in enumerate(group.rows)
    )
    return {
        "reward/mean": mean(totals),
        "reward/square": mean([reward**2 for reward in totals]),
        **{f"reward/{name}": mean([score[name] for score in scores]) for name in rewards},
        "completion/mean_length": mean([len(row) - group.prompt_length for group in groups for row in group.rows]),
        "completion/truncated": mean([cut for group in groups for cut in group.truncated]),
        "groups": number(len(groups)),
        "tokens": number(sum(map(len, rows))),
        "completions": torch.tensor(identity, dtype=torch.int64, device=device),
    }
