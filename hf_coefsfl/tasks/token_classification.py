"""Classification of the words of a text, such as named entities."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from datasets import ClassLabel, Dataset
from transformers import AutoModelForTokenClassification, AutoTokenizer, DataCollatorForTokenClassification

from ..federation.data_checks import DataError
from .base import Prepared, load_from_hub_or_folder
from .classification import TextTask, predicted_class
from .loading import numbered_classes
from .metrics import IGNORED, class_scores


class TokenClassification(TextTask):
    """Classes of words. A word's first token has its label; further tokens and special ones are not counted."""

    pipeline_tag = "token-classification"
    auto_model = AutoModelForTokenClassification
    label_role = "tags"
    truncates = True
    default_metrics = ("accuracy", "f1")

    def load_processor(self) -> Any:
        """Return a tokenizer that takes words and tells which token belongs to which."""
        tokenizer = super().load_processor()
        if not getattr(tokenizer, "is_fast", False):
            raise ValueError(
                f"{type(tokenizer).__name__} does not tell the words of its tokens, which labels are aligned by. Use a "
                "fast tokenizer, as AutoTokenizer loads."
            )
        if getattr(tokenizer, "add_prefix_space", None) is False:  # RoBERTa's takes words only with it
            revision = self.arguments.model_revision or "main"
            tokenizer = load_from_hub_or_folder(
                AutoTokenizer, self.model_id, "tokenizer", revision=revision, add_prefix_space=True
            )
        return tokenizer

    def build(self, train: Dataset, evals: dict[str, Dataset], processor: Any) -> Prepared:
        """Tokenise words and align their labels with the tokens."""
        names = self.known_classes() or class_names({"the training set": train, **evals})
        length = self.arguments.max_length  # `encode` must not hold the task: its hash names the cached rows
        numbers = {name: number for number, name in enumerate(names)}

        def encoded(name: str, rows: Dataset) -> Dataset:
            feature = getattr(rows.features["tags"], "feature", None)
            kept = [column for column in rows.column_names if column not in ("tokens", "tags")]
            # Numbers are places in the list of names, unless the dataset names its numbers itself.
            own = [numbers.get(tag) for tag in feature.names] if isinstance(feature, ClassLabel) else None

            def encode(batch: dict[str, list[Any]], places: list[int]) -> dict[str, list[Any]]:
                for place, *lists in zip(places, batch["tokens"], batch["tags"], strict=True):
                    if None in lists:
                        raise DataError(f"Row {place} of {name} has no {'tokens' if lists[0] is None else 'tags'}.")
                tokens = processor(batch["tokens"], is_split_into_words=True, truncation=True, max_length=length)
                found: dict[str, list[Any]] = {key: [] for key in (*tokens, "labels", *kept)}
                for i, (words, tags) in enumerate(zip(batch["tokens"], batch["tags"], strict=True)):
                    if len(words) != len(tags):
                        raise DataError(
                            f"Row {places[i]} of {name} has {len(words)} words and {len(tags)} tags. Give each word "
                            "one tag."
                        )
                    labels = align(tokens.word_ids(i), [_number(tag, own, numbers, places[i], name) for tag in tags])
                    if all(label == IGNORED for label in labels):  # nothing to learn
                        continue
                    for key in tokens:
                        found[key].append(tokens[key][i])
                    found["labels"].append(labels)
                    for key in kept:
                        found[key].append(batch[key][i])
                return found

            return rows.map(
                encode, batched=True, with_indices=True, remove_columns=rows.column_names, desc="Tokenising"
            )

        return Prepared(
            model=self.load_classifier(names),
            processing_class=processor,
            train_dataset=encoded("the training set", train),
            eval_dataset={name: encoded(repr(name), rows) for name, rows in evals.items()},
            data_collator=DataCollatorForTokenClassification(processor, label_pad_token_id=IGNORED),
            compute_metrics=class_scores(self.scoring),
            preprocess_logits_for_metrics=predicted_class,
            metric_names=tuple(self.scoring.scales),
        )


def class_names(sets: Mapping[str, Dataset]) -> list[str]:
    """Return the names of the tags: of a `ClassLabel`, or all that occur, in order."""
    features = [getattr(rows.features["tags"], "feature", None) for rows in sets.values()]
    named = next((feature for feature in features if isinstance(feature, ClassLabel)), None)
    if named is not None:
        return list(named.names)
    found = {tag for rows in sets.values() for tags in rows["tags"] for tag in tags or []} - {None, -1}
    if not found:
        raise ValueError("No word has a tag: all are empty or -1.")
    if all(isinstance(tag, int) for tag in found):
        return numbered_classes(sorted(found), lambda tag: _first_with(sets, tag))
    if not all(isinstance(tag, str) for tag in found):
        kinds = ", ".join(sorted({type(tag).__name__ for tag in found}))
        raise ValueError(f"The tags must be all numbers or all names, got {kinds}.")
    return sorted(found)


def _first_with(sets: Mapping[str, Dataset], tag: int) -> str:
    """Return the set and the row of a tag."""
    found = ((name, row) for name, rows in sets.items() for row, tags in enumerate(rows["tags"]) if tag in (tags or []))
    return "{}, row {}".format(*next(found))


def align(words: list[int | None], labels: list[int]) -> list[int]:
    """Return a label for each token: that of its word on the word's first token, -100 elsewhere.

    ```python
    >>> align([None, 0, 1, 1, None], [3, 5])
    [-100, 3, 5, -100, -100]

    ```
    """
    first = [word is not None and word != before for before, word in zip([None, *words], words, strict=False)]
    return [labels[word] if new and word is not None else IGNORED for new, word in zip(first, words, strict=True)]


def _number(tag: Any, own: list[int | None] | None, numbers: Mapping[str, int], row: int, name: str) -> int:
    """Return the class number of a tag, -100 for one that is not annotated."""
    if tag is None or tag == -1:
        return IGNORED
    if isinstance(tag, str):
        found = numbers.get(tag)
    elif own is not None:
        found = own[tag] if 0 <= tag < len(own) else None
    else:
        found = tag if 0 <= tag < len(numbers) else None
    if found is None:
        raise DataError(
            f"Row {row} of {name} has the tag {tag!r}, which is none of the {len(numbers)} classes: "
            f"{', '.join(list(numbers)[:5])} ..."
        )
    return found
