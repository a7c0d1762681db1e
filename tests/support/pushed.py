"""Runs that push to a local Hub over HTTP, for `tests/trainer/test_hub.py` to start: results go to result.json."""

# ruff: noqa: E402 - huggingface_hub reads the environment when it is imported

import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.support.local_hub import ORGANISATION, TOKEN, LocalHub

folder = Path(sys.argv[1])
hub = LocalHub()
os.environ |= {"HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
os.environ |= {"HF_HUB_OFFLINE": "0", "HF_HOME": str(folder / "home")}
os.environ.pop("HF_TOKEN", None)

import huggingface_hub
import torch
import transformers
from peft import PeftModel

from hf_coefsfl import SplitFedTrainer, load_adapter, load_client, load_server, split_model
from hf_coefsfl.trainer.hub import UploadError
from tests.support.federated import images, tiny_vit, trainer

torch.set_num_threads(1)
transformers.logging.set_verbosity_debug()  # whatever is logged must be free of the token
huggingface_hub.logging.set_verbosity_debug()
slept: list[float] = []
time.sleep = slept.append  # type: ignore[assignment]
pixels = torch.stack([row["pixel_values"] for row in images(4, seed=3)])
run_id = iter(range(100))


def new(**changes: Any) -> SplitFedTrainer:
    name = changes.pop("name", f"run{next(run_id)}")
    return trainer(folder / name, **{"num_rounds": 2, "hub_token": TOKEN} | changes)


def logits(model: Any) -> list[Any]:
    model.eval()
    with torch.no_grad():
        return model(pixel_values=pixels).logits.tolist()


def split_logits(client: Any, server: Any) -> list[Any]:
    with torch.no_grad():
        return server.eval()(client.eval()(pixel_values=pixels).detach()).logits.tolist()


def downloads() -> list[str]:
    """Which safetensors were fetched since the log was cleared; clears it."""
    found = [
        r.split("/resolve/")[1].split("/", 1)[1] for r in hub.requests if r.startswith("GET ") and "/resolve/" in r
    ]
    hub.requests.clear()
    return sorted(path for path in found if path.endswith(".safetensors"))


def message(action: Any, kind: type[Exception] = UploadError) -> str:
    try:
        action()
    except kind as error:
        return str(error)
    return "nothing was raised"


def during_training() -> dict[str, Any]:
    """Private, LFS, in an organisation; a push at every save, then one at the end."""
    repo = f"{ORGANISATION}/run-lfs"
    run = new(
        name="whole", push_to_hub=True, hub_model_id=repo, hub_private_repo=True, save_strategy="steps", save_steps=1,
        hub_always_push=True, eval_strategy="steps", eval_steps=1, staleness_probe=1, report_to="none",
    )  # fmt: skip
    (folder / "whole" / ".env").write_text("secret")
    (folder / "whole" / "old.pkl").write_text("pickle")
    run.train()
    trees = [sorted(tree) for tree in hub.repos[repo].commits.values()][1:]
    run.push_to_hub(dataset="stripes")
    expected = logits(run.model)
    base = tiny_vit()
    hub.requests.clear()
    result = {
        "expected": expected,
        "messages": hub.repos[repo].messages,
        "private": hub.repos[repo].private,
        "trees": trees,
        "final": sorted(hub.files(repo)),
        "lfs": sorted(path for path, file in hub.files(repo).items() if file.lfs),
        "card": hub.files(repo)["README.md"].data.decode(),
        "arguments": json.loads(hub.files(repo)["training_args.json"].data),
        "without_token": message(lambda: load_adapter(split_model(tiny_vit(), 2).client, repo), ValueError),
    }
    split = split_model(base, 2)
    hub.requests.clear()
    load_adapter(split.client, repo, token=TOKEN)
    result["client_downloads"] = downloads()
    load_adapter(split.server, repo, token=TOKEN)
    result["server_downloads"] = downloads()
    result["split"] = split_logits(split.client, split.server)
    result["peft"] = logits(PeftModel.from_pretrained(tiny_vit(), repo, token=TOKEN))
    return result


def at_the_end() -> dict[str, Any]:
    """Public, inline, full fine-tuning, a branch; the token from the environment."""
    os.environ["HF_TOKEN"] = TOKEN
    run = new(name="full", full_finetuning=True, hub_token=None)
    run.train()
    run.push_to_hub(revision="trial", license="mit")
    repo = run.hub_model_id
    os.environ.pop("HF_TOKEN")
    hub.requests.clear()
    client = load_client(repo, revision="trial")
    fetched = downloads()
    return {
        "repo": repo,
        "private": hub.repos[repo].private,
        "main": sorted(hub.files(repo)),
        "branch": sorted(hub.files(repo, "trial")),
        "card": hub.files(repo, "trial")["README.md"].data.decode(),
        "client_downloads": fetched,
        "expected": logits(run.model),
        "split": split_logits(client, load_server(repo, "trial")),
        "no_such_branch": message(lambda: load_client(repo, revision="none"), ValueError),
        "main_is_empty": message(lambda: load_client(repo), ValueError),
    }


def refused() -> dict[str, Any]:
    """No token, a wrong one, a foreign namespace: before any training, with the model untouched."""
    hub.requests.clear()
    model = tiny_vit()
    missing = message(lambda: new(model=model, push_to_hub=True, hub_token=None), ValueError)
    asked = list(hub.requests)
    wrong = message(lambda: new(push_to_hub=True, hub_token="hf_wrong"), ValueError)
    foreign = message(lambda: new(push_to_hub=True, hub_model_id="stranger/run"), ValueError)
    run = new(name="unsaved", hub_token=None)
    late = message(run.push_to_hub)
    return {
        "missing": missing, "requests": asked, "untouched": not any("lora" in n for n, _ in model.named_modules()),
        "wrong": wrong, "foreign": foreign, "late": late,
        "saved": sorted(p.name for p in (folder / "unsaved").iterdir()), "slept": list(slept),
    }  # fmt: skip


def failing() -> dict[str, Any]:
    """Uploads that fail once, twice in different ways, for good, and for lack of rights."""
    result: dict[str, Any] = {}
    run = new(name="flaky")
    run.train()
    for name, failures in {
        "once": [(503, 1)], "dropped": [(None, 1)], "busy": [(429, 1), (500, 1)],
    }.items():  # fmt: skip
        slept.clear()
        hub.failures.clear()
        for status, times in failures:
            hub.fail("POST .*/commit/", status, times)
        (folder / "flaky" / "notes.txt").write_text(name)  # without a change there is no commit
        info = run.push_to_hub(commit_message=name)
        result[name] = {"slept": list(slept), "pushed": info.oid == hub.repos["tester/flaky"].branches["main"]}
    slept.clear()
    hub.fail("POST .*/commit/", 403, 1)
    (folder / "flaky" / "notes.txt").write_text("forbidden")
    result["forbidden"] = {"message": message(run.push_to_hub), "slept": list(slept)}

    hub.failures.clear()
    hub.fail("POST .*/commit/", 500, body=f"echo: {TOKEN}")
    slept.clear()
    run = new(name="broken", push_to_hub=True, save_strategy="steps", save_steps=2, hub_revision="trial")
    result["rounds"] = run.train().global_step  # pushes in the background, in vain
    result["background"] = [repr(job.exception()) for job in run.push_in_progress.jobs]
    run.save_model()  # logs, and does not raise
    result["slept"] = list(slept)
    text = message(run.push_to_hub)
    result["message"] = text
    result["kept"] = sorted(
        str(p.relative_to(folder / "broken")) for p in (folder / "broken").rglob("*") if p.is_file()
    )
    result["committed"] = list(hub.repos["tester/broken"].messages)
    hub.failures.clear()
    command = shlex.split(text.splitlines()[-1])
    command[0] = str(Path(sys.executable).with_name("hf"))
    done = subprocess.run(command, env={**os.environ, "HF_TOKEN": TOKEN}, capture_output=True, text=True)
    result["command"] = {"code": done.returncode, "error": done.stderr[-2000:] if done.returncode else ""}
    result["by_command"] = sorted(hub.files("tester/broken", "trial"))
    return result


with hub:
    result = {f.__name__: f() for f in (during_training, at_the_end, refused, failing)}
(folder / "result.json").write_text(json.dumps(result))
