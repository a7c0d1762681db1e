"""Precision: the share of right samples among those predicted to be of a class."""

# `evaluate` takes the first metric class it finds in this file and copies the file alone: import modules here, not
# classes, and nothing by a relative path.
import datasets
import evaluate

import hf_coefsfl.tasks.metrics.counts as counts


class Precision(evaluate.Metric):
    """Precision: the share of right samples among those predicted to be of a class."""

    def _info(self) -> evaluate.MetricInfo:
        label = datasets.Value("int64")
        return evaluate.MetricInfo(
            description="Precision: the share of right samples among those predicted to be of a class.",
            citation="",
            inputs_description=counts.INPUTS,
            features=datasets.Features({"predictions": label, "references": label}),
        )

    def _compute(self, predictions: list[int], references: list[int], average: str = "macro") -> dict[str, float]:
        return {"precision": counts.averaged(predictions, references, average, (1.0, 0.0))}
