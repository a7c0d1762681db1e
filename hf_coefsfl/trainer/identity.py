"""The identity of a run: everything that decides its result, as it is written into every checkpoint.

A run may only resume from a checkpoint of the same identity. What does not change the result, or only its rounding, is
recorded too, and told if it differs.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from peft import PeftModel
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR
from transformers import TrainingArguments, get_scheduler

from .. import __version__
from .._io import to_json, write_atomically
from ..config import SplitFedConfig
from ..federation.simulation import Simulation
from ..methods import WARM_UP_METHOD
from ..protocol.codecs import shown
from ..split.placeholders import unwrapped
from .fingerprints import of_datasets, of_weights, repeatable
from .model_card import public_name

if TYPE_CHECKING:
    from .trainer import SplitFedTrainer

logger = logging.getLogger(__name__)
IDENTITY_NAME = "run.json"
Record = dict[str, Any]  # "decides" and "told", each a flat dict of settings; "num_rounds"

# Arguments of `TrainingArguments` that decide the result. Those of the federation all do, unless named below.
_DECIDING = (
    "seed", "learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "weight_decay",
    "max_grad_norm", "optim", "optim_args", "optim_target_modules", "adam_beta1", "adam_beta2", "adam_epsilon",
    "per_device_train_batch_size", "dataloader_drop_last", "tf32", "use_liger_kernel", "load_best_model_at_end",
    "train_sampling_strategy",
)  # fmt: skip
# They change what is measured, kept in memory, or only the rounding; or they are what a run is to go on with from a
# checkpoint of before a hostile client spoilt the weights.
_TOLD = (
    "staleness_probe", "count_flops", "exchange_memory_limit", "on_client_failure", "max_lost_rounds",
    "gradient_checkpointing", "torch_compile", "torch_compile_backend", "torch_compile_mode", "eval_strategy",
    "eval_steps", "aggregation", "hostile_clients", "client_bound", "stacked_clients",
)  # fmt: skip
_BEFORE = {  # of older records
    "aggregation": "mean", "client_bound": 0.0, "hostile_clients": 1, "max_lost_rounds": 3, "stacked_clients": 1,
}  # fmt: skip
# Recorded by what they lead to, or not part of the run.
_RESOLVED = (
    "method", "method_kwargs", "warmup_rounds", "cut", "blocks", "head", "num_clients", "num_rounds", "partition",
    "partition_column", "dirichlet_alpha", "min_client_samples", "overwrite_output_dir", "exchange_dtype",
    "exchange_codec",
)  # fmt: skip
_BEST = ("metric_for_best_model", "greater_is_better", "eval_strategy", "eval_steps", "eval_delay", "save_steps")
# Entries of a model's config that are names, or that a library sets while it trains or saves.
_CONFIG_NAMES = (
    "_name_or_path", "transformers_version", "architectures", "use_cache", "dtype", "problem_type", "id2label",
    "label2id",
)  # fmt: skip
_ADAPTER_NAMES = ("base_model_name_or_path", "revision", "inference_mode", "peft_version", "runtime_config")
_PACKAGES = ("torch", "transformers", "peft", "datasets")
_MISSING = object()


def identity_of(trainer: SplitFedTrainer) -> Record:
    """Return the record of a trainer's run."""
    args = trainer.args
    federation = {f.name for f in fields(SplitFedConfig)} - {f.name for f in fields(TrainingArguments)}
    names = sorted(federation - {*_TOLD, *_RESOLVED})
    decides = _method(args) | {name: getattr(args, name) for name in (*names, *_DECIDING)}
    decides |= {
        "exchange_dtype": shown(args.exchange_codecs),
        "data_seed": args.seed if args.data_seed is None else args.data_seed,
        "cut": trainer.split.cut,
        "blocks": trainer.split.blocks,
        "precision": args.mixed_precision,
        "labels": list(trainer.label_names),
        "best model": {name: getattr(args, name) for name in _BEST if args.load_best_model_at_end},
    }
    told = {name: getattr(args, name) for name in _TOLD}
    told |= {"processes": args.world_size, "device": args.device.type, "hf_coefsfl": __version__}
    told |= {name: version(name) for name in _PACKAGES} | {"python": sys.version.split()[0]}
    for part in (_model(trainer), _clients(trainer), _data(trainer)):
        decides |= part["decides"]
        told |= part.get("told", {})
    record = {"num_rounds": args.num_rounds, "decides": _flat(decides), "told": _flat(told)}
    plain: Record = json.loads(to_json(record))
    return plain


def _method(args: SplitFedConfig) -> Record:
    method: Record = {"method": args.method}
    if options := args.make_method().effective_options():  # else those of another method would be parts of nothing
        method["method option"] = options
    return method if args.method == WARM_UP_METHOD else method | {"warmup_rounds": args.warmup_rounds}


def _model(trainer: SplitFedTrainer) -> dict[str, Record]:
    tuned: Any = trainer.model
    model: Any = unwrapped(tuned)
    config = model.config
    entries = {
        name: value
        for name, value in config.to_dict().items()
        if name not in _CONFIG_NAMES and not name.endswith("_token_id")  # which Trainer takes from the tokenizer
    }
    adapter = None
    if isinstance(tuned, PeftModel):
        found = tuned.active_peft_config.to_dict()
        adapter = {name: value for name, value in found.items() if name not in _ADAPTER_NAMES}
    told = {
        "model name": public_name(str(getattr(config, "name_or_path", ""))),
        "class names": list((getattr(config, "id2label", None) or {}).values()),
        "attention": getattr(config, "_attn_implementation", None),
    }
    decides = {"model": type(model).__name__, "model config": entries, "adapter": adapter}
    return {"decides": decides | {"frozen weights": of_weights(tuned)}, "told": told}


