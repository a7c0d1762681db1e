"""The two halves of a model: what a client holds and what the server holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..protocol.messages import SmashedData
from .block_arguments import leaves
from .placeholders import (
    crossing_context,
    is_generative_pair,
    no_cache,
    placeholder_inputs,
    refuse_block_outputs,
    sort_inputs,
    unwrapped,
)
from .quantized import inner_tensors, numel, scale_nbytes
from .stand_ins import CutReached, Injection, RandomState, injecting
from .surgery import Cut


class Half(nn.Module):
    """What both halves share: a model that was cut, its sizes, and saving it.

    `model` is a Hugging Face model (or its PEFT wrapper) that lacks the other half's parameters.
    It may be replaced by a wrapper of itself, e.g. `half.model = PeftModel.from_pretrained(half.model, folder)`.
    """

    side: str

    def __init__(self, model: nn.Module, cut: Cut) -> None:
        super().__init__()
        self.model = model
        self.cut = cut
        self.training = model.training

    def num_parameters(self, only_trainable: bool = False) -> int:
        """Number of parameters of this half."""
        return sum(numel(p) for p in self.parameters() if p.requires_grad or not only_trainable)

    def nbytes(self) -> int:
        """Bytes of the parameters and buffers of this half; what the other half owns weighs nothing."""
        tensors = {id(t): t for whole in (*self.parameters(), *self.buffers()) for t in inner_tensors(whole)}
        own = sum(min(t.numel() * t.element_size(), t.untyped_storage().nbytes()) for t in tensors.values())
        return own + scale_nbytes(self)

    def save_pretrained(self, folder: str | Path) -> None:
        """Write this half to a folder: its config, the cut and its tensors as safetensors."""
        from .save_load import save_half

        save_half(self, folder)


class ClientHalf(Half):
    """The embeddings and the first blocks: raw inputs in, smashed data out."""

    side = "client"

    def context(self, inputs: dict[str, Any]) -> dict[str, Tensor]:
        """Return what the server needs of a batch beside activations, where the batch is."""
        raw = sort_inputs(inputs)[0]
        device = next((t.device for t in raw.values() if isinstance(t, Tensor)), None)
        return crossing_context(unwrapped(self.model), raw, self.cut.crossing, device)

    def forward(self, *, crossing: dict[str, Tensor] | None = None, **inputs: Any) -> SmashedData:
        """Run the client's blocks on a batch.

        Labels are not needed; if given they are not used here, only carried along in the result.
        The activations, and what else the block at the cut needs, stay on the client's graph.
        `crossing` is `context(inputs)` if it is known: to find out about inputs on an accelerator is to wait for it.
        """
        raw, labels, shapes = sort_inputs(inputs)
        arguments = run_to_cut(self.model, raw | no_cache(self.model))
        activations: Tensor = arguments.pop(next(iter(arguments)))
        context = self.context(raw) if crossing is None else dict(crossing)
        by_path = {path: leaf for name, value in arguments.items() for path, leaf in leaves(value, name)}
        for path in self.cut.shipped:
            if path in by_path:
                leaf = by_path[path]
                context[f"block.{path}"] = (
                    leaf if isinstance(leaf, Tensor) else torch.tensor(leaf, device=activations.device)
                )
        return SmashedData(activations, context, labels, shapes)


class ServerHalf(Half):
    """The remaining blocks and the head: smashed data and labels in, the model's own output out."""

    side = "server"

    def forward(self, smashed: SmashedData, **inputs: Any) -> Any:
        """Run the server's blocks and the head over smashed data.

        `inputs` are the labels, which take precedence over those in `smashed`, and any further
        arguments of the model's forward. In training mode the random numbers that the model draws
        on the placeholders are given back, so that dropout is that of the unsplit model.
        """
        refuse_block_outputs(inputs)
        inputs = smashed.labels | {name: value for name, value in inputs.items() if value is not None}
        base = unwrapped(self.model)
        if is_generative_pair(base) and not {"labels", "decoder_input_ids"} & inputs.keys():
            raise ValueError(
                "This server half decodes: it needs `labels` or `decoder_input_ids`. "
                "Without them the decoder would run on placeholders instead of the text."
            )
        placeholders = placeholder_inputs(base, smashed)
        injection = Injection(
            smashed.activations,
            {
                path: smashed.context[f"block.{path}"] if kind == "tensor" else int(smashed.context[f"block.{path}"])
                for path, kind in self.cut.shipped.items()
                if f"block.{path}" in smashed.context
            },
            RandomState(smashed.activations.device) if self.training else None,
        )
        with injecting(injection):
            output = self.model(**(placeholders | inputs | no_cache(base)))
        if not injection.reached:
            raise RuntimeError(
                f"The server's forward pass never reached block {self.cut.index} of {self.cut.blocks!r}, so the "
                "smashed data was not used. Something skips blocks (layer drop, early exit): switch it off."
            )
        return output


def run_to_cut(model: nn.Module, inputs: dict[str, Any]) -> dict[str, Any]:
    """Run a model that stops at the cut; return the arguments of the block there, the hidden state first."""
    try:
        model(**inputs)
    except CutReached as reached:
        # Nothing is computed in here: as long as the exception lives, so do the contexts
        # (saved-tensor hooks of checkpointing) of the frames that it passed.
        arguments = reached.arguments
    else:
        raise RuntimeError(
            "The client's forward pass never reached the cut. Something skips blocks (layer drop, early exit): "
            "switch it off."
        )
    return arguments
