"""Extractive question answering with questions that have no answer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from datasets import Dataset
from transformers import AutoModelForQuestionAnswering, DataCollatorWithPadding, EvalPrediction

from .base import Prepared
from .classification import TextArguments, TextTask
from .metrics import load_metric
from .spans import answers_from_logits, encode_questions

_ANSWER = ("prediction_text", "no_answer_probability")
_FOR_ANSWERS = ["example_id", "offset_mapping", "cls_index"]  # of a window; the model does not take them


@dataclass
class QuestionArguments(TextArguments):
    """Options of question answering."""

    max_length: int = field(default=384, metadata={"help": "Tokens of a window over question and context."})
    stride: int = field(default=128, metadata={"help": "Tokens that neighbouring windows of a context share."})
    n_best: int = field(default=20, metadata={"help": "Spans to keep for each question."})
    max_answer_length: int = field(default=30, metadata={"help": "Tokens of the longest answer."})
    null_score_diff_threshold: float = field(
        default=0.0, metadata={"help": "By how much 'no answer' must beat the best answer to be given."}
    )


class SQuADv2(TextTask):
    """SQuAD v2.0: the span of the context that answers a question, or none."""

    name = "squad_v2"
    title = "SQuAD v2.0"
    pipeline_tag = "question-answering"
    arguments_class = QuestionArguments
    auto_model = AutoModelForQuestionAnswering
    dataset_name = "rajpurkar/squad_v2"
    columns = {"id": "id", "question": "question", "context": "context", "answers": "answers"}
    reported = {"exact": "EM", "f1": "F1"}
    metric_scale = 1.0  # the metric itself is in percent
    arguments: QuestionArguments

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
        metric = load_metric("squad_v2")

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
            found: dict[str, float] = metric.compute(
                predictions=[{"id": str(a["id"])} | {key: a[key] for key in _ANSWER} for a in answers],
                references=[{"id": str(row["id"]), "answers": row["answers"]} for row in questions],
            )
            return found

        return Prepared(
            model=self.load_model(),
            processing_class=processor,
            train_dataset=for_the_model(windows(train)),
            eval_dataset={name: for_the_model(features)},
            data_collator=DataCollatorWithPadding(processor),
            compute_metrics=compute_metrics,
        )
