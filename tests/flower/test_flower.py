"""The deployment: the same results as in a simulation, whatever the network and its clients do."""

import hashlib
import json
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Error, Message
from safetensors.torch import load, load_file, save
from transformers import ViTImageProcessor

from hf_coefsfl import METHODS
from hf_coefsfl.federation.server import ServerRounds
from hf_coefsfl.federation.simulation import Simulation
from hf_coefsfl.flower.server import serve
from hf_coefsfl.flower.wire import chunk_of, content, header_of
from hf_coefsfl.protocol.server_side import ServerSide
from tests.support.deployed import ImageSite, LocalGrid, Site, client_process
from tests.support.federated import FEWER_PASSES, rounds, same, weights


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    return Site(tmp_path_factory.mktemp("two"))


@pytest.mark.parametrize("method", sorted(name for name in METHODS if METHODS[name].deployable))
def test_the_network_changes_nothing(site: Site, method: str) -> None:
    options: dict[str, Any] = {"method": method, "method_kwargs": json.dumps(FEWER_PASSES.get(method, {}))}
    if method not in ("acc_sfl", "coef_j", "gas", "vanilla"):  # the others keep nothing over rounds but the weights
        options["num_rounds"] = 1
    simulated = site.simulated(**options)
    deployed, _ = site.deployed(**options)
    assert same(weights(simulated), weights(deployed))
    assert simulated.ledger.entries == deployed.ledger.entries
    assert rounds(simulated) == rounds(deployed)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_small_chunks_and_other_dtypes(site: Site, dtype: str) -> None:
    """Payloads that take many messages arrive whole; the client computes with what the server has seen."""
    simulated = site.simulated(exchange_dtype=dtype, num_rounds=1)
    deployed, grid = site.deployed(exchange_dtype=dtype, num_rounds=1, chunk_size=1000)
    assert same(weights(simulated), weights(deployed)) and simulated.ledger.entries == deployed.ledger.entries
    kinds = [message.metadata.message_type for message in grid.sent]
    assert kinds.count("query.fetch") > 4 and kinds.count("query.deliver") > 4
    for message in (*grid.sent, *grid.received):
        if "payload" in message.content:
            assert len(chunk_of(message.content)) <= 1000


def test_once_per_round_methods_exchange_twice(site: Site) -> None:
    _, grid = site.deployed(num_rounds=1)
    steps = [header_of(m.content) for m in grid.sent if m.metadata.message_type == "train.step"]
    calls = [[call["do"] for call in json.loads(step["calls"])] for step in steps if step["client"] == 0]
    assert calls == [["upload"], ["update", "finish"]]


