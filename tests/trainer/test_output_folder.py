"""One folder, one run: what is refused, what goes on, what an overwriting run removes first, and the lock."""

import json
import logging
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerCallback

from hf_coefsfl import SplitFedTrainer
from hf_coefsfl.trainer.checkpoints import SEAL_NAME, last_complete, seal
from hf_coefsfl.trainer.identity import IDENTITY_NAME
from hf_coefsfl.trainer.output_folder import FolderLock, RunRefused, remove_run, results_in
from tests.support.federated import rounds, same, trainer, weights

SAVED: dict[str, Any] = {"num_rounds": 2, "warmup_rounds": 0, "save_strategy": "steps", "save_steps": 1}


class Stop(TrainerCallback):
    """Interrupts a run when some rounds are done, before the checkpoint of the last of them."""

    def __init__(self, after: int):
        self.after = after

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.after:
            raise KeyboardInterrupt


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def finished(folder: Path, **changes: Any) -> SplitFedTrainer:
    run = trainer(folder, **SAVED | changes)
    run.train()
    run.save_model()
    run.save_state()
    return run


def test_another_run_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    finished(tmp_path)
    before = contents(tmp_path)
    with pytest.raises(RunRefused, match=r"holds a run already \(checkpoint-2; coef_j, 2 rounds\)"):
        trainer(tmp_path, **SAVED).train()
    with pytest.raises(RunRefused, match=r"checkpoint-2 is of a run with other settings") as refused:
        trainer(tmp_path, **SAVED | {"method": "vanilla", "learning_rate": 1e-3}).train(resume_from_checkpoint=True)
    lines = str(refused.value).splitlines()[1:-1]
    assert lines == ["  method: coef_j, now vanilla", "  learning_rate: 0.005, now 0.001"]
    with pytest.raises(RunRefused, match=r"is at round 2 already, and num_rounds=1"):
        trainer(tmp_path, **SAVED | {"num_rounds": 1}).train(resume_from_checkpoint=True)
    with pytest.raises(RunRefused, match=r"overwrite_output_dir would delete .*checkpoint-2"):
        trainer(tmp_path, **SAVED | {"overwrite_output_dir": True}).train(resume_from_checkpoint=True)
    assert contents(tmp_path) == before


