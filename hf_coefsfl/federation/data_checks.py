"""Rows that cannot be trained on: found in whole columns before the first round, else when their batch comes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from datasets import Image
from numpy.typing import NDArray
from torch import Tensor, nn

from ..protocol.loss import IGNORED, LANGUAGE_MODELS, ONE_LABEL_A_SAMPLE, SPANS, LossSpec
from .clients import Federation
from .columns import Values, chunks, column_names, unreadable_image

Collate = Callable[[list[Any]], Mapping[str, Any]]
_RENAMED = ("label", "label_ids")  # by collators, to labels
_POSITIONS = ("position_embeddings", "position_embedding", "embed_positions", "wpe")
_FILL_IN = "Fill it in, or leave the row out (dataset.filter)."
_REPAIR = "Repair it, or leave the row out (dataset.filter)."
_EMPTY = f"The text of {{where}} is empty: the tokenizer gives no token that a model could read. {_FILL_IN}"
_ONE_CLASS = "For one class a sample load BERT, GPT-2 or the like with AutoModelForSequenceClassification."


class DataError(ValueError):
    """A row cannot be trained on. The message may quote it, so clients of a deployment keep it to themselves."""


@dataclass(frozen=True)
class Fault:
    """What is wrong with a row: a sentence with a place for whose row it is."""

    row: int
    sentence: str

    def error(self, owner: str, row: int | None = None) -> DataError:
        """Return the error for a row of `owner`, which may have another number there."""
        return DataError(self.sentence.replace("{where}", f"{owner}, row {self.row if row is None else row},"))


@dataclass(frozen=True)
class RowCheck:
    """What the rows of a model's data must be.

    Attributes:
        loss_spec: what the labels are for.
        model_name: the class of the model, for messages.
        classes: the number of each class by its name.
        vocab_size: tokens that the model knows; None: not known.
        max_tokens: positions of the model; None: no limit is known.
    """

    loss_spec: LossSpec
    model_name: str = "the model"
    classes: Mapping[str, int] = field(default_factory=dict)
    vocab_size: int | None = None
    max_tokens: int | None = None

    @classmethod
    def of(cls, model: Any, loss_spec: LossSpec) -> RowCheck:
        """Read the limits off a model, or off a client's half of it (not wrapped by PEFT)."""
        text = model.config.get_text_config()
        vocabulary = getattr(text, "vocab_size", None)
        try:
            embedding = model.get_input_embeddings()
        except (AttributeError, NotImplementedError):
            embedding = None
        fits = isinstance(embedding, nn.Embedding) and embedding.num_embeddings == vocabulary
        positions = _positions(model, getattr(text, "max_position_embeddings", None))
        classes = dict(getattr(model.config, "label2id", None) or {})
        return cls(loss_spec, type(model).__name__, classes, vocabulary if fits else None, positions)

    # ---- A dataset, ahead ----

    def dataset(self, data: Any, owner: Callable[[int], str], collate: Callable[[int], Mapping[str, Any]]) -> None:
        """Raise a `DataError` for an unfit row of a dataset whose columns can be read by themselves.

        Args:
            data: a `datasets.Dataset` or a list of dicts; of others nothing is known before a batch comes.
            owner: whose a row is.
            collate: makes a batch of a row. A fault that it mends (labels that it numbers, texts that it cuts) is none.
        """
        for fault in self._column_faults(data):
            try:
                mended = self.batch(collate(fault.row)) is None
            except Exception as error:
                raise fault.error(owner(fault.row)) from error
            if not mended:
                raise fault.error(owner(fault.row))

    def clients(self, federation: Federation, collate: Collate) -> None:
        """Raise a `DataError` for an unfit row of the clients' data."""
        for client, data in enumerate(federation.datasets):
            self.dataset(data, partial(_owner, federation, client), partial(_collated, federation, client, collate))

    def _column_faults(self, data: Any) -> Iterator[Fault]:
        """Yield the first fault of each column."""
        names = column_names(data)
        labels = [name for name in self.loss_spec.label_names if name in names]
        if "labels" in self.loss_spec.label_names and "labels" not in names:
            labels += [name for name in _RENAMED if name in names]
        for name in labels:
            yield from _first((start, self._label_fault(name, values)) for start, values in chunks(data, name))
        if "input_ids" in names:
            yield from _first((start, self._token_fault(values)) for start, values in chunks(data, "input_ids"))
        if "attention_mask" in names:
            yield from _first((start, _mask_fault(values)) for start, values in chunks(data, "attention_mask"))
        for name in names:
            image = isinstance((getattr(data, "features", None) or {}).get(name), Image)
            found = unreadable_image(data, name) if image else None
            if found is not None:
                yield Fault(found[0], f"The image of {{where}} cannot be read ({type(found[1]).__name__}). {_REPAIR}")

    # ---- A batch, when it comes ----

    def batch(self, batch: Mapping[str, Any]) -> Fault | None:
        """Return the first fault of a collated batch; its row is the place in the batch."""
        missing = [name for name in self.loss_spec.label_names if name not in batch]
        if missing:
            return Fault(0, f"The batch of {{where}} has no {missing[0]}: the loss needs labels.")
        tokens, mask = (_tensor_values(batch.get(name)) for name in ("input_ids", "attention_mask"))
        fault = self.labels(batch) or (None if tokens is None else self._token_fault(tokens))
        return fault or (None if mask is None else _mask_fault(mask))

    def labels(self, batch: Mapping[str, Any]) -> Fault | None:
        """Return the first fault of the labels that a batch has."""
        for name in self.loss_spec.label_names:
            values = _tensor_values(batch.get(name))
            fault = None if values is None else self._label_fault(name, values)
            if fault is not None:
                return fault
        return None

    # ---- The rules ----

    def _label_fault(self, name: str, values: Values) -> Fault | None:
        """Return the first label that does not fit the loss."""
        label = "Label {value} of {where}"
        if values.missing is not None:
            return Fault(values.missing, f"Label None of {{where}} is missing. {_FILL_IN}")
        flat, kind, listed, count = values.flat, values.flat.dtype.kind, values.widths is not None, self._count
        if kind == "f" and np.isnan(flat).any():
            return _fault(values, np.isnan(flat), f"{label} is missing. {_FILL_IN}")
        wanted, every = self._wanted(name, kind, listed), np.ones(len(flat), dtype=bool)
        if wanted is None:
            return None
        need = "a number is needed" if wanted == "number" else "a whole number is needed"
        need = f"a class is a whole number 0..{count - 1}" if wanted in ("class", "tag") else need
        cast = f'Cast the column: dataset.cast_column({name!r}, Value("int64")).'
        if wanted == "classes":
            need, cast = f"a sample has {count} floats, 1.0 or 0.0", "Make them floats (dataset.map)."
        if kind == "O":
            return _fault(values, every, f"{label} is not a number: {need}. {self._numbering(name, flat)}")
        if kind == "b":
            return _fault(values, every, f"{label} is a bool: {need}. {cast}")
        if wanted == "number":
            return None
        if wanted == "classes":
            right = values.widths is not None and kind == "f" and bool((values.widths == count).all())
            several = f"a sample has {count} floats here, 1.0 for each of its classes and 0.0 for the others"
            return None if right else _fault(values, every, f"{label} does not fit: {several}.")
        if kind == "f":
            regression = " For regression load the model with num_labels=1." if wanted == "class" else ""
            return _fault(values, every, f"{label} is a float: {need}. {cast}{regression}")
        if wanted in ("tag", "token") and not listed:
            tokens = "one for each token." if wanted == "tag" else "tokens: tokenise the name of the class as a text."
            return _fault(values, every, f"{label} is one number, and {self.model_name} needs {tokens} {_ONE_CLASS}")
        if wanted == "class" and values.widths is not None and (values.widths != 1).any():
            several = f"For several classes a sample give {count} floats (1.0 or 0.0)"
            wide = values.widths[values.rows] != 1
            return _fault(values, wide, f"{label} is in a list, and a sample has one class here. {several}.")
        high = self.vocab_size if wanted == "token" else count
        if wanted == "position" or high is None:
            return None
        wrong = (flat != IGNORED) & ((flat < 0) | (flat >= high))
        if wanted == "token":
            return _fault(values, wrong, f"{label} is outside the vocabulary 0..{high - 1}. Use the model's tokenizer.")
        return _fault(
            values,
            wrong,
            f"{label} is outside 0..{high - 1}: the model has num_labels={high}. Load it with the number of classes of "
            "the dataset, map the labels, or leave out rows without a class (dataset.filter).",
        )

    @property
    def _count(self) -> int:
        return self.loss_spec.num_labels

    def _wanted(self, name: str, kind: str, listed: bool) -> str | None:
        """Return what a label is: class, classes, number, tag, token or position; None: not known."""
        spec = self.loss_spec
        if spec.loss_type == SPANS:
            return "position"
        if name not in ("labels", *_RENAMED):
            return None
        if spec.loss_type in LANGUAGE_MODELS:
            return "token"
        if spec.loss_type == "ForTokenClassification":
            return "tag"
        if spec.loss_type not in ONE_LABEL_A_SAMPLE:
            return None
        if spec.problem_type is not None:
            return {"regression": "number", "multi_label_classification": "classes"}.get(spec.problem_type, "class")
        return "number" if spec.num_labels == 1 else "classes" if kind == "f" and listed else "class"

    def _numbering(self, name: str, flat: NDArray[Any]) -> str:
        """Return how labels that are names become numbers."""
        known = self.classes.get(flat[0]) if len(flat) else None
        if known is not None:
            return f"The model knows it as class {known}: map the column with model.config.label2id."
        return f"dataset.class_encode_column({name!r}) numbers the classes; give the model their names as id2label."

    def _token_fault(self, values: Values) -> Fault | None:
        """Return the first text that is too long, or the first token that the model does not know."""
        if values.missing is not None:
            return Fault(values.missing, f"The text of {{where}} is missing. {_FILL_IN}")
        if values.widths is None or (len(values.flat) and values.flat.dtype.kind not in "iu"):
            return None
        if (values.widths == 0).any():
            return Fault(int(np.argmax(values.widths == 0)), _EMPTY)
        if self.max_tokens is not None and (values.widths > self.max_tokens).any():
            row = int(np.argmax(values.widths > self.max_tokens))
            return Fault(
                row,
                f"The text of {{where}} has {values.widths[row]} tokens, but the model {self.max_tokens} positions. "
                f"Truncate it: tokenizer(..., truncation=True, max_length={self.max_tokens}).",
            )
        if self.vocab_size is None:
            return None
        wrong = (values.flat < 0) | (values.flat >= self.vocab_size)
        limit = f"0..{self.vocab_size - 1}. Tokenise with the tokenizer of the model."
        return _fault(values, wrong, f"Token {{value}} of {{where}} is outside the vocabulary {limit}")


