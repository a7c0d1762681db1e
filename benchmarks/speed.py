"""Compares one client's round with the bare passes that the method needs: what does the package itself cost?

python benchmarks/speed.py [--methods vanilla coef_j] [--models vit-tiny text] [--json speed.json]

The bare passes are the method's forward and backward passes and optimizer steps, written in plain PyTorch on the
unsplit model: no halves, no messages, no meter, no synchronised dropout, and batches collated beforehand. Both sides of
a ratio run in turn in this process on one thread, with freed memory kept. The median of the paired ratios counts.
Counting matrix products checks that both do the same work. The script exits with 1 if a ratio misses its target.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported

import argparse
import copy
import ctypes
import gc
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

import torch
from peft import PeftModel, get_peft_model
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel, RobertaConfig, RobertaForSequenceClassification, set_seed
from transformers.utils import logging

from hf_coefsfl import METHODS, SplitFedConfig, SplitFedTrainer
from hf_coefsfl.analysis.backbones import build_model
from hf_coefsfl.analysis.flops import OperationCounter
from hf_coefsfl.analysis.tables import format_table
from hf_coefsfl.methods.parts.math_attention import differentiable_attention
from hf_coefsfl.split.lora import default_lora

CUT = {"vit-tiny": 4, "text": 2}
BATCHES, BATCH_SIZE, LABELS, TOKENS = 2, {"vit-tiny": 4, "text": 8}, 4, 64
LONG_ROUND = 8  # batches in the comparison with plain fine-tuning; the paper's clients have 32
LEARNING_RATE = 1e-4
ROUND_TARGET, TRAINING_TARGET = 0.90, 0.95
# Fewer repetitions of the same passes than by default, so that the script ends in minutes.
OPTIONS: dict[str, dict[str, Any]] = {
    "ggn": {"rank": 2, "num_iterations": 2},
    "hutchinson": {"num_probes": 1},
    "fsl_sage": {"align_epochs": 2, "buffer_every": 1, "buffer_size": 4},
    "ho_sfl": {"num_perturbations": 1},
}
# What is compared, and what stands in its place with --compile.
NAMES = {"ours, s": "compiled, s", "bare, s": "plain, s", "bare/ours": "plain/compiled"}
ALIGNMENT, AUXILIARY_BLOCKS = "fsl_sage (alignment)", 3
Batch = dict[str, Tensor]


# ---- Models and data ----


def make_model(name: str) -> PeftModel:
    """A model with random weights: speed depends on shapes only. Both sides of a ratio start from equal weights."""
    set_seed(0)
    model: PreTrainedModel
    if name == "vit-tiny":
        model = build_model(name, LABELS)
        model.set_attn_implementation("sdpa")
    else:  # of the size of the 30M-parameter sentence encoders; with sdpa, the library's default
        sizes = {"hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 6, "num_attention_heads": 12}
        model = RobertaForSequenceClassification(
            RobertaConfig(vocab_size=50265, max_position_embeddings=514, type_vocab_size=1, num_labels=LABELS, **sizes)
        )
    return get_peft_model(model, default_lora(model, head="full"))


def make_rows(name: str, number: int) -> list[Batch]:
    """Images, or texts of many lengths that are padded to the longest, with each class equally often."""
    generator = torch.Generator().manual_seed(0)
    rows: list[Batch] = []
    for i in range(number):
        row = {"labels": torch.tensor(i % LABELS)}
        if name == "vit-tiny":
            row["pixel_values"] = torch.randn(3, 224, 224, generator=generator)
        else:
            length = TOKENS - (i * 7) % (TOKENS // 2)
            ids = torch.randint(10, 50000, (TOKENS,), generator=generator)
            row["attention_mask"] = (torch.arange(TOKENS) < length).long()
            row["input_ids"] = torch.where(row["attention_mask"] == 1, ids, 1)
        rows.append(row)
    return rows


def collate(rows: list[Batch]) -> Batch:
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


# ---- Ours ----


def make_trainer(name: str, method: str, batches: int = BATCHES, **changes: Any) -> SplitFedTrainer:
    args = SplitFedConfig(
        output_dir=os.path.join(tempfile.gettempdir(), "speed"),  # nothing is written
        method=method,
        method_kwargs={"samples_per_class": padded_class(name)} if method == "gas" else OPTIONS.get(method),
        cut=CUT[name],
        num_clients=1,
        participation=1.0,
        warmup_rounds=0,
        num_rounds=1000,
        per_device_train_batch_size=BATCH_SIZE[name],
        learning_rate=LEARNING_RATE,
        disable_tqdm=True,
        use_cpu=True,
        on_client_failure="skip",  # a loss may be NaN while products are made up for counting
        **changes,
    )
    rows = make_rows(name, batches * BATCH_SIZE[name])
    return SplitFedTrainer(make_model(name), args, train_dataset=[_Rows(rows)], data_collator=collate)


def padded_class(name: str) -> int:
    """One more than each class has, so that GAS generates a few activations."""
    return BATCHES * BATCH_SIZE[name] // LABELS + 1


class _Rows(torch.utils.data.Dataset[Batch]):
    def __init__(self, rows: list[Batch]):
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Batch:
        return self.rows[index]


def round_of(trainer: SplitFedTrainer, method: str) -> Callable[[], Any]:
    simulation = trainer.rounds
    assert simulation is not None
    index = 0 if method == ALIGNMENT else 1  # FSL-SAGE aligns in round 0 and not in round 1
    return lambda: simulation.run_round(index, LEARNING_RATE)


# ---- The bare passes ----


class Bare:
    """The unsplit model by plain module calls, and two plain AdamW for what lies below and above the cut."""

    def __init__(self, name: str):
        self.peft = make_model(name).train()
        self.model: Any = self.peft.get_base_model()
        self.is_image, self.cut, self.tokens = name == "vit-tiny", CUT[name], 197 if name == "vit-tiny" else TOKENS
        rows, size = make_rows(name, BATCHES * BATCH_SIZE[name]), BATCH_SIZE[name]
        self.batches = [collate(rows[start : start + size]) for start in range(0, len(rows), size)]
        self.blocks = self.model.vit.layers if self.is_image else self.model.roberta.encoder.layer
        self.lower = [p for block in self.blocks[: self.cut] for p in block.parameters() if p.requires_grad]
        self.upper = [p for p in self.model.parameters() if p.requires_grad and all(p is not q for q in self.lower)]
        norm = self.model.vit.layernorm if self.is_image else nn.Identity()
        above = {"blocks": nn.ModuleList(self.blocks[self.cut :]), "norm": norm, "head": self.model.classifier}
        self.server = nn.ModuleDict(above)
        self.auxiliary = copy.deepcopy(self.server).eval().requires_grad_()  # of FSL-SAGE
        del self.auxiliary["blocks"][AUXILIARY_BLOCKS:]
        self.auxiliary_step = torch.optim.AdamW(self.auxiliary.parameters(), 2e-4, fused=True)
        self.head = nn.Linear(self.model.config.hidden_size, LABELS)  # of AccSFL

    def round(self, method: str) -> Callable[[], None]:
        """One round of a method: fresh optimizers, whose states go with the gradients at its end, as ours do.

        Left behind, they would lie scattered over what our round finds free, and have it fetch more memory.
        """

        def run() -> None:
            trained = self.lower, self.upper, list(self.head.parameters())
            self.below_step, self.above_step, self.head_step = (
                torch.optim.AdamW(weights, LEARNING_RATE, weight_decay=0.0, fused=True) for weights in trained
            )
            getattr(self, "alignment" if method == ALIGNMENT else method)()
            del self.below_step, self.above_step, self.head_step
            for parameter in chain(*trained):
                parameter.grad = None

        return run

    def mask(self, batch: Batch) -> Tensor | None:
        return None if self.is_image else batch["attention_mask"][:, None, None, :].bool()

    def below(self, batch: Batch) -> Tensor:
        """The embeddings and the first blocks."""
        if self.is_image:
            hidden = self.model.vit.embeddings(batch["pixel_values"])
        else:
            hidden = self.model.roberta.embeddings(input_ids=batch["input_ids"])
        for block in self.blocks[: self.cut]:
            hidden = block(hidden, self.mask(batch))
        return hidden

    def above(self, hidden: Tensor, batch: Batch, network: nn.ModuleDict | None = None) -> tuple[Tensor, Tensor]:
        """The other blocks and the head: (loss, logits)."""
        network = self.server if network is None else network
        for block in network["blocks"]:
            hidden = block(hidden, self.mask(batch))
        hidden = network["norm"](hidden)
        logits = network["head"](hidden[:, 0] if self.is_image else hidden)
        return cross_entropy(logits, batch["labels"]), logits

    # -- Parts of a round --

    def exchange(self) -> list[Tensor]:
        """The round-initial passes. The first keeps its graph: the first local update is at the same weights."""
        first = self.below(self.batches[0])
        with torch.no_grad():
            return [first, *(self.below(batch) for batch in self.batches[1:])]

    def local_passes(self, exchanged: list[Tensor]) -> Iterator[tuple[Tensor, Batch]]:
        """The passes of the local updates, batch after batch."""
        for number, batch in enumerate(self.batches):
            yield (self.below(batch) if number else exchanged[0]), batch

    def input_gradient(
        self, hidden: Tensor, batch: Batch, network: nn.ModuleDict | None = None, twice: bool = False
    ) -> Tensor:
        leaf = hidden.detach().requires_grad_()
        return torch.autograd.grad(self.above(leaf, batch, network)[0], leaf, create_graph=twice)[0]

    def train_above(self, hidden: Tensor, batch: Batch) -> Tensor:
        leaf = hidden.detach().requires_grad_()
        self.above_step.zero_grad()
        self.above(leaf, batch)[0].backward()
        self.above_step.step()
        assert leaf.grad is not None
        return leaf.grad

    def step_below(self, hidden: Tensor, gradient: Tensor) -> None:
        self.below_step.zero_grad()
        hidden.backward(gradient)
        self.below_step.step()

    # -- Rounds --

    def vanilla(self) -> None:
        for batch in self.batches:
            hidden = self.below(batch)
            self.step_below(hidden, self.train_above(hidden, batch))

    def train_all_above(self, exchanged: list[Tensor], generated: int = 0) -> None:
        for hidden, batch in zip(exchanged, self.batches, strict=True):
            if generated:
                hidden = torch.cat([hidden, hidden[:generated]])
                batch = {name: torch.cat([t, t[:generated]]) for name, t in batch.items()}
            self.train_above(hidden, batch)

    def _reuse(self, feedback: Callable[[Tensor, Batch], Tensor], generated: int = 0) -> None:
        """Exchange, feedback on each batch, server training, client training."""
        exchanged = self.exchange()
        gradients = [feedback(hidden, batch) for hidden, batch in zip(exchanged, self.batches, strict=True)]
        self.train_all_above(exchanged, generated)
        for (hidden, _), gradient in zip(self.local_passes(exchanged), gradients, strict=True):
            self.step_below(hidden, gradient)

    def reuse(self) -> None:
        self._reuse(self.input_gradient)

    coef_d = celu_vfl = cycle_sl = reuse

    def coef_p(self) -> None:
        self._reuse(self.train_above)  # the server's second pass is the one of all methods that reuse a gradient

    coef_w = coef_p

    def gas(self) -> None:
        self._reuse(self.input_gradient, generated=LABELS // BATCHES)  # one of each class, see `padded_class`

    def oracle(self) -> None:
        exchanged = self.exchange()
        for hidden, batch in self.local_passes(exchanged):
            self.step_below(hidden, self.input_gradient(hidden, batch))
        self.train_all_above(exchanged)

    def coef_j(self) -> None:
        def feedback(hidden: Tensor, batch: Batch) -> Tensor:
            leaf = hidden.detach().requires_grad_()
            loss, logits = self.above(leaf, batch)
            torch.autograd.grad(logits, leaf, torch.ones_like(logits), retain_graph=True)
            return torch.autograd.grad(loss, leaf)[0]

        self._reuse(feedback)

    def ggn(self) -> None:
        def feedback(hidden: Tensor, batch: Batch) -> Tensor:
            leaf = hidden.detach().requires_grad_()
            with differentiable_attention():
                loss, logits = self.above(leaf, batch)
                (gradient,) = torch.autograd.grad(loss, leaf, retain_graph=True)
                seed = torch.zeros_like(logits, requires_grad=True)
                (pulled,) = torch.autograd.grad(logits, leaf, seed, create_graph=True)
                vector = gradient
                for _ in range(OPTIONS["ggn"]["num_iterations"]):
                    (pushed,) = torch.autograd.grad(pulled, seed, vector, retain_graph=True)
                    (vector,) = torch.autograd.grad(logits, leaf, pushed, retain_graph=True)
            return gradient

        self._reuse(feedback)

    def hutchinson(self) -> None:
        def feedback(hidden: Tensor, batch: Batch) -> Tensor:
            for _ in range(2 * OPTIONS["hutchinson"]["num_probes"]):
                self.input_gradient(hidden, batch)
            return self.input_gradient(hidden, batch)

        self._reuse(feedback)

    def acc_sfl(self) -> None:
        exchanged = self.exchange()
        self.train_all_above(exchanged)
        for hidden, batch in self.local_passes(exchanged):
            self.below_step.zero_grad()
            self.head_step.zero_grad()
            cross_entropy(self.head(hidden[:, 0]), batch["labels"]).backward()
            self.below_step.step()
            self.head_step.step()

    def fsl_sage(self) -> None:
        exchanged = self.exchange()
        self.train_all_above(exchanged)
        for hidden, batch in self.local_passes(exchanged):
            self.step_below(hidden, self.input_gradient(hidden, batch, self.auxiliary))

    def alignment(self) -> None:
        """As `fsl_sage`, and the auxiliary network is fitted to the server's gradients in between."""
        size, epochs = OPTIONS["fsl_sage"]["buffer_size"], OPTIONS["fsl_sage"]["align_epochs"]
        batch = {name: t[:size] for name, t in self.batches[0].items()}
        hidden = torch.randn(size, self.tokens, self.model.config.hidden_size)
        target = self.input_gradient(hidden, batch)
        for _ in range(epochs):
            with differentiable_attention():
                estimate = self.input_gradient(hidden, batch, self.auxiliary, twice=True)
            self.auxiliary_step.zero_grad()
            (estimate - target).square().sum().backward()
            self.auxiliary_step.step()
        self.fsl_sage()

    def ho_sfl(self) -> None:
        with torch.no_grad():
            exchanged = [self.below(batch) for batch in self.batches]
        for hidden, batch in zip(exchanged, self.batches, strict=True):
            self.input_gradient(hidden, batch)
        self.train_all_above(exchanged)
        with torch.no_grad():
            for batch in self.batches * (2 * OPTIONS["ho_sfl"]["num_perturbations"]):
                self.below(batch)

    def mu_splitfed(self) -> None:
        with torch.no_grad():
            for batch in self.batches:
                for _ in range(3):
                    hidden = self.below(batch)
                for _ in range(2 * (METHODS["mu_splitfed"]().server_passes + 1)):  # type: ignore[attr-defined]
                    self.above(hidden, batch)


