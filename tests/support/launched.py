"""Runs for `tests/trainer/test_distributed.py` to launch: `launched.py FOLDER [--resume NAME] [--kill NAME] [--whole]`.

Every case is trained, evaluated and used for predictions, one after the other, and leaves its results in FOLDER. A run
of `INTERRUPTED` is resumed before that, and another one is begun at the end, in the midst of which a process dies.
"""

import argparse
import gc
import json
import os
import signal
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from hf_coefsfl import METHODS, SplitFedTrainer
from tests.support import once
from tests.support.federated import QUICK, images, trainer, weights
from tests.support.packed import MIXED

CLOCK = ("seconds", "runtime", "per_second", "preparation_time")
EVAL_BATCH = 4
EVALUATED, PREDICTED = 22, 18  # rows, which leave batches to fill up for some numbers of processes
ROUND, EVALUATION = "round", "evaluation"

# Clients of 5, 2, 11, 2 and 4 samples, of which a round samples three.
UNEVEN: dict[str, Any] = {"partition": "dirichlet", "dirichlet_alpha": 1.0, "num_clients": 5, "participation": 0.6}
CASES: dict[str, dict[str, Any]] = {name: {"method": name} for name in sorted(METHODS)} | {
    "walk": {"method": "coef_j", "method_kwargs": {"feedback_at": "walk"}},
    "codecs": {"exchange_codec": MIXED | {"gradients": "int3_stochastic"}, "warmup_rounds": 1},
    "kept optimizer": {"method": "coef_p", "keep_server_optimizer": True},
    "few clients": {"num_clients": 2, "participation": 1.0},  # a third process has none
    "lost clients": {"client_dropout_rate": 0.4, "on_client_failure": "skip", "seed": 1},
    "measured": {"staleness_probe": 1, "count_flops": True},
    "adapters": {"adapter_codec": "int8", "method": "acc_sfl", "num_rounds": 3, "warmup_rounds": 1},
    "bounded": {"client_bound": 1.0, "method": "acc_sfl"},
    "trimmed mean, bounded": {"aggregation": "trimmed_mean", "client_bound": 1.0, "method": "gas"},
    "median": {"aggregation": "median", "method": "acc_sfl"},
    "krum": {"aggregation": "krum", "participation": 1.0},
}
# The method, and in the midst of what a process of the run dies.
INTERRUPTED = {"killed in a round": ("gas", ROUND), "killed in an evaluation": ("fsl_sage", EVALUATION)}
KILLED_AT = 4  # while round 4 trains, or while it is evaluated, in both cases before its checkpoint


def make(folder: Path, case: dict[str, Any]) -> SplitFedTrainer:
    case = {"method": "coef_j", "num_rounds": 2, "warmup_rounds": 0, "eval_strategy": "steps", "eval_steps": 2} | case
    case["method_kwargs"] = case.get("method_kwargs") or QUICK.get(case["method"])
    evaluation = {"eval_dataset": images(EVALUATED, seed=1), "per_device_eval_batch_size": EVAL_BATCH}
    return trainer(folder, data=images(24), **evaluation, **UNEVEN | case)


def make_interrupted(folder: Path, name: str, **changes: Any) -> SplitFedTrainer:
    case = {"method": INTERRUPTED[name][0], "num_rounds": 5, "warmup_rounds": 1, "eval_steps": 1, "save_steps": 2}
    return make(folder, case | {"save_strategy": "steps", "save_total_limit": 2, "adapter_codec": "int8"} | changes)


def refuse(folder: Path, name: str) -> None:
    """Try to resume a run with another learning rate; every process notes why it may not."""
    run = make_interrupted(folder, name, learning_rate=1.0)
    try:
        run.train(resume_from_checkpoint=True)
    except ValueError as error:
        (folder / f"refused-{run.args.process_index}.txt").write_text(str(error))


def finish(run: SplitFedTrainer, folder: Path) -> None:
    """Evaluate and predict, and leave all that came out; each process notes the rows that its model saw."""
    seen: list[int] = []
    hook = run.model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(len(kwargs["pixel_values"])), with_kwargs=True
    )
    metrics = run.evaluate()
    evaluated, seen[:] = sum(seen), []
    prediction = run.predict(images(PREDICTED, seed=2))
    hook.remove()
    (folder / f"rows-{run.args.process_index}.json").write_text(json.dumps([evaluated, sum(seen)]))
    if run.is_world_process_zero():
        tensors = {"predictions": prediction.predictions, "labels": prediction.label_ids}
        save_file(weights(run) | {k: torch.from_numpy(v) for k, v in tensors.items()}, folder / "result.safetensors")
        logs = [entry for entry in run.state.log_history if "train_loss" not in entry]  # the mean since the resume
        timeless = [
            {k: v for k, v in entry.items() if not k.endswith(CLOCK)} for entry in [*logs, metrics, prediction.metrics]
        ]
        (folder / "result.json").write_text(json.dumps({"world": run.args.world_size, "logs": timeless}, indent=1))


def die(run: SplitFedTrainer, moment: str) -> None:
    """Have the last process killed in the midst of round 4, or of its evaluation."""

    def reached() -> None:
        done = KILLED_AT - 1 if moment == ROUND else KILLED_AT
        if run.state.global_step == done and run.args.process_index == run.args.world_size - 1:
            os.kill(os.getpid(), signal.SIGKILL)

    half = run.split.client if moment == ROUND else run.model  # evaluation is done by the whole model
    half.register_forward_pre_hook(lambda module, args: reached())


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--resume", choices=INTERRUPTED)
    parser.add_argument("--kill", choices=INTERRUPTED)
    parser.add_argument("--whole", action="store_true", help="also run what is interrupted elsewhere")
    options = parser.parse_args()
    torch.set_num_threads(1)
    once.use(setattr)
    gc.freeze()  # each run collects garbage, and would look at all that is loaded
    if options.resume:
        folder = options.folder / options.resume
        refuse(folder, options.resume)
        run = make_interrupted(folder, options.resume)
        run.train(resume_from_checkpoint=True)
        finish(run, folder)
    runs = {name: make(options.folder / name, case) for name, case in CASES.items()}
    runs |= {name: make_interrupted(options.folder / f"{name}, whole", name) for name in INTERRUPTED if options.whole}
    for run in runs.values():
        folder = Path(run.args.output_dir or "")
        run.train()
        finish(run, folder)
    if options.kill:
        run = make_interrupted(options.folder / options.kill, options.kill)
        die(run, INTERRUPTED[options.kill][1])
        run.train()
