"""Clients of a round that train at once: their samples lie below each other in one batch, client after client.

The frozen layers run once over all of them. A trained linear layer has a weight for each client, (clients, out, in),
and is a batched product. The loss is the sum of the clients' own, so that each weight gets its client's gradient.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from ..config import SplitFedConfig
from ..protocol.devices import is_accelerator, is_device_error
from ..protocol.loss import IGNORED, ONE_LABEL_A_SAMPLE, LossSpec
from ..protocol.messages import SmashedData
from ..protocol.modes import evaluating, training
from ..protocol.seeds import preserved_random_state
from ..split import SplitModel
from ..split.placeholders import example_inputs, unwrapped
from .batches import Batches
from .ledger import ClientReport

Weights = dict[str, nn.Parameter]
_IDS = "input_ids"
_OVER_TOKENS = (_IDS, "attention_mask", "token_type_ids")
# Of the largest output, on the example. What mixes clients is off by as much as an output is large.
_TOLERANCE = {torch.float64: 1e-3, torch.float32: 1e-2}  # float32 may be TF32


class Stacking:
    """What trains several clients of a model at once.

    Raises a ValueError if they would not do what they do one after the other.

    Args:
        split: the model.
        weights: what is trained, by name.
        loss_spec: the loss.
        args: the configuration.
        ignores_trailing: whether the server half ignores padding after the tokens.
    """

    def __init__(
        self, split: SplitModel, weights: Weights, loss_spec: LossSpec, args: SplitFedConfig, ignores_trailing: bool
    ):
        self.split, self.weights, self.args, self.loss_spec = split, weights, args, loss_spec
        self._asked = f"stacked_clients={args.stacked_clients} does not work"
        if not loss_spec.is_mean_over_samples:
            raise self._refusal(
                f"for a {loss_spec.loss_type} loss, in which samples do not weigh the same. It works for "
                f"{', '.join(ONE_LABEL_A_SAMPLE)}"
            )
        self.layers = self._find_layers()
        self.shared: frozenset[str] = frozenset()  # tensors of smashed data that are no larger for more samples
        config = unwrapped(split.model).config.get_text_config()
        may_pad = ignores_trailing and not split.client.cut.shipped
        # With which texts are padded, so that those of several clients are as long; None: they are not.
        self.pad_id: int | None = getattr(config, "pad_token_id", None) if may_pad else None
        self._try_example()

    def _refusal(self, why: str) -> ValueError:
        return ValueError(f"{self._asked} {why}. Or leave stacked_clients at 1.")

    def _find_layers(self) -> list[nn.Linear]:
        """Return the layers that hold the trained weights."""
        names = {id(p): name for name, p in self.weights.items()}
        layers: list[nn.Linear] = []
        for half in (self.split.client, self.split.server):
            for module in half.modules():
                held = [names[id(p)] for p in module.parameters(recurse=False) if id(p) in names]
                if not held:
                    continue
                if not isinstance(module, nn.Linear) or type(module).forward is not nn.Linear.forward:
                    raise self._refusal(
                        f"with {held[0]}, which is trained and belongs to a {type(module).__name__}: only linear "
                        "layers are stacked. Train a LoRA adapter and a head of linear layers"
                    )
                layers.append(module)
        return layers

    @contextmanager
    def applied(self, stacks: Mapping[str, Tensor]) -> Iterator[None]:
        """Have the layers apply each client's weights, (clients, *shape) by name, to its part of the batch."""
        by_id = {id(p): stacks[name] for name, p in self.weights.items()}
        clients = len(next(iter(stacks.values())))
        try:
            for layer in self.layers:
                weight = by_id.get(id(layer.weight), layer.weight.expand(clients, -1, -1))
                bias = None if layer.bias is None else by_id.get(id(layer.bias), layer.bias.expand(clients, -1))
                layer.forward = _linear(weight, bias)  # type: ignore[assignment, method-assign]
            yield
        finally:
            for layer in self.layers:
                layer.__dict__.pop("forward", None)

    def stacks(self, clients: int) -> Weights:
        """Return a copy of the present weights for each client."""
        stacks = {name: nn.Parameter(p.new_empty(clients, *p.shape)) for name, p in self.weights.items()}
        with torch.no_grad():
            for client in range(clients):
                torch._foreach_copy_([stack[client] for stack in stacks.values()], list(self.weights.values()))
        return stacks

    @torch.no_grad()
    def give_back(self, stacks: Mapping[str, Tensor], client: int) -> None:
        """Give the model the weights of a client."""
        torch._foreach_copy_(list(self.weights.values()), [stacks[name][client] for name in self.weights])

    # ---- The example ----

    def _try_example(self) -> None:
        """Refuse a model that draws random numbers, or whose clients are not apart when they are stacked."""
        device, (client, server) = self.args.device, (self.split.client, self.split.server)
        mode = training if self.args.dropout == "synced" else evaluating
        generator = torch.Generator().manual_seed(0)
        stacks = {  # weights that differ, as all clients begin with the same
            name: nn.Parameter(p.detach() + (0.1 * torch.randn(2, *p.shape, generator=generator)).to(p.device, p.dtype))
            for name, p in self.weights.items()
        }
        example = example_inputs(self.split.model)
        both = {name: torch.cat([t, t.flip(0)]) for name, t in example.items()}
        with torch.enable_grad(), mode(client, server), preserved_random_state(device):
            before = _random_state(device)
            try:
                with self.applied(stacks):
                    smashed, outputs = self._pass(both)
                    used = torch.autograd.grad(outputs.float().sum(), list(self.weights.values()), allow_unused=True)
            except Exception as error:
                if is_device_error(error):
                    raise
                raise self._refusal(
                    f"with this model: on an example it raises {type(error).__name__}: {error}"
                ) from error
            if _random_state(device) != before:
                advice = "Set dropout='off', or the model's dropout probabilities (and those of other noise) to 0"
                if self.args.dropout == "off":
                    advice = "This model draws some without dropout, too: set those of its probabilities to 0"
                raise self._refusal(f"with random numbers: each client would draw other ones than alone. {advice}")
            for name, gradient in zip(self.weights, used, strict=True):
                if gradient is not None:
                    raise self._refusal(f"with {name}, which the model uses otherwise than by calling its layer")
            alone = []
            for i, batch in enumerate((example, {name: t.flip(0) for name, t in example.items()})):
                with self.applied({name: t[i : i + 1] for name, t in stacks.items()}):
                    alone.append(self._pass(batch))
            gap = _gap(outputs, torch.cat([output for _, output in alone]))
            if gap is not None:
                raise self._refusal(
                    f"with this model: on an example its outputs differ by {gap:.1e} of the largest from those of "
                    "clients one after the other, so that its samples are not independent"
                )
            if self.pad_id is not None:
                with self.applied(stacks):
                    self.pad_id = self.pad_id if self._ignores_more(both, outputs) else None
        one = alone[0][0].tensors()
        self.shared = frozenset(name for name, t in smashed.tensors().items() if t.shape == one[name].shape)

    def _ignores_more(self, example: dict[str, Tensor], expected: Tensor) -> bool:
        """Return whether texts may be padded further. A convolution before the cut sees where a text ends."""
        if not _can_be_padded(example, self.loss_spec):
            return False
        try:
            _, outputs = self._pass(self._padded(example, example[_IDS].shape[1] + 1))
        except Exception as error:
            if is_device_error(error):
                raise
            return False
        return _gap(outputs, expected) is None

    def _padded(self, batch: dict[str, Tensor], length: int) -> dict[str, Tensor]:
        """Return texts of a length."""
        values = {_IDS: self.pad_id}
        return {
            name: pad(t, (0, length - t.shape[1]), value=values.get(name, 0)) if name in _OVER_TOKENS else t
            for name, t in batch.items()
        }

    # ---- Batches ----

    def alike(self, made: Mapping[int, Sequence[Any]]) -> list[dict[int, Batches]]:
        """Return the batches of clients in groups that can be stacked."""
        groups: dict[Any, dict[int, Batches]] = {}
        for client, batches in made.items():
            groups.setdefault(self._outline(batches) or client, {})[client] = list(batches)
        return list(groups.values())

    def _outline(self, batches: Sequence[Any]) -> Any:
        """Return what the batches of clients must have in common to be stacked; None if these cannot be."""
        shapes = []
        for batch in batches:
            tensors = list(batch.values()) if isinstance(batch, Mapping) else []
            if not tensors or not all(isinstance(t, Tensor) and t.dim() for t in tensors):
                return None
            labels = self.loss_spec.separate(dict(batch))[1].values()
            if len({len(t) for t in tensors}) > 1 or any(bool((t == IGNORED).any()) for t in labels):
                return None
            pads = self.pad_id is not None and _can_be_padded(batch, self.loss_spec)
            outlines = {n: (t.shape[:1] if pads and n in _OVER_TOKENS else t.shape, t.dtype) for n, t in batch.items()}
            shapes.append(tuple(sorted(outlines.items(), key=itemgetter(0))))
        return tuple(shapes)

    def stacked(self, clients: Sequence[Batches]) -> Batches:
        """Return the first batches of all clients below each other, then the second ones, and so on."""
        together = []
        for same in zip(*clients, strict=True):
            if self.pad_id is not None and _can_be_padded(same[0], self.loss_spec):
                length = max(batch[_IDS].shape[1] for batch in same)
                same = tuple(self._padded(batch, length) for batch in same)
            together.append({name: torch.cat([batch[name] for batch in same]) for name in same[0]})
        return together

    def _pass(self, batch: dict[str, Tensor]) -> tuple[SmashedData, Tensor]:
        """Return smashed data and logits of an example."""
        smashed: SmashedData = self.split.client(**batch)
        return smashed, self.split.server(smashed).logits


