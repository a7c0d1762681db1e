"""What crosses the cut as it is sent and kept: without padding, in a chosen dtype, in memory or in a mapped file."""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import IO, Any, Generic, TypeVar, overload

import torch
from torch import Tensor

from .devices import to_device
from .messages import Message

M = TypeVar("M", bound=Message)
Kept = Callable[[int, M], "Places | None"]  # of message i: the token positions that are sent; None: all
EXCHANGE_DTYPES = ("float32", "bfloat16", "float16", "int8")
_HEADINGS = ("smashed_data", "gradients", "curvature")  # of what is packed; the rest is small and goes as it is
_ALIGNMENT = 64  # bytes, of the memory that PyTorch allocates
_LARGEST = 2.0**15  # to which float16 values are scaled


class Store:
    """Where the exchange of one client's round is kept, and in which form.

    Args:
        dtype: "float32" keeps values as they were computed. "bfloat16" rounds them; "float16" does after a scaling
            by a power of two for each tensor, without which gradients would vanish; "int8" scales each token
            (each vector of the last dimension) by its largest entry.
        memory_limit: bytes up to which values stay in memory; None: all do.
        folder: where the file for the others goes. It has no name, so that it is gone as soon as the process is.
        leading: whether positions before the first that is kept are left out.
        trailing: the same for those after the last.
    """

    def __init__(
        self,
        dtype: str = "float32",
        memory_limit: int | None = None,
        folder: str | os.PathLike[str] | None = None,
        leading: bool = False,
        trailing: bool = False,
    ):
        self.dtype, self.memory_limit, self.folder = dtype, memory_limit, folder
        self.leading, self.trailing = leading, trailing
        self.in_memory, self.on_disk = 0, 0  # bytes
        self._file: IO[bytes] | None = None

    def places(self, kept: Tensor | None, device: torch.device | None = None) -> Places | None:
        """Return which positions (b, T) are kept here of those that hold something, on a device; None: all."""
        if kept is None or not (self.leading or self.trailing):
            return None
        if not self.leading:
            kept = kept.flip(1).cumsum(1).flip(1) > 0
        if not self.trailing:
            kept = kept.cumsum(1) > 0
        places = Places(kept, kept.flatten().nonzero().squeeze(1))
        return places if device is None else places.on(device)

    def place(self, values: Tensor) -> Tensor | Mapped:
        """Keep values in memory if they fit, else in the file."""
        size = values.numel() * values.element_size()
        if self.memory_limit is None or self.in_memory + size <= self.memory_limit or not size:
            self.in_memory += size
            return values
        if self._file is None:
            if self.folder is not None:
                os.makedirs(self.folder, exist_ok=True)  # on another node nobody may have made it yet
            # Closing it is left to whoever holds it last: this store, or a mapping.
            self._file = tempfile.TemporaryFile(dir=self.folder, buffering=0)  # noqa: SIM115
        start = -(-self.on_disk // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        self._file.seek(start)
        data = values.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy().data
        while data:
            data = data[self._file.write(data) :]
        self.on_disk = start + size
        return Mapped(self._file, start, size, values.shape, values.dtype)


@dataclass(frozen=True)
class Mapped:
    """Values in a file; `read` maps them into memory for as long as somebody uses what it returned."""

    file: IO[bytes]
    start: int
    size: int
    shape: torch.Size
    dtype: torch.dtype

    def read(self) -> Tensor:
        """Return the values; those at an odd place in a file are copied, because sums may depend on the address."""
        ahead = self.start % mmap.ALLOCATIONGRANULARITY
        mapping = mmap.mmap(self.file.fileno(), self.size + ahead, access=mmap.ACCESS_COPY, offset=self.start - ahead)
        mapped = torch.frombuffer(mapping, dtype=torch.uint8, offset=ahead)
        return (mapped.clone() if ahead % _ALIGNMENT else mapped).view(self.dtype).view(self.shape)


@dataclass(frozen=True)
class Places:
    """The kept positions of (samples, tokens), numbered row by row; made once: an accelerator would be waited for."""

    kept: Tensor
    index: Tensor

    def on(self, device: torch.device) -> Places:
        """Return the same positions on another device."""
        return Places(to_device(self.kept, device), to_device(self.index, device))


@dataclass(frozen=True)
class PackedTensor:
    """A tensor as it is sent: some positions left out, in another dtype, times a scale."""

    values: Tensor | Mapped
    scale: Tensor | None
    places: Places | None  # where positions were left out
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    nbytes: int

    def unpack(self) -> Tensor:
        """Return the whole tensor, with zeros where positions were left out."""
        values = self.values if isinstance(self.values, Tensor) else self.values.read().to(self.device)
        if self.scale is not None:
            values = values.to(self.scale.dtype) * self.scale
        values = values.to(self.dtype)
        if self.places is None:
            return values.view(self.shape)
        samples, tokens = self.places.kept.shape
        full = values.new_zeros((samples * tokens, *values.shape[1:])).index_copy_(0, self.places.index, values)
        return full.view(samples, tokens, *values.shape[1:]).movedim(1, -2)

    def on(self, device: torch.device) -> PackedTensor:
        """Return the same tensor, unpacked on another device."""
        values = self.values.to(device) if isinstance(self.values, Tensor) else self.values
        scale = None if self.scale is None else self.scale.to(device)
        places = None if self.places is None else self.places.on(device)
        return replace(self, values=values, scale=scale, places=places, device=device)


@dataclass(frozen=True)
class Packed(Generic[M]):
    """A message whose large tensors are packed; `rest` has None in their places."""

    rest: M
    tensors: dict[str, PackedTensor]
    places: Places | None

    def nbytes(self) -> dict[str, int]:
        """Bytes that are sent, by ledger heading."""
        sizes: dict[str, int] = {}
        for name, packed in self.tensors.items():
            heading = self.rest.kinds[name]
            sizes[heading] = sizes.get(heading, 0) + packed.nbytes
        for heading, size in self.rest.nbytes().items():
            sizes[heading] = sizes.get(heading, 0) + size
        return sizes

    def unpack(self) -> M:
        """Return the message with its tensors in full."""
        return replace(self.rest, **{name: packed.unpack() for name, packed in self.tensors.items()})


class Exchange(Sequence[M]):
    """Messages as they were sent; each is unpacked when it is read, so that one at a time is there in full.

    Args:
        store: in whose form they are packed.
        lasting: whether they stay for the round. Those of a single batch, which go at once, stay out of the store.
    """

    def __init__(self, store: Store, lasting: bool = True):
        self.store, self.lasting = store, lasting
        self.packed: list[Packed[M]] = []
        self._read: tuple[int, M] | None = None  # the last one: it is often asked for twice

    @classmethod
    def of(
        cls, messages: Iterable[M], store: Store, kept: Kept[M] = lambda i, message: None, lasting: bool = True
    ) -> Exchange[M]:
        """Pack messages as they come; those that are an exchange are packed already."""
        if isinstance(messages, Exchange):
            return messages
        packed = cls(store, lasting)
        for i, message in enumerate(messages):
            packed.append(message, kept(i, message))
        return packed

    def append(self, message: M, places: Places | None = None) -> None:
        """Pack a message; `places` says which token positions are sent."""
        packed = {name: self._pack(t, places) for name, t in message.tensors().items() if _is_packed(message, name, t)}
        empty: dict[str, Any] = dict.fromkeys(packed)
        self.packed.append(Packed(replace(message, **empty), packed, places))

    def _pack(self, t: Tensor, places: Places | None) -> PackedTensor:
        if places is not None and (t.shape[0], t.shape[-2]) != places.kept.shape:
            places = None  # not a tensor over token positions
        values = t if places is None else t.movedim(-2, 1).flatten(0, 1).index_select(0, places.index)
        values, scale = _convert(values, self.store.dtype)
        nbytes = sum(x.numel() * x.element_size() for x in (values, scale) if x is not None)
        placed = self.store.place(values) if self.lasting else values
        return PackedTensor(placed, scale, places, t.shape, t.dtype, t.device, nbytes)

    def __len__(self) -> int:
        """Return the number of messages."""
        return len(self.packed)

    @overload
    def __getitem__(self, index: int) -> M: ...
    @overload
    def __getitem__(self, index: slice) -> Exchange[M]: ...
    def __getitem__(self, index: int | slice) -> M | Exchange[M]:
        """Unpack a message, or choose some of them without unpacking."""
        if isinstance(index, slice):
            chosen: Exchange[M] = Exchange(self.store, self.lasting)
            chosen.packed = self.packed[index]
            return chosen
        if self._read is None or self._read[0] != index:
            self._read = (index, self.packed[index].unpack())
        return self._read[1]

    def places(self, index: int) -> Places | None:
        """Return which token positions of a message were sent; None: all."""
        return self.packed[index].places

    def outlines(self) -> Iterator[M]:
        """Yield the messages without unpacking: large tensors have their shape and no values."""
        for packed in self.packed:
            yield replace(packed.rest, **{n: torch.empty(t.shape, device="meta") for n, t in packed.tensors.items()})

    def types(self) -> list[type[Message]]:
        """Return what kind of message each is, without unpacking it."""
        return [type(packed.rest) for packed in self.packed]

    def nbytes(self) -> dict[str, int]:
        """Bytes that are sent, by ledger heading."""
        sizes: dict[str, int] = {}
        for packed in self.packed:
            for heading, size in packed.nbytes().items():
                sizes[heading] = sizes.get(heading, 0) + size
        return sizes


def _is_packed(message: Message, name: str, t: Tensor) -> bool:
    return message.kinds.get(name) in _HEADINGS and t.is_floating_point() and t.dim() > 1


def _convert(values: Tensor, dtype: str) -> tuple[Tensor, Tensor | None]:
    """Return values in a dtype, and what to multiply them with afterwards. NaN and infinity stay what they are."""
    if dtype == "float32" or (dtype != "int8" and values.element_size() <= 2):
        return values, None
    if dtype == "bfloat16":
        return values.to(torch.bfloat16), None
    if not values.numel():
        return values.to(getattr(torch, dtype)), None
    if dtype == "float16":
        scale = _power_above(values.abs().amax()) / _LARGEST  # a power of two changes no bit of the mantissas
        return (values / scale).to(torch.float16), scale
    largest = values.abs().amax(-1, keepdim=True).float()
    scale = torch.where(largest == 0, torch.ones_like(largest), largest / 127)
    return (values / scale).round().to(torch.int8), scale


def _power_above(largest: Tensor) -> Tensor:
    """Return the power of two above a number, at least 2**-100; 1 for 0, NaN and infinity.

    It is made of the bits of the exponent: MPS has neither `frexp` nor exact powers.
    """
    kind, exponent = (torch.int64, 0x7FF0 << 48) if largest.dtype == torch.float64 else (torch.int32, 0x7F80 << 16)
    power = 2 * (largest.view(kind) & exponent).view(largest.dtype)
    return torch.where(largest.isfinite() & (largest != 0), power.float().clamp(min=2.0**-100), 1.0)
