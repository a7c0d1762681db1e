"""What a comparison will take: hours on a device of a given speed, and MiB over the cut, before anything runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from datasets import ClassLabel
from tqdm import tqdm

from ..analysis import backbones
from ..analysis.cost import Cost, CostModel, Round
from ..analysis.flops import OperationCounter
from ..analysis.tables import MIB
from ..config import SplitFedConfig
from ..federation.sampling import num_sampled
from ..methods import WARM_UP_METHOD, make_method
from ..methods.parts.math_attention import differentiable_attention
from ..protocol.codecs import resolve_codecs
from ..tasks import TASKS, digits
from ..tasks.loading import load_splits
from ..tasks.options import DEFAULTS
from .grid import Cell, Summary

STARTUP_SECONDS = 15.0  # of a run: imports, data and model; measured with a small model on one core


@dataclass(frozen=True)
class Data:
    """Rows to train on, rows of all evaluation sets together, and classes."""

    train: int
    evaluation: int
    num_labels: int


# The Hub's datasets that the paper uses, as their pages state.
_HUB = {
    "uoft-cs/cifar100": Data(50_000, 10_000, 100),
    "ethz/food101": Data(75_750, 25_250, 101),
    "zh-plus/tiny-imagenet": Data(100_000, 10_000, 200),
    "SetFit/20_newsgroups": Data(11_314, 7_532, 20),
    "nyu-mll/glue": Data(392_702, 19_647, 3),  # MNLI, matched and mismatched
    "rajpurkar/squad_v2": Data(130_319, 11_873, 2),
}


@dataclass(frozen=True)
class RunEstimate:
    """One run of a setting."""

    seconds: float
    mib: float
    warmup_rounds: int
    warmup_gflops: float  # of the server, in one warm-up round
    later_gflops: float  # in one of the others

    def server_gflops(self, rounds: int) -> float:
        """Return the server's work in the first rounds of the run."""
        warmup = min(rounds, self.warmup_rounds)
        return warmup * self.warmup_gflops + (rounds - warmup) * self.later_gflops


