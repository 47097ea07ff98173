import math
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fncore import random, tree
from fncore.models import decoder
from fncore.sampling.generate import filter_logits, generate, sample

seeds = st.integers(0, 2**31)
ragged = st.lists(st.lists(st.integers(0, 10), min_size=1, max_size=7), min_size=1, max_size=4)
MODELS = {
    "plain": {},
    "qwen": dict(qk_norm=True, qkv_bias=True, tie_word_embeddings=False),
    "sliding": dict(windows=(3, None)),
}
every_model = pytest.mark.parametrize("model", MODELS)


def keys_of(seed, num):
    return random.split(random.fold_in(random.key(seed), "sample"), num)


def run(model, prompts, keys, *, new=6, stops=(), **options):
    config, params, buffers = model
    return generate(
        params, buffers, prompts, config=config, keys=keys, max_new_tokens=new, stop_tokens=stops, **options
    )


def next_logits(model, tokens, key=None):
    """Logits after `tokens`, by one forward pass over all of them."""
    config, params, buffers = model
    key = None if key is None else key[None]
    return decoder.unembed(
        params, decoder.apply(params, buffers, torch.tensor([tokens]), config=config, key=key).hidden
    )[0, -1]


def slowly(model, prompt, key, *, new=6, stops=(), dropout_key=None, **options):
    """The definition of a completion: full forward, one draw, again."""
    tokens = list(prompt)
    for _ in range(new):
        logits = next_logits(model, tokens, dropout_key)
        drawn = sample(logits[None], random.fold_in(key, len(tokens))[None], **options).item()
        tokens.append(drawn)
        if drawn in stops:
            return tokens, False
    return tokens, True


# ---- what is generated


@every_model
@given(seed=seeds, prompts=ragged)
def test_greedy_is_the_likeliest_token_at_every_step(tiny, model, seed, prompts):
    model = tiny(seed=seed % 5, **MODELS[model])
    rollouts = run(model, prompts, keys_of(seed, len(prompts)), temperature=0.0)
    for row, prompt in zip(rollouts.rows(), prompts, strict=True):
        expected = list(prompt)
        for _ in range(6):
            expected.append(next_logits(model, expected).argmax().item())
        assert row == expected


@every_model
@given(
    seed=seeds,
    prompts=ragged,
    group=st.integers(1, 3),
    stops=st.sets(st.integers(0, 10), max_size=4),
    slots=st.integers(1, 9),
)
def test_a_batch_of_ragged_prompts_equals_one_by_one(tiny, model, seed, prompts, group, stops, slots):
    """Rows end at different times, so this runs through compaction too; and the cache grows by few slots."""
    model = tiny(seed=seed % 5, **MODELS[model])
    keys = keys_of(seed, group * len(prompts))
    options = dict(stops=stops, temperature=1.3)
    with mock.patch("fncore.sampling.generate.SLOTS", slots):
        rollouts = run(model, prompts, keys, new=8, **options)
    for index, row in enumerate(rollouts.rows()):
        prompt = prompts[index // group]
        expected, truncated = slowly(model, prompt, keys[index], new=8, **options)
        assert row == expected
        assert rollouts.truncated[index].item() == truncated
        alone = run(model, [prompt], keys[index : index + 1], new=8, **options)
        assert alone.rows() == [row]


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@given(seed=seeds, prompts=ragged, cut=st.integers(0, 3))
def test_completions_do_not_depend_on_their_neighbours(tiny, dropout, seed, prompts, cut):
    """Fewer samples of each prompt, and fewer prompts, in another order, leave a completion as it was."""
    model = tiny(seed=seed % 5, dropout=dropout)
    group, count = 3, len(prompts)
    keys = keys_of(seed, group * count).view(count, group, 2)
    dropout_keys = keys_of(seed + 1, group * count).view(count, group, 2)

    def complete(rows, samples):
        chosen, masks = (k[rows][:, samples].flatten(0, 1) for k in (keys, dropout_keys))
        more = dict(dropout_keys=masks) if dropout else {}
        return run(model, [prompts[row] for row in rows], chosen, stops=(3,), **more).rows()

    whole = complete(list(range(count)), [0, 1, 2])
    assert complete(list(range(count)), [2]) == whole[2::3]
    assert complete(list(range(count)), [2, 1]) == [whole[3 * row + g] for row in range(count) for g in (2, 1)]
    rows = list(range(cut, count))[::-1]
    if rows:
        assert complete(rows, [0, 1, 2]) == [whole[3 * row + g] for row in rows for g in range(3)]


def test_order_is_grouped_by_prompt(tiny):
    rollouts = run(tiny(), [[1], [2, 3]], keys_of(0, 6), new=2)
    assert rollouts.prompt_lengths.tolist() == [1, 1, 1, 2, 2, 2]
    assert [row[0] for row in rollouts.rows()] == [1, 1, 1, 2, 2, 2]
    assert len({tuple(row) for row in rollouts.completions()[:3]}) > 1


@given(seed=seeds)
def test_repeats_exactly_and_changes_nothing_that_it_is_given(tiny, seed):
    model = tiny()
    before, versions = tree.copy(model[1:]), [leaf._version for leaf in tree.leaves(model[1:])]
    first, second = (run(model, [[1, 2], [3]], keys_of(seed, 4)) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second))
    assert [leaf._version for leaf in tree.leaves(model[1:])] == versions
    assert all(torch.equal(a, b) for a, b in zip(tree.leaves(model[1:]), tree.leaves(before)))


