"""Values and gradients worked out in float64 elsewhere, for every piece that stands in a policy loss."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch

from algorithms import advantages, kl, logprobs, objectives, weights
from algorithms.grpo import VARIANTS, Variant, policy_loss
from algorithms.logprobs import Scores, token_logprobs

CASES = Path(__file__).parent / "cases"


def load(name):
    return {case["name"]: case for case in json.loads((CASES / f"{name}.json").read_text())}


def double(values):
    return torch.tensor(values, dtype=torch.float64)


ADVANTAGES, LOGPROBS, LOSSES = load("advantages"), load("logprobs"), load("policy_losses")
close = partial(torch.testing.assert_close, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", [name for name in ADVANTAGES if name.startswith("groups")])
def test_group_advantages(name):
    rewards, expect = double(ADVANTAGES[name]["inputs"]["rewards"]), ADVANTAGES[name]["expect"]
    for std in ("population", "sample"):
        close(
            advantages.group_normalized(rewards, eps=1e-4, std=std),
            double(expect[f"group_normalized(std={std},eps=1e-4)"]),
        )
    close(advantages.group_centered(rewards), double(expect["group_centered"]))
    close(advantages.leave_one_out(rewards), double(expect["leave_one_out"]))


def test_constant_group_is_exactly_zero():
    rewards = torch.full((1, 12), 0.7)
    for advantage in (advantages.group_normalized, advantages.group_centered, advantages.leave_one_out):
        assert (advantage(rewards) == 0).all()


def test_outlier_gives_no_explosion():
    rewards = torch.tensor([[0.35] * 7 + [0.3504]])
    assert advantages.group_normalized(rewards).abs().max() < 8**0.5


def test_whitening():
    case = ADVANTAGES["whiten"]
    values, mask = double(case["inputs"]["values"]), double(case["inputs"]["mask"]).bool()
    moments = advantages.moments(values, mask)
    close(advantages.whiten(values, mask, moments, eps=1e-8), double(case["expect"]["whitened"]))


@pytest.mark.parametrize("rows", [1, 4, 100])
@pytest.mark.parametrize("name", LOGPROBS)
def test_logprobs_and_entropy(name, rows):
    case = LOGPROBS[name]
    logits = double(case["inputs"]["logits"])
    targets = torch.tensor(case["inputs"]["targets"])
    logprobs, entropy = token_logprobs(
        logits.flatten(0, 1),
        torch.eye(logits.shape[-1], dtype=torch.float64),
        targets.flatten(),
        temperature=case["options"]["temperature"],
        rows=rows,
    )
    close(logprobs.view(targets.shape), double(case["expect"]["logprobs"]))
    close(entropy.view(targets.shape), double(case["expect"]["entropy"]))


@pytest.mark.parametrize("rows", [1, 5, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_gradients_of_log_probabilities_in_pieces(monkeypatch, rows, temperature):
    """However the rows are cut, in products and in chunks of those, the gradients are those of the plain formula."""
    torch.manual_seed(0)
    monkeypatch.setattr(logprobs, "LOGITS_PER_CHUNK", {"cpu": 2 * 11})
    hidden, weight, targets = torch.randn(9, 4).double(), torch.randn(11, 4).double(), torch.arange(9)
    pull = torch.randn(2, 9).double()

    def plain(hidden, weight):
        table = (hidden @ weight.T / temperature).log_softmax(dim=-1)
        return table.gather(-1, targets[:, None]).squeeze(-1), -(table.exp() * table).sum(dim=-1)

    def pieces(hidden, weight):
        return token_logprobs(hidden, weight, targets, temperature=temperature, rows=rows)

    def gradient(function):
        leaves = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
        return torch.autograd.grad(function(*leaves), leaves, list(pull))

    for mine, right in zip(gradient(pieces), gradient(plain), strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-12, atol=1e-12)

    leaves = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    assert torch.autograd.gradgradcheck(pieces, leaves, list(pull)), "second derivatives are right, too"


RATIOS = {
    "token": objectives.token_ratio,
    "sequence": objectives.sequence_ratio,
    "sequence_token": objectives.sequence_token_ratio,
}
WEIGHTS = {
    "token_mean": weights.token_mean,
    "sequence_mean": weights.sequence_mean,
    "constant_length": weights.constant_length,
}


def objective_of(options):
    if options["objective"] == "clipped":
        return partial(
            objectives.clipped, low=options["clip_low"], high=options["clip_high"], dual=options.get("dual_clip")
        )
    if options["objective"] == "cispo":
        return partial(objectives.cispo, high=options["ratio_max"])
    if options["objective"] == "sapo":
        return partial(objectives.sapo, tau_pos=options["tau_pos"], tau_neg=options["tau_neg"])
    return objectives.reinforce


@pytest.mark.parametrize("name", LOSSES)
def test_policy_losses(name):
    case = LOSSES[name]
    options, inputs = case["options"], {key: double(value) for key, value in case["inputs"].items()}
    mask = inputs["mask"].bool()
    group = torch.arange(len(mask))
    counts = weights.count(mask, group, budget=options.get("constant", 1))
    variant = Variant(advantages.plain, RATIOS[options["ratio"]], objective_of(options), WEIGHTS[options["weights"]])
    batch = {
        "mask": mask,
        "old_logprobs": inputs["old_logprobs"],
        "ref_logprobs": inputs["ref_logprobs"],
        "advantages": inputs["advantages"][:, None] * mask,
        "weights": variant.weights(mask, counts, group),
    }
    logprobs = inputs["logprobs"].requires_grad_()
    loss = policy_loss(
        lambda params, buffers, batch, *, key=None: Scores(torch.where(mask, params, 0.0), torch.zeros_like(params)),
        variant,
        kl_estimator=kl.ESTIMATORS[options.get("kl", "k3")],
        kl_coef=options.get("kl_coef", 0.0),
    )
    total, _ = loss(logprobs, None, batch)
    close(total.detach(), double(case["expect"]["loss"]))
    close(torch.autograd.grad(total, logprobs)[0], double(case["expect"]["grad_logprobs"]))


def test_kl_estimators():
    logprobs, ref = torch.tensor([0.5]), torch.tensor([0.0])
    values = [estimator(logprobs, ref).item() for estimator in (kl.k1, kl.k2, kl.k3)]
    assert values == pytest.approx([0.5, 0.125, 0.106531], abs=1e-6)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("token_mean", [[0, 0.25, 0, 0], [0, 0.25, 0.25, 0.25], [0, 0, 0, 0]]),
        ("sequence_mean", [[0, 0.5, 0, 0], [0, 1 / 6, 1 / 6, 1 / 6], [0, 0, 0, 0]]),
        ("sequence_sum", [[0, 0.5, 0, 0], [0, 0.5, 0.5, 0.5], [0, 0, 0, 0]]),
        ("constant_length", [[0, 0.05, 0, 0], [0, 0.05, 0.05, 0.05], [0, 0, 0, 0]]),
        ("prompt_mean", [[0, 0.25, 0, 0], [0, 0.25, 0.25, 0.25], [0, 0, 0, 0]]),
    ],
)
def test_weights_by_hand(name, expected):
    mask = double(expected).bool()
    group = torch.tensor([7, 7, 9])
    counts = weights.count(mask, group, budget=10)
    close(getattr(weights, name)(mask, counts, group), double(expected))


def test_every_variant_is_named_in_the_table():
    names = {"grpo", "dr_grpo", "dapo", "gspo", "gspo_token", "cispo", "rloo", "reinforce_pp", "sapo"}
    assert names <= VARIANTS.keys()
