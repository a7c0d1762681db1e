"""Measures how the learning rate and the lambda of CoeF-D and CoeF-W change the accuracy on the quickstart's task.

python benchmarks/hyperparameters.py

Each figure is the final accuracy over seeds: the mean, the lowest and the highest. Model, data and federation are
those of recipes/quickstart.py.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

import torch
from transformers import PrinterCallback, ViTForImageClassification
from transformers.utils import logging

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from hf_coefsfl import SplitFedConfig, SplitFedTrainer
from hf_coefsfl.analysis.tables import format_table
from recipes.quickstart import BATCH_SIZE, accuracy, load_data, pretrain

RATE = 3e-3  # the quickstart's
RATES = (1e-3, RATE, 1e-2)
FACTOR = 3000 * BATCH_SIZE / 32
FACTORS = (0.0, FACTOR / 4, FACTOR, 4 * FACTOR, 16 * FACTOR)
METHODS = ("vanilla", "coef_d", "coef_j", "coef_w")
SCALED = ("coef_d", "coef_w")  # methods with a lambda


def final_accuracy(base: str, data: tuple, seed: int, method: str, rate: float, factor: float | None) -> float:
    """Return the accuracy on the test images after the last round."""
    with tempfile.TemporaryDirectory() as folder:
        config = SplitFedConfig(
            output_dir=folder,
            method=method,
            method_kwargs=None if factor is None else {"compensation_factor": factor},
            cut=1,
            num_clients=20,
            participation=0.2,
            num_rounds=15,
            partition="dirichlet",
            dirichlet_alpha=3.0,
            min_client_samples=BATCH_SIZE,
            per_device_train_batch_size=BATCH_SIZE,
            per_device_eval_batch_size=len(data[2]),
            learning_rate=rate,
            save_strategy="no",
            on_client_failure="skip",
            disable_tqdm=True,
            report_to="none",
            seed=seed,
        )
        model = ViTForImageClassification.from_pretrained(base)
        sets = {"train_dataset": data[1], "eval_dataset": data[2]}
        trainer = SplitFedTrainer(model=model, args=config, compute_metrics=accuracy, **sets)
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        return trainer.evaluate()["eval_accuracy"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    seeds = parser.parse_args().seeds
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    options = dict.fromkeys(SCALED, FACTOR)
    settings = [(method, rate, options.get(method)) for method in METHODS for rate in RATES]
    settings += [(method, RATE, factor) for method in SCALED for factor in FACTORS if factor != FACTOR]
    found: dict[tuple, list[float]] = {setting: [] for setting in settings}
    with tempfile.TemporaryDirectory() as base:
        for seed in seeds:
            data = load_data(seed)
            pretrain(data[0], seed).save_pretrained(base)
            for setting in settings:
                found[setting].append(100 * final_accuracy(base, data, seed, *setting))
                print(seed, *setting, f"{found[setting][-1]:.1f}", file=sys.stderr, flush=True)
    shown = {key: f"{statistics.mean(v):.1f} ({min(v):.1f} to {max(v):.1f})" for key, v in found.items()}
    rows = [{"method": m, **{f"{rate:g}": shown[m, rate, options.get(m)] for rate in RATES}} for m in METHODS]
    factors = [{"method": m, **{f"{f:g}": shown[m, RATE, f] for f in FACTORS}} for m in SCALED]
    print(format_table(rows), "", format_table(factors), sep="\n")


if __name__ == "__main__":
    main()
