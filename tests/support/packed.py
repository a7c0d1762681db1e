"""Packed messages."""

from pathlib import Path
from typing import Any

import torch

from hf_coefsfl.protocol.packing import Exchange, Store
from tests.support.federated import texts, tiny_bert, trainer

MIXED = {"smashed_data": "int4", "gradients": "int3", "curvature": "topk8"}


def packed(store: Store, message: Any, kept: torch.Tensor | None = None) -> Exchange[Any]:
    exchange: Exchange[Any] = Exchange(store)
    exchange.append(message, store.places(kept))
    return exchange


def values(scale: float = 1.0, seed: int = 0) -> torch.Tensor:
    return scale * torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(seed))


def texts_run(folder: Path, **changes: Any) -> Any:
    """Train on padded texts; not evaluated."""
    changes = {"num_rounds": 2, "warmup_rounds": 0, "num_clients": 4, **changes}
    run = trainer(folder, model=tiny_bert(), **({"data": texts(48), "eval_dataset": texts(8)} | changes))
    run.train()
    return run
