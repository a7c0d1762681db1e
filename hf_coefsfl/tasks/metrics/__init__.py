"""Metrics by name: `evaluate` modules on disk, so that nothing is fetched from the Hub, and those of `evaluate`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import evaluate
import numpy as np

from ..._suggest import did_you_mean

if TYPE_CHECKING:
    from transformers import EvalPrediction

_FOLDER = Path(__file__).parent
# `evaluate` takes a folder whose script has the folder's name.
METRICS = tuple(sorted(script.stem for script in _FOLDER.glob("*/*.py") if script.stem == script.parent.name))
IGNORED = -100  # the label of what is not counted, such as padding

__all__ = ["IGNORED", "METRICS", "NamedMetrics", "class_scores", "classification_metrics", "load_metric"]


def load_metric(name: str) -> evaluate.EvaluationModule:
    """Return the metric called `name`: one of `METRICS`, a folder with a metric module, or one of the Hub.

    Predictions stay in memory, so processes that evaluate at the same time share no cache file.

    ```python
    >>> load_metric("accuracy").compute(predictions=[0, 1, 1, 0], references=[0, 1, 0, 0])
    {'accuracy': 0.75}

    ```
    """
    if name in METRICS:
        return evaluate.load(str(_FOLDER / name), keep_in_memory=True)
    try:
        return evaluate.load(name, keep_in_memory=True)
    except Exception as error:  # the Hub, the network, the cache and the module each have their own
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(
            f"There is no metric {name!r} here, and evaluate cannot load it ({reason}).{did_you_mean(name, METRICS)} "
            f"Use one of {', '.join(METRICS)}, the folder of a metric module, or a metric of the Hub while it can be "
            "reached."
        ) from error


class NamedMetrics:
    """Several metrics as one. A sample is scored at once, so that a metric that does not fit is refused early.

    Args:
        names: see `load_metric`.
        predictions, references: a sample of what will be scored.
        what: what predictions are, for the error.
    """

    def __init__(self, names: Sequence[str], predictions: Any, references: Any, what: str):
        twice = [name for i, name in enumerate(names) if name in names[:i]]
        if twice:
            raise ValueError(f"metrics names {twice[0]!r} twice. Name each once.")
        self.modules = {name: load_metric(name) for name in names}
        self.scales: dict[str, float] = {}  # of every result: ours are shares, which tables show in percent
        for name, module in self.modules.items():
            try:
                found = _compute(module, predictions, references)
            except Exception as error:
                reason = (str(error).splitlines() or [type(error).__name__])[0]
                raise ValueError(f"The metric {name!r} cannot score {what}: {reason}") from error
            if not found:
                raise ValueError(f"The metric {name!r} gives no number for {what}.")
            self.scales |= dict.fromkeys(found, 100.0 if name in METRICS else 1.0)

    @classmethod
    def of_classes(cls, names: Sequence[str]) -> NamedMetrics:
        """Return metrics of class numbers."""
        return cls(names, [0, 1], [0, 1], "predicted classes")

    def score(self, predictions: Any, references: Any) -> dict[str, float]:
        """Return the results of all metrics."""
        found: dict[str, float] = {}
        for module in self.modules.values():
            found |= _compute(module, predictions, references)
        return found


def _compute(module: evaluate.EvaluationModule, predictions: Any, references: Any) -> dict[str, float]:
    wanted = module.features["predictions"] if isinstance(module.features, Mapping) else None
    if isinstance(wanted, Mapping) and isinstance(predictions[0], Mapping):
        predictions = [{key: row[key] for key in wanted} for row in predictions]
    found = module.compute(predictions=predictions, references=references)
    return {key: float(value) for key, value in found.items() if np.ndim(value) == 0 and not isinstance(value, str)}


def classification_metrics(names: Sequence[str] = ("accuracy",)) -> Callable[[EvalPrediction], dict[str, float]]:
    """Return a `compute_metrics` for classes of samples or of tokens. Labels of -100 are not counted.

    ```python
    >>> compute_metrics = classification_metrics(["accuracy", "f1"])  # for SplitFedTrainer

    ```
    """
    return class_scores(NamedMetrics.of_classes(names))


def class_scores(metrics: NamedMetrics) -> Callable[[EvalPrediction], dict[str, float]]:
    """Return the `compute_metrics` of predicted classes, as numbers or as logits."""

    def compute_metrics(prediction: EvalPrediction) -> dict[str, float]:
        found, labels = np.asarray(prediction.predictions), np.asarray(prediction.label_ids)
        if found.ndim > labels.ndim:
            found = found.argmax(-1)
        counted = labels != IGNORED
        return metrics.score(found[counted], labels[counted])

    return compute_metrics
