"""Randomness as a value: a counter-based hash in tensor arithmetic.

A key is an int64 tensor `[..., 2]` of two 32-bit words. It is derived, never consumed: the same key always gives the
same numbers, on every device, on every rank, eager or compiled, under `torch.func.vmap` too. Leading dimensions of a
key are batch dimensions, so one call draws for every row with a key of the row's own.

The mixer is two xor-shift-multiply rounds on 32-bit words held in int64 (products stay below 2^63). It is made for
training, where statistical quality matters; it is not cryptographic.
"""

import math
import zlib

import torch
import torch.nn.functional as F
from torch import Tensor

_WORD = 0xFFFFFFFF
_BLOCK = 128  # classes that one draw adds up one by one


def _mix(x: Tensor) -> Tensor:
    """A bijection of 32-bit words in which every input bit flips each output bit about half of the time."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _WORD
    x = ((x ^ (x >> 15)) * 0x31848BAB) & _WORD
    x = ((x ^ (x >> 14)) * 0x21F0AAAD) & _WORD
    return x ^ (x >> 16)


def _hash(word: Tensor, first: Tensor, second: Tensor) -> Tensor:
    return _mix(_mix(word ^ first) ^ second)


def key(seed: int, *, device: torch.device | str = "cpu") -> Tensor:
    """The root key `[2]` of a 64-bit seed."""
    return fold_in(torch.tensor([0x243F6A88, 0x5A308D31], device=device), seed)


def fold_in(key: Tensor, data: int | str | Tensor) -> Tensor:
    """A new key for each value of `data`: `[..., 2]` with `[...]` gives `[..., 2]`, broadcast.

    `data` is a 64-bit integer, a tensor of them, or the name of a purpose ("dropout", "sample").
    """
    if isinstance(data, str):
        data = zlib.crc32(data.encode())
    data = torch.as_tensor(data, dtype=torch.int64, device=key.device)
    low, high = data & _WORD, (data >> 32) & _WORD
    first, second = key[..., 0], key[..., 1]
    left = _hash(_hash(low, first, second), high, torch.full_like(high, 0x1B873593))
    right = _hash(_hash(low, second, first ^ 0x5BD1E995), high, torch.full_like(high, 0x2C1B3C6D))
    return torch.stack((left, right), dim=-1)


def split(key: Tensor, num: int) -> Tensor:
    """`num` independent keys: `[..., 2]` gives `[..., num, 2]`."""
    return fold_in(key[..., None, :], torch.arange(num, device=key.device))


def bits(key: Tensor, shape: tuple[int, ...] = ()) -> Tensor:
    """Uniform 32-bit words in int64, `key.shape[:-1] + shape`."""
    count = math.prod(shape)
    counter = torch.arange(count, device=key.device).view(shape)
    lead = key.shape[:-1] + (1,) * len(shape)
    return _hash(counter, key[..., 0].reshape(lead), key[..., 1].reshape(lead))


def uniform(key: Tensor, shape: tuple[int, ...] = (), *, dtype: torch.dtype = torch.float32) -> Tensor:
    """Uniform on [0, 1) with as many bits as `dtype` holds (24 in float32, 53 in float64), `key.shape[:-1] + shape`."""
    if dtype == torch.float64:
        words = bits(key, (2, *shape)).movedim(key.dim() - 1, 0)
        return (((words[0] & 0x1FFFFF) << 32) | words[1]).to(dtype) * 2.0**-53
    digits = 1 - round(math.log2(torch.finfo(dtype).eps))
    return (bits(key, shape) >> (32 - digits)).to(dtype) * 2.0**-digits


def normal(key: Tensor, shape: tuple[int, ...] = (), *, dtype: torch.dtype = torch.float32) -> Tensor:
    """Standard normal by the Box-Muller transform, `key.shape[:-1] + shape`."""
    first, second = uniform(key, (2, *shape), dtype=dtype).movedim(key.dim() - 1, 0)
    return (-2.0 * torch.log1p(-first)).sqrt() * torch.cos(2.0 * math.pi * second)


def bernoulli(key: Tensor, probability: float, shape: tuple[int, ...] = ()) -> Tensor:
    """True with `probability`, `key.shape[:-1] + shape`."""
    return bits(key, shape) < int(probability * 2**32)


def permutation(key: Tensor, num: int) -> Tensor:
    """A random order of `range(num)`, int64 `[num]`."""
    return torch.argsort(bits(key, (num,)), stable=True)


def categorical(key: Tensor, logits: Tensor) -> Tensor:
    """One draw a row from `softmax(logits)` by inverting the cumulative distribution: `[..., V]` gives `[...]`.

    One uniform number is used for each row: it falls into a block of classes, and there on a class, so that no sum runs
    over all classes one by one. A class with logit -inf is never drawn.
    """
    probs = torch.softmax(logits, dim=-1)
    if rest := -logits.shape[-1] % _BLOCK:
        probs = F.pad(probs, (0, rest))
    blocks = probs.unflatten(-1, (-1, _BLOCK))
    ends = blocks.sum(dim=-1).cumsum(dim=-1)
    target = _below(uniform(key, (1,), dtype=logits.dtype) * ends[..., -1:], ends)
    block = torch.searchsorted(ends, target, right=True).clamp(max=ends.shape[-1] - 1)
    start = F.pad(ends, (1, 0)).gather(-1, block)
    within = blocks.take_along_dim(block[..., None], dim=-2).squeeze(-2).cumsum(dim=-1)
    place = torch.searchsorted(within, _below(target - start, within), right=True)
    return (block * _BLOCK + place).squeeze(-1).clamp(max=logits.shape[-1] - 1)


def _below(target: Tensor, cumulative: Tensor) -> Tensor:
    """What rounding put at the end of a cumulative distribution or beyond, just before the end."""
    end = cumulative[..., -1:]
    return torch.minimum(target, torch.nextafter(end, torch.zeros_like(end)))