def _clients(trainer: SplitFedTrainer) -> dict[str, Record]:
    args, clients, federation = trainer.args, trainer.clients, trainer.federation
    partition: Record = {"partition": args.partition}
    if args.partition == "dirichlet":
        partition |= {"dirichlet_alpha": args.dirichlet_alpha, "min_client_samples": args.min_client_samples}
    if args.partition != "iid":
        partition["partition_column"] = args.partition_column
    found = {"clients": len(clients), "samples of clients": _summary(clients.sizes)} if clients else {}
    if federation is None:  # of a deployment: who is there may change, and the run goes on
        return {"decides": partition | {"num_clients": args.num_clients}, "told": found}
    if len(federation.datasets) > 1:
        partition = {"partition": "a dataset for each client"}
    rows = {"rows of clients": of_datasets([list(federation.partition.indices)])}
    return {"decides": partition | found | rows}


def _summary(sizes: list[int]) -> str:
    return f"{min(sizes)} to {max(sizes)}, {int(np.sum(sizes))} in all" if sizes else "none"


def _data(trainer: SplitFedTrainer) -> dict[str, Record]:
    columns: set[str] | None = None
    if trainer.args.remove_unused_columns:
        trainer._set_signature_columns_if_needed()
        columns = set(trainer._signature_columns or ()) or None
    found: Record = {}
    if trainer.federation is not None:
        assert isinstance(trainer.rounds, Simulation)
        found["training data"] = of_datasets(trainer.federation.datasets, columns)
        collate, rows = trainer.rounds.data.collated.collate, trainer.federation.rows
        found["first sample, collated"] = repeatable(lambda: collate(rows(0, [0])))
    evaluated = trainer.eval_dataset
    if evaluated is not None:
        sets = evaluated if isinstance(evaluated, dict) else {"": evaluated}
        found |= {f"evaluation data {name}".strip(): of_datasets([data], columns) for name, data in sets.items()}
    return {"decides": found}


def _flat(settings: Mapping[str, Any], prefix: str = "") -> Record:
    """Return settings without nesting, with values that JSON has."""
    flat: Record = {}
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            flat |= _flat(value, f"{prefix}{name} ")
        else:
            flat[f"{prefix}{name}"] = _plain(value)
    return flat


def _plain(value: Any) -> Any:
    if isinstance(value, (set, frozenset)):
        return sorted(map(str, value))
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    value = getattr(value, "value", value)  # of an enum
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)


def write_identity(record: Record, folder: Path) -> None:
    """Write a record into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / IDENTITY_NAME, to_json(record))


def read_identity(folder: Path) -> Record | None:
    """Return the record of a folder, or None: earlier versions left none."""
    try:
        record = json.loads((folder / IDENTITY_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) and isinstance(record.get("decides"), dict) else None


@dataclass(frozen=True)
class Differences:
    """What differs between two records, a line for each setting."""

    refused: list[str]
    told: list[str]


def compare(before: Record, now: Record) -> Differences:
    """Compare the record of a checkpoint with that of the present run.

    A setting that only one of them has comes from another version of a package, or belongs to another setting that
    differs: it is told. But a part of a setting that the other has as a whole, as None or empty, decides.
    """
    found: dict[bool, list[str]] = {True: [], False: []}
    for kind in ("decides", "told"):
        olds, news = before.get(kind, {}), now[kind]
        if kind == "told":
            olds = _BEFORE | olds
        for name in dict.fromkeys([*olds, *news]):
            old, new = olds.get(name, _MISSING), news.get(name, _MISSING)
            if old != new:
                whole = name.rpartition(" ")[0]
                known = (old is not _MISSING or whole in olds) and (new is not _MISSING or whole in news)
                refused = kind == "decides" and known
                found[refused].append(f"{name}: {_shown(old)}, now {_shown(new)}")
    return Differences(refused=found[True], told=found[False])


def _shown(value: Any) -> str:
    if value is _MISSING:
        return "not recorded"
    text = json.dumps(value) if not isinstance(value, str) else value
    return text if len(text) <= 80 else f"{text[:77]}..."


def schedule_changes(args: SplitFedConfig, rounds_before: int, done: int) -> bool:
    """Return whether another number of rounds gives the finished rounds another learning rate than they had."""
    if rounds_before == args.num_rounds:
        return False
    rates = [_rates(args, num_rounds, done) for num_rounds in (rounds_before, args.num_rounds)]
    return rates[0] != rates[1]


def _rates(args: SplitFedConfig, num_rounds: int, done: int) -> list[float]:
    optimizer = SGD([torch.zeros(0)], args.learning_rate)
    warm_up = args.get_warmup_steps(num_rounds)
    schedule: Any = get_scheduler(args.lr_scheduler_type, optimizer, warm_up, num_rounds, args.lr_scheduler_kwargs)  # type: ignore[arg-type]
    if not isinstance(schedule, LambdaLR):
        return []  # it follows the metrics
    return [schedule.lr_lambdas[0](step) for step in range(done)]
