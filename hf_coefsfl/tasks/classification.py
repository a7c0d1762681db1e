"""Classification of texts and of pairs of texts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from datasets import Dataset
from transformers import AutoModelForSequenceClassification, AutoTokenizer, DataCollatorWithPadding, EvalPrediction

from .base import FineTuningTask, Prepared, TaskArguments, load_from_hub_or_folder
from .loading import with_class_labels
from .metrics import load_metric


@dataclass
class TextArguments(TaskArguments):
    """Options of the tasks on text."""

    max_length: int = field(default=256, metadata={"help": "Tokens of a sample; longer ones are truncated."})


@dataclass
class PairArguments(TextArguments):
    """Options of the tasks on pairs of texts."""

    max_length: int = field(default=128, metadata={"help": "Tokens of a pair; longer ones are truncated."})


class TextTask(FineTuningTask):
    """What the tasks on text share: the tokenizer."""

    model_name_or_path = "distilbert/distilroberta-base"
    arguments: TextArguments

    def load_processor(self) -> Any:
        """Return the tokenizer, with a padding token and room for the samples."""
        tokenizer = load_from_hub_or_folder(
            AutoTokenizer, self.model_id, "tokenizer", revision=self.arguments.model_revision or "main"
        )
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        length = self.arguments.max_length
        if not isinstance(length, int) or not 2 <= length <= tokenizer.model_max_length:
            raise ValueError(
                f"max_length={length}: the tokenizer of {self.model_id} allows 2 to "
                f"{tokenizer.model_max_length} tokens."
            )
        return tokenizer


class TextClassification(TextTask):
    """Classes of single texts."""

    pipeline_tag = "text-classification"
    arguments_class = TextArguments
    auto_model = AutoModelForSequenceClassification
    columns = {"text": "text", "label": "label"}
    truncates = True

    def build(self, train: Dataset, evals: dict[str, Dataset], processor: Any) -> Prepared:
        """Tokenise; a batch is padded to its longest sample."""
        train, evals, names = with_class_labels(train, evals, self.known_classes())
        texts = [role for role in self.roles if role != "label"]
        length = self.arguments.max_length  # `encode` must not hold the task: its hash names the cached rows

        def encode(rows: dict[str, list[Any]]) -> Any:
            columns = ([text or "" for text in rows[role]] for role in texts)
            return processor(*columns, truncation=True, max_length=length)

        def encoded(rows: Dataset) -> Dataset:
            return rows.map(encode, batched=True, remove_columns=texts, desc="Tokenising")

        model = self.load_classifier(names)
        if model.config.get_text_config().pad_token_id is None:
            model.config.get_text_config().pad_token_id = processor.pad_token_id
        return Prepared(
            model=model,
            processing_class=processor,
            train_dataset=encoded(train),
            eval_dataset={name: encoded(rows) for name, rows in evals.items()},
            data_collator=DataCollatorWithPadding(processor),
            compute_metrics=share_correct(),
            preprocess_logits_for_metrics=predicted_class,
        )


class Newsgroups(TextClassification):
    """20 Newsgroups: the topic of a post."""

    name = "newsgroups"
    title = "20 Newsgroups"
    dataset_name = "SetFit/20_newsgroups"
    eval_splits = {"test": "test"}


class MNLI(TextClassification):
    """MNLI: whether the premise entails the hypothesis, contradicts it, or neither."""

    name = "mnli"
    title = "MNLI"
    arguments_class = PairArguments
    dataset_name = "nyu-mll/glue"
    dataset_config_name = "mnli"
    columns = {"premise": "premise", "hypothesis": "hypothesis", "label": "label"}
    eval_splits = {"matched": "validation_matched", "mismatched": "validation_mismatched"}
    score_titles = {"matched": "MNLI-m", "mismatched": "MNLI-mm"}


def predicted_class(logits: Any, labels: Any) -> Any:
    """Return the class with the largest logit: all that evaluation has to keep of a sample."""
    return (logits[0] if isinstance(logits, tuple) else logits).argmax(-1)


def share_correct() -> Any:
    """Return the `compute_metrics` of a classification: the accuracy of the predicted classes."""
    accuracy = load_metric("accuracy")

    def compute_metrics(prediction: EvalPrediction) -> dict[str, float]:
        found: dict[str, float] = accuracy.compute(
            predictions=np.asarray(prediction.predictions), references=np.asarray(prediction.label_ids)
        )
        return found

    return compute_metrics
