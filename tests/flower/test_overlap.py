"""The server computes with the first batches of an upload while later chunks of it are on their way."""

import itertools
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Message

from hf_coefsfl.federation.simulation import Simulation
from hf_coefsfl.flower.server import serve
from hf_coefsfl.flower.transport import Courier, Deadline
from hf_coefsfl.flower.wire import header_of
from tests.support.chunked import FIRST, Fault, Held, grid_of, place
from tests.support.deployed import LONG, Site
from tests.support.federated import same, weights
from tests.support.selection import slow_except

CHUNK = 700  # bytes: the values of a batch have 256 to 768, the header of an upload a thousand and more


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    """Threads that ask for chunks end with their round."""
    yield
    for thread in threading.enumerate():
        if "_fill" in thread.name:
            thread.join(LONG)
            assert not thread.is_alive()


def nan_at_the_end(data: bytearray) -> None:
    """Spoil the last batch of an upload in float32."""
    values = place(data, "2.activations")
    data[values] = np.full((values.stop - values.start) // 4, np.nan, np.float32).tobytes()


def last(data: bytes, start: int, chunk: bytes) -> bool:
    return start + len(chunk) == len(data)


FAULTS = {
    "checksum": Fault(
        "TransferError: the checksum of a payload is wrong",
        chunk=lambda data, start, c: bytes([c[0] ^ 1]) + c[1:] if last(data, start, c) else c,
    ),
    "from another place": Fault(
        "TransferError: the checksum of a payload is wrong|NaN or infinity",
        chunk=lambda data, start, c: data[start - len(c) : start] if last(data, start, c) else c,
    ),
    "too many": Fault(
        "bytes came|bytes that were asked for", chunk=lambda data, start, c: c + b"x" * last(data, start, c)
    ),
    "too few": Fault(
        "TransferError: nothing came for byte", chunk=lambda data, start, c: c[:-1] if last(data, start, c) else c
    ),
    "nan": Fault("TransferError: the activations of batch 2 hold NaN or infinity", data=nan_at_the_end),
}


@pytest.mark.parametrize(
    ("method", "codec"),
    slow_except(
        ("coef_w", "float32"),
        ("gas", "int4"),
        of=itertools.product(["reuse", "coef_d", "coef_w", "coef_j", "gas"], ["float32", "int4"]),
    ),
)
def test_uploads_in_chunks_change_nothing(site: Site, method: str, codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server computes with batch 0 before anything behind it has come, and ends with the same bits and bytes."""
    options: dict[str, Any] = {"method": method, "exchange_codec": codec, "num_rounds": 1}
    simulated = site.simulated(**options)
    held = Held(monkeypatch, 2)
    deployed, _ = site.deployed(held, chunk_size=CHUNK if codec == "float32" else 120, **options)
    assert held.held >= 2
    assert same(weights(simulated), weights(deployed))
    assert simulated.ledger.entries == deployed.ledger.entries


def test_who_fails_in_the_middle_spoils_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server has computed with batch 0 of each upload when it goes wrong."""
    site = Site(tmp_path, sizes=(4, 5, *[6] * len(FAULTS)))
    with monkeypatch.context() as patch:
        patch.setattr(Simulation, "_is_dropped", lambda self, round_index, client: client > 1)
        expected = weights(site.simulated(num_rounds=1))
    held = Held(monkeypatch, len(site.sizes))
    nodes = range(FIRST + 2, FIRST + len(site.sizes))
    faults = dict(zip(nodes, FAULTS.values(), strict=True))
    trainer = serve(*grid_of(site, faults, held, chunk_size=CHUNK, num_rounds=1))
    assert all(event.is_set() for event in held.began)
    assert same(weights(trainer), expected)
    failures = {int(e["client"]): e["failure"] for e in trainer.ledger.entries if "failure" in e}
    assert len(failures) == len(FAULTS)
    for client, (what, fault) in enumerate(FAULTS.items(), start=2):
        assert any(part in failures[client] for part in fault.reason.split("|")), (what, failures[client])
    assert not (Path(str(trainer.args.output_dir)) / ".exchange").exists()


@pytest.mark.parametrize("end", ["timeout", "not needed"])
def test_others_compute_while_a_client_stops(end: str, site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """It sends a few chunks and no more. The others' rounds end meanwhile; then its time is up, or it is not needed."""
    deadlines: list[Deadline] = []
    ask = Courier.ask

    def noted(self: Courier, node: int, kind: str, header: Any, chunk: Any, deadline: Deadline) -> Any:
        if kind == "query.fetch" and node == FIRST + 1:
            deadlines.append(deadline)
        return ask(self, node, kind, header, chunk, deadline)

    def over(node: int, message: Message, reply: Message) -> Message:
        held(node, message, reply)
        header = header_of(message.content)
        if end == "timeout" and node == FIRST and header.get("sequence") == 1:
            assert held.began[1].wait(LONG)
            deadlines[0].end = 0.0
        return reply

    with monkeypatch.context() as patch:
        patch.setattr(Simulation, "_is_dropped", lambda self, round_index, client: client == 1)
        expected = weights(site.simulated(num_rounds=1))
    monkeypatch.setattr(Courier, "ask", noted)
    held = Held(monkeypatch, 2)
    stops = Fault("", chunk=lambda data, start, chunk: None if last(data, start, chunk) else chunk)
    # One client is needed. Both are asked.
    needs: dict[str, Any] = {"participation": 0.5, "over_sampling": 1.0} if end == "not needed" else {}
    trainer = serve(*grid_of(site, {FIRST + 1: stops}, over, chunk_size=CHUNK, num_rounds=1, **needs))
    assert same(weights(trainer), expected)
    failures = [e.get("failure") for e in trainer.ledger.entries]
    assert failures == ([None] if needs else [None, "Unanswered: no answer within 1000 s"])


def test_an_upload_in_chunks_takes_no_more_messages(site: Site) -> None:
    _, grid = site.deployed(chunk_size=CHUNK, num_rounds=1)
    steps = [m for m in grid.received if "payload_size" in header_of(m.content)]
    expected = sum(-(-header_of(m.content)["payload_size"] // CHUNK) - 1 for m in steps)
    assert sum(m.metadata.message_type == "query.fetch" for m in grid.sent) == expected
