"""The laws that need no second process, for every algorithm. `tests/gloo` holds those on real ranks."""

from dataclasses import replace

import pytest
import torch
from functorch import make_fx
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from algorithms.grpo import VARIANTS, policy_loss
from algorithms.logprobs import Scores
from fncore import random, stats, tree
from fncore.batch import take
from fncore.grad import value_and_grad
from fncore.models import decoder
from fncore.sampling.generate import generate
from fncore.stats import Peak, Stat
from fncore.step import TrainState, gradients
from tests.laws import problems
from tests.laws.problems import ALGORITHMS, GROUP, MODELS, close, cuts, groups, models, problem, rows, seeds, weigh

every_algorithm = pytest.mark.parametrize("algorithm", ALGORITHMS)


def flat(metrics):
    """Metrics as plain tensors; a peak that saw nothing counts as 0."""
    return [
        leaf.clamp(min=0) if isinstance(value, Peak) else leaf
        for value in metrics.values()
        for leaf in tree.leaves(value)
    ]


@every_algorithm
@given(data=st.data())
def test_partition_into_microbatches(algorithm, data):
    """Any cut of the rows, empty parts included, gives the gradients and metrics of the whole."""
    lengths = data.draw(groups(least=1))
    p = problem(algorithm, data.draw(models), data.draw(seeds), lengths)
    part_of = torch.tensor(data.draw(cuts(len(lengths))))
    key = random.key(5)
    state = TrainState(p.params, None, p.buffers)
    whole, metrics = gradients(p.loss, state, [p.batch], key=key)
    parts = [take(p.batch, (part_of == part).nonzero().flatten()) for part in range(4)]
    summed, other = gradients(p.loss, state, parts, key=key)
    close(whole, summed, 1e-12)
    close(flat(metrics), flat(other), 1e-12)


