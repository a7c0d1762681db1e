"""What the command line answers before a command runs: quickly, and with the name that was meant."""

import ast
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import TrainingArguments

from hf_coefsfl import SplitFedConfig, __version__
from hf_coefsfl.cli import COMMANDS, command_parser, main
from hf_coefsfl.cli.known_options import check_options, options_of_command, options_of_training
from tests.support.paths import ROOT

SECONDS = 0.5  # of the processor


def start(*arguments: str) -> tuple[subprocess.CompletedProcess[str], float]:
    """Run the command in a fresh process; return what it said and the seconds that it computed."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "hf_coefsfl", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=120)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return done, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        ([], 0, "fine-tune a model on one of the tasks"),
        (["--help"], 0, "fine-tune a model on one of the tasks"),
        (["--version"], 0, f"coefsfl {__version__}"),
        (["trian", "mnli"], 2, "unknown command 'trian'. Did you mean train? Choose from compare, cost"),
        (["--verison"], 2, "unrecognized arguments: --verison. Did you mean --version?"),
        (["cost", "--modle", "vit-tiny"], 2, "unrecognized arguments: --modle. Did you mean --model?"),
        (["train"], 2, "required: task"),
        (["train", "--help"], 0, "one of text_classification, token_classification"),
        (["train", "mnil"], 2, "unknown task 'mnil'. Did you mean mnli? Choose from text_classification"),
        (
            ["train", "mnli", "--lerning-rate", "1"],
            2,
            "unrecognized arguments: --lerning-rate. Did you mean --learning_",
        ),
        (["train", "--lerning_rate", "1"], 2, "unrecognized arguments: --lerning_rate. Did you mean --learning_rate?"),
        (["train", "--seed", "1"], 2, "the task comes before its options: coefsfl train TASK --seed"),
        (["split", "squad_v2", "--strid", "3"], 2, "unrecognized arguments: --strid. Did you mean --stride?"),
        (["compare", "x.yaml", "--dry-rn"], 2, "unrecognized arguments: --dry-rn. Did you mean --dry_run?"),
    ],
)
def test_answers_without_pytorch(arguments: list[str], status: int, said: str) -> None:
    done, seconds = start(*arguments)
    assert done.returncode == status and seconds < SECONDS
    assert said in (done.stderr if status else done.stdout)
    assert len(done.stderr.splitlines()) == (1 if status else 0)


def test_summaries_are_those_of_the_modules() -> None:
    folder = ROOT / "hf_coefsfl" / "cli"
    modules = {path.stem.removesuffix("_command"): path for path in folder.glob("*_command.py")}
    assert COMMANDS.keys() == modules.keys()
    for name, path in modules.items():
        text = ast.get_docstring(ast.parse(path.read_text())) or ""
        assert text.splitlines()[0] == f"`coefsfl {name}`: {COMMANDS[name]}."


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_has_both_spellings_and_the_help_shows_one(name: str) -> None:
    _, parser = command_parser(name)
    options = [text for action in parser._actions for text in action.option_strings if text.startswith("--")]
    text = parser.format_help().partition(parser.epilog or "none")[0]
    known = options_of_command(name)
    for option in {option.replace("-", "_")[2:] for option in options}:
        assert option in known
        for spelling in (option, option.replace("_", "-")):
            assert f"--{spelling}" in parser._option_string_actions
            check_options([f"--{spelling}=1"], known)
        if "_" in option:
            assert f"--{option}" in text and f"--{option.replace('_', '-')} " not in text


def test_fields_are_read_off_the_source() -> None:
    assert options_of_training() == {*SplitFedConfig.__dataclass_fields__} >= {*TrainingArguments.__dataclass_fields__}


def test_hyphens_reach_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for option in ("--output-dir", "--output_dir"):
        with pytest.raises(SystemExit) as left:
            main(["compare", str(tmp_path / "no.yaml"), option, str(tmp_path), "--dry-run"])
        assert left.value.code == 2 and "no.yaml' cannot be read" in capsys.readouterr().err


def test_methods_fit_100_columns(capsys: pytest.CaptureFixture[str]) -> None:
    main(["methods"])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100 and sum("fsl_sage" in line for line in lines) == 1
    with pytest.raises(SystemExit):
        main(["methods", "coef_jj"])
    assert "Unknown method 'coef_jj'. Did you mean coef_j" in capsys.readouterr().err


def test_env_is_a_markdown_list_without_tokens(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert main(["env"]) == 0
    text = capsys.readouterr().out
    assert all(line.startswith("- ") for line in text.splitlines())
    for name in ("hf_coefsfl: ", "Python: 3.", "torch: 2.", "transformers: 5.", "CPU: ", "memory: ", "devices: "):
        assert f"- {name}" in text
    assert "`HF_HOME=" in text and "hf_secret" not in text and "HF_TOKEN" not in text
    assert "- bfloat16 on the CPU: not tried yet" in text  # and it is not tried here
    assert not list(tmp_path.rglob("bfloat16*"))


def test_interrupted_commands_leave_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from hf_coefsfl.cli import methods_command

    def interrupt(arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(methods_command, "run", interrupt)
    assert main(["methods"]) == 130
    assert capsys.readouterr().err.strip() == "coefsfl methods: stopped."