def test_a_finished_run_says_so_and_gives_its_result(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    best = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": True}  # the first
    first = finished(tmp_path, eval_strategy="steps", eval_steps=1, **best)
    before = contents(tmp_path)
    again = trainer(tmp_path, **SAVED | {"eval_strategy": "steps", "eval_steps": 1} | best)
    with caplog.at_level(logging.WARNING):
        output = again.train(resume_from_checkpoint="last")
    assert "checkpoint-2 is already at round 2 of 2" in caplog.text and again.already_finished
    assert contents(tmp_path) == before
    assert same(weights(first), weights(again)) and first.ledger == again.ledger
    assert first.state.log_history == again.state.log_history and first.state.best_global_step == 1
    assert output.global_step == 2 and output.metrics["train_loss"] == output.training_loss > 0


def test_more_rounds_go_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    whole = trainer(tmp_path / "whole", **SAVED | {"num_rounds": 3})
    whole.train()
    finished(tmp_path / "run")
    (tmp_path / "run" / "summary.json").write_text("{}")
    more = trainer(tmp_path / "run", **SAVED | {"num_rounds": 3, "eval_strategy": "steps", "eval_steps": 1})
    with caplog.at_level(logging.WARNING):
        more.train(resume_from_checkpoint=True)
    assert "goes on to round 3 instead of 2" in caplog.text and "schedule" not in caplog.text
    assert "eval_strategy: no, now steps" in caplog.text
    assert same(weights(whole), weights(more)) and not more.already_finished
    assert [entry["step"] for entry in more.state.log_history if "eval_loss" in entry] == [3]
    assert not (tmp_path / "run" / "summary.json").exists()  # of fewer rounds
    assert json.loads((tmp_path / "run" / IDENTITY_NAME).read_text())["num_rounds"] == 3


def test_a_schedule_that_becomes_another_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    linear = SAVED | {"lr_scheduler_type": "linear"}
    trainer(tmp_path, **linear).train()
    with caplog.at_level(logging.WARNING):
        trainer(tmp_path, **linear | {"num_rounds": 3}).train(resume_from_checkpoint=True)
    assert "lr_scheduler_type='linear' depends on the number of rounds" in caplog.text


def test_a_checkpoint_of_an_earlier_version_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = trainer(tmp_path, **SAVED)
    run.train()
    checkpoint = tmp_path / "checkpoint-1"
    assert IDENTITY_NAME in json.loads((checkpoint / SEAL_NAME).read_text())  # covered by the seal
    (checkpoint / IDENTITY_NAME).unlink()
    seal(checkpoint)
    again = trainer(tmp_path, **SAVED)
    with caplog.at_level(logging.WARNING):
        again.train(resume_from_checkpoint=str(checkpoint))
    assert "does not say which settings it was made with" in caplog.text
    assert same(weights(run), weights(again)) and rounds(run) == rounds(again)


def test_an_interrupted_new_run_leaves_no_older_checkpoint(tmp_path: Path) -> None:
    finished(tmp_path, method="vanilla")
    (tmp_path / "summary.json").write_text("{}")
    (tmp_path / "notes.txt").write_text("mine")
    new = trainer(tmp_path, overwrite_output_dir=True, callbacks=[Stop(1)], **SAVED)
    with pytest.raises(KeyboardInterrupt):
        new.train()
    assert last_complete(tmp_path) is None
    left = {name for name in contents(tmp_path) if not name.startswith(("client/", "server/"))}
    assert left == {".lock", IDENTITY_NAME, "communication.json", "notes.txt"}
    # There is nothing to lose now, so a third run begins without being told to overwrite.
    third = trainer(tmp_path, **SAVED)
    third.train()
    assert last_complete(tmp_path) == str(tmp_path / "checkpoint-2")


def test_the_same_trainer_may_train_again(tmp_path: Path) -> None:
    run = trainer(tmp_path, **SAVED | {"num_rounds": 1})
    run.train()
    first = weights(run)
    run.add_callback(Stop(1))
    with pytest.raises(KeyboardInterrupt):
        run.train()
    assert last_complete(tmp_path) is None and not same(first, weights(run))


def test_last_begins_if_there_is_nothing_and_begins_again_what_left_no_checkpoint(tmp_path: Path) -> None:
    first = trainer(tmp_path, num_rounds=1)
    first.train(resume_from_checkpoint="last")
    first.save_model()  # killed before the summary
    with pytest.raises(RunRefused, match="holds a run already"):
        trainer(tmp_path, num_rounds=1, seed=5).train(resume_from_checkpoint="last")
    again = trainer(tmp_path, num_rounds=1)
    again.train(resume_from_checkpoint="last")
    assert same(weights(first), weights(again))


def test_what_is_not_a_runs_stays(tmp_path: Path) -> None:
    """A base model, the checkpoints of another program, and a README in the same folder are left alone."""
    kept = ["model.safetensors", "config.json", "README.md", "checkpoint-7/optimizer.pt", "client/app.py"]
    for name in [*kept, "adapter_model.safetensors", "client/adapter_model.safetensors", "run.json"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("{}")
    assert results_in(tmp_path) == "adapter_model.safetensors"
    remove_run(tmp_path)
    assert sorted(contents(tmp_path)) == sorted(kept) and results_in(tmp_path) is None
    (tmp_path / "run.json").write_text('{"decides": {"full_finetuning": true}}')  # then the weights are a run's
    assert results_in(tmp_path) == "model.safetensors"
    remove_run(tmp_path)
    assert sorted(contents(tmp_path)) == sorted(set(kept) - {"model.safetensors"})


@contextmanager
def another_process_in(folder: Path) -> Iterator[int]:
    """Have another process hold a folder, until it is killed."""
    ready, tell = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            lock = FolderLock(folder)
            lock.acquire()
            os.write(tell, b"x")
            signal.pause()
        finally:
            os._exit(1)
    os.read(ready, 1)
    try:
        yield child
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_the_second_process_is_refused_until_the_first_is_gone(tmp_path: Path) -> None:
    run = trainer(tmp_path, num_rounds=1)
    with another_process_in(tmp_path), pytest.raises(RunRefused, match="Another process writes into"):
        run.train()
    assert not (tmp_path / IDENTITY_NAME).exists()
    run.train()  # the system has released the lock of the process that was killed


def test_the_folder_is_held_as_long_as_it_trains(tmp_path: Path) -> None:
    refused = []

    class Look(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            with pytest.raises(RunRefused):
                FolderLock(tmp_path).acquire()
            refused.append(state.global_step)

    run = trainer(tmp_path, num_rounds=1, callbacks=[Look()])
    with run.holding_folder():
        run.train()
        with pytest.raises(RunRefused):
            FolderLock(tmp_path).acquire()
    assert refused == [1]
    with FolderLock(tmp_path):
        pass


def test_a_half_that_no_run_wrote_stays(tmp_path: Path) -> None:
    """`coefsfl split` leaves it for the clients, in the folder that the server's run is to use."""
    (tmp_path / "client").mkdir()
    (tmp_path / "client" / "model.safetensors").write_bytes(b"half")
    remove_run(tmp_path)
    finished(tmp_path)
    trainer(tmp_path, **SAVED | {"overwrite_output_dir": True}).train()
    assert (tmp_path / "client" / "model.safetensors").read_bytes() == b"half"
    assert not (tmp_path / "client" / "adapter_model.safetensors").exists()


def test_an_earlier_checkpoint_leaves_no_later_one_to_be_picked_up(tmp_path: Path) -> None:
    finished(tmp_path, num_rounds=3)
    with pytest.raises(RunRefused, match=r"came as far as checkpoint-3, and .*checkpoint-2 is at round 2 of 2"):
        trainer(tmp_path, **SAVED).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    again = trainer(tmp_path, **SAVED | {"num_rounds": 5}, callbacks=[Stop(2)])
    with pytest.raises(KeyboardInterrupt):
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert last_complete(str(tmp_path)) == str(tmp_path / "checkpoint-1")


def test_a_finished_run_without_checkpoints_is_not_begun_again_with_more_rounds(tmp_path: Path) -> None:
    finished(tmp_path, save_strategy="no")
    with pytest.raises(RunRefused, match="holds a run already"):
        trainer(tmp_path, **SAVED | {"save_strategy": "no", "num_rounds": 3}).train(resume_from_checkpoint="last")


@pytest.mark.parametrize(
    "changes",
    [{"method": "gas"}, {"adapter_codec": "int8"}, {"keep_server_optimizer": True}],
    ids=lambda c: next(iter(c)),
)
def test_training_again_begins_with_the_state_of_a_new_run(tmp_path: Path, changes: dict[str, Any]) -> None:
    """Not with the statistics, residuals or optimizer of the run before; the weights go on."""
    run = trainer(tmp_path, **SAVED | changes)
    assert run.rounds is not None
    states: list[dict[str, Any]] = []
    start = {name: t.clone() for name, t in run.rounds.state_dict().items()}
    run.train()
    left = run.rounds.state_dict()
    assert left.keys() != start.keys() or not same(left, start)

    class Noted(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            states.append({name: t.clone() for name, t in run.rounds.state_dict().items()} if run.rounds else {})

    run.add_callback(Noted())
    trained = weights(run)
    run.train()
    assert states[0].keys() == start.keys() and same(states[0], start) and not same(trained, weights(run))
