"""Whether the halves of a model compute what the model computes: outputs and gradients, on an example."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..protocol.devices import is_device_error, widest_float
from ..protocol.modes import evaluating, training
from .block_arguments import leaves
from .placeholders import no_cache
from .stand_ins import RandomState
from .tracing import all_differentiable, plain_output, same

if TYPE_CHECKING:
    from .splitting import SplitModel

Sketches = dict[str, list[Tensor]]
Pass = tuple[dict[str, Any], Sketches]  # outputs and gradients of a forward and backward pass


@dataclass(frozen=True)
class Gap:
    """How far the halves are from the unsplit model.

    `outputs` is relative to the largest value of an output, `gradients` to the norm of a parameter's
    gradient or a hundredth of the largest such norm; `parameter` is the one that differs most.
    """

    outputs: float
    gradients: float
    parameter: str

    def describe(self, tolerance: float) -> str | None:
        """Return what differs by more than `tolerance`, if anything does."""
        if self.outputs > tolerance:
            return f"their outputs differ by {self.outputs:.1e} of the largest"
        if self.gradients > tolerance:
            return f"their gradients differ by {self.gradients:.1e}, most for {self.parameter!r}"
        return None


def evaluation_gap(split: SplitModel, inputs: dict[str, Any]) -> Gap:
    """Compare the halves with the unsplit model in evaluation mode."""
    with evaluating(split.model, split.client, split.server):
        random_state = RandomState(next(split.model.parameters()).device)
        expected = _run_unsplit(split, inputs)
        random_state.restore()
        return _gap(expected, _run_halves(split, inputs))


def training_gap(split: SplitModel, inputs: dict[str, Any]) -> Gap | None:
    """Compare them in training mode, from the same random numbers; None if the unsplit model cannot run so.

    An example can be too small to train on: SpecAugment of the audio models needs a minimum length.
    """
    with training(split.model, split.client, split.server):
        random_state = RandomState(next(split.model.parameters()).device)
        try:
            expected = _run_unsplit(split, inputs)
        except Exception as error:
            if is_device_error(error):
                raise
            return None
        random_state.restore()
        return _gap(expected, _run_halves(split, inputs))


def _run_unsplit(split: SplitModel, inputs: dict[str, Any]) -> Pass:
    return _outputs_and_gradients(split.model, lambda: split.model(**(inputs | no_cache(split.model))))


def _run_halves(split: SplitModel, inputs: dict[str, Any]) -> Pass:
    return _outputs_and_gradients(split.model, lambda: split.server(split.client(**inputs)))


def _gap(expected: Pass, got: Pass) -> Gap:
    return Gap(_output_gap(expected[0], got[0]), *_gradient_gap(expected[1], got[1]))


def _outputs_and_gradients(model: nn.Module, run: Callable[[], Any]) -> Pass:
    """Return the outputs of a forward pass and, as sketches, the gradients of a weighted sum of them."""
    with torch.enable_grad(), all_differentiable(model), _sketched_gradients(model) as sketches:
        output = dict(leaves(plain_output(run()), ""))
        tensors = [t for t in output.values() if isinstance(t, Tensor) and t.requires_grad]
        torch.autograd.backward(tensors, [_random(t.numel(), t).view(t.shape) for t in tensors])
    return {path: t.detach() if isinstance(t, Tensor) else t for path, t in output.items()}, sketches


@contextmanager
def _sketched_gradients(model: nn.Module) -> Iterator[Sketches]:
    """Keep a sketch of each gradient, not the gradient: all of them would take as much memory as the model."""
    sketches: Sketches = {}
    parameters = dict(model.named_parameters())
    before = {name: p.grad for name, p in parameters.items()}

    def keep(name: str, p: Tensor) -> None:
        assert p.grad is not None
        sketch, earlier = _sketch(p.grad), sketches.get(name)
        sketches[name] = sketch if earlier is None else [a + b for a, b in zip(sketch, earlier, strict=True)]
        p.grad = None

    handles = []
    for name, p in parameters.items():
        p.grad = None
        if p.requires_grad:
            handles.append(p.register_post_accumulate_grad_hook(partial(keep, name)))
    try:
        yield sketches
    finally:
        for handle in handles:
            handle.remove()
        for name, p in parameters.items():
            p.grad = before[name]


def _sketch(gradient: Tensor) -> list[Tensor]:
    """A vector itself; a matrix as its products with a random vector from either side.

    Sketches are linear, so those of the parts of a gradient (reentrant checkpointing) can be added.
    """
    gradient = gradient.detach().to_dense()
    if gradient.dim() < 2:
        return [gradient.to(widest_float(gradient.device)).nan_to_num(0, 0, 0)]
    matrix = gradient.flatten(1)
    matrix = matrix if matrix.dtype == torch.float64 else matrix.float()
    rows, columns = matrix.shape
    products = matrix @ _random(columns, matrix), _random(rows, matrix) @ matrix
    return [product.to(widest_float(gradient.device)).nan_to_num(0, 0, 0) for product in products]


def _random(count: int, like: Tensor) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(count)).to(like.device, like.dtype)


def _gradient_gap(expected: Sketches, got: Sketches) -> tuple[float, str]:
    """Return the largest difference of two gradients and the name of its parameter."""

    def norm(sketch: list[Tensor]) -> float:
        return sum(float(part.square().sum()) for part in sketch) ** 0.5

    norms = {name: norm(sketch) for name, sketch in expected.items()}
    largest, worst = max(norms.values(), default=0.0), (0.0, "")
    for name in got.keys() | expected.keys():
        if name in got and name in expected:
            apart = norm([a - b for a, b in zip(got[name], expected[name], strict=True)])
        else:
            apart = norm(got.get(name, expected.get(name, [])))
        worst = max(worst, (apart / max(norms.get(name, 0.0), largest / 100, 1e-12), name))
    return worst


def _output_gap(a: dict[str, Any], b: dict[str, Any]) -> float:
    """Largest difference between the tensors of two outputs relative to their size; infinite if they do not match."""
    if a.keys() != b.keys():
        return float("inf")
    worst = 0.0
    for path, x in a.items():
        y = b[path]
        if not isinstance(x, Tensor) or x.shape != y.shape:
            if not isinstance(x, Tensor) and x == y:
                continue
            return float("inf")
        if x.numel() and not same(x, y):
            x, y = x.to(widest_float(x.device)), y.to(widest_float(x.device))
            gap = float((x - y).abs().nan_to_num(nan=float("inf")).max() / x.abs().nan_to_num().max().clamp(min=1e-12))
            worst = max(worst, gap)
    return worst
