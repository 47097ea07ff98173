"""A law that nothing can break proves nothing: every deliberate fault is rejected by the law that it violates."""

from functools import partial
from unittest.mock import patch

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from algorithms.grpo import VARIANTS, policy_loss
from fncore import optim, tree
from fncore.models import decoder
from fncore.step import TrainState, apply_gradients, gradients
from tests.gloo import jobs
from tests.gloo.checks import assert_lockstep, assert_on_policy, assert_replicas, assert_same_training
from tests.laws import test_laws
from tests.laws.mutants import MUTANTS
from tests.laws.problems import ALGORITHMS, Algorithm, problem

REJECTED = pytest.raises((AssertionError, BaseExceptionGroup))

BATCHES = [[(2, 3), (3, 1), (1, 4), (2, 2), (2, 6), (4, 5)], [(2, 5), (1, 1)]]
TRAIN = partial(jobs.mutated, job="train", algorithm="reinforce_pp", model="tied", seed=3, batches=BATCHES)
LAUNCH = partial(jobs.mutated, job="launch", temperature=0.7)


def on_ranks(pool, job, mutant, check, size=3):
    """The law on `size` ranks with the fault, compared with one rank without it."""
    alone = pool.run(job, 1, "none")[0]
    results = pool.run(job, size, mutant)
    check(results) if check in (assert_replicas, assert_lockstep) else check(results, alone)


RANKS = {
    "all_reduce_left_out": (TRAIN, assert_replicas),
    "loss_run_around_the_reduction": (TRAIN, assert_replicas),
    "mean_of_the_ranks_means": (TRAIN, assert_same_training),
    "whitening_by_rank": (TRAIN, assert_same_training),
    "dropout_key_from_the_row_index": (TRAIN, assert_same_training),
    "clipping_before_the_reduction": (TRAIN, assert_same_training),
    "a_collective_that_one_rank_alone_issues": (TRAIN, assert_lockstep),
    "sampling_key_depends_on_the_rank": (LAUNCH, assert_same_training),
    "every_rank_samples_the_same_prompts": (LAUNCH, assert_same_training),
}
ON_POLICY = ("old_logprobs_in_bfloat16_log_softmax", "old_logprobs_shifted_by_one", "temperature_used_to_sample_alone")
IN_PROCESS = {
    "gradients_averaged_over_microbatches": test_laws.test_partition_into_microbatches,
    "metrics_averaged_over_microbatches": test_laws.test_partition_into_microbatches,
    "dropout_mask_from_the_column": test_laws.test_padding,
}


def test_every_mutant_has_a_law():
    assert MUTANTS.keys() == {"none", *RANKS, *ON_POLICY, *IN_PROCESS}


@pytest.mark.parametrize("mutant", RANKS)
def test_rejected_on_ranks(pool, mutant):
    job, check = RANKS[mutant]
    on_ranks(pool, job, "none", check)
    with REJECTED:
        on_ranks(pool, job, mutant, check)


@pytest.mark.parametrize("mutant", ON_POLICY)
def test_rejected_by_on_policy(pool, mutant):
    assert_on_policy(pool.run(LAUNCH, 1, "none")[0])
    with REJECTED:
        assert_on_policy(pool.run(LAUNCH, 1, mutant)[0])


@pytest.mark.parametrize("mutant", IN_PROCESS)
def test_rejected_in_process(mutant):
    with REJECTED, MUTANTS[mutant](None):
        examined(IN_PROCESS[mutant])(algorithm="grpo")


def examined(law):
    """The law without the search for a smallest example once it failed."""
    return settings(phases=[Phase.generate], max_examples=20)(given(data=st.data())(law.hypothesis.inner_test))


def altered(**changes):
    variant = VARIANTS["grpo"]._replace(**changes)
    return Algorithm(lambda scores: policy_loss(scores, variant), variant.weights, variant.advantage)


LOSSES = {
    "mask multiplied after the exponential": (
        ALGORITHMS["grpo"]._replace(loss=lambda scores: partial(_late_mask, scores)),
        test_laws.test_masked_positions_get_exactly_no_gradient,
    ),
    "mean inside the loss": (
        altered(weights=lambda mask, counts, group: mask / mask.sum().clamp(min=1)),
        test_laws.test_partition_into_ranks,
    ),
    "division by the padded width": (
        ALGORITHMS["grpo"]._replace(
            loss=lambda scores: (
                lambda params, buffers, batch, *, key=None: (
                    scores(params, buffers, batch, key=key).logprobs.mean(),
                    {},
                )
            )
        ),
        test_laws.test_padding,
    ),
    "writes into its inputs": (
        ALGORITHMS["grpo"]._replace(loss=lambda scores: partial(_writing, policy_loss(scores, VARIANTS["grpo"]))),
        test_laws.test_purity_and_silence,
    ),
}


def _late_mask(scores, params, buffers, batch, *, key=None):
    ratio = (scores(params, buffers, batch, key=key).logprobs - batch["old_logprobs"]).exp()
    return (batch["weights"] * batch["mask"] * ratio * batch["advantages"]).sum(), {}


def _writing(loss, params, buffers, batch, *, key=None):
    batch["advantages"].mul_(2)
    return loss(params, buffers, batch, key=key)


@pytest.mark.parametrize("name", LOSSES)
def test_rejected_losses(name):
    algorithm, law = LOSSES[name]
    with patch.dict(ALGORITHMS, mutant=algorithm), REJECTED:
        examined(law)(algorithm="mutant")


def assert_still_tied(params):
    assert torch.equal(decoder.unembedding(params), params["embed"]), "the embedding came untied"


@pytest.mark.parametrize("twice", [False, True])
def test_tied_weight_stored_twice(twice):
    """One leaf stays one after any number of steps; two leaves that began as one do not."""
    p = problem("supervised", "tied", 5, [(2, 4), (3, 3)])
    params = {**p.params, "unembed": p.params["embed"].clone()} if twice else p.params
    optimizer = optim.sgd(0.1)
    state = TrainState(params, optimizer.init(params), p.buffers)
    for _ in range(3):
        grads, _ = gradients(p.loss, state, [p.batch])
        state, _ = apply_gradients(state, grads, optimizer=optimizer)
    assert tree.structure(state.params) == tree.structure(params)
    if twice:
        with REJECTED:
            assert_still_tied(state.params)
    else:
        assert_still_tied(state.params)
