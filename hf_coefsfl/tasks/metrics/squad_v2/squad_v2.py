"""The metric of SQuAD v2.0: exact match and F1 of answers; some questions have none."""

# `evaluate` takes the first metric class it finds in this file and copies the file alone: import modules here, no
# classes, and nothing of this package.
import collections
import re
import string
import typing

import datasets
import evaluate
import numpy as np

_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")

_INPUTS = """
predictions: a dict for each question: id, prediction_text ("" for no answer) and no_answer_probability.
references: a dict for each question: id and answers, a dict of text and answer_start, both empty if there is none.
no_answer_threshold: a question with a higher no_answer_probability counts as left unanswered. Default: 1.0.
Returns, in percent: exact and f1, the same with HasAns_ and NoAns_ for the questions with and without an answer (if
there are any), best_exact and best_f1 with the thresholds that reach them; and the counts total.
"""


class SquadV2(evaluate.Metric):
    """Exact match and F1 in percent, as the dataset's authors define them."""

    def _info(self) -> evaluate.MetricInfo:
        text = datasets.Value("string")
        probability = datasets.Value("float64")  # as precise as a threshold, so that one may equal the other
        answers = {"text": datasets.Sequence(text), "answer_start": datasets.Sequence(datasets.Value("int64"))}
        return evaluate.MetricInfo(
            description="Exact match and F1 on SQuAD v2.0.",
            citation="Rajpurkar, Jia and Liang: Know What You Don't Know: Unanswerable Questions for SQuAD. ACL 2018.",
            inputs_description=_INPUTS,
            features=datasets.Features(
                {
                    "predictions": {"id": text, "prediction_text": text, "no_answer_probability": probability},
                    "references": {"id": text, "answers": answers},
                }
            ),
        )

    def _compute(
        self,
        predictions: list[dict[str, typing.Any]],
        references: list[dict[str, typing.Any]],
        no_answer_threshold: float = 1.0,
    ) -> dict[str, float]:
        golds = {reference["id"]: reference["answers"]["text"] for reference in references}
        _check_ids([prediction["id"] for prediction in predictions], [reference["id"] for reference in references])
        answerable = np.array([bool(golds[prediction["id"]]) for prediction in predictions])
        answered = np.array([bool(prediction["prediction_text"]) for prediction in predictions])
        probability = np.array([prediction["no_answer_probability"] for prediction in predictions])
        raw = {
            name: np.array([_best_of(score, golds[p["id"]], p["prediction_text"]) for p in predictions])
            for name, score in (("exact", exact_match), ("f1", token_f1))
        }
        # A question left unanswered is right if it has no answer.
        final = {name: np.where(probability > no_answer_threshold, ~answerable, raw[name]) for name in raw}
        found: dict[str, float] = {}
        for prefix, chosen in (("", answerable | ~answerable), ("HasAns_", answerable), ("NoAns_", ~answerable)):
            if chosen.any():
                total = int(chosen.sum())
                found |= {prefix + name: 100 * float(final[name][chosen].sum()) / total for name in final}
                found[prefix + "total"] = total
        for name in raw:
            best, threshold = best_threshold(raw[name], probability, answerable, answered)
            found |= {f"best_{name}": best, f"best_{name}_thresh": threshold}
        return found


def _check_ids(predicted: list[str], asked: list[str]) -> None:
    if not asked:
        raise ValueError("Got no questions, so there is no score. Give at least one.")
    for what, ids in (("predictions", predicted), ("references", asked)):
        twice = [name for name, count in collections.Counter(ids).items() if count > 1]
        if twice:
            raise ValueError(
                f"The {what} have {len(twice)} ids more than once, for instance {twice[0]!r}. Give each id once."
            )
    missing = sorted(set(asked) - set(predicted))
    if missing:
        raise ValueError(
            f"{len(missing)} of {len(asked)} references have no prediction, for instance {missing[0]!r}. Predict "
            "prediction_text='' for a question without an answer."
        )


def normalize_answer(text: str) -> str:
    """Return a text in lower case, without punctuation, without articles, its words one space apart."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def exact_match(gold: str, predicted: str) -> float:
    """Return 1 if two texts are the same after normalisation, else 0."""
    return float(normalize_answer(gold) == normalize_answer(predicted))


def token_f1(gold: str, predicted: str) -> float:
    """Return the F1 of the words of two texts, repetitions counted; of texts without words, whether both are."""
    wanted, got = normalize_answer(gold).split(), normalize_answer(predicted).split()
    if not wanted or not got:
        return float(wanted == got)
    common = (collections.Counter(wanted) & collections.Counter(got)).total()
    return 2 * common / (len(wanted) + len(got))


def _best_of(score: typing.Callable[[str, str], float], golds: list[str], predicted: str) -> float:
    # An answer of articles and punctuation only says nothing; if no other is left, saying nothing is right.
    return max(score(gold, predicted) for gold in [gold for gold in golds if normalize_answer(gold)] or [""])


def best_threshold(
    scores: np.ndarray, probability: np.ndarray, answerable: np.ndarray, answered: np.ndarray
) -> tuple[float, float]:
    """Return the best mean score in percent over thresholds on the no-answer probability, and that threshold.

    It starts from leaving every question unanswered and takes the given answers one by one, the surest first: each
    adds its score if there is an answer, and costs 1 if there is none but one was given. As in the authors'
    script, questions of equal probability are taken in the order given, and each may be the last one taken.

    Args:
        scores: of the given answers, one a question.
        probability: that the question has no answer.
        answerable: whether it has one.
        answered: whether a text was given.
    """
    order = np.argsort(probability, kind="stable")
    gains = np.where(answerable, scores, -1.0 * answered)[order]
    totals = np.cumsum(np.concatenate([[(~answerable).sum()], gains]))
    taken = int(totals.argmax())  # the first of equals
    threshold = float(probability[order[taken - 1]]) if taken else 0.0
    return 100 * float(totals[taken]) / len(scores), threshold
