"""Metrics as `evaluate` modules on disk: they are found in the package, and nothing is fetched from the Hub."""

from __future__ import annotations

from pathlib import Path

import evaluate

_FOLDER = Path(__file__).parent
# `evaluate` takes a folder whose script has the folder's name.
METRICS = tuple(sorted(script.stem for script in _FOLDER.glob("*/*.py") if script.stem == script.parent.name))

__all__ = ["METRICS", "load_metric"]


def load_metric(name: str) -> evaluate.EvaluationModule:
    """Return the metric called `name`, one of `METRICS`.

    Predictions stay in memory, so processes that evaluate at the same time share no cache file.

    ```python
    >>> load_metric("accuracy").compute(predictions=[0, 1, 1, 0], references=[0, 1, 0, 0])
    {'accuracy': 0.75}

    ```
    """
    if name not in METRICS:
        raise ValueError(f"There is no metric {name!r} here. Use one of {', '.join(METRICS)}.")
    return evaluate.load(str(_FOLDER / name), keep_in_memory=True)
