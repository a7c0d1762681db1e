"""Answers that a client did not give like this."""

import hashlib
import json
from collections.abc import Callable
from typing import Any

import torch
from flwr.app import Message
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from safetensors.torch import load, save

from hf_coefsfl.flower.wire import chunk_of, content, header_of


def reply_with(message: Message, reply: Message, change: Callable[[dict[str, Any]], None]) -> Message:
    """Return a reply with other tensors."""
    header, data = header_of(reply.content), chunk_of(reply.content)
    length = int.from_bytes(data[:8], "little")
    metadata = json.loads(data[8 : 8 + length]).get("__metadata__")
    tensors = load(data)
    change(tensors)
    data = save(tensors, metadata)
    header |= {"payload_size": len(data), "payload_sha256": hashlib.sha256(data).hexdigest()}
    return forged(message, reply, content(header, data))


def forged(message: Message, reply: Message, records: Any) -> Message:
    made = Message(records, reply_to=message)
    made.metadata.__dict__["_src_node_id"] = reply.metadata.src_node_id
    return made


def header_with(message: Message, reply: Message, **changes: Any) -> Message:
    return forged(message, reply, content(header_of(reply.content) | changes, chunk_of(reply.content)))


def scaled(factor: float) -> Callable[[dict[str, Any]], None]:
    def change(tensors: dict[str, Any]) -> None:
        for name in tensors:
            if name.endswith("activations") or name.startswith("0.adapters."):
                tensors[name] = tensors[name] * factor

    return change


def first(kind: Callable[[Any], Any]) -> Callable[[dict[str, Any]], None]:
    def change(tensors: dict[str, Any]) -> None:
        name = next(n for n in sorted(tensors) if n.endswith("activations") or n.startswith("0.adapters."))
        tensors[name] = kind(tensors[name])

    return change


def from_elsewhere(message: Message, reply: Message) -> Message:
    reply.metadata.__dict__["_src_node_id"] = 100
    return reply


def labels_or(kind: Callable[[Any], Any]) -> Callable[[Message, Message], Message]:
    """Change the labels of an upload; what has none is an answer of nonsense."""

    def answer(message: Message, reply: Message) -> Message:
        if b"labels.labels" not in chunk_of(reply.content):
            return header_with(message, reply, seconds=-1.0)

        def change(tensors: dict[str, Any]) -> None:
            tensors["0.labels.labels"] = kind(tensors["0.labels.labels"])

        return reply_with(message, reply, change)

    return answer


def added(name: str, t: torch.Tensor) -> Callable[[Message, Message], Message]:
    return lambda message, reply: reply_with(message, reply, lambda tensors: tensors.update({name: t}))


def with_bodies(reply: Message, change: Callable[[str, bytes], bytes]) -> Callable[[], Message]:
    """Return what pulls a reply as Flower does, from the bytes of its records, after `change(class, body)` of each."""
    contents: dict[str, bytes] = {}
    for number, record in get_all_nested_objects(reply).items():
        head, _, body = record.deflate().partition(b"\0")
        kind, children, _ = head.decode().split(" ")
        if not isinstance(record, Message):
            body = change(kind, body)
        contents[number] = f"{kind} {children} {len(body)}".encode() + b"\0" + body

    def pull() -> Message:
        message = inflate_object_from_contents(reply.object_id, contents, keep_object_contents=True)
        assert isinstance(message, Message)
        return message

    return pull
