"""The options of a recipe: from a command line, a YAML or JSON file, or both."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn, cast

import torch
import yaml
from transformers import HfArgumentParser, TrainingArguments
from transformers.hf_argparser import string_to_bool

from ..config import SplitFedConfig
from ..methods import DEFAULT_METHOD, METHODS
from . import FineTuningTask, TaskArguments

# What recipes set otherwise than `SplitFedConfig`.
_DEFAULTS = {
    "eval_strategy": "steps",
    "eval_steps": 10,
    "save_total_limit": 2,
    "per_device_eval_batch_size": 32,
    "dataloader_pin_memory": torch.accelerator.is_available(),
}
_TRAINING = (
    "output_dir", "learning_rate", "lr_scheduler_type", "per_device_train_batch_size", "per_device_eval_batch_size",
    "weight_decay", "max_grad_norm", "seed", "data_seed", "bf16", "gradient_checkpointing", "use_cpu", "eval_strategy",
    "eval_steps", "logging_steps", "save_strategy", "save_steps", "save_total_limit", "load_best_model_at_end",
    "metric_for_best_model", "resume_from_checkpoint", "report_to", "disable_tqdm", "push_to_hub", "hub_model_id",
    "hub_strategy", "hub_private_repo", "hub_revision",
)  # fmt: skip
_VALUES: dict[Any, str] = {int: "N", float: "X", string_to_bool: "true|false"}
# What a recipe decides itself.
_GIVEN = ("max_steps", "num_train_epochs", "do_train", "do_eval", "do_predict", "remove_unused_columns")


class _Parser(HfArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        line = " ".join(message.split())
        self.exit(2, f"{self.prog}: error: {line} (see --help)\n")


class _Formatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Show defaults, leave the description as it is, and name an option once (HfArgumentParser adds --a-b to --a_b)."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings:
            return super()._format_action_invocation(action)
        value = "" if action.nargs == 0 else f" {_VALUES.get(action.type, 'TEXT')}"
        return action.option_strings[0] + value + (" ..." if action.nargs in ("+", "*") else "")


def make_parser(
    task: type[FineTuningTask],
    *,
    method: str = DEFAULT_METHOD,
    description: str = "",
    prog: str | None = None,
    rare: bool = False,
) -> argparse.ArgumentParser:
    """Return the parser of a task's recipe; its help shows rarely needed options only if `rare`."""
    parser = _Parser(
        cast(Any, [task.arguments_class, SplitFedConfig]),
        prog=prog,
        usage="%(prog)s [options_file] [--option value ...]",
        description=description,
        formatter_class=_Formatter,
        allow_abbrev=False,
    )
    parser.set_defaults(
        method=method,
        model_name_or_path=task.model_name_or_path,
        dataset_name=task.dataset_name,
        **_DEFAULTS,
    )
    for action in [action for action in parser._actions if action.dest in _GIVEN]:
        parser._remove_action(action)
        parser._optionals._group_actions.remove(action)
        for option in action.option_strings:
            del parser._option_string_actions[option]
    options = {action.dest: action for action in parser._actions if action.dest != "help"}
    _say_defaults(options, task)
    trainers = {f.name for f in dataclasses.fields(TrainingArguments)}
    groups: dict[str, list[str]] = {"the task": [f.name for f in dataclasses.fields(task.arguments_class)]}
    groups["the federation"] = [
        f.name for f in dataclasses.fields(SplitFedConfig) if f.name not in trainers and f.name in options
    ]
    groups["training (an option that counts steps counts rounds)"] = [name for name in _TRAINING if name in options]
    shown = {name for names in groups.values() for name in names}
    groups["further arguments of transformers.TrainingArguments"] = [name for name in options if name not in shown]
    for title, names in groups.items():
        group = parser.add_argument_group(title)
        for action in [action for action in parser._actions if action.dest in names]:
            parser._optionals._group_actions.remove(action)
            group._group_actions.append(action)
    for action in parser._actions:
        hidden = not rare and action.dest in options and action.dest not in shown
        if hidden or action.option_strings[:1] == ["--no_dataloader_pin_memory"]:
            action.help = argparse.SUPPRESS
    parser.add_argument(
        "options_file",
        nargs="?",
        default=argparse.SUPPRESS,
        help="YAML or JSON file of options; those given here overrule it",
    )
    parser.add_argument("--help_all", action="store_true", default=argparse.SUPPRESS, help="show all options and exit")
    return parser


