"""A file of messages is read while it is received."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_coefsfl.protocol.codecs import CODECS
from hf_coefsfl.protocol.messages import SmashedData
from hf_coefsfl.protocol.packing import Exchange, Places, Store
from hf_coefsfl.protocol.wire import read_exchange, write_exchange


def smashed(batches: int = 4) -> list[SmashedData]:
    generator = torch.Generator().manual_seed(0)
    found = []
    for i in range(batches):
        mask = torch.ones(2, 5 + i, dtype=torch.long)
        mask[1, 3:] = 0
        values = torch.randn(2, 5 + i, 4, generator=generator)
        labels = {"labels": torch.tensor([i, 1])}
        found.append(SmashedData(values, {"attention_mask": mask}, labels, {"input_ids": (2, 5 + i)}))
    return found


def kept(store: Store) -> Any:
    def places(_: int, message: SmashedData) -> Places | None:
        return store.places(message.context["attention_mask"].bool())

    return places


def take_apart(path: Path) -> tuple[dict[str, Any], bytes]:
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


@dataclass
class Coming:
    """A file that grows as it is waited for, and holds nothing else; `there` is what has come."""

    whole: bytes
    path: Path
    there: int = 0
    waits: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        with self.path.open("wb") as file:
            file.truncate(len(self.whole))
        self.file = self.path.open("r+b", buffering=0)

    def wait(self, end: int) -> None:
        end = min(end, len(self.whole))
        self.waits.append(end)
        if end > self.there:
            self.file.seek(self.there)
            self.file.write(self.whole[self.there : end])
            self.there = end


def test_what_is_small_lies_before_the_values_of_one_batch_after_the_other(tmp_path: Path) -> None:
    store = Store("int4", trailing=True)
    write_exchange(Exchange.of(smashed(12), store, kept(store)), tmp_path / "x")
    header, _ = take_apart(tmp_path / "x")
    del header["__metadata__"]
    names = sorted(header, key=lambda name: header[name]["data_offsets"])
    large = [f"{i}.activations" for i in range(12)]
    assert names[-12:] == large
    assert {name.partition(".")[2] for name in names[:-12]} == {
        "context.attention_mask", "labels.labels", "activations:scale"
    }  # fmt: skip


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("backwards", [False, True])
def test_a_batch_is_read_when_it_is_there(tmp_path: Path, codec: str, backwards: bool) -> None:
    """Reading waits for what it needs and no more; files of another order are read as well, later."""
    store = Store(codec, trailing=True)
    sent = Exchange.of(smashed(), store, kept(store))
    write_exchange(sent, tmp_path / "x")
    header, data = take_apart(tmp_path / "x")
    if backwards:
        metadata, end, parts = header.pop("__metadata__"), 0, []
        for entry in reversed(header.values()):
            start, stop = entry["data_offsets"]
            parts.append(data[start:stop])
            entry["data_offsets"] = [end, end + stop - start]
            end += stop - start
        header, data = {"__metadata__": metadata} | header, b"".join(parts)
    text = json.dumps(header).encode()
    first = 8 + len(text)
    coming = Coming(len(text).to_bytes(8, "little") + text + data, tmp_path / "coming")
    found = read_exchange(coming.path, SmashedData, store, kept(store), wait=coming.wait)
    coming.path.unlink()
    ends = [first + header[f"{i}.activations"]["data_offsets"][1] for i in range(len(sent))]
    assert [packed.end for packed in found.packed] == ends
    assert found.nbytes() == sent.nbytes() and [m.shapes for m in found.outlines()] == [m.shapes for m in smashed()]
    if backwards:
        assert coming.there == len(coming.whole)
    else:  # nothing of the values was needed
        assert coming.there == first + header["0.activations"]["data_offsets"][0]
    for batch, (a, b) in enumerate(zip(sent, found, strict=True)):
        assert backwards or coming.there == ends[batch]
        assert a.tensors().keys() == b.tensors().keys()
        assert all(torch.equal(a.tensors()[name], b.tensors()[name]) for name in a.tensors())


def test_the_form_is_checked_before_the_values_come(tmp_path: Path) -> None:
    store = Store()
    write_exchange(Exchange.of(smashed(), store), tmp_path / "x")
    whole = (tmp_path / "x").read_bytes()
    wrong = whole.replace(b'{\\"shape\\":[2,8,4]', b'{\\"shape\\":[2,4,8]')
    assert wrong != whole
    coming = Coming(wrong, tmp_path / "coming")
    with pytest.raises(ValueError, match=r"3\.activations is"):
        read_exchange(coming.path, SmashedData, store, wait=coming.wait)
    assert coming.there < len(wrong) - 4 * 2 * 8 * 4


@pytest.mark.parametrize("size", [0, 5, 8, 20])
def test_a_file_that_is_too_short_is_refused(tmp_path: Path, size: int) -> None:
    coming = Coming(((100).to_bytes(8, "little") + b"{" * 12)[:size], tmp_path / "coming")
    with pytest.raises(ValueError, match="not a safetensors file"):
        read_exchange(coming.path, SmashedData, Store(), wait=coming.wait)


def test_what_goes_wrong_reaches_the_reader(tmp_path: Path) -> None:
    store = Store()
    write_exchange(Exchange.of(smashed(), store), tmp_path / "x")
    coming = Coming((tmp_path / "x").read_bytes(), tmp_path / "coming")
    is_gone = False

    def wait(end: int) -> None:
        if is_gone:
            raise EOFError(end)
        coming.wait(end)

    found = read_exchange(coming.path, SmashedData, store, wait=wait)
    assert found[0].activations.isfinite().all()
    is_gone = True
    with pytest.raises(EOFError):
        found[1]
    with pytest.raises(EOFError):
        read_exchange(coming.path, SmashedData, store, wait=wait)
