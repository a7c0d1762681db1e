"""What a hostile client may make of an honest answer: each mutation takes a random generator and an answer."""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np

Answer = tuple[dict[str, Any], bytes]
Parsed = tuple[dict[str, Any], bytearray]  # the header of a safetensors file, and its data
DTYPES = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": np.uint16, "I64": np.int64, "I32": np.int32,
    "I16": np.int16, "I8": np.int8, "U8": np.uint8, "BOOL": np.uint8,
}  # fmt: skip
NUMBERS = [-(2**62), -1, 0, 1, 2, 3, 7, 255, 2**31, 2**40, 2**62]
STRANGE: list[Any] = [
    *NUMBERS, 0.0, -1.5, 1e308, math.inf, -math.inf, math.nan, "", "x" * 1000, "\0\n\x1b[31m", "../../etc/passwd", b"",
    b"\xff" * 9, True, [1, 2], [""], [0.5], [],
]  # fmt: skip
NAMES = [
    "0.activations", "0.activations:scale", "9.activations", "-1.activations", "0", "0.", ".", "__metadata__",
    "0.context.attention_mask", "0.context.position_ids", "0.context.padding", "0.context.x", "0.labels.labels",
    "0.ahead", "0.labels.x", "0.observed.client_loss", "0.observed.x", "0.kept.x", "0.adapters.x", "0.shapes.x",
]  # fmt: skip
KINDS = ["Message", "SmashedData", "Probes", "Feedback", "Parameters", "ClientResult", "Slopes", "_Between", "", "x"]


def parse(data: bytes) -> Parsed:
    """Take a safetensors file apart."""
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), bytearray(data[8 + length :])


def joined(parsed: Parsed, pad: bool = True) -> bytes:
    """Put a safetensors file together."""
    text = json.dumps(parsed[0]).encode()
    text += b" " * (-len(text) % 8 if pad else 0)
    return len(text).to_bytes(8, "little") + text + bytes(parsed[1])


def sealed(header: dict[str, Any], data: bytes) -> Answer:
    """Return an answer whose size and checksum are right."""
    return header | {"payload_size": len(data), "payload_sha256": hashlib.sha256(data).hexdigest()}, data


def a_tensor(rng: random.Random, header: dict[str, Any]) -> str:
    return rng.choice([name for name in header if name != "__metadata__"])


# ---- Of a header ----


def change_header(rng: random.Random, answer: Answer) -> Answer:
    """Another value, one entry less, or one more."""
    header, data = dict(answer[0]), answer[1]
    name = rng.choice([*header, "client", "round", "token", "sequence", "protocol", "x"])
    if rng.random() < 0.2:
        header.pop(name, None)
    else:
        header[name] = rng.choice(STRANGE)
    return header, data


def change_counts(rng: random.Random, answer: Answer) -> Answer:
    name = rng.choice(["num_batches", "num_samples", "seconds", "payload_size"])
    value: Any = rng.choice(NUMBERS)
    return answer[0] | {name: float(value) if name == "seconds" else value}, answer[1]


# ---- Of the bytes ----


def flip_bits(rng: random.Random, answer: Answer) -> Answer:
    data = bytearray(answer[1])
    for _ in range(rng.choice([1, 2, 20])):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return sealed(answer[0], bytes(data)) if rng.random() < 0.9 else (answer[0], bytes(data))


def cut_or_extend(rng: random.Random, answer: Answer) -> Answer:
    data = answer[1]
    place = rng.randrange(len(data))
    data = rng.choice([data[:place], data[place:], data + data[:place], data[:place] * 2, b"", b"\0" * 8, b"\xff" * 99])
    return sealed(answer[0], data) if rng.random() < 0.9 else (answer[0], data)


# ---- Of what is declared ----


