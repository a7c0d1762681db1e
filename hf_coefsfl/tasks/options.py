"""The options of a recipe: from a command line, a YAML or JSON file, or both."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch
import yaml
from transformers import HfArgumentParser, TrainingArguments
from transformers.hf_argparser import string_to_bool

from .._parser import OptionParser
from .._suggest import did_you_mean
from ..config import SplitFedConfig
from ..methods import DEFAULT_METHOD, METHODS
from . import Task, TaskArguments
from .metrics import METRICS

# What recipes set otherwise than `SplitFedConfig`.
DEFAULTS = {
    "eval_strategy": "steps",
    "eval_steps": 10,
    "save_total_limit": 2,
    "per_device_eval_batch_size": 32,
    "dataloader_pin_memory": torch.accelerator.is_available(),
}
_TRAINING = (
    "output_dir", "overwrite_output_dir", "learning_rate", "lr_scheduler_type", "per_device_train_batch_size",
    "per_device_eval_batch_size", "train_sampling_strategy", "weight_decay", "max_grad_norm", "seed", "data_seed",
    "bf16", "gradient_checkpointing", "use_cpu", "eval_strategy", "eval_steps", "logging_steps", "save_strategy",
    "save_steps", "save_total_limit", "load_best_model_at_end", "metric_for_best_model", "resume_from_checkpoint",
    "report_to", "disable_tqdm", "push_to_hub", "hub_model_id", "hub_strategy", "hub_private_repo", "hub_revision",
)  # fmt: skip
_VALUES: dict[Any, str] = {int: "N", float: "X", string_to_bool: "true|false"}
# What a recipe decides itself.
_DECIDED = ("max_steps", "num_train_epochs", "do_train", "do_eval", "do_predict", "remove_unused_columns")
_RARE = "further arguments of transformers.TrainingArguments"


class _Formatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Show defaults, and leave the description as it is."""


class RecipeParser(OptionParser, HfArgumentParser):
    """The parser of a task's recipe, with options in groups and errors of one line.

    Args:
        task: the task.
        rare: whether the help shows the options that are rarely needed.
        kwargs: of `argparse.ArgumentParser`.
    """

    def __init__(self, task: Task, *, rare: bool, **kwargs: Any):
        self.options: dict[str, argparse.Action] = {}
        self.rare, self.texts = rare, _texts(task)
        federation, trainers = ({f.name for f in dataclasses.fields(c)} for c in (SplitFedConfig, TrainingArguments))
        self.members = {
            "the task": {f.name for f in dataclasses.fields(task.arguments_class)},
            "the federation": federation - trainers - set(_TRAINING),
            "training (an option that counts steps counts rounds)": set(_TRAINING),
            _RARE: trainers - {*_TRAINING, *_DECIDED},
        }
        super().__init__(cast(Any, [task.arguments_class, SplitFedConfig]), **kwargs)

    @cached_property
    def groups(self) -> dict[str, Any]:
        """The groups in the order of the help."""
        return {title: self.add_argument_group(title) for title in self.members}

    def add_argument(self, *names: str, **kwargs: Any) -> argparse.Action:
        """Add an option to its group. The help does not show a default of None."""
        name = kwargs.get("dest") or names[0].lstrip("-")
        if name in _DECIDED:
            return argparse.Action(names, name)
        title = next((title for title, members in self.members.items() if name in members), None)
        if title is None:
            return super().add_argument(*names, **kwargs)
        negation = kwargs.get("action") == "store_false"  # --no_x says what --x false says
        hidden = negation or (title == _RARE and not self.rare)
        kwargs["help"] = argparse.SUPPRESS if hidden else self.texts.get(name, kwargs["help"])
        if kwargs.get("default") is None or name == "cut":
            kwargs["default"] = argparse.SUPPRESS
        if not negation:
            kwargs["metavar"] = _VALUES.get(kwargs["type"], "TEXT")
        option: argparse.Action = self.groups[title].add_argument(names[0], **kwargs)
        return self.options.setdefault(name, option)


