"""Classification of texts and of pairs of texts."""

from __future__ import annotations

from typing import Any, ClassVar

from datasets import Dataset
from transformers import AutoModelForSequenceClassification, AutoTokenizer, DataCollatorWithPadding

from .arguments import TextArguments
from .base import FineTuningTask, Prepared, load_from_hub_or_folder
from .loading import check_texts, with_class_labels
from .metrics import class_scores


class TextTask(FineTuningTask):
    """What the tasks on text share: the tokenizer."""

    arguments: TextArguments
    needed_texts: ClassVar[tuple[str, ...]] = ()  # roles whose every row must hold a text

    def _raw_splits(self, train: bool = True, evaluation: bool = True) -> dict[str, Dataset]:
        found = super()._raw_splits(train, evaluation)
        for name, rows in found.items():
            where = "the training set" if name == "train" else name
            for role in [role for role in self.text_roles if role in rows.column_names]:
                self.check_column(rows, role, where)
        return found

    def check_column(self, rows: Dataset, role: str, where: str) -> None:
        """Refuse a column that does not hold what its role needs."""
        check_texts(rows, role, where, missing=role not in self.needed_texts)

    @property
    def text_roles(self) -> tuple[str, ...]:
        """The roles whose columns hold texts."""
        return self.needed_texts

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
    """Classes of texts, or of pairs of texts."""

    pipeline_tag = "text-classification"
    auto_model = AutoModelForSequenceClassification
    truncates = True

    @property
    def text_roles(self) -> tuple[str, ...]:
        """All but the label; an empty cell is an empty text."""
        return tuple(role for role in self.roles if role != self.label_role)

    def build(self, train: Dataset, evals: dict[str, Dataset], processor: Any) -> Prepared:
        """Tokenise; a batch is padded to its longest sample."""
        train, evals, names = with_class_labels(train, evals, self.known_classes())
        texts = [role for role in self.roles if role != "label" and role in train.column_names]
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
            compute_metrics=class_scores(self.scoring),
            preprocess_logits_for_metrics=predicted_class,
            metric_names=tuple(self.scoring.scales),
        )


def predicted_class(logits: Any, labels: Any) -> Any:
    """Return the class with the largest logit: all that evaluation has to keep of a sample."""
    return (logits[0] if isinstance(logits, tuple) else logits).argmax(-1)