def test_vanilla_warns_and_sends_one_message_a_batch(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    _, grid = site.deployed(method="vanilla", num_rounds=1)
    assert "cost a message and a new process on the client for each batch" in caplog.text
    steps = [header_of(m.content) for m in grid.sent if m.metadata.message_type == "train.step"]
    calls = [[call["do"] for call in json.loads(step["calls"])] for step in steps if step["client"] == 0]
    assert calls == [["upload"], *[["update", "upload"]] * 3, ["update", "finish"]]


def test_clients_work_at_the_same_time_and_the_server_meanwhile(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both clients are at work at once, and the server trains before a client has sent its weights."""
    working: set[int] = set()
    together: list[int] = []
    order: list[str] = []

    def fault(node: int, message: Message, reply: Message) -> Message:
        if message.metadata.message_type == "train.step":
            working.add(node)
            time.sleep(1.0)
            together.append(len(working))
            working.remove(node)
            if header_of(message.content)["sequence"] == 1:
                order.append("client")
        return reply

    train_step = ServerSide.train_step

    def noted(self: ServerSide, *args: Any) -> Any:
        order.append("server")
        return train_step(self, *args)

    monkeypatch.setattr(ServerSide, "train_step", noted)
    site.deployed(fault, num_rounds=1)
    assert max(together) == 2
    assert order.count("client") == 2 and order.index("server") < order.index("client")


# ---- Who holds what ----


def live_tensors() -> set[str]:
    """Return checksums of all tensors that were in the process of the clients, and watch no longer."""
    from hf_coefsfl.flower import client_round

    client_round.ClientRound.run = client_round.PLAIN  # type: ignore[attr-defined]
    return client_round.SEEN  # type: ignore[attr-defined]


def watch() -> None:
    """Note every tensor that is there when a client has done a step."""
    import gc

    from hf_coefsfl.flower import client_round

    run = client_round.ClientRound.run
    client_round.SEEN = set()  # type: ignore[attr-defined]

    def watched(self: Any, *args: Any) -> Any:
        done = run(self, *args)
        for found in gc.get_objects():
            if issubclass(type(found), torch.Tensor) and found.device.type == "cpu" and found.numel() > 8:
                client_round.SEEN.add(checksum(found))  # type: ignore[attr-defined]
        return done

    client_round.ClientRound.run = watched  # type: ignore[method-assign]
    client_round.PLAIN = run  # type: ignore[attr-defined]


def checksum(t: torch.Tensor) -> str:
    data = t.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(f"{tuple(t.shape)}".encode() + data).hexdigest()


def test_a_client_never_holds_the_servers_weights(site: Site) -> None:
    """Neither in its folder nor in its memory; what it should hold is found the same way."""
    client_process().submit(watch).result()
    trainer, _ = site.deployed(num_rounds=1)
    seen = client_process().submit(live_tensors).result()
    server = {name: p for name, p in trainer.split.model.named_parameters() if name in trainer.split.owners.server}
    frozen = {name: p for name, p in trainer.split.model.named_parameters() if not p.requires_grad and p.numel() > 8}
    constant = {name for name, p in frozen.items() if len(set(p.flatten().tolist())) == 1}  # norms: ones and zeros
    on_client = {name for name in frozen if name in trainer.split.owners.client and name not in constant}
    assert len(on_client) > 5 and {name for name in on_client if checksum(frozen[name]) in seen} == on_client
    assert not {name for name in server if name not in constant and checksum(server[name]) in seen}
    files = load_file(site.folder / "half" / "client" / "model.safetensors")
    assert not {name for name in files if name in trainer.split.owners.server - trainer.split.owners.client}


def payloads(grid: LocalGrid) -> list[bytes]:
    """Return everything that crossed the network, as bytes."""
    found = []
    for message in (*grid.sent, *grid.received):
        found.append(json.dumps({k: str(v) for k, v in header_of(message.content).items()}).encode())
        if "payload" in message.content:
            found.append(chunk_of(message.content))
    return found


def test_no_raw_text_crosses(site: Site) -> None:
    """No token ids in any integer type, no words; labels do, as the loss needs them."""
    _, grid = site.deployed(num_rounds=1, method="vanilla")
    sent = payloads(grid)
    from tests.support.words import words_tokenizer

    tokenizer = words_tokenizer()
    checked = 0
    for client in range(2):
        for i in range(site.sizes[client]):
            text = site.row(client, i)["text"]
            if len(text.split()) < 3:
                continue
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            for dtype in (torch.int64, torch.int32, torch.int16, torch.uint8, torch.float32):
                data = torch.tensor(ids).to(dtype).numpy().tobytes()
                if len(data) >= 6:
                    assert not any(data in part for part in sent)
                    checked += 1
            assert not any(text.encode() in part for part in sent)
    assert checked > 10
    labels = [load(part)["0.labels.labels"] for part in sent if b"0.labels.labels" in part]
    assert labels, "labels were expected to cross"


def test_no_pixels_cross(tmp_path: Path) -> None:
    """No row of pixels, as they are stored or as the model gets them; the result is the simulation's here, too."""
    site = ImageSite(tmp_path, sizes=(4, 3))
    trainer, grid = site.deployed(num_rounds=1)
    assert same(weights(trainer), weights(site.simulated(num_rounds=1)))
    sent = payloads(grid)
    processor = ViTImageProcessor.from_pretrained(site.folder / "model")
    for client in range(2):
        for i in range(site.sizes[client]):
            image = site.row(client, i)["image"]
            values = processor(images=[image], return_tensors="pt")["pixel_values"][0]
            rows = [np.asarray(image)[0].tobytes(), *(values[channel, 0].numpy().tobytes() for channel in range(3))]
            assert not any(row in part for row in rows for part in sent)


# ---- Life goes wrong ----


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
            if name.endswith("activations") or name.startswith("adapters."):
                tensors[name] = tensors[name] * factor

    return change


def first(kind: Callable[[Any], Any]) -> Callable[[dict[str, Any]], None]:
    def change(tensors: dict[str, Any]) -> None:
        name = next(n for n in sorted(tensors) if n.endswith("activations") or n.startswith("adapters."))
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


FAULTS: dict[str, tuple[Callable[[Message, Message], Any], str]] = {
    "error": (lambda m, r: Message(Error(1, "the disk is full"), reply_to=m), "Unanswered: the disk is full"),
    "forged client": (lambda m, r: header_with(m, r, client=0), "the answer is for client=0 instead of"),
    "forged node": (from_elsewhere, "node 100 answered for node"),
    "another round": (lambda m, r: header_with(m, r, round=7), "the answer is for round=7 instead of 0"),
    "replayed": (lambda m, r: header_with(m, r, token="x"), "the answer is for token='x'"),
    "checksum": (lambda m, r: header_with(m, r, payload_sha256="0" * 64), "the checksum of a payload is wrong"),
    "too large": (lambda m, r: header_with(m, r, payload_size=2**50), "bytes is announced"),
    "samples": (lambda m, r: header_with(m, r, num_samples=10**9), "has 1000000000 samples now, it had 3"),
    "batches": (lambda m, r: header_with(m, r, num_batches=10**9), "has 1000000000 batches"),
    "seconds": (lambda m, r: header_with(m, r, seconds=float("nan")), "worked for nan seconds"),
    "no record": (lambda m, r: forged(m, r, content(header_of(r.content))), "has no chunk"),
    "nan": (lambda m, r: reply_with(m, r, scaled(float("nan"))), "NaN or infinity"),
    "infinity": (lambda m, r: reply_with(m, r, first(lambda t: t + float("inf"))), "NaN or infinity"),
    "shape": (lambda m, r: reply_with(m, r, first(lambda t: t[:1].clone())), "(1, "),
    "dtype": (lambda m, r: reply_with(m, r, first(lambda t: t.double())), "float64"),
    "labels of another type": (labels_or(lambda t: t.float()), "labels is torch.float32|seconds"),
    "labels of another shape": (labels_or(lambda t: t[:, None].clone()), "labels is torch.int64|seconds"),
    "labels beyond the classes": (labels_or(lambda t: t + 7), "outside 0..1|seconds"),
    "strange context": (added("0.context.output_attentions", torch.ones(1, 1)), "crosses this cut|weights hold"),
    "another mask": (added("0.context.attention_mask", torch.zeros(2, 5)), "0.activations has shape|only|weights hold"),
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


def test_a_late_answer_is_not_waited_for(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    """A client is gone in the middle of a round and comes back after its timeout: the next round takes it on again."""
    slow = [True]

    def fault(node: int, message: Message, reply: Message) -> Message:
        if node == 101 and header_of(message.content).get("sequence") == 1 and slow:
            slow.clear()
            time.sleep(25)
        return reply

    trainer, _ = site.deployed(fault, round_timeout=20.0)
    assert "Round 1, client 1: Unanswered: no answer within 20 s. It is left out of the average." in caplog.text
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
    adapters = {name.removeprefix("adapters."): t for name, t in initial.items()}
    assert same({n: p.detach() for n, p in deployed.client_parameters.items()}, adapters)
    assert "1 of 2 clients are left. The weights stay as they are." in caplog.text


def test_over_sampling_ends_without_the_slowest(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One of three is needed, three are asked: the round does not wait for a client that never answers."""
    caplog.set_level(logging.INFO)
    site = Site(tmp_path, sizes=(4, 5, 3))

    def fault(node: int, message: Message, reply: Message) -> Any:
        return None if node != 102 and message.metadata.message_type == "train.step" else reply

    start = time.monotonic()
    options = {"participation": 0.34, "over_sampling": 2.0, "num_rounds": 1, "round_timeout": 300.0}
    trainer, _ = site.deployed(fault, **options)
    assert time.monotonic() - start < 100
    assert [e["client"] for e in trainer.ledger.entries] == ["2"] and "failure" not in trainer.ledger.entries[0]
    assert "not needed, enough others have answered" in caplog.text


def test_who_is_not_taken_on(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    """A second node with the same number, a number beyond the run's, data that is not there, another model's half."""
    config = site.run_config(num_rounds=1)
    other = Site(site.folder / "other")
    other.make_half(cut=2)
    site.make_half()
    nodes = [site.node_config(0), site.node_config(1), site.node_config(1), site.node_config(1) | {"partition-id": 7}]
    nodes += [site.node_config(1) | {"dataset": str(site.folder / "nowhere")}, other.node_config(1)]
    nodes += [site.node_config(1) | {"name": "0"}]
    grid = LocalGrid(config, nodes)
    trainer = serve(grid, config)
    assert [e["client"] for e in trainer.ledger.entries] == ["0", "1"]
    assert {m.node for m in trainer.clients.members.values()} == {100, 101}  # type: ignore[union-attr]
    for node, reason in {
        102: "it says it is client 1, which is node 101",
        103: "it says it is client 7, the run has 2",
        104: "nowhere",
        105: "its half of the model is not this run's",
        106: "it says it is called '0', which another client is",
    }.items():
        assert any(f"Node {node} is not taken on" in line and reason in line for line in caplog.text.splitlines())


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
    """It dies in its second round; the next run takes the first from its checkpoint and ends with the same bits."""
    average, folder = ServerRounds.average, site.new_folder("deployed")

    def dying(self: ServerRounds, round_index: int, *args: Any) -> None:
        if round_index == 1:
            raise KeyboardInterrupt
        average(self, round_index, *args)

    with monkeypatch.context() as patch:
        patch.setattr(ServerRounds, "average", dying)
        with pytest.raises(KeyboardInterrupt):
            site.deployed(num_rounds=3, output_dir=folder)
    trainer, grid = site.deployed(num_rounds=3, output_dir=folder)
    done = {header_of(m.content)["round"] for m in grid.sent if m.metadata.message_type == "train.step"}
    assert done == {1, 2}
    assert same(weights(trainer), weights(site.simulated(num_rounds=3)))
    assert [e["round"] for e in trainer.ledger.entries] == [1, 1, 2, 2, 3, 3]


# ---- Options ----


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"task": "x"}, "task='x' is not known"),
        ({"min_clients": 0}, "min_clients=0 must be a whole number of at least 1"),
        ({"round_timeout": 0}, "round_timeout=0 must be a number of seconds above 0"),
        ({"over_sampling": -0.1}, "over_sampling=-0.1 must be a share of at least 0"),
        ({"chunk_size": "x"}, "chunk_size='x' is no size"),
        ({"method": "fsl_sage"}, "method='fsl_sage' cannot be deployed"),
        ({"method": "x"}, "Unknown method 'x'"),
        ({"staleness_probe": 1}, "staleness_probe=1 cannot be deployed: it needs both sides in one process"),
        ({"client_dropout_rate": 0.5}, "real clients drop out by themselves"),
        ({"hub_token": "hf_x"}, "would go to every client"),
        ({"strange": 1}, "unrecognized arguments: --strange"),
    ],
)
def test_bad_options_are_refused_before_anything_starts(site: Site, change: dict[str, Any], reason: str) -> None:
    config = site.run_config(**change)
    with pytest.raises(ValueError, match=reason):
        serve(LocalGrid(config, []), config)


def test_a_round_that_could_change_nothing(site: Site) -> None:
    with pytest.raises(ValueError, match="A round would ask 1 of 2 clients"):
        site.deployed(participation=0.5, min_clients=2)


def test_a_learning_rate_that_warms_up(site: Site) -> None:
    """It is 0 in the first round."""
    options = {"lr_scheduler_type": "linear", "warmup_steps": 1}
    deployed, _ = site.deployed(**options)
    assert same(weights(deployed), weights(site.simulated(**options)))
    assert not [e for e in deployed.ledger.entries if "failure" in e]


def test_flower_itself_fails(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """No client is blamed, nothing is averaged or saved, and the run can be started again."""
    pull, folder = LocalGrid.pull_messages, site.new_folder("deployed")

    def failing(self: LocalGrid, numbers: Any) -> Any:
        found = pull(self, numbers)
        if any(header_of(reply.content).get("round") == 1 for reply in found):
            raise ConnectionError("the SuperLink is gone")
        return found

    with monkeypatch.context() as patch:
        patch.setattr(LocalGrid, "pull_messages", failing)
        with pytest.raises(ConnectionError, match="the SuperLink is gone"):
            site.deployed(output_dir=folder)
    assert not (Path(folder) / "checkpoint-2").exists()
    trainer, _ = site.deployed(output_dir=folder)
    assert same(weights(trainer), weights(site.simulated()))


def test_nobody_comes(site: Site) -> None:
    config = site.run_config(start_timeout=1.0)
    with pytest.raises(ValueError, match="0 of at least 1 clients came within 1 s"):
        serve(LocalGrid(config, []), config)
