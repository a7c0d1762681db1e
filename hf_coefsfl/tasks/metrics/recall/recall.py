"""Recall: the share of a class's samples that are found."""

# `evaluate` takes the first metric class it finds in this file and copies the file alone: import modules here, not
# classes, and nothing by a relative path.
import datasets
import evaluate

import hf_coefsfl.tasks.metrics.counts as counts


class Recall(evaluate.Metric):
    """Recall: the share of a class's samples that are found."""

    def _info(self) -> evaluate.MetricInfo:
        label = datasets.Value("int64")
        return evaluate.MetricInfo(
            description="Recall: the share of a class's samples that are found.",
            citation="",
            inputs_description=counts.INPUTS,
            features=datasets.Features({"predictions": label, "references": label}),
        )

    def _compute(self, predictions: list[int], references: list[int], average: str = "macro") -> dict[str, float]:
        return {"recall": counts.averaged(predictions, references, average, (0.0, 1.0))}
