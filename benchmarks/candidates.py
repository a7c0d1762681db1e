"""Compares ideas for a once-per-round method on the digits, seed by seed, with our own methods and the paper's.

python benchmarks/candidates.py --seeds 0 1 2 3

Each idea is a method of a few lines, below. What is worth keeping is in hf_coefsfl/methods. Five of 18 clients a round,
batches of 4, label skew; `--local_epochs 3` compares what to send for several epochs. Finished runs are kept in
--output, and the same command continues from there.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from tqdm import tqdm
from transformers.utils import logging

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from hf_coefsfl.analysis.tables import format_table
from hf_coefsfl.cli import main as coefsfl
from hf_coefsfl.methods import METHODS
from hf_coefsfl.methods.base import option
from hf_coefsfl.protocol.messages import Feedback
from hf_coefsfl.protocol.server_side import on_graph
from hf_coefsfl.protocol.tensors import over

CoeFP: Any = METHODS["coef_p"]
Vanilla: Any = METHODS["vanilla"]
_TINY = 1e-9


def squares(gradient: Tensor) -> Tensor:
    """Return ‖g‖² of each sample (b,)."""
    return gradient.flatten(1).square().sum(1)


@dataclass
class Candidate(CoeFP):
    """One pass of the server, of which the gradients come, unless an option says otherwise."""

    server_passes: int = option(1, "passes of the server")

    def sample_losses(self, server: Any, smashed: Any, batch: int) -> tuple[Any, Any, Tensor]:
        leaf = on_graph(smashed)
        output = server.forward(leaf, batch)
        labels = smashed.labels["labels"].view(-1)
        return leaf, output, torch.nn.functional.cross_entropy(output.logits.detach(), labels, reduction="none")


@dataclass
class NoCompensation(Candidate):
    """The gradients as they are."""

    name: ClassVar[str] = "no_compensation"

    def compensate(self, feedback: Any, displacement: Tensor, outputs: Any) -> Tensor:
        return feedback.gradient


@dataclass
class PerSample(Candidate):
    """Polyak's curvature for each sample instead of the batch."""

    name: ClassVar[str] = "polyak_per_sample"

    def feedback(self, server: Any, smashed: Any, batch: int) -> Feedback:
        leaf, output, losses = self.sample_losses(server, smashed, batch)
        return Feedback(server.feedback_gradient(output.loss, leaf), scalars=losses / len(losses))

    def compensate(self, feedback: Any, displacement: Tensor, outputs: Any) -> Tensor:
        g = feedback.gradient
        return g + over(squares(g) / (2 * feedback.scalars.clamp(min=_TINY)), g) * displacement


@dataclass
class PerUpdate(Candidate):
    """Polyak's curvature over the number of a round's local updates: each of them may go as far as one step."""

    name: ClassVar[str] = "polyak_per_update"

    def entering(self, client: Any, batch: int, feedback: Any, displacement: Tensor) -> Tensor:
        return super().entering(client, batch, feedback, displacement / len(client.batches))


@dataclass
class LogOdds(Candidate):
    """The log-odds of the label are linear in δ, so that the gradient fades as the label becomes certain."""

    name: ClassVar[str] = "log_odds"

    def feedback(self, server: Any, smashed: Any, batch: int) -> Feedback:
        leaf, output, losses = self.sample_losses(server, smashed, batch)
        return Feedback(server.feedback_gradient(output.loss, leaf), scalars=losses)

    def compensate(self, feedback: Any, displacement: Tensor, outputs: Any) -> Tensor:
        g, p = feedback.gradient, (-feedback.scalars).exp().clamp(1e-6, 1 - 1e-6)
        change = (g * displacement).flatten(1).sum(1) * len(g)
        left = 1 - torch.sigmoid(torch.logit(p) - change / (1 - p))
        return g * over(left / (1 - p), g)