# ---- where it ends


@given(seed=seeds, prompts=ragged, new=st.integers(1, 9), stops=st.sets(st.integers(0, 10), max_size=6))
def test_a_row_ends_with_its_first_stop_token_or_at_the_limit(tiny, seed, prompts, new, stops):
    rollouts = run(tiny(), prompts, keys_of(seed, 2 * len(prompts)), new=new, stops=stops, pad_token=9)
    width = rollouts.tokens.shape[1]
    assert width == rollouts.lengths.max()
    for index, completion in enumerate(rollouts.completions()):
        prompt, row = prompts[index // 2], rollouts.tokens[index].tolist()
        end = len(prompt) + len(completion)
        assert 1 <= len(completion) <= new
        assert row[: len(prompt)] == prompt
        assert not stops & set(completion[:-1])
        assert rollouts.truncated[index].item() == (completion[-1] not in stops)
        assert completion[-1] in stops or len(completion) == new
        assert row[end:] == [9] * (width - end)
        assert rollouts.mask[index].tolist() == [len(prompt) <= t < end for t in range(width)]


def test_a_stop_token_in_the_prompt_or_equal_to_padding_is_nothing_special(tiny):
    model = tiny()
    free = run(model, [[5, 0, 5]], keys_of(4, 8), new=8)
    stopped = run(model, [[5, 0, 5]], keys_of(4, 8), new=8, stops=(0,), pad_token=0)
    for long, short in zip(free.completions(), stopped.completions(), strict=True):
        assert short == (long[: long.index(0) + 1] if 0 in long else long)
    assert 0 < stopped.truncated.sum() < 8


def test_all_rows_may_end_at_once(tiny):
    rollouts = run(tiny(), [[1, 2], [3]], keys_of(0, 4), stops=range(11))
    assert rollouts.lengths.tolist() == [3, 3, 2, 2]
    assert not rollouts.truncated.any()
    assert rollouts.tokens.shape == (4, 3)


def test_no_prompts_and_no_new_tokens(tiny):
    empty = run(tiny(), [], keys_of(0, 0))
    assert empty.rows() == empty.completions() == []
    assert empty.mask.shape == empty.tokens.shape
    still = run(tiny(), [[1, 2], [3]], keys_of(0, 2), new=0)
    assert still.rows() == [[1, 2], [3]]
    assert still.completions() == [[], []]
    assert not still.mask.any()


def test_the_position_limit_is_checked_before_any_work(tiny):
    model = tiny(max_position_embeddings=8)
    assert run(model, [[1] * 3], keys_of(0, 1), new=5).lengths.tolist() == [8]
    with pytest.raises(ValueError, match="4 tokens and 5 new ones exceed the model's 8 positions"):
        run((model[0], None, None), [[1], [1] * 4], keys_of(0, 2), new=5)


def test_bad_requests_are_refused(tiny):
    with pytest.raises(ValueError, match="empty prompt"):
        run(tiny(), [[1], []], keys_of(0, 2))
    with pytest.raises(ValueError, match="3 keys are not a multiple of 2 prompts"):
        run(tiny(), [[1], [2]], keys_of(0, 3))


# ---- what is drawn


def renormalised(logits, temperature, top_k=0, top_p=1.0):
    """The distribution that sampling promises, by sorting and adding up in plain Python."""
    probs = (logits.double() / temperature).softmax(-1).tolist()
    ranked = sorted(range(len(probs)), key=lambda token: (-probs[token], token))
    ranked = ranked[: top_k or len(ranked)]
    mass = sum(probs[token] for token in ranked)
    kept, reached = [], 0.0
    for token in ranked:
        if kept and reached >= top_p:
            break
        kept.append(token)
        reached += probs[token] / mass
    total = sum(probs[token] for token in kept)
    shares = [probs[token] / total if token in kept else 0.0 for token in range(len(probs))]
    return torch.tensor(shares, dtype=torch.float64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "options",
    [
        dict(temperature=1.0),
        dict(temperature=0.6),
        dict(temperature=1.7),
        dict(temperature=1.0, top_k=3),
        dict(temperature=1.3, top_p=0.7),
        dict(temperature=1.5, top_k=5, top_p=0.8),
    ],
    ids=str,
)
def test_frequencies_of_two_tokens_match_the_probabilities_of_the_full_forward(tiny, options, dtype):
    """Chi-square over all pairs of tokens: the second is drawn from the cache, and its probability scored without."""
    model, num = tiny(seed=3, dtype=dtype, num_hidden_layers=1, windows=None), 6000
    prompt = [1, 7, 4]
    pairs = torch.tensor(run(model, [prompt], keys_of(11, num), new=2, **options).completions())
    counts = torch.bincount(pairs[:, 0] * 11 + pairs[:, 1], minlength=121).view(11, 11)
    first = renormalised(next_logits(model, prompt), **options)
    second = torch.stack([renormalised(next_logits(model, [*prompt, token]), **options) for token in range(11)])
    expected = first[:, None] * second * num
    assert (counts[expected == 0] == 0).all()
    rare = (expected > 0) & (expected < 5)  # lumped together
    observed = torch.cat([counts[expected >= 5].double(), counts[rare].sum()[None].double()])
    expected = torch.cat([expected[expected >= 5], expected[rare].sum()[None].clamp(min=1e-9)])
    assert len(expected) > 5
    chi = ((observed - expected)[:-1] ** 2 / expected[:-1]).sum()
    freedom = len(expected) - 1
    assert chi < freedom + 5 * math.sqrt(2 * freedom)
    assert abs(observed[-1] - expected[-1]) < 5 * math.sqrt(expected[-1]) + 5


@given(seed=seeds, top_k=st.integers(0, 12), top_p=st.floats(0.0, 1.0), temperature=st.floats(0.3, 3.0))
def test_filter_logits_keeps_the_smallest_likeliest_set(seed, top_k, top_p, temperature):
    logits = random.normal(random.key(seed), (3, 11), dtype=torch.float64) * 2
    kept = filter_logits(logits / temperature, top_k=top_k, top_p=top_p)
    for row, before in zip(kept, logits, strict=True):
        expected = renormalised(before, temperature, top_k, top_p)
        torch.testing.assert_close(row.softmax(-1), expected, rtol=1e-9, atol=1e-12)
        unchanged = row > -torch.inf
        assert torch.equal(row[unchanged], (before / temperature)[unchanged])


def test_filter_logits_by_hand():
    logits = torch.tensor([0.1, 0.5, 0.15, 0.25]).log()
    stays = lambda **options: (filter_logits(logits, **options) > -torch.inf).tolist()
    assert stays() == [True] * 4
    assert stays(top_k=2) == [False, True, False, True]
    assert stays(top_k=9) == [True] * 4
    assert stays(top_p=0.45) == [False, True, False, False]
    assert stays(top_p=0.74) == [False, True, False, True]
    assert stays(top_p=0.76) == [False, True, True, True]
    assert stays(top_p=0.0) == [False, True, False, False]
    assert stays(top_k=2, top_p=0.66) == [False, True, False, False]  # 0.5 of 0.75 is two thirds


def test_sampling_at_temperature_zero_needs_no_luck():
    logits = torch.tensor([[0.0, 3.0, 1.0]]).expand(50, -1)
    assert sample(logits, keys_of(0, 50), temperature=0.0).tolist() == [1] * 50
    assert sample(logits.bfloat16(), keys_of(0, 50), temperature=1e-4).tolist() == [1] * 50


# ---- dropout


def test_dropout_keys_change_what_is_drawn_and_nothing_else_does(tiny):
    keys, masks = keys_of(0, 16), keys_of(1, 16)
    off = run(tiny(), [[1, 2]], keys).rows()
    on = run(tiny(dropout=0.3), [[1, 2]], keys, dropout_keys=masks).rows()
    assert on != off
    assert on == run(tiny(dropout=0.3), [[1, 2]], keys, dropout_keys=masks).rows()
    assert on != run(tiny(dropout=0.3), [[1, 2]], keys, dropout_keys=keys_of(2, 16)).rows()
    assert off == run(tiny(dropout=0.3), [[1, 2]], keys).rows()
    assert off == run(tiny(), [[1, 2]], keys, dropout_keys=masks).rows()


@given(seed=seeds, prompts=ragged, group=st.integers(1, 2))
def test_dropout_while_sampling_is_that_of_a_full_forward_with_the_same_keys(tiny, seed, prompts, group):
    """So scoring with these keys gives the probabilities that tokens were drawn with."""
    model = tiny(seed=seed % 5, dropout=0.3)
    keys, masks = keys_of(seed, group * len(prompts)), keys_of(seed + 1, group * len(prompts))
    rows = run(model, prompts, keys, dropout_keys=masks).rows()
    for index, row in enumerate(rows):
        assert row == slowly(model, prompts[index // group], keys[index], dropout_key=masks[index])[0]
