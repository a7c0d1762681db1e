"""What must hold of tensors that came over the network, before anything is computed with them."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..federation.data_checks import RowCheck
from ..protocol.loss import LANGUAGE_MODELS, LossSpec
from ..protocol.messages import SmashedData
from ..protocol.packing import Exchange, Packed
from ..split.surgery import Cut
from .wire import TransferError

_LARGEST_RATIO = 64  # entries of raw inputs for one entry of activations: what placeholders may cost
_DECLARATION = 2**16  # bytes in which a batch is declared
_LARGEST_REPORT = 1e15  # beyond which a mean of what clients report may overflow
# What client sides note.
OBSERVED = ("activations", "weights", "displacement_norm", "correction_ratio", "loss_change", "client_loss")
_ALWAYS = ("attention_mask", "padding", "position_ids")  # that may cross, whether the example has them or not
_TOKEN_LABELS = (*LANGUAGE_MODELS, "ForTokenClassification")
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class UploadCheck:
    """What smashed data must be.

    Attributes:
        loss_spec: whose labels it carries.
        cut: of the model: what crosses besides the activations.
        example: smashed data of the right form.
        labels: of a batch of one, of the right form.
        dtypes: that activations may have.
        batch_size: the most samples of a batch.
        max_tokens: the most token positions.
        vocab_size: of a language model, whose labels are tokens.
        token_types: how many there are, if the model has any.
    """

    loss_spec: LossSpec
    cut: Cut
    example: SmashedData
    labels: Mapping[str, Tensor]
    dtypes: tuple[torch.dtype, ...]
    batch_size: int
    max_tokens: int
    vocab_size: int | None = None
    token_types: int | None = None

    def sound(self, message: SmashedData) -> SmashedData:
        """Return a message without its large contents if its form is right: shapes, labels, context."""
        shape, expected = message.activations.shape, self.example.activations.shape
        if len(shape) != len(expected) or shape[-1] != expected[-1]:
            raise TransferError(f"activations of shape {tuple(shape)} do not fit the cut, {tuple(expected)} would")
        if not 1 <= shape[0] <= self.batch_size:
            raise TransferError(f"a batch has {shape[0]} samples, at most {self.batch_size} are allowed")
        if math.prod(shape[1:-1]) > self.max_tokens:
            raise TransferError(f"a sample has {math.prod(shape[1:-1])} positions, at most {self.max_tokens} fit")
        self._check_labels(message.labels, shape[0])
        self._check_context(message.context, shape)
        self._check_raw_shapes(message.shapes, shape)
        return message

    def _check_labels(self, labels: Mapping[str, Tensor], samples: int) -> None:
        if labels.keys() != self.labels.keys():
            raise TransferError(f"labels are called {', '.join(labels) or 'nothing'}")
        for name, t in labels.items():
            wanted = self.labels[name]
            fits = t.dtype == wanted.dtype and t.dim() == wanted.dim() and len(t) == samples
            if self.loss_spec.loss_type in _TOKEN_LABELS:
                fits = fits and t.shape[1] <= self.max_tokens
            elif t.shape[1:] != wanted.shape[1:]:
                fits = False
            if not fits:
                raise TransferError(f"{name} is {t.dtype} {tuple(t.shape)} for {samples} samples")
            if t.is_floating_point():
                if not bool(t.isfinite().all()):
                    raise TransferError(f"{name} holds NaN or infinity")
            elif self.loss_spec.loss_type in LANGUAGE_MODELS and self.vocab_size:
                wrong = t[(t != -100) & ((t < 0) | (t >= self.vocab_size))]
                if len(wrong):
                    raise TransferError(f"{name} has a token {int(wrong[0])}, the vocabulary has {self.vocab_size}")
        fault = RowCheck(self.loss_spec).labels(labels)
        if fault is not None:
            raise fault.error("the client")

    def _check_context(self, context: Mapping[str, Tensor], shape: torch.Size) -> None:
        for name, t in context.items():
            if name not in self.example.context and name not in (*_ALWAYS, *self.cut.crossing):
                raise TransferError(f"{name} is nothing that crosses this cut")
            if not self._fits(name, t.shape, shape[0]):
                raise TransferError(f"{name} has shape {tuple(t.shape)} for {shape[0]} samples")
            if t.is_floating_point() and bool(t.isnan().any()):
                raise TransferError(f"{name} holds NaN")
            if name == "position_ids" and not bool(((t >= 0) & (t < self.max_tokens)).all()):
                raise TransferError(f"{name} reaches beyond the {self.max_tokens} positions of the model")
            if name == "token_type_ids" and self.token_types and not bool(((t >= 0) & (t < self.token_types)).all()):
                raise TransferError(f"{name} reaches beyond the {self.token_types} types of the model")
        mask = context.get("attention_mask")
        if mask is not None and mask.shape == shape[:2] and not bool(mask.bool().any(1).all()):
            raise TransferError("a sample is padding only")

    def _fits(self, name: str, shape: torch.Size, samples: int) -> bool:
        """Whether a tensor of the context is of the example's form, or a matrix if the example has none of the name."""
        example = self.example.context.get(name)
        wanted = (1, 1) if example is None else example.shape
        if len(shape) != len(wanted):
            return False
        if name.startswith("block."):  # whatever the model makes: its samples may stand anywhere
            least = max(self.max_tokens, self.batch_size)
        elif len(shape) < 2 or shape[0] not in (1, samples):
            return False
        else:
            least = self.max_tokens
        longer = self._longer() + 1  # a few raw inputs more may make as many positions
        return all(got <= max(least, longer * length) for got, length in zip(shape, wanted, strict=True))

    def _longer(self) -> int:
        """Return how many times as long as the example's a sample may be."""
        return math.ceil(self.max_tokens / math.prod(self.example.activations.shape[1:-1]))

    def _check_raw_shapes(self, shapes: Mapping[str, tuple[int, ...]], shape: torch.Size) -> None:
        """Refuse raw inputs whose placeholders would be larger than the activations justify."""
        text = self.example.shapes.get("input_ids") is not None
        for name, raw in shapes.items():
            size = math.prod(raw)
            if any(length < 0 for length in raw) or raw[:1] not in ((1,), (shape[0],)):
                raise TransferError(f"raw inputs {name} of shape {raw} do not fit {shape[0]} samples")
            if (text and size > shape[0] * self.max_tokens) or size > _LARGEST_RATIO * math.prod(shape) + 2**20:
                raise TransferError(f"raw inputs {name} of shape {raw} are too large for these activations")

    def largest_upload(self, samples: int, batches: int, tensors: int = 1) -> int:
        """Return the bytes that so many samples can need, with room to spare, in a file.

        `tensors` of the size of the activations belong to each sample.
        """
        example = self.example.activations
        activations = self.max_tokens * example.shape[-1] * example.element_size()
        return samples * (tensors * activations + self._beside()) + batches * _DECLARATION + 2**20

    def most_beside(self) -> int:
        """Return the bytes that a batch may have beside its activations: what the server keeps in memory of it."""
        return self.batch_size * self._beside() + _DECLARATION

    def _beside(self) -> int:
        """Return the bytes beside the activations of a sample, as in the example, as long as the longest sample."""
        longer = self._longer()
        beside = 64 * self.max_tokens  # masks and positions that the example may not have
        for t in self.example.context.values():
            long = sum(length > 1 for length in t.shape[1:])
            beside += t.numel() * t.element_size() * longer ** min(long, 2)
        for shape in self.example.shapes.values():
            beside += 8 * math.prod(shape[1:]) * longer  # a mask over the raw inputs
        for t in self.labels.values():
            long = t.dim() > 1 and self.loss_spec.loss_type in _TOKEN_LABELS
            beside += (self.max_tokens if long else t.numel()) * t.element_size()
        return beside

    def exchange(
        self, sent: Exchange[SmashedData], count: int, samples: int, go_on: Callable[[], object] = lambda: None
    ) -> None:
        """Refuse an exchange of the wrong form, or with NaN or infinity; `go_on` as in `form`."""
        self.form(sent, count, samples, go_on)
        for batch, packed in enumerate(sent.packed):
            go_on()
            # The device is busy with another client's turn.
            self.finite(batch, ((name, part.on(_CPU).unpack()) for name, part in packed.tensors.items()))

    def form(
        self, sent: Exchange[SmashedData], count: int, samples: int, go_on: Callable[[], object] = lambda: None
    ) -> None:
        """Refuse an exchange of other batches, of more samples or without activations; its values are not read.

        `go_on` is called for each batch, and raises if nobody waits for this any longer.
        """
        if len(sent) != count:
            raise TransferError(f"{len(sent)} batches came instead of {count}")
        for batch, packed in enumerate(sent.packed):
            go_on()
            if "activations" not in packed.tensors:
                raise TransferError(f"batch {batch} has no activations")
            shape = packed.tensors["activations"].shape
            samples -= shape[0]
            for name, part in packed.tensors.items():
                if part.shape != shape or part.dtype not in self.dtypes:
                    raise TransferError(f"{name} of batch {batch} is {part.dtype} {tuple(part.shape)}")
        if samples < 0:
            raise TransferError(f"{-samples} samples more came than the client has")

    def finite(self, batch: int, unpacked: Iterable[tuple[str, Tensor]]) -> None:
        """Refuse the tensors of a batch if they hold NaN or infinity: a finite value times a finite scale may."""
        for name, t in unpacked:
            if not bool(t.isfinite().all()):
                raise TransferError(f"the {name} of batch {batch} hold NaN or infinity")


