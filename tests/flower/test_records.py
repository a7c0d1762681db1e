"""What a message costs beside its tensors, and what is refused of one."""

import os
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ConfigRecord, MetricRecord, RecordDict
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects

from hf_coefsfl.flower.wire import TransferError, chunk_of, content, has_chunk, header_of
from hf_coefsfl.protocol.messages import Feedback, SmashedData
from hf_coefsfl.protocol.packing import Exchange, Store
from hf_coefsfl.protocol.wire import write_exchange

HEADER = {"client": 0, "seconds": 0.5, "token": "t"}


@pytest.mark.parametrize("chunk", [b"", b"1", b"\0" * 8, b"\x05" + b"\0" * 20, os.urandom(5000)], ids=len)
def test_a_chunk_of_any_bytes_comes_as_it_was(chunk: bytes) -> None:
    """From the beginning of a payload, from its middle, or cut off within its header."""
    records = content(HEADER, chunk)
    assert has_chunk(records) and chunk_of(records) == chunk_of(records, len(chunk)) == chunk
    assert header_of(records) == HEADER
    assert not has_chunk(content(HEADER))
    if chunk:
        with pytest.raises(TransferError, match=f"more than the {len(chunk) - 1} bytes"):
            chunk_of(records, len(chunk) - 1)


def test_a_message_is_one_record() -> None:
    """Flower asks for each object alone: the list of records, and the record. (The message itself is the third.)"""
    assert len(get_all_nested_objects(content(HEADER, b"1" * 1000))) == 2


def texts(kind: type[Any], batches: int, codec: str) -> Exchange[Any]:
    """Return messages like those of a RoBERTa with 384 features and batches of four pairs of sentences."""

    def message(batch: int) -> Any:
        shape = (4, 20 + batch % 3)
        tensor, mask = torch.randn(*shape, 384), torch.ones(shape, dtype=torch.int64)
        if kind is Feedback:
            return Feedback(tensor)
        shapes = dict.fromkeys(("input_ids", "attention_mask"), shape)
        return SmashedData(tensor, {"attention_mask": mask}, {"labels": mask[:, 0]}, shapes)

    return Exchange.of(map(message, range(batches)), Store(codec))


@pytest.mark.parametrize("kind", [SmashedData, Feedback])
@pytest.mark.parametrize(("codec", "batches", "most"), [("int4", 12, 1.01), ("int4", 1, 1.02), ("float32", 1, 1.003)])
def test_names_and_shapes_are_little(tmp_path: Path, kind: type[Any], codec: str, batches: int, most: float) -> None:
    exchange = texts(kind, batches, codec)
    write_exchange(exchange, tmp_path / "file")
    data, tensors = (tmp_path / "file").read_bytes(), sum(exchange.nbytes().values())
    sent = sum(len(value) for value in content({}, data)["header"].values())
    assert tensors < sent <= most * tensors
    assert chunk_of(content({}, data)) == data


def records(**changes: Any) -> RecordDict:
    entries = dict(content(HEADER, b"\x08" + b"\0" * 7 + b"{" * 23)["header"])
    return RecordDict({"header": ConfigRecord(entries | {f".{name}": value for name, value in changes.items()})})


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (records(start=b"not zlib"), "cannot be read"),
        (records(start=zlib.compress(b"x" * 99)[:-5]), "not whole"),
        (records(start=zlib.compress(b"x" * 16) + b"more"), "not whole"),
        (records(start=zlib.compress(b"\0" * 2**26)), "more than the 1000 bytes"),
        (records(start="x"), "no chunk"),
        (records(chunk=[1, 2]), "no chunk"),
        (records(chunk=b"1" * 1000), "more than the 1000 bytes"),
        (RecordDict({"header": ConfigRecord({}), "more": ConfigRecord({})}), "the records header, more"),
        (RecordDict({"header": MetricRecord({})}), "the records header"),
        (RecordDict({}), "the records none"),
    ],
)
def test_what_is_refused(found: RecordDict, reason: str) -> None:
    with pytest.raises(TransferError, match=reason):
        chunk_of(found, 1000)


def test_a_bomb_takes_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 64 MiB of zeros no more is inflated than a header may have, whatever the limit of a chunk is."""
    packer, inflated = zlib.compressobj(), list[int]()
    bomb = b"".join(packer.compress(bytes(2**24)) for _ in range(4)) + packer.flush()

    class Counting:
        def __init__(self) -> None:
            self.reader = zlib_decompressobj()

        def decompress(self, data: bytes, most: int) -> bytes:
            inflated.append(len(found := self.reader.decompress(data, most)))
            return found

        def __getattr__(self, name: str) -> Any:
            return getattr(self.reader, name)

    zlib_decompressobj = zlib.decompressobj
    monkeypatch.setattr(zlib, "decompressobj", Counting)
    for limit in (None, 2**40):
        with pytest.raises(TransferError, match="not whole"):
            chunk_of(records(start=bomb), limit)
    assert inflated == [2**24 + 1] * 2
