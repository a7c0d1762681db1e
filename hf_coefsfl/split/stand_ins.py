"""What stands in for the other half's modules, and how a server's forward pass gets the smashed data.

Each class here is put on top of the class of one module object (see surgery.py), so that the
attributes that a model's own loop reads from its blocks survive. Nothing of a batch but shapes is stored on
the modules between calls: what a forward pass injects travels in a context variable.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from transformers.modeling_layers import GradientCheckpointingLayer

from ..protocol.devices import is_accelerator
from .block_arguments import graft, named_arguments, replace_arguments

_REMEMBERED = 64  # shapes of calls; texts come in many lengths
_HIDDEN = "hidden"  # marks the hidden state in the template of a block's output


class CutReached(Exception):
    """Stops a forward pass at the cut and carries what the block there was called with."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        super().__init__("the forward pass reached the cut")
        self.arguments = arguments


class RandomState:
    """The state of the random number generators that a forward pass on `device` draws from."""

    def __init__(self, device: torch.device) -> None:
        self._cpu = torch.get_rng_state()
        self._numpy = np.random.get_state()  # SpecAugment of the audio models
        self._device = device if is_accelerator(device) else None
        if self._device is not None:
            self._accelerator = torch.get_device_module(self._device).get_rng_state(self._device)

    def restore(self) -> None:
        """Put the generators back to where they were."""
        torch.set_rng_state(self._cpu)
        np.random.set_state(self._numpy)
        if self._device is not None:
            torch.get_device_module(self._device).set_rng_state(self._accelerator, self._device)


@dataclass
class Injection:
    """What enters a server's forward pass at the cut, and whether it got there."""

    activations: Tensor
    arguments: dict[str, Any] = field(default_factory=dict)
    random_state: RandomState | None = None
    reached: bool = False

    def hand_over(self, last: nn.Module) -> Tensor:
        """Return the smashed data in place of what the module before the block at the cut would return.

        The block at the cut puts the generators back. If its call is checkpointed from outside, the state that the
        recomputation begins with has been noted by then: they are put back here, too, unless blocks checkpoint
        themselves.
        """
        if self.random_state is not None and not isinstance(last, GradientCheckpointingLayer):
            self.random_state.restore()
        return self.activations


_injection: ContextVar[Injection | None] = ContextVar("injection", default=None)


@contextmanager
def injecting(injection: Injection) -> Iterator[Injection]:
    """Make `injection` what the block at the cut receives in the forward passes run inside."""
    token = _injection.set(injection)
    try:
        yield injection
    finally:
        _injection.reset(token)


class Stop(nn.Module):
    """The block at the cut of a client."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Stop the forward pass."""
        raise CutReached(named_arguments(self, args, kwargs))

    forward = __call__  # SqueezeBERT calls its blocks so


