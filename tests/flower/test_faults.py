"""A deployment goes on, whatever some of its clients do."""

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Error, Message
from safetensors.torch import load

from hf_coefsfl.federation.server import ServerRounds
from hf_coefsfl.federation.simulation import Simulation
from hf_coefsfl.flower.roster import Roster
from hf_coefsfl.flower.server import serve
from hf_coefsfl.flower.transport import Courier, Deadline
from hf_coefsfl.flower.wire import chunk_of, content, header_of
from tests.support.deployed import LONG, LocalGrid, Site
from tests.support.federated import same, weights
from tests.support.forged import (
    added,
    first,
    forged,
    from_elsewhere,
    header_with,
    labels_or,
    reply_with,
    scaled,
    with_bodies,
)

FAULTS: dict[str, tuple[Callable[[Message, Message], Any], str]] = {
    "error": (
        lambda m, r: Message(Error(1, "the disk is full"), reply_to=m),
        "Unanswered: the client's ClientApp cannot be loaded (error 1 of Flower)",
    ),
    "refused": (
        lambda m, r: Message(Error(102, "Ada Example"), reply_to=m),
        "Unanswered: E02: the client's policy refuses this run (its own log says why)",
    ),
    "forged client": (lambda m, r: header_with(m, r, client=0), "the answer is for client=0 instead of"),
    "forged node": (from_elsewhere, "node 100 answered for node"),
    "another round": (lambda m, r: header_with(m, r, round=7), "the answer is for round=7 instead of 0"),
    "replayed": (lambda m, r: header_with(m, r, token="x"), "the answer is for token='x'"),
    "checksum": (lambda m, r: header_with(m, r, payload_sha256="0" * 64), "the checksum of a payload is wrong"),
    "too large": (lambda m, r: header_with(m, r, payload_size=2**50), "bytes is announced"),
    "samples": (lambda m, r: header_with(m, r, num_samples=10**9), "has 1000000000 samples now, it had 3"),
    "batches": (lambda m, r: header_with(m, r, num_batches=3), "has 3 batches of 3 samples, at most 2"),
    "more than it needs": (lambda m, r: header_with(m, r, payload_size=2**25), "33554432 bytes is announced"),
    "seconds": (lambda m, r: header_with(m, r, seconds=float("nan")), "worked for nan seconds"),
    "ages": (lambda m, r: header_with(m, r, seconds=1e308), "worked for 1e+308 seconds"),
    "boasting": (added("0.observed.client_loss", torch.tensor([3e38, 3e38])), "beyond 1e+15|has no field 'observed'"),
    "undecodable": (lambda m, r: with_bodies(r, lambda kind, body: b"\xff" * 10), "DecodeError"),
    "no record": (lambda m, r: forged(m, r, content(header_of(r.content))), "has no chunk"),
    "nan": (lambda m, r: reply_with(m, r, scaled(float("nan"))), "NaN or infinity"),
    "infinity": (lambda m, r: reply_with(m, r, first(lambda t: t + float("inf"))), "NaN or infinity"),
    "shape": (lambda m, r: reply_with(m, r, first(lambda t: t[:1].clone())), "(1, "),
    "dtype": (lambda m, r: reply_with(m, r, first(lambda t: t.double())), "float64"),
    "labels of another type": (labels_or(lambda t: t.float()), "labels is torch.float32|seconds"),
    "labels of another shape": (labels_or(lambda t: t[:, None].clone()), "labels is torch.int64|seconds"),
    "labels beyond the classes": (labels_or(lambda t: t + 7), "outside 0..1|seconds"),
    "strange context": (
        added("0.context.output_attentions", torch.ones(1, 1)),
        "crosses this cut|has no field 'context'",
    ),
    "another mask": (added("0.context.attention_mask", torch.zeros(2, 5)), "0.activations has shape|only|has no field"),
    "missing": (lambda m, r: reply_with(m, r, lambda t: t.pop(sorted(t)[0])), "KeyError|tensors came instead of"),
}


