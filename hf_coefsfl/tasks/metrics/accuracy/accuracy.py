"""Accuracy: the share of predicted classes that are right."""

# `evaluate` takes the first metric class it finds in this file: import modules here, not classes.
import datasets
import evaluate
import numpy as np


class Accuracy(evaluate.Metric):
    """The share of predicted classes that are right, from 0 to 1."""

    def _info(self) -> evaluate.MetricInfo:
        label = datasets.Value("int64")
        return evaluate.MetricInfo(
            description="The share of predicted classes that are right.",
            citation="",
            inputs_description="predictions, references: one class number a sample. Returns accuracy, from 0 to 1.",
            features=datasets.Features({"predictions": label, "references": label}),
        )

    def _compute(self, predictions: list[int], references: list[int]) -> dict[str, float]:
        if not predictions:
            raise ValueError("Got no predictions, so there is no accuracy. Give at least one.")
        return {"accuracy": float(np.mean(np.asarray(predictions) == np.asarray(references)))}
