"""What crosses the cut as it is sent and kept: without padding, by a codec, in memory or in a mapped file."""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import IO, Any, Generic, TypeVar, overload

import torch
from torch import Tensor

from .codecs import CODECS, KINDS, Codec
from .devices import to_device
from .messages import Message
from .seeds import derive_seed

M = TypeVar("M", bound=Message)
Kept = Callable[[int, M], "Places | None"]  # of message i: the token positions that are sent; None: all
Wait = Callable[[int], object]  # returns when so many bytes of a file are there, and raises if they will not come
_ALIGNMENT = 64  # bytes, of the memory that PyTorch allocates


def is_there(end: int) -> None:
    """Wait for nothing: the whole file is there."""


class Store:
    """Where the exchange of one client's round is kept, and in which form.

    Args:
        codecs: the name of the codec of all kinds of tensors, or names by kind.
        memory_limit: bytes up to which values stay in memory; None: all do.
        folder: where the file for the others goes. It has no name, so that it is gone as soon as the process is.
        leading: whether positions before the first that is kept are left out.
        trailing: the same for those after the last.

    The seeds of codecs are those of its place: the run's seed, the round and the client. `RoundContext` sets it.
    """

    def __init__(
        self,
        codecs: str | Mapping[str, str] = "float32",
        memory_limit: int | None = None,
        folder: str | os.PathLike[str] | None = None,
        leading: bool = False,
        trailing: bool = False,
    ):
        names = dict.fromkeys(KINDS, codecs) if isinstance(codecs, str) else codecs
        self.codecs = {kind: CODECS[name] for kind, name in names.items()}
        self.memory_limit, self.folder = memory_limit, folder
        self.leading, self.trailing = leading, trailing
        self.location = (0, 0, 0)
        self.in_memory, self.on_disk = 0, 0  # bytes
        self._file: IO[bytes] | None = None

    def seed(self, kind: str, batch: int) -> int:
        """Return the seed with which tensors of a batch are encoded."""
        seed, round_index, client = self.location
        return derive_seed(seed, "codecs", round_index, client, batch, KINDS.index(kind))

    def places(self, kept: Tensor | None, device: torch.device | None = None) -> Places | None:
        """Return which positions (b, T) are kept here of those that hold something, on a device; None: all."""
        if kept is None or not (self.leading or self.trailing):
            return None
        if not self.leading:
            kept = kept.flip(1).cumsum(1).flip(1) > 0
        if not self.trailing:
            kept = kept.cumsum(1) > 0
        places = Places(kept, kept.flatten().nonzero().squeeze(1), kept.sum(1))
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
    wait: Wait = is_there

    def read(self) -> Tensor:
        """Return the values; those at an odd place in a file are copied, because sums may depend on the address."""
        self.wait(self.start + self.size)
        ahead = self.start % mmap.ALLOCATIONGRANULARITY
        mapping = mmap.mmap(self.file.fileno(), self.size + ahead, access=mmap.ACCESS_COPY, offset=self.start - ahead)
        mapped = torch.frombuffer(mapping, dtype=torch.uint8, offset=ahead)
        return (mapped.clone() if ahead % _ALIGNMENT else mapped).view(self.dtype).view(self.shape)


@dataclass(frozen=True)
class Places:
    """The kept positions of (samples, tokens), numbered row by row; made once: an accelerator would be waited for."""

    kept: Tensor
    index: Tensor
    counts: Tensor  # kept positions of each sample (samples,), where they were looked at

    def on(self, device: torch.device) -> Places:
        """Return the same positions on another device."""
        return Places(to_device(self.kept, device), to_device(self.index, device), self.counts)


