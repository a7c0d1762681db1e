"""Measures what a few hostile clients do to the accuracy, under each way to make one model of the clients' weights.

python benchmarks/hostile_clients.py

Ten clients, all in every round, with the model and the images of recipes/quickstart.py, by CoeF-J (feedback_at="walk").
A hostile client trains as the others do and then sends another adapter of the client side (sign flip, scaling, noise),
or it trains honestly on labels that are wrong, with smashed data to match, which no bound on updates can see.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PrinterCallback, ViTForImageClassification
from transformers.utils import logging

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from hf_coefsfl import SplitFedConfig, SplitFedTrainer
from hf_coefsfl.analysis.tables import format_table
from hf_coefsfl.federation.simulation import Simulation
from recipes.quickstart import accuracy, load_data, pretrain

CLIENTS, HOSTILE = 10, 3  # the robust rules are set to withstand so many
RULES: dict[str, dict[str, Any]] = {
    "mean": {},
    "mean, bound": {"client_bound": 5.0},
    "trimmed mean": {"aggregation": "trimmed_mean"},
    "median": {"aggregation": "median"},
    "krum": {"aggregation": "krum"},
}
ATTACKS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sign flip": lambda start, update: start - update,
    "sign flip by 5": lambda start, update: start - 5 * update,
    "scaling by 100": lambda start, update: start + 100 * update,
    "noise of 10 norms": lambda start, update: start + 10 * update.norm() * _unit(update),
    "wrong labels": lambda start, update: start + update,
}
_GENERATOR = torch.Generator()


def _unit(like: Tensor) -> Tensor:
    noise = torch.randn(like.shape, generator=_GENERATOR)
    return noise / noise.norm()


class Attacked(Simulation):
    """A simulation whose first clients are hostile."""

    attack: str
    hostile: int

    def _train_client(self, round_index: int, client: int, batches: Any, learning_rate: float) -> Any:
        hostile = client < self.hostile
        if hostile and self.attack == "wrong labels":
            batches = [batch | {"labels": (batch["labels"] + 1) % 10} for batch in batches]
        initial = [p.detach().clone() for p in self.client_parameters.values()]
        report = super()._train_client(round_index, client, batches, learning_rate)
        if hostile:
            _GENERATOR.manual_seed(1000 * round_index + client)
            with torch.no_grad():
                for start, p in zip(initial, self.client_parameters.values(), strict=True):
                    p.copy_(ATTACKS[self.attack](start, p - start))
        return report


def final_accuracy(base: str, data: tuple, seed: int, rule: str, attack: str, hostile: int, rounds: int) -> float:
    """Return the accuracy on the test images after the last round, in percent."""
    with tempfile.TemporaryDirectory() as folder:
        config = SplitFedConfig(
            output_dir=folder,
            method="coef_j",
            method_kwargs={"feedback_at": "walk"},
            cut=1,
            num_clients=CLIENTS,
            participation=1.0,
            num_rounds=rounds,
            partition="dirichlet",
            dirichlet_alpha=3.0,
            min_client_samples=8,
            per_device_train_batch_size=32,
            per_device_eval_batch_size=len(data[2]),
            learning_rate=1e-2,
            save_strategy="no",
            on_client_failure="skip",
            max_lost_rounds=0,
            hostile_clients=HOSTILE,
            disable_tqdm=True,
            report_to="none",
            seed=seed,
            **RULES[rule],
        )
        model = ViTForImageClassification.from_pretrained(base)
        sets = {"train_dataset": data[1], "eval_dataset": data[2]}
        trainer = SplitFedTrainer(model=model, args=config, compute_metrics=accuracy, **sets)
        trainer.remove_callback(PrinterCallback)
        assert trainer.rounds is not None
        trainer.rounds.__class__ = Attacked
        trainer.rounds.attack, trainer.rounds.hostile = attack, hostile  # type: ignore[attr-defined]
        trainer.train()
        return 100 * trainer.evaluate()["eval_accuracy"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rules", nargs="+", default=list(RULES), choices=list(RULES), metavar="RULE")
    parser.add_argument("--attacks", nargs="+", default=list(ATTACKS), choices=list(ATTACKS), metavar="ATTACK")
    parser.add_argument("--json", type=Path, help="write the figures to this file, too")
    given = parser.parse_args()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    cases = [("none", 0), *((attack, hostile) for attack in given.attacks for hostile in (1, HOSTILE))]
    data, rows = load_data(given.seed), []
    with tempfile.TemporaryDirectory() as base:
        pretrain(data[0], given.seed).save_pretrained(base)
        for attack, hostile in cases:
            row: dict[str, Any] = {"attack": attack, "hostile": hostile}
            for rule in given.rules:
                began = time.process_time()
                row[rule] = final_accuracy(base, data, given.seed, rule, attack, hostile, given.rounds)
                spent = time.process_time() - began
                print(attack, hostile, rule, f"{row[rule]:.1f}", f"{spent:.0f} s", file=sys.stderr, flush=True)
            rows.append(row)
    print(format_table(rows, {"attack": "", "hostile": ""} | dict.fromkeys(given.rules, ".1f"), markdown=True))
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
