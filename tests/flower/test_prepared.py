"""A client that stays loaded: the fork of a message finds it, unless it is another one or has changed."""

import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from flwr.supercore.constant import TaskType
from flwr.supercore.superexec.executor import ExecutionSpec

from hf_coefsfl.flower import client_node, options, prepared, supernode


class Client:
    """Counts how often a client is loaded, over all processes, and what has been done with one."""

    log: Path

    def __init__(self, run_config: dict[str, Any], node_config: dict[str, Any]):
        if run_config.get("fails"):
            raise ValueError("no")
        self.messages = 0
        note(self.log, "loaded")

    def keep_noise(self) -> None:
        note(self.log, "kept")


def note(path: Path, word: str) -> None:
    with path.open("a") as file:
        print(word, file=file)


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """A SuperNode's executor whose messages say what they found."""
    log, data, configs = tmp_path / "log", tmp_path / "data", tmp_path / "configs"
    log.touch()
    data.mkdir()
    (data / "rows").write_text("1")
    device = SimpleNamespace(type="cpu")
    here = SimpleNamespace(run={"seed": 1}, node={"dataset": str(data)}, data=data, device=device, log=log)
    monkeypatch.setattr(Client, "log", log, raising=False)
    monkeypatch.setattr(client_node, "ClientNode", Client)
    config = SimpleNamespace(config=SimpleNamespace(device=device))
    monkeypatch.setattr(options, "read_client_config", lambda *_: config)
    for name in ("_held", "_loaded"):
        monkeypatch.setattr(prepared, name, None)

    def message() -> None:
        try:
            node: Any = prepared.node_of(1, *json.loads(configs.read_text()))  # as the message brings them
        except ValueError:
            note(log, "failed")
            raise
        node.messages += 1
        note(log, f"message {node.messages} of {os.getpid() != here.pid}")

    here.pid = os.getpid()
    monkeypatch.setattr(supernode, "flwr_clientapp", message)
    monkeypatch.setattr(supernode, "_run_own_code", lambda: None)
    executor = here.executor = supernode.ForkExecutor(tmp_path / "secret")
    spec = ExecutionSpec(TaskType.CLIENT_APP, "127.0.0.1:1", "token", True, None, False, None, False, task_id=1)

    def send() -> list[str]:
        """Have a message done; return what was noted of it."""
        before = len(log.read_text().splitlines())

        def noted() -> list[str]:
            return log.read_text().splitlines()[before:]

        configs.write_text(json.dumps([here.run, here.node]))
        executor.launch(spec)
        wait_for(lambda: any(line.startswith(("message", "failed")) for line in noted()))
        return noted()

    def is_over() -> bool:
        executor.reconcile()
        if executor._prepared is not None:  # a late message may have had another one prepared
            executor._prepared.end()
        return not executor._forks

    here.send = send
    yield here
    wait_for(is_over)


def settle(site: SimpleNamespace, after: Any = None) -> None:
    """Wait until forks have ended and the prepared process is ready, one that takes the place of `after`.

    The fork of a prepared process is not a fork of this one: that it has told of another client has to be waited for.
    """

    def is_settled() -> bool:
        site.executor.reconcile()
        prepared = site.executor._prepared
        return prepared is not after and site.executor._forks <= {prepared.pid} and prepared.is_ready

    wait_for(is_settled)


def test_a_client_is_loaded_once(site: SimpleNamespace) -> None:
    """The first message loads it; the next ones find it as it was loaded, not as another message left it."""
    assert site.send() == ["loaded", "message 1 of True"]
    settle(site)
    assert site.log.read_text().count("loaded") == 2  # in the message, and in the prepared process
    for _ in range(3):
        assert site.send() == ["kept", "message 1 of True"]
    settle(site)
    assert site.log.read_text().count("loaded") == 2


@pytest.mark.parametrize("change", ["data", "run", "node", "policy"])
def test_another_client_is_loaded(site: SimpleNamespace, tmp_path: Path, change: str) -> None:
    """Other rows, another run or another policy: the prepared client is not used, and another one takes its place."""
    site.send()
    settle(site)
    first = site.executor._prepared
    if change == "data":
        (site.data / "rows").write_text("1, 2")
    elif change == "run":
        site.run["seed"] = 2
    else:
        policy = tmp_path / "policy.yaml"
        policy.write_text("max_rounds: 5")
        site.node["policy"] = str(policy)
        if change == "policy":
            site.send()
            settle(site, after=first)
            first = site.executor._prepared
            policy.write_text("max_rounds: 6")
    assert site.send() == ["loaded", "message 1 of True"]
    settle(site, after=first)
    assert site.send() == ["kept", "message 1 of True"]


def test_a_message_does_not_wait_for_it(site: SimpleNamespace) -> None:
    """One that comes before the client is loaded loads it itself, and that leaves the prepared process alone."""
    site.send()
    wait_for(lambda: not site.executor.reconcile() and site.executor._prepared is not None)
    first, first._is_ready = site.executor._prepared, False
    ready, type(first).is_ready = type(first).is_ready, property(lambda _: False)  # type: ignore[assignment]
    try:
        assert site.send()[-1] == "message 1 of True"
    finally:
        type(first).is_ready = ready
    settle(site)
    assert site.executor._prepared is first and site.send() == ["kept", "message 1 of True"]


