"""What the messages of a server leave at a client: bounded, and apart for each round."""

from pathlib import Path
from typing import Any

import pytest
from flwr.app import Context, RecordDict

from hf_coefsfl.flower import client
from hf_coefsfl.flower.errors import Code
from hf_coefsfl.flower.wire import PROTOCOL, chunk_of, content, has_chunk
from tests.support.deployed import ask

CONTEXT = Context(1, 1, {"partition-id": 0}, RecordDict(), {})
HEADER: dict[str, Any] = {
    "protocol": PROTOCOL, "client": 0, "round": 0, "sequence": 0, "token": "a", "offset": 0, "chunk_size": 4,
    "max_payload": 2**50, "payload_size": 8, "payload_sha256": "x",
}  # fmt: skip


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_COEFSFL_WORK", str(tmp_path))
    return client.work_folder(CONTEXT)


def told(kind: str, chunk: bytes | None = None, **changes: Any) -> Any:
    """Return the code of a refusal, or the chunk of the answer, if any."""
    reply = ask(f"query.{kind}", content(HEADER | changes, chunk), CONTEXT)
    if reply.has_error():
        return reply.error.code
    return chunk_of(reply.content) if has_chunk(reply.content) else None


def test_a_client_has_limits_of_its_own(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever the server says that a payload and a chunk may have."""
    assert told("deliver", b"1234") is None
    assert told("deliver", b"1", payload_size=2**49) == Code.PROTOCOL.value[0]
    assert "a payload of 562949953421312 bytes is announced" in caplog.text
    monkeypatch.setattr(client, "_LARGEST_CHUNK", 3)
    assert told("deliver", b"1234") == Code.PROTOCOL.value[0]
    (own,) = folder.iterdir()
    (own / "outbox").write_bytes(b"123456")
    (own / "outbox.sha256").write_text("x")
    assert told("fetch", chunk_size=-1) == told("fetch", chunk_size=0) == Code.PROTOCOL.value[0]
    assert told("fetch", chunk_size=2**40) == b"123"


def test_a_disk_is_not_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    class Disk:
        free = 15

    monkeypatch.setattr(client.shutil, "disk_usage", lambda _: Disk)
    assert told("deliver", b"1234") == Code.PROTOCOL.value[0]
    assert told("deliver", b"1234", payload_size=7) is None


def test_each_round_has_a_folder(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The next round leaves nothing of the last; what is still under way there does not reach the new one."""
    assert told("deliver", b"1234") is None
    (first,) = folder.iterdir()
    assert told("deliver", b"5678", token="b") is None
    (second,) = folder.iterdir()
    assert second != first and (second / "inbox").read_bytes() == b"5678"
    for kind, late in (("deliver", {"offset": 4}), ("fetch", {}), ("deliver", {"sequence": 1})):
        assert told(kind, b"1234", **late) == Code.PROTOCOL.value[0]
    assert caplog.text.count("TransferError: there is no such round here") == 3
    assert (second / "inbox").read_bytes() == b"5678" and list(folder.iterdir()) == [second]
