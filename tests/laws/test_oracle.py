"""On a policy small enough to list all of its completions, the expected gradient of an estimator is the exact gradient.

Three tokens, of which 0 ends a completion, and at most two tokens a completion: 7 completions. With groups of two the
batch of all 49 pairs, each weighted by its probability, is the expectation.
"""

from itertools import product

import pytest
import torch

from algorithms import kl, weights
from algorithms.advantages import plain
from algorithms.grpo import VARIANTS, Variant, policy_loss
from algorithms.objectives import reinforce, token_ratio
from fncore import tree
from fncore.batch import pad, spans
from fncore.grad import value_and_grad
from fncore.models import decoder
from tests.laws.problems import parameters, scorer

CONFIG = decoder.Config(3, 8, 12, 1, 2, 1, 4, tie_word_embeddings=False)
PROMPT = [2, 1]
COMPLETIONS = [[0], *([first, second] for first, second in product((1, 2), (0, 1, 2)))]
REWARDS = torch.tensor([0.3, -1.0, 2.0, 0.7, 0.7, 1.5, -0.2], dtype=torch.float64)
PARAMS, REFERENCE = parameters(CONFIG, 3, scale=20.0), parameters(CONFIG, 4, scale=20.0)
BUFFERS = decoder.buffers(CONFIG, device="cpu", dtype=torch.float64)
SCORE = scorer(CONFIG, temperature=1.0)


def rows(completions):
    lengths = torch.tensor([len(PROMPT) + len(completion) for completion in completions])
    tokens = pad([PROMPT + completion for completion in completions])
    starts = torch.full_like(lengths, len(PROMPT))
    return {
        "tokens": tokens,
        "mask": spans(starts, lengths, width=tokens.shape[1]),
        "id": torch.arange(len(completions)),
    }


def log_probability(params):
    """Of each of the completions, `[7]`."""
    return SCORE(params, BUFFERS, rows(COMPLETIONS)).logprobs.sum(dim=1)


def exact(function):
    """The gradient of `function(log-probabilities of all completions)`."""
    return value_and_grad(lambda params: (function(log_probability(params)), ()))(PARAMS)[2]


def expected(variant, **options):
    """The mean gradient of the variant's loss over all pairs of completions that the policy may sample."""
    pairs = list(product(range(len(COMPLETIONS)), repeat=2))
    index = torch.tensor(pairs).flatten()
    batch = rows([COMPLETIONS[i] for i in index])
    with torch.no_grad():
        batch["old_logprobs"] = SCORE(PARAMS, BUFFERS, batch).logprobs
        batch["ref_logprobs"] = SCORE(REFERENCE, BUFFERS, batch).logprobs
        chance = log_probability(PARAMS).exp()
    mask, group = batch["mask"], torch.arange(len(pairs)).repeat_interleave(2)
    batch["advantages"] = variant.advantage(REWARDS[index].view(-1, 2)).view(-1, 1) * mask
    weight = variant.weights(mask, weights.count(mask, group, budget=2), group) * len(pairs)  # of one pair's batch
    batch["weights"] = weight * (chance[index].view(-1, 2).prod(dim=1)).repeat_interleave(2)[:, None]
    return value_and_grad(policy_loss(SCORE, variant, **options))(PARAMS, BUFFERS, batch)[2]


def close(left, right):
    torch.testing.assert_close(tree.leaves(left), tree.leaves(right), rtol=1e-9, atol=1e-12)


def test_completions_are_all_there_are():
    assert log_probability(PARAMS).exp().sum().item() == pytest.approx(1.0, abs=1e-12)


def test_rloo_is_the_policy_gradient():
    close(expected(VARIANTS["rloo"]), exact(lambda logp: -(logp.exp() * REWARDS).sum()))


def test_reinforce_without_a_baseline_is_the_policy_gradient():
    variant = Variant(plain, token_ratio, reinforce, weights.sequence_sum)
    close(expected(variant), exact(lambda logp: -(logp.exp() * REWARDS).sum()))


def test_dr_grpo_is_the_policy_gradient_up_to_its_constant():
    """A group's own mean takes (G - 1) / G of the signal, and the length budget L divides: here 1/2 and 1/2."""
    close(expected(VARIANTS["dr_grpo"]), exact(lambda logp: -(logp.exp() * REWARDS).sum() / 4))


def test_group_normalized_is_the_gradient_of_what_it_maximises():
    """Of two samples the normalised advantage is +-1 (less eps): GRPO maximises E sign(r1 - r2) log p / 2 a token."""
    variant = VARIANTS["grpo"]._replace(weights=weights.sequence_sum)
    difference = REWARDS[:, None] - REWARDS[None, :]
    advantage = difference / 2 / (difference.abs() / 2 + 1e-4)

    def surrogate(logp):
        chance = logp.detach().exp()
        return -(chance[:, None] * chance[None, :] * advantage * logp[:, None]).sum()

    close(expected(variant), exact(surrogate))


@pytest.mark.parametrize("name", ["k1", "k2", "k3"])
def test_gradients_of_kl_estimators(name):
    """As a loss, k1 has no gradient in expectation, and k2 that of the reverse KL. Over whole completions of one token
    scored at a time, each token's estimate is averaged over what follows."""
    variant = Variant(lambda rewards: rewards * 0, token_ratio, reinforce, weights.sequence_sum)
    found = expected(variant, kl_estimator=kl.ESTIMATORS[name], kl_coef=1.0)
    if name == "k1":
        assert all(leaf.abs().max() < 1e-12 for leaf in tree.leaves(found))
        return
    with torch.no_grad():
        chance = log_probability(PARAMS).exp()

    def per_token(params):
        """The sum over positions of KL(policy || reference), or of KL(reference || policy), at visited prefixes."""
        total = 0.0
        for prefix, reach in (([], 1.0), *((first, chance[where].sum()) for first, where in PREFIXES)):
            tokens = torch.tensor([PROMPT + prefix])
            mine = decoder.unembed(params, decoder.apply(params, BUFFERS, tokens, config=CONFIG).hidden)[0, -1]
            other = decoder.unembed(REFERENCE, decoder.apply(REFERENCE, BUFFERS, tokens, config=CONFIG).hidden)[0, -1]
            p, q = mine.log_softmax(-1), other.log_softmax(-1).detach()
            total = total + reach * ((p.exp() * (p - q)).sum() if name == "k2" else (q.exp() * (q - p)).sum())
        return total, ()

    close(found, value_and_grad(per_token)(PARAMS)[2])


PREFIXES = [([token], torch.tensor([completion[0] == token for completion in COMPLETIONS])) for token in (1, 2)]