# ---- Measuring ----


def keep_memory() -> None:
    """Have glibc keep freed memory, which it otherwise gives back from the top of its heap and fetches page by page.

    When it does so depends on which block happens to lie on top, which is not a property of the measured code.
    """
    if sys.platform == "linux" and hasattr(ctypes.CDLL(None), "mallopt"):
        mmap_threshold, trim_threshold = -3, -1  # of malloc.h
        ctypes.CDLL(None).mallopt(mmap_threshold, 2**25)
        ctypes.CDLL(None).mallopt(trim_threshold, 2**31 - 1)


def seconds(run: Callable[[], Any]) -> float:
    """Processor time of a run, on which other programs have less influence than on the clock on the wall."""
    gc.collect()
    start = time.process_time()
    run()
    return time.process_time() - start


def paired(ours: Callable[[], Any], bare: Callable[[], Any], budget: float) -> dict[str, Any]:
    """Run both in turn, at least three times and for about `budget` seconds, and compare pair by pair."""
    times: list[tuple[float, float]] = []
    while len(times) < 3 or (sum(map(sum, times)) < budget and len(times) < 15):
        times.append((seconds(ours), seconds(bare)))
    return {
        "ours, s": median(o for o, _ in times),
        "bare, s": median(b for _, b in times),
        "bare/ours": median(b / o for o, b in times),
        "fastest": min(b for _, b in times) / min(o for o, _ in times),
        "pairs": len(times),
    }


