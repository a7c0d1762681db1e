"""Resumed and repeated runs."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import TrainerCallback

from tests.support.federated import rounds, same, tiny_vit, trainer, weights
from tests.support.packed import MIXED


def test_resume_is_bit_identical(tmp_path: Path) -> None:
    """With evaluations, a schedule, codecs and other initial weights; test_contract.py resumes every method."""
    changes: dict[str, Any] = {
        "method": "coef_j",
        "num_rounds": 5,
        "save_strategy": "steps",
        "save_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": 1,
        "lr_scheduler_type": "cosine",
        "exchange_codec": MIXED,
        "adapter_codec": "int8",
    }
    whole = trainer(tmp_path / "whole", **changes)
    whole.train()
    resumed = trainer(tmp_path / "resumed", tiny_vit(seed=7), **changes)  # other weights: they must come from the file
    resumed.model.load_state_dict(
        {k: v for k, v in whole.model.state_dict().items() if "lora" not in k and "modules_to_save" not in k},
        strict=False,
    )
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    assert same(weights(whole), weights(resumed))
    assert rounds(whole) == rounds(resumed)
    assert whole.ledger == resumed.ledger
    assert whole.rounds is not None and resumed.rounds is not None
    assert same(whole.rounds.state_dict(), resumed.rounds.state_dict())  # residuals
    keep = ("eval_loss", "eval_accuracy", "step")
    evals = [[{k: e[k] for k in keep} for e in r.state.log_history if "eval_loss" in e] for r in (whole, resumed)]
    assert evals[0] == evals[1] and len(evals[0]) == 5


def test_resume_true_takes_the_last_checkpoint(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"save_strategy": "steps", "save_steps": 1}
    whole = trainer(tmp_path / "a", num_rounds=3, **changes)
    whole.train()

    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop = state.global_step == 2

    first = trainer(tmp_path / "b", num_rounds=3, callbacks=[Stop()], **changes)
    first.train()
    assert first.state.global_step == 2
    second = trainer(tmp_path / "b", num_rounds=3, **changes)
    second.train(resume_from_checkpoint=True)
    assert second.state.global_step == 3 and same(weights(whole), weights(second))


def test_resume_that_does_not_skip_data_goes_on_with_the_next_round(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "num_rounds": 4}
    whole = trainer(tmp_path / "a", **changes)
    whole.train()
    resumed = trainer(tmp_path / "b", ignore_data_skip=True, **changes)
    resumed.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-2"))
    assert same(weights(whole), weights(resumed))


def test_a_second_training_starts_a_new_ledger(tmp_path: Path) -> None:
    run = trainer(tmp_path, num_rounds=2)
    run.train()
    first = len(run.ledger.entries)
    run.train()
    assert len(run.ledger.entries) == first == 2 * 3


def test_a_folder_called_checkpoints_gets_the_halves(tmp_path: Path) -> None:
    run = trainer(tmp_path / "checkpoints", num_rounds=1)
    run.save_model()
    assert (tmp_path / "checkpoints" / "client" / "adapter_model.safetensors").is_file()


def test_equal_seeds_equal_runs_and_others_differ(tmp_path: Path) -> None:
    runs = []
    for i, seed in enumerate((1, 1, 2)):
        torch.manual_seed(i)  # the state outside must not matter
        run = trainer(tmp_path / str(i), num_rounds=2, seed=seed)
        run.train()
        runs.append(weights(run))
    assert same(runs[0], runs[1]) and not same(runs[0], runs[2])


def test_training_leaves_the_callers_random_state_alone(tmp_path: Path) -> None:
    """A callback that draws random numbers sees the same ones whatever the round drew."""

    class Draw(TrainerCallback):
        def __init__(self) -> None:
            self.drawn: list[tuple[float, float]] = []

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.drawn.append((torch.rand(()).item(), float(np.random.rand())))

    draws = []
    for method in ("vanilla", "coef_j"):
        callback = Draw()
        trainer(tmp_path / method, method=method, callbacks=[callback]).train()
        draws.append(callback.drawn)
    assert draws[0] == draws[1] and len(set(draws[0])) == 4
