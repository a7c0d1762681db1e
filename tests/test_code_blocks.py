"""Every code block of the README and of docs/ is run, small and offline, or says here why it is not."""

from __future__ import annotations

import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from accelerate.commands.launch import launch_command_parser

from hf_coefsfl import METHODS, SplitFedTrainer
from hf_coefsfl.cli import main
from tests.support.pages import (
    DECODER,
    IMAGES,
    PAGES,
    TEXTS,
    blocks,
    commands,
    languages,
    names_of_a_reader,
    small_world,
)
from tests.support.paths import ROOT
from tests.support.quantised import need_bitsandbytes
from tests.support.selection import slow_except

# Commands that are not run here, by how they begin.
NOT_RUN = {
    "pip install": "installs; tests/test_release.py does, with a wheel",
    "apt-get install": "installs",
    "python -m tests.support.accelerator.mutants": "takes minutes; tests/test_accelerator.py looks at its list",
    "hf auth": "asks for a token of the Hub",
    "export": "a variable of the shell",
    "kill": "ends a job of the shell",
    "python benchmarks/when_it_pays.py": "reads hours of runs",
    "python benchmarks/smollm2.py": "needs packages of PyPI; tests/tasks/test_conversations.py has its questions",
    "python recipes/flower/example.py": "tests/flower/test_network.py runs it",
    "python -m hf_coefsfl.flower.supernode": "a process that waits; tests/flower/test_network.py runs it",
    "coefsfl cost --model llama-3-8b": "takes minutes; tests/analysis/test_large.py has a small one",
    "coefsfl cost --model folder/": "the same, of a folder",
    "coefsfl split": "tests/flower/test_network.py runs it",
    "flower-superlink": "a process that waits; tests/flower/test_network.py runs it, with TLS too",
    "flwr": "needs a SuperLink; tests/flower/test_network.py runs it",
    "ssh-keygen": "tests/flower/test_network.py makes such a key",
}
NOT_HERE = "recipes/your_script.py"  # stands for a script of the reader
PYTHON_PAGES = [page for page in PAGES if blocks(page, "python")]
QUANTISED = "docs/quantized.md"
SHELL_PAGES = [page for page in PAGES if commands(page)]
TINY = ["--num_rounds", "2", "--warmup_rounds", "1", "--per_device_train_batch_size", "4", "--use_cpu", "true"]
MODELS = {"causal_lm": DECODER, "image_classification": IMAGES}  # of the other tasks: TEXTS


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    small_world(tmp_path)
    shutil.copytree(ROOT / "recipes", tmp_path / "recipes", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def reason(words: list[str]) -> str | None:
    return next((why for start, why in NOT_RUN.items() if words[: len(start.split())] == start.split()), None)


def test_each_block_has_a_language_and_each_command_a_runner() -> None:
    assert not {page for page in PAGES if not languages(page) <= {"bash", "python", "text", "yaml"}}
    found = [words for page in PAGES for words in commands(page)]
    unknown = [words for words in found if words[0] not in RUNNERS and reason(words) is None]
    assert not unknown
    idle = [start for start in NOT_RUN if not any(words[: len(start.split())] == start.split() for words in found)]
    assert not idle


@pytest.mark.parametrize("page", slow_except("docs/cut.md", of=PYTHON_PAGES))
def test_python(page: str, world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of a page run one after the other in one namespace. Rounds and clients are fewer."""
    if page == QUANTISED:
        need_bitsandbytes()
    pushed: list[str] = []
    monkeypatch.setattr(SplitFedTrainer, "push_to_hub", lambda trainer: pushed.append(trainer.args.output_dir))
    if page == "docs/hub.md":  # what it downloads
        exec(shrunk(blocks("README.md", "python")[0]).replace('"out"', '"me/mnli-coefw"'), names_of_a_reader())
    known, namespace = set(METHODS), names_of_a_reader() | {"__name__": "page"}
    code = blocks(page, "python")
    try:
        for block in code:
            exec(compile(shrunk(block), page, "exec", dont_inherit=True), namespace)
    finally:
        for name in METHODS.keys() - known:  # the one of adding_a_method.md
            METHODS.pop(name)
    if "trainer.save_model()" in "".join(code):
        saved = re.findall(r'output_dir="(\w+)"', "".join(code))[0]
        assert (world / saved / "adapter_model.safetensors").is_file()
        assert pushed == ([saved] if "push_to_hub()" in "".join(code) else [])


def shrunk(code: str) -> str:
    return re.sub(r"num_clients=\d+", "num_clients=4", re.sub(r"num_rounds=\d+", "num_rounds=2", code))


@pytest.mark.parametrize("page", slow_except("docs/paper.md", "docs/results.md", "docs/testing.md", of=SHELL_PAGES))
def test_commands(page: str, world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if page == QUANTISED:
        need_bitsandbytes()
    for number, words in enumerate(commands(page)):
        if reason(words) is None and NOT_HERE not in words:
            RUNNERS[words[0]](words[1:], f"out{number}")
            capsys.readouterr()


def run_coefsfl(words: list[str], output: str) -> None:
    command, *rest = words or ["--help"]
    if "--help" in (command, *rest):
        with pytest.raises(SystemExit) as left:
            main(words)
        assert left.value.code == 0
        return
    if words == ["train"]:  # the page says so
        with pytest.raises(SystemExit):
            main(words)
        return
    if command == "train":
        rest = trained_small(rest[0], rest, output)
    elif command == "compare":  # the spec is read and checked, and so are the options
        rest = [word for word in rest if word not in ("--dry_run", "--report_only")] + ["--dry_run"]
        if "--device_speed" in rest:  # counts the operations of every model; tests/compare has the figures
            rest = ["digits", *rest[1:]]
    elif command == "cost":
        some = [] if "--methods" in rest else ["--methods", "vanilla", "coef_j"]  # tests/cli has all of them
        rest = [*rest, *some, "--model", IMAGES, "--num-samples", "8", "--batch-size", "4"]
    assert main([command, *rest]) == 0


def trained_small(task: str, words: list[str], output: str) -> list[str]:
    clients = [] if "--partition" in words else ["--num_clients", "4"]
    data = [] if "--dataset_name" in words else ["--dataset_name", "pairs"]
    return [*words, *TINY, *clients, *data, "--model_name_or_path", MODELS.get(task, TEXTS), "--output_dir", output]


def run_accelerate(words: list[str], output: str) -> None:
    """Accelerate's own options and config are read by its parser; the script runs in this process."""
    assert words[0] == "launch"
    launched = launch_command_parser().parse_args(words[1:])
    script, options = launched.training_script, launched.training_script_args
    assert launched.config_file is None or Path(launched.config_file).is_file()
    task = re.findall(r'run\("(\w+)"', Path(script).read_text())[0]
    options = (
        options[: options.index("--push_to_hub")] if "--push_to_hub" in options else options
    )  # tests/trainer/test_hub.py
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [script, *trained_small(task, options, output)])
        runpy.run_path(script, run_name="__main__")
    assert (Path(output) / "adapter_model.safetensors").is_file()


def run_make(words: list[str], output: str) -> None:
    """The target exists and its command can be formed; the tests of the targets are elsewhere."""
    done = subprocess.run(["make", "--dry-run", *words], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout, done.stderr


def run_ci(words: list[str], output: str) -> None:
    subprocess.run(["bash", "-n", ROOT / ".ci" / "run"], check=True)


RUNNERS = {"coefsfl": run_coefsfl, "accelerate": run_accelerate, "make": run_make, ".ci/run": run_ci}