def make_parser(
    task: Task,
    *,
    method: str = DEFAULT_METHOD,
    description: str = "",
    prog: str | None = None,
    rare: bool = False,
) -> RecipeParser:
    """Return the parser of a task's recipe; its help shows rarely needed options only if `rare`."""
    parser = RecipeParser(
        task,
        rare=rare,
        prog=prog,
        usage="%(prog)s [--config options.yaml] [--option value ...]",
        description=description,
        formatter_class=_Formatter,
    )
    parser.set_defaults(
        method=method,
        model_name_or_path=task.model_name_or_path,
        dataset_name=task.dataset_name,
        **DEFAULTS,
    )
    parser.add_argument(
        "options_file",
        nargs="?",
        default=argparse.SUPPRESS,
        help="the same as --config",
    )
    parser.add_argument(
        "--config",
        metavar="FILE",
        default=argparse.SUPPRESS,
        help="YAML or JSON file of options; those given here overrule it. Its `env` sets environment variables",
    )
    parser.add_argument("--help_all", action="store_true", default=argparse.SUPPRESS, help="show all options and exit")
    return parser


def _texts(task: Task) -> dict[str, str]:
    """Return the help of the options whose defaults or choices depend on the task or the recipes."""
    roles = " ".join(f"{role}={column}" for role, column in task.columns.items())
    splits = " ".join(task.eval_splits.values())
    metrics = ", ".join(METRICS)
    return {
        "metrics": f"Metrics by name: {metrics}, a metric of the Hub or the folder of one. Default: the task's.",
        "columns": f"Columns of the dataset, as role=column. Default: {roles}.",
        "eval_split": f"Splits to evaluate on. Default: {splits}; else validation or test.",
        "method": f"One of {', '.join(sorted(METHODS))}; `coefsfl methods` tells more.",
        "cut": "Number of blocks on the client. Default: a third of the model's, the paper's share.",
        "output_dir": "Where everything goes. Default: outputs/<task>-<method>, or <dataset>-<method> of own data.",
        "weight_decay": "Weight decay of the local updates, on all trained parameters.",
        "eval_strategy": "no or steps (every eval_steps rounds).",
        "eval_steps": "Rounds between evaluations; below 1, as a share of num_rounds. Default: logging_steps.",
        "save_strategy": "no, steps (every save_steps rounds) or best.",
        "train_sampling_strategy": "random, or group_by_length: batches of samples of like length.",
        "hub_strategy": "every_save (in the background, and at the end) or end.",
        "resume_from_checkpoint": "Checkpoint to resume from, or `last`: the newest of output_dir, if there is one.",
    }


def parse_options(
    task: Task,
    *,
    method: str = DEFAULT_METHOD,
    description: str = "",
    prog: str | None = None,
    argv: Sequence[str] | None = None,
) -> tuple[RecipeParser, TaskArguments, SplitFedConfig]:
    """Return the parser, the task's arguments and the configuration; bad options end the program with one line.

    A `cut` that is not given is 0: it depends on the model.
    """
    given = list(sys.argv[1:] if argv is None else argv)
    parser = make_parser(task, method=method, description=description, prog=prog, rare="--help_all" in given)
    if "--help_all" in given:
        parser.print_help()
        parser.exit()
    try:
        first = parser.parse_args(given)
        files = [getattr(first, name) for name in ("config", "options_file") if hasattr(first, name)]
        if len(files) > 1:
            raise ValueError(f"{files[1]!r} and --config {files[0]!r} both name a file of options. Give one.")
        for file in files:
            parser.set_defaults(**_read_file(Path(file), parser))
        arguments, config = _build(task, parser, given)
    except (ValueError, TypeError, OSError) as error:
        parser.error(str(error))
    return parser, arguments, config


