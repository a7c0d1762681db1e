"""What one client does is its own failure: nobody else's, and not the run's."""

import threading
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from flwr.app import Message
from flwr.supercore.run import RunNotRunningException
from torch import nn

from hf_coefsfl.federation.simulation import Simulation
from hf_coefsfl.flower.checks import UploadCheck
from hf_coefsfl.flower.link import FlowerLink, Turn
from hf_coefsfl.flower.transport import Courier, Deadline, Unanswered
from hf_coefsfl.flower.wire import TransferError, content, header_of
from hf_coefsfl.protocol.messages import SmashedData
from hf_coefsfl.protocol.packing import Exchange, Store
from hf_coefsfl.protocol.wire import read_exchange, write_exchange
from hf_coefsfl.split.surgery import Cut
from tests.support.deployed import LONG, LocalGrid, Site
from tests.support.federated import same, weights
from tests.support.forged import forged
from tests.support.toy import CLASSIFICATION

RAISED = [SystemExit(1), KeyboardInterrupt(), MemoryError("no memory is left"), RecursionError("too deep")]


def test_whatever_a_clients_thread_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The round goes on without four clients; a fifth boasts of its samples and is not taken on."""
    site = Site(tmp_path, sizes=(4, *[3] * 5))
    with monkeypatch.context() as patch:
        patch.setattr(Simulation, "_is_dropped", lambda self, round_index, client: client > 0)
        expected = weights(site.simulated(num_rounds=1))
    fetch = FlowerLink.fetch

    def raising(self: FlowerLink, batches: Any) -> Any:
        if self.context.client > 0:
            raise RAISED[self.context.client - 1]
        return fetch(self, batches)

    def fault(node: int, message: Message, reply: Message) -> Message:
        if node == 105 and message.metadata.message_type == "query.hello":
            return forged(message, reply, content(header_of(reply.content) | {"num_samples": 10**6 + 1}))
        return reply

    monkeypatch.setattr(FlowerLink, "fetch", raising)
    trainer, _ = site.deployed(fault, num_rounds=1)
    assert same(weights(trainer), expected)
    failures = {e["client"]: e["failure"] for e in trainer.ledger.entries if "failure" in e}
    assert set(failures) == {"1", "2", "3", "4"}
    assert all(failures[str(i)].startswith(type(e).__name__) for i, e in enumerate(RAISED, start=1))
    assert "it says it has 1000001 samples, max_samples=1000000 are allowed" in caplog.text


class FailingGrid(LocalGrid):
    """A grid whose replies cannot be pulled; `down` if nothing else works either."""

    def __init__(self, error: BaseException, down: bool = True):
        super().__init__({}, [])
        self.error, self.down = error, down

    def get_nodes(self) -> list[Any]:
        if self.down:
            raise self.error
        return []

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        return ["m"]

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        raise self.error


def status(code: int) -> httpx.HTTPStatusError:
    return httpx.HTTPStatusError("refused", request=httpx.Request("POST", "http://x"), response=httpx.Response(code))


@pytest.mark.parametrize(
    ("grid", "ends"),
    [
        (FailingGrid(httpx.ConnectError("refused")), True),
        (FailingGrid(ConnectionResetError()), True),
        (FailingGrid(RunNotRunningException()), True),  # a BaseException
        (FailingGrid(status(500)), True),
        (FailingGrid(status(500), down=False), False),
        (FailingGrid(ValueError("Invalid protobuf response payload")), False),
        (FailingGrid(SystemExit()), False),
    ],
    ids=lambda value: repr(value.error) if isinstance(value, FailingGrid) else "",
)
def test_only_errors_of_the_transport_are_flowers_own(grid: FailingGrid, ends: bool) -> None:
    courier = Courier(grid)
    told = "no error"
    try:
        courier.ask(1, "query.hello", {}, None, Deadline(LONG))
    except Exception as error:  # at once, and an Exception
        told = f"{type(error).__name__}: {error}"
    assert type(grid.error).__name__ in told
    assert courier.broken is (grid.error if ends else None)


def started(turn: Turn, client: int, deadline: Deadline, batches: int, order: list[int]) -> threading.Thread:
    """Have a client compute for some batches of a moment, each of which adds 1 to its weights."""

    def compute() -> None:
        with turn.taken(client, torch.full((3,), 100.0 * client), deadline):
            for batch in range(batches):
                turn.share(client, deadline)
                assert turn.parameters[0].tolist() == [100 * client + batch] * 3
                with torch.no_grad():
                    turn.parameters[0].add_(1)
                time.sleep(0.01)
        order.append(client)

    thread = threading.Thread(target=compute, daemon=True)
    thread.start()
    return thread


def test_a_client_with_many_batches_starves_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """It computes for a while and lets the others do their few batches, each with its own weights."""
    monkeypatch.setattr("hf_coefsfl.flower.link._SLICE", 0.05)
    turn, order = Turn([nn.Parameter(torch.zeros(3))]), []  # type: tuple[Turn, list[int]]
    first = started(turn, 1, Deadline(LONG), 90, order)
    while 1 not in (turn._holder, *order):
        time.sleep(0.01)
    others = [started(turn, client, Deadline(LONG), 3, order) for client in (2, 3)]
    for thread in (first, *others):
        thread.join(LONG)
    assert sorted(order[:2]) == [2, 3] and order[2] == 1
    assert set(turn.seconds) == {1, 2, 3} and turn._holder is None


def test_deadlines_hold_between_batches_and_for_those_who_wait() -> None:
    turn, over = Turn([nn.Parameter(torch.zeros(1))]), Deadline(LONG)

    def take(client: int, deadline: Deadline) -> None:
        with turn.taken(client, torch.zeros(1), deadline):
            assert turn._holder == client
            if client == 1:
                with pytest.raises(Unanswered, match=r"no answer within 0\.1 s"):
                    take(2, Deadline(0.1))
                turn.share(1, deadline)
                deadline.end = 0.0
                turn.share(1, deadline)

    with pytest.raises(Unanswered, match="no answer within 1000 s"):
        take(1, over)
    take(3, Deadline(LONG))  # whoever failed has left the turn to others


@pytest.mark.parametrize("dtype", ["float16", "int8", "int4", "int3_stochastic", "topk8"])
def test_a_finite_scale_of_finite_values_that_overflow(dtype: str, tmp_path: Path) -> None:
    store, labels = Store(dtype), {"labels": torch.zeros(2, dtype=torch.int64)}
    smashed = SmashedData(torch.ones(2, 3, 4), labels=labels)
    check = UploadCheck(CLASSIFICATION, Cut("", 1, 2, ()), smashed, labels, (torch.float32,), 2, 3)
    sent = Exchange.of([smashed], store)
    check.exchange(sent, 1, 2)
    scale = sent.packed[0].tensors["activations"].scale
    assert scale is not None
    scale.fill_(3e38)
    with pytest.raises(TransferError, match="the activations of batch 0 hold NaN or infinity"):
        check.exchange(sent, 1, 2)
    packed = sent.packed[0].tensors
    packed["activations"] = replace(packed["activations"], scale=scale.double())
    write_exchange(sent, tmp_path / "sent")
    with pytest.raises(ValueError, match="comes with a scale of"):
        read_exchange(tmp_path / "sent", SmashedData, store)
