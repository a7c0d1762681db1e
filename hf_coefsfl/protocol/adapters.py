"""The form in which the weights of federated averaging are sent, if not as they are.

The server keeps the global weights θ in float32 and sends them rounded: clients begin with θ̂. A client trains θ̂ to θₖ
and sends the update θₖ − θ̂ + eₖ, which counts as θ + update on the server. The residual eₖ is what encoding has taken
from the client's updates before (error feedback). So the rounding of θ̂ does not enter the average, and what an update
loses comes with the client's next one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from .codecs import CODECS

AS_THEY_ARE = "float32"
ADAPTER_CODECS = (AS_THEY_ARE, "bfloat16", "int8")
_BLOCK = 128  # values that have one scale: rows would be too short, as those of a LoRA matrix may have 4 entries
_VALUES, _SCALES = "values", "scales"


class AdapterCodec:
    """Named weights as one vector: in the order of their names, each in blocks of 128 values, the last one shorter.

    Args:
        name: of the codec of a block.
        like: the weights, or others with their names, shapes and dtypes.
    """

    def __init__(self, name: str, like: Mapping[str, Tensor]):
        self.codec = CODECS[name]
        self.like = {key: like[key] for key in sorted(like)}
        self.sizes = [t.numel() for t in self.like.values()]
        self.blocks = [-(-size // _BLOCK) for size in self.sizes]

    def form(self) -> dict[str, Tensor]:
        """Return what `encode` returns, without values."""
        shape = sum(self.blocks), _BLOCK
        values, scales = self.codec.parts(shape, torch.float32)
        form = {_VALUES: torch.empty(sum(self.sizes), dtype=values.dtype, device="meta")}
        if scales is not None:
            form[_SCALES] = torch.empty(shape[0], dtype=scales.dtype, device="meta")
        return form if self.sizes else {}

    def flat(self, weights: Mapping[str, Tensor]) -> Tensor:
        """Return named weights as one float32 vector."""
        parts = [weights[name].detach().reshape(-1).float() for name in self.like]
        return torch.cat(parts) if parts else torch.empty(0)

    def named(self, flat: Tensor) -> dict[str, Tensor]:
        """Return a vector as named weights, in their shapes and dtypes."""
        parts = zip(self.like.items(), flat.split(self.sizes) if self.sizes else (), strict=True)
        return {name: part.view(t.shape).to(t.dtype) for (name, t), part in parts}

    @torch.no_grad()
    def encode(self, flat: Tensor) -> dict[str, Tensor]:
        """Return what is sent of a vector. NaN and infinity do not become finite."""
        if not self.sizes:
            return {}
        values, scales = self.codec.encode(self._in_blocks(flat), seed=0)
        parts = zip(values.flatten().split([n * _BLOCK for n in self.blocks]), self.sizes, strict=True)
        coded = {_VALUES: torch.cat([part[:size] for part, size in parts])}
        return coded if scales is None else coded | {_SCALES: scales.flatten()}

    @torch.no_grad()
    def decode(self, coded: Mapping[str, Tensor]) -> Tensor:
        """Return the float32 vector that was encoded, as far as it is left."""
        if not self.sizes:
            return torch.empty(0)
        blocks, scales = self._in_blocks(coded[_VALUES]), coded.get(_SCALES)
        scales = None if scales is None else scales.unsqueeze(1)
        found = self.codec.decode(blocks, scales, tuple(blocks.shape), seed=0).float().flatten()
        parts = zip(found.split([n * _BLOCK for n in self.blocks]), self.sizes, strict=True)
        return torch.cat([part[:size] for part, size in parts])

    def _in_blocks(self, flat: Tensor) -> Tensor:
        """Return a vector as blocks (n, 128), those that are shorter filled with zeros."""
        return torch.cat([pad(part, (0, -len(part) % _BLOCK)) for part in flat.split(self.sizes)]).view(-1, _BLOCK)

    def encode_update(
        self, sent: Mapping[str, Tensor], trained: Mapping[str, Tensor], residual: Tensor | None
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Return what a client sends of its trained weights, and the residual for its next round.

        `sent` is what it began with, as it was sent; `residual` is that of the client's round before, None for zeros.
        """
        update = self.flat(trained) - self.flat(self.named(self.decode(sent)))
        if residual is not None:
            update = update + residual
        coded = self.encode(update)
        return coded, update - self.decode(coded)


def sent_form(name: str, weights: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return tensors of the bytes that weights take in either direction."""
    return weights if name == AS_THEY_ARE else AdapterCodec(name, weights).form()