@pytest.fixture(scope="module")
def crowd(tmp_path_factory: pytest.TempPathFactory) -> tuple[Site, dict[str, torch.Tensor]]:
    """Return the files of a run of two good clients and one for each fault, and the weights of the two alone."""
    site = Site(tmp_path_factory.mktemp("crowd"), sizes=(4, 5, *[3] * len(FAULTS)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Simulation, "_is_dropped", lambda self, round_index, client: client > 1)
        return site, weights(site.simulated(num_rounds=1))


@pytest.mark.parametrize("step", [0, 1])
def test_the_others_go_on(
    crowd: tuple[Site, dict[str, torch.Tensor]], step: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever some clients do at either step, the weights are those of the others, and the reasons are told."""
    site, expected = crowd
    faults = list(FAULTS.values())

    def fault(node: int, message: Message, reply: Message) -> Any:
        header = header_of(message.content)
        if node > 101 and header.get("sequence") == step and message.metadata.message_type == "train.step":
            return faults[node - 102][0](message, reply)
        return reply

    trainer, _ = site.deployed(fault, num_rounds=1)
    assert same(weights(trainer), expected)
    failures = {e["client"]: e["failure"] for e in trainer.ledger.entries if "failure" in e}
    assert len(failures) == len(FAULTS)
    for client, (what, (_, reason)) in enumerate(FAULTS.items(), start=2):
        assert any(part in failures[str(client)] for part in reason.split("|")), what
        assert f"Round 1, client {client}: {failures[str(client)]}. It is left out of the average." in caplog.text
    assert not (Path(str(trainer.args.output_dir)) / ".exchange").exists()


def test_a_late_answer_is_not_waited_for(
    site: Site, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client is gone in the middle of a round and comes back after its timeout: the next round takes it on again."""
    deadlines: list[Deadline] = []
    next_round = threading.Event()
    ask = Courier.ask

    def noted(self: Courier, node: int, kind: str, header: Any, chunk: Any, deadline: Deadline) -> Any:
        if node == 101 and header.get("sequence") == 1:
            deadlines.append(deadline)
        if header.get("round") == 1:
            next_round.set()
        return ask(self, node, kind, header, chunk, deadline)

    def fault(node: int, message: Message, reply: Message) -> Message:
        header = header_of(message.content)
        if node == 101 and header.get("sequence") == 1 and header["round"] == 0:
            deadlines[0].end = 0.0  # its time is up
            assert next_round.wait(LONG)
        return reply

    monkeypatch.setattr(Courier, "ask", noted)
    trainer, _ = site.deployed(fault)
    assert "Round 1, client 1: Unanswered: no answer within 1000 s. It is left out of the average." in caplog.text
    assert [e["round"] for e in trainer.ledger.entries if "failure" in e] == [1]
    assert [e["round"] for e in trainer.ledger.entries if e["client"] == "1"] == [1, 2]


def test_an_answer_that_comes_twice_counts_once(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    deployed, _ = site.deployed(lambda node, message, reply: [reply, reply], num_rounds=1)
    assert same(weights(deployed), weights(site.simulated(num_rounds=1)))
    assert "2 answers came to one message" in caplog.text


def test_too_few_clients_change_nothing(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    def fault(node: int, message: Message, reply: Message) -> Message:
        lost = node == 101 and message.metadata.message_type == "train.step"
        return Message(Error(1, "gone"), reply_to=message) if lost else reply

    deployed, grid = site.deployed(fault, num_rounds=1, min_clients=2)
    initial = load(chunk_of(next(m for m in grid.sent if m.metadata.message_type == "train.step").content))
    adapters = {name.removeprefix("0.adapters."): t for name, t in initial.items()}
    assert same({n: p.detach() for n, p in deployed.client_parameters.items()}, adapters)
    assert "1 of 2 clients are left. The weights stay as they are." in caplog.text


def test_over_sampling_ends_without_the_slowest(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One of three is needed, three are asked: the round does not wait for a client that never answers."""
    caplog.set_level(logging.INFO)
    site = Site(tmp_path, sizes=(4, 5, 3))

    def fault(node: int, message: Message, reply: Message) -> Any:
        return None if node != 102 and message.metadata.message_type == "train.step" else reply

    trainer, _ = site.deployed(fault, participation=0.34, over_sampling=2.0, num_rounds=1, round_timeout=1e6)
    assert [e["client"] for e in trainer.ledger.entries] == ["2"] and "failure" not in trainer.ledger.entries[0]
    assert "not needed, enough others have answered" in caplog.text


def test_who_is_not_taken_on(site: Site, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second node with the same number, a number beyond the run's, data that is not there or unfit, another half."""
    config = site.run_config(num_rounds=1)
    other = Site(site.folder / "other")
    other.make_half(cut=2)
    site.make_half()
    nodes = [site.node_config(0), site.node_config(1), site.node_config(1), site.node_config(1) | {"partition-id": 7}]
    nodes += [site.node_config(1) | {"dataset": str(site.folder / "nowhere")}, other.node_config(1)]
    nodes += [site.node_config(1) | {"name": "0"}]
    site.save([{"text": "the cat", "label": label} for label in ("0", "my secret")], site.folder / "odd/train.parquet")
    nodes += [site.node_config(1) | {"dataset": str(site.folder / "odd"), "name": "Bern"}]
    admit, here = Roster._admit, threading.Event()

    def noted(self: Roster, node: int, header: dict[str, Any]) -> None:
        admit(self, node, header)
        if len(self.members) == 2:
            here.set()

    def late(node: int, message: Message, reply: Message) -> Message:  # whoever comes first takes a number
        assert node < 102 or here.wait(LONG)
        return reply

    monkeypatch.setattr(Roster, "_admit", noted)
    trainer = serve(LocalGrid(config, nodes, late), config)
    assert [e["client"] for e in trainer.ledger.entries] == ["0", "1"]
    assert {m.node for m in trainer.clients.members.values()} == {100, 101}  # type: ignore[union-attr]
    for node, reason in {
        102: "it says it is client 1, which is node 101",
        103: "it says it is client 7, the run has 2",
        104: "E01: the client cannot use its data",
        105: "its half of the model is not this run's",
        106: "it says it is called '0', which another client is",
        107: "E01: the client cannot use its data",
    }.items():
        assert any(f"Node {node} is not taken on" in line and reason in line for line in caplog.text.splitlines())
    assert "my secret" not in caplog.text and "nowhere" not in caplog.text


def test_a_client_that_comes_back_is_known_again(site: Site) -> None:
    """Its node has another number then; as long as the old one is there, nobody can take its place."""
    site.make_half()
    config = site.run_config(num_rounds=2)
    grid = LocalGrid(config, [site.node_config(0), site.node_config(1), site.node_config(1)])
    grid.gone = {102}

    def fault(node: int, message: Message, reply: Message) -> Message:
        if node == 101 and header_of(message.content).get("sequence") == 1:
            grid.gone = {101}
        return reply

    grid.fault = fault
    trainer = serve(grid, config)
    assert same(weights(trainer), weights(site.simulated()))
    assert trainer.clients.members[1].node == 102  # type: ignore[union-attr]


def test_a_server_that_is_started_again_goes_on(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """It dies in its second round; the next run takes the first from its checkpoint and ends with the same bits.

    Clients have trained in that round, and go on with the residuals of the round before.
    """
    options: dict[str, Any] = {"num_rounds": 3, "adapter_codec": "int8"}
    average, folder = ServerRounds.average, site.new_folder("deployed")

    def dying(self: ServerRounds, round_index: int, *args: Any) -> list[int]:
        if round_index == 1:
            raise KeyboardInterrupt
        return average(self, round_index, *args)

    with monkeypatch.context() as patch:
        patch.setattr(ServerRounds, "average", dying)
        with pytest.raises(KeyboardInterrupt):
            site.deployed(**options, output_dir=folder)
    trainer, grid = site.deployed(**options, output_dir=folder)
    done = {header_of(m.content)["round"] for m in grid.sent if m.metadata.message_type == "train.step"}
    assert done == {1, 2}
    assert same(weights(trainer), weights(site.simulated(**options)))
    assert [e["round"] for e in trainer.ledger.entries] == [1, 1, 2, 2, 3, 3]