def _gap(outputs: Tensor, expected: Tensor) -> float | None:
    """Return how far outputs are from others, relative to the largest; None: as far as rounding goes."""
    gap = float((outputs - expected).detach().float().abs().max() / expected.detach().float().abs().max())
    tolerance = _TOLERANCE.get(outputs.dtype, 5e-2)
    return None if gap < tolerance else gap


def _linear(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    """Return the forward of a linear layer with weights (clients, out, in) and biases (clients, out)."""

    def forward(input: Tensor) -> Tensor:
        if len(input) % len(weight):  # such as a table of positions, which all samples share
            raise ValueError(f"a trained layer takes a tensor of shape {tuple(input.shape)}, which has no samples")
        parts = input.reshape(len(weight), -1, input.shape[-1])
        output = torch.bmm(parts, weight.mT) if bias is None else torch.baddbmm(bias.unsqueeze(1), parts, weight.mT)
        return output.view(*input.shape[:-1], -1)

    return forward


def _random_state(device: torch.device) -> list[Any]:
    """Return the states of all generators that a forward pass may use."""
    there = torch.get_device_module(device).get_rng_state(device).tolist() if is_accelerator(device) else []
    numpy: Any = np.random.get_state()
    return [torch.get_rng_state().tolist(), numpy[1].tolist(), numpy[2], random.getstate(), there]


@dataclass(frozen=True)
class Stacked:
    """What clients that were stacked have come to: weights (clients, *shape) by name, the rest in the same order."""

    weights: Weights
    reports: dict[int, ClientReport]
    kept: Sequence[Sequence[Tensor]]  # of the server's optimizer of each client


def groups_of(clients: Sequence[int], sizes: Sequence[int], most: int) -> list[list[int]]:
    """Return the clients in groups of at most `most` that have as many samples; one by one in their order."""
    by_size: dict[int, list[int]] = {}
    for client in clients:
        by_size.setdefault(sizes[client] if most > 1 else 0, []).append(client)
    return [alike[i : i + most] for alike in by_size.values() for i in range(0, len(alike), most)]


def _can_be_padded(batch: Mapping[str, Any], loss_spec: LossSpec) -> bool:
    """Return whether all inputs of a batch are of texts, and it says where their tokens are."""
    inputs = loss_spec.separate(dict(batch))[0]
    return {_IDS, "attention_mask"} <= inputs.keys() <= set(_OVER_TOKENS) and all(t.dim() == 2 for t in inputs.values())
