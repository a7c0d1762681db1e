"""Which node is which client: who keeps a number, who loses it, and who is asked again."""

import logging
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
from flwr.app import RecordDict

from hf_coefsfl import __version__
from hf_coefsfl.flower import roster as module
from hf_coefsfl.flower.deployment import Deployment
from hf_coefsfl.flower.options import DeploymentOptions
from hf_coefsfl.flower.roster import Roster
from hf_coefsfl.flower.server import DeployedTrainer
from hf_coefsfl.flower.wire import content
from tests.support.deployed import LONG


class Nodes:
    """A courier to nodes that say at once who they are; None never answers, an exception is raised."""

    def __init__(self) -> None:
        self.says: dict[int, Any] = {}
        self.registered: dict[int, str] = {}
        self.asked: list[int] = []
        self.ended = threading.Event()

    def come(self, node: int, client: int, key: str = "", **changes: Any) -> None:
        header = {"client": client, "name": str(client), "num_samples": 5, "version": __version__, "half": "h"}
        self.says[node], self.registered[node] = header | changes, key

    def leave(self, node: int) -> None:
        del self.says[node]

    def nodes(self) -> dict[int, str]:
        return {node: self.registered[node] for node in self.says}

    def ask(self, node: int, *_: Any) -> RecordDict:
        self.asked.append(node)
        says = self.says[node]
        if says is None:
            self.ended.wait(LONG)
        if isinstance(says, BaseException):
            raise says
        return content(says)


@pytest.fixture
def nodes() -> Any:
    made = Nodes()
    yield made
    made.ended.set()


def roster_of(nodes: Any, num_clients: int = 3) -> Roster:
    return Roster(nodes, "h", num_clients, 10**6)


def looked(roster: Roster) -> dict[int, int]:
    """Look until all who were asked have answered; return the node of each client."""
    for _ in range(3):  # ask, take on, and ask once more those who lost their number
        roster.refresh()
        end = time.monotonic() + LONG
        while len(roster._answers) < len(roster._asked) and time.monotonic() < end:
            time.sleep(0.001)
    return {client: member.node for client, member in sorted(roster.members.items())}


def test_a_restarted_node_gets_its_number_back_once_the_old_one_is_gone(nodes: Nodes) -> None:
    """Flower counts a node that was killed as online for a minute; the new one has said who it is by then."""
    roster = roster_of(nodes)
    nodes.come(10, 0)
    nodes.come(11, 1)
    assert looked(roster) == {0: 10, 1: 11}
    nodes.come(12, 1, num_samples=6)
    assert looked(roster) == {0: 10, 1: 11}
    nodes.leave(11)
    assert looked(roster) == {0: 10, 1: 12} and roster.sizes == [5, 6, 0]
    assert nodes.asked.count(12) == 1


def test_who_fails_in_a_round_loses_its_number_to_the_next(nodes: Nodes, caplog: pytest.LogCaptureFixture) -> None:
    """And gets it back in the same way: nobody blocks a number for good, and nobody is thrown out without a reason."""
    caplog.set_level(logging.INFO)
    roster = roster_of(nodes)
    nodes.come(10, 0)
    assert looked(roster) == {0: 10}
    nodes.come(11, 0)
    for _ in range(3):
        roster.note({0: True})
        assert looked(roster) == {0: 10}
    assert caplog.text.count("Node 11 is not taken on for now: it says it is client 0, which is node 10.") == 1
    roster.note({0: False})
    assert looked(roster) == {0: 11}
    assert "Client 0 is node 11 from now on. It was node 10." in caplog.text
    roster.note({0: True})
    assert looked(roster) == {0: 11}
    roster.note({0: False})
    assert looked(roster) == {0: 10}


