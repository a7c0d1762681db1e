"""An exchange as a file: what goes in comes out, and what others forge is refused."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from hf_coefsfl.protocol.codecs import CODECS
from hf_coefsfl.protocol.messages import Feedback, Message, Parameters, SmashedData
from hf_coefsfl.protocol.packing import Exchange, Places, Store
from hf_coefsfl.protocol.wire import read_exchange, read_message, write_exchange, write_message
from tests.support.packed import MIXED
from tests.support.paths import ROOT


def smashed(batches: int = 3, padded: bool = True) -> list[SmashedData]:
    torch.manual_seed(0)
    found = []
    for i in range(batches):
        mask = torch.ones(2, 5 + i, dtype=torch.long)
        if padded:
            mask[1, 3:] = 0
        labels = {"labels": torch.tensor([i, 1])}
        shapes = {"input_ids": (2, 5 + i)}
        found.append(SmashedData(torch.randn(2, 5 + i, 4), {"attention_mask": mask}, labels, shapes))
    return found


def places_of(message: SmashedData, store: Store) -> Places | None:
    mask = message.context["attention_mask"].bool()
    return store.places(None if mask.all() else mask)


def packed(store: Store, messages: list[Any] | None = None) -> Exchange[Any]:
    messages = smashed() if messages is None else messages
    return Exchange.of(messages, store, lambda _, message: places_of(message, store))


def read(path: Path, store: Store) -> Exchange[SmashedData]:
    return read_exchange(path, SmashedData, store, lambda _, message: places_of(message, store))


@pytest.mark.parametrize("dtype", CODECS)
@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("limit", [None, 0])
def test_a_file_gives_back_what_was_sent(tmp_path: Path, dtype: str, padded: bool, limit: int | None) -> None:
    """To the bit, with the same bytes for the ledger; the file may be deleted while it is read."""
    path, store = tmp_path / "x", Store(dtype, limit, tmp_path, leading=True, trailing=True)
    sent = packed(store, smashed(padded=padded))
    write_exchange(sent, path)
    found = read(path, Store(dtype, limit, tmp_path, leading=True, trailing=True))
    path.unlink()
    assert found.nbytes() == sent.nbytes() and len(found) == len(sent)
    for a, b in zip(sent, found, strict=True):
        assert a.shapes == b.shapes
        assert a.tensors().keys() == b.tensors().keys()
        assert all(torch.equal(a.tensors()[name], b.tensors()[name]) for name in a.tensors())


def test_safetensors_reads_the_file(tmp_path: Path) -> None:
    write_exchange(packed(Store()), tmp_path / "x")
    tensors = load_file(tmp_path / "x")
    assert torch.equal(tensors["0.labels.labels"], torch.tensor([0, 1])) and len(tensors) == 9


def forged(path: Path, change: Any) -> None:
    """Rewrite a file with other tensors or another declaration."""
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    tensors, told = load_file(path), json.loads(metadata["messages"])
    change(tensors, told, metadata)
    save_file(tensors, path, metadata | {"messages": json.dumps(told)})


FORGERIES: dict[str, Any] = {
    "shape": lambda t, told, m: t.update({"0.activations": t["0.activations"][:, :3].contiguous()}),
    "declared shape": lambda t, told, m: told[0]["packed"]["activations"].update(shape=[2, 10**9, 4]),
    "negative shape": lambda t, told, m: told[0]["packed"]["activations"].update(shape=[2, -5, 4]),
    "no shape": lambda t, told, m: told[0]["packed"]["activations"].update(shape="x"),
    "dtype": lambda t, told, m: t.update({"0.activations": t["0.activations"].double()}),
    "declared dtype": lambda t, told, m: told[0]["packed"]["activations"].update(dtype="I64"),
    "strange dtype": lambda t, told, m: told[0]["packed"]["activations"].update(dtype="pickle"),
    "scale": lambda t, told, m: t.update({"0.activations:scale": torch.ones(())}),
    "missing": lambda t, told, m: t.pop("0.activations"),
    "strange field": lambda t, told, m: t.update({"0.code": torch.ones(1)}),
    "strange message": lambda t, told, m: t.update({"7.activations": torch.ones(1)}),
    "strange name": lambda t, told, m: t.update({"x": torch.ones(1)}),
    "kind": lambda t, told, m: m.update(kind="Feedback"),
    "no kind": lambda t, told, m: m.pop("kind"),
    "more messages": lambda t, told, m: told.append(told[0]),
    "no plain part": lambda t, told, m: told[0].pop("plain"),
    "plain text": lambda t, told, m: told[0].update(plain={"shapes": "x"}),
    "plain field": lambda t, told, m: told[0].update(plain={"code": {}}),
}


@pytest.mark.parametrize("what", FORGERIES)
def test_what_is_forged_is_refused(tmp_path: Path, what: str) -> None:
    path = tmp_path / "x"
    write_exchange(packed(Store()), path)
    forged(path, FORGERIES[what])
    with pytest.raises(ValueError):  # noqa: PT011 - each has its own words
        read(path, Store())


def test_what_no_codec_makes_is_refused(tmp_path: Path) -> None:
    """Before anything is decoded: other sizes, dtypes or scales. Numbers of tokens that cannot be become NaN."""
    path = tmp_path / "x"

    def changed(name: str, t: torch.Tensor | None) -> Any:
        return lambda tensors, *_: tensors.pop(name) if t is None else tensors.update({name: t})

    for codec in ("int4", "int3", "topk8"):
        message = [SmashedData(torch.rand(2, 5, 4))]
        write_exchange(packed_all(codec, message), path)
        honest = load_file(path)
        values, scales = honest["0.activations"], honest["0.activations:scale"]
        longer = torch.cat([values, values], -1)
        for name, forged_part in (
            ("0.activations", longer), ("0.activations", values.char()), ("0.activations", values[:1]),
            ("0.activations:scale", None), ("0.activations:scale", scales.float()),
            ("0.activations:scale", scales.repeat(*[1] * (scales.dim() - 1), 2)),
        ):  # fmt: skip
            write_exchange(packed_all(codec, message), path)
            forged(path, changed(name, None if forged_part is None else forged_part.contiguous()))
            with pytest.raises(ValueError, match=r"activations (is|comes with a scale of) .* instead of"):
                read_exchange(path, SmashedData, Store(codec))
    for token in ([200, 0, 0, 0], [0, 0, 0, 128]):  # beyond the last, and with the highest bit
        values[0, :4] = torch.tensor(token, dtype=torch.uint8)
        write_exchange(packed_all("topk8", message), path)
        forged(path, changed("0.activations", values))
        assert read_exchange(path, SmashedData, Store("topk8"))[0].activations.isnan().any()


def packed_all(codec: str, messages: list[Any]) -> Exchange[Any]:
    return Exchange.of(messages, Store(codec))


@given(st.integers(0, 2000), st.sampled_from(["float32", *MIXED.values()]), st.binary(min_size=1, max_size=8))
def test_damaged_files_are_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, place: int, codec: str, data: bytes
) -> None:
    """Bytes written over a file anywhere raise ValueError, if anything: there or when a message is unpacked."""
    path = tmp_path_factory.mktemp("damaged") / "x"
    write_exchange(packed(Store(codec)), path)
    content = bytearray(path.read_bytes())
    place %= len(content)
    content[place : place + len(data)] = data
    path.write_bytes(content)
    try:
        for message in read(path, Store(codec)):
            assert message.activations.shape[0] == 2
    except ValueError:
        pass


def test_messages_of_another_kind_are_refused(tmp_path: Path) -> None:
    write_exchange(Exchange.of([Feedback(torch.ones(2, 3, 4))], Store()), tmp_path / "x")
    assert isinstance(read_exchange(tmp_path / "x", Message, Store(), lambda *_: None)[0], Feedback)
    with pytest.raises(ValueError, match="SmashedData messages were expected, not 'Feedback'"):
        read(tmp_path / "x", Store())


def test_memory_is_that_of_one_message(tmp_path: Path) -> None:
    """300 MB are packed, written, read and unpacked in a process that grows by little more than one message (8 MB)."""
    script = f"""
