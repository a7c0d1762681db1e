"""Extractive question answering; questions may have no answer."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from datasets import Dataset
from transformers import AutoModelForQuestionAnswering, DataCollatorWithPadding, EvalPrediction

from .arguments import QuestionArguments
from .base import Prepared
from .classification import TextTask
from .metrics import NamedMetrics
from .spans import answers_from_logits, encode_questions

_FOR_ANSWERS = ["example_id", "offset_mapping", "cls_index"]  # of a window; the model does not take them


# What is scored to see whether a metric takes answers: a question that has one and a question that has none.
_SAMPLE = [{"id": str(i), "prediction_text": text, "no_answer_probability": 0.0} for i, text in enumerate(("a", ""))]
_ANSWERS: tuple[dict[str, list[Any]], ...] = ({"text": ["a"], "answer_start": [0]}, {"text": [], "answer_start": []})


class QuestionAnswering(TextTask):
    """The span of the context that answers a question, or none."""

    pipeline_tag = "question-answering"
    auto_model = AutoModelForQuestionAnswering
    default_metrics = ("squad_v2",)
    needed_texts = ("question", "context")
    arguments: QuestionArguments

    @cached_property
    def scoring(self) -> NamedMetrics:
        """The metrics of answers."""
        references = [{"id": str(i), "answers": answers} for i, answers in enumerate(_ANSWERS)]
        return NamedMetrics(self.arguments.metrics or self.default_metrics, _SAMPLE, references, "answers to questions")

    @property
    def reported(self) -> dict[str, str]:
        """The metrics that tables show, and their titles there."""
        return super().reported if self.arguments.metrics else {"exact": "EM", "f1": "F1"}

    def scale(self, metric: str) -> float:
        """Return 1: metrics of answers are in percent themselves."""
        return 1.0

    def build(self, train: Dataset, evals: dict[str, Dataset], processor: Any) -> Prepared:
        """Cut contexts into overlapping windows."""
        if len(evals) > 1:
            raise ValueError(
                f"Question answering evaluates one split, got {', '.join(evals)}: answers are put together from its "
                "windows. Give one to --eval_split."
            )
        arguments, keep = self.arguments, self.keep
        processor.padding_side = "right"  # positions count from the start of a window

        def encode(rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
            found = encode_questions(rows, processor, arguments.max_length, arguments.stride)
            if keep in rows:
                kept = dict(zip(rows["id"], rows[keep], strict=True))
                found[keep] = [kept[question] for question in found["example_id"]]
            return found

        def windows(rows: Dataset) -> Dataset:
            return rows.map(
                encode,
                batched=True,
                remove_columns=rows.column_names,
                desc="Cutting windows",
            )

        def for_the_model(features: Dataset) -> Dataset:
            return features.remove_columns([column for column in _FOR_ANSWERS if column in features.column_names])

        name, questions = next(iter(evals.items()))
        if len(set(questions["id"])) < len(questions):
            raise ValueError(f"Several questions of {name!r} have the same id: answers could not be told apart.")
        features = windows(questions)
        metrics = self.scoring

        def compute_metrics(prediction: EvalPrediction) -> dict[str, float]:
            logits: Any = prediction.predictions
            answers = answers_from_logits(
                questions,
                features,
                logits[0],
                logits[1],
                n_best=arguments.n_best,
                max_answer_length=arguments.max_answer_length,
                null_score_diff_threshold=arguments.null_score_diff_threshold,
            )
            return metrics.score(
                [a | {"id": str(a["id"])} for a in answers],
                [{"id": str(row["id"]), "answers": row["answers"]} for row in questions],
            )

        return Prepared(
            model=self.load_model(),
            processing_class=processor,
            train_dataset=for_the_model(windows(train)),
            eval_dataset={name: for_the_model(features)},
            data_collator=DataCollatorWithPadding(processor),
            compute_metrics=compute_metrics,
            metric_names=tuple(metrics.scales),
        )
