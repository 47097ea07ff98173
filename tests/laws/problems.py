"""Random problems for the laws: every algorithm, on small decoders and ragged batches, in float64."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor

from algorithms import kl
from algorithms.advantages import Moments, moments, whiten
from algorithms.grpo import VARIANTS, policy_loss
from algorithms.logprobs import score
from algorithms.supervised import cross_entropy
from algorithms.weights import Counts, count, prompt_mean, token_mean
from fncore import random, tree
from fncore.batch import Batch, spans
from fncore.models import decoder

GROUP, BUDGET = 2, 6
SIZES = dict(
    vocab_size=17, hidden_size=8, intermediate_size=12, num_attention_heads=2, num_key_value_heads=1, head_dim=4
)
MODELS = {
    "tied": decoder.Config(**SIZES, num_hidden_layers=1, qk_norm=True, dropout=0.3),
    "untied": decoder.Config(**SIZES, num_hidden_layers=2, tie_word_embeddings=False, qkv_bias=True, windows=(3, None)),
}


class Algorithm(NamedTuple):
    """A loss on top of a scoring function, with how its batches get advantages and weights."""

    loss: Callable[[Any], Callable[..., Any]]
    weights: Callable[..., Tensor]
    advantage: Callable[[Tensor], Tensor] | None = None
    whiten: bool = False


def _variant(name: str, **options: Any) -> Algorithm:
    variant = VARIANTS[name]
    make = lambda scores: policy_loss(scores, variant, **options)
    return Algorithm(make, variant.weights, variant.advantage, variant.whiten)


ALGORITHMS = {name: _variant(name) for name in VARIANTS}
ALGORITHMS |= {
    f"grpo_{name}": _variant("grpo", kl_estimator=kl.ESTIMATORS[name], kl_coef=0.1) for name in kl.ESTIMATORS
}
ALGORITHMS["grpo_entropy"] = _variant("grpo", entropy_coef=0.05)
ALGORITHMS["grpo_prompt_mean"] = _variant("grpo")._replace(weights=prompt_mean)
ALGORITHMS["supervised"] = Algorithm(cross_entropy, token_mean)


class Problem(NamedTuple):
    config: decoder.Config
    params: decoder.Params
    buffers: decoder.Buffers
    score: Callable[..., Any]
    loss: Callable[..., Any]
    batch: Batch


def scorer(
    config: decoder.Config, *, dtype: torch.dtype = torch.float64, temperature: float = 0.8
) -> Callable[..., Any]:
    return partial(score, partial(decoder.forward, config=config, dtype=dtype), temperature=temperature)


def parameters(config: decoder.Config, seed: int, *, dtype: torch.dtype = torch.float64, scale: float = 8.0) -> Any:
    """Larger than at a real start, so that the distribution is far from uniform and every gradient counts."""
    params = decoder.init(config, key=random.key(seed), dtype=dtype)
    jitter = lambda name, leaf: leaf * scale if leaf.dim() > 1 else leaf + 0.1 * noise(seed, name, leaf.shape)
    return tree.map_named(jitter, params)


def noise(seed: int, name: str, shape: Any) -> Tensor:
    return random.normal(random.fold_in(random.key(seed), name), tuple(shape), dtype=torch.float64)


def rows(seed: int, lengths: list[tuple[int, int]], *, vocab: int = 17) -> Batch:
    """Random rows of (prompt, completion) lengths; two neighbours make a group."""
    num, key = len(lengths), random.key(seed)
    width = max([1, *(sum(pair) for pair in lengths)])
    column = lambda values: torch.tensor(values, dtype=torch.int64)
    starts, ends = column([a for a, _ in lengths]), column([a + b for a, b in lengths])
    ids = torch.arange(num)
    draw = lambda name, of: random.bits(random.fold_in(random.fold_in(key, name), of), (width,)) % vocab
    coarse = (
        3 * random.uniform(random.fold_in(key, "rewards"), (num,), dtype=torch.float64)
    ).floor()  # constant groups
    return {
        "tokens": torch.where(torch.arange(width) < starts[:, None], draw("prompt", ids // GROUP), draw("reply", ids)),
        "mask": spans(starts, ends, width=width),
        "lengths": ends,
        "group": ids // GROUP,
        "id": ids + 100 * (seed % 7),
        "row": ids,
        "rewards": coarse,
        "old_logprobs": -2 + 0.7 * noise(seed, "old", (num, width)),
        "ref_logprobs": -2 + 0.7 * noise(seed, "ref", (num, width)),
    }


def weigh(algorithm: Algorithm, batch: Batch, reduce: Callable[[Any], Any] = lambda values: values) -> Batch:
    """Advantages and weights of a rank's rows; `reduce` adds counts and moments over ranks."""
    mask = batch["mask"]
    counts = Counts(*reduce(count(mask, batch["group"], budget=BUDGET)))
    out = {**batch, "weights": algorithm.weights(mask, counts, batch["group"])}
    if algorithm.advantage is not None:
        values = algorithm.advantage(batch["rewards"].view(-1, GROUP)).view(-1, 1) * mask
        out["advantages"] = (
            whiten(values, mask, Moments(*reduce(moments(values, mask)))) if algorithm.whiten else values
        )
    return out


def problem(algorithm: str, model: str, seed: int, lengths: list[tuple[int, int]]) -> Problem:
    config = MODELS[model]
    params = parameters(config, seed)
    buffers = decoder.buffers(config, device="cpu", dtype=torch.float64)
    scores = scorer(config)
    batch = rows(seed, lengths)
    if algorithm in VARIANTS:  # ratios near those of training, so that clips are on for some tokens and off for others
        with torch.no_grad():
            logprobs = scores(params, buffers, batch).logprobs
        width = 1e-3 if "gspo" in algorithm else 0.3
        batch["old_logprobs"] = logprobs + width * noise(seed, "old", logprobs.shape)
    batch = weigh(ALGORITHMS[algorithm], batch)
    return Problem(config, params, buffers, scores, ALGORITHMS[algorithm].loss(scores), batch)


seeds = st.integers(0, 2**31)
models = st.sampled_from(sorted(MODELS))
pair = st.tuples(st.integers(1, 4), st.integers(0, BUDGET))


def groups(least: int = 0, most: int = 4) -> st.SearchStrategy[list[tuple[int, int]]]:
    """Lengths of the rows of up to `most` groups; a completion of length 0 is an all-masked row."""
    return st.lists(st.lists(pair, min_size=GROUP, max_size=GROUP), min_size=least, max_size=most).map(
        lambda parts: [row for part in parts for row in part]
    )


def cuts(num: int, parts: int = 4) -> st.SearchStrategy[list[int]]:
    """Which part each of `num` things goes to; parts may stay empty."""
    return st.lists(st.integers(0, parts - 1), min_size=num, max_size=num)


def close(left: Any, right: Any, relative: float) -> None:
    """Equal up to `relative` of the larger tree's norm, so that rounding of cancelled sums is not held against it."""
    difference = tree.global_norm(tree.add(left, tree.scale(right, -1.0)))
    size = max(float(tree.global_norm(left)), float(tree.global_norm(right)), 1e-6)
    assert float(difference) <= relative * size, f"differ by {float(difference) / size:.3g} of their norm"