@dataclass
class OnlineFactor(Candidate):
    """CoeF-D with the λ* of Proposition 1 along −g₀, which the server measures on each batch by a finite difference."""

    name: ClassVar[str] = "online_lambda"
    step: float = option(1e-2, "of the difference, in multiples of the size of s₀")

    def feedback(self, server: Any, smashed: Any, batch: int) -> Feedback:
        g = server.gradient(smashed, batch)
        size = self.step * smashed.activations.norm() / g.norm().clamp(min=_TINY)
        moved = type(smashed)(smashed.activations + size * g, smashed.context, smashed.labels, smashed.shapes)
        product, cube = (server.gradient(moved, batch) - g) / size, g**3
        factor = (cube * product).sum() / cube.square().sum().clamp(min=1e-30)
        found = super().feedback(server, smashed, batch)
        return Feedback(found.gradient, scalars=factor.clamp(min=0).reshape(1))

    def compensate(self, feedback: Any, displacement: Tensor, outputs: Any) -> Tensor:
        g = feedback.gradient
        return g + feedback.scalars * g * g * displacement


@dataclass
class TrustRegion(Candidate):
    """g̃ = g₀ + ‖g₀‖/ρ δ: the client is drawn towards a step of length ρ = `radius` ‖s₀‖."""

    name: ClassVar[str] = "trust_region"
    radius: float = option(0.1, "ρ in multiples of ‖s₀‖")

    def entering(self, client: Any, batch: int, feedback: Any, displacement: Tensor) -> Tensor:
        g = feedback.gradient
        radius = self.radius * squares(client.initial[batch].activations).sqrt()
        return g + over(squares(g).sqrt() / radius, g) * displacement


@dataclass
class Stops(Candidate):
    """No compensation, but a client ends its local updates once its activations have moved by `radius` ‖s₀‖."""

    name: ClassVar[str] = "stops"
    radius: float = option(0.1, "in multiples of ‖s₀‖")

    def entering(self, client: Any, batch: int, feedback: Any, displacement: Tensor) -> Tensor:
        moved = squares(displacement).sqrt() / squares(client.initial[batch].activations).sqrt()
        if moved.mean() > self.radius:
            client.optimizer.param_groups[0]["lr"] = 0.0
        return feedback.gradient


@dataclass
class Later(Candidate):
    """The gradients of the last of the server's passes instead of the first."""

    name: ClassVar[str] = "last_pass"

    def round(self, client: Any, server: Any) -> None:
        smashed = client.upload()
        server.local_updates(smashed, self.server_passes * client.local_epochs - 1)
        with server.training_on_feedback():
            client.update(client.stage(self._walk(server, smashed)))


@dataclass
class EachEpoch(Candidate):
    """A set of gradients for each local epoch, from the server's pass of that epoch: more bytes down."""

    name: ClassVar[str] = "each_epoch"

    def round(self, client: Any, server: Any) -> None:
        smashed, epochs = client.upload(), client.local_epochs
        self.sets = []
        for _ in range(epochs):
            with server.training_on_feedback():
                self.sets.append(list(self._walk(server, smashed)))
        client.update(client.stage(self.sets[0]))

    def update(self, client: Any, messages: Any, batches: Any) -> None:
        for feedback in self.sets:
            for batch, message in enumerate(feedback):
                client.smash(batch)
                client.descend(self.compensate(message, client.displacement(batch), ()))


@dataclass
class VanillaTwice(Vanilla):
    """Vanilla whose server goes over the smashed data of the round once more, as that of our own methods does."""

    name: ClassVar[str] = "vanilla_twice"

    def round(self, client: Any, server: Any) -> None:
        sent = []
        for batch in range(client.num_batches):
            (smashed,) = client.upload([batch])
            client.update([Feedback(server.train_step(smashed, batch))], [batch])
            sent.append(smashed)
        server.train_again(sent, 1)


