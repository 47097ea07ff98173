"""What the laws on ranks assert."""

import numpy as np


def assert_replicas(results):
    """Params, optimizer state and buffers have the same bits on every rank."""
    assert all(result["prints"] == results[0]["prints"] for result in results), "replicas differ"


def assert_lockstep(results):
    """Every rank issued the same collectives: operation, size and dtype, in the same order."""
    assert all(result["calls"] == results[0]["calls"] for result in results), "collectives differ"


def assert_same_training(results, alone):
    """Parameters as on one rank, up to rounding in float64; the launched step also sampled the same completions."""
    for left, right in zip(results[0]["params"], alone["params"], strict=True):
        assert np.abs(left - right).max() <= 1e-9 * max(np.abs(right).max(), 1e-12), "parameters differ from one rank's"
    for mine, other in zip(results[0].get("records", ()), alone.get("records", ()), strict=True):
        assert mine["completions"] == other["completions"], "completions differ from one rank's"


def assert_on_policy(result):
    first = result["records"][0]
    assert first["log_ratio/max_abs"] == 0.0, "the ratio is not 1 before any update"
    assert first["kl/ref"] == 0.0, "the KL to the reference is not 0 before any update"


def changed(left, right):
    """Whether two runs ended in different parameters."""
    return any(np.abs(a - b).max() > 1e-6 for a, b in zip(left["params"], right["params"], strict=True))
