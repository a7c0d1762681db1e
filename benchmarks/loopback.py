"""Starts a real SuperLink and real SuperNodes on this machine, for tests and benchmarks of the deployment.

with Loopback(folder) as flower:
    flower.start_node({"partition-id": 0, ...})
    flower.run({"task": "mnli", ...})
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
APP = ROOT / "recipes" / "flower"


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def as_config(values: dict[str, Any]) -> str:
    """Return a node config as Flower's commands take it."""
    return " ".join(f"{name}={json.dumps(value)}" for name, value in values.items())


class Loopback:
    """Flower's processes, each in its own process group, with their logs in a folder. They end with the `with` block.

    Args:
        folder: holds logs, Flower's own files and the clients' work.
        tls: certificates (ca, certificate, key) of the SuperLink; None: no TLS.
        authenticate: whether nodes need a registered key.
        warm: whether clients keep a process with everything loaded, as `hf_coefsfl.flower.supernode` does.
    """

    def __init__(
        self,
        folder: Path,
        tls: tuple[Path, Path, Path] | None = None,
        authenticate: bool = False,
        warm: bool = True,
    ):
        self.folder, self.tls, self.authenticate, self.warm = folder, tls, authenticate, warm
        self.port = free_port()
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        home = folder / "flwr"
        home.mkdir(parents=True, exist_ok=True)
        link = {"address": f"127.0.0.1:{self.port}"}
        security = f'root-certificates = "{tls[0]}"' if tls else "insecure = true"
        (home / "config.toml").write_text(
            f'[superlink]\ndefault = "local"\n\n[superlink.local]\naddress = "{link["address"]}"\n{security}\n'
        )
        bin_folder = str(Path(sys.executable).parent)
        self.environment = os.environ | {
            "FLWR_HOME": str(home),
            "FLWR_TELEMETRY_ENABLED": "0",
            "HF_COEFSFL_WORK": str(folder / "work"),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "PATH": f"{bin_folder}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
        }

    def __enter__(self) -> Loopback:
        self.start_link()
        return self

    def __exit__(self, *_: object) -> None:
        for name in list(self.processes):
            self.kill(name, signal.SIGTERM)

    def start_link(self) -> None:
        command = ["flower-superlink", "--port", str(self.port), "--disable-runtime-dependency-installation"]
        if self.tls:
            ca, certificate, key = map(str, self.tls)
            command += ["--ssl-ca-certfile", ca, "--ssl-certfile", certificate, "--ssl-keyfile", key]
        else:
            command.append("--insecure")
        if self.authenticate:  # registered keys outlive the SuperLink in its database
            command += ["--enable-supernode-auth", "--database", str(self.folder / "superlink.db")]
        self.start("link", command)
        self.wait_for_port(self.port)

    def start_node(self, node_config: dict[str, Any], key: Path | None = None, port: int | None = None) -> str:
        """Start a SuperNode; `port` is that of a proxy in front of the SuperLink. Return the name of its process."""
        name = f"node{node_config['partition-id']}"
        address = f"127.0.0.1:{port or self.port}"
        command = [*([sys.executable, "-m", "hf_coefsfl.flower.supernode"] if self.warm else ["flower-supernode"])]
        command += ["--superlink", address, "--port", str(free_port()), "--node-config", as_config(node_config)]
        command += ["--root-certificates", str(self.tls[0])] if self.tls else ["--insecure"]
        if key is not None:
            command += ["--auth-supernode-private-key", str(key)]
        self.start(name, command)
        return name

    def run(self, run_config: dict[str, Any], timeout: float = 600.0, app: Path = APP) -> str:
        """Run the app until it ends; return what it printed."""
        config = self.folder / "run.toml"  # a file may have quotes in its values, a command line may not
        config.write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in run_config.items()))
        command = ["flwr", "run", str(app), "local", "--stream", "--run-config", str(config)]
        return self.command(command, timeout)

    def register(self, key: Path, client: int) -> str:
        """Register a node's public key with the SuperLink as that of a client; return what it prints."""
        return self.command(["flwr", "supernode", "register", f"{key}.pub", "local", "--name", str(client)])

    def command(self, command: list[str], timeout: float = 60.0) -> str:
        """Run one of Flower's commands; return what it printed."""
        done = subprocess.run(
            command,
            env=self.environment,
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
        )
        return done.stdout

    def start(self, name: str, command: list[str]) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                command,
                env=self.environment,
                cwd=self.folder,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def kill(self, name: str, how: int = signal.SIGKILL) -> None:
        """End a process and all that it started."""
        process = self.processes.pop(name)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, how)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def wait_for_port(self, port: int, seconds: float = 60.0) -> None:
        end = time.monotonic() + seconds
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                return
            if time.monotonic() > end:
                raise TimeoutError(f"nothing listens on port {port} after {seconds} s")
            time.sleep(0.2)


def make_certificates(folder: Path) -> tuple[Path, Path, Path]:
    """Return the files of a CA, and of a certificate for 127.0.0.1 that it signed with its key. Needs openssl."""
    if shutil.which("openssl") is None:
        raise RuntimeError("openssl is not installed")
    folder.mkdir(parents=True, exist_ok=True)
    ca, ca_key, key, request, certificate = (
        folder / name for name in ("ca.crt", "ca.key", "server.key", "server.csr", "server.pem")
    )
    (folder / "names").write_text("subjectAltName = DNS:localhost, IP:127.0.0.1\n")
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    commands = [
        ["req", "-x509", *curve, "-keyout", ca_key, "-out", ca, "-days", "30", "-subj", "/CN=test CA"],
        ["req", "-new", *curve, "-keyout", key, "-out", request, "-subj", "/CN=localhost"],
        ["x509", "-req", "-in", request, "-CA", ca, "-CAkey", ca_key, "-CAcreateserial", "-out", certificate,
         "-days", "30", "-extfile", folder / "names"],
    ]  # fmt: skip
    for command in commands:
        subprocess.run(["openssl", *map(str, command)], check=True, capture_output=True)
    return ca, certificate, key


def make_node_key(folder: Path, name: str) -> Path:
    """Return the file of a node's private key; the public one lies beside it as <name>.pub. Needs ssh-keygen."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    command = ["ssh-keygen", "-q", "-t", "ecdsa", "-b", "384", "-N", "", "-f", str(path)]
    subprocess.run(command, check=True, capture_output=True)
    return path
