"""ROUGE: words, pairs of words and the longest common subsequence that two texts share."""

# `evaluate` takes the first metric class it finds in this file and copies the file alone: import modules here, no
# classes, and nothing of this package.
import collections
import re

import datasets
import evaluate

_WORD = re.compile(r"[a-z0-9]+")  # of lower case

_INPUTS = """
predictions, references: a text each.
Returns rouge1, rouge2 and rougeL from 0 to 1: the F1 of the words, of the pairs of neighbouring words, and of the
longest common subsequence of words, each as a mean over the texts. A text without any of them scores 0. Words are runs
of the letters a to z and of digits, in lower case, and are not stemmed.
"""


class Rouge(evaluate.Metric):
    """F1 of shared words, pairs of words and the longest common subsequence."""

    def _info(self) -> evaluate.MetricInfo:
        text = datasets.Value("string")
        return evaluate.MetricInfo(
            description="ROUGE-1, ROUGE-2 and ROUGE-L.",
            citation="Lin: ROUGE: A Package for Automatic Evaluation of Summaries. ACL Workshop 2004.",
            inputs_description=_INPUTS,
            features=datasets.Features({"predictions": text, "references": text}),
        )

    def _compute(self, predictions: list[str], references: list[str]) -> dict[str, float]:
        if not predictions:
            raise ValueError("Got no texts, so there is no score. Give at least one.")
        pairs = [(_words(text), _words(wanted)) for text, wanted in zip(predictions, references, strict=True)]
        scores = {
            "rouge1": [ngram_f1(found, wanted, 1) for found, wanted in pairs],
            "rouge2": [ngram_f1(found, wanted, 2) for found, wanted in pairs],
            "rougeL": [_f1(common_length(found, wanted), len(found), len(wanted)) for found, wanted in pairs],
        }
        return {name: sum(values) / len(values) for name, values in scores.items()}


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


def _f1(shared: int, found: int, wanted: int) -> float:
    return 2 * shared / (found + wanted) if shared else 0.0


def ngram_f1(found: list[str], wanted: list[str], n: int) -> float:
    """Return the F1 of the runs of n words; a run counts as often as it stands in both."""
    ours, theirs = (
        collections.Counter(tuple(words[i : i + n]) for i in range(len(words) - n + 1)) for words in (found, wanted)
    )
    return _f1((ours & theirs).total(), ours.total(), theirs.total())


def common_length(found: list[str], wanted: list[str]) -> int:
    """Return the length of the longest common subsequence, row by row of the usual table."""
    row = [0] * (len(wanted) + 1)
    for word in found:
        before, row = row, [0]
        for j, other in enumerate(wanted):
            row.append(before[j] + 1 if word == other else max(before[j + 1], row[j]))
    return row[-1]
