"""Pushing and loading over HTTP, on a Hub of this machine; `pushed.py` does it, in a process of its own."""

import json
import logging
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hf_coefsfl import load_adapter, load_client, split_model
from hf_coefsfl.trainer.hub import NOT_UPLOADED, Upload, describe
from hf_coefsfl.trainer.model_card import CardArguments
from tests.support.federated import config, tiny_vit, trainer
from tests.support.local_hub import TOKEN
from tests.support.paths import LIGHT, SUPPORT

ADAPTER = {"adapter_config.json", "adapter_model.safetensors"}
PUSHED = {
    *("README.md", "communication.json", "training_args.json"),
    *(f"{side}{name}" for side in ("", "client/", "server/") for name in ADAPTER),
    *("client/config.json", "server/config.json"),  # the names of the classes
}


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("pushed")
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": LIGHT}
    ended = subprocess.run([sys.executable, SUPPORT / "pushed.py", folder], env=env, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr[-3000:]
    result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return result | {"folder": folder, "output": ended.stdout + ended.stderr}


def test_every_save_pushes_what_the_end_pushes(done: dict[str, Any]) -> None:
    run = done["during_training"]
    extra = {"curves.png", "staleness.json", "staleness.png"}
    assert run["messages"] == ["Training in progress, round 1", "Training in progress, round 2", "End of training"]
    assert set(run["final"]) == set(run["trees"][1]) == PUSHED | extra
    assert set(run["trees"][0]) == PUSHED | {"curves.png"}  # round 1 is the warm-up: no gradient is stale
    assert set(run["lfs"]) == {path for path in run["final"] if path.endswith((".safetensors", ".png"))}
    assert "trained on stripes." in run["card"] and '"laboratory/run-lfs"' in run["card"]


def test_a_private_repo_needs_the_token(done: dict[str, Any]) -> None:
    run = done["during_training"]
    assert run["private"] is True and done["at_the_end"]["private"] is False
    assert "is not a folder here, and as a repo of the Hub it cannot be read" in run["without_token"]


def test_the_adapter_loads_by_its_id(done: dict[str, Any]) -> None:
    """By plain PEFT, and each half by ours, which fetches nothing of the other's."""
    run = done["during_training"]
    assert run["peft"] == run["split"] == run["expected"]
    assert run["client_downloads"] == ["client/adapter_model.safetensors"]
    assert run["server_downloads"] == ["server/adapter_model.safetensors"]


def test_full_finetuning_on_a_branch(done: dict[str, Any]) -> None:
    run = done["at_the_end"]
    assert run["repo"] == "tester/full" and run["main"] == []
    halves = {f"{side}/{name}" for side in ("client", "server") for name in ("split.json", "config.json")}
    weights = {f"{side}model.safetensors" for side in ("", "client/", "server/")}
    other = {"README.md", "config.json", "communication.json", "training_args.json"}
    assert set(run["branch"]) == halves | weights | other
    assert run["split"] == run["expected"]
    assert run["client_downloads"] == ["client/model.safetensors"]
    assert 'load_client("tester/full", revision="trial")' in run["card"] and "license: mit" in run["card"]
    assert "Revision Not Found" in run["no_such_branch"]
    assert "tester/full holds no split.json, neither itself nor in client/" in run["main_is_empty"]


def test_refused_before_training(done: dict[str, Any]) -> None:
    refused = done["refused"]
    assert "`hf auth login`, set HF_TOKEN" in refused["missing"] and refused["requests"] == []
    assert refused["untouched"], "the model must be free for another try"
    assert "401" in refused["wrong"] and "403" in refused["foreign"] and "'stranger'" in refused["foreign"]
    assert refused["slept"] == [], "what will not pass is not repeated"


def test_a_late_push_without_a_token_has_saved_everything(done: dict[str, Any]) -> None:
    assert "hf auth login" in done["refused"]["late"] and "hf upload unsaved " in done["refused"]["late"]
    assert {"README.md", "adapter_model.safetensors", "client", "server"} <= set(done["refused"]["saved"])


@pytest.mark.parametrize(("failure", "pauses"), [("once", [5]), ("dropped", [5]), ("busy", [5, 30])])
def test_a_failure_that_passes(done: dict[str, Any], failure: str, pauses: list[int]) -> None:
    assert done["failing"][failure] == {"slept": pauses, "pushed": True}


def test_a_failure_that_stays(done: dict[str, Any]) -> None:
    """Training goes on, saving goes on, and the printed command uploads what the push would have."""
    failing = done["failing"]
    assert failing["forbidden"]["slept"] == [] and "403" in failing["forbidden"]["message"]
    assert failing["rounds"] == 2 and failing["slept"] == [5, 30] * 2  # one push in the background, one by save_model
    assert len(failing["background"]) == 1 and failing["background"][0].startswith("UploadError(")
    assert failing["committed"] == [] and set(failing["kept"]) >= PUSHED
    assert not any(path.startswith("_upload") for path in failing["kept"])
    assert done["output"].count("The upload to tester/broken failed") == 2
    assert "echo: <TOKEN>" in failing["message"]
    command = failing["message"].splitlines()[-1]
    assert shlex.split(command)[:3] == ["hf", "upload", "tester/broken"] and "--revision trial" in command
    assert failing["command"] == {"code": 0, "error": ""}
    assert set(failing["by_command"]) == PUSHED


def test_no_file_and_no_log_has_the_token(done: dict[str, Any]) -> None:
    files = [path for path in done["folder"].rglob("*") if path.is_file()]
    assert len(files) > 50 and not [path for path in files if TOKEN.encode() in path.read_bytes()]
    assert "authenticated: True" in done["output"] and TOKEN not in done["output"]
    assert done["during_training"]["arguments"]["hub_token"] == "<HUB_TOKEN>"


def test_no_text_of_a_config_has_the_token(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    args = config(tmp_path, hub_token="hf_secret")
    logging.getLogger("a user's").warning("%s %r", args, args)
    texts = [repr(args), str(args), f"{args}", args.to_json_string(), str(args.to_dict()), caplog.text]
    assert not [text for text in texts if "hf_secret" in text] and "hub_token=<HUB_TOKEN>" in repr(args)
    assert "method=coef_j" in repr(args) and args.hub_token == "hf_secret"


@pytest.mark.parametrize("strategy", ["checkpoint", "all_checkpoints", "never"])
def test_checkpoints_are_not_pushed(tmp_path: Path, strategy: str) -> None:
    with pytest.raises(ValueError, match=rf"hub_strategy='{strategy}' is not allowed.*: end, every_save\. .*pickles"):
        config(tmp_path, hub_strategy=strategy)
    assert config(tmp_path).hub_strategy == "every_save"


@pytest.mark.parametrize(
    "path",
    [
        *("training_args.bin", "client/optimizer.pt", "rng_state.pth", "a/b.pkl", "checkpoint-3/README.md", ".env"),
        *("method_state.safetensors", "runs/host/events.out.tfevents.1.host", "_upload-x/README.md"),
    ],
)
def test_what_stays_at_home(path: str) -> None:
    from huggingface_hub.utils import filter_repo_objects

    assert not list(filter_repo_objects([path], ignore_patterns=list(NOT_UPLOADED)))


@pytest.mark.parametrize("known_as", [None, "someone/base"])
def test_no_path_of_the_base_model_is_uploaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, known_as: str | None
) -> None:
    """What is uploaded names it; the local folder keeps the path, by which it loads."""
    tiny_vit().save_pretrained(tmp_path / "base")
    run = trainer(tmp_path / "run", type(tiny_vit()).from_pretrained(tmp_path / "base"))
    run.save_model()
    path, name = str(tmp_path / "base"), known_as or "base"
    (tmp_path / "run" / "summary.json").write_text(json.dumps({"base": {"name_or_path": path}}))
    run.card_arguments = CardArguments(finetuned_from=known_as)
    uploaded: dict[str, str] = {}

    def upload_folder(folder_path: str, **kwargs: Any) -> None:
        files = [file for file in Path(folder_path).rglob("*") if file.suffix in (".json", ".md")]
        uploaded.update({file.relative_to(folder_path).as_posix(): file.read_text() for file in files})

    monkeypatch.setattr("hf_coefsfl.trainer.hub._API.upload_folder", upload_folder)
    Upload.of(run, "test").run()
    configs = [file for file in uploaded if file.endswith("adapter_config.json")]
    assert len(configs) == 3 and not [file for file, text in uploaded.items() if path in text]
    assert {json.loads(uploaded[file])["base_model_name_or_path"] for file in configs} == {name}
    assert json.loads(uploaded["summary.json"])["base"]["name_or_path"] == name
    local = json.loads((tmp_path / "run" / "adapter_config.json").read_text())
    assert local["base_model_name_or_path"] == path and not list((tmp_path / "run").glob("_upload-*"))


def test_errors_show_no_signed_address() -> None:
    error = ValueError("503 for url 'https://store/x?X-Signature=abc&y=1' with hf_secret.")
    assert describe(error, "hf_secret") == "ValueError: 503 for url 'https://store/x?...' with <TOKEN>."


def test_a_whole_folder_serves_both_halves(tmp_path: Path) -> None:
    run = trainer(tmp_path / "run", num_rounds=1)
    run.save_model()
    split = split_model(tiny_vit(), 2)
    for half in (split.client, split.server):
        load_adapter(half, tmp_path / "run")
        names = [name for name, _ in half.model.named_parameters() if "lora_A" in name]
        assert {int(name.split(".layers.")[1][0]) // 2 for name in names} == {half.side == "server"}
    with pytest.raises(ValueError, match=r"holds no split\.json.* It holds an adapter: split the base model"):
        load_client(tmp_path / "run" / "client")
    with pytest.raises(ValueError, match="There is no folder"):
        load_client(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match=re.escape("'no/such' is not a folder here, and as a repo")):
        load_client("no/such")