def test_a_node_that_fails_alone_stays_and_is_asked_again(nodes: Nodes) -> None:
    """With authentication a node has the same id after a restart, and may have more data then, or another number."""
    roster = roster_of(nodes)
    nodes.come(10, 0)
    assert looked(roster) == {0: 10}
    nodes.come(10, 0, num_samples=9)
    assert looked(roster) == {0: 10} and roster.sizes[0] == 5
    roster.note({0: False})
    assert looked(roster) == {0: 10} and roster.sizes[0] == 9
    nodes.come(10, 2)
    roster.note({0: False})
    assert looked(roster) == {2: 10}


def test_a_registered_key_has_its_number(nodes: Nodes, caplog: pytest.LogCaptureFixture) -> None:
    """Nobody else keeps it, a squatter that came first gives it up, and the key is no other client."""
    roster = roster_of(nodes)
    nodes.come(10, 1)  # in time for client 1, whose key it does not have
    assert looked(roster) == {1: 10}
    nodes.come(11, 1, key="1")
    assert looked(roster) == {1: 11}
    nodes.come(12, 0, key="2")
    assert looked(roster) == {1: 11}
    assert "Node 12 is not taken on: it says it is client 0, its key is registered as client 2." in caplog.text
    roster.note({1: False})
    nodes.leave(11)
    assert looked(roster) == {1: 11} and roster.online() == []  # node 10 still waits
    nodes.come(11, 1, key="1")
    assert looked(roster) == {1: 11} and roster.online() == [1]


def test_a_key_registered_with_a_word_is_like_any_other(nodes: Nodes) -> None:
    roster = roster_of(nodes)
    nodes.come(10, 1, key="Bern")
    nodes.come(11, 2, key="²")
    assert looked(roster) == {1: 10, 2: 11}


def test_a_name_keeps_nobody_out(nodes: Nodes, caplog: pytest.LogCaptureFixture) -> None:
    """Who takes another's name or number for its name does not keep that client out."""
    roster = roster_of(nodes)
    nodes.come(10, 0, name="Bern")
    nodes.come(12, 2, name="1")
    assert looked(roster) == {0: 10}
    assert "Node 12 is not taken on: it says it is called '1', which another client is." in caplog.text
    nodes.come(11, 1, name="Bern")
    assert looked(roster) == {0: 10, 1: 11}
    assert [roster.name(c) for c in range(2)] == ["Bern", "1"]
    nodes.come(13, 2, name="117")  # there is no such client
    assert looked(roster)[2] == 13 and roster.name(2) == "117"
    assert "Client 1 says it is called 'Bern', which another client is: it keeps its number." in caplog.text


