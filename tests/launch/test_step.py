"""Pieces of the step of launch/grpo.py, on small inputs worked by hand."""

from types import SimpleNamespace

import pytest
import torch

from algorithms import groups
from algorithms.groups import Group
from algorithms.grpo import VARIANTS
from fncore.distributed import World
from fncore.text.tasks import Example
from launch import grpo
from tests.gloo import jobs

EXAMPLE = Example(0, [{"role": "user", "content": "1+2"}], "3")


def test_the_kl_is_taken_from_the_reward():
    """rloo, a group of two: KL sums 3 and -1 at half weight make of rewards 1 and 2 the values -0.5 and 2.5."""
    config = grpo.Config(kl_placement="reward", kl_coef=0.5, group_size=2)
    setup = SimpleNamespace(config=config, world=World(), variant=VARIANTS["rloo"])
    mask = torch.tensor([[False, True, True], [False, True, False]])
    batch = {
        "mask": mask,
        "rewards": torch.tensor([1.0, 2.0], dtype=torch.float64),
        "old_logprobs": torch.tensor([[-9.0, -1.0, -2.0], [-9.0, -3.0, -9.0]]),
        "ref_logprobs": torch.tensor([[-1.0, -2.0, -4.0], [-1.0, -2.0, -1.0]]),
    }
    expected = torch.tensor([[0.0, -3.0, -3.0], [0.0, 3.0, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(grpo.advantages(setup, batch), expected)


def uninformative(positions):
    return [Group(position, EXAMPLE, 1, [[1, 2]] * 2, [False] * 2, ["", ""], [], [0.0, 0.0]) for position in positions]


def test_no_round_draws_a_prompt_again(monkeypatch):
    """Rounds that find nothing to learn from run to the cap: every position is drawn once, over all steps."""
    drawn = []

    def rollout(engine, params, task, scorer, positions, **settings):
        drawn.extend(positions)
        return uninformative(positions)

    monkeypatch.setattr(groups, "rollout", rollout)
    config = grpo.Config(dynamic_sampling=True, prompts_per_step=3, group_size=2, max_resamples=2)
    setup = SimpleNamespace(config=config, world=World(), engine=None, task=None, scorer=None, key=None)
    for step in range(1, 5):
        assert grpo.collect(setup, None, step) == ([], 9)
    assert sorted(drawn) == list(range(4 * 9))


def test_a_truncated_completion_is_masked_and_no_other():
    rows, cut = [[5, 6, 7, 8], [5, 6, 9]], [True, False]
    group = Group(3, EXAMPLE, 2, rows, cut, ["", ""], [], [0.0, 1.0])
    keep, mask = (
        groups.collate([group], group_size=2, mask_truncated=masked, device=torch.device("cpu"))["mask"].tolist()
        for masked in (False, True)
    )
    assert keep == [[False, False, True, True], [False, False, True, False]]
    assert mask == [[False, False, False, False], [False, False, True, False]]


@pytest.mark.parametrize("eval_mode", [True, False])
def test_every_update_has_its_own_dropout(monkeypatch, eval_mode):
    """With --no-rollout-eval-mode the keys of scoring and of all updates differ; without it there is no dropout."""
    keys = []
    gradients, rescore = grpo.gradients, grpo.rescore

    def recorded(loss, state, microbatches, *, key):
        keys.append(key)
        return gradients(loss, state, microbatches, key=key)

    def rescored(setup, params, batch, *, key):
        if not eval_mode:
            keys.append(key)
        return rescore(setup, params, batch, key=key)

    monkeypatch.setattr(grpo, "gradients", recorded)
    monkeypatch.setattr(grpo, "rescore", rescored)
    jobs.launch(World(), steps=2, updates_per_rollout=3, dropout=0.2, rollout_eval_mode=eval_mode)
    if eval_mode:
        assert keys == [None] * 6
    else:
        assert len(keys) == len({str(key.tolist()) for key in keys}) == 2 * (2 + 3)
