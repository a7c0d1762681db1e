"""Metrics of classes: by hand, by definition, and on tokens."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import EvalPrediction

from hf_coefsfl.tasks.metrics import classification_metrics, load_metric

NAMES = ["accuracy", "f1", "precision", "recall", "matthews_correlation"]


def test_by_hand() -> None:
    found, wanted = [0, 0, 1, 1, 2], [0, 1, 1, 1, 0]

    def scored(name: str, **options: str) -> float:
        return load_metric(name).compute(predictions=found, references=wanted, **options)[name]

    # class 0: 1 of 2 predicted, 1 of 2 there; class 1: 2 of 2, 2 of 3; class 2: 0 of 1, none there
    assert scored("precision") == pytest.approx((1 / 2 + 1 + 0) / 3)
    assert scored("recall") == pytest.approx((1 / 2 + 2 / 3 + 0) / 3)
    assert scored("f1") == pytest.approx((1 / 2 + 4 / 5 + 0) / 3)
    assert scored("f1", average="micro") == pytest.approx(3 / 5)
    assert scored("f1", average="weighted") == pytest.approx((2 * 1 / 2 + 3 * 4 / 5) / 5)
    assert scored("f1", average="binary") == pytest.approx(4 / 5)
    with pytest.raises(ValueError, match=r"average='samples' is not allowed\. Choose one of: macro"):
        scored("f1", average="samples")
    with pytest.raises(ValueError, match="Got no predictions"):
        load_metric("recall").compute(predictions=[], references=[])


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=20))
def test_correlation_is_that_of_the_confusion_matrix(pairs: list[tuple[int, int]]) -> None:
    found, wanted = zip(*pairs, strict=True)
    table = np.zeros((4, 4))
    for pair in pairs:
        table[pair] += 1
    predicted, actual, right, total = table.sum(1), table.sum(0), np.trace(table), len(pairs)
    spread = (total**2 - predicted @ predicted) * (total**2 - actual @ actual)
    expected = (right * total - predicted @ actual) / np.sqrt(spread) if spread else 0.0
    result = load_metric("matthews_correlation").compute(predictions=found, references=wanted)
    assert result["matthews_correlation"] == pytest.approx(expected)


def test_several_by_name_and_ignored_labels() -> None:
    metrics = classification_metrics(NAMES)
    logits = np.eye(3)[[[0, 1, 2], [1, 1, 0]]]  # [samples, tokens, classes]
    labels = np.array([[0, 1, -100], [1, 0, -100]])
    scored = metrics(EvalPrediction(logits, labels))
    assert (
        list(scored) == NAMES and scored["accuracy"] == 0.75 and scored["precision"] == pytest.approx((1 + 2 / 3) / 2)
    )
    assert metrics(EvalPrediction(logits.argmax(-1), labels)) == scored


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["accuracy", "accuracy"], "names 'accuracy' twice"),
        (["squad_v2"], "The metric 'squad_v2' cannot score predicted classes"),
    ],
)
def test_what_does_not_fit_is_refused_at_once(names: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        classification_metrics(names)
