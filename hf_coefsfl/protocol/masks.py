"""Masks on an accelerator whose values the host knows: to ask the device about them is to wait for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .devices import to_device


class KnownMask(Tensor):
    """A mask on an accelerator beside the same one on the host, which answers questions about it.

    transformers asks of a mask in each pass whether it is all ones: by `all()` or, for causal attention, by `sum()` of
    it and of slices. Casts and slices are done to both. Whatever else is computed with the mask is an ordinary tensor.
    If somebody writes into the mask, the host knows it no longer.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    host: Tensor
    version: int  # of the values that the host knows

    @property
    def is_known(self) -> bool:
        """Whether nobody has written into the mask."""
        return self._version == self.version

    def all(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return whether all are set, on the host if it is asked of the mask as a whole."""
        return self.host.all() if self.is_known and not args and not kwargs else super().all(*args, **kwargs)

    def sum(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return how many are set, on the host if it is asked of the mask as a whole."""
        return self.host.sum() if self.is_known and not args and not kwargs else super().sum(*args, **kwargs)

    def to(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the mask in another dtype; on another device it is an ordinary tensor."""
        cast = super().to(*args, **kwargs)
        same = self.is_known and cast.device == self.device
        return known_mask(cast, self.host.to(cast.dtype)) if same else cast

    def detach(self) -> Tensor:
        """Return the mask itself: it has no graph."""
        return self

    def long(self) -> Tensor:
        """Return the mask as integers."""
        return self.to(dtype=torch.long)

    def bool(self) -> Tensor:
        """Return the mask as truth values."""
        return self.to(dtype=torch.bool)

    def __getitem__(self, index: Any) -> Tensor:
        """Return some of the rows and columns; an ordinary tensor if they are not named by slices."""
        chosen = super().__getitem__(index)
        slices = index if isinstance(index, tuple) else (index,)
        sliced = self.is_known and all(isinstance(part, slice) for part in slices)
        return known_mask(chosen, self.host[index]) if sliced else chosen

    def __invert__(self) -> Tensor:
        """Return the mask of the other positions."""
        inverted = super().__invert__()
        return known_mask(inverted, ~self.host) if self.is_known else inverted


def known_mask(mask: Tensor, host: Tensor) -> Tensor:
    """Return a mask that knows its values on the host; an ordinary one in inference mode, which counts no writes."""
    if mask.is_inference():
        return mask
    known: KnownMask = mask.as_subclass(KnownMask)
    known.host, known.version = host, known._version
    return known


def known_masks(there: Mapping[str, Any], here: Mapping[str, Any]) -> dict[str, Any]:
    """Return inputs that were copied from the host to an accelerator, with masks that stay known there."""
    return {
        name: known_mask(t, here[name]) if isinstance(t, Tensor) and name.endswith("attention_mask") else t
        for name, t in there.items()
    }


def rows_of(t: Tensor, rows: Tensor, there: Tensor) -> Tensor:
    """Return rows of a tensor by their numbers, given on the host and `there`, on its device; masks stay known."""
    chosen = t[there]
    return known_mask(chosen, t.host[rows]) if isinstance(t, KnownMask) and t.is_known else chosen


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Return tensors below each other; known masks stay known."""
    whole = torch.cat(list(parts))
    hosts = [part.host for part in parts if isinstance(part, KnownMask) and part.is_known]
    return known_mask(whole, torch.cat(hosts)) if len(hosts) == len(parts) else whole


def with_rows(mask: Tensor, rows: Tensor) -> Tensor:
    """Return a mask with rows of the host below it; it stays known."""
    rows = rows.to(mask.dtype)
    return joined([mask, known_mask(to_device(rows, mask.device), rows)])
