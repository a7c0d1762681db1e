"""How a side trains in a round, as the configuration says: the same in a simulation and on a real client."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from transformers import Trainer

from ..config import SplitFedConfig
from ..methods import WARM_UP_METHOD, Method, make_method
from ..protocol.context import RoundContext
from ..protocol.packing import Store


class MethodSchedule:
    """The warm-up method for the first rounds, then the method of the run."""

    def __init__(self, args: SplitFedConfig):
        self.warmup_rounds = args.warmup_rounds
        self.warmup, self.method = make_method(WARM_UP_METHOD), args.make_method()

    def of_round(self, round_index: int) -> Method:
        """Return the method of a round."""
        return self.warmup if round_index < self.warmup_rounds else self.method


def make_store(args: SplitFedConfig, ignored_padding: tuple[bool, bool]) -> Store:
    """Return where a client's round keeps its exchange; padding (before, after) the tokens may be left out."""
    limit = args.exchange_memory_limit
    assert not isinstance(limit, str)
    return Store(args.exchange_codecs, limit, args.output_dir, *ignored_padding)


def make_context(
    args: SplitFedConfig,
    round_index: int,
    client: int,
    store: Store,
    autocast: Callable[[], AbstractContextManager[Any]],
    noise_secret: bytes | None = None,
) -> RoundContext:
    """Return what both sides of one client's round share; a client has a secret for its noise."""
    return RoundContext(
        seed=args.seed,
        round_index=round_index,
        client=client,
        local_epochs=args.local_epochs,
        max_grad_norm=args.max_grad_norm,
        device=args.device,
        autocast=autocast,
        store=store,
        adapter_codec=args.adapter_codec,
        compiled=args.torch_compile,
        noise=args.smashed_noise,
        noise_secret=noise_secret,
    )


def local_optimizer(
    args: SplitFedConfig, parameters: Mapping[str, nn.Parameter], learning_rate: float
) -> torch.optim.Optimizer:
    """Return a fresh optimizer (`args.optim`, AdamW by default)."""
    cls, kwargs = Trainer.get_optimizer_cls_and_kwargs(args)
    kwargs["lr"] = learning_rate
    return cls([{"params": list(parameters.values()), "weight_decay": args.weight_decay}], **kwargs)


def set_mode(half: nn.Module, args: SplitFedConfig) -> None:
    """Put a half in training mode, with batch statistics frozen and dropout as the config says."""
    training = args.dropout == "synced"
    modules = [half]
    for module in modules:  # which grows meanwhile; `half.modules()` calls a dozen functions for each of them
        modules += [m for m in module._modules.values() if m is not None]
    frozen = {m for m in modules if isinstance(m, nn.modules.batchnorm._BatchNorm)}  # statistics are not averaged
    if any(m.training is not (training and m not in frozen) for m in modules):  # not after a mere round
        half.train(training)
        for module in frozen:
            module.eval()
