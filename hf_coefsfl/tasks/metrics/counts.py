"""What precision, recall and F1 are made of."""

from __future__ import annotations

from typing import Any

import numpy as np

AVERAGES = ("macro", "micro", "weighted", "binary")
INPUTS = """
predictions, references: one class number a sample.
average: "macro" (default), the mean over the classes that occur; "micro", of all samples together; "weighted", by the
frequency of the classes; "binary", of the class 1 alone.
Returns one number, from 0 to 1. A class that is never predicted, or never there, counts 0.
"""


def averaged(predictions: Any, references: Any, average: str, parts: tuple[float, float]) -> float:
    """Return hits / (a * predicted + b * actual) with parts = (a, b), averaged over the classes.

    (1, 0) is the precision, (0, 1) the recall, (1/2, 1/2) the F1.
    """
    if average not in AVERAGES:
        raise ValueError(f"average={average!r} is not allowed. Choose one of: {', '.join(AVERAGES)}.")
    if not len(predictions):
        raise ValueError("Got no predictions, so there is no score. Give at least one.")
    found, wanted = np.asarray(predictions), np.asarray(references)
    classes = np.unique([1] if average == "binary" else np.concatenate([found, wanted]))
    hits, predicted, actual = (
        np.array([np.sum(where) for where in counted])
        for counted in (
            [(found == c) & (wanted == c) for c in classes],
            [found == c for c in classes],
            [wanted == c for c in classes],
        )
    )
    if average == "micro":
        hits, predicted, actual = hits.sum(keepdims=True), predicted.sum(keepdims=True), actual.sum(keepdims=True)
    base = parts[0] * predicted + parts[1] * actual
    scores = np.divide(hits, base, out=np.zeros(len(hits)), where=base > 0)
    return float(np.average(scores, weights=actual if average == "weighted" else None))
