"""`python -m hf_coefsfl.flower.supernode`: a `flower-supernode` whose ClientApp starts in a moment.

Flower starts a process for each message, and importing PyTorch, transformers and PEFT takes it seconds. Here a process
that has them loaded forks itself for each message instead. It takes the options of `flower-supernode`; the messages,
the security and the results are the same.
"""

from __future__ import annotations

import argparse
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flwr.supercore.constant import TASK_TYPE_TO_APPIO_API_ADDRESS_ARG, TaskType
from flwr.supercore.superexec import run_superexec as superexec
from flwr.supercore.superexec.executor import ExecutionSpec, LaunchResult, SubprocessExecutor
from flwr.supernode.cli.flwr_clientapp import flwr_clientapp


class ForkExecutor(SubprocessExecutor):
    """Runs each message in a fork of this process."""

    def launch(self, spec: ExecutionSpec) -> LaunchResult:
        """Start the ClientApp for one message."""
        if spec.task_type != TaskType.CLIENT_APP:
            return super().launch(spec)
        address = TASK_TYPE_TO_APPIO_API_ADDRESS_ARG[spec.task_type]
        arguments = [address, spec.runtime_api_address, "--token", spec.token, "--parent-pid", str(os.getpid())]
        if spec.insecure:
            arguments.append("--insecure")
        elif spec.root_certificates_path is not None:
            arguments += ["--root-certificates", spec.root_certificates_path]
        sys.stdout.flush()
        sys.stderr.flush()
        if os.fork() == 0:
            _become_client_app(arguments)
        return LaunchResult.accepted()

    def reconcile(self) -> None:
        """Take note of forks that have ended."""
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            pass


def _become_client_app(arguments: list[str]) -> None:
    status: Any = 1
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        sys.argv = ["flwr-clientapp", *arguments]
        flwr_clientapp()
    except SystemExit as left:
        status = left.code if isinstance(left.code, int) else 0
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _preload() -> None:
    """Import what a step needs. Nothing may compute here: threads do not survive a fork."""
    from . import client, client_node, client_round  # noqa: F401


def main(argv: Sequence[str] | None = None) -> int:
    """Start a SuperNode, and what it runs its messages with."""
    given = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", default="9094")
    parser.add_argument("--isolation")
    parser.add_argument("--ssl-ca-certfile")
    known, _ = parser.parse_known_args(given)
    if {"-h", "--help", "-V", "--version"} & set(given):
        return subprocess.call(["flower-supernode", *given])
    if known.isolation is not None:
        print("error: --isolation is set by this command; use flower-supernode to choose it.", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        secret = Path(folder) / "secret"  # by which the SuperNode knows who may run its messages
        secret.touch(mode=0o600)
        secret.write_bytes(secrets.token_bytes(32))
        node = subprocess.Popen(
            ["flower-supernode", *given, "--isolation", "process", "--superexec-auth-secret-file", str(secret)]
        )
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        os.environ.setdefault("FLWR_SUPEREXEC_TASK_POLL_INTERVAL", "0.1")  # a look costs nothing here
        try:
            _preload()
            superexec.get_executor = lambda *_, **__: ForkExecutor()
            superexec.run_superexec(
                runtime_api_address=f"{known.host}:{known.port}",
                insecure=known.ssl_ca_certfile is None,
                root_certificates_path=known.ssl_ca_certfile,
                superexec_auth_secret=secret.read_bytes(),
                parent_pid=node.pid,  # when the SuperNode ends, so does this
                runtime_dependency_install=False,
            )
        except KeyboardInterrupt:
            pass
        finally:
            node.terminate()
            node.wait(30)
    return 0


if __name__ == "__main__":
    sys.exit(main())
