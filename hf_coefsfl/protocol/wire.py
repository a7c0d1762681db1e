"""Messages as a safetensors file: how they are sent, and how they come out of a file that others have written.

Both directions keep one message at a time in memory. Nothing is unpickled, and nothing larger than what the file
holds is allocated: whatever does not fit its declaration is refused with a ValueError.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from .devices import is_accelerator
from .masks import known_masks
from .messages import M, Message
from .packing import Exchange, Kept, Mapped, Packed, PackedTensor, Places, Store, Wait, is_there, sent_shape

_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
_NAMED = {name: dtype for dtype, name in _DTYPES.items()}
_SCALE = ":scale"
_BLOCK = 1 << 22  # bytes written at once
_MOST_HEADER = 1 << 24  # bytes
_MOST_BESIDE = 1 << 26  # bytes of a message that are not packed, unless the caller knows better


def write_message(message: Message, path: Path) -> None:
    """Write one message as it is."""
    write_exchange(Exchange.of([message], Store()), path)


def read_message(path: Path, kind: type[M], device: torch.device = torch.device("cpu")) -> M:
    """Return the message in a file, all of it in memory."""
    (message,) = read_exchange(path, kind, Store(), device=device, most=1, most_beside=path.stat().st_size)
    return message


def write_exchange(exchange: Exchange[Any], path: Path) -> None:
    """Write an exchange of messages of one kind."""
    (kind,) = set(exchange.types())
    declared = [{"plain": _plain(packed.rest), "packed": _declared(packed)} for packed in exchange.packed]
    header: dict[str, Any] = {"__metadata__": {"kind": kind.__name__, "messages": _json(declared)}}
    end = 0
    for name, values in _named(exchange):
        size = values.size if isinstance(values, Mapped) else values.numel() * values.element_size()
        header[name] = {
            "dtype": _DTYPES[values.dtype],
            "shape": list(values.shape),
            "data_offsets": [end, end + size],
        }
        end += size
    text = _json(header).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > _MOST_HEADER:
        raise ValueError(
            f"{len(exchange.packed)} batches are too many for one exchange: their shapes take {len(text)} bytes, at "
            f"most {_MOST_HEADER} are read. Raise per_device_train_batch_size, or spread the samples over more clients."
        )
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, values in _named(exchange):
            _write(file, values.read() if isinstance(values, Mapped) else values)


def _json(value: Any) -> str:
    """Return JSON without spaces: of a small batch in few bits, a header is some percent."""
    return json.dumps(value, separators=(",", ":"))


def _write(file: IO[bytes], values: Tensor) -> None:
    data = values.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy().data
    for start in range(0, len(data), _BLOCK):
        file.write(data[start : start + _BLOCK])


def _named(exchange: Exchange[Any]) -> Iterator[tuple[str, Tensor | Mapped]]:
    """Yield the tensors in the order of the file: what is small of all messages, then one's values after the other's.

    So who reads a file that is still on its way soon knows the form of all messages, and has one after the other.
    """
    for index, packed in enumerate(exchange.packed):
        for name, t in packed.rest.tensors().items():
            yield f"{index}.{name}", t
        for name, part in packed.tensors.items():
            if part.scale is not None:
                yield f"{index}.{name}{_SCALE}", part.scale
    for index, packed in enumerate(exchange.packed):
        for name, part in packed.tensors.items():
            yield f"{index}.{name}", part.values


def _plain(message: Message) -> dict[str, Any]:
    return {f.name: getattr(message, f.name) for f in fields(message) if f.name not in message.kinds}


def _declared(packed: Packed[Any]) -> dict[str, Any]:
    return {name: {"shape": list(part.shape), "dtype": _DTYPES[part.dtype]} for name, part in packed.tensors.items()}


def read_exchange(
    path: Path,
    kind: type[M],
    store: Store,
    kept: Kept[M] = lambda i, message: None,
    device: torch.device = torch.device("cpu"),
    most: int | None = None,
    most_beside: int | None = None,
    batches: Sequence[int] | None = None,
    wait: Wait = is_there,
) -> Exchange[M]:
    """Return the exchange in a file; what is large stays there until it is read.

    A file that is still being received has its whole size already. Here what is not packed is waited for, in whatever
    order it lies there, and later the values of each message when it is read.

    Args:
        path: of the file, which may be deleted as soon as this function has returned.
        kind: what its messages are; those of a subclass are accepted as well.
        store: of the form in which they were packed.
        kept: gives the positions that were kept of a message, from its number and what is known of it: a packed tensor
            has its declared shape and no content there.
        device: where messages are unpacked.
        most: messages that the file may hold.
        most_beside: bytes that a message may have beside its packed tensors; None: 64 MiB and four times as many as in
            them.
        batches: of which there is a message each; None: all of the round.
        wait: for so many bytes of the file, or all if it has fewer.
    """
    wait(8)
    with path.open("rb") as start:
        length = int.from_bytes(start.read(8), "little")
    if length > _MOST_HEADER:
        raise ValueError("its header is too long")
    wait(8 + length)
    try:
        with safe_open(path, "pt") as checked:  # header, offsets, sizes and the file's length
            metadata = checked.metadata() or {}
    except SafetensorError as error:
        raise ValueError(f"it is not a safetensors file: {error}") from error
    try:
        declared = json.loads(metadata.get("messages", ""))
        if most is not None and len(declared) > most:
            raise ValueError(f"it holds {len(declared)} messages, at most {most} were expected")
        file = path.open("rb")
        file.seek(8)
        header = json.loads(file.read(length))
        messages = _by_message(header, len(declared))
        reader = _Reader(file, 8 + length, header, store, device, most_beside, wait)
        exchange: Exchange[M] = Exchange(store, batches)
        for index, (plain, names) in enumerate(zip(declared, messages, strict=True)):
            known, batch = _known(kind, metadata.get("kind")), exchange.batch(index)
            exchange.packed.append(reader.message(known, index, batch, plain, names, kept))
    except (LookupError, TypeError, AttributeError, OverflowError, RecursionError, RuntimeError) as error:
        raise ValueError(f"its declaration does not fit: {type(error).__name__}: {error}") from error
    return exchange


def _known(kind: type[M], name: str | None) -> type[M]:
    """Return the class of a name: the kind that is expected, or a subclass of it."""
    candidates = [kind]
    while candidates:
        candidate = candidates.pop()
        if candidate.__name__ == name:
            return candidate
        candidates += candidate.__subclasses__()
    raise ValueError(f"{kind.__name__} messages were expected, not {name!r}")


def _by_message(header: dict[str, Any], count: int) -> list[list[str]]:
    names: list[list[str]] = [[] for _ in range(count)]
    for name in header:
        if name != "__metadata__":
            index = name.split(".", 1)[0]
            if not index.isdecimal() or int(index) >= count:
                raise ValueError(f"it holds {name!r}, but {count} messages")
            names[int(index)].append(name)
    return names


class _Reader:
    def __init__(
        self,
        file: IO[bytes],
        data: int,
        header: dict[str, Any],
        store: Store,
        device: torch.device,
        most_beside: int | None,
        wait: Wait,
    ):
        self.file, self.data, self.header, self.store = file, data, header, store
        self.device, self.most_beside, self.wait = device, most_beside, wait

    def tensor(self, name: str) -> Tensor | Mapped:
        entry = self.header[name]
        start, end = entry["data_offsets"]
        dtype = _NAMED[entry["dtype"]]
        if start == end:
            return torch.empty(entry["shape"], dtype=dtype)
        return Mapped(self.file, self.data + start, end - start, torch.Size(entry["shape"]), dtype, self.wait)

    def here(self, name: str) -> Tensor:
        values = self.tensor(name)
        arrived = values if isinstance(values, Tensor) else values.read().clone()
        there = {name: arrived.to(self.device)}
        return (known_masks(there, {name: arrived}) if is_accelerator(self.device) else there)[name]

    def message(
        self, kind: type[M], index: int, batch: int, declared: Any, names: list[str], kept: Kept[M]
    ) -> Packed[M]:
        values: dict[str, Any] = {
            name: {key: tuple(map(int, shape)) for key, shape in shapes.items()}
            for name, shapes in declared["plain"].items()
        }
        shapes = {name: torch.Size(entry["shape"]) for name, entry in declared["packed"].items()}
        sizes = {name: self.header[name]["data_offsets"][1] - self.header[name]["data_offsets"][0] for name in names}
        large = sum(size for name, size in sizes.items() if name.split(".", 1)[1].removesuffix(_SCALE) in shapes)
        beside, most = sum(sizes.values()) - large, self.most_beside
        most = _MOST_BESIDE + 4 * large if most is None else most
        if beside > most:
            raise ValueError(f"message {index} has {beside} bytes beside its packed tensors, at most {most} are taken")
        for name in names:
            field, _, key = name.split(".", 1)[1].partition(".")
            if name.endswith(_SCALE) or field in shapes:
                continue
            if field not in kind.kinds:
                raise ValueError(f"a {kind.__name__} message has no field {field!r}")
            if key:
                values.setdefault(field, {})[key] = self.here(name)
            else:
                values[field] = self.here(name)
        # Without memory: the shapes are not yet known to be sound.
        outlines = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
        rest = kind(**values, **outlines)
        places = kept(index, rest)
        packed = {
            name: self.packed(
                f"{index}.{name}", kind.kinds[name], batch, shape, _NAMED[declared["packed"][name]["dtype"]], places
            )
            for name, shape in shapes.items()
        }
        nothing: dict[str, Any] = dict.fromkeys(packed)
        return Packed(replace(rest, **nothing), packed, places)

    def packed(
        self, name: str, kind: str, batch: int, shape: torch.Size, dtype: torch.dtype, places: Places | None
    ) -> PackedTensor:
        """Return a tensor whose values and scales are what its codec makes of its shape; others are refused."""
        if places is not None and (len(shape) < 3 or (shape[0], shape[-2]) != places.kept.shape):
            places = None
        if not dtype.is_floating_point or len(shape) < 2:
            raise ValueError(f"{name} is declared as {dtype} {tuple(shape)}")
        codec, values = self.store.codecs[kind], self.tensor(name)
        scale = self.tensor(name + _SCALE) if name + _SCALE in self.header else None
        for part, expected in zip((values, scale), codec.parts(sent_shape(shape, places), dtype), strict=True):
            found = None if part is None else (part.dtype, tuple(part.shape))
            wanted = None if expected is None else (expected.dtype, tuple(expected.shape))
            if found != wanted:
                what = f"{name} comes with a scale of" if part is scale or expected is None else f"{name} is"
                raise ValueError(f"{what} {found} instead of {wanted}")
        here = None if scale is None else self.here(name + _SCALE)
        if isinstance(values, Tensor):
            values = values.to(self.device)
        return PackedTensor(codec, self.store.seed(kind, batch), values, here, places, shape, dtype, self.device)
