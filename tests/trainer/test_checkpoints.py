"""Checkpoints that survive being killed at any moment, and are seen through when they are broken."""

import errno
import itertools
import json
import logging
import os
import random
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from torch.nn.modules.module import register_module_forward_pre_hook

from hf_coefsfl.trainer.checkpoints import SEAL_NAME, fault, last_complete, seal
from tests.support.federated import rounds, trainer, weights

ROUNDS = 6


def options(**more: Any) -> dict[str, Any]:
    return {"num_rounds": ROUNDS, "save_strategy": "steps", "save_steps": 1, "save_total_limit": 2, **more}


WEIGHTS = "adapter_model.safetensors"


@pytest.fixture
def sealed(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint-7"
    (folder / "inner").mkdir(parents=True)
    (folder / WEIGHTS).write_bytes(b"0123456789")
    for name in ("trainer_state.json", "communication.json", "rng_state_0.pth", "rng_state_1.pth"):
        (folder / name).write_text(name)
    (folder / "inner" / "state").write_bytes(b"abc")
    seal(folder)
    return folder


def test_whole(sealed: Path) -> None:
    assert fault(sealed) is None and last_complete(sealed.parent) == str(sealed)
    named = sorted(json.loads((sealed / SEAL_NAME).read_text()))
    files = [path.relative_to(sealed).as_posix() for path in sealed.rglob("*") if path.is_file()]
    assert named == sorted(set(files) - {SEAL_NAME}) and "inner/state" in named


def test_an_adapter_of_another_name_has_a_folder_of_its_own(sealed: Path) -> None:
    (sealed / "site").mkdir()
    (sealed / WEIGHTS).rename(sealed / "site" / WEIGHTS)
    seal(sealed)
    assert fault(sealed) is None
    (sealed / "site" / WEIGHTS).write_bytes(b"012345678_")
    assert fault(sealed) == f"the content of site/{WEIGHTS} has changed"


def test_files_of_the_user_do_no_harm(sealed: Path) -> None:
    for name in ("notes.json", "old.safetensors", "inner/scores.json"):
        (sealed / name).write_text("mine")
    assert fault(sealed) is None
    (sealed / "scheduler.pt").write_text("not the run's")  # which a resume would read
    assert fault(sealed) == "its sealed.json does not name scheduler.pt"


def truncate(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes(b"0123")


def flip_a_bit(folder: Path) -> None:
    (folder / "inner" / "state").write_bytes(b"abb")


def lose_a_file(folder: Path) -> None:
    (folder / WEIGHTS).unlink()


def break_the_seal(folder: Path) -> None:
    (folder / SEAL_NAME).write_text("{")


def be_unreadable(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may read everything, so the disk is made to fail by hand."""
    opened = Path.open

    def failing(path: Path, *args: Any, **kwargs: Any) -> Any:
        if path == folder / "trainer_state.json":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return opened(path, *args, **kwargs)

    monkeypatch.setattr(Path, "open", failing)


def never_sealed(folder: Path) -> None:
    (folder / SEAL_NAME).unlink()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncate, "adapter_model.safetensors has 4 bytes instead of 10"),
        (flip_a_bit, "the content of inner/state has changed"),
        (lose_a_file, "adapter_model.safetensors is missing"),
        (break_the_seal, "its sealed.json cannot be read"),
        (be_unreadable, "trainer_state.json cannot be read"),
        (never_sealed, "its writing was interrupted"),
    ],
)
def test_broken(
    sealed: Path, damage: Callable[..., None], message: str, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    older = sealed.with_name("checkpoint-3")
    shutil.copytree(sealed, older)
    damage(sealed, *[monkeypatch] * (damage is be_unreadable))
    assert message in str(fault(sealed))
    with caplog.at_level(logging.WARNING):
        assert last_complete(sealed.parent) == str(older)
    assert str(sealed) in caplog.text and message in caplog.text  # named, with the reason


@pytest.mark.parametrize("content", ["[]", "null", "{}", "7", '"a"', "[" * 100_000, '{"a": null}', '{"a": {}}', "\0"])
def test_seals_that_are_none(sealed: Path, content: str) -> None:
    (sealed / SEAL_NAME).write_text(content)
    assert SEAL_NAME in str(fault(sealed)) and last_complete(sealed.parent) is None


def test_a_seal_names_every_file_that_is_needed(sealed: Path) -> None:
    whole = json.loads((sealed / SEAL_NAME).read_text())
    for name in set(whole) - {"inner/state"}:
        (sealed / SEAL_NAME).write_text(json.dumps({key: entry for key, entry in whole.items() if key != name}))
        assert f"does not name {name}" in str(fault(sealed))
    for lost, message in (("trainer_state.json", "does not name trainer_state.json"), (WEIGHTS, "names no weights")):
        copied = sealed.with_name("checkpoint-8")
        shutil.copytree(sealed, copied)
        (copied / lost).unlink()
        seal(copied)
        assert message in str(fault(copied))
        shutil.rmtree(copied)


def test_no_flipped_bit_of_a_seal_goes_unnoticed(sealed: Path) -> None:
    seal_file = sealed / SEAL_NAME
    whole = seal_file.read_bytes()
    spaces = {i for i, byte in enumerate(whole) if byte in b" \n"}  # between the words, where a tab is as good
    for i, bit in itertools.product(range(0, len(whole), 11), range(8)):
        seal_file.write_bytes(whole[:i] + bytes([whole[i] ^ 1 << bit]) + whole[i + 1 :])
        assert i in spaces or fault(sealed) is not None, (i, bit)
    seal_file.write_bytes(whole.replace(b"rng_state_0", b"rng_state_1"))  # one bit, and a name that is there twice
    assert fault(sealed) is not None


def test_a_checkpoint_is_on_the_disk_before_an_older_one_is_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files, the folders that hold them and the output folder; so are ledger and settings."""
    events: list[str] = []
    fsync, rmtree, replace = os.fsync, shutil.rmtree, os.replace

    def path_of(handle: int) -> str:
        return os.readlink(f"/proc/self/fd/{handle}")

    monkeypatch.setattr(os, "fsync", lambda handle: (events.append(f"sync {path_of(handle)}"), fsync(handle))[1])
    monkeypatch.setattr(os, "replace", lambda a, b: (events.append(f"sealed {b}"), replace(a, b))[1])
    monkeypatch.setattr(shutil, "rmtree", lambda path, *a, **k: (events.append(f"delete {path}"), rmtree(path, *a))[1])
    trainer(tmp_path, **options(num_rounds=2, save_total_limit=1)).train()
    new, deleted = tmp_path / "checkpoint-2", events.index(f"delete {tmp_path / 'checkpoint-1'}")
    sealed = events.index(f"sealed {new / SEAL_NAME}")
    for path in new.rglob("*"):
        if path.name != SEAL_NAME:
            assert f"sync {path}" in events[:sealed], path
    assert {f"sync {new}", f"sync {tmp_path}"} <= set(events[sealed:deleted])
    assert f"sync {tmp_path}" in events[events.index(f"sealed {tmp_path / 'communication.json'}") :]


def test_numbers_not_names_decide_which_is_last(sealed: Path) -> None:
    shutil.copytree(sealed, sealed.with_name("checkpoint-10"))
    assert last_complete(sealed.parent) == str(sealed.with_name("checkpoint-10"))
    assert last_complete(sealed.parent / "nowhere") is None


def test_resume_passes_over_a_broken_checkpoint(tmp_path: Path) -> None:
    whole = trainer(tmp_path / "whole", **options(save_strategy="no"))
    whole.train()
    trainer(tmp_path / "run", **options(num_rounds=3)).train()
    newest = tmp_path / "run" / "checkpoint-3"
    (newest / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match=r"checkpoint-3 cannot be resumed from: adapter_model.safetensors has 0 bytes"):
        trainer(tmp_path / "run", **options()).train(resume_from_checkpoint=str(newest))
    resumed = trainer(tmp_path / "run", **options())
    resumed.train(resume_from_checkpoint=True)
    first, second = ([entry | {"epoch": None} for entry in rounds(run)] for run in (whole, resumed))
    assert first == second  # an epoch is all rounds, of which the first run wanted fewer
    assert all((tensor == weights(whole)[name]).all() for name, tensor in weights(resumed).items())
    kept = sorted(path.name for path in (tmp_path / "run").glob("checkpoint-*"))
    assert kept == ["checkpoint-5", "checkpoint-6"] and fault(tmp_path / "run" / "checkpoint-6") is None
    arguments = json.loads((tmp_path / "run" / "checkpoint-6" / "training_args.json").read_text())
    assert arguments["save_total_limit"] == 2


def test_nothing_to_resume_from(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"There is no complete checkpoint in .* to resume from"):
        trainer(tmp_path, **options()).train(resume_from_checkpoint=True)


class Moments:
    """Counts the calls of modules and what is done to files of a folder; at a given one the process is killed."""

    def __init__(self, folder: Path, kind: str, at: int):
        self.folder, self.kind, self.at = str(folder), kind, at
        self.seen = Counter[str]()

    def watch(self) -> None:
        register_module_forward_pre_hook(lambda module, args: self.count("computing"))
        sys.addaudithook(self.audit)

    def audit(self, event: str, args: tuple[Any, ...]) -> None:
        if event in ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir") and str(args[0]).startswith(self.folder):
            self.count("writing")

    def count(self, kind: str) -> None:
        self.seen[kind] += 1
        if kind == self.kind and self.seen[kind] == self.at:
            os.kill(os.getpid(), signal.SIGKILL)


def run_in_a_child(folder: Path, kind: str = "", at: int = 0, **more: Any) -> int:
    """Run from the last checkpoint in a process that is killed at some moment; return how it ended."""
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1]
    status = 1
    try:
        run = trainer(folder, **options(eval_strategy="steps", eval_steps=1, **more))
        moments = Moments(folder, kind, at)
        moments.watch()
        run.train(resume_from_checkpoint=last_complete(folder))
        save_file(weights(run), folder / "result.safetensors")
        evals = [entry["eval_loss"] for entry in run.state.log_history if "eval_loss" in entry]
        ledger = json.loads((folder / "communication.json").read_text())["entries"]
        logged = [{k: v for k, v in entry.items() if not k.endswith("seconds")} for entry in rounds(run)]
        (folder / "result.json").write_text(json.dumps({"evals": evals, "ledger": ledger, "rounds": logged}))
        (folder / "moments.json").write_text(json.dumps(moments.seen))
        status = 0
    finally:
        os._exit(status)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["coef_j", "gas"])
def test_killed_at_random_moments(tmp_path: Path, method: str) -> None:
    """Killed again and again, while training, evaluating and writing, a run ends in the same bits."""
    assert run_in_a_child(tmp_path / "whole", method=method) == 0
    moments = json.loads((tmp_path / "whole" / "moments.json").read_text())
    draw, killed = random.Random(0), 0
    for kind in itertools.cycle(("computing", "writing")):
        # After an eighth to a third of all moments: less than the whole run, and mostly more than a round.
        at = draw.randint(moments[kind] // 8, moments[kind] // 3)
        status = run_in_a_child(tmp_path / "run", kind, at, method=method)
        if status == 0:
            break
        assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        killed += 1
        assert killed < 100  # it gets on, whatever hits it
    assert killed >= 2
    first, second = (load_file(tmp_path / name / "result.safetensors") for name in ("whole", "run"))
    assert all((first[name] == second[name]).all() for name in first) and first.keys() == second.keys()
    results = [json.loads((tmp_path / name / "result.json").read_text()) for name in ("whole", "run")]
    for result in results:
        for entry in result["ledger"]:
            for name in [name for name in entry if name.endswith("seconds")]:
                del entry[name]
    assert results[0] == results[1]
