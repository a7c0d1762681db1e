"""F1: the harmonic mean of precision and recall."""

# `evaluate` takes the first metric class it finds in this file and copies the file alone: import modules here, not
# classes, and nothing by a relative path.
import datasets
import evaluate

import hf_coefsfl.tasks.metrics.counts as counts


class F1(evaluate.Metric):
    """F1: the harmonic mean of precision and recall."""

    def _info(self) -> evaluate.MetricInfo:
        label = datasets.Value("int64")
        return evaluate.MetricInfo(
            description="F1: the harmonic mean of precision and recall.",
            citation="",
            inputs_description=counts.INPUTS,
            features=datasets.Features({"predictions": label, "references": label}),
        )

    def _compute(self, predictions: list[int], references: list[int], average: str = "macro") -> dict[str, float]:
        return {"f1": counts.averaged(predictions, references, average, (0.5, 0.5))}
