"""What a run takes, in memory and on disk, against real runs."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import pytest
from transformers import ViTConfig

from hf_coefsfl.analysis.backbones import build_model
from hf_coefsfl.analysis.cost import CostModel, Round
from hf_coefsfl.analysis.memory import Run, follow, footprint
from hf_coefsfl.cli import main
from hf_coefsfl.methods import make_method
from hf_coefsfl.methods.parts.costs import RoundKind
from tests.support.federated import CLASSES, D, images, tiny_vit, trainer
from tests.support.paths import LIGHT, ROOT
from tests.support.selection import slow_except


def load_benchmark(name: str) -> Any:
    path = ROOT / "benchmarks" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def middling(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The config of a model whose round takes some 150 MiB and a few seconds."""
    folder = tmp_path_factory.mktemp("middling")
    sizes = {"hidden_size": 48, "num_hidden_layers": 4, "num_attention_heads": 3, "intermediate_size": 192}
    config = ViTConfig(**sizes, image_size=64, patch_size=4, num_labels=10, architectures=["ViTForImageClassification"])
    config.save_pretrained(folder)
    return str(folder)


@pytest.mark.slow
@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="reads Linux's /proc")
@pytest.mark.parametrize(("method", "dtype"), [("vanilla", "float32"), ("coef_j", "float32"), ("coef_j", "bfloat16")])
def test_the_memory_of_a_process_is_predicted(
    middling: str, method: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One round in a fresh process, which takes as much as was predicted from a few samples, within 10 %."""
    case: dict[str, Any] = {"model": middling, "num_labels": 10, "cut": 2, "part": "process", "method": method}
    case |= {"num_samples": 96, "batch_size": 32, "sequence_length": None, "clients": 2, "plain_malloc": False}
    case["options"] = {"exchange_dtype": dtype}
    cost = CostModel(build_model(middling, 10), exchange_dtype=dtype)
    run = Run(num_rounds=1, clients_per_round=2, num_clients=2)
    predicted = footprint(cost, RoundKind(make_method(method)), 2, Round(96, 32), run)
    monkeypatch.setenv("PYTHONPATH", LIGHT)
    measured = load_benchmark("memory").measured(case)
    assert sum(predicted.process.values()) == pytest.approx(measured, rel=0.1)
    assert predicted.process["weights"] + predicted.process["inputs"] < measured / 4  # the round is what matters
    assert sum(predicted.client.values()) < measured and sum(predicted.server.values()) < measured


def test_peaks_that_were_not_measured_are_predicted(tiny: CostModel) -> None:
    """The extrapolated peak of a round is nearly that of the round itself."""
    for name in ("vanilla", "oracle", "coef_j", "acc_sfl", "mu_splitfed"):
        predicted = footprint(tiny, RoundKind(make_method(name)), 2, Round(40, 10), Run())
        found = follow(tiny, make_method(name), 2, [10, 10, 10, 10])
        assert predicted.process["round"] == pytest.approx(int(found.total.max()), rel=0.03), name
        assert predicted.process["inputs"] == found.inputs
        own = [int(found.own[found.side == side].max()) for side in (0, 1)]
        assert predicted.client["round"] == pytest.approx(own[0], rel=0.03), name
        assert predicted.server["round"] == pytest.approx(own[1], rel=0.03), name


def folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("name", slow_except("gas", of=["vanilla", "coef_j", "acc_sfl", "gas"]))
def test_the_files_of_a_run_are_predicted(tiny: CostModel, name: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"num_clients": 4, "participation": 1.0, "num_rounds": 6, "warmup_rounds": 0, "cut": 2}
    settings |= {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 2, "method_kwargs": {}}
    run = trainer(tmp_path, tiny_vit(), images(44), method=name, eval_dataset=None, compute_metrics=None, **settings)
    run.train()
    run.save_model()
    length = Run(6, clients_per_round=4, num_clients=4, save_steps=2, save_total_limit=2)
    (cost,) = tiny.costs(make_method(name), 2, Round(11, 4), length)
    assert cost.footprint is not None
    left = sum(cost.footprint.disk.values())
    assert left == pytest.approx(folder_bytes(tmp_path), rel=0.1)
    checkpoint = folder_bytes(tmp_path / "checkpoint-6")
    assert cost.footprint.disk_peak - left == pytest.approx(checkpoint, rel=0.1)
    if name == "gas":
        assert cost.footprint.process["state"] == CLASSES * 4 * (5 + 2 * D)  # weights, means and variances


def test_the_command_tells_what_a_run_takes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_vit().save_pretrained(tmp_path)
    command = ["cost", "--model", str(tmp_path), "--methods", "vanilla", "reuse", "--num-samples", "128"]
    assert main([*command, "--rounds", "3", "--clients-per-round", "2", "--exchange-dtype", "int8"]) == 0
    rounds, title, run = capsys.readouterr().out.strip().split("\n\n")
    assert rounds.count("\n") == run.count("\n") == 3
    assert title == "A run of 3 rounds with 2 of 50 clients each:"
    assert [cell.strip() for cell in run.splitlines()[0].split("|")][2:5] == [
        "process_memory_mib", "client_alone_mib", "server_alone_mib"
    ]  # fmt: skip
    assert main([*command, "--rounds", "3", "--format", "json"]) == 0
    vanilla, reuse = json.loads(capsys.readouterr().out)
    assert vanilla["process_memory_mib"] == pytest.approx(sum(vanilla["process_memory_parts_mib"].values()))
    assert reuse["process_memory_mib"] > vanilla["process_memory_mib"] > vanilla["client_alone_mib"] > 0
    assert reuse["disk_peak_mib"] == reuse["disk_mib"] > 0  # no limit, so no checkpoint is deleted
    with pytest.raises(SystemExit):
        main([*command, "--save-steps", "3"])
    assert "--save-steps needs --rounds" in capsys.readouterr().err


def test_runs_count_checkpoints_and_clients() -> None:
    assert Run(25, save_steps=10).checkpoints() == [10, 20, 25]
    assert Run(25, save_steps=10, save_total_limit=1).checkpoints() == [25]
    assert Run(clients_per_round=5, num_clients=50).distinct(1) == 5
    assert Run(clients_per_round=5, num_clients=50).distinct(1000) == 50
    with pytest.raises(ValueError, match=r"clients per round \(5\) cannot be more than the clients \(3\)"):
        Run(num_clients=3)
    with pytest.raises(ValueError, match="num rounds must be at least 1, got 0"):
        Run(0)