class Budget:
    """Estimates runs by the operations and bytes of one client's round, which `coefsfl cost` counts.

    Texts are taken at their full length and all clients at the mean number of samples. A run trains its clients one
    after the other on one device, as the simulation does in one process.
    """

    def __init__(self, speed: float):
        self.speed = speed
        self._models: dict[tuple[Any, ...], CostModel] = {}
        self._costs: dict[tuple[Any, ...], list[Cost]] = {}

    def of(self, cell: Cell) -> RunEstimate:
        """Return what one run of a setting takes. Raise ValueError if its model or data cannot be known from here."""
        run = cell.first()[0]
        options = _defaults(cell.spec.task) | run.options
        data = _data(cell, options)
        key, model = self._model(cell, options, data)
        samples = max(1, data.train // options["num_clients"])
        plan = Round(samples, options["per_device_train_batch_size"], options["local_epochs"])
        clients = num_sampled(options["num_clients"], options["participation"])
        rounds, warmup = options["num_rounds"], min(options["warmup_rounds"], options["num_rounds"])
        flops = num_bytes = 0.0
        gflops = []
        for count, method in (
            (warmup, make_method(WARM_UP_METHOD)),
            (rounds - warmup, make_method(cell.variant.method, cell.variant.kwargs)),
        ):
            known = *key, cell.cut, plan, method.name, *method.effective_options().items()
            if count and known not in self._costs:
                self._costs[known] = model.costs(method, cell.cut, plan)
            costs = self._costs[known] if count else []
            flops += sum(count * clients * cost.share * _flops(cost) for cost in costs)
            num_bytes += sum(count * clients * cost.share * cost.num_bytes for cost in costs)
            gflops.append(sum(clients * cost.share * cost.server_flops for cost in costs) / 1e9)
        flops += _num_evaluations(options) * data.evaluation * self._forward(model)
        return RunEstimate(STARTUP_SECONDS + flops / self.speed, num_bytes / MIB, warmup, *gflops)

    def _model(self, cell: Cell, options: Mapping[str, Any], data: Data) -> tuple[tuple[Any, ...], CostModel]:
        name = cell.spec.model.lower()
        name = name if name in backbones.BACKBONES else str(options.get("model_name_or_path") or cell.spec.model)
        name = digits.digits_model() if name == digits.MODEL else name
        auto = TASKS[cell.spec.task].kind.auto_model
        task = next(name for name, known in backbones.TASKS.items() if known is auto)
        length = options.get("max_length")
        codecs = resolve_codecs(options["exchange_dtype"], options["exchange_codec"])
        adapters, dtype = options["adapter_codec"], options["dtype"]
        key = name, task, data.num_labels, length, adapters, dtype, *codecs.items()
        if key not in self._models:
            labels = None if task in ("causal-lm", "question-answering") else data.num_labels
            model = backbones.build_model(name, labels, task, dtype)
            self._models = {
                key: CostModel(model, sequence_length=length, exchange_codec=codecs, adapter_codec=adapters)
            }  # of settings that follow each other; many large ones would not fit
        return key, self._models[key]

    @staticmethod
    def _forward(model: CostModel) -> int:
        """Return the operations of one sample's forward pass."""
        counter = OperationCounter()
        with torch.no_grad(), differentiable_attention(), counter:
            model.model(**model.samples.batch(1))
        return sum(counter.flops.values())


def with_server_work(cells: Sequence[Cell], finished: Mapping[str, Summary]) -> tuple[dict[str, Summary], list[str]]:
    """Return the summaries with the server's GFLOPs where a run did not count them, and what cannot be estimated.

    The estimate is scaled by the bytes that the run moved, because texts are shorter than their full length.
    """
    budget, result, notes = Budget(speed=1.0), dict(finished), []
    for cell in tqdm(cells, desc="server work", unit="setting", leave=False):
        open_runs = [run.id for run in cell.runs.values() if run.id in finished and not _counted(finished[run.id])]
        if not open_runs:
            continue
        try:
            estimate = budget.of(cell)
        except ValueError as error:
            notes.append(f"{cell.spec.title or cell.spec.task}: {error}")
            continue
        for name in open_runs:
            scale = float(finished[name]["mib"]) / estimate.mib
            curve = [
                {**point, "server_gflops": scale * estimate.server_gflops(int(point["round"]))}
                for point in finished[name].get("curve") or ()
            ]
            work = scale * estimate.server_gflops(int(finished[name]["num_rounds"]))
            result[name] = {**finished[name], "curve": curve, "server_gflops": work}
    return result, list(dict.fromkeys(notes))


def _counted(summary: Summary) -> bool:
    return summary.get("server_gflops") is not None


def _flops(cost: Cost) -> int:
    return cost.client_flops + cost.server_flops


@cache
def _defaults(task: str) -> dict[str, Any]:
    """Return the options of a run of a task that a spec leaves open."""
    fields = *dataclasses.fields(SplitFedConfig), *dataclasses.fields(TASKS[task].arguments_class)
    return {f.name: f.default for f in fields if f.default is not dataclasses.MISSING} | DEFAULTS


def _num_evaluations(options: Mapping[str, Any]) -> int:
    """Return how often a run evaluates; the last round is always evaluated."""
    rounds, every = options["num_rounds"], options.get("eval_steps") or 1
    during = rounds // int(every) if options.get("eval_strategy") == "steps" else 0
    last = 0 if during and rounds % int(every) == 0 else 1
    return during + last + bool(options.get("eval_on_start"))


def _data(cell: Cell, options: Mapping[str, Any]) -> Data:
    task = TASKS[cell.spec.task]
    name = str(options.get("dataset_name") or task.dataset_name)
    evals: Sequence[str] = options.get("eval_split") or list(task.eval_splits.values())
    data = _HUB.get(name) or _local(
        name, options.get("train_split") or "train", tuple(evals), task.columns.get("label")
    )
    most_train, most_eval = options.get("max_train_samples"), options.get("max_eval_samples")
    evaluated = min(data.evaluation, most_eval * len(evals)) if most_eval else data.evaluation
    return dataclasses.replace(
        data, train=min(data.train, most_train) if most_train else data.train, evaluation=evaluated
    )


@cache
def _local(name: str, train: str, evals: tuple[str, ...], label: str | None) -> Data:
    splits = load_splits(name)
    if train not in splits:
        raise ValueError(f"{name} has no split {train!r}, only {', '.join(splits)}.")
    known = [split for split in evals if split in splits] or [s for s in ("validation", "test", "dev") if s in splits][
        :1
    ]
    column = next((c for c in (label, "label", "labels") if c in splits[train].column_names), None)
    num_labels = 2
    if column is not None:
        feature = splits[train].features[column]
        classes = isinstance(feature, ClassLabel)
        num_labels = len(feature.names) if classes else len(set(splits[train].with_format(None)[column][:]))
    return Data(len(splits[train]), sum(len(splits[split]) for split in known), num_labels)
