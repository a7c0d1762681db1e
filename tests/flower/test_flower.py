"""The deployment gives the results of a simulation."""

import json
import threading
from typing import Any

import pytest
from flwr.app import Message

from hf_coefsfl import METHODS
from hf_coefsfl.flower.wire import chunk_of, has_chunk, header_of
from hf_coefsfl.protocol.server_side import ServerSide
from tests.support.deployed import LONG, Site
from tests.support.federated import FEWER_PASSES, rounds, same, weights
from tests.support.packed import MIXED
from tests.support.selection import slow_except


@pytest.mark.parametrize(
    "method", slow_except("acc_sfl", "coef_j", "coef_w", of=[n for n in sorted(METHODS) if METHODS[n].deployable])
)
def test_the_network_changes_nothing(site: Site, method: str) -> None:
    check(site, {"method": method, "method_kwargs": json.dumps(FEWER_PASSES.get(method, {}))}, method)


def test_the_network_changes_nothing_if_the_server_answers_while_it_trains(site: Site) -> None:
    check(site, {"method": "coef_j", "method_kwargs": json.dumps({"feedback_at": "walk"}), "num_rounds": 1}, "coef_j")


def test_the_network_changes_nothing_if_the_servers_optimizer_is_kept(site: Site) -> None:
    options = {"method": "coef_p", "keep_server_optimizer": True, "warmup_rounds": 0, "num_rounds": 2}
    simulated = site.simulated(**options)
    deployed, _ = site.deployed(**options)
    assert same(weights(simulated), weights(deployed))
    states = [run.rounds.state_dict() for run in (simulated, deployed) if run.rounds is not None]
    assert same(*states) and states[0]


def check(site: Site, options: dict[str, Any], method: str) -> None:
    if method not in ("acc_sfl", "coef_j", "gas", "vanilla"):  # the others keep nothing over rounds but the weights
        options["num_rounds"] = 1
    simulated = site.simulated(**options)
    deployed, _ = site.deployed(**options)
    assert same(weights(simulated), weights(deployed))
    assert simulated.ledger.entries == deployed.ledger.entries
    assert rounds(simulated) == rounds(deployed)


@pytest.mark.parametrize(
    "options",
    [
        {"exchange_dtype": "int8", "num_rounds": 1},
        # Single batches, then a round.
        {"exchange_codec": json.dumps(MIXED), "method": "coef_j", "warmup_rounds": 1, "adapter_codec": "bfloat16"},
        {"adapter_codec": "int8", "method": "acc_sfl", "warmup_rounds": 1, "num_rounds": 3, "client_bound": 1.0},
    ],
    ids=["int8", "mixed", "adapters"],
)
def test_small_chunks_and_other_dtypes(site: Site, options: dict[str, Any]) -> None:
    """Payloads that take many messages arrive whole; the client computes with what the server has seen."""
    simulated = site.simulated(**options)
    deployed, grid = site.deployed(chunk_size=1000, **options)
    assert same(weights(simulated), weights(deployed)) and simulated.ledger.entries == deployed.ledger.entries
    kinds = [message.metadata.message_type for message in grid.sent]
    assert kinds.count("query.fetch") > 4 and kinds.count("query.deliver") > 4
    for message in (*grid.sent, *grid.received):
        if has_chunk(message.content):
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
    both_at_work, server_trains = threading.Barrier(2), threading.Event()
    met: list[int] = []

    def fault(node: int, message: Message, reply: Message) -> Message:
        if message.metadata.message_type == "train.step":
            if header_of(message.content)["sequence"] == 0:
                both_at_work.wait(LONG)
            else:
                assert server_trains.wait(LONG)
            met.append(node)
        return reply

    train_again = ServerSide.train_again

    def noted(self: ServerSide, *args: Any) -> Any:
        server_trains.set()
        return train_again(self, *args)

    monkeypatch.setattr(ServerSide, "train_again", noted)  # what the default method does once it has answered
    site.deployed(fault, num_rounds=1)
    assert sorted(met) == [100, 100, 101, 101]