def counted(run: Callable[[], Any]) -> int:
    """The operations of a run. Placeholders do not count; attention is run as products, which can be counted."""
    with differentiable_attention(), OperationCounter() as counter:  # made-up products: the model is spoilt
        run()
    return sum(counter.flops.values())


def compare(label: dict[str, Any], make: Callable[[], tuple[Any, Any]], budget: float, target: float) -> dict[str, Any]:
    """Compare two ways to do the same work. `make` returns both, each with a model of its own."""
    ours, bare = make()
    work = counted(ours) / counted(bare)
    ours, bare = make()
    for run in (ours, bare):  # warm up
        run()
    return label | paired(ours, bare, budget) | {"target": target, "operations, ours/bare": work}


def measure_round(name: str, method: str, budget: float) -> dict[str, Any]:
    def make() -> tuple[Any, Any]:
        ours = round_of(make_trainer(name, method.split()[0]), method)
        return ours, Bare(name).round(method)

    return compare({"model": name, "method": method}, make, budget, ROUND_TARGET)


def measure_training(name: str, budget: float) -> dict[str, Any]:
    """Vanilla SFL against the model fine-tuned as a whole."""
    rows, size = make_rows(name, LONG_ROUND * BATCH_SIZE[name]), BATCH_SIZE[name]

    def make() -> tuple[Any, Any]:
        model = make_model(name).train()

        def fine_tune() -> None:  # leaves nothing behind, see `Bare.round`
            optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], LEARNING_RATE, fused=True)
            for start in range(0, len(rows), size):
                model(**collate(rows[start : start + size])).loss.backward()
                optimizer.step()
                optimizer.zero_grad()

        return round_of(make_trainer(name, "vanilla", LONG_ROUND), "vanilla"), fine_tune

    result = compare({"model": name, "method": "vanilla against the unsplit loop"}, make, budget, TRAINING_TARGET)
    return result | {"samples/s": len(rows) / result["ours, s"]}


