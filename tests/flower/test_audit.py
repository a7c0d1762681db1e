"""The client's own list of what left it."""

import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Context, Message, RecordDict

from hf_coefsfl.flower.audit import AUDIT_LOG, note, sums_of
from hf_coefsfl.flower.errors import Code
from hf_coefsfl.flower.lasting import lasting_folder
from hf_coefsfl.flower.wire import PROTOCOL, content
from tests.support.deployed import Site, ask, client_process


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_message_has_a_line(site: Site) -> None:
    """Of a run whose payloads go in chunks: what the server got is what the clients noted, and nothing else."""
    _, grid = site.deployed(num_rounds=1, chunk_size=3000)
    got: dict[int, list[Message]] = {node: [] for node in grid.contexts}
    for reply in grid.received:
        got[reply.metadata.src_node_id].append(reply)
    for node, context in grid.contexts.items():
        folder = client_process().submit(lasting_folder, context.node_config).result()
        assert stat.S_IMODE((folder / AUDIT_LOG).stat().st_mode) == 0o600
        noted = [line for line in lines(folder / AUDIT_LOG) if line["run"] == context.run_id]
        assert len(noted) == len(got[node]) > 5
        kinds = {"query.hello": {None}, "train.step": {0}, "query.deliver": {0}, "query.fetch": {0}}
        for kind, rounds in kinds.items():
            assert {line["round"] for line in noted if line["kind"] == kind} == rounds
        sums = [sums_of(reply.content) for reply in got[node]]
        assert [(line["bytes"], line["sha256"]) for line in noted] == [(s["bytes"], s["sha256"]) for s in sums]


def test_a_message_that_cannot_be_noted_does_not_leave(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Only a fixed text goes; and where a client has no number, that is noted, too."""
    monkeypatch.setenv("HF_COEFSFL_WORK", str(tmp_path))
    site.make_half()

    def hello(**node: Any) -> Message:
        context = Context(1, 1, site.node_config(0) | node, RecordDict(), site.run_config())
        return ask("query.hello", content({"protocol": PROTOCOL}), context)

    assert not hello().has_error()
    path = lasting_folder(site.node_config(0)) / AUDIT_LOG
    path.unlink()
    path.mkdir()
    assert hello().error.code == Code.INTERNAL.value[0]
    assert "The audit log cannot be written" in caplog.text
    assert hello(**{"partition-id": "x"}).error.code == Code.SETUP.value[0]
    assert [
        line["error"] for line in lines(lasting_folder(site.node_config(0) | {"partition-id": "x"}) / AUDIT_LOG)
    ] == [Code.SETUP.value[0]]


def test_what_the_server_says_is_not_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The round is echoed: only a number is one."""
    monkeypatch.setenv("HF_COEFSFL_WORK", str(tmp_path))
    context = Context(1, 1, {"partition-id": 0}, RecordDict(), {})
    for said in ("line\n" * 9, True, 2.5, 3):
        asked = Message(content({"protocol": PROTOCOL}), 1, "query.fetch")
        asked.metadata.__dict__["_message_id"] = "1"
        note(Message(content({"round": said}), reply_to=asked), "query.fetch", context)
    (path,) = tmp_path.rglob(AUDIT_LOG)
    assert [line["round"] for line in lines(path)] == [None, None, None, 3]


def test_passing_on_a_chunk_loads_no_pytorch(tmp_path: Path) -> None:
    program = "import sys, hf_coefsfl.flower.client; assert 'torch' not in sys.modules"
    environment = os.environ | {"HF_COEFSFL_WORK": str(tmp_path)}
    subprocess.run([sys.executable, "-c", program], check=True, env=environment)
