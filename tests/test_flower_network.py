"""The deployment over Flower's own processes on loopback: TLS, authenticated nodes, a server that is killed."""

import contextlib
import shutil
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from deployed import Site
from federated import weights
from safetensors.torch import load_file

from benchmarks.loopback import Loopback, make_certificates, make_node_key

needs_tools = pytest.mark.skipif(
    not (shutil.which("openssl") and shutil.which("ssh-keygen")), reason="openssl or ssh-keygen is not installed"
)


def wait_for(path: Path, seconds: float = 200.0) -> None:
    end = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < end, f"{path} did not appear"
        time.sleep(0.2)


@needs_tools
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_real_network(tmp_path: Path) -> None:
    """CoeF-J with dropout over TLS and authenticated nodes; the server is killed on the way and goes on.

    The adapter equals the simulation's bit for bit, and a node without a registered key never gets in.
    """
    site = Site(tmp_path / "site", dropout=0.1)
    site.make_half()
    config = site.run_config(method="coef_j", num_rounds=3, min_clients=2, start_timeout=120.0)
    output = Path(config["output_dir"])
    keys = [make_node_key(tmp_path / "keys", name) for name in ("site0", "site1", "stranger")]
    with Loopback(tmp_path / "flower", make_certificates(tmp_path / "tls"), authenticate=True) as flower:
        for key in keys[:2]:
            assert "successfully" in flower.register(key)
        for client, key in enumerate(keys[:2]):
            flower.start_node(site.node_config(client), key)
        stranger = flower.start_node(site.node_config(1) | {"partition-id": 7}, keys[2])
        first = threading.Thread(target=_run, args=(flower, config), daemon=True)
        first.start()
        wait_for(output / "checkpoint-1" / "sealed.json")
        flower.kill("link", signal.SIGKILL)
        assert not (output / "adapter_model.safetensors").exists()
        flower.start_link()
        said = flower.run(config)
        assert "ServerApp finished running" in said, said
        log = flower.log(stranger)
    found = load_file(output / "adapter_model.safetensors")
    expected = weights(site.simulated(method="coef_j", num_rounds=3))
    assert len(found) == len(expected)
    for name, t in expected.items():
        assert torch.equal(found[name.replace(".default", "").replace(".modules_to_save", "")], t)
    assert "Failed to activate SuperNode" in log and "Receiving" not in log
    assert "Receiving: train.step" in flower.log("node0")


def _run(flower: Loopback, config: dict[str, object]) -> None:
    with contextlib.suppress(Exception):
        flower.run(config)