def test_it_may_end(site: SimpleNamespace) -> None:
    """Then a message loads the client itself, and another process is prepared."""
    site.send()
    settle(site)
    first = site.executor._prepared
    os.kill(first.pid, 9)
    wait_for(lambda: not site.executor.reconcile() and not site.executor._forks)
    assert site.send() == ["loaded", "message 1 of True"]
    settle(site, after=first)
    assert site.send() == ["kept", "message 1 of True"]


def test_what_is_not_prepared(site: SimpleNamespace) -> None:
    """A client on an accelerator, which does not survive a fork, and one that cannot be loaded."""
    site.run["fails"] = True
    assert site.send() == ["failed"]
    wait_for(lambda: not site.executor.reconcile() and not site.executor._forks)
    assert site.executor._prepared is None
    del site.run["fails"]
    site.device.type = "cuda"
    for _ in range(2):
        assert site.send() == ["loaded", "message 1 of True"]
        wait_for(lambda: not site.executor.reconcile() and not site.executor._forks)
    assert site.log.read_text().count("loaded") == 2


def test_a_message_is_run_once_if_it_hangs(site: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that does not answer is killed before the message is run elsewhere."""
    site.send()
    settle(site)
    monkeypatch.setattr(prepared, "_PATIENCE", 0.1)
    os.kill(site.executor._prepared.pid, signal.SIGSTOP)
    for _ in range(2):
        assert site.send() == ["loaded", "message 1 of True"]
    wait_for(lambda: not site.executor.reconcile() and site.executor._forks <= {site.executor._prepared.pid})
    assert site.log.read_text().count("message") == 3


def test_a_late_fork_is_killed_too(site: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has forked but does not say so in time is killed with its fork: nobody runs a message twice."""
    site.send()
    settle(site)
    forked, late = tmp_path / "forked", site.executor._prepared
    monkeypatch.setattr(prepared, "_PATIENCE", 0.5)
    slow = os.fork()
    if slow == 0:  # stands for a fork that is slow
        os.setpgid(0, late.pid)
        forked.touch()
        time.sleep(60)
        os._exit(0)
    wait_for(forked.exists)
    os.kill(late.pid, signal.SIGSTOP)
    assert site.send() == ["loaded", "message 1 of True"]
    assert os.WTERMSIG(os.waitpid(slow, 0)[1]) == signal.SIGKILL
    settle(site)


def test_one_that_still_loads_gives_way(site: SimpleNamespace) -> None:
    """It is killed if another client is wanted, and does not load to the end."""
    site.send()
    settle(site)
    first = site.executor._prepared
    first._is_ready, first.told = False, b"of another run"
    os.kill(first.pid, signal.SIGSTOP)  # it would not end by itself
    assert site.send() == ["loaded", "message 1 of True"]
    settle(site, after=first)
    assert site.send() == ["kept", "message 1 of True"]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with its parent")
@pytest.mark.parametrize("of", ["supernode", "prepared"])
def test_no_message_outlives_its_supernode(site: SimpleNamespace, of: str) -> None:
    """Not even one that waits for a lock which was taken when it was forked, and so never looks at its parent."""
    taken = threading.Lock()
    taken.acquire()

    def wait() -> None:
        note(site.log, f"message {os.getpid()}")
        taken.acquire()

    node = os.fork()
    if node == 0:  # stands for the SuperNode
        if of == "prepared":
            done, supernode.flwr_clientapp = supernode.flwr_clientapp, lambda: wait() if prepared._held else done()
            site.send()
            settle(site)
        else:
            supernode.flwr_clientapp = wait
        site.send()
        time.sleep(60)
        os._exit(0)

    def stuck() -> list[int]:
        words = [line.split() for line in site.log.read_text().splitlines()]
        return [int(word[1]) for word in words if word[0] == "message" and len(word) == 2]

    wait_for(lambda: bool(stuck()))
    os.kill(node, signal.SIGKILL)
    os.waitpid(node, 0)
    (left,) = stuck()
    try:
        wait_for(lambda: not psutil.pid_exists(left) or psutil.Process(left).status() == psutil.STATUS_ZOMBIE)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(left, signal.SIGKILL)


def test_what_a_client_is_made_of(tmp_path: Path) -> None:
    """The run, and files in the site's folders of data and half; a repo of the Hub is a name.

    Folders do not count, nor what `datasets` leaves in them, nor paths that the server names.
    """
    data, half, theirs = tmp_path / "data", tmp_path / "half", tmp_path / "theirs"
    for folder in (data / "a", half, theirs):
        folder.mkdir(parents=True)
        (folder / "b").write_text("1")
    (tmp_path / "data" / "nowhere").symlink_to("missing")

    def described(run: int = 1) -> bytes:
        return prepared._described(run, {"client_half": str(theirs)}, {"dataset": str(data), "client-half": str(half)})

    first = described()
    assert described() == first and described(2) != first
    (data / "empty").mkdir()
    (data / "a" / "cache-0123.arrow").touch()
    (theirs / "b").write_text("12")
    assert described() == first and b"owner/half" in prepared._described(1, {}, {"client-half": "owner/half"})
    for file in (data / "a" / "b", half / "b"):
        before = described()
        file.write_text("12")
        assert described() != before


@pytest.mark.parametrize(
    ("ended", "status"),
    [
        (None, 0),
        (0, 0),
        (1, 1),
        (-signal.SIGTERM, 0),
        (-signal.SIGINT, 0),
        (-signal.SIGKILL, 137),
        (-signal.SIGSEGV, 139),
    ],
)
def test_the_status_says_whether_the_supernode_failed(ended: int | None, status: int) -> None:
    assert supernode._status(ended) == status
