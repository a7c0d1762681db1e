"""The metric of MNLI in GLUE: accuracy over entailment, neutral and contradiction."""

# `evaluate` takes the first metric class it finds in this file and copies the file alone: import modules here, no
# classes, and nothing of the metric next door.
import datasets
import evaluate
import numpy as np


class Mnli(evaluate.Metric):
    """Accuracy as GLUE defines it for MNLI, matched or mismatched: every pair counts, from 0 to 1."""

    def _info(self) -> evaluate.MetricInfo:
        label = datasets.Value("int64")
        return evaluate.MetricInfo(
            description="Accuracy on MNLI, as GLUE defines it. Use it once for each of its two evaluation sets.",
            citation="Williams, Nangia and Bowman: A Broad-Coverage Challenge Corpus for Sentence Understanding "
            "through Inference. NAACL 2018.",
            inputs_description="predictions, references: 0, 1 or 2 for each pair. Returns accuracy, from 0 to 1.",
            features=datasets.Features({"predictions": label, "references": label}),
        )

    def _compute(self, predictions: list[int], references: list[int]) -> dict[str, float]:
        if not predictions:
            raise ValueError("Got no predictions: there is no accuracy of nothing. Give at least one.")
        return {"accuracy": float(np.mean(np.asarray(predictions) == np.asarray(references)))}
