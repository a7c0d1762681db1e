"""The budget of a comparison against what runs move, and by hand."""

import json
from pathlib import Path
from typing import Any

import pytest
from datasets import ClassLabel, Dataset, DatasetDict, Features, Image
from PIL import Image as Picture

from hf_coefsfl.analysis.cost import CostModel, Round
from hf_coefsfl.cli import main
from hf_coefsfl.compare import Cell, expand, parse_spec
from hf_coefsfl.compare.budget import STARTUP_SECONDS, Budget, with_server_work
from hf_coefsfl.methods import make_method
from tests.support.federated import CLASSES, tiny_vit

ROWS, EVALUATED, CLIENTS = 40, 10, 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("budget")
    tiny_vit().save_pretrained(root / "model")
    features = Features({"img": Image(), "fine_label": ClassLabel(num_classes=CLASSES)})

    def rows(count: int) -> Dataset:
        images = [Picture.new("RGB", (8, 8))] * count
        return Dataset.from_dict({"img": images, "fine_label": [i % CLASSES for i in range(count)]}, features=features)

    DatasetDict({"train": rows(ROWS), "test": rows(EVALUATED)}).save_to_disk(root / "data")
    return root


def spec(folder: Path, methods: list[Any], **settings: Any) -> dict[str, Any]:
    task = {"task": "cifar100", "model": "tiny", "cut": 2}
    task |= {"model_name_or_path": str(folder / "model"), "dataset_name": str(folder / "data")}
    chosen = {"num_rounds": 6, "warmup_rounds": 2, "num_clients": CLIENTS, "participation": 0.4} | settings
    chosen |= {"per_device_train_batch_size": 4}
    return {"settings": chosen, "tasks": [task], "methods": methods, "learning_rates": [0.1, 0.2], "seeds": [0, 1]}


def cells(folder: Path, methods: list[Any], **settings: Any) -> list[Cell]:
    return expand(parse_spec(spec(folder, methods, **settings), "test"))


def test_bytes_and_operations_are_those_of_the_rounds(folder: Path) -> None:
    (cell,) = cells(folder, ["coef_j"])
    model, plan = CostModel(tiny_vit(attn_implementation="eager")), Round(ROWS // CLIENTS, 4)
    warm, usual = (model.costs(make_method(name), 2, plan)[0] for name in ("vanilla", "coef_j"))
    estimate = Budget(speed=1e6).of(cell)
    clients = 2
    assert estimate.mib * 2**20 == pytest.approx(clients * (2 * warm.num_bytes + 4 * usual.num_bytes))
    trained = clients * (2 * (warm.client_flops + warm.server_flops) + 4 * (usual.client_flops + usual.server_flops))
    forward = Budget._forward(model)
    assert estimate.seconds == pytest.approx(STARTUP_SECONDS + (trained + EVALUATED * forward) / 1e6, rel=1e-6)


def test_a_bfloat16_base_moves_less_and_works_as_much(folder: Path) -> None:
    whole, half = (Budget(speed=1e6).of(cells(folder, ["reuse"], dtype=d)[0]) for d in ("float32", "bfloat16"))
    assert half.server_gflops(6) == pytest.approx(whole.server_gflops(6)) and half.mib < 0.9 * whole.mib


def test_rare_rounds_count_as_often_as_they_come(folder: Path) -> None:
    every = {"method": "fsl_sage", "method_kwargs": {"align_every": 1, "align_epochs": 1, "num_blocks": 1}}
    rarely = {"method": "fsl_sage", "name": "rarely", "method_kwargs": every["method_kwargs"] | {"align_every": 1000}}
    often, rare = (Budget(speed=1e6).of(cell).seconds for cell in cells(folder, [every, rarely]))
    assert often > rare > STARTUP_SECONDS


def test_fewer_samples_and_more_evaluations(folder: Path) -> None:
    def seconds(**settings: Any) -> float:
        return Budget(speed=1e6).of(cells(folder, ["vanilla"], **settings)[0]).seconds

    usual = seconds()
    assert seconds(max_train_samples=20) < usual
    assert seconds(max_eval_samples=5) < usual < seconds(eval_strategy="steps", eval_steps=1)


def test_the_command_prints_it_and_starts_nothing(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "spec.yaml"
    path.write_text(json.dumps(spec(folder, ["vanilla", "reuse"])))
    command = ["compare", str(path), "--output_dir", str(tmp_path / "out"), "--device_speed", "1GFLOPS"]
    assert main([*command, "--dry_run"]) == 0
    text = capsys.readouterr().out
    assert "| hours | MiB" in text and "6 runs, 0 of them done. The others take about" in text
    assert not (tmp_path / "out").exists()
    with pytest.raises(SystemExit):
        main(command)
    assert "--device_speed needs --dry_run" in capsys.readouterr().err


def test_the_servers_work_is_estimated_where_it_was_not_counted(folder: Path) -> None:
    """By round, warm-up apart, and scaled by the bytes that the run moved; what was counted stays."""
    (cell,) = cells(folder, ["coef_j"])
    model, plan = CostModel(tiny_vit(attn_implementation="eager")), Round(ROWS // CLIENTS, 4)
    warm, usual = (2 * model.costs(make_method(name), 2, plan)[0].server_flops / 1e9 for name in ("vanilla", "coef_j"))
    mib = Budget(speed=1.0).of(cell).mib
    open_run, counted = (cell.runs[0.1, seed].id for seed in (0, 1))
    summary = {"mib": mib / 2, "num_rounds": 6, "curve": [{"round": 1, "mib": 1.0}, {"round": 4, "mib": 2.0}]}
    found, notes = with_server_work([cell], {open_run: summary, counted: summary | {"server_gflops": 7.0}})
    assert found[open_run]["server_gflops"] == pytest.approx((2 * warm + 4 * usual) / 2)
    works = [point["server_gflops"] for point in found[open_run]["curve"]]
    assert works == pytest.approx([warm / 2, (2 * warm + 2 * usual) / 2])
    assert found[counted]["server_gflops"] == 7.0 and found[counted]["curve"] == summary["curve"] and not notes
    (lost,) = expand(parse_spec(spec(folder / "nowhere", ["coef_j"]), "test"))
    found, notes = with_server_work([lost], {lost.first()[0].id: summary})
    assert "server_gflops" not in found[lost.first()[0].id] and len(notes) == 1


@pytest.mark.parametrize("more", [[], ["--dry_run"]])
def test_the_servers_work_is_for_a_report(more: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["compare", "digits", "--server_work", *more])
    assert "--server_work needs --report_only" in capsys.readouterr().err
