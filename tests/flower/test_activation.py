"""A SuperNode that the SuperLink does not let in yet tries again."""

from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from flwr.supercore.error import ApiErrorCode
from flwr.supernode import fleet_http_connection, start_client_internal
from flwr.supernode.fleet_http_client import FleetHttpClient

from hf_coefsfl.flower import activation


class Link:
    """Refuses some times, then lets the node in. Notes when it is left."""

    def __init__(self, refusals: int, code: int = ApiErrorCode.FLEET_NODE_ACTIVATION_FAILED):
        self.refusals, self.code, self.pauses = refusals, code, list[float]()
        self.left = list[int]()  # after how many pauses

    def leave(self, client: Any, request: Any) -> None:
        assert request.node_id == 5
        self.left.append(len(self.pauses))

    def __call__(self, client: Any, request: Any) -> Any:
        self.refusals -= 1
        if self.refusals < 0:
            return SimpleNamespace(node_id=5)
        body = {"code": int(self.code), "detail": "Failed to activate SuperNode."}
        asked = httpx.Request("POST", "http://link")
        raise httpx.HTTPStatusError("412", request=asked, response=httpx.Response(412, json=body, request=asked))


class Letters:
    """A SuperLink in which a message lies at the n-th look."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, at: int):
        self.looks, self.at, self.pauses = 0, at, list[float]()
        monkeypatch.setattr(FleetHttpClient, "PullMessages", self._look)
        monkeypatch.setattr(FleetHttpClient, "PushMessages", lambda client, request: None)
        monkeypatch.setattr(activation.time, "sleep", self.pauses.append)

    def _look(self, request: Any) -> Any:
        self.looks += 1
        return SimpleNamespace(messages_list=["message"] if self.looks == self.at else [])


def activated(link: Link, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return what a node gets from a link; pauses are noted instead of made."""
    monkeypatch.setattr(FleetHttpClient, "ActivateNode", lambda self, request: link(self, request))
    monkeypatch.setattr(FleetHttpClient, "DeactivateNode", lambda self, request: link.leave(self, request))
    monkeypatch.setattr(activation.time, "sleep", link.pauses.append)
    client = fleet_http_connection.FleetHttpClient.from_server_address("127.0.0.1:1", True, None, [])
    return client.ActivateNode(None)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start the command, up to where Flower's own begins."""
    monkeypatch.setattr(fleet_http_connection, "FleetHttpClient", FleetHttpClient)
    monkeypatch.setattr(start_client_internal, "time", start_client_internal.time)
    monkeypatch.setattr(activation, "flower_supernode", lambda: None)
    monkeypatch.setattr("sys.argv", ["python"])
    activation.main()


def test_it_tries_until_it_is_let_in(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """With longer and longer pauses, a minute at most, and says each time what may be the matter."""
    monkeypatch.setattr(activation.logger, "propagate", True)
    link = Link(20)
    assert activated(link, monkeypatch).node_id == 5
    assert link.left == [20] and link.pauses.pop() == 3.0  # it stays away for a moment, see ActivateNode
    assert link.pauses[0] == 5.0 and link.pauses[-1] == 60.0 and link.pauses == sorted(link.pauses)
    assert len(link.pauses) == 20 and sum(link.pauses[:5]) < 70  # the former process counts for a minute
    assert caplog.text.count("Failed to activate SuperNode. Either the SuperLink still takes a former process") == 20


def test_who_is_let_in_at_once_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    link = Link(0)
    assert activated(link, monkeypatch).node_id == 5 and not link.left and not link.pauses


@pytest.mark.parametrize(("at", "pauses"), [(1, [0.5]), (2, [0.5, 1.0]), (3, [0.5, 1.0, 2.0]), (4, [0.5, 1.0, 2.0])])
def test_it_looks_again_soon_after_an_answer(monkeypatch: pytest.MonkeyPatch, at: int, pauses: list[float]) -> None:
    """Once the pauses are as long as Flower's, an empty look ends the call: the loop of Flower goes on."""
    letters = Letters(monkeypatch, at)
    client: Any = fleet_http_connection.FleetHttpClient.from_server_address("127.0.0.1:1", True, None, [])
    client.PushMessages(None)
    assert bool(client.PullMessages(None).messages_list) == (at < 4)
    assert (letters.pauses, letters.looks) == (pauses, min(at, 3))
    letters.at = 0
    if at == 4:
        assert not client.PullMessages(None).messages_list and letters.looks == 4 and letters.pauses == pauses


def test_it_looks_for_its_own_answer_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop of Flower looks for what the ClientApp answers, and for its parts, with short pauses."""
    answer, pauses, answers = SimpleNamespace(metadata=SimpleNamespace()), list[float](), list[Any]()
    monkeypatch.setattr(activation.time, "sleep", lambda seconds: (pauses.append(seconds), answers.append(answer)))
    state = SimpleNamespace(get_messages_legacy=lambda is_reply: answers)
    with pytest.raises(AttributeError):  # the answer is only a stub
        start_client_internal._push_messages(state, None, None, None)  # type: ignore[arg-type]
    assert pauses == [0.05]
    start_client_internal.time.sleep(3)  # between two looks at the SuperLink
    assert pauses == [0.05, 3]


def test_a_request_has_only_the_headers_that_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    client: Any = fleet_http_connection.FleetHttpClient.from_server_address("127.0.0.1:1", True, None, [])
    request = client._client.build_request("POST", "http://127.0.0.1:1/x", content=b"1", headers={"accept": "a"})
    assert set(request.headers) == {"host", "content-length", "accept", "user-agent"}


def test_other_errors_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    link = Link(1, ApiErrorCode.FLEET_INVALID_HEARTBEAT_INTERVAL)
    with pytest.raises(httpx.HTTPStatusError):
        activated(link, monkeypatch)
    assert not link.pauses
