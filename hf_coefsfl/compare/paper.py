"""The figures of the paper, for settings that equal the paper's."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

import yaml

from ..config import SplitFedConfig
from ..methods import make_method
from ..tasks import TASKS

if TYPE_CHECKING:
    from .grid import Cell

# Options that do not change the result, or that the paper does not state, or that are checked elsewhere.
_FREE = {
    "eval_strategy", "eval_steps", "eval_on_start", "logging_steps", "save_steps", "save_strategy", "save_total_limit",
    "report_to", "disable_tqdm", "staleness_probe", "count_flops", "per_device_eval_batch_size", "use_cpu", "bf16",
    "dataloader_num_workers", "dataloader_pin_memory", "gradient_checkpointing", "on_client_failure", "max_lost_rounds",
    "partition", "dirichlet_alpha", "partition_column", "model_name_or_path", "dataset_name",
    "learning_rate", "seed", "cut", "method", "method_kwargs",
}  # fmt: skip


@dataclass(frozen=True)
class PaperValue:
    """A figure of a table of the paper. Without a deviation it is a single run."""

    table: str
    mean: float
    std: float | None


@cache
def paper_results() -> dict[str, Any]:
    """Return the content of paper_results.yaml."""
    content: dict[str, Any] = yaml.safe_load(files(__package__).joinpath("paper_results.yaml").read_text("utf-8"))
    return content


def paper_tables() -> list[str]:
    """Return the names of the paper's tables of results."""
    return list(dict.fromkeys(entry["table"] for entry in paper_results()["results"]))


def paper_value(cell: Cell, score: str, tables: Sequence[str] = ()) -> PaperValue | None:
    """Return the paper's figure for a score of a setting, or None if the setting is not the paper's.

    Args:
        cell: the setting.
        score: the title of the score, such as "accuracy" or "EM".
        tables: of the paper, in order of preference. Default: all of them.
    """
    key, split = _method_key(cell), _split(cell)
    if key is None or split is None or not is_papers_setting(cell):
        return None
    wanted = {"task": cell.spec.task, "model": cell.spec.model, "split": split, "cut": cell.cut, "score": score}
    for table in tables or paper_tables():
        for entry in paper_results()["results"]:
            if entry["table"] == table and wanted.items() <= entry.items() and entry["values"].get(key):
                mean, *std = entry["values"][key]
                return PaperValue(table, float(mean), float(std[0]) if std else None)
    return None


def is_papers_setting(cell: Cell) -> bool:
    """Return whether model, data, federation and training are the paper's. The method and its options do not matter."""
    paper = paper_results()
    model = paper["models"].get(cell.spec.model)
    if model is None or cell.spec.task not in paper["tasks"]:
        return False
    options = cell.first()[0].options
    defaults = {f.name: f.default for f in dataclasses.fields(SplitFedConfig)} | {"num_clients": 50}
    task = TASKS[cell.spec.task]
    defaults |= {f.name: f.default for f in dataclasses.fields(task.arguments_class)}
    names = {"model_name_or_path": model["checkpoint"], "dataset_name": str(task.dataset_name)}
    for name, own in {"model_name_or_path": task.model_name_or_path, "dataset_name": str(task.dataset_name)}.items():
        # A local copy counts if it has the name of the original.
        if PurePath(options.get(name, own)).name.lower() != PurePath(names[name]).name.lower():
            return False
    protocol: Mapping[str, Any] = paper["protocol"]
    if not set(cell.spec.learning_rates) <= set(paper["learning_rates"]):
        return False
    if any(options.get(name, defaults[name]) != value for name, value in protocol.items()):
        return False
    return all(
        value == defaults.get(name) for name, value in options.items() if name not in protocol and name not in _FREE
    )


def _split(cell: Cell) -> str | None:
    """Return the paper's name of the split."""
    options = cell.first()[0].options
    partition = options.get("partition", "iid")
    alpha = paper_results()["tasks"].get(cell.spec.task, {}).get("dirichlet_alpha")
    if partition == "iid":
        return "IID"
    return "non-IID" if partition == "dirichlet" and alpha == options.get("dirichlet_alpha", 0.5) else None


def _method_key(cell: Cell) -> str | None:
    """Return the key of the method with its options in the paper's figures."""
    paper, method = paper_results(), cell.variant.method
    usual = (paper["models"].get(cell.spec.model, {}).get("method_options") or {}).get(method, {})
    known = {method: usual} | {
        name: kwargs for name, kwargs in paper["variants"].items() if name.partition("/")[0] == method
    }
    options = make_method(method, cell.variant.kwargs).effective_options()
    return next(
        (name for name, kwargs in known.items() if make_method(method, kwargs).effective_options() == options), None
    )
