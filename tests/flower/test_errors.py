"""What a server hears of a client that fails: a fixed text. Everything else stays in the client's log."""

import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from flwr.app import Context, Error, Message, RecordDict
from flwr.supercore.constant import TaskType
from flwr.supercore.superexec.executor.types import ExecutionSpec, LaunchResultStatus
from flwr.supernode.runtime import run_clientapp as runtime

from hf_coefsfl.flower.client_node import ClientNode
from hf_coefsfl.flower.errors import Code, told
from hf_coefsfl.flower.supernode import ForkExecutor, _run_own_code
from hf_coefsfl.flower.wire import PROTOCOL, content
from tests.support.deployed import Site, ask, identify
from tests.support.paths import ROOT

HELLO = {"protocol": PROTOCOL}
STEP = HELLO | {"client": 1, "round": 0, "sequence": 0, "token": "t", "max_payload": 9, "learning_rate": 0.1}


@pytest.fixture(autouse=True)
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_COEFSFL_WORK", str(tmp_path))


def failure(site: Site, kind: str, header: dict[str, Any], run: dict[str, Any], **node: Any) -> Error:
    site.make_half()
    context = Context(1, 1, site.node_config(0) | node, RecordDict(), site.run_config(**run))
    return ask(kind, content(header), context).error


@pytest.mark.parametrize(
    ("kind", "header", "node", "code", "logged"),
    [
        ("query.hello", HELLO, {"dataset": "/secret/nowhere"}, Code.DATA, "/secret/nowhere"),
        ("query.hello", HELLO, {"client-half": "/secret/half"}, Code.SETUP, "/secret/half"),
        ("query.hello", HELLO, {"partition-id": "ward 7"}, Code.SETUP, "partition-id='ward 7'"),
        ("query.hello", {"protocol": 999}, {}, Code.PROTOCOL, "the server speaks protocol 999"),
        ("train.step", STEP | {"calls": "[]"}, {}, Code.PROTOCOL, "this is client 0, the message is for client 1"),
        ("query.fetch", STEP | {"offset": 0, "chunk_size": 1, "payload_sha256": "x"}, {}, Code.PROTOCOL, "no such"),
    ],
)
def test_fixed_texts(
    site: Site,
    caplog: pytest.LogCaptureFixture,
    kind: str,
    header: dict[str, Any],
    node: dict[str, Any],
    code: Code,
    logged: str,
) -> None:
    error = failure(site, kind, header, {}, **node)
    assert (error.code, error.reason) == code.value
    assert logged in caplog.text


def test_names_and_rows_stay(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    """A label that the model does not know may be a patient's name; so may what an unforeseen error says."""
    rows = [{"text": "the cat", "label": name} for name in ("Ada Example", "Bob Example")]
    site.save(rows, site.folder / "patients/train.parquet")
    error = failure(site, "query.hello", HELLO, {}, dataset=str(site.folder / "patients"))
    assert (error.code, error.reason) == Code.DATA.value
    assert "The label 'Ada Example' (row 0)" in caplog.text


def test_whatever_is_raised(site: Site, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def introduce(self: ClientNode) -> Any:
        raise SystemExit("/home/ada/records.csv")

    monkeypatch.setattr(ClientNode, "introduce", introduce)
    error = failure(site, "query.hello", HELLO, {})
    assert (error.code, error.reason) == Code.INTERNAL.value
    assert "/home/ada/records.csv" in caplog.text


def test_a_node_runs_its_own_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the app of a run; and Flower's own errors, which quote paths and values, go without their words."""
    for name in ("get_load_client_app_fn", "Error"):
        monkeypatch.setattr(runtime, name, getattr(runtime, name))
    identify()
    sent: list[Any] = []
    brought = SimpleNamespace(fab_id="a/b", fab_version="1", run_id=1)
    fab = SimpleNamespace(content=b"", hash_str="0" * 64)
    message = Message(content({"protocol": 999}), 1, "query.hello")
    message.metadata.__dict__["_message_id"] = "1"
    context = Context(1, 1, {}, RecordDict(), {})
    monkeypatch.setattr(runtime, "pull_task_input", lambda client: (message, context, brought, fab))
    monkeypatch.setattr(runtime, "push_message", lambda client, reply, context: sent.append(reply.error))
    for name in ("flwr_exit", "register_signal_handlers", "HeartbeatSender", "install_from_fab", "event"):
        monkeypatch.setattr(runtime, name, lambda *_, **__: SimpleNamespace(start=lambda: None))
    _run_own_code()
    runtime.run_clientapp("127.0.0.1:1", "token", insecure=True)

    def broken(*_: Any, **__: Any) -> None:
        raise OSError("/home/ada/.flwr is full")

    monkeypatch.setattr(runtime, "install_from_fab", broken)
    runtime.run_clientapp("127.0.0.1:1", "token", insecure=True)
    assert [error.code for error in sent] == [Code.PROTOCOL.value[0], 2]
    assert sent[1].reason == "Flower failed at the client (error 2)"


def test_a_node_runs_nothing_but_its_client_app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A SuperLink may say that a run is an agent's, whose code comes with it."""
    started: list[Any] = []
    monkeypatch.setattr(subprocess, "Popen", lambda *given, **_: started.append(given))
    executor = ForkExecutor(tmp_path / "secret")
    assert executor.get_eligible_capacity({*TaskType}, insecure=True) == ({TaskType.CLIENT_APP}, set())
    for kind in {*TaskType} - {TaskType.CLIENT_APP}:
        spec = ExecutionSpec(kind, "127.0.0.1:1", "token", True, None, False, None, False, task_id=1)
        assert executor.launch(spec).status == LaunchResultStatus.FAILED
    assert not started


def test_what_the_server_says_of_it() -> None:
    """Words that come with a code are not repeated, Flower's or not; a code that is not known is told as such."""
    assert told(Error(101, "Ada Example")) == "E01: the client cannot use its data for this run (its own log says why)"
    assert told(Error(150, "Ada Example")) == "the client reports error 150, which this version does not know"
    assert told(Error(5, "Ada Example")) == "the client's node is gone (error 5 of Flower)"
    assert told(Error(0, "Ada Example")) == "the client reports error 0, which this version does not know"
    assert len({code.value[0] for code in Code}) == len({code.value[1][:4] for code in Code}) == len(Code)


def test_the_page_lists_the_codes() -> None:
    page = (ROOT / "docs" / "deployment.md").read_text()
    for _, words in (code.value for code in Code):
        assert "| {} | {} |".format(*words.split(": ", 1)) in page