def parse_values(task: Task, given: Mapping[str, Any], prog: str) -> tuple[TaskArguments, SplitFedConfig]:
    """Return the task's arguments and the configuration for options and their values; a bad one is a ValueError.

    Nothing here is a command line: a value stays a value, whatever it looks like, and no file is read. A text for an
    option that takes several values is a list: separated by commas if there is one, else by spaces.
    """
    parser = make_parser(task, prog=prog)
    values: dict[str, Any] = {}
    for name, value in given.items():
        if name not in parser.options:
            raise ValueError(f"{prog}: there is no option {name!r}.{did_you_mean(name, parser.options)}")
        listed = parser.options[name].nargs == "+"
        items = _items(str(value)) if listed else [str(value)]
        for item in items:
            if not item or (isinstance(value, str) and item.startswith("-")):
                raise ValueError(
                    f"{prog}: {name}={value!r} has the value {item!r}. Values are not empty and do not begin with a "
                    "dash; each option stands by itself."
                )
        values[name] = items if listed else items[0]
    parser.set_defaults(**values)
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return _build(task, parser, [])  # the parser turns texts that are defaults into what their option is
    except SystemExit:
        raise ValueError(said.getvalue().strip()) from None
    except (TypeError, OSError) as error:
        raise ValueError(f"{prog}: {error}") from error


def _items(text: str) -> list[str]:
    """Return the items of a list.

    ```python
    >>> _items("text=note label=code"), _items("text=the note, label=code"), _items("text=the note,")
    (['text=note', 'label=code'], ['text=the note', 'label=code'], ['text=the note'])

    ```
    """
    return [item.strip() for item in text.strip().removesuffix(",").split(",")] if "," in text else text.split()


def _build(task: Task, parser: RecipeParser, argv: Sequence[str]) -> tuple[TaskArguments, SplitFedConfig]:
    found = vars(parser.parse_args(argv))
    cut = found.pop("cut", None)
    arguments = _construct(task.arguments_class, found)
    found.setdefault("output_dir", f"outputs/{_name(task, found)}-{found['method']}")
    config = _construct(SplitFedConfig, found | ({} if cut is None else {"cut": cut}))
    if cut is None:
        config.cut = 0
    if config.partition_column == "label":
        config.partition_column = "labels"  # as all tasks call it
    return arguments, config


def _name(task: Task, found: Mapping[str, Any]) -> str:
    """Return what the output folder, and with it the card, is called by: the preset, or your own dataset."""
    dataset, config = found.get("dataset_name"), found.get("dataset_config_name")
    if not dataset or task.is_own(dataset, config):
        return task.name
    return re.sub(r"[^\w.-]+", "-", task.title_of(dataset, config)).strip("-")


def _read_file(path: Path, parser: RecipeParser) -> dict[str, Any]:
    if path.suffix not in (".yaml", ".yml", ".json"):
        raise ValueError(f"{path} is not a .yaml or .json file of options. Options themselves begin with two dashes.")
    text = path.read_text(encoding="utf-8")
    try:
        found = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (json.JSONDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} must hold options and their values, got {type(found).__name__}.")
    variables = found.pop("env", None) or {}
    if not isinstance(variables, dict):
        raise ValueError(f"{path}: env must hold environment variables and their values, got {variables!r}.")
    os.environ.update({str(name): str(value) for name, value in variables.items()})
    found = {str(name).replace("-", "_"): value for name, value in found.items()}
    for name in found:
        if name not in parser.options:
            raise ValueError(f"{path}: there is no option {name!r}.{did_you_mean(name, parser.options)}")
    found = {name: value for name, value in found.items() if value is not None}
    for name, value in found.items():
        if parser.options[name].nargs == "+" and isinstance(value, str):
            found[name] = [value]
    if isinstance(found.get("columns"), dict):
        found["columns"] = [f"{role}={column}" for role, column in found["columns"].items()]
    return found


def _construct(cls: Any, found: dict[str, Any]) -> Any:
    names = {f.name for f in dataclasses.fields(cls) if f.init}
    return cls(**{name: value for name, value in found.items() if name in names})
