"""What must hold of tensors that came over the network, before anything is computed with them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..exchange import Exchange, Mapped
from ..messages import SmashedData
from ..outputs import LANGUAGE_MODELS, Task
from .transfers import TransferError

_LARGEST_RATIO = 64  # entries of raw inputs for one entry of activations: what placeholders may cost


@dataclass(frozen=True)
class UploadCheck:
    """What smashed data must be.

    Attributes:
        task: whose labels it carries.
        example: smashed data of the right form.
        batch_size: the most samples of a batch.
        max_tokens: the most token positions.
        vocab_size: of a language model, whose labels are tokens.
    """

    task: Task
    example: SmashedData
    batch_size: int
    max_tokens: int
    vocab_size: int | None = None

    def sound(self, message: SmashedData) -> SmashedData:
        """Return a message without its large contents if its form is right: shapes, labels."""
        shape, expected = message.activations.shape, self.example.activations.shape
        if len(shape) != len(expected) or shape[-1] != expected[-1]:
            raise TransferError(f"activations of shape {tuple(shape)} do not fit the cut, {tuple(expected)} would")
        if not 1 <= shape[0] <= self.batch_size:
            raise TransferError(f"a batch has {shape[0]} samples, at most {self.batch_size} are allowed")
        if math.prod(shape[1:-1]) > self.max_tokens:
            raise TransferError(f"a sample has {math.prod(shape[1:-1])} positions, at most {self.max_tokens} fit")
        if set(message.labels) - set(self.task.label_names) or not message.labels:
            raise TransferError(f"labels are called {', '.join(message.labels) or 'nothing'}")
        for name, t in message.labels.items():
            if not t.dim() or len(t) != shape[0]:
                raise TransferError(f"{name} has shape {tuple(t.shape)} for {shape[0]} samples")
            if self.task.loss_type in LANGUAGE_MODELS and self.vocab_size and bool((t >= self.vocab_size).any()):
                raise TransferError(f"{name} has a token of {int(t.max())}, the vocabulary has {self.vocab_size}")
        self.task.check_labels(message.labels, "the client")
        for name, t in {**message.context, **message.labels}.items():
            if t.is_floating_point() and t.isnan().any():
                raise TransferError(f"{name} holds NaN")
        for name, raw in message.shapes.items():
            if any(size < 0 for size in raw) or math.prod(raw) > _LARGEST_RATIO * math.prod(shape) + 2**20:
                raise TransferError(f"raw inputs {name} of shape {raw} are too large for these activations")
        return message

    def exchange(self, sent: Exchange[SmashedData], count: int) -> None:
        """Refuse an exchange of another number of batches, without activations, or with numbers that are not finite."""
        if len(sent) != count:
            raise TransferError(f"{len(sent)} batches came instead of {count}")
        for place, packed in enumerate(sent.packed):
            if "activations" not in packed.tensors:
                raise TransferError(f"batch {place} has no activations")
            shape = packed.tensors["activations"].shape
            for name, part in packed.tensors.items():
                if part.shape != shape:
                    raise TransferError(f"{name} of batch {place} has shape {tuple(part.shape)}")
                values = part.values.read() if isinstance(part.values, Mapped) else part.values
                if not all(bool(t.isfinite().all()) for t in (values, part.scale) if t is not None):
                    raise TransferError(f"the {name} of batch {place} hold NaN or infinity")


def check_tensors(expected: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> None:
    """Refuse tensors of other names, shapes or dtypes than expected, and those that are not finite."""
    if expected.keys() != found.keys():
        strange = sorted(expected.keys() ^ found.keys())
        raise TransferError(
            f"{len(found)} tensors came instead of {len(expected)}; {strange[0]} is one too few or too many"
        )
    for name, t in found.items():
        wanted = expected[name]
        if t.shape != wanted.shape or t.dtype != wanted.dtype:
            raise TransferError(f"{name} is {t.dtype} {tuple(t.shape)} instead of {wanted.dtype} {tuple(wanted.shape)}")
        if t.is_floating_point() and not bool(t.isfinite().all()):
            raise TransferError(f"{name} holds NaN or infinity")


@torch.no_grad()
def copy_checked(targets: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """Copy named values, if they are the ones that belong there."""
    check_tensors(targets, values)
    for name, target in targets.items():
        target.copy_(values[name])


def check_observed(found: Mapping[str, Any]) -> None:
    """Refuse reports that are no lists of numbers."""
    for name, t in found.items():
        if not re.fullmatch(r"[a-z_]{1,40}", name) or t.dim() != 1 or t.dtype != torch.float32:
            raise TransferError(f"a report {name[:40]!r} is {t.dtype} {tuple(t.shape)}")
