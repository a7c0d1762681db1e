"""The model card of a run: what was trained where, how, with which result, and how to load it."""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path, PureWindowsPath
from typing import TYPE_CHECKING, Any

import transformers
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from peft import PeftModel
from transformers import BaseImageProcessor, PreTrainedTokenizerBase
from transformers.modelcard import TASK_MAPPING
from transformers.pipelines import PIPELINE_REGISTRY

from ..analysis.plots import accuracy_curve, can_plot, plot_runs
from ..analysis.tables import MIB, format_table
from ..federation.sampling import num_sampled
from ..methods import METHODS, WARM_UP_METHOD
from ..protocol.adapters import AS_THEY_ARE
from ..protocol.codecs import shown
from .results import Results, evaluated_rounds, final_results, main_metric
from .weights import Weights

if TYPE_CHECKING:
    from .trainer import SplitFedTrainer

CARD_NAME, PLOT_NAME = "README.md", "curves.png"
TEMPLATE = Path(__file__).with_name("model_card_template.md")
_FEW = 20  # classes whose names the code of a card lists
_PACKAGES = ("transformers", "peft", "torch", "datasets", "accelerate", "huggingface_hub")

Names = str | list[str] | None


@dataclass(frozen=True)
class CardArguments:
    """What only the user knows about a model; see `SplitFedTrainer.create_model_card`."""

    language: str | None = None
    license: str | None = None
    tags: Names = None
    model_name: str | None = None
    finetuned_from: str | None = None
    tasks: Names = None
    dataset_tags: Names = None
    dataset: Names = None
    dataset_args: Names = None
    revision: str | None = None  # of the repo, if not the main one

    def updated(self, **given: Any) -> CardArguments:
        """Return these with what is given, other than None, in its place."""
        return dataclasses.replace(self, **{name: value for name, value in given.items() if value is not None})


def write_card(trainer: SplitFedTrainer, folder: Path) -> None:
    """Write `README.md`, and `curves.png` if there was an evaluation and Matplotlib is installed, into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    history = trainer.state.log_history
    rounds = evaluated_rounds(history)
    metric, table, plot = "", "", ""
    if rounds:
        metric = main_metric(rounds)
        traffic = [entry for entry in history if "bytes_up" in entry]
        curve = accuracy_curve([*traffic, *({"step": step, **found} for step, found in rounds.items())], metric)
        metric = _plain(metric)
        if can_plot():
            plot = PLOT_NAME
            plot_runs({trainer.args.make_method().full_title: curve}, folder / plot, metric=metric)
        table = _rounds_table(rounds, {step: mib for step, mib, _ in curve}) if len(rounds) > 1 else ""
    final = final_results(trainer)
    run = _Run(trainer, folder)
    content = run.training() | run.federation() | run.communication() | run.loading()
    results = format_table([{"metric": _plain(k), "value": f"{v:.4f}"} for k, v in final.items()], markdown=True)
    content |= {"metric": metric, "plot": plot, "history": table, "results": results if final else ""}
    ModelCard.from_template(run.metadata(final), template_path=str(TEMPLATE), **content).save(folder / CARD_NAME)


def _rounds_table(rounds: Mapping[int, Results], mib: Mapping[int, float]) -> str:
    rows = [
        {"round": step, "MiB": mib.get(step)} | {_plain(name): value for name, value in metrics.items()}
        for step, metrics in sorted(rounds.items())
    ]
    columns = dict.fromkeys((name for row in rows for name in row), ".4f") | {"round": "", "MiB": ".3f"}
    return format_table(rows, columns, markdown=True)


def _plain(metric: str) -> str:
    return metric.removeprefix("eval_").replace("_", " ")


# ---- Names ----


def is_local(name: str) -> bool:
    """Tell a path from the id of a repo."""
    return os.path.exists(name) or name.startswith((".", "~", "/")) or name.count("/") > 1 or "\\" in name


def public_name(name: str) -> str:
    """Return an id as it is, and the last part of a path: cards do not publish local paths."""
    if os.path.exists(name):
        return Path(name).resolve().name
    return PureWindowsPath(name).name if is_local(name) else name


def idea(method: type) -> str:
    """Return a method's idea in a sentence: the first line of its module, or of a class from elsewhere."""
    module = inspect.getmodule(method)
    ours = module is not None and module.__name__.startswith("hf_coefsfl.")
    return re.sub(r" \((Section|Appendix) [^)]*\)", "", _first_line(module if ours else method))


