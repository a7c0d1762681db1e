"""Compares ways to run the passes of an exchange, on ViT-Tiny's halves and one thread.

python benchmarks/exchange_passes.py [--json passes.json]

Each row compares two ways to compute the same thing. They run in turn, and the median of the paired ratios counts.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from speed import (
    Bare,
    keep_memory,
    paired,
)  # beside this script; sets the number of OpenMP threads before torch is imported
from torch import Tensor
from torch.nn.functional import cross_entropy

from hf_coefsfl.analysis.tables import format_table

Way = Callable[[], Any]


def projections(bare: Bare) -> tuple[Way, Way]:
    """CoeF-J's feedback on a batch: g and one u, by two backward passes and by a batched one."""
    batch = bare.batches[0]
    with torch.no_grad():
        hidden = bare.below(batch)
    signs = torch.ones_like(bare.above(hidden, batch)[1])

    def two() -> list[Tensor]:
        leaf = hidden.detach().requires_grad_()
        loss, logits = bare.above(leaf, batch)
        (u,) = torch.autograd.grad(logits, leaf, signs, retain_graph=True)
        (g,) = torch.autograd.grad(loss, leaf)
        return [g, u]

    def batched() -> list[Tensor]:
        leaf = hidden.detach().requires_grad_()
        _, logits = bare.above(leaf, batch)
        output = logits.detach().requires_grad_()
        (residual,) = torch.autograd.grad(cross_entropy(output, batch["labels"]), output)
        (both,) = torch.autograd.grad(logits, leaf, torch.stack([residual, signs]), is_grads_batched=True)
        return list(both)

    return two, batched


def inference_mode(bare: Bare) -> tuple[Way, Way]:
    """The round-initial forward passes under no_grad and under inference_mode."""

    def inference() -> list[Tensor]:
        with torch.inference_mode():
            return [bare.below(batch) for batch in bare.batches]

    def plain() -> list[Tensor]:
        with torch.no_grad():
            return [bare.below(batch) for batch in bare.batches]

    return plain, inference


def one_batch(bare: Bare) -> tuple[Way, Way]:
    """The same mini-batch by mini-batch and all in one batch."""
    joined = {name: torch.cat([batch[name] for batch in bare.batches]) for name in bare.batches[0]}

    @torch.no_grad()
    def one_by_one() -> list[Tensor]:
        return [bare.below(batch) for batch in bare.batches]

    @torch.no_grad()
    def at_once() -> list[Tensor]:
        return list(bare.below(joined).split(len(joined["labels"]) // len(bare.batches)))

    return one_by_one, at_once


def optimizers(bare: Bare) -> tuple[Way, Way]:
    """Ten AdamW steps over the adapters of both sides, plain and fused."""
    shapes = [p.shape for p in bare.peft.parameters() if p.requires_grad]

    def steps(**options: Any) -> Way:
        generator = torch.Generator().manual_seed(0)
        weights = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
        optimizer = torch.optim.AdamW(weights, 1e-3, **options)
        for weight in weights:
            weight.grad = torch.full_like(weight, 1e-3)

        def run() -> list[Tensor]:
            for _ in range(10):
                optimizer.step()
            return [weight.detach() for weight in weights]

        return run

    return steps(), steps(fused=True)


COMPARISONS = {
    "g and u: two backward passes, one batched": projections,
    "exchange: no_grad, inference_mode": inference_mode,
    "exchange: batch by batch, all in one": one_batch,
    "AdamW, ten steps: plain, fused": optimizers,
}


def measure(name: str, make: Callable[[Bare], tuple[Way, Way]], budget: float) -> dict[str, Any]:
    torch.manual_seed(0)
    bare = Bare("vit-tiny")
    bare.peft.eval()  # without dropout the results can be compared
    first, second = make(bare)
    gap = max(((a - b).norm() / a.norm()).item() for a, b in zip(first(), second(), strict=True))
    result = paired(second, first, budget)
    return {
        "comparison": name,
        "first, s": result["bare, s"],
        "second, s": result["ours, s"],
        "first/second": result["bare/ours"],
        "relative gap": gap,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--budget", type=float, default=15.0, help="seconds of each comparison")
    parser.add_argument("--json", type=Path, help="write the figures here, too")
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_memory()
    rows = [measure(name, make, options.budget) for name, make in COMPARISONS.items()]
    numbers = {"first, s": ".4f", "second, s": ".4f", "first/second": ".2f", "relative gap": ".0e"}
    print(format_table(rows, {"comparison": ""} | numbers))
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
