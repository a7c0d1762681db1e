"""From a command line to a trained, evaluated, saved and described adapter: what every recipe runs."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers.utils import logging as transformers_logging

from . import __version__
from .adapters import default_lora
from .checkpoints import last_whole
from .config import SplitFedConfig
from .hub import UploadError
from .options import parse_options
from .report import accuracy_curve
from .split import find_blocks
from .tasks import TASKS, FineTuningTask
from .trainer import SplitFedTrainer

logger = logging.getLogger(__name__)
SUMMARY_NAME = "summary.json"


def run(
    task: str,
    *,
    method: str = "coef_j",
    description: str = "",
    prog: str | None = None,
    argv: Sequence[str] | None = None,
) -> None:
    """Run a recipe: read the options, train, evaluate, save, describe, and push where asked to.

    Args:
        task: a name in `TASKS`.
        method: the method unless the options name another.
        description: what `--help` says first.
        prog: the command, for `--help` and errors; by default the script's name.
        argv: the options instead of those of the command line.
    """
    parser, arguments, config = parse_options(TASKS[task], method=method, description=description, prog=prog, argv=argv)
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    transformers_logging.set_verbosity_warning()
    try:
        job = TASKS[task](arguments, keep=config.partition_column)
        trainer, evaluated = make_trainer(job, config)
    except ValueError as error:
        parser.error(str(error))
    trainer.train(resume_from_checkpoint=_checkpoint(config))
    metrics = _final_metrics(trainer)
    trainer.save_model(_internal_call=True)  # without a push: the summary and the whole card are to come
    trainer.save_state()
    trainer.create_model_card(dataset=_name(job.dataset_id), tasks=job.pipeline_tag)
    if trainer.is_world_process_zero():
        summary = summarize(trainer, job, metrics, evaluated)
        write_json(summary, Path(str(config.output_dir)) / SUMMARY_NAME)
        print(_last_words(summary, str(config.output_dir)), flush=True)
    if config.push_to_hub:
        try:
            trainer.push_to_hub()
        except UploadError as error:
            sys.exit(str(error))


def make_trainer(job: FineTuningTask, config: SplitFedConfig) -> tuple[SplitFedTrainer, list[str]]:
    """Return the trainer of a task, and the names of its evaluation sets."""
    config.remove_unused_columns = job.remove_unused_columns
    with config.main_process_first(desc="preparing the data"):
        prepared = job.prepare(config.seed)
    if config.cut < 1:  # not given
        blocks: Any = find_blocks(prepared.model, config.blocks)[1]
        config.cut = paper_share(len(blocks))
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
    trainer = SplitFedTrainer(
        model=prepared.model,
        args=config,
        train_dataset=prepared.train_dataset,
        eval_dataset=next(iter(evals.values())) if len(evals) == 1 else evals,
        data_collator=prepared.data_collator,
        processing_class=prepared.processing_class,
        compute_metrics=prepared.compute_metrics,
        preprocess_logits_for_metrics=prepared.preprocess_logits_for_metrics,
        peft_config=lora,
    )
    return trainer, list(evals)


def paper_share(num_blocks: int) -> int:
    """Return the cut that gives the client the paper's share of the blocks, a third: 4 of 12, 2 of 6."""
    return max(num_blocks // 3, 1)


def _checkpoint(config: SplitFedConfig) -> str | None:
    """Return the checkpoint to go on from; "last" is the newest of the output folder, if there is any."""
    wanted = config.resume_from_checkpoint
    return last_whole(str(config.output_dir)) if wanted == "last" else wanted


def _final_metrics(trainer: SplitFedTrainer) -> dict[str, float]:
    """Return the metrics of the final weights; those of the last round's evaluation, if it had one."""
    last: dict[str, float] = {}
    for entry in trainer.state.log_history:
        if entry["step"] == trainer.state.global_step:
            last |= {name: value for name, value in entry.items() if name.startswith("eval_")}
    if last and not trainer.args.load_best_model_at_end:
        return last
    return trainer.evaluate()


def summarize(
    trainer: SplitFedTrainer, job: FineTuningTask, metrics: dict[str, float], evaluated: list[str]
) -> dict[str, Any]:
    """Return what a table or a plot of several runs needs to know of this one."""
    args, history = trainer.args, trainer.state.log_history
    trained = next((entry for entry in reversed(history) if "train_runtime" in entry), {})
    assert trainer.federation is not None
    return {
        "task": job.name,
        "title": job.title,
        "method": args.method,
        "method_kwargs": args.method_kwargs or None,
        "model": _name(job.model_id),
        "dataset": _name(job.dataset_id),
        "cut": args.cut,
        "num_blocks": trainer.split.num_blocks,
        "partition": args.partition,
        "dirichlet_alpha": args.dirichlet_alpha,
        "num_clients": len(trainer.federation),
        "participation": args.participation,
        "num_rounds": args.num_rounds,
        "warmup_rounds": args.warmup_rounds,
        "local_epochs": args.local_epochs,
        "batch_size": args.per_device_train_batch_size,
        "learning_rate": args.learning_rate,
        "seed": args.seed,
        "scores": job.scores(metrics, evaluated),
        "higher_is_better": job.higher_is_better,
        "metrics": metrics,
        "curve": _curve(history, job, evaluated),
        "mib": trainer.ledger.mib,
        "transfers": trainer.ledger.total.transfers,
        "seconds": trained.get("train_runtime"),
        "client_parameters": sum(p.numel() for p in trainer.client_parameters.values()),
        "server_parameters": sum(p.numel() for p in trainer.server_parameters.values()),
        "versions": _versions(),
    }


def _curve(history: list[dict[str, Any]], job: FineTuningTask, evaluated: list[str]) -> list[dict[str, Any]]:
    """Return the scores of each evaluated round, with the MiB that had crossed the cut by then."""
    by_round: dict[int, dict[str, Any]] = {}
    for entry in history:
        evals = {name: value for name, value in entry.items() if name.startswith("eval_")}
        if evals:
            by_round.setdefault(int(entry["step"]), {}).update(evals)
    merged = [entry for entry in history if "bytes_up" in entry]
    merged += [{"step": step, "eval_any": 0.0} for step in by_round]
    traffic = {step: mib for step, mib, _ in accuracy_curve(merged, "eval_any")} if by_round else {}
    return [
        {"round": step, "mib": traffic[step], "scores": job.scores(metrics, evaluated)}
        for step, metrics in sorted(by_round.items())
    ]


def _versions() -> dict[str, str]:
    import peft
    import torch
    import transformers

    versions = {module.__name__: module.__version__ for module in (torch, transformers, peft)}
    return {"hf_coefsfl": __version__, **versions, "python": sys.version.split()[0]}


def _name(path_or_id: str) -> str:
    """Return a Hub id as it is, and the name of a local folder without where it lies."""
    path = Path(path_or_id)
    return path.resolve().name if path.exists() else path_or_id


def write_json(content: dict[str, Any], path: Path) -> None:
    """Write a file whole or not at all."""
    unfinished = path.with_suffix(".tmp")
    unfinished.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    os.replace(unfinished, path)


def _last_words(summary: dict[str, Any], folder: str) -> str:
    scores = ", ".join(f"{title} {value:.1f}" for title, value in summary["scores"].items())
    return (
        f"{summary['title']}, {summary['method']}, {summary['num_rounds']} rounds: {scores}. {summary['mib']:.1f} MiB "
        f"in {summary['transfers']} transfers crossed the cut at block {summary['cut']} of {summary['num_blocks']}.\n"
        f"Adapter, halves, card and {SUMMARY_NAME}: {folder}"
    )