class Inject(nn.Module):
    """The block at the cut of a server.

    Its hidden state is swapped before the block's own call: a hook would run inside the
    recomputation of gradient checkpointing, after the arguments were recorded.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block on the smashed data."""
        args, kwargs = self._injected(args, kwargs)
        return super().__call__(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Do the same if the model calls `forward` directly, as SqueezeBERT does."""
        if not torch.compiler.is_compiling():  # a compiled block got them in `__call__`
            args, kwargs = self._injected(args, kwargs)
        return super().forward(*args, **kwargs)

    def _injected(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        injection = _injection.get()
        if injection is not None and not injection.reached:
            named = named_arguments(self, args, kwargs)
            hidden = next(iter(named))
            tops = {path.split(".", 1)[0] for path in injection.arguments}
            new = {top: graft(named.get(top), top, injection.arguments) for top in tops}
            args, kwargs = replace_arguments(self, args, kwargs, new | {hidden: injection.activations})
            injection.reached = True
            if injection.random_state is not None:
                injection.random_state.restore()
        return args, kwargs


class Absent(nn.Module):
    """A module of the server in a client."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Say that blocks were skipped."""
        raise RuntimeError(
            f"The client's forward pass never reached the cut but {type(self).__name__}, which is the server's. "
            "Something skips blocks (layer drop, early exit): switch it off."
        )


class PassThrough(nn.Module):
    """A block of the client in a server: returns its input in the structure of its output.

    The last one before the cut already hands over the smashed data. The block at the cut would
    swap it in anyway, but timm checkpoints around its blocks' calls: recomputing such a call finds
    no injection, only the input that was recorded.
    """

    template: Any
    before_cut: bool

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Hand the hidden state on."""
        hidden = next(iter(named_arguments(self, args, kwargs).values()))
        injection = _injection.get()
        if self.before_cut and injection is not None:
            hidden = injection.hand_over(self)
        return _fill(self.template, hidden)

    forward = __call__


def output_template(output: Any) -> Any:
    """The structure of a block's output as JSON: its first tensor is the hidden state, others are left out."""
    if isinstance(output, Tensor):
        return _HIDDEN
    if isinstance(output, (tuple, list)) and output:
        return [output_template(output[0])] + [_without_tensors(item) for item in output[1:]]
    if type(output) is dict and output:
        (first, hidden), *others = output.items()
        return {first: output_template(hidden)} | {name: _without_tensors(item) for name, item in others}
    raise ValueError(
        f"a block returned {type(output).__name__}; expected a tensor, or a tuple or dict that starts with one"
    )


def _without_tensors(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return [_without_tensors(item) for item in value]
    return value if isinstance(value, (bool, int, float, str)) else None


def _fill(template: Any, hidden: Tensor) -> Any:
    if isinstance(template, (tuple, list)):
        return tuple(_fill(item, hidden) for item in template)
    if isinstance(template, dict):
        return {name: _fill(item, hidden) for name, item in template.items()}
    return hidden if template == _HIDDEN else template


class Hollow(nn.Module):
    """A module of the client in a server: returns zeros of the shape that it would return.

    The shape comes from a twin on the meta device, which takes neither memory nor time. A forward
    that needs values there, or returns other things than floats, falls back to its own computation,
    with the modules inside it hollow and weights of zero.

    One that returns the hidden state at the cut (`before_cut`) hands over the smashed data. It is a
    copy, because the model may go on with it in place (XLM masks it).
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return zeros, or the smashed data."""
        injection = _injection.get()
        if vars(self)["before_cut"] and injection is not None:
            return injection.hand_over(self).clone()
        device = injection.activations.device if injection is not None else torch.device("cpu")

        def to_zeros(value: Any) -> Any:
            return torch.zeros(value.shape, dtype=value.dtype, device=device) if isinstance(value, Tensor) else value

        output = self._shapes(args, kwargs)
        return super().__call__(*args, **kwargs) if output is None else tree_map(to_zeros, output)

    def _shapes(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the output on the meta device, remembered by the arguments' shapes; None if it is not known."""
        outputs, key = vars(self)["outputs"], _call_key(args, kwargs)
        if key is None:
            return self._run_twin(args, kwargs)
        if key not in outputs:
            if len(outputs) >= _REMEMBERED:
                outputs.clear()
            outputs[key] = self._run_twin(args, kwargs)
        return outputs[key]

    def _run_twin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        twin = vars(self)["twin"]
        dtype = next((p.dtype for p in twin.parameters() if p.is_floating_point()), None)

        def to_meta(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            # Autocast does not reach the meta device: the inputs take the dtype of the weights.
            return torch.empty_like(value, device="meta", dtype=dtype if value.is_floating_point() else None)

        try:
            with torch.no_grad():
                output = twin(*tree_map(to_meta, args), **tree_map(to_meta, kwargs))
        except Exception:  # whatever it is, the module's own computation meets it too if it is real
            return None
        if any(isinstance(t, Tensor) and not t.is_floating_point() for t in tree_leaves(output)):
            return None
        return output


def _call_key(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
    """Return what the shapes of an output depend on; None if an argument is not a tensor, number, text or None."""
    key: list[Any] = [len(args), *kwargs]
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            key.append((value.shape, value.dtype))
        elif value is None or isinstance(value, (bool, int, float, str)):
            key.append((type(value), value))
        else:
            return None
    return tuple(key)
