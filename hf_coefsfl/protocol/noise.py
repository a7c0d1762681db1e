"""Noise of a sample that lasts: drawn from a client's secret and from what its half gets of the sample."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

_WORD = 4  # bytes of a random number


def lasting_noise(secret: bytes, inputs: Mapping[str, Any], like: Tensor) -> Tensor:
    """Return standard normal noise of the shape of `like` (samples, positions, ...), the same whenever a sample comes.

    It does not depend on the round, the run, the weights, or the rest of the batch: padding is not part of a sample,
    and its first token gets the first numbers. Whoever asks for a sample many times cannot average its noise away.
    """
    rows = [_row_noise(secret, inputs, row, like) for row in range(len(like))]
    return torch.from_numpy(np.stack(rows)).to(like.device, like.dtype)


def _row_noise(secret: bytes, inputs: Mapping[str, Any], row: int, like: Tensor) -> Any:
    mask = inputs.get("attention_mask")
    kept = mask[row].bool() if isinstance(mask, Tensor) and mask.dim() == 2 else None
    stream = hashlib.shake_256(secret)
    for name, t in sorted(inputs.items()):
        if name == "attention_mask" or not isinstance(t, Tensor):
            continue
        own = t[row] if t.dim() and len(t) == len(like) else t
        if kept is not None and own.dim() and len(own) == len(kept):
            own = own[kept]
        own = own.detach().cpu().contiguous()
        stream.update(f"|{name} {own.dtype} {tuple(own.shape)}|".encode())
        stream.update(own.reshape(-1).view(torch.uint8).numpy().tobytes())
    size = like[row].numel()
    drawn = _normal(stream.digest(_WORD * (size + size % 2)))[:size].reshape(like.shape[1:])
    if kept is not None and drawn.ndim and len(drawn) == len(kept):
        drawn = np.roll(drawn, int(kept.int().argmax()), axis=0)  # padding may come before the first token
    return drawn


def _normal(stream: bytes) -> Any:
    """Return standard normal numbers, made two by two of uniform ones (Box and Muller)."""
    first, second = np.frombuffer(stream, "<u4").reshape(-1, 2).T.astype(np.float64)
    radius = np.sqrt(-2 * np.log((first + 1) / 2**32))
    angle = 2 * np.pi * second / 2**32
    return np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1).reshape(-1).astype(np.float32)