def measure_compiled(name: str, method: str, budget: float) -> dict[str, Any]:
    """Our round with the blocks compiled by inductor, against our round without; both after their first rounds."""
    ours, plain = (round_of(make_trainer(name, method.split()[0], torch_compile=c), method) for c in (True, False))
    for run in (ours, plain) * 2:
        run()
    result = paired(ours, plain, budget)
    return {"model": name, "method": method} | {NAMES.get(key, key): value for key, value in result.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    methods = [*METHODS, ALIGNMENT]
    parser.add_argument("--methods", nargs="+", choices=methods, default=methods)
    parser.add_argument("--models", nargs="+", choices=list(CUT), default=list(CUT))
    parser.add_argument("--budget", type=float, default=8.0, help="seconds of each comparison, beyond three pairs")
    parser.add_argument("--compile", action="store_true", help="compare compiled rounds with uncompiled ones instead")
    parser.add_argument("--system-malloc", action="store_true", help="leave the settings of malloc as they are")
    parser.add_argument("--json", type=Path, help="write the figures here, too")
    parser.add_argument("--no-check", action="store_true", help="exit with 0 even if a target is missed")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if not options.system_malloc:
        keep_memory()
    logging.set_verbosity_error()
    rows: list[dict[str, Any]] = []
    for name in options.models:
        for method in options.methods if options.compile else (None, *options.methods):
            if options.compile:
                row = measure_compiled(name, method, options.budget)
            else:
                row = measure_round(name, method, options.budget) if method else measure_training(name, options.budget)
            print(f"{name}, {row['method']}: {row['pairs']} pairs", file=sys.stderr, flush=True)
            rows.append(row)
    columns = {"model": "", "method": "", **dict.fromkeys(NAMES.values() if options.compile else NAMES, ".3f")}
    columns |= {"fastest": ".3f", "pairs": ""}
    if not options.compile:
        columns |= {"target": ".2f", "operations, ours/bare": ".3f", "samples/s": ".1f"}
    print(format_table(rows, columns))
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    missed = [row for row in rows if "target" in row and row["bare/ours"] < row["target"]]
    unequal = [row for row in rows if abs(row.get("operations, ours/bare", 1) - 1) > 0.01]
    for row in unequal:
        print(f"{row['model']}, {row['method']}: the two sides do not do the same work.", file=sys.stderr)
    if (missed or unequal) and not options.no_check:
        sys.exit(1)


if __name__ == "__main__":
    main()