@dataclass(frozen=True)
class PackedTensor:
    """A tensor as it is sent: some positions left out, by a codec."""

    codec: Codec
    seed: int
    values: Tensor | Mapped
    scale: Tensor | None
    places: Places | None  # where positions were left out
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    @property
    def nbytes(self) -> int:
        """Bytes that are sent."""
        return self.codec.nbytes(sent_shape(self.shape, self.places), self.dtype)

    def nbytes_of(self, part: int, parts: int) -> int:
        """Bytes that would be sent of one of so many parts with as many samples each."""
        samples = self.shape[0] // parts
        shape = torch.Size([samples, *self.shape[1:]])
        if self.places is not None:
            count = int(self.places.counts[part * samples : (part + 1) * samples].sum())
            shape = torch.Size([count, *shape[1:-2], shape[-1]])
        return self.codec.nbytes(shape, self.dtype)

    def unpack(self) -> Tensor:
        """Return the whole tensor, with zeros where positions were left out."""
        values = self.values if isinstance(self.values, Tensor) else self.values.read().to(self.device)
        shape = sent_shape(self.shape, self.places)
        values = self.codec.decode(values, self.scale, shape, self.seed).to(self.dtype)
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

    @property
    def end(self) -> int:
        """How many bytes of its file must be there before it can be unpacked."""
        values = (packed.values for packed in self.tensors.values())
        return max((v.start + v.size for v in values if isinstance(v, Mapped)), default=0)

    def nbytes(self) -> dict[str, int]:
        """Bytes that are sent, by ledger heading."""
        sizes: dict[str, int] = {}
        for name, packed in self.tensors.items():
            heading = self.rest.kinds[name]
            sizes[heading] = sizes.get(heading, 0) + packed.nbytes
        for heading, size in self.rest.nbytes().items():
            sizes[heading] = sizes.get(heading, 0) + size
        return sizes

    def nbytes_of(self, part: int, parts: int, known: Mapping[str, int]) -> dict[str, int]:
        """Bytes that would be sent of one of several clients' parts; those of some tensors may be `known`."""
        sizes: dict[str, int] = {}
        small = {n: known.get(n, t.nbytes // parts) for n, t in self.rest.tensors().items()}
        for name, size in ({n: packed.nbytes_of(part, parts) for n, packed in self.tensors.items()} | small).items():
            heading = self.rest.kinds[name.split(".", 1)[0]]
            sizes[heading] = sizes.get(heading, 0) + size
        return sizes

    def unpack(self) -> M:
        """Return the message with its tensors in full."""
        return replace(self.rest, **{name: packed.unpack() for name, packed in self.tensors.items()})


class Exchange(Sequence[M]):
    """Messages as they were sent; each is unpacked when it is read, so that one at a time is there in full.

    Args:
        store: in whose form they are packed.
        batches: of which there is a message each; None: all of the round. Those of single batches, which go at once,
            stay out of the store.
    """

    def __init__(self, store: Store, batches: Sequence[int] | None = None):
        self.store, self.batches = store, batches
        self.packed: list[Packed[M]] = []
        self._read: tuple[int, M] | None = None  # the last one: it is often asked for twice

    @classmethod
    def of(
        cls,
        messages: Iterable[M],
        store: Store,
        kept: Kept[M] = lambda i, message: None,
        batches: Sequence[int] | None = None,
    ) -> Exchange[M]:
        """Pack messages as they come; those that are an exchange are packed already."""
        if isinstance(messages, Exchange):
            return messages
        packed = cls(store, batches)
        for i, message in enumerate(messages):
            packed.append(message, kept(i, message))
        return packed

    def append(self, message: M, places: Places | None = None) -> None:
        """Pack a message; `places` says which token positions are sent."""
        batch = self.batch(len(self.packed))
        packed = {
            name: self._pack(t, message.kinds[name], batch, places)
            for name, t in message.tensors().items()
            if _is_packed(message, name, t)
        }
        empty: dict[str, Any] = dict.fromkeys(packed)
        self.packed.append(Packed(replace(message, **empty), packed, places))

    def _pack(self, t: Tensor, kind: str, batch: int, places: Places | None) -> PackedTensor:
        if places is not None and (t.shape[0], t.shape[-2]) != places.kept.shape:
            places = None  # not a tensor over token positions
        values = t if places is None else t.movedim(-2, 1).flatten(0, 1).index_select(0, places.index)
        codec, seed = self.store.codecs[kind], self.store.seed(kind, batch)
        values, scale = codec.encode(values, seed)
        placed = self.store.place(values) if self.batches is None else values
        return PackedTensor(codec, seed, placed, scale, places, t.shape, t.dtype, t.device)

    def batch(self, index: int) -> int:
        """Return the number of the batch that a message belongs to."""
        return index if self.batches is None else self.batches[index]

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
            batches = self.batches if self.batches is None else list(self.batches)[index]
            chosen: Exchange[M] = Exchange(self.store, batches)
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


def sent_shape(shape: torch.Size, places: Places | None) -> torch.Size:
    """Return the shape of a tensor without the positions that are left out: (positions, ..., features)."""
    return shape if places is None else torch.Size([len(places.index), *shape[1:-2], shape[-1]])


def _is_packed(message: Message, name: str, t: Tensor) -> bool:
    return message.kinds.get(name) in KINDS and t.is_floating_point() and t.dim() > 1