def _owner(federation: Federation, client: int, row: int) -> str:
    return f"client {federation.name(client) if len(federation.datasets) > 1 else federation.owner(row)}"


def _collated(federation: Federation, client: int, collate: Collate, row: int) -> Mapping[str, Any]:
    return collate([federation.dataset(client)[row]])


def _fault(values: Values, wrong: NDArray[np.bool_], sentence: str) -> Fault | None:
    """Return the first of the entries that are wrong; it replaces `{value}` in the sentence."""
    places = np.flatnonzero(wrong)
    if not len(places):
        return None
    value = values.flat[places[0]]
    text = repr(value.item() if hasattr(value, "item") else value)
    text = text if len(text) <= 60 else text[:57] + "..."
    return Fault(int(values.rows[places[0]]), sentence.replace("{value}", text))


def _mask_fault(values: Values) -> Fault | None:
    """Return the first row that is nothing but padding. Masks of floats may be added to scores: 0 is read there."""
    if values.widths is None or values.missing is not None or values.flat.dtype.kind not in "iub":
        return None
    read = np.bincount(values.rows, weights=values.flat != 0, minlength=len(values.widths))
    return Fault(int(np.argmin(read)), _EMPTY) if len(read) and not read.min() else None


def _first(found: Iterable[tuple[int, Fault | None]]) -> Iterator[Fault]:
    """Yield the first fault, whose row counts from the start of its chunk."""
    for start, fault in found:
        if fault is not None:
            yield Fault(start + fault.row, fault.sentence)
            return


