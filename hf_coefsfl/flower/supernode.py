"""`python -m hf_coefsfl.flower.supernode`: a `flower-supernode` whose ClientApp starts in a moment.

Flower starts a process for each message, and importing PyTorch, transformers and PEFT takes it seconds. Here a process
that has them loaded forks itself for each message instead. After the first message of a run another one has the
client's half and data loaded, too (`prepared.py`). And it waits if the SuperLink does not let it in yet. It takes the
options of `flower-supernode`; the messages and the results are the same. The code that a run brings along is not run:
the ClientApp is that of this package, as it is installed here.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import secrets
import select
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Sequence
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from flwr.app import Error
from flwr.supercore.address import resolve_bind_address
from flwr.supercore.constant import TASK_TYPE_TO_APPIO_API_ADDRESS_ARG, TaskType
from flwr.supercore.superexec import run_superexec as superexec
from flwr.supercore.superexec.executor import ExecutionSpec, LaunchResult, SubprocessExecutor
from flwr.supernode.cli.flwr_clientapp import flwr_clientapp
from flwr.supernode.runtime import run_clientapp as runtime

from .prepared import Prepared, loaded

_PR_SET_PDEATHSIG = 1  # of Linux' prctl
_LIBC = ctypes.CDLL(None)  # here, not in a fork: a lock of the loader may have been taken when it was forked
_LENGTH = 4  # bytes that a Connection writes before a message
_ELSEWHERE = ("--isolation", "--clientappio-api-address", "--appio-ssl-ca-certfile", "--superexec-auth-secret-file")


class ForkExecutor(SubprocessExecutor):
    """Runs each message in a fork: of the process that has the client loaded, or else of this one."""

    def __init__(self, secret: Path) -> None:
        self._secret, self._forks = secret, set[int]()
        self._told, self._tell = Pipe(duplex=False)  # forks say which client they had to load
        self._prepared: Prepared | None = None

    def get_eligible_capacity(self, *_: Any, **__: Any) -> tuple[set[TaskType], set[str]]:
        """Ask for messages to the ClientApp alone: all else is code that a run brings along."""
        return {TaskType.CLIENT_APP}, set()

    def launch(self, spec: ExecutionSpec) -> LaunchResult:
        """Start the ClientApp for one message."""
        if spec.task_type != TaskType.CLIENT_APP:
            return LaunchResult.failed(f"{spec.task_type} is not run here: its code comes with the run.")
        address = TASK_TYPE_TO_APPIO_API_ADDRESS_ARG[spec.task_type]
        arguments = [address, spec.runtime_api_address, "--token", spec.token]
        if spec.insecure:
            arguments.append("--insecure")
        elif spec.root_certificates_path is not None:
            arguments += ["--root-certificates", spec.root_certificates_path]
        self._secret.unlink(missing_ok=True)  # the SuperNode has read it by now
        sys.stdout.flush()
        sys.stderr.flush()
        if self._prepared is not None and self._prepared.launch(arguments):
            return LaunchResult.accepted()
        me, fork = os.getpid(), os.fork()
        if fork == 0:
            _become_client_app([*arguments, "--parent-pid", str(me)], self._tell)
        self._forks.add(fork)
        return LaunchResult.accepted()

    def reconcile(self) -> None:
        """Take note of forks that have ended, and prepare the client that one of them had to load."""
        self._forks -= {fork for fork in self._forks if os.waitpid(fork, os.WNOHANG)[0]}
        while self._told.poll():
            told = self._told.recv_bytes()
            with contextlib.suppress(OSError):  # without room for another process: messages load the client themselves
                self._prepare(told)

    def _prepare(self, told: bytes) -> None:
        if self._prepared is not None:
            if self._prepared.told == told and not self._prepared.has_failed:
                return  # it was not ready yet, or it cannot be prepared
            if self._prepared.pid in self._forks and not self._prepared.is_ready:
                os.kill(self._prepared.pid, signal.SIGKILL)  # it still loads what nobody wants
            self._prepared.end()
        sys.stdout.flush()
        sys.stderr.flush()
        begin = partial(_begin_prepared, os.getpid())
        self._prepared = Prepared(told, partial(_become_client_app, tell=self._tell), begin)
        self._forks.add(self._prepared.pid)


def _become_client_app(arguments: list[str], tell: Connection) -> None:
    status: Any = 1
    try:
        _end_with_parent(int(arguments[-1]), signal.SIGKILL)  # Flower looks after it later: this may wait for a lock
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        sys.argv = ["flwr-clientapp", *arguments]
        _run_own_code()
        flwr_clientapp()
    except SystemExit as left:
        status = left.code if isinstance(left.code, int) else int(left.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError):  # nobody is there any more
            # Longer ones would not be written in one piece, and half a piece would have the reader wait for the rest.
            if (told := loaded()) is not None and len(told) + _LENGTH <= select.PIPE_BUF:
                tell.send_bytes(told)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _begin_prepared(parent: int) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    _end_with_parent(parent)


def _run_own_code() -> None:
    """Have Flower take this package's ClientApp, and send no words of an exception of its own."""
    from .client import client_app

    flower: Any = runtime
    flower.get_load_client_app_fn = lambda **_: lambda *_: client_app
    flower.Error = lambda code, reason: Error(code, f"Flower failed at the client (error {code})")


