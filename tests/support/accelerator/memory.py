"""The memory that `coefsfl cost` predicts, against the bytes that the emulated devices have in use at most.

    python -m tests.support.accelerator.memory

prints the table of docs/costs.md. Client and server have a device each, so that one round gives the peak of either.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from hf_coefsfl.analysis.cost import CostModel, Round
from hf_coefsfl.analysis.memory import Run, footprint
from hf_coefsfl.analysis.tables import MIB
from hf_coefsfl.methods import Method, make_method
from hf_coefsfl.methods.parts.costs import RoundKind
from hf_coefsfl.protocol.client_side import ClientSide
from hf_coefsfl.protocol.context import RoundContext
from hf_coefsfl.protocol.link import LocalLink
from hf_coefsfl.protocol.packing import Exchange
from hf_coefsfl.protocol.server_side import ServerSide
from hf_coefsfl.split import SplitModel
from tests.support.accelerator.emulated import max_memory_allocated, memory_allocated, reset_peak_memory_stats
from tests.support.accelerator.runs import DEVICE, SECOND

SIZES = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 6, "num_attention_heads": 4,
         "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 128}  # fmt: skip
CUT, TOKENS, PLAN = 3, 64, Round(24, 8)
CLOSE = 0.03
SIDES = {"client": DEVICE, "server": SECOND}


def llama(dtype: str) -> PreTrainedModel:
    """Return a small Llama. Its attention is the eager one: the device has no fused kernel."""
    torch.manual_seed(0)
    config = AutoConfig.for_model("llama", **SIZES, pad_token_id=0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", dtype=getattr(torch, dtype)
    )
    return model


class Network(LocalLink):
    """A link to a client on another device: either side has its own copy of what was sent."""

    def __init__(self, method: Method, client: ClientSide, server: ServerSide):
        super().__init__(method, client)
        self.server = server

    def fetch(self, batches: Sequence[int] | None) -> Exchange[Any]:
        return moved(super().fetch(batches), self.server.context.device)

    def deliver(self, messages: Exchange[Any] | None, batches: Sequence[int] | None) -> None:
        super().deliver(None if messages is None else moved(messages, self.client.context.device), batches)


def moved(sent: Exchange[Any], device: torch.device) -> Exchange[Any]:
    """Return a copy of what was sent on another device."""
    copied: Exchange[Any] = Exchange(sent.store, sent.batches)
    for packed in sent.packed:
        tensors = {name: t.on(device) for name, t in packed.tensors.items()}
        places = None if packed.places is None else packed.places.on(device)
        rest = packed.rest.map(lambda t: t.to(device))
        copied.packed.append(type(packed)(rest, tensors, places))
    return copied


def measured(cost: CostModel, split: SplitModel, method: Method) -> dict[str, int]:
    """Return the peaks of a round on the devices of both sides, with the weights."""
    before = {side: memory_allocated(device) for side, device in SIDES.items()}
    spec = cost.samples.loss_spec
    contexts = {s: RoundContext(0, 0, 0, device=torch.device(device)) for s, device in SIDES.items()}
    halves = {side: copy.deepcopy(getattr(split, side)).to(device) for side, device in SIDES.items()}
    optimizers = {
        side: torch.optim.AdamW([p for p in half.parameters() if p.requires_grad], fused=True)
        for side, half in halves.items()
    }
    for device in SIDES.values():
        reset_peak_memory_stats(device)
    batches = cost.samples.batches(PLAN.sizes)
    client = ClientSide(halves["client"], batches, optimizers["client"], contexts["client"], spec)
    server = ServerSide(halves["server"], optimizers["server"], contexts["server"], spec)
    method.setup(split, spec, seed=0)
    method.round(Network(method, client, server), server)
    return {side: max_memory_allocated(device) - before[side] for side, device in SIDES.items()}


def compared(method: str, dtype: str, checkpointing: bool) -> dict[str, tuple[int, int]]:
    """Return the predicted and the measured bytes of each side."""
    cost = CostModel(llama(dtype), sequence_length=TOKENS, gradient_checkpointing=checkpointing)
    with mock.patch("hf_coefsfl.analysis.memory._usual_attention", return_value=nullcontext()):
        predicted = footprint(cost, RoundKind(make_method(method)), CUT, PLAN, Run())
    peaks = measured(cost, cost.split(CUT), make_method(method))
    return {side: (sum(getattr(predicted, side).values()), peak) for side, peak in peaks.items()}


def agrees(folder: Path, method: str, dtype: str, checkpointing: bool) -> None:
    """Prediction and peak agree, with all that a round takes beside weights in them."""
    for side, (predicted, peak) in compared(method, dtype, checkpointing).items():
        assert abs(predicted / peak - 1) < CLOSE, f"{side}: {predicted} bytes were predicted, {peak} measured"


def settings() -> dict[str, dict[str, Any]]:
    return {
        f"{method} {dtype}{' checkpointing' if checkpointing else ''}": {
            "method": method, "dtype": dtype, "checkpointing": checkpointing
        }
        for method in ("vanilla", "coef_j")
        for dtype in ("float32", "bfloat16")
        for checkpointing in (False, True)
    }  # fmt: skip


def cases() -> dict[str, Any]:
    return {name: partial(agrees, **setting) for name, setting in settings().items()}


def main() -> None:
    print("| method | dtype | checkpointing | part | predicted, MiB | measured, MiB | ratio |")
    print("|---|---|---|---|--:|--:|--:|")
    for setting in settings().values():
        for side, (predicted, peak) in compared(**setting).items():
            cells = [setting["method"], setting["dtype"], "yes" if setting["checkpointing"] else "no", side]
            cells += [f"{predicted / MIB:.2f}", f"{peak / MIB:.2f}", f"{predicted / peak:.2f}"]
            print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