class Declared:
    """What a client has said of the batches of its round. What it says of a batch again must be the same."""

    def __init__(self) -> None:
        self._forms: dict[int, bytes] = {}  # of each batch: a checksum

    def check(
        self, sent: Exchange[SmashedData], batches: Iterable[int], go_on: Callable[[], object] = lambda: None
    ) -> None:
        """Refuse a batch with other labels, masks or shapes than it had at first; `go_on` as in `UploadCheck`."""
        for batch, packed in zip(batches, sent.packed, strict=True):
            go_on()
            form = _form(packed)
            if self._forms.setdefault(batch, form) != form:
                raise TransferError(f"batch {batch} has other labels, masks or shapes than at first")


def _form(packed: Packed[SmashedData]) -> bytes:
    """Return a checksum of a batch without what changes with the weights: activations and other real numbers."""
    shapes = {name: tuple(part.shape) for name, part in packed.tensors.items()}
    checksum = hashlib.sha256(repr((sorted(shapes.items()), sorted(packed.rest.shapes.items()))).encode())
    for name, t in sorted(packed.rest.tensors().items()):
        checksum.update(repr((name, t.dtype, tuple(t.shape))).encode())
        if name.startswith("labels.") or name.endswith("attention_mask") or not t.is_floating_point():
            checksum.update(t.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return checksum.digest()


def check_tensors(expected: Mapping[str, Tensor], received: Mapping[str, Tensor]) -> None:
    """Refuse tensors of other names, shapes or dtypes than expected, and those that are not finite."""
    if expected.keys() != received.keys():
        strange = sorted(expected.keys() ^ received.keys())
        raise TransferError(
            f"{len(received)} tensors came instead of {len(expected)}; {strange[0]} is one too few or too many"
        )
    for name, t in received.items():
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


def check_observed(received: Mapping[str, Tensor], most: int) -> None:
    """Refuse reports that are not short lists of numbers of a sane size."""
    for name, t in received.items():
        if name not in OBSERVED or t.dim() != 1 or t.dtype != torch.float32 or len(t) > most:
            raise TransferError(f"a report {name[:40]!r} is {t.dtype} {tuple(t.shape)}")
        if not bool((t.abs() <= _LARGEST_REPORT).all()):
            raise TransferError(f"the report {name} holds NaN, infinity or a number beyond {_LARGEST_REPORT:g}")