WALK = {"feedback_at": "walk"}
ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "Vanilla SFL": ("vanilla", {}),
    "Vanilla SFL, 2 passes": ("vanilla_twice", {}),
    "Vanilla SFL, optimizer kept": ("vanilla", {}),
    "CoeF-D": ("coef_d", {}),
    "CoeF-J": ("coef_j", {}),
    "no compensation, walk": ("reuse", WALK),
    "CoeF-D, walk": ("coef_d", WALK),
    "CoeF-J, walk": ("coef_j", WALK),
    "λ* online, walk": ("online_lambda", {}),
    "trust region, walk": ("trust_region", {}),
    "stops at a radius, walk": ("stops", {}),
    "log-odds, walk": ("log_odds", {}),
    "Polyak per sample, walk": ("polyak_per_sample", {}),
    "Polyak, walk": ("coef_p", {"server_passes": 1}),
    "Polyak, optimizer kept": ("coef_p", {"server_passes": 1}),
    "no compensation, 2 passes": ("no_compensation", {"server_passes": 2}),
    "Polyak per sample, 2 passes": ("polyak_per_sample", {"server_passes": 2}),
    "Polyak per update, 2 passes": ("polyak_per_update", {"server_passes": 2}),
    "CoeF-W: CoeF-D, walk, 2 passes": ("coef_w", {}),
    "CoeF-P: Polyak, 2 passes": ("coef_p", {}),
    "Polyak, 2nd of 2 passes": ("last_pass", {"server_passes": 2}),
    "CoeF-P, optimizer kept": ("coef_p", {}),
}
EPOCH_ROWS = {
    "Vanilla SFL": ("vanilla", {}),
    "CoeF-J": ("coef_j", {}),
    "Polyak, first epoch's gradients": ("coef_p", {"server_passes": 1}),
    "Polyak, last epoch's gradients": ("last_pass", {}),
    "Polyak, each epoch's gradients": ("each_epoch", {}),
}


def score(name: str, method: str, kwargs: dict[str, Any], seed: int, rounds: int, epochs: int) -> float:
    """Return the final accuracy of one run in percent."""
    with tempfile.TemporaryDirectory() as folder:
        options = {
            "output_dir": f"{folder}/run", "method": method, "method_kwargs": kwargs, "seed": seed, "cut": 1,
            "num_clients": 18, "participation": 0.28, "num_rounds": rounds, "local_epochs": epochs,
            "partition": "dirichlet", "dirichlet_alpha": 0.5, "min_client_samples": 8, "learning_rate": 3e-3,
            "per_device_train_batch_size": 4, "per_device_eval_batch_size": 400, "on_client_failure": "skip",
            "keep_server_optimizer": "optimizer kept" in name, "save_strategy": "no", "disable_tqdm": True,
        }  # fmt: skip
        path = Path(folder, "options.json")
        path.write_text(json.dumps(options))
        coefsfl(["train", "digits", str(path)])
        return json.loads(Path(folder, "run", "summary.json").read_text())["scores"]["accuracy"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--local_epochs", type=int, default=1)
    parser.add_argument("--only", nargs="+", help="rows whose name contains one of these texts")
    parser.add_argument("--output", type=Path, default=Path("outputs/candidates.jsonl"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    every = ROWS if arguments.local_epochs == 1 else EPOCH_ROWS
    rows = {n: row for n, row in every.items() if not arguments.only or any(text in n for text in arguments.only)}
    setting = [arguments.rounds, arguments.local_epochs]
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    lines = arguments.output.read_text().splitlines() if arguments.output.exists() else []
    done = {tuple(key): value for key, value in map(json.loads, lines)}
    for seed in tqdm(arguments.seeds, unit="seed"):
        for name, (method, kwargs) in tqdm(rows.items(), unit="run", leave=False):
            key = (name, seed, *setting)
            if key not in done:
                done[key] = score(name, method, kwargs, seed, *setting)
                with arguments.output.open("a") as file:
                    file.write(json.dumps([key, done[key]]) + "\n")
    table = []
    for name in rows:
        values = [done[(name, seed, *setting)] for seed in arguments.seeds]
        seeds = {f"seed {seed}": f"{value:.1f}" for seed, value in zip(arguments.seeds, values, strict=True)}
        table.append({"": name, "mean": f"{statistics.mean(values):.1f}", **seeds})
    print(format_table(table, markdown=True))


if __name__ == "__main__":
    main()