def _say_defaults(options: dict[str, argparse.Action], task: type[FineTuningTask]) -> None:
    """Write into the help what the defaults are where they depend on the task."""
    roles = " ".join(f"{role}={column}" for role, column in task.columns.items())
    splits = " ".join(task.eval_splits.values())
    told = {
        "columns": f"Columns of the dataset, as role=column. Default: {roles}.",
        "eval_split": f"Splits to evaluate on. Default: {splits}; else validation or test.",
        "method": f"One of {', '.join(sorted(METHODS))}; `coefsfl methods` tells more.",
        "cut": "Number of blocks on the client. Default: a third of the model's, the paper's share.",
        "output_dir": f"Where everything goes. Default: outputs/{task.name}-<method>.",
        "weight_decay": "Weight decay of the local updates, on all trained parameters.",
        "eval_strategy": "no, steps (every eval_steps rounds) or best.",
        "hub_strategy": "every_save (in the background, and at the end) or end.",
        "resume_from_checkpoint": "Folder of a checkpoint to go on from, or `last`: the newest, if there is one.",
    }
    for name, text in told.items():
        options[name].help = text
        if options[name].default is None or name == "cut":
            options[name].default = argparse.SUPPRESS
    for action in options.values():
        if action.default is None and action.help:
            action.help += "%(default).0s"  # no "(default: None)"


def parse_options(
    task: type[FineTuningTask],
    *,
    method: str = DEFAULT_METHOD,
    description: str = "",
    prog: str | None = None,
    argv: Sequence[str] | None = None,
) -> tuple[argparse.ArgumentParser, TaskArguments, SplitFedConfig]:
    """Return the parser, the task's arguments and the configuration; bad options end the program with one line.

    A `cut` that is not given is 0: it depends on the model.
    """
    given = list(sys.argv[1:] if argv is None else argv)
    parser = make_parser(task, method=method, description=description, prog=prog, rare="--help_all" in given)
    if "--help_all" in given:
        parser.print_help()
        parser.exit()
    try:
        file = getattr(parser.parse_args(given), "options_file", None)
        if file is not None:
            parser.set_defaults(**_read_file(Path(file), parser))
        found = vars(parser.parse_args(given))
        cut = found.pop("cut", None)
        arguments = _construct(task.arguments_class, found)
        found.setdefault("output_dir", f"outputs/{task.name}-{found['method']}")
        config = _construct(SplitFedConfig, found | ({} if cut is None else {"cut": cut}))
    except (ValueError, TypeError, OSError) as error:
        parser.error(str(error))
    if cut is None:
        config.cut = 0
    if config.partition_column == "label":
        config.partition_column = "labels"  # as all tasks call it
    return parser, arguments, config


def _read_file(path: Path, parser: argparse.ArgumentParser) -> dict[str, Any]:
    if path.suffix not in (".yaml", ".yml", ".json"):
        raise ValueError(f"{path} is no .yaml or .json file of options. Options themselves begin with two dashes.")
    text = path.read_text(encoding="utf-8")
    try:
        found = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (json.JSONDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} must hold options and their values, got {type(found).__name__}.")
    known = {action.dest for action in parser._actions} - {"help", "options_file", "help_all"}
    for name in found:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=3)
            raise ValueError(
                f"{path}: there is no option {name!r}" + (f"; near it: {', '.join(near)}." if near else ".")
            )
    found = {name: value for name, value in found.items() if value is not None}
    for action in parser._actions:
        if action.nargs in ("+", "*") and isinstance(found.get(action.dest), str):
            found[action.dest] = [found[action.dest]]
    if isinstance(found.get("columns"), dict):
        found["columns"] = [f"{role}={column}" for role, column in found["columns"].items()]
    return found


def _construct(cls: Any, found: dict[str, Any]) -> Any:
    names = {f.name for f in dataclasses.fields(cls) if f.init}
    return cls(**{name: value for name, value in found.items() if name in names})