def _preload() -> None:
    """Import what a step needs. Nothing may compute here: threads do not survive a fork."""
    from . import client, client_node, client_round  # noqa: F401


def _end_with_parent(parent: int, by: signal.Signals = signal.SIGTERM) -> None:
    """Have this process end when the one that started it does, if the system can."""
    with contextlib.suppress(AttributeError):
        _LIBC.prctl(_PR_SET_PDEATHSIG, by)
        if os.getppid() != parent:  # it has ended before
            os.kill(os.getpid(), by)


def main(argv: Sequence[str] | None = None) -> int:
    """Start a SuperNode, and what it runs its messages with."""
    given = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", default="9094")
    parser.add_argument("--ssl-ca-certfile")
    known, _ = parser.parse_known_args(given)
    if {"-h", "--help", "-V", "--version"} & set(given):
        return subprocess.call(["flower-supernode", *given])
    for word in given:
        if word.partition("=")[0] in _ELSEWHERE:
            print(f"error: {word} is set by this command; flower-supernode itself takes it.", file=sys.stderr)
            return 2
    with tempfile.TemporaryDirectory() as folder:
        secret = Path(folder) / "secret"  # by which the SuperNode knows who may run its messages
        secret.touch(mode=0o600)
        secret.write_bytes(secrets.token_bytes(32))
        patient = [sys.executable, "-m", f"{__package__}.activation"]
        node = subprocess.Popen(
            [*patient, *given, "--isolation", "process", "--superexec-auth-secret-file", str(secret)],
            preexec_fn=partial(_end_with_parent, os.getpid()),
        )
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        threading.Thread(target=_end_with, args=(node,), daemon=True).start()
        os.environ.setdefault("FLWR_SUPEREXEC_TASK_POLL_INTERVAL", "0.1")  # a look costs nothing here
        try:
            _preload()
            superexec.get_executor = lambda *_, **__: ForkExecutor(secret)
            superexec.run_superexec(
                runtime_api_address=resolve_bind_address(f"{known.host}:{known.port}"),
                insecure=known.ssl_ca_certfile is None,
                root_certificates_path=known.ssl_ca_certfile,
                superexec_auth_secret=secret.read_bytes(),
                runtime_dependency_install=False,
            )
        except (KeyboardInterrupt, SystemExit):
            pass
        finally:
            ended = node.poll()  # not None: by itself
            node.terminate()
            try:
                node.wait(3)
            except subprocess.TimeoutExpired:
                node.kill()
                node.wait()
    return _status(ended)


def _status(ended: int | None) -> int:
    """Return the status of this command for how the SuperNode has ended by itself, if it has.

    A signal that asks it to end was sent to both. Another one, as when the system is out of memory, is a failure.
    """
    if ended is None or ended in (-signal.SIGTERM, -signal.SIGINT):
        return 0
    return ended if ended >= 0 else 128 - ended


def _end_with(node: subprocess.Popen[bytes]) -> None:
    """End this process when the SuperNode does."""
    node.wait()
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())
