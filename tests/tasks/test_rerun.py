"""The same command twice, another one on the same folder, and one that goes on: what a recipe says is true."""

import json
from pathlib import Path

import pytest

from hf_coefsfl.tasks.run import run
from tests.support.posts import make_posts, small


def files(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Return the files of a run, with the time of their last change."""
    found = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes()) for path in found}


def test_what_a_second_command_does_with_a_finished_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    options = make_posts(tmp_path) | {"num_rounds": "2", "save_steps": "1", "eval_steps": "1"}
    out = Path(options["output_dir"])
    run("newsgroups", argv=small(options))
    said, before = capsys.readouterr().out.splitlines()[-2:], files(out)

    def refused(**changes: str) -> str:
        with pytest.raises(SystemExit) as left:
            run("newsgroups", argv=small(options | changes))
        assert left.value.code == 2 and files(out) == before
        return capsys.readouterr().err

    assert "out holds a run already (checkpoint-2; coef_w, 2 rounds)" in refused()
    vanilla = refused(method="vanilla", resume_from_checkpoint="last")
    assert "checkpoint-2 is of a run with other settings" in vanilla and "\n  method: coef_w, now vanilla\n" in vanilla
    shorter = refused(max_length="3", resume_from_checkpoint="last")
    assert "\n  training data: " in shorter and "\n  evaluation data: " in shorter

    # With the same settings it says that it has finished, and what came out.
    run("newsgroups", argv=small(options | {"resume_from_checkpoint": "last"}))
    assert capsys.readouterr().out.splitlines()[-2:] == said and files(out) == before
    assert "checkpoint-2 is already at round 2 of 2" in caplog.text

    run("newsgroups", argv=small(options | {"resume_from_checkpoint": "last", "num_rounds": "3"}))
    summary = json.loads((out / "summary.json").read_text())
    assert summary["num_rounds"] == 3 and [point["round"] for point in summary["curve"]] == [1, 2, 3]

    run("newsgroups", argv=small(options | {"overwrite_output_dir": "true", "method": "vanilla", "num_rounds": "1"}))
    summary = json.loads((out / "summary.json").read_text())
    assert summary["method"] == "vanilla" and [path.name for path in out.glob("checkpoint-*")] == ["checkpoint-1"]
    assert json.loads((out / "run.json").read_text())["decides"]["method"] == "vanilla"
    assert "## Method: Vanilla SFL" in (out / "README.md").read_text()
