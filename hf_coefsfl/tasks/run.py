"""From a command line to a trained, evaluated, saved and described adapter: what every recipe runs."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from huggingface_hub.utils import logging as hub_logging
from transformers.utils import logging as transformers_logging

from .. import __version__
from .._io import disk_fault, to_json, write_atomically
from .._suggest import did_you_mean
from ..analysis.plots import accuracy_curve
from ..config import SplitFedConfig
from ..federation.data_checks import DataError
from ..methods import DEFAULT_METHOD
from ..protocol.codecs import shown
from ..split.blocks import find_blocks, members
from ..split.lora import default_lora
from ..trainer.checkpoints import fault
from ..trainer.hub import UploadError
from ..trainer.model_card import CardArguments, public_name
from ..trainer.output_folder import SUMMARY_NAME, RunRefused, check_free, check_writable
from ..trainer.results import evaluated_rounds, evaluations, final_results, server_gflops
from ..trainer.resuming import LAST
from ..trainer.trainer import SplitFedTrainer
from ..trainer.weights import Weights
from . import TASKS, FineTuningTask, Prepared
from .interruption import STATUS, interruptible
from .model_weights import check_weights
from .options import parse_options

logger = logging.getLogger(__name__)


def run(
    task: str,
    *,
    method: str = DEFAULT_METHOD,
    description: str = "",
    prog: str | None = None,
    argv: Sequence[str] | None = None,
) -> None:
    """Run a recipe: read the options, train, evaluate, save, describe, and push if asked to.

    Args:
        task: a name in `TASKS`.
        method: the method unless the options name another.
        description: what `--help` says first.
        prog: the command, for `--help` and errors; by default the script's name.
        argv: the options instead of those of the command line.
    """
    parser, arguments, config = parse_options(TASKS[task], method=method, description=description, prog=prog, argv=argv)
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    logging.getLogger("hf_coefsfl").setLevel(logging.INFO)
    transformers_logging.set_verbosity_warning()
    hub_logging.set_verbosity_error()  # what it cannot reach is said once, by us
    try:
        check_folder(config)
        job = TASKS[task](arguments, keep=config.partition_column)
        trainer, evaluated = make_trainer(job, config)
    except ValueError as error:
        parser.error(str(error))
    except OSError as error:
        why = disk_fault(error)
        if why is None:
            raise
        parser.exit(1, f"{parser.prog}: error: {why}.\n")
    except KeyboardInterrupt:
        parser.exit(STATUS, f"\n{parser.prog}: stopped before training.\n")
    try:
        with interruptible(trainer, parser.prog, argv):
            complete(trainer, job, evaluated)
    except (RunRefused, DataError) as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")


def complete(trainer: SplitFedTrainer, job: FineTuningTask, evaluated: list[str]) -> None:
    """Train from a checkpoint or the start, evaluate, save, describe, and push if the configuration says so."""
    with trainer.holding_folder():
        _complete(trainer, job, evaluated)


def _complete(trainer: SplitFedTrainer, job: FineTuningTask, evaluated: list[str]) -> None:
    config = trainer.args
    trainer.card_arguments = CardArguments(
        dataset=public_name(job.dataset_id), dataset_args=job.dataset_config, tasks=job.pipeline_tag
    )
    trainer.train(resume_from_checkpoint=config.resume_from_checkpoint)
    path = Path(str(config.output_dir)) / SUMMARY_NAME
    if trainer.already_finished and path.exists() and not config.push_to_hub:  # all is there, and stays as it is
        if trainer.is_world_process_zero():
            print(_conclusion(json.loads(path.read_text(encoding="utf-8")), str(config.output_dir)), flush=True)
        return
    if config.load_best_model_at_end or trainer.state.global_step not in evaluations(trainer.state.log_history):
        trainer.evaluate()
    trainer.save_model(_internal_call=True)  # without a push: the summary is to come
    trainer.save_state()
    if trainer.is_world_process_zero():
        summary = summarize(trainer, job, evaluated)
        write_atomically(path, to_json(summary))
        print(_conclusion(summary, str(config.output_dir)), flush=True)
    if config.push_to_hub:
        try:
            trainer.push_to_hub()
        except UploadError as error:
            sys.exit(str(error))


def make_trainer(
    job: FineTuningTask,
    config: SplitFedConfig,
    kind: type[SplitFedTrainer] = SplitFedTrainer,
    *,
    train: bool = True,
) -> tuple[Any, list[str]]:
    """Return the trainer of a task, and the names of its evaluation sets.

    Args:
        job: the task.
        config: of the run; a cut that is not given is set.
        kind: the class of the trainer.
        train: whether the training data is here; clients may have it.
    """
    check_weights(job.arguments, config)
    config.remove_unused_columns = job.remove_unused_columns
    job.blocks = config.blocks
    with config.main_process_first(desc="preparing the data"):
        prepared = job.prepare(config.seed, train=train)
    if config.cut < 1:  # not given
        config.cut = paper_share(len(members(find_blocks(prepared.model, config.blocks)[1])))
    lora = None
    if not config.full_finetuning:
        lora = default_lora(
            prepared.model,
            head=config.head,
            blocks=config.blocks,
            rank=job.arguments.lora_rank,
            alpha=job.arguments.lora_alpha,
        )
    evals = prepared.eval_dataset
    _check_best(config, prepared)
    trainer = kind(
        model=prepared.model,
        args=config,
        train_dataset=prepared.train_dataset if train else None,
        eval_dataset=next(iter(evals.values())) if len(evals) == 1 else evals,
        data_collator=prepared.data_collator,
        processing_class=prepared.processing_class,
        compute_metrics=prepared.compute_metrics,
        preprocess_logits_for_metrics=prepared.preprocess_logits_for_metrics,
        peft_config=lora,
    )
    trainer.further_metrics = prepared.further_metrics
    return trainer, list(evals)


def _check_best(config: SplitFedConfig, prepared: Prepared) -> None:
    """Refuse a metric to choose the best round by that no evaluation has: training would end at the first one."""
    if config.metric_for_best_model is None or not prepared.metric_names:
        return
    sets = [""] if len(prepared.eval_dataset) == 1 else [f"{name}_" for name in prepared.eval_dataset]
    known = [f"{part}{metric}" for part in sets for metric in (*prepared.metric_names, "loss")]
    wanted = config.metric_for_best_model.removeprefix("eval_")
    if wanted not in known:
        raise ValueError(
            f"metric_for_best_model={wanted!r} is not measured.{did_you_mean(wanted, known)} Choose from "
            f"{', '.join(known)}, or add it with --metrics."
        )
    if wanted.endswith("perplexity"):
        config.greater_is_better = False  # which Trainer only knows of losses


def paper_share(num_blocks: int) -> int:
    """Return the cut that gives the client the paper's share of the blocks, a third: 4 of 12, 2 of 6."""
    return max(num_blocks // 3, 1)


def check_folder(config: SplitFedConfig) -> None:
    """Refuse an output folder that holds a run or is read-only, or a broken checkpoint, before data is loaded."""
    check_writable(config)
    wanted: Any = config.resume_from_checkpoint
    if isinstance(wanted, bool):  # of a file of options
        wanted = config.resume_from_checkpoint = LAST if wanted else None
    if wanted is None:
        check_free(config)
    elif wanted != LAST:
        wrong = fault(Path(wanted))
        if wrong is not None:
            raise ValueError(f"resume_from_checkpoint={wanted!r}: {wrong}.")


def summarize(trainer: SplitFedTrainer, job: FineTuningTask, evaluated: list[str]) -> dict[str, Any]:
    """Return what a table or a plot of several runs needs to know of this one."""
    args, history = trainer.args, trainer.state.log_history
    metrics = final_results(trainer)
    assert trainer.clients is not None
    weights = Weights.of(trainer)
    lower = tuple(f"_{name}" for name in job.lower_is_better)
    return {
        "task": job.name,
        "title": job.title,
        "method": args.method,
        "method_kwargs": args.method_kwargs or None,
        "model": public_name(job.model_id),
        "clients": "simulated" if trainer.simulated else "real",
        "dataset": public_name(job.dataset_id),  # of real clients: what the server evaluated on
        "cut": args.cut,
        "num_blocks": trainer.split.num_blocks,
        "partition": args.partition if trainer.simulated else None,
        "dirichlet_alpha": args.dirichlet_alpha if trainer.simulated else None,
        "num_clients": len(trainer.clients),
        "participation": args.participation,
        "num_rounds": args.num_rounds,
        "warmup_rounds": args.warmup_rounds,
        "local_epochs": args.local_epochs,
        "batch_size": args.per_device_train_batch_size,
        "learning_rate": args.learning_rate,
        "exchange_dtype": shown(args.exchange_codecs),
        "adapter_codec": args.adapter_codec,
        "seed": args.seed,
        "scores": job.scores(metrics, evaluated),
        "higher_is_better": job.higher_is_better,  # of the first score
        "lower_is_better": list(job.scores({k: v for k, v in metrics.items() if k.endswith(lower)}, evaluated)),
        "metrics": metrics,
        "curve": _curve(trainer, job, evaluated),
        "weights": {"round": weights.round, "best": weights.best, "mib": weights.mib},
        "base": {"name_or_path": weights.base, "dtype": weights.dtype}
        | ({"quantised": weights.quantised} if weights.quantised else {}),
        "id2label": weights.classes,
        "mib": trainer.ledger.mib,
        "exchange_mib": trainer.ledger.exchange_mib,  # without adapters
        "transfers": trainer.ledger.total.transfers,
        "server_gflops": server_gflops(history, trainer.state.global_step),  # None without count_flops
        # Of both sides in all rounds, also those before an interruption.
        "seconds": sum(entry.get(f"{side}_seconds", 0.0) for entry in history for side in ("client", "server")),
        "client_parameters": sum(p.numel() for p in trainer.client_parameters.values()),
        "server_parameters": sum(p.numel() for p in trainer.server_parameters.values()),
        "versions": _versions(),
    }


def _curve(trainer: SplitFedTrainer, job: FineTuningTask, evaluated: list[str]) -> list[dict[str, Any]]:
    """Return the scores of each evaluated round, with the MiB and the work of the server until then."""
    history = trainer.state.log_history
    # After training comes an evaluation of the last round, or of the best one, which is a round's already.
    rounds = evaluated_rounds(history) if trainer.args.load_best_model_at_end else evaluations(history)
    traffic = [entry for entry in history if "bytes_up" in entry]
    points = accuracy_curve([*traffic, *({"step": step, "eval_": 0.0} for step in rounds)], "eval_")
    return [
        {"round": step, "mib": mib, "scores": job.scores(rounds[step], evaluated)}
        | ({} if (work := server_gflops(history, step)) is None else {"server_gflops": work})
        for step, mib, _ in points
    ]


def _versions() -> dict[str, str]:
    import peft
    import torch
    import transformers

    versions = {module.__name__: module.__version__ for module in (torch, transformers, peft)}
    return {"hf_coefsfl": __version__, **versions, "python": sys.version.split()[0]}


def _which(summary: dict[str, Any]) -> str:
    """Return which weights the scores are of."""
    rounds = summary["num_rounds"]
    weights = summary.get("weights", {"round": rounds, "best": False})  # version 0.1 wrote none
    if weights["best"]:
        return f"best, round {weights['round']} of {rounds} ({weights['mib']:.1f} MiB until then)"
    return f"{rounds} rounds" if weights["round"] == rounds else f"round {weights['round']} of {rounds}"


def _conclusion(summary: dict[str, Any], folder: str) -> str:
    scores = ", ".join(
        f"{title} {'nan' if value is None else f'{value:.1f}'}" for title, value in summary["scores"].items()
    )
    return (
        f"{summary['title']}, {summary['method']}, {_which(summary)}: {scores}. {summary['mib']:.1f} MiB "
        f"in {summary['transfers']} transfers crossed the cut at block {summary['cut']} of {summary['num_blocks']}.\n"
        f"Adapter, halves, card and {SUMMARY_NAME}: {folder}"
    )
