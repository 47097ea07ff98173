"""Changes to rewards that depend on the shape of a completion, as functions of arrays."""

import torch
from torch import Tensor


def overlong_penalty(lengths: Tensor, *, max_length: int, buffer: int) -> Tensor:
    """DAPO's soft overlong punishment, to be added to the reward.

    With `L = max_length` and `C = buffer`, of a completion of `n` tokens:

        0                  for n <= L - C
        ((L - C) - n) / C  for L - C < n <= L
        -1                 for L < n

    Args:
        lengths: Numbers of tokens, of any shape.
        max_length: The length at which the full penalty is reached.
        buffer: How many tokens before that the penalty begins.

    Returns:
        Penalties in [-1, 0], float32, of the shape of `lengths`.

    Raises:
        ValueError: the buffer isn't between 1 and `max_length`.

    Reference: DAPO, arXiv 2503.14476, equation 13.
    """
    if not 1 <= buffer <= max_length:
        raise ValueError(f"buffer is {buffer}, expected 1 to max_length ({max_length})")
    # Integers are subtracted before the division, so that long lengths lose no precision.
    beyond = (max_length - buffer) - lengths
    return (beyond.to(torch.float32) / buffer).clamp(-1.0, 0.0)