def _first_line(documented: Any) -> str:
    return (inspect.getdoc(documented) or "").partition("\n")[0]


def _listed(names: Names) -> list[str]:
    return [names] if isinstance(names, str) else list(names or [])


class _Run:
    """What the card says of a trainer, section by section."""

    def __init__(self, trainer: SplitFedTrainer, folder: Path) -> None:
        self.trainer, self.args, self.given = trainer, trainer.args, trainer.card_arguments
        tuned: Any = trainer.model
        self.model: Any = tuned.get_base_model() if isinstance(tuned, PeftModel) else tuned
        self.adapter: Any = tuned.active_peft_config if isinstance(tuned, PeftModel) else None
        self.kind = str(getattr(self.adapter.peft_type, "value", "")).lower() if self.adapter else ""  # "lora"
        self.base: str = self.given.finetuned_from or getattr(self.model.config, "name_or_path", None) or ""
        self.weights = Weights.of(trainer)
        self.folder = folder.absolute().name
        repo = trainer.hub_model_id or self.args.hub_model_id or self.folder
        self.datasets = ", ".join(map(public_name, _listed(self.given.dataset or self.given.dataset_tags)))
        self.name: str = self.given.model_name or repo.rsplit("/", 1)[-1]

    def metadata(self, final: Results) -> ModelCardData:
        """Return the header. An id in it is one of the Hub; a base model in a folder has none."""
        tasks = _listed(self.given.tasks) or self._tasks()
        names = _listed(self.given.dataset)
        ids = _listed(self.given.dataset_tags) or [
            name for name in names if re.fullmatch(r"[\w.-]+/[\w.-]+", name) and not is_local(name)
        ]
        finite = {name.removeprefix("eval_"): value for name, value in final.items() if math.isfinite(value)}
        results = [
            EvalResult(
                task_type=tasks[0] if tasks else "other",
                dataset_type=ids[0] if ids else "unknown",
                dataset_name=", ".join(map(public_name, names or ids)) or "unknown",
                dataset_config=", ".join(_listed(self.given.dataset_args)) or None,
                metric_type=metric,
                metric_name=_plain(metric).capitalize(),
                metric_value=value,
            )
            for metric, value in finite.items()
        ]
        tags = [*self.trainer._tag_names, *_listed(self.kind or None), *_listed(self.given.tags)]
        return ModelCardData(
            base_model=None if is_local(self.base) else self.base or None,
            datasets=ids if ids and self.trainer.simulated else None,  # it is for what a model was trained on
            eval_results=results or None,
            language=self.given.language,
            library_name="peft" if self.adapter else "transformers",
            license=self.given.license,
            metrics=[metric for metric in finite if not metric.endswith("loss")] or None,
            model_name=self.name if results else None,
            pipeline_tag=tasks[0] if tasks else None,
            tags=[*tags, *(getattr(self.trainer.model, "model_tags", None) or [])],
        )

    def _tasks(self) -> list[str]:
        """Return what the Hub calls the task of the model's class."""
        name, tasks = type(self.model).__name__, dict[str, Any](TASK_MAPPING)
        return [task for task, classes in tasks.items() if any(name in _listed(found) for found in classes.values())]

    def training(self) -> dict[str, Any]:
        """What it is, what was trained where, and by which method."""
        split, method = self.trainer.split, self.args.make_method()
        kind = {"lora": "LoRA"}.get(self.kind, self.kind.upper())
        rank = f" of rank {self.adapter.r} and alpha {self.adapter.lora_alpha}" if self.kind == "lora" else ""
        name, options = type(self.model).__name__, dataclasses.fields(method)  # type: ignore[arg-type]
        place = ", from a folder that `adapter_config.json` names" if self.adapter and is_local(self.base) else ""
        rows = [
            {
                "side": half.side,
                "blocks": (f"{first} to {last}" if first < last else f"{first}") + f", and {rest}",
                "parameters": half.num_parameters(),
                "trained": sum(p.numel() for p in trained.values()),
            }
            for half, trained, first, last, rest in (
                (split.client, self.trainer.client_parameters, 1, split.cut, "what comes before"),
                (split.server, self.trainer.server_parameters, split.cut + 1, split.num_blocks, "what comes after"),
            )
        ]
        return {
            "name": self.name,
            "what": f"A {kind} adapter{rank} for" if self.adapter else "All weights, fine-tuned, of",
            "base": f"`{public_name(self.base)}` (`{name}`{place})" if self.base else f"a `{name}`",
            "dtype": self.weights.dtype + (f" and {self.weights.quantised}" if self.weights.quantised else ""),
            "weights": f"{self.weights}",
            "datasets": self.datasets,
            "cut": split.cut,
            "num_blocks": split.num_blocks,
            "sides": format_table(rows, {"side": "", "blocks": "", "parameters": ",", "trained": ","}, markdown=True),
            "method": self.args.method,
            "title": method.full_title,
            "idea": idea(type(method)),
            "rule": _first_line(type(method)),
            "options": [f"`{option.name}={getattr(method, option.name)!r}`" for option in options],
        }

    def federation(self) -> dict[str, Any]:
        """The clients, their data and the local updates."""
        args, clients, settings = self.args, self.trainer.clients, {}
        if clients is not None:
            low, high = min(clients.sizes), max(clients.sizes)
            sampled = num_sampled(len(clients), args.participation)
            column = f"`{args.partition_column}`" if args.partition_column else "the labels"
            partitions = {
                "iid": "iid",
                "dirichlet": f"dirichlet over {column}, alpha {args.dirichlet_alpha:g}",
                "column": f"by {column}, a client for each value",
            }
            data = self.trainer.federation
            partition = partitions[args.partition]
            if data is None:
                partition = "as the clients hold it"
            elif len(data.datasets) > 1:
                partition = "given: a dataset for each client"
            settings["clients"] = f"{len(clients)}, with {low if low == high else f'{low} to {high}'} samples each"
            settings["clients a round"] = f"{sampled} (participation {args.participation:g})"
            settings["partition"] = partition
        if not self.trainer.simulated:
            settings["training data"] = "the clients' own, which did not leave them"
            settings["evaluation data"] = f"the server's own{f': {self.datasets}' if self.datasets else ''}"
        rounds = f"{self.trainer.state.global_step} of {args.num_rounds}"
        if args.warmup_rounds and args.method != WARM_UP_METHOD:
            rounds += f", the first {args.warmup_rounds} of them {METHODS[WARM_UP_METHOD].title} (warm-up)"
        schedule, optimizer = (getattr(value, "value", value) for value in (args.lr_scheduler_type, args.optim))
        settings |= {
            "rounds": rounds,
            "weights": f"{self.weights}; {self.weights.mib:,.3f} MiB had crossed the cut by then",
            "local epochs": str(args.local_epochs),
            "batch size": str(args.per_device_train_batch_size),
            "learning rate": f"{args.learning_rate:g}, {schedule}, by {optimizer}",
            "dropout": args.dropout,
            "exchange": shown(args.exchange_codecs),
            "seed": f"{args.seed}" + ("" if args.data_seed is None else f", and {args.data_seed} for the data"),
        }
        if args.adapter_codec != AS_THEY_ARE:
            settings["federated weights"] = f"{args.adapter_codec}, with error feedback"
        if args.keep_server_optimizer:
            settings["server's optimizer"] = "its state was averaged and kept over the rounds"
        if args.aggregation != "mean":
            withstood = f", against {args.hostile_clients} hostile clients a round" * (args.aggregation != "median")
            settings["aggregation"] = args.aggregation.replace("_", " ") + withstood
        if args.client_bound:
            settings["largest update of a client"] = f"{args.client_bound:g} times the median of the round"
        rows = [{"setting": setting, "value": value} for setting, value in settings.items()]
        return {
            "settings": format_table(rows, markdown=True),
            "simulated": self.trainer.simulated,
            "labels_are_text": self.trainer.loss_spec.labels_are_text,
        }

    def communication(self) -> dict[str, Any]:
        """What crossed the cut, by kind."""
        total = self.trainer.ledger.total
        rows = [
            {"what": kind.replace("_", " "), "up": total.up.get(kind, 0) / MIB, "down": total.down.get(kind, 0) / MIB}
            for kind in dict.fromkeys((*total.up, *total.down))
        ]
        up, down = (sum(row[way] for row in rows) for way in ("up", "down"))  # type: ignore[misc]
        rows.append({"what": "total, in MiB", "up": up, "down": down})
        table = format_table(rows, {"what": "", "up": ",.3f", "down": ",.3f"}, markdown=True)
        return {"transfers": total.transfers, "mib_up": f"{up:,.3f}", "mib_down": f"{down:,.3f}", "traffic": table}

    def _base_code(self, source: str, revision: str) -> str:
        """Return the code that loads the base model: in its dtype, not quantised, and with a head for the classes."""
        kind, weights = type(self.model).__name__, self.weights
        path = f'"{self.base}"' if self.base else '"path/to/base-model"'
        if is_local(self.base):
            path = f'PeftConfig.from_pretrained("{source}"{revision}).base_model_name_or_path'
        options = [path, f'dtype="{weights.dtype}"']
        lines = []
        if "Classif" in kind:  # the base model may have another number of classes
            options += [f"num_labels={self.model.config.num_labels}", "ignore_mismatched_sizes=True"]
        if weights.classes:
            names = json.dumps(list(weights.classes.values()), ensure_ascii=False)
            if len(weights.classes) > _FEW:
                names = (
                    f'{kind}.config_class.from_pretrained("{source}", subfolder="server"{revision}).id2label.values()'
                )
            lines.append(f"names = dict(enumerate({names}))")
            options += ["id2label=names", "label2id={name: i for i, name in names.items()}"]
        return "\n".join([*lines, f"base = {kind}.from_pretrained(", *(f"    {option}," for option in options), ")"])

    def _pipeline(self, source: str, revision: str) -> str:
        """Return the code of a pipeline with the tokenizer or image processor that was saved beside the weights."""
        kinds = {PreTrainedTokenizerBase: "tokenizer", BaseImageProcessor: "image_processor"}
        parts = [name for kind, name in kinds.items() if isinstance(self.trainer.processing_class, kind)]
        tasks = [task for task in self._tasks() if task in PIPELINE_REGISTRY.get_supported_tasks()]
        if not parts or not tasks:
            return ""
        model = "model.get_base_model()" if self.adapter else "model"
        return f'pipe = pipeline("{tasks[0]}", model={model}, {parts[0]}="{source}"{revision})'

    def loading(self) -> dict[str, Any]:
        """What the code blocks need, and the versions."""
        from .. import __version__

        kind, repo = type(self.model), self.trainer.hub_model_id
        source = repo or self.folder
        revision = f', revision="{self.given.revision}"' if repo and self.given.revision else ""
        return {
            "adapter": self.kind,
            "source": source,
            "is_repo": repo is not None,
            "revision": revision,
            "model_module": "transformers" if getattr(transformers, kind.__name__, None) is kind else kind.__module__,
            "model_class": kind.__name__,
            "peft_config": is_local(self.base),
            "base_code": self._base_code(source, revision),
            "pipeline": self._pipeline(source, revision),
            "blocks": f', blocks="{self.args.blocks}"' if self.args.blocks else "",
            "versions": [("hf_coefsfl", __version__), *((name, version(name)) for name in _PACKAGES)],
        }