def other_shape(rng: random.Random, shape: list[int]) -> list[Any]:
    shape = list(shape)
    kinds: list[Callable[[], Any]] = [
        lambda: shape.reverse(),
        lambda: shape.append(1),
        lambda: shape.insert(0, 1),
        lambda: shape.clear(),
        lambda: shape.extend([2**40, 2**40]),
        lambda: shape.extend([0] * 70),
    ]
    if shape:
        place = rng.randrange(len(shape))
        kinds += [
            lambda: shape.pop(place),
            lambda: shape.__setitem__(place, rng.choice([-1, 0, 1, 2**31, 2**63, 10**30, shape[place] + 1, 1.5, "3"])),
            lambda: shape.__setitem__(place, shape[place] - 1),
        ]
    rng.choice(kinds)()
    return shape


def change_shapes(rng: random.Random, answer: Answer) -> Answer:
    """Of a tensor, with data of that size or of the old one."""
    header, data = parse(answer[1])
    entry = header[a_tensor(rng, header)]
    entry["shape"] = other_shape(rng, entry["shape"])
    return sealed(answer[0], joined((header, data)))


def change_sizes(rng: random.Random, answer: Answer) -> Answer:
    """Fewer or more rows of a tensor, whose data, declaration and offsets agree."""
    header, data = parse(answer[1])
    name = a_tensor(rng, header)
    arrays = {n: bytes(data[slice(*e["data_offsets"])]) for n, e in header.items() if n != "__metadata__"}
    shape = header[name]["shape"]
    if shape and shape[0]:
        rows = rng.choice([0, 1, shape[0] - 1, shape[0] + 1, 2 * shape[0]])
        row = arrays[name][: len(arrays[name]) // shape[0]]
        header[name]["shape"], arrays[name] = [rows, *shape[1:]], row * rows
    return sealed(answer[0], packed(rng, header, arrays, name, rng.random() < 0.7))


def packed(rng: random.Random, header: dict[str, Any], arrays: dict[str, bytes], name: str, declare: bool) -> bytes:
    """Return a file of these arrays; the declaration of what was packed follows, if asked for."""
    end = 0
    for n, array in arrays.items():
        header[n]["data_offsets"] = [end, end + len(array)]
        end += len(array)
    number, _, part = name.partition(".")
    messages = json.loads(header["__metadata__"]["messages"])
    if declare and part in messages[int(number)]["packed"]:
        messages[int(number)]["packed"][part]["shape"] = header[name]["shape"]
        header["__metadata__"]["messages"] = json.dumps(messages)
    return joined((header, bytearray(b"".join(arrays.values()))))


def change_dtypes(rng: random.Random, answer: Answer) -> Answer:
    header, data = parse(answer[1])
    header[a_tensor(rng, header)]["dtype"] = rng.choice([*DTYPES, "F8_E4M3", "U64", "x", 3])
    return sealed(answer[0], joined((header, data)))


def change_offsets(rng: random.Random, answer: Answer) -> Answer:
    header, data = parse(answer[1])
    entry, other = header[a_tensor(rng, header)], header[a_tensor(rng, header)]
    start, end = entry["data_offsets"]
    entry["data_offsets"] = rng.choice(
        [[end, start], [start + 4, end + 4], [0, 2**62], [-4, end], [start], [start, start], other["data_offsets"], "x"]
    )
    return sealed(answer[0], joined((header, data)))


def change_names(rng: random.Random, answer: Answer) -> Answer:
    """Rename, drop or double a tensor."""
    header, data = parse(answer[1])
    name, to = a_tensor(rng, header), rng.choice([*NAMES, *header])
    entry = header[name] if rng.random() < 0.3 else header.pop(name)
    if rng.random() < 0.7:
        header[to] = entry
    return sealed(answer[0], joined((header, data)))


def change_declarations(rng: random.Random, answer: Answer) -> Answer:
    """Of the messages beside the tensors: kind, number, shapes, dtypes, or no JSON at all."""
    header, data = parse(answer[1])
    metadata = header["__metadata__"]
    messages = json.loads(metadata["messages"])
    message = rng.choice(messages)
    where = rng.choice(["kind", "count", "plain", "packed", "text"])
    if where == "kind":
        metadata["kind"] = rng.choice(KINDS)
    elif where == "count":
        messages = rng.choice([[], messages * 2, messages[:1], messages * 5000, {}, 7, None, [None], [[]]])
    elif where == "plain" and message["plain"].get("shapes"):
        shapes = message["plain"]["shapes"]
        name = rng.choice(list(shapes))
        shapes[rng.choice([name, "x", "pixel_values"])] = other_shape(rng, shapes[name])
    elif where == "packed" and message["packed"]:
        entry = message["packed"][rng.choice(list(message["packed"]))]
        if rng.random() < 0.5:
            entry["shape"] = other_shape(rng, entry["shape"])
        else:
            entry["dtype"] = rng.choice([*DTYPES, "x", None])
    else:
        message[rng.choice(["plain", "packed"])] = rng.choice([None, [], 3, {"x": {"y": [1]}}, {"activations": {}}])
    nested = "[" * rng.choice([10, 100_000])
    metadata["messages"] = rng.choice(["", "x", nested]) if where == "text" else json.dumps(messages)
    return sealed(answer[0], joined((header, data)))


# ---- Of values ----


def change_values(rng: random.Random, answer: Answer, only: tuple[str, ...] = ("",)) -> Answer:
    """Some or all values of a tensor: not finite, huge, tiny, random, of another sign."""
    header, data = parse(answer[1])
    names = [n for n in header if n != "__metadata__" and any(part in n for part in only)] or [a_tensor(rng, header)]
    entry = header[rng.choice(names)]
    start, end = entry["data_offsets"]
    values = np.frombuffer(bytes(data[start:end]), DTYPES[entry["dtype"]]).copy()
    if not len(values):
        return answer
    chosen = slice(None) if rng.random() < 0.5 else rng.randrange(len(values))
    if values.dtype.kind == "f":
        with np.errstate(over="ignore", invalid="ignore"):
            what = rng.choice([math.nan, math.inf, -math.inf, 3e38, -3e38, 1e30, 1e19, 1e-42, 0.0, "flip", "grow"])
            values[chosen] = (
                what if not isinstance(what, str) else values[chosen] * values.dtype.type(-1 if what == "flip" else 1e4)
            )
    else:
        info = np.iinfo(values.dtype)
        values[chosen] = rng.choice([info.min, info.max, 0, 1, info.max // 2, min(info.max, 98), min(info.max, 99)])
        if rng.random() < 0.2 and info.min < 0:
            values[chosen] = rng.choice([-1, -100, -101])
    data[start:end] = values.tobytes()
    return sealed(answer[0], joined((header, data)))


def change_labels(rng: random.Random, answer: Answer) -> Answer:
    return change_values(rng, answer, ("labels.",))


def change_context(rng: random.Random, answer: Answer) -> Answer:
    """Values of a mask, or a tensor of the context that is not there."""
    if rng.random() < 0.6:
        return change_values(rng, answer, ("context.",))
    header, data = parse(answer[1])
    arrays = {n: bytes(data[slice(*e["data_offsets"])]) for n, e in header.items() if n != "__metadata__"}
    name = "0.context." + rng.choice(
        [
            "attention_mask",
            "position_ids",
            "padding",
            "output_attentions",
            "my_attention_mask",
            "block.x",
            "token_type_ids",
        ]
    )
    shape = rng.choice([[3, 9], [1, 9], [3, 1, 9, 9], [3], [3, 0], [9, 3], [3, 5], [1, 1, 1, 1], [3, 999]])
    kind = rng.choice(["I64", "F32", "BOOL", "F16"])
    header[name] = {"dtype": kind, "shape": shape}
    fill = np.full(shape, rng.choice([0, 1, 2, 100]), DTYPES[kind])
    arrays[name] = fill.tobytes()
    return sealed(answer[0], packed(rng, header, arrays, name, False))


MUTATIONS: tuple[Callable[[random.Random, Answer], Answer], ...] = (
    change_header, change_counts, flip_bits, cut_or_extend, change_shapes, change_sizes, change_dtypes, change_offsets,
    change_names, change_declarations, change_values, change_values, change_labels, change_context,
)  # fmt: skip
