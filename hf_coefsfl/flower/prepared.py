"""A client that is loaded once: a process with its half and its data, which forks itself for each message of a run.

Loading takes longer than most messages. The first message of a run loads the client in its own process, which then
tells what it has loaded. From then on a prepared process has the same client loaded, and each message gets a fork of
it, so that no message finds what another one has left. Only a client on the CPU is prepared: an accelerator that was
used does not survive a fork.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict
from fnmatch import fnmatch
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .client_node import ClientNode

Run = Callable[[list[str]], None]  # becomes the ClientApp with these arguments, and does not return
_PATIENCE = 5.0  # seconds that a prepared process may take to fork

_held: tuple[bytes, ClientNode] | None = None  # in a prepared process and its forks
_loaded: bytes | None = None  # what this process had to load


def node_of(run_id: int, run_config: Mapping[str, Any], node_config: Mapping[str, Any]) -> ClientNode:
    """Return the client of a run, loaded if no prepared process has loaded it, or if its files have changed since."""
    global _loaded
    from .client_node import ClientNode

    described = _described(run_id, run_config, node_config)
    if _held is not None and _held[0] == described:
        node = _held[1]
        node.keep_noise()
        return node
    node = ClientNode(run_config, node_config)
    _loaded = described
    return node


def loaded() -> bytes | None:
    """Return what this process had to load, if anything: the client that another process may prepare."""
    return _loaded


def _described(run_id: int, run_config: Mapping[str, Any], node_config: Mapping[str, Any]) -> bytes:
    """Return what a client is made of: run, configs, the site's policy, and a digest of its files, sizes and times.

    Only the site names files. A path of the run config is the server's, and nothing is looked at there.
    """
    from .policy import Policy

    names = (node_config.get("dataset"), node_config.get("client-half"))
    files = [entry for name in names if name for entry in _files(str(name))]
    policy = asdict(Policy.of(node_config))
    digest = hashlib.sha256(json.dumps([policy, files]).encode()).hexdigest()
    return json.dumps([dict(run_config), dict(node_config), run_id, digest], sort_keys=True).encode()


def _files(path: str) -> list[tuple[str, int, int]]:
    """Return the files of a folder with their sizes and times; none of a name that is on the Hub.

    What `datasets` itself leaves beside rows that it has read does not count.
    """
    inside = (os.path.join(folder, name) for folder, _, names in os.walk(path) for name in names)
    found = []
    for file in sorted([path] if os.path.isfile(path) else inside):
        if not fnmatch(os.path.basename(file), "cache-*.arrow"):
            with contextlib.suppress(OSError):  # a link to nowhere, or a file that was just deleted
                status = os.stat(file)
                found.append((file, status.st_size, status.st_mtime_ns))
    return found


class Prepared:
    """A process that prepares the client of one run, as the process that starts it sees it.

    Args:
        told: what `loaded` returned in a process of the run.
        run: what a fork does with the arguments of a message.
        begin: what the process does first.
    """

    def __init__(self, told: bytes, run: Run, begin: Callable[[], None] = lambda: None):
        self.told, self._is_ready = told, False
        self.has_failed = False  # after it was ready
        self._requests, theirs = Pipe()
        self.pid = os.fork()
        if self.pid == 0:
            self._requests.close()
            try:
                os.setpgid(0, 0)  # so that it can be killed with its forks
                begin()
                _serve(theirs, told, run)
            except BaseException:  # messages load the client themselves then
                traceback.print_exc()
            os._exit(0)
        theirs.close()

    @property
    def is_ready(self) -> bool:
        """Whether the client is loaded."""
        with contextlib.suppress(OSError, EOFError):  # it has ended
            self._is_ready = self._is_ready or (self._requests.poll() and bool(self._requests.recv_bytes()))
        return self._is_ready

    def launch(self, arguments: list[str]) -> bool:
        """Have a fork run a message; return whether one does. It does not if the client is not loaded yet.

        A process that does not fork in time is killed, with its forks, before anybody else runs the message.
        """
        try:
            if not self.is_ready:
                return False
            self._requests.send_bytes(json.dumps(arguments).encode())
            if self._requests.poll(_PATIENCE):
                return bool(self._requests.recv_bytes())
            os.killpg(self.pid, signal.SIGKILL)
        except (OSError, EOFError):  # it has ended
            pass
        self.has_failed = True
        self.end()
        return False

    def end(self) -> None:
        """Let it end when its forks have."""
        self._requests.close()


def _serve(requests: Connection, told: bytes, run: Run) -> None:
    """Load the client, then fork for each request, until the other side is closed."""
    global _held
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # threads do not survive a fork
    import torch

    from .client_node import ClientNode
    from .options import read_client_config

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    run_config, node_config, *_ = json.loads(told)
    if read_client_config(run_config, True).config.device.type != "cpu":
        return
    _held = told, ClientNode(run_config, node_config)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how a fork ended
    sys.stdout.flush()  # or each fork would write it again
    sys.stderr.flush()
    me = os.getpid()
    with contextlib.suppress(EOFError, OSError):  # nobody is there any more
        requests.send_bytes(b"ready")
        while asked := requests.recv_bytes():
            fork = os.fork()
            if fork == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                requests.close()
                torch.set_num_threads(threads)
                run([*json.loads(asked), "--parent-pid", str(me)])
            requests.send_bytes(str(fork).encode())
    with contextlib.suppress(ChildProcessError):  # comes when the last fork has ended
        os.wait()
