"""Measures whether training the clients of a round in one batch is faster than one after the other.

python benchmarks/stacked_clients.py [--clients 2 5 10] [--batch-sizes 32 4] [--json stacked.json]

All clients share the frozen weights and differ in their LoRA factors. One block of ViT-Tiny's shapes (197 tokens of 192
features, rank 4 on all projections) runs forward and backward for K clients: one after the other; stacked, with the
frozen products over all clients' tokens at once and the factors applied by batched products; and by vmap over stacked
factors. It is plain PyTorch on one thread. The ways run in turn, and the median of the paired ratios counts. The
launches are the operations that compute something, each of which is a kernel or more on a GPU.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from speed import keep_memory, paired  # beside this script; sets the number of OpenMP threads before torch is imported
from torch import Tensor
from torch.nn.functional import gelu, layer_norm, linear, scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from hf_coefsfl.analysis.tables import format_table

TOKENS, WIDTH, HEADS, RANK, SCALE = 197, 192, 3, 4, 2.0
PROJECTIONS = {
    **dict.fromkeys(("query", "key", "value", "output"), (WIDTH, WIDTH)),
    "up": (WIDTH, 4 * WIDTH),
    "down": (4 * WIDTH, WIDTH),
}
Factors = dict[str, tuple[Tensor, Tensor]]  # A (K, in, r) and B (K, r, out), without K for one client
LowRank = Callable[[Tensor, Tensor, Tensor], Tensor]


def frozen_weights() -> dict[str, tuple[Tensor, Tensor]]:
    return {n: (torch.randn(out, in_) / in_**0.5, torch.zeros(out)) for n, (in_, out) in PROJECTIONS.items()}


def stacked_factors(clients: int) -> Factors:
    return {
        name: (torch.randn(clients, in_, RANK) / in_**0.5, 0.1 * torch.randn(clients, RANK, out))
        for name, (in_, out) in PROJECTIONS.items()
    }


def of_one(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return x @ a @ b


def of_many(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Apply each client's factors to its own part of x (K·b, T, d)."""
    parts = x.view(len(a), -1, x.shape[-1])
    return torch.bmm(torch.bmm(parts, a), b).view(*x.shape[:-1], -1)


def block(x: Tensor, weights: dict[str, tuple[Tensor, Tensor]], factors: Factors, low_rank: LowRank) -> Tensor:
    """A pre-norm transformer block over x (b, T, d)."""

    def project(name: str, x: Tensor) -> Tensor:
        return linear(x, *weights[name]) + SCALE * low_rank(x, *factors[name])

    def heads(x: Tensor) -> Tensor:
        return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)

    normed = layer_norm(x, (WIDTH,))
    mixed = scaled_dot_product_attention(*(heads(project(name, normed)) for name in ("query", "key", "value")))
    x = x + project("output", mixed.transpose(1, 2).flatten(2))
    return x + project("down", gelu(project("up", layer_norm(x, (WIDTH,)))))


class Ways:
    """The ways to get every client's gradients of ⟨g, block(x)⟩."""

    def __init__(self, clients: int, batch_size: int):
        torch.manual_seed(0)
        self.weights, self.factors = frozen_weights(), stacked_factors(clients)
        self.x = torch.randn(clients, batch_size, TOKENS, WIDTH)
        self.g = torch.randn_like(self.x)

    def one_by_one(self) -> list[Tensor]:
        found = []
        for client, (x, g) in enumerate(zip(self.x, self.g, strict=True)):
            factors = {
                name: (a[client].clone().requires_grad_(), b[client].clone().requires_grad_())
                for name, (a, b) in self.factors.items()
            }
            leaves = [t for pair in factors.values() for t in pair]
            found.append(torch.autograd.grad(block(x, self.weights, factors, of_one), leaves, g))
        return [torch.stack(parts) for parts in zip(*found, strict=True)]

    def stacked(self) -> list[Tensor]:
        factors = {n: (a.clone().requires_grad_(), b.clone().requires_grad_()) for n, (a, b) in self.factors.items()}
        leaves = [t for pair in factors.values() for t in pair]
        output = block(self.x.flatten(0, 1), self.weights, factors, of_many)
        return list(torch.autograd.grad(output, leaves, self.g.flatten(0, 1)))

    def vmapped(self) -> list[Tensor]:
        def objective(factors: Factors, x: Tensor, g: Tensor) -> Tensor:
            return (block(x, self.weights, factors, of_one) * g).sum()

        found = torch.func.vmap(torch.func.grad(objective))(self.factors, self.x, self.g)
        return [t for pair in found.values() for t in pair]


class Launches(TorchDispatchMode):
    """Counts the operations that compute: not views, and not memory that is only allocated."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += not func.is_view and "empty" not in func.name()
        return func(*args, **(kwargs or {}))


def launches(way: Callable[[], Any]) -> int:
    with Launches() as counter:
        way()
    return counter.number


def measure(clients: int, batch_size: int, budget: float) -> dict[str, Any]:
    ways = Ways(clients, batch_size)
    row: dict[str, Any] = {"clients": clients, "batch size": batch_size}
    expected = ways.one_by_one()
    row |= {"launches": launches(ways.one_by_one), "stacked, launches": launches(ways.stacked)}
    for name, way in (("stacked", ways.stacked), ("vmap", ways.vmapped)):
        torch.testing.assert_close(way(), expected, rtol=1e-3, atol=1e-3)
        result = paired(way, ways.one_by_one, budget)
        row |= {"one by one, s": result["bare, s"], f"{name}, s": result["ours, s"], f"{name}, x": result["bare/ours"]}
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, nargs="+", default=[2, 5, 10])
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[32, 4])
    parser.add_argument("--budget", type=float, default=10.0, help="seconds of each comparison, beyond three pairs")
    parser.add_argument("--json", type=Path, help="write the figures here, too")
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_memory()
    rows = [measure(k, size, options.budget) for size in options.batch_sizes for k in options.clients]
    columns = {"clients": "", "batch size": "", "one by one, s": ".3f", "stacked, s": ".3f", "vmap, s": ".3f"}
    columns |= {"stacked, x": ".2f", "vmap, x": ".2f", "launches": "", "stacked, launches": ""}
    print(format_table(rows, columns))
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
