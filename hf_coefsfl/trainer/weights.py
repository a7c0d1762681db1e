"""Which weights a trainer holds: of which round, on which base model, for which classes."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from datasets import ClassLabel
from peft import PeftModel

from ..federation.partition import LABEL_COLUMNS
from ..split.placeholders import unwrapped
from ..split.quantized import bits_of

if TYPE_CHECKING:
    from .trainer import SplitFedTrainer


@dataclass(frozen=True)
class Weights:
    """What tells the weights of a run from those of another round or another base model.

    Attributes:
        round: the round that they are from, counted from 1; 0: untrained.
        num_rounds: the rounds of the run.
        best: whether `load_best_model_at_end` chose the round.
        mib: mebibytes that had crossed the cut by then.
        base: the name or the folder of the model that was fine-tuned; "" if it has none.
        dtype: of its weights.
        quantised: what some of them were kept as, such as "nf4"; None: all are of that dtype.
        classes: their names by number; None if the model has no classes or they have no names.
    """

    round: int
    num_rounds: int
    best: bool
    mib: float
    base: str
    dtype: str
    quantised: str | None
    classes: dict[int, str] | None

    @classmethod
    def of(cls, trainer: SplitFedTrainer) -> Weights:
        """Return those that the trainer holds now."""
        model = unwrapped(trainer.split.model)
        best = trainer.best_round
        held = trainer.state.global_step if best is None else best
        return cls(
            held,
            trainer.args.num_rounds,
            best is not None,
            trainer.ledger.until(held).mib,
            full_path(getattr(model.config, "name_or_path", None) or ""),
            str(model.dtype).removeprefix("torch."),
            bits_of(model),
            class_names(model),
        )

    def __str__(self) -> str:
        """Return "best, round 2 of 3", or "round 3 of 3"."""
        return f"{'best, ' * self.best}round {self.round} of {self.num_rounds}"


def full_path(name: str) -> str:
    """Return the absolute path of a folder, and any other name as it is."""
    return os.path.abspath(name) if os.path.isdir(name) else name


def class_names(model: Any) -> dict[int, str] | None:
    """Return the names of a model's classes by number; None if there are none but the LABEL_0, ... of transformers."""
    if "Classif" not in type(model).__name__:
        return None
    names = {int(i): str(name) for i, name in dict(model.config.id2label or {}).items()}
    return None if all(name == f"LABEL_{i}" for i, name in names.items()) else dict(sorted(names.items()))


def adopt_class_names(model: Any, dataset: Any) -> None:
    """Give a model whose classes have no names those of the dataset's `ClassLabel`."""
    features = getattr(dataset, "features", None) or {}
    label: Any = next((features[name] for name in LABEL_COLUMNS if name in features), None)
    label = getattr(label, "feature", label)  # of tokens
    named = isinstance(label, ClassLabel) and label.num_classes == getattr(model.config, "num_labels", None)
    if named and "Classif" in type(model).__name__ and class_names(model) is None:
        model.config.id2label = dict(enumerate(label.names))
        model.config.label2id = {name: i for i, name in enumerate(label.names)}


def note_base_path(model: Any) -> None:
    """Let an adapter know the absolute path of a base model in a folder: then the adapter can be moved."""
    if isinstance(model, PeftModel):
        for config in model.peft_config.values():
            config.base_model_name_or_path = full_path(config.base_model_name_or_path or "") or None