@pytest.mark.parametrize("odd", [{"half": "x"}, {"name": ""}, {"version": "0"}, {"num_samples": 0}])
def test_every_refusal_is_thought_over(nodes: Nodes, odd: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A node with a registered key keeps its id: what was refused may have been mended. It is not asked at once."""
    monkeypatch.setattr(module, "_AGAIN", LONG)
    roster = roster_of(nodes)
    nodes.come(10, 0, **odd)
    assert looked(roster) == {} and nodes.asked == [10]
    nodes.come(10, 0)
    assert looked(roster) == {} and nodes.asked == [10]
    roster._refused[10] = 0.0  # the pause is over
    assert looked(roster) == {0: 10}


def test_silent_nodes_hold_up_one_round_for_a_moment(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds wait for the first answer of a new node, for one pause in all; whatever is raised is an answer."""
    monkeypatch.setattr(module, "_GRACE", 1.0)
    roster = roster_of(nodes)
    nodes.come(10, 0)
    nodes.come(11, 1)
    nodes.says[11] = KeyboardInterrupt("a panic")
    nodes.come(12, 2)
    nodes.says[12] = None
    refresh = roster.refresh

    def crowded() -> None:  # a new node at every look
        node = 100 + len(nodes.says)
        nodes.come(node, 2)
        nodes.says[node] = None
        refresh()

    monkeypatch.setattr(roster, "refresh", crowded)
    assert roster.wait_for(1, LONG)
    assert roster.online() == [0] and 11 in roster._refused and 12 in roster._asked


def test_a_later_node_that_is_silent_costs_a_moment(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless a client has just failed for the first time, and may be the one that comes."""
    monkeypatch.setattr(module, "_GRACE", LONG)
    monkeypatch.setattr(module, "_LATER", 0.1)
    roster = roster_of(nodes)
    nodes.come(10, 0)
    assert roster.wait_for(1, LONG)
    roster.close()
    nodes.come(11, 1)
    nodes.says[11] = None
    assert roster.wait_for(1, LONG) and 11 in roster._asked
    roster.note({0: False})
    nodes.come(12, 2)
    nodes.says[12] = None
    start = time.monotonic()
    assert roster.wait_for(1, 0.5) and time.monotonic() - start >= 0.5


def test_who_fails_again_and_again_is_left_out(nodes: Nodes) -> None:
    """For 1, 3, 7 ... rounds after the second failure in a row, as long as enough others are there."""
    roster = roster_of(nodes)
    for client in range(3):
        nodes.come(10 + client, client)
    looked(roster)
    asked = list[int]()
    for index in range(200):
        if 1 in roster.ready(2):
            asked.append(index)
        roster.note({client: client != 1 for client in roster.ready(2)})
        roster.refresh()
    assert asked == [0, 1, 3, 7, 15, 31, 63, 127, 191]
    assert roster.ready(3) == [0, 1, 2]
    args = SimpleNamespace(seed=0, participation=1.0)
    deployed = SimpleNamespace(
        roster=roster, args=args, options=SimpleNamespace(over_sampling=0.0), least_clients=lambda: 2
    )
    assert all(Deployment.sample(deployed, index) == (3, [0, 2]) for index in range(9))  # type: ignore[arg-type]
    roster.note({1: True})
    assert roster.ready(2) == [0, 1, 2]


def test_a_registered_key_does_not_pay_for_a_squatter(nodes: Nodes) -> None:
    roster = roster_of(nodes)
    nodes.come(10, 0)
    nodes.come(11, 1)
    looked(roster)
    for _ in range(3):
        roster.note({1: False})
    assert roster.ready(1) == [0]
    nodes.come(12, 1, key="1")
    assert looked(roster) == {0: 10, 1: 12} and roster.ready(1) == [0, 1]


def test_a_huge_number_does_not_make_many_clients(nodes: Nodes, caplog: pytest.LogCaptureFixture) -> None:
    """Without num_clients a run has as many clients as came."""
    roster = Roster(nodes, "h", None, 10**6)
    for node, client in ((10, 0), (11, 999_999), (12, 1)):
        nodes.come(node, client)
    looked(roster)
    roster.close()
    assert len(roster) == 3 and roster.sizes == [5, 5, 0] and looked(roster) == {0: 10, 1: 12}
    assert "Node 11 is not taken on: it says it is client 999999, the run has 3, numbered from 0." in caplog.text


def test_a_gap_in_the_numbers_is_told(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_coefsfl.flower.server.fingerprint", lambda half: "h")
    nodes.come(10, 0)
    nodes.come(11, 2)
    trainer: Any = SimpleNamespace(split=SimpleNamespace(client=None), args=SimpleNamespace(num_clients=None))
    with pytest.raises(ValueError, match=r"2 clients came, and only 1 of them .* set num_clients"):
        DeployedTrainer.connect(trainer, nodes, DeploymentOptions())  # type: ignore[arg-type]


def test_nothing_is_kept_of_those_who_are_gone(nodes: Nodes) -> None:
    """And of those who wait for a number, what they introduced themselves with and nothing else."""
    roster = roster_of(nodes)
    nodes.come(10, 0)
    looked(roster)
    nodes.come(11, 0, more="x" * 1000)
    nodes.come(12, 7)
    looked(roster)
    assert roster._reasons.keys() == {11, 12} and "more" not in roster._claims[11]
    nodes.leave(11)
    nodes.leave(12)
    looked(roster)
    assert not roster._reasons and not roster._claims and roster._met == {10}