def _tensor_values(t: Any) -> Values | None:
    if not isinstance(t, Tensor) or t.dim() not in (1, 2):
        return None
    t = t.detach().cpu()
    width = t.shape[1] if t.dim() == 2 else 1
    flat = (t.float() if t.is_floating_point() else t).reshape(-1).numpy()
    return Values(flat, np.arange(len(flat)) // max(width, 1), np.full(len(t), width) if t.dim() == 2 else None)


def _positions(model: nn.Module, stated: int | None) -> int | None:
    """Return how many positions a table of the model has; rotary and relative ones have no end."""
    sizes = []
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and name.rpartition(".")[2] in _POSITIONS:
            offset = getattr(module, "offset", 0)  # OPT's and BART's table has so many rows more
            skipped = 0 if module.padding_idx is None else module.padding_idx + 1  # RoBERTa counts from there
            if module.num_embeddings - offset == stated:  # else it is not that of the text
                sizes.append(stated - (skipped if not offset else 0))
    return min(sizes, default=None)


def unreadable_row(rows: Iterable[int], read: Callable[[int], Any], owner: str) -> DataError | None:
    """Return the error for the first of some rows that cannot be read by itself; None: each can."""
    for row in rows:
        try:
            read(row)
        except Exception as error:
            reason = f"{type(error).__name__}: {str(error).strip().rstrip('.')}"
            return DataError(f"Row {row} of {owner} cannot be read ({reason}). {_REPAIR}")
    return None
