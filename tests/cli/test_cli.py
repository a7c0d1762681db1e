"""The `coefsfl` command."""

from __future__ import annotations

import csv
import io
import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AlbertConfig, T5Config

from hf_coefsfl import METHODS, __version__
from hf_coefsfl.cli import main
from hf_coefsfl.cli.units import parse_bandwidth, parse_latency
from tests.support.federated import tiny_vit

KEYS = {
    "method", "transfers", "up_mib", "down_mib", "extra_up_mib", "extra_down_mib", "client_gflops", "server_gflops",
}  # fmt: skip
FEWER = {"hutchinson": {"num_probes": 1}, "ggn": {"rank": 1, "num_iterations": 2}, "fsl_sage": {"align_epochs": 1}}
FEWER_PASSES = ["--method-kwargs", json.dumps(FEWER)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model")
    tiny_vit().save_pretrained(path)
    return str(path)


def output(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(arguments) == 0
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as left:
        main(arguments)
    captured = capsys.readouterr()
    assert left.value.code == 2
    assert captured.out == ""
    last = captured.err.splitlines()[-1]
    assert last.startswith("coefsfl")
    return last


def test_json_has_a_row_for_every_method(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--num-samples", "10", "--batch-size", "4", *FEWER_PASSES]
    text = output(capsys, "cost", "--model", folder, *sizes, "--format", "json")
    rows: list[dict[str, Any]] = json.loads(text)
    assert {row["method"] for row in rows} == {*METHODS, "fsl_sage (alignment)"}
    assert all(row.keys() >= KEYS for row in rows)
    vanilla = next(row for row in rows if row["method"] == "vanilla")
    assert vanilla["transfers"] == 6
    assert vanilla["up_mib"] == pytest.approx(10 * 5 * 16 * 4 / 2**20)


def test_the_file_of_a_config_is_a_model_too(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    rest = ["--methods", "vanilla", "--num-samples", "8"]
    file = str(Path(folder) / "config.json")
    assert output(capsys, "cost", "--model", file, *rest) == output(capsys, "cost", "--model", folder, *rest)


def test_csv_sweeps_the_cut(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = output(capsys, "cost", "--model", folder, "--methods", "reuse", "--cut", "all", "--format", "csv")
    rows = list(csv.DictReader(io.StringIO(text)))
    assert [row["cut"] for row in rows] == ["1", "2", "3"]
    client = [float(row["client_gflops"]) for row in rows]
    assert client == sorted(client) and client[0] < client[-1]


def test_tables_and_time(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["cost", "--model", folder, "--methods", "vanilla", "mu_splitfed", "--num-samples", "8"]
    lines = output(capsys, *command).splitlines()
    assert lines[0].split(" | ")[0].strip() == "method" and len(lines) == 4
    assert "0.000004" in lines[3]  # four bytes are not nothing
    network = ["--bandwidth", "8kbps", "--latency", "500ms"]
    assert output(capsys, *command, *network, "--format", "markdown").startswith("| method")
    row = json.loads(output(capsys, *command, *network, "--format", "json"))[0]
    mib = row["up_mib"] + row["down_mib"] + row["extra_up_mib"] + row["extra_down_mib"]
    assert row["seconds"] == pytest.approx(mib * 2**20 * 8 / 8000 + 2 * 0.5)


def test_several_connections_and_devices(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["cost", "--model", folder, "--methods", "reuse", "reuse:feedback_at=walk", "--num-samples", "8"]
    links = ["--bandwidth", "8kbps", "1Gbps", "--latency", "500ms", "1ms"]
    speeds = ["--client-speed", "1GFLOPS", "--server-speed", "1TFLOPS"]
    text = output(capsys, *command, *links, *speeds)
    assert "compute_seconds | seconds_8kbps | seconds_1Gbps" in text and "\nreuse, walk" in text
    initial, walk = json.loads(output(capsys, *command, *links, *speeds, "--format", "json"))
    assert walk["seconds_1Gbps"] < walk["seconds_8kbps"] and walk["server_gflops"] < initial["server_gflops"]


def test_options_of_methods(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["cost", "--model", folder, "--methods", "reuse", "coef_j", "--format", "json"]
    kwargs = ["--method-kwargs", '{"coef_j": {"num_projections": 3}}']
    reuse, coef_j = json.loads(output(capsys, *command, *kwargs))
    assert coef_j["down_mib"] == pytest.approx(4 * reuse["down_mib"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cut", "4"], "--cut must be from 1 to 3 for this model, got 4"),
        (["--cut", "half"], "--cut must be a number of blocks"),
        (["--bandwidth", "fast"], "'fast' is not a bandwidth"),
        (["--bandwidth", "0Mbps"], "must be above 0"),
        (["--bandwidth", "1Mbps", "--latency", "50"], "'50' is not a latency"),
        (["--latency", "50ms"], "--latency needs a --bandwidth"),
        (["--bandwidth", "1Mbps", "2Mbps", "--latency", "1ms", "2ms", "3ms"], "one for each --bandwidth (2), got 3"),
        (["--client-speed", "1GFLOPS"], "belong together"),
        (["--client-speed", "1GFLOPS", "--server-speed", "fast"], "'fast' is not a speed"),
        (["--methods", "reuse:walk"], "'reuse:walk' is not a method with options"),
        (["--methods", "reuse:feedback_at=end"], "must be one of initial, walk, final"),
        (["--methods", "magic"], "Unknown method 'magic'. Choose one of: vanilla"),
        (["--num-samples", "0"], "num samples must be at least 1"),
        (["--num-labels", "0"], "--num-labels must be at least 1"),
        (["--method-kwargs", "{"], "--method-kwargs is not JSON"),
        (["--methods", "ggn", "--method-kwargs", '{"ggn": {"rank": 0}}'], "rank=0"),
        (["--format", "xml"], "invalid choice"),
    ],
)
def test_bad_input(folder: str, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert message in refused(capsys, "cost", "--model", folder, *arguments)


def test_unknown_models(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = refused(capsys, "cost", "--model", "nobody/nothing")
    assert "Unknown model 'nobody/nothing'" in line and "vit-tiny" in line
    assert "holds no config.json" in refused(capsys, "cost", "--model", str(tmp_path))


def test_a_method_that_cannot_train_the_model_is_left_out(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["cost", "--model", folder, "--num-labels", "1", *FEWER_PASSES, "--format", "json"]
    assert main([*command]) == 0
    captured = capsys.readouterr()
    assert "gas" not in {row["method"] for row in json.loads(captured.out)}
    assert "gas at cut 2 is left out: GAS generates" in captured.err
    assert "GAS generates" in refused(capsys, *command, "--methods", "gas")


def test_models_that_nothing_can_train(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One error with exit code 2, not an empty table or one line for each method."""
    start = {"decoder_start_token_id": 0, "eos_token_id": 1}
    T5Config(vocab_size=40, d_model=16, d_ff=32, d_kv=8, num_layers=3, num_heads=2, **start).save_pretrained(
        tmp_path / "t5"
    )
    command = ["cost", "--model", str(tmp_path / "t5"), "--task", "sequence-classification", "--cut", "1"]
    assert "cannot be cut after block 1" in refused(capsys, *command)
    sizes = {"embedding_size": 8, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32}
    AlbertConfig(vocab_size=40, **sizes).save_pretrained(tmp_path / "albert")
    for cut in ("1", "all"):
        line = refused(
            capsys, "cost", "--model", str(tmp_path / "albert"), "--task", "sequence-classification", "--cut", cut
        )
        assert "block" in line


def test_methods_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    rows = {row["method"]: row for row in json.loads(output(capsys, "methods", "--format", "json"))}
    assert rows.keys() == METHODS.keys()
    assert rows["oracle"]["transfers"] == "2B + 1" and rows["oracle"]["up"] == "2N·d smashed data"
    assert rows["ggn"]["down"] == "N·d gradients + 4N·d curvature"
    assert rows["fsl_sage"]["transfers"] == "1 / alignment: 2"
    assert rows["coef_d"]["options"][-1] == {
        "name": "compensation_factor", "type": "float | None", "default": None,
        "note": "λ, strength of the correction; None: 3000 b/32 for b samples",
    }  # fmt: skip


def test_a_method_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    text = output(capsys, "methods", "coef_j")
    assert "(Section 3)" in text and "g̃ = g₀ + M P̂ δ" in text
    assert "num_projections: int = 1  R" in text
    assert "Choose one of: vanilla" in refused(capsys, "methods", "nope")


def test_units() -> None:
    assert parse_bandwidth("1.5 Gbps") == 1.5e9
    assert parse_latency("250us") == pytest.approx(2.5e-4)


def test_as_a_module(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["coefsfl", "--version"])
    with pytest.raises(SystemExit) as left:
        runpy.run_module("hf_coefsfl", run_name="__main__")
    assert left.value.code in (None, 0) and capsys.readouterr().out.strip() == f"coefsfl {__version__}"
