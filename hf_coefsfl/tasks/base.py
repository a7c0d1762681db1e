"""What a fine-tuning task is: its dataset and columns, its preprocessing, its metrics, its usual model."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from datasets import Dataset
from transformers import AutoConfig, PreTrainedModel, set_seed

from .._suggest import did_you_mean
from . import digits
from .arguments import TaskArguments
from .loading import load_splits, pick, shortened, tell_truncated, with_column_of
from .metrics import NamedMetrics
from .model_weights import asked_to_quantise, quantisation_config
from .presets import Task

logger = logging.getLogger(__name__)


@dataclass
class Prepared:
    """The arguments of a `SplitFedTrainer` that come from a task."""

    model: PreTrainedModel
    processing_class: Any
    train_dataset: Dataset
    eval_dataset: dict[str, Dataset]
    data_collator: Callable[[list[dict[str, Any]]], dict[str, Any]]
    compute_metrics: Callable[[Any], dict[str, float]]
    preprocess_logits_for_metrics: Callable[[Any, Any], Any] | None = None
    metric_names: tuple[str, ...] = ()  # what compute_metrics and further_metrics return
    further_metrics: Callable[[Any, Dataset, str], dict[str, float]] | None = None  # see `EvaluatingTrainer`


class FineTuningTask:
    """Base of the kinds of tasks. A task on other data is this one with other arguments, or with another preset.

    Args:
        task: which data and model, unless the arguments say.
        arguments: of the task's `arguments_class`; what is None there takes the task's default.
        keep: a further column to keep of the training set, for instance one that names each row's client.
        model: a model to use as it is instead of loading one, such as a client's half; its classes are the task's.
    """

    pipeline_tag: ClassVar[str]  # as the Hub writes it
    auto_model: ClassVar[Any]
    label_role: ClassVar[str] = "label"
    default_metrics: ClassVar[tuple[str, ...]] = ("accuracy",)
    lower_is_better: ClassVar[tuple[str, ...]] = ()  # metrics of which less is better
    remove_unused_columns: ClassVar[bool] = True
    truncates: ClassVar[bool] = False  # whether texts are cut off at max_length tokens
    blocks: str | None = None  # path of the model's list of blocks, if it is not to be guessed

    def __init__(
        self, task: Task, arguments: TaskArguments, keep: str | None = None, model: PreTrainedModel | None = None
    ):
        self.task, self.name = task, task.name
        self.arguments = arguments
        self.model = model
        if keep in task.columns and keep != self.label_role:
            raise ValueError(f"partition_column={keep!r} is what the task trains on. Name another column, or copy it.")
        self.keep = None if keep in (self.label_role, "labels") else keep
        self.model_id = arguments.model_name_or_path or task.model_name_or_path
        if not (arguments.dataset_name or task.dataset_name):
            raise ValueError(
                f"{task.name} has no dataset of its own. Give --dataset_name: an id on the Hub, or a local folder or "
                "file."
            )
        self.dataset_id: str = arguments.dataset_name or str(task.dataset_name)
        own = task.dataset_config_name if self.dataset_id == task.dataset_name else None
        self.dataset_config = arguments.dataset_config_name or own
        self.title = task.title_of(self.dataset_id, self.dataset_config)
        self.roles = self._read_roles(arguments.columns)

    @cached_property
    def scoring(self) -> NamedMetrics:
        """The metrics of an evaluation; a ValueError if one of the names is wrong."""
        return NamedMetrics.of_classes(self.arguments.metrics or self.default_metrics)

    @property
    def reported(self) -> dict[str, str]:
        """The metrics that tables show, and their titles there."""
        return {name: name for name in self.scoring.scales}

    @property
    def higher_is_better(self) -> bool:
        """Whether more of the first metric is better."""
        return next(iter(self.reported)) not in self.lower_is_better

    def scale(self, metric: str) -> float:
        """Return what tables multiply a metric by: they are in percent."""
        return self.scoring.scales.get(metric, 1.0)

    def _read_roles(self, given: list[str] | None) -> dict[str, str]:
        """Return the column of each role: as given, else as on the Hub."""
        roles = dict(self.task.columns)
        for item in given or []:
            role, _, column = item.partition("=")
            if role not in roles or not column:
                near = did_you_mean(role, roles) if column else ""
                raise ValueError(f"columns={item!r} is not role=column.{near} The roles here are {', '.join(roles)}.")
            roles[role] = column
        return roles

    def roles_in(self, columns: Sequence[str], given: Collection[str]) -> dict[str, str]:
        """Return the roles to read from a dataset with these columns, and the column of each; some were `given`."""
        return self.roles

    def prepare(self, seed: int, *, train: bool = True, evaluation: bool = True) -> Prepared:
        """Load the dataset and the model, and preprocess.

        Args:
            seed: makes the new head.
            train: whether the dataset has rows to train on; a server has none.
            evaluation: whether it has rows to evaluate on; a client has none.
        """
        self._check_metrics()
        raw = self._raw_splits(train, evaluation)
        processor = self.load_processor()
        evals = {name: rows for name, rows in raw.items() if name != "train"}
        set_seed(seed)
        prepared = self.build(raw["train"], evals, processor)
        if self.truncates:
            length = getattr(self.arguments, "max_length", 0)
            tell_truncated({"train": prepared.train_dataset, **prepared.eval_dataset}, length)
        return prepared

    def _check_metrics(self) -> None:
        """Refuse metrics before anything is loaded."""
        _ = self.scoring

    def build(self, train: Dataset, evals: dict[str, Dataset], processor: Any) -> Prepared:
        """Turn rows with the task's roles as columns into what the trainer takes."""
        raise NotImplementedError

    def load_processor(self) -> Any:
        """Return the tokenizer or image processor of the model."""
        raise NotImplementedError

    def load_model(self, **kwargs: Any) -> PreTrainedModel:
        """Return the model, with frozen weights in the numbers that the arguments name."""
        if self.model is not None:
            return self.model
        kwargs["revision"] = self.arguments.model_revision or "main"
        if asked_to_quantise(self.arguments):
            config = load_from_hub_or_folder(AutoConfig, self.model_id, "model", **kwargs)
            with torch.device("meta"):
                skeleton = self.auto_model.from_config(config)
            kwargs["quantization_config"] = quantisation_config(skeleton, self.arguments, self.blocks)
        dtype = getattr(torch, self.arguments.dtype)
        model: PreTrainedModel = load_from_hub_or_folder(self.auto_model, self.model_id, "model", dtype=dtype, **kwargs)
        return model

    def load_classifier(self, names: list[str]) -> PreTrainedModel:
        """Return the model with a head for the named classes."""
        return self.load_model(
            num_labels=len(names),
            id2label=dict(enumerate(names)),
            label2id={name: i for i, name in enumerate(names)},
            ignore_mismatched_sizes=True,
        )

    def known_classes(self) -> list[str] | None:
        """Return the classes of a model that was given, in order; None: the dataset says which there are."""
        if self.model is None:
            return None
        named: Any = self.model.config.id2label
        return [str(named[i]) for i in range(len(named))]

    def _raw_splits(self, train: bool = True, evaluation: bool = True) -> dict[str, Dataset]:
        """Return "train" and the evaluation sets by name, with a column for each role, cut to the wanted samples.

        If one of the two is not wanted, its set is empty.
        """
        arguments = self.arguments
        splits = load_splits(self.dataset_id, self.dataset_config)
        chosen = {"train": arguments.train_split} if train else {}
        chosen |= self._eval_splits(splits) if evaluation else {}
        limits = dict.fromkeys(chosen, arguments.max_eval_samples) | {"train": arguments.max_train_samples}
        given = {item.partition("=")[0] for item in arguments.columns or []}
        rows = {name: shortened(splits, split, limits[name], self.dataset_id) for name, split in chosen.items()}
        picked = {
            name: pick(part, self.roles_in(part.column_names, given), given, self.task.optional_roles)
            for name, part in rows.items()
        }
        for name in () if train and evaluation else ("validation",) if train else ("train",):
            picked[name] = next(iter(picked.values())).select([])
        if self.keep is not None and train:
            picked["train"] = with_column_of(picked["train"], rows["train"], self.keep)
        return picked

    def _eval_splits(self, splits: Mapping[str, Dataset]) -> dict[str, str]:
        if self.arguments.eval_split:
            # Rows to train on may be evaluated too, beside the set that is called "train" everywhere.
            return {"seen" if split == "train" else split: split for split in self.arguments.eval_split}
        if all(split in splits for split in self.task.eval_splits.values()):
            return dict(self.task.eval_splits)
        other = next((split for split in ("validation", "test", "dev") if split in splits), None)
        if other is None:
            raise ValueError(
                f"{self.dataset_id} has no split to evaluate on, only {', '.join(splits)}. Name one with --eval_split."
            )
        return {other: other}

    def scores(self, metrics: Mapping[str, float], names: list[str]) -> dict[str, float]:
        """Return what a table shows of an evaluation of the sets `names`, in percent if the metric is a share."""
        scores = {}
        named = self.task.score_titles if self.task.is_own(self.dataset_id, self.dataset_config) else {}
        for name in names:
            prefix = "eval_" if len(names) == 1 else f"eval_{name}_"
            for metric, title in self.reported.items():
                if len(names) > 1 and name in named:
                    title = named[name] if len(self.reported) == 1 else f"{named[name]} {title}"
                elif len(names) > 1:
                    title = f"{title} ({name})"
                if prefix + metric in metrics:
                    scores[title] = metrics[prefix + metric] * self.scale(metric)
        return scores


def load_from_hub_or_folder(auto: Any, name: str, what: str, **kwargs: Any) -> Any:
    """Return `auto.from_pretrained(name)`; a failure is one clear error."""
    if name == digits.MODEL and not Path(name).exists():
        name = digits.digits_model()
    try:
        return auto.from_pretrained(name, **kwargs)
    except Exception as error:  # the Hub, the network, the cache and the files each have their own
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        where = "of the folder" if Path(name).is_dir() else "from the Hub"
        raise ValueError(
            f"The {what} {name!r} cannot be loaded {where} ({reason}). --model_name_or_path takes a local folder that "
            "save_pretrained wrote, or the id of a model on the Hub."
        ) from error
