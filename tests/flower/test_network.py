"""The deployment over Flower's own processes on loopback: TLS, authenticated nodes, a server that is killed."""

import contextlib
import json
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.loopback import Loopback, free_port, make_certificates, make_node_key
from tests.support.deployed import LONG, Site
from tests.support.federated import weights
from tests.support.network import hurried
from tests.support.paths import ROOT

needs_tools = pytest.mark.skipif(
    not (shutil.which("openssl") and shutil.which("ssh-keygen")), reason="openssl or ssh-keygen is not installed"
)


def wait_until(happened: Callable[[], bool], seconds: float = LONG) -> None:
    end = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.2)


@needs_tools
@pytest.mark.slow
def test_a_real_network(tmp_path: Path) -> None:
    """CoeF-J with dropout over TLS and authenticated nodes; the server is killed on the way and goes on.

    The adapter equals the simulation's bit for bit. A node without a registered key never gets in, and one whose key is
    registered for another number is not taken on. In the next run a client is killed and comes back.
    """
    site = Site(tmp_path / "site", dropout=0.1)
    site.make_half()
    config = site.run_config(method="coef_j", num_rounds=3, min_clients=2, start_timeout=LONG)
    output = Path(config["output_dir"])
    keys = [make_node_key(tmp_path / "keys", name) for name in ("site0", "site1", "other", "stranger")]
    with hurried(tmp_path / "flower", make_certificates(tmp_path / "tls"), authenticate=True) as flower:
        for client, key in enumerate(keys[:3]):
            assert "successfully" in flower.register(key, client)
        for client, key in enumerate(keys[:2]):
            flower.start_node(site.node_config(client), key)
        flower.start_node(site.node_config(1) | {"partition-id": 7}, keys[2])
        stranger = flower.start_node(site.node_config(1) | {"partition-id": 8}, keys[3])
        first = threading.Thread(target=_run, args=(flower, config), daemon=True)
        first.start()
        wait_until((output / "checkpoint-1" / "sealed.json").exists)
        flower.kill("link", signal.SIGKILL)
        assert not (output / "adapter_model.safetensors").exists()
        flower.start_link()
        said = flower.run(config, LONG)
        assert "ServerApp finished running" in said, said
        log = flower.log(stranger)
        flower.kill(stranger)
        come_back(flower, site, keys[1])
    found = load_file(output / "adapter_model.safetensors")
    expected = weights(site.simulated(method="coef_j", num_rounds=3))
    assert len(found) == len(expected)
    for name, t in expected.items():
        assert torch.equal(found[name.replace(".default", "").replace(".modules_to_save", "")], t)
    assert "it says it is client 7, its key is registered as client 2" in said
    assert "Failed to activate SuperNode" in log and "Receiving" not in log
    assert "Receiving: train.step" in flower.log("node0")


def _run(flower: Loopback, config: dict[str, object]) -> None:
    with contextlib.suppress(Exception):
        flower.run(config, LONG)


def come_back(flower: Loopback, site: Site, key: Path | None = None) -> None:
    """Kill client 1 in the second round of a new run and start it again at once.

    It fails in that round or the next, and in no other.
    """
    config = site.run_config(num_rounds=4, min_clients=2, start_timeout=LONG)
    before, said = len(flower.log("node1")), list[str]()
    run = threading.Thread(target=lambda: said.append(flower.run(config, LONG)), daemon=True)
    run.start()
    wait_until(lambda: "ROUND 2]" in flower.log("node1")[before:])
    flower.kill("node1", signal.SIGKILL)
    flower.start_node(site.node_config(1), key)
    run.join(LONG)
    assert said and "ServerApp finished running" in said[0], said
    entries = json.loads((Path(config["output_dir"]) / "communication.json").read_text())["entries"]
    failed = [e["round"] for e in entries if e["client"] == "1" and "failure" in e]
    assert failed in ([2], [3]), said[0]  # it may have answered in the second before it was killed
    assert sum(e["client"] == "1" for e in entries) == 4, said[0]


@pytest.mark.slow
def test_a_killed_client_comes_back(tmp_path: Path) -> None:
    """Without a key, as another node with the same number; with one, see above."""
    site = Site(tmp_path / "site")
    site.make_half()
    with hurried(tmp_path / "flower") as flower:
        for client in range(2):
            flower.start_node(site.node_config(client))
        come_back(flower, site)
        assert "Failed to activate SuperNode" not in flower.log("node1")


@pytest.mark.slow
def test_the_commands_of_the_page(tmp_path: Path) -> None:
    """From the example's files to its adapter, on other ports and for two rounds."""
    text = (ROOT / "docs" / "deployment.md").read_text()
    section = text[text.index("## Try it on one machine\n") : text.index("## Your own run\n")]
    first, *clients, run, simulation = re.findall(r"```bash\n(.*?)```", section, re.DOTALL)
    assert len(clients) == 2 and "--simulation" in simulation
    for name in ("recipes", "benchmarks"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    with Loopback(tmp_path / "loopback") as flower:  # for its environment, and to end what it has started
        flower.kill("link")
        (tmp_path / "bin").mkdir()
        command = tmp_path / "bin" / "coefsfl"  # what installing the package would make
        command.write_text(f'#!/bin/sh\nexec {sys.executable} -m hf_coefsfl "$@"\n')
        command.chmod(0o755)
        environment = flower.environment | {"PATH": f"{tmp_path / 'bin'}:{flower.environment['PATH']}"}
        ports = {port: str(free_port()) for port in ("8000", "9094", "9095")}

        def adapted(commands: str) -> str:
            for old, new in {**ports, "--disable-runtime": "--port 8000 --disable-runtime"}.items():
                commands = commands.replace(old, new)
            return commands.replace("8000", ports["8000"])

        def shell(commands: str, **options: Any) -> Any:
            words = ["bash", "-ec", adapted(commands)]
            return subprocess.Popen(words, cwd=tmp_path, env=environment, start_new_session=True, **options)

        install, *make, export, link = first.strip().splitlines()
        assert install.startswith("pip install") and link.startswith("flower-superlink")
        for line in make:
            assert shell(line).wait(LONG) == 0
        config = tmp_path / "example" / "flwr" / "config.toml"
        config.write_text(adapted(config.read_text()))
        options = tmp_path / "recipes" / "flower" / "example.toml"
        options.write_text(options.read_text().replace("num_rounds = 8", "num_rounds = 2"))
        for name, commands in (("link", f"{export}\n{link}"), ("a", clients[0]), ("b", clients[1])):
            with (tmp_path / f"{name}.log").open("w") as log:
                flower.processes[name] = shell(commands, stdout=log, stderr=log)
            if name == "link":
                flower.wait_for_port(int(ports["8000"]), LONG)
        said, _ = shell(run, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True).communicate(timeout=LONG)
    assert "test, coef_w, 2 rounds: accuracy " in said, said
    assert float(said.split("accuracy ")[-1].split(".")[0]) > 40  # of ten classes
    for name in ("adapter_model.safetensors", "client/adapter_model.safetensors", "README.md", "communication.json"):
        assert (tmp_path / "example" / "adapter" / name).exists()
