"""Matthews correlation: how predicted and true classes correlate."""

# `evaluate` takes the first metric class it finds in this file: import modules here, not classes.
import datasets
import evaluate
import numpy as np


class MatthewsCorrelation(evaluate.Metric):
    """The correlation of predicted and true classes, of any number of classes: from -1 to 1, and 0 for chance."""

    def _info(self) -> evaluate.MetricInfo:
        label = datasets.Value("int64")
        return evaluate.MetricInfo(
            description="The correlation of predicted and true classes.",
            citation="Gorodkin: Comparing two K-category assignments by a K-category correlation coefficient. 2004.",
            inputs_description="predictions, references: one class number a sample. Returns matthews_correlation.",
            features=datasets.Features({"predictions": label, "references": label}),
        )

    def _compute(self, predictions: list[int], references: list[int]) -> dict[str, float]:
        if not len(predictions):
            raise ValueError("Got no predictions, so there is no correlation. Give at least one.")
        classes = np.unique(np.concatenate([predictions, references]))
        found, wanted = ((np.asarray(labels)[:, None] == classes).astype(float) for labels in (predictions, references))
        found, wanted = found - found.mean(0), wanted - wanted.mean(0)
        spread = np.sum(found**2) * np.sum(wanted**2)
        return {"matthews_correlation": float(np.sum(found * wanted) / np.sqrt(spread)) if spread > 0 else 0.0}
