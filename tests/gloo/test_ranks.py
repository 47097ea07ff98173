"""The laws on real ranks: replicas, ranks, lockstep, and what a step sends."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from algorithms.grpo import VARIANTS
from tests.gloo import jobs
from tests.gloo.checks import assert_lockstep, assert_on_policy, assert_replicas, assert_same_training, changed
from tests.laws.problems import ALGORITHMS, MODELS, groups, models, seeds

every_algorithm = pytest.mark.parametrize("algorithm", ALGORITHMS)


@every_algorithm
@given(data=st.data())
@settings(max_examples=3)
def test_replicas_ranks_and_lockstep(pool, algorithm, data):
    """Any data, empty and all-masked shards included: 1 to 4 ranks end with equal parameters, the same bits on each."""
    batches = data.draw(st.lists(groups(most=6), min_size=2, max_size=3))
    model, seed = data.draw(models), data.draw(seeds)
    alone = pool.run(jobs.train, 1, algorithm, model, seed, batches)[0]
    for size in (2, 3, 4):
        results = pool.run(jobs.train, size, algorithm, model, seed, batches)
        assert_replicas(results)
        assert_lockstep(results)
        assert_same_training(results, alone)
        assert results[0]["norm"] == pytest.approx(alone["norm"], rel=1e-9)


@every_algorithm
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_replicas_in_low_precision(pool, algorithm, dtype):
    batches = [[(2, 3), (3, 1), (1, 4), (2, 0), (2, 2), (4, 5)]] * 3
    for size in (2, 3):
        assert_replicas(pool.run(jobs.train, size, algorithm, "untied", 11, batches, dtype))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_launched_step_on_ranks(pool, variant, model):
    """The training step of launch/grpo.py: the same prompts, completions and parameters on 1 to 4 ranks."""
    alone = pool.run(jobs.launch, 1, model, variant=variant)[0]
    for size in (2, 3, 4):
        results = pool.run(jobs.launch, size, model, variant=variant)
        assert_replicas(results)
        assert_lockstep(results)
        assert_same_training(results, alone)
    assert_on_policy(alone)
    assert alone["records"][0]["grad_norm"] > 0


OPTIONS = {
    "dropout while sampling and scoring": dict(dropout=0.2, rollout_eval_mode=False),
    "several updates": dict(updates_per_rollout=2),
    "dynamic sampling": dict(dynamic_sampling=True, group_size=2),
    "truncated left out": dict(truncated="mask"),
    "truncated punished": dict(truncated="punish", overlong_buffer=3),
    "KL in the reward": dict(kl_placement="reward", kl_coef=0.5),
    "entropy bonus": dict(entropy_coef=0.1),
    "small microbatches": dict(tokens_per_microbatch=30),
    "fewer prompts than ranks": dict(prompts_per_step=2),
    "other bounds": dict(clip_low=0.01, clip_high=0.02, updates_per_rollout=2),
    "weight decay": dict(weight_decay=0.1),
    "clipped gradients": dict(clip_grad=0.02),
    "k2": dict(kl_estimator="k2", updates_per_rollout=2, kl_coef=1.0),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_on_ranks_and_its_effect(pool, name):
    """An option keeps the laws, and it does something: the parameters differ from those without it."""
    alone = pool.run(jobs.launch, 1, **OPTIONS[name])[0]
    for size in (2, 4):
        results = pool.run(jobs.launch, size, **OPTIONS[name])
        assert_replicas(results)
        assert_lockstep(results)
        assert_same_training(results, alone)
    base = {"prompts_per_step": 2} if "prompts_per_step" in OPTIONS[name] else {}
    neutral = {k: v for k, v in OPTIONS[name].items() if k in ("updates_per_rollout", "group_size")}
    if name == "several updates":
        neutral = {}
    without = pool.run(jobs.launch, 1, **base, **neutral)[0]
    assert changed(without, alone) == (name not in ("small microbatches", "fewer prompts than ranks"))


def test_bounds_on_gradients_that_are_never_reached(pool):
    without, bounded = (pool.run(jobs.launch, 1, clip_grad=bound)[0] for bound in (float("inf"), 1e9))
    assert without["prints"] == bounded["prints"]


def test_measuring_changes_nothing(pool):
    """Without measurements the parameters are the same bits, and what was not measured is not recorded."""
    with_them, without = (
        pool.run(jobs.launch, 2, kl_coef=0.0)[0],
        pool.run(jobs.launch, 2, kl_coef=0.0, measure_every=0)[0],
    )
    assert with_them["prints"] == without["prints"]
    for name in ("log_ratio/max_abs", "kl/ref"):
        assert all(name in record for record in with_them["records"])
        assert [name in record for record in without["records"]] == [True, False, False]


def test_dropout_in_rollouts_moves_the_ratio(pool):
    """With --no-rollout-eval-mode and dropout, new and old log-probabilities differ before any update; else never."""
    off = pool.run(jobs.launch, 2, dropout=0.2, rollout_eval_mode=False)[0]["records"][0]
    on = pool.run(jobs.launch, 2, dropout=0.2)[0]["records"][0]
    assert off["log_ratio/max_abs"] > 1e-3
    assert on["log_ratio/max_abs"] == 0.0


def test_later_updates_are_off_policy(pool):
    record = pool.run(jobs.launch, 1, updates_per_rollout=3)[0]["records"][0]
    assert record["log_ratio/max_abs"] == 0.0
    assert record["log_ratio/last_max_abs"] > 1e-3


def test_dynamic_sampling_says_what_it_did(pool):
    records = pool.run(jobs.launch, 3, dynamic_sampling=True, group_size=2)[0]["records"]
    assert all(record["groups/kept"] <= 5 <= record["groups/drawn"] for record in records)
    assert any(record["groups/drawn"] > 5 for record in records)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_on_policy_at_launch_in_low_precision(pool, dtype):
    for result in pool.run(jobs.launch, 2, dtype=dtype, dropout=0.1):
        assert_on_policy(result)


def test_a_step_sends_gradients_and_a_few_counts(pool):
    """No parameter, no buffer: 4 bytes for each gradient element, and less than 1 kB besides."""
    result = pool.run(jobs.launch, 2, dtype="float32", steps=1)[0]
    elements = sum(leaf.size for leaf in result["params"])
    assert 4 * elements <= result["bytes"] <= 4 * elements + 1000


def test_reductions_by_hand(pool):
    for size in (1, 2, 3, 4):
        total = size * (size + 1) / 2
        for rank, result in enumerate(pool.run(jobs.reduce_values, size)):
            assert result.grad == total
            assert result.mean == pytest.approx(total / (4 * size))
            assert result.peak == size
            assert result.counts == [int(total)]
            assert result.gathered == [float(r + 1) for r in range(size)]
            assert result.share == list(range(7))[rank::size]


def test_a_differing_replica_is_named(pool):
    for size in (2, 3, 4):
        for message in pool.run(jobs.differing, size):
            assert "leaf b.c" in message
            assert "rank" in message
    assert pool.run(jobs.differing, 3)[0].startswith("replicas differ: leaf b.c of rank 2 ")


@pytest.mark.parametrize("part", ["params", "opt_state"])
@pytest.mark.parametrize("script", ["grpo", "sft"])
def test_the_scripts_notice_a_differing_replica(pool, tmp_path, script, part):
    """One rank's update goes astray, in the parameters or in the optimizer's moments."""
    for rank, message in enumerate(pool.run(jobs.astray, 2, script, part, str(tmp_path / "run"))):
        assert f"replicas differ: leaf {part}." in message, rank


def test_failures_of_rewards_are_added_over_ranks(pool):
    assert pool.run(jobs.failing, 3) == [3, 3, 3]


def test_half_precision_is_added_in_float32(pool):
    """1 + 2^-8 is 1 in bfloat16, and so would 1 + 2^-8 + 2^-8 be if it were added there."""
    assert (torch.tensor(1.0).bfloat16() + 2**-8) == 1.0
    assert pool.run(jobs.reduce_values, 3)[0].small == 1.0 + 2**-7
