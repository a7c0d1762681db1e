"""Codecs: the forms in which large tensors cross the cut, each with its bytes in closed form.

A codec makes two tensors of one, values and scales. It draws what is random from a seed that both sides know.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from .._suggest import did_you_mean
from .devices import to_device

KINDS = ("smashed_data", "gradients", "curvature")  # of what is encoded; the rest is small and goes as it is
_EXAMPLE = '{"smashed_data": "int4", "gradients": "int8"}'
COMPACT = "compact"
_COMPACT_CODECS = {"smashed_data": "int3", "gradients": "topk8", "curvature": "topk8"}  # a seventeenth of float32
_LARGEST = 2.0**15  # to which float16 values are scaled
_INDEX = 4  # bytes of the number of a token
_LARGEST_BLOCK = 128  # features that are rotated together, and have one scale
# Of a normal distribution with variance 1: the distance of levels with the least mean squared error (Max, 1960).
_STEPS: dict[int, float] = {4: 0.3352, 3: 0.5860, 2: 0.9957}


@dataclass(frozen=True)
class Part:
    """Shape and dtype of a tensor that is sent."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Its bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


class Codec:
    """Values as they were computed. The base of all codecs."""

    for_smashed_data = True
    stackable = True  # whether a batch of several clients is encoded as each client's is

    def parts(self, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Part, Part | None]:
        """Return what a tensor (..., features) becomes: values and scales."""
        return Part(shape, dtype), None

    def nbytes(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> int:
        """Return the bytes that a tensor becomes."""
        return sum(part.nbytes for part in self.parts(shape, dtype) if part is not None)

    def encode(self, values: Tensor, seed: int) -> tuple[Tensor, Tensor | None]:
        """Return values and scales. NaN and infinity do not become finite."""
        return values, None

    def decode(self, values: Tensor, scales: Tensor | None, shape: tuple[int, ...], seed: int) -> Tensor:
        """Return the tensor (of this shape, in some dtype) that values and scales stand for."""
        return values if scales is None else values.to(scales.dtype) * scales


class BFloat16(Codec):
    """Rounds to bfloat16."""

    def parts(self, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Part, Part | None]:
        """Return what a tensor becomes; one of 16 bits stays as it is."""
        return Part(shape, dtype if dtype.itemsize <= 2 else torch.bfloat16), None

    def encode(self, values: Tensor, seed: int) -> tuple[Tensor, Tensor | None]:
        """Return the rounded values."""
        return values if values.element_size() <= 2 else values.to(torch.bfloat16), None


class Float16(Codec):
    """Rounds to float16 after a scaling by a power of two, without which gradients would vanish."""

    stackable = False  # one power of two for all values

    def parts(self, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Part, Part | None]:
        """Return what a tensor becomes; one of 16 bits stays as it is."""
        if dtype.itemsize <= 2:
            return Part(shape, dtype), None
        return Part(shape, torch.float16), Part((), torch.float32) if math.prod(shape) else None

    def encode(self, values: Tensor, seed: int) -> tuple[Tensor, Tensor | None]:
        """Return the rounded values, and the power of two for all of them."""
        if values.element_size() <= 2:
            return values, None
        if not values.numel():
            return values.to(torch.float16), None
        scale = power_above(values.abs().amax()) / _LARGEST  # a power of two changes no bit of the mantissas
        return (values / scale).to(torch.float16), scale


class Int8(Codec):
    """Whole numbers up to 127 and a float32 scale for each token (each vector of the last dimension)."""

    def parts(self, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Part, Part | None]:
        """Return what a tensor becomes."""
        return Part(shape, torch.int8), Part((*shape[:-1], 1), torch.float32) if math.prod(shape) else None

    def encode(self, values: Tensor, seed: int) -> tuple[Tensor, Tensor | None]:
        """Return whole numbers and scales."""
        if not values.numel():
            return values.to(torch.int8), None
        largest = values.abs().amax(-1, keepdim=True).float()
        vanishes = largest < 127 * torch.finfo(torch.float32).tiny  # a scale below that is too coarse a number itself
        scale = torch.where(vanishes, torch.ones_like(largest), largest / 127)
        return (values / scale).round().to(torch.int8), scale


class Rotated(Codec):
    """Each token is rotated at random, then has 2^bits levels and a bfloat16 scale for each block of features.

    A block is the largest power of two, at most 128, that divides the features. Its rotation is D H / √n: random signs
    and a Hadamard matrix. Whatever the features are, the rotated ones are about normally distributed, which is what the
    levels (k + ½) · step are for. The step is the best one for a normal distribution, or less if that suffices for the
    largest entry. Levels are packed without gaps: a token takes ⌈features / p⌉ words of p values.

    Stochastic rounding goes to the two levels next to a value, so that it is right in the mean. Its error is larger.
    """

    stackable = False  # each client draws signs of its own

    def __init__(self, bits: int, stochastic: bool = False):
        self.bits, self.stochastic = bits, stochastic
        self.word = math.lcm(bits, 8) // 8  # bytes
        self.per_word = 8 * self.word // bits

    def parts(self, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Part, Part | None]:
        """Return what a tensor becomes: bytes, and scales of blocks."""
        *tokens, features = shape
        packed = Part((*tokens, -(-features // self.per_word) * self.word), torch.uint8)
        return packed, Part((*tokens, features // block_size(features)), torch.bfloat16)

    @torch.no_grad()
    def encode(self, values: Tensor, seed: int) -> tuple[Tensor, Tensor | None]:
        """Return packed levels and steps."""
        features = values.shape[-1]
        signs = _signs(features, seed, values.device)
        rotated = _rotate(values.float() * signs)
        steps = self._steps(rotated).to(torch.bfloat16)
        divisor = torch.where(steps == 0, torch.ones_like(steps), steps).float().unsqueeze(-1)
        middle = 2 ** (self.bits - 1)
        if self.stochastic:
            generator = torch.Generator(values.device).manual_seed(seed)
            drawn = torch.rand(rotated.shape, generator=generator, device=values.device)
            levels = (rotated / divisor).add_(drawn).add_(middle - 0.5)
        else:
            levels = (rotated / divisor).add_(middle)
        levels = levels.floor_().clamp_(0, 2 * middle - 1).to(torch.uint8)
        return self._pack(levels.flatten(-2)), steps

    def _steps(self, rotated: Tensor) -> Tensor:
        """Return the distance of two levels in each block."""
        sizes = rotated.abs()
        largest = sizes.amax(-1) / (2 ** (self.bits - 1) - 0.5)
        if self.stochastic:  # no value may lie beyond the last level, also after the step is rounded
            return largest * (1 + 2**-8)
        # The mean size of a normal variable is √(2/π). Unlike squares, sizes of 1e-30 do not vanish.
        return torch.minimum(largest, sizes.mean(-1) * (math.sqrt(math.pi / 2) * _STEPS[self.bits]))

    @torch.no_grad()
    def decode(self, values: Tensor, scales: Tensor | None, shape: tuple[int, ...], seed: int) -> Tensor:
        """Return what levels and steps stand for."""
        assert scales is not None
        features = shape[-1]
        levels = self._unpack(values)[..., :features].float() - (2 ** (self.bits - 1) - 0.5)
        blocks = levels.unflatten(-1, (-1, block_size(features))) * scales.float().unsqueeze(-1)
        return _rotate(blocks.flatten(-2)).flatten(-2) * _signs(features, seed, values.device)

    def _pack(self, levels: Tensor) -> Tensor:
        """Return the bytes of levels: word j holds the levels j, j + w, j + 2w, ... of a token with w words."""
        levels = pad(levels, (0, -levels.shape[-1] % self.per_word)).unflatten(-1, (self.per_word, -1))
        first, *others = (levels if self.word == 1 else levels.int()).unbind(-2)
        words = first.clone()
        for place, level in enumerate(others, start=1):
            words |= level << (self.bits * place)
        if self.word == 1:
            return words
        return torch.cat([(words >> (8 * i)) & 0xFF for i in range(self.word)], -1).to(torch.uint8)

    def _unpack(self, packed: Tensor) -> Tensor:
        if self.word == 1:
            words = packed
        else:
            first, *others = packed.unflatten(-1, (self.word, -1)).int().unbind(-2)
            words = first.clone()
            for place, byte in enumerate(others, start=1):
                words |= byte << (8 * place)
        mask = 2**self.bits - 1
        return torch.cat([(words >> (self.bits * place)) & mask for place in range(self.per_word)], -1)


class TopTokens(Codec):
    """The eighth of the tokens with the largest norms, in 4 bits; the others become 0.

    Gradients at the cut are small at most tokens: a classifier reads one. Each row of bytes begins with the number of
    its token.
    """

    for_smashed_data = False  # a server half would see samples of zeros, where layer norms have no gradient
    stackable = False  # each client draws signs of its own
    share = 8
    kept = Rotated(4)

    def parts(self, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Part, Part | None]:
        """Return what a tensor becomes: bytes of the tokens that are kept, and scales of their blocks."""
        *tokens, features = shape
        values, scales = self.kept.parts((-(-math.prod(tokens) // self.share), features), dtype)
        return Part((values.shape[0], _INDEX + values.shape[1]), torch.uint8), scales

    @torch.no_grad()
    def encode(self, values: Tensor, seed: int) -> tuple[Tensor, Tensor | None]:
        """Return numbers and levels of the tokens that are kept, and their steps."""
        tokens = values.flatten(0, -2)
        kept = tokens.float().norm(dim=-1).topk(-(-len(tokens) // self.share)).indices.sort().values
        levels, steps = self.kept.encode(tokens.index_select(0, kept), seed)
        numbers = [(kept >> (8 * i)) & 0xFF for i in range(_INDEX)]
        return torch.cat([torch.stack(numbers, 1).to(torch.uint8), levels], 1), steps

    @torch.no_grad()
    def decode(self, values: Tensor, scales: Tensor | None, shape: tuple[int, ...], seed: int) -> Tensor:
        """Return what levels and steps stand for, between zeros. Numbers that no encoder writes become NaN."""
        num_tokens, features = math.prod(shape[:-1]), shape[-1]
        kept = torch.stack([values[:, i].long() << (8 * i) for i in range(_INDEX)]).sum(0)
        ascends = torch.cat([kept[:1] >= 0, kept.diff() > 0]) & (kept < num_tokens)
        found = self.kept.decode(values[:, _INDEX:], scales, (len(values), features), seed)
        found = torch.where(ascends.unsqueeze(1), found, torch.nan)
        tokens = found.new_zeros(num_tokens, features)
        return tokens.index_copy_(0, kept.clamp(0, max(num_tokens - 1, 0)), found).view(shape)


def block_size(features: int) -> int:
    """Return how many features are rotated together."""
    return min(features & -features, _LARGEST_BLOCK) or 1


def _rotate(values: Tensor) -> Tensor:
    """Return the blocks of tokens (..., blocks, features) times a Hadamard matrix, which is its own inverse."""
    blocks = values.unflatten(-1, (-1, block_size(values.shape[-1])))
    return blocks @ _hadamard(blocks.shape[-1], values.device)


@cache
def _hadamard(size: int, device: torch.device) -> Tensor:
    """Return the orthogonal matrix of a power of two, by Sylvester's construction."""
    matrix = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return to_device(torch.from_numpy(matrix / math.sqrt(size)).float(), device)


@lru_cache(256)  # what one side draws for a batch, the other needs too
def _signs(features: int, seed: int, device: torch.device) -> Tensor:
    """Return random signs, the same on every device and machine."""
    words = np.random.SeedSequence(seed).generate_state(-(-features // 32), np.uint32).astype("<u4")
    ones = np.unpackbits(words.view(np.uint8))[:features]
    return to_device(torch.from_numpy(1.0 - 2.0 * ones).float(), device)


def power_above(largest: Tensor) -> Tensor:
    """Return the power of two above a number, at least 2**-100; 1 for 0, NaN and infinity.

    It is made of the bits of the exponent: MPS has neither `frexp` nor exact powers.
    """
    kind, exponent = (torch.int64, 0x7FF0 << 48) if largest.dtype == torch.float64 else (torch.int32, 0x7F80 << 16)
    power = 2 * (largest.view(kind) & exponent).view(largest.dtype)
    return torch.where(largest.isfinite() & (largest != 0), power.float().clamp(min=2.0**-100), 1.0)


CODECS: dict[str, Codec] = {
    "float32": Codec(),
    "bfloat16": BFloat16(),
    "float16": Float16(),
    "int8": Int8(),
    "int4": Rotated(4),
    "int3": Rotated(3),
    "int2": Rotated(2),
    "int4_stochastic": Rotated(4, stochastic=True),
    "int3_stochastic": Rotated(3, stochastic=True),
    "topk8": TopTokens(),
}


def for_all_kinds() -> list[str]:
    """Return the names of the codecs that every kind may have."""
    return [name for name, codec in CODECS.items() if codec.for_smashed_data]


def resolve_codecs(dtype: str = "float32", given: str | Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the name of the codec of each kind; what is not allowed is a ValueError.

    Args:
        dtype: `exchange_dtype`, for the kinds that `given` leaves open.
        given: `exchange_codec`: a name for all kinds, or names by kind, also as JSON.
    """
    _check("exchange_dtype", dtype, for_all_kinds())
    if given is None:
        return dict.fromkeys(KINDS, dtype)
    if isinstance(given, str) and given.startswith("{"):
        try:
            given = dict(json.loads(given))
        except json.JSONDecodeError as error:
            raise ValueError(f"exchange_codec={given!r} is not JSON: {error}. An example: {_EXAMPLE}.") from error
    if isinstance(given, str):
        _check("exchange_codec", given, (*for_all_kinds(), COMPACT))
        if dtype not in ("float32", given):
            raise ValueError(
                f"exchange_dtype={dtype!r} and exchange_codec={given!r} both speak of everything that crosses the cut. "
                "Give one of them."
            )
        return dict(_COMPACT_CODECS) if given == COMPACT else dict.fromkeys(KINDS, given)
    if not isinstance(given, Mapping):
        raise ValueError(
            f"exchange_codec={given!r} must be a name or a mapping of kinds to names. An example: {_EXAMPLE}."
        )
    for kind, name in given.items():
        if kind not in KINDS:
            near = did_you_mean(kind, KINDS)
            raise ValueError(f"exchange_codec has no kind {kind!r}.{near} Choose from: {', '.join(KINDS)}.")
        _check(f"exchange_codec of {kind}", name, for_all_kinds() if kind == "smashed_data" else CODECS)
    return dict.fromkeys(KINDS, dtype) | dict(given)


def _check(option: str, name: Any, allowed: Iterable[str]) -> None:
    if not isinstance(name, str) or name not in allowed:
        near = did_you_mean(name, allowed)
        raise ValueError(f"{option}={name!r} is not allowed.{near} Choose one of: {', '.join(allowed)}.")


def shown(codecs: Mapping[str, str]) -> str:
    """Return the codecs by kind as a text, or the one name if all kinds have the same."""
    names = set(codecs.values())
    return names.pop() if len(names) == 1 else ", ".join(f"{kind} {name}" for kind, name in codecs.items())
