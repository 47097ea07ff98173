"""Batches of token rows: dicts of tensors `[B, ...]`, padded on the right."""

from collections.abc import Sequence

import torch
from torch import Tensor

Batch = dict[str, Tensor]


def pad(rows: Sequence[Sequence[int]], *, value: int = 0, device: torch.device | str = "cpu") -> Tensor:
    """Rows of ids of any lengths as one int64 `[B, T]`, T the longest, at least 1."""
    width = max([1, *map(len, rows)])
    out = torch.full((len(rows), width), value, dtype=torch.int64)
    for index, row in enumerate(rows):
        out[index, : len(row)] = torch.tensor(row, dtype=torch.int64)
    return out.to(device)


def spans(starts: Tensor, ends: Tensor, *, width: int) -> Tensor:
    """True from `starts` up to, not including, `ends`: `[B]`, `[B]` give `[B, width]`. Masks come from lengths."""
    index = torch.arange(width, device=starts.device)
    return (index >= starts[:, None]) & (index < ends[:, None])


def take(batch: Batch, rows: Tensor, *, width: int | None = None) -> Batch:
    """Some rows of a batch; with `width`, per-token arrays keep the first `width` columns alone."""
    columns = batch["tokens"].shape[1]
    out = {name: value[rows] for name, value in batch.items()}
    if width is None:
        return out
    return {
        name: value[:, :width] if value.dim() > 1 and value.shape[1] == columns else value
        for name, value in out.items()
    }


def split(batch: Batch, *, tokens: int) -> list[Batch]:
    """Cut a batch with "lengths" `[B]` into microbatches of at most `tokens` tokens with padding; always at least one.

    Rows are sorted by length and each microbatch is as wide as its longest row, so little is padding. A single row
    that is longer than the budget makes a microbatch of its own.
    """
    lengths = batch["lengths"].tolist()
    order = sorted(range(len(lengths)), key=lambda row: (lengths[row], row))
    groups: list[list[int]] = [[]]
    for row in order:
        if groups[-1] and (len(groups[-1]) + 1) * max(lengths[row], 1) > tokens:
            groups.append([])
        groups[-1].append(row)
    device = batch["tokens"].device
    return [
        take(
            batch,
            torch.tensor(group, dtype=torch.int64, device=device),
            width=max([1, *(lengths[row] for row in group)]),
        )
        for group in groups
    ]