@every_algorithm
@given(data=st.data())
def test_partition_into_ranks(algorithm, data):
    """Ranks that weigh their own groups by summed counts have gradients that add up to those of one rank."""
    lengths, seed, model = data.draw(groups(least=1)), data.draw(seeds), data.draw(models)
    p = problem(algorithm, model, seed, lengths)
    rank_of = torch.tensor(data.draw(cuts(len(lengths) // GROUP))).repeat_interleave(GROUP)
    shards = [take(p.batch, (rank_of == rank).nonzero().flatten()) for rank in range(4)]
    state = TrainState(p.params, None, p.buffers)
    parts = []
    collected: list[list] = [[] for _ in shards]
    # Ranks are simulated one after the other, so a reduction is played twice: first every rank's contributions are
    # collected, in the order in which a step reduces them, then each rank gets their sums in that order.
    for record in (True, False):
        for rank, shard in enumerate(shards):
            turn = iter(range(2))

            def reduce(values, rank=rank, turn=turn, record=record):
                if record:
                    collected[rank].append(values)
                    return values
                index = next(turn)
                return [torch.stack(field).sum(0) for field in zip(*(other[index] for other in collected), strict=True)]

            weighed = weigh(ALGORITHMS[algorithm], shard, reduce)
            if not record:
                parts.append(gradients(p.loss, state, [weighed])[0])
    total = parts[0]
    for part in parts[1:]:
        total = tree.add(total, part)
    close(gradients(p.loss, state, [p.batch])[0], total, 1e-12)


@every_algorithm
@given(data=st.data())
def test_padding(algorithm, data):
    """Wider padding, padding on the left and an all-masked row change no loss and no gradient; garbage stays unread."""
    lengths, extra = data.draw(groups(least=1)), data.draw(st.integers(1, 3))
    p = problem(algorithm, data.draw(models), data.draw(seeds), lengths)
    differentiate = value_and_grad(p.loss)
    key = random.key(5)
    total, _, grads = differentiate(p.params, p.buffers, p.batch, key=key)

    def pad(batch, left, right):
        def widen(name, value):
            fill = {"tokens": 3, "old_logprobs": 1e3, "ref_logprobs": -1e3}.get(name, 0)
            return torch.nn.functional.pad(value, (left, right), value=fill) if value.dim() > 1 else value

        return {name: widen(name, value) for name, value in batch.items()}

    def spoil(batch):
        spoiled = {
            name: torch.where(batch["mask"], batch[name], value)
            for name, value in (("old_logprobs", 1e3), ("ref_logprobs", torch.nan), ("advantages", torch.inf))
            if name in batch
        }
        return {**batch, **spoiled}

    index = torch.arange(p.batch["tokens"].shape[1])[None]
    left = pad(p.batch, extra, 0)
    left["segments"] = pad({"s": (index < p.batch["lengths"][:, None]).long()}, extra, 0)["s"]
    left["positions"] = pad({"p": index.expand(len(lengths), -1)}, extra, 0)["p"]
    dead = {name: torch.cat((value, value[:1])) for name, value in p.batch.items()}
    dead["mask"] = torch.cat((p.batch["mask"], torch.zeros_like(p.batch["mask"][:1])))
    for other in (pad(p.batch, 0, extra), left, dead, spoil(p.batch)):
        other_total, _, other_grads = differentiate(p.params, p.buffers, other, key=key)
        torch.testing.assert_close(other_total, total, rtol=1e-12, atol=1e-14)
        close(grads, other_grads, 1e-12)


@every_algorithm
@given(data=st.data())
def test_masked_positions_get_exactly_no_gradient(algorithm, data):
    """Whatever stands at a masked position, log-ratios of 1e3 included, its log-probability's gradient is exactly 0."""
    batch = weigh(ALGORITHMS[algorithm], rows(data.draw(seeds), data.draw(groups(least=1))))
    mask, loss = batch["mask"], ALGORITHMS[algorithm].loss(lambda params, *_, key=None: Scores(params, params))
    for extreme in (1e3, -1e3):
        old, ref = (torch.where(mask, batch[name], extreme) for name in ("old_logprobs", "ref_logprobs"))
        spoiled = {**batch, "old_logprobs": old, "ref_logprobs": ref}
        total, _, grads = value_and_grad(loss)(torch.full_like(old, -1.0), None, spoiled)
        assert total.isfinite()
        assert grads.isfinite().all()
        assert (grads[~mask] == 0).all()


@every_algorithm
@given(data=st.data())
def test_extreme_ratios_stay_finite(algorithm, data):
    """A policy that moved 1e3 nats away from the old or the reference one gives finite numbers all the same."""
    p = problem(algorithm, "tied", data.draw(seeds), data.draw(groups(least=1)))
    for shift in (-1e3, 1e3):
        moved = {name: p.batch[name] + shift for name in ("old_logprobs", "ref_logprobs")}
        total, _, grads = value_and_grad(p.loss)(p.params, p.buffers, {**p.batch, **moved})
        assert total.isfinite()
        assert all(leaf.isfinite().all() for leaf in tree.leaves(grads))


class Recorder(TorchDispatchMode):
    """The names of all operators that run."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@every_algorithm
@given(data=st.data())
def test_purity_and_silence(algorithm, data):
    """Same inputs, same bits; inputs untouched; no collective and no write into an input in the trace."""
    p = problem(algorithm, data.draw(models), data.draw(seeds), data.draw(groups(least=1, most=2)))
    key = random.key(3)
    inputs = tree.leaves((p.params, p.buffers, p.batch, key))
    before, versions = tree.copy(inputs), [leaf._version for leaf in inputs]
    differentiate = value_and_grad(p.loss)
    with Recorder() as recorder:
        first = differentiate(p.params, p.buffers, p.batch, key=key)
    second = differentiate(p.params, p.buffers, p.batch, key=key)
    assert all(torch.equal(a, b) for a, b in zip(tree.leaves(first), tree.leaves(second), strict=True))
    assert [leaf._version for leaf in inputs] == versions
    assert all(torch.equal(a, b) for a, b in zip(before, inputs, strict=True))
    assert recorder.names
    assert not [name for name in recorder.names if "c10d" in name]


@every_algorithm
def test_trace_holds_no_collective_and_no_write(algorithm):
    p = problem(algorithm, "untied", 1, [(2, 3), (1, 4)])
    leaves, shape = tree.leaves((p.params, p.batch)), tree.structure((p.params, p.batch))

    def run(leaves):
        params, batch = tree.unflatten(shape, leaves)
        return value_and_grad(p.loss)(params, p.buffers, batch)

    graph = make_fx(run)(leaves).graph
    inputs = {node for node in graph.nodes if node.op == "placeholder"}
    calls = [node for node in graph.nodes if node.op == "call_function"]
    assert len(calls) > 50
    for node in calls:
        assert "c10d" not in str(node.target)
        if getattr(node.target, "_schema", None) is not None and node.target._schema.is_mutable:
            assert node.args[0] not in inputs, f"{node.target} writes into an input"


@given(data=st.data())
def test_sampling_is_silent_and_pure(data):
    config = MODELS[data.draw(models)]
    params = problems.parameters(config, data.draw(seeds))
    buffers = decoder.buffers(config, device="cpu", dtype=torch.float64)
    inputs = tree.leaves((params, buffers))
    versions = [leaf._version for leaf in inputs]
    keys = random.split(random.key(1), 4)
    with Recorder() as recorder:
        generate(params, buffers, [[1, 2], [3]], config=config, keys=keys, max_new_tokens=4, stop_tokens={0})
    assert not [name for name in recorder.names if "c10d" in name]
    assert [leaf._version for leaf in inputs] == versions


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("variant", VARIANTS)
@given(data=st.data())
def test_on_policy(variant, dtype, data):
    """Before any update the ratio is exactly 1, nothing is clipped, and the KL to the reference is exactly 0."""
    config, temperature = MODELS[data.draw(models)], data.draw(st.sampled_from([0.6, 1.0, 1.7]))
    master = torch.float64 if dtype == torch.float64 else torch.float32
    params = problems.parameters(config, data.draw(seeds), dtype=master)
    buffers = decoder.buffers(config, device="cpu", dtype=dtype)
    scores = problems.scorer(config, dtype=dtype, temperature=temperature)
    batch = rows(data.draw(seeds), data.draw(groups(least=1)))
    with torch.no_grad():
        batch["old_logprobs"] = scores(params, buffers, batch).logprobs
        batch["ref_logprobs"] = scores(decoder.cast(tree.copy(params), dtype), buffers, batch).logprobs
    batch = weigh(ALGORITHMS[variant], batch)
    _, metrics, _ = value_and_grad(policy_loss(scores, VARIANTS[variant], kl_coef=0.1))(params, buffers, batch)
    report = stats.report(metrics)
    assert {report[name] for name in ("log_ratio/max_abs", "log_ratio/mean_abs", "clip_fraction", "kl/ref")} == {0.0}


def test_on_policy_breaks_with_dropout_of_different_keys():
    """The law above is not vacuous: scoring with dropout leaves the ratio at 1 no longer."""
    p = problem("grpo", "tied", 0, [(2, 4), (3, 2)])
    with torch.no_grad():
        p.batch["old_logprobs"] = p.score(p.params, p.buffers, p.batch, key=random.key(1)).logprobs
    _, metrics, _ = value_and_grad(p.loss)(p.params, p.buffers, p.batch, key=random.key(2))
    assert metrics["log_ratio/max_abs"].value > 1e-3


@every_algorithm
@pytest.mark.parametrize("model", MODELS)
def test_used(algorithm, model):
    """Every leaf receives gradient from the loss that trains it; a tied embedding is one leaf."""
    p = problem(algorithm, model, 4, [(2, 4), (3, 5), (2, 6), (4, 3)])
    p.batch["rewards"] = torch.tensor([0.0, 1.0, 2.0, 0.0], dtype=torch.float64)
    batch = weigh(ALGORITHMS[algorithm], p.batch)
    _, _, grads = value_and_grad(p.loss)(p.params, p.buffers, batch)
    # A bias of the keys moves all scores of a query alike, which softmax ignores: with RoPE it has gradient from
    # the second position on, so no leaf is excepted here.
    unused = [name for name, leaf in tree.named_leaves(grads) if not leaf.abs().max() > 0]
    assert not unused
    assert ("unembed" in dict(tree.named_leaves(grads))) != MODELS[model].tie_word_embeddings


@given(data=st.data())
def test_tied_gradient_is_the_sum_of_both_uses(data):
    """The one leaf's gradient equals those of an untied twin's two leaves together."""
    config = MODELS["tied"]
    lengths, seed = data.draw(groups(least=1)), data.draw(seeds)
    p = problem("supervised", "tied", seed, lengths)
    twin = replace(config, tie_word_embeddings=False)
    loss = ALGORITHMS["supervised"].loss(problems.scorer(twin))
    _, _, one = value_and_grad(p.loss)(p.params, p.buffers, p.batch)
    _, _, two = value_and_grad(loss)({**p.params, "unembed": p.params["embed"]}, p.buffers, p.batch)
    torch.testing.assert_close(one["embed"], two["embed"] + two["unembed"], rtol=1e-11, atol=1e-13)


@every_algorithm
def test_all_masked_batch_is_zero(algorithm):
    """Nothing to learn from: the loss and all gradients are exactly 0, and metrics are numbers."""
    p = problem(algorithm, "untied", 2, [(2, 0), (3, 0)])
    total, metrics, grads = value_and_grad(p.loss)(p.params, p.buffers, p.batch)
    assert total == 0
    assert all((leaf == 0).all() for leaf in tree.leaves(grads))
    assert set(stats.report(metrics).values()) == {0.0}
    assert all(isinstance(value, Stat | Peak) for value in metrics.values())


def test_a_batch_of_padding_alone():
    """Rows of length 0 have nothing to score."""
    p = problem("grpo", "tied", 1, [(2, 3), (1, 2)])
    empty = {**p.batch, "lengths": p.batch["lengths"] * 0, "mask": p.batch["mask"] & False}
    assert p.score(p.params, p.buffers, empty).logprobs.abs().max() == 0
