"""The results of a run, read off the logs of its trainer."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .trainer import SplitFedTrainer

# Entries of an evaluation's log that describe the machine, not the model.
_TIMES = re.compile(r"eval_(.*_)?(runtime|samples_per_second|steps_per_second|model_preparation_time)")
_WORK = "server_gflops_per_round"

Results = dict[str, float]


def evaluations(history: Sequence[Mapping[str, Any]]) -> dict[int, Results]:
    """Return the metrics of each evaluated round, a later evaluation of a round over an earlier one."""
    rounds: dict[int, Results] = {}
    for entry in history:
        metrics = {
            name: float(value)
            for name, value in entry.items()
            if name.startswith("eval_") and not _TIMES.fullmatch(name) and isinstance(value, (int, float))
        }
        if metrics:
            rounds[int(entry["step"])] = rounds.get(int(entry["step"]), {}) | metrics
    return rounds


def evaluated_rounds(history: Sequence[Mapping[str, Any]]) -> dict[int, Results]:
    """Return the metrics of each round that training evaluated; without any, of what came after it."""
    return evaluations(history[: _end(history)]) or evaluations(history)


def _end(history: Sequence[Mapping[str, Any]]) -> int:
    """Return the index of the log entry that ends training; later entries are of the final model."""
    return next((i for i, entry in enumerate(history) if "train_runtime" in entry), len(history))


def final_results(trainer: SplitFedTrainer) -> Results:
    """Return the metrics of the model as it is now: evaluated after training, at the best round, or at the last one."""
    history, best = trainer.state.log_history, trainer.state.best_global_step
    after, rounds = evaluations(history[_end(history) :]), evaluations(history)
    over = _end(history) < len(history)
    if over and not after and trainer.args.load_best_model_at_end and best in rounds:
        return rounds[best]
    rounds = after or rounds
    return rounds[max(rounds)] if rounds else {}


def server_gflops(history: Sequence[Mapping[str, Any]], last_round: int) -> float | None:
    """Return the GFLOPs of the server in all rounds up to this one, or None if `count_flops` did not count them.

    A log has the mean of the rounds since the last one. Rounds after the last log are not in the sum.
    """
    counted = {int(entry["step"]): float(entry[_WORK]) for entry in history if _WORK in entry}
    pairs = pairwise([0, *sorted(counted)])
    return sum((step - before) * counted[step] for before, step in pairs if step <= last_round) if counted else None


def main_metric(rounds: Mapping[int, Results]) -> str:
    """Return the metric to draw: the accuracy, else the first one that is not a loss, else the loss."""
    names = list(dict.fromkeys(name for metrics in rounds.values() for name in metrics))
    return min(names, key=lambda name: (name != "eval_accuracy", name.endswith("loss")))