import torch
from pathlib import Path
from hf_coefsfl.protocol.packing import Exchange, Store
from hf_coefsfl.protocol.wire import read_exchange, read_message, write_exchange, write_message
from hf_coefsfl.flower.memory import return_freed_memory
from hf_coefsfl.protocol.messages import SmashedData

return_freed_memory()

def peak():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]) / 1024

folder = Path({str(tmp_path)!r})
store = Store(memory_limit=0, folder=folder)
before = peak()
sent = Exchange(store)
for i in range(38):
    sent.append(SmashedData(torch.full((8, 256, 1024), float(i)), labels={{"labels": torch.zeros(8)}}))
write_exchange(sent, folder / "x")
found = read_exchange(folder / "x", SmashedData, Store(), lambda *_: None)
assert all(float(m.activations[0, 0, 0]) == i for i, m in enumerate(found))
print(peak() - before)
"""
    if not Path("/proc/self/status").exists():
        pytest.skip("no /proc here")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT)
    assert float(done.stdout) < 80


def test_what_is_read_lies_where_pytorch_would_put_it(tmp_path: Path) -> None:
    """Matrix products at an odd address may round differently, and a deployment would differ from its simulation."""
    write_exchange(Exchange.of([Feedback(torch.rand(3, 5, 7)) for _ in range(4)], Store()), tmp_path / "x")
    found = read_exchange(tmp_path / "x", Feedback, Store())
    assert [message.gradient.data_ptr() % 64 for message in found] == [0] * 4


def test_one_message_is_read_whole(tmp_path: Path) -> None:
    """However much of it is not packed, but never of another kind or number."""
    sent = Parameters({"a.weight": torch.rand(5, 4), "b": torch.tensor(2.0)}, {"c": torch.ones(2, dtype=torch.bool)})
    write_message(sent, tmp_path / "x")
    found = read_message(tmp_path / "x", Parameters)
    assert found.tensors().keys() == sent.tensors().keys()
    assert all(torch.equal(found.tensors()[name], t) for name, t in sent.tensors().items())
    with pytest.raises(ValueError, match="Feedback messages were expected, not 'Parameters'"):
        read_message(tmp_path / "x", Feedback)
    write_exchange(Exchange.of([sent, sent], Store()), tmp_path / "x")
    with pytest.raises(ValueError, match="2 messages, at most 1"):
        read_message(tmp_path / "x", Parameters)
