"""Counting what a round does: floating-point operations of each side, and what the client has to hold."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from ..methods import Method
from ..methods.parts.math_attention import differentiable_attention
from ..protocol.client_side import ClientSide
from ..protocol.link import LocalLink
from ..protocol.messages import Message, SmashedData
from ..protocol.server_side import ServerSide
from ..split.stand_ins import _injection
from .weightless import CPU, DEVICE_OF, Watching

_aten = torch.ops.aten
# The products that need not be computed to be counted, with the shape of their result.
PRODUCTS: dict[Any, Callable[..., tuple[int, ...]]] = {
    _aten.mm.default: lambda a, b: (a.shape[0], b.shape[1]),
    _aten.addmm.default: lambda c, a, b: (a.shape[0], b.shape[1]),
    _aten.bmm.default: lambda a, b: (a.shape[0], a.shape[1], b.shape[2]),
}


def _grouped_mm_flop(a: Tensor, b: Tensor, *args: Any, out_val: Any = None, **kwargs: Any) -> int:
    """Operations of the experts' products, which torch's registry lacks: each row of a meets one matrix."""
    return 2 * a.numel() * b.shape[-1] if a.ndim == 2 else 2 * a.shape[0] * a.shape[1] * a.shape[2] * b.shape[-1]


_FORMULAS = {**flop_registry, _aten._grouped_mm: _grouped_mm_flop}
# The products of bitsandbytes, which PyTorch sees as one operation each.
_QUANTISED_FORMULAS: dict[str, Callable[..., int]] = {
    "gemm_4bit": lambda a, b, shape, *args, **kwargs: 2 * a.numel() * shape[0],
    "int8_scaled_mm": lambda a, b, *args, **kwargs: 2 * a.numel() * b.shape[0],
    "int8_mixed_scaled_mm": lambda a, quantised, b, *args, **kwargs: 2 * a.numel() * b.shape[0],
}


def _formula(func: Any) -> Callable[..., Any] | None:
    if func.namespace == "bitsandbytes":
        return _QUANTISED_FORMULAS.get(func._opname)
    return _FORMULAS.get(func._overloadpacket)


class OperationCounter(Watching):
    """Counts the operations that run inside it, two for each multiply-add, by the side they run on.

    The formulas are those of `torch.utils.flop_counter`; its own counter cannot be used, because
    it follows modules through `backward` and fails on the `autograd.grad` that methods take
    gradients with. Element-wise operations count nothing, as in torch. Attention is counted if it
    consists of matrix products: with `attn_implementation="eager"`, or the math kernel.

    Args:
        compute: compute the matrix products too. Otherwise their results are made up, which saves most
            of the time: a cost depends on shapes, not on values.
    """

    def __init__(self, compute: bool = False):
        super().__init__()
        self.compute = compute
        self.side = "server"
        self.flops = {"client": 0, "server": 0}
        # A server half runs the model's embeddings on placeholders before it takes the smashed data in.
        self.placeholder_flops = {"client": 0, "server": 0}
        self.client_weights: dict[int, nn.Parameter] = {}  # by their storage
        self._made_up = torch.empty(0)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[Any], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation and count it."""
        if func is DEVICE_OF:
            return CPU
        kwargs = kwargs or {}
        if any(isinstance(value, Tensor) and is_meta(value) for value in args):
            return func(*args, **kwargs)  # only shapes: nothing is computed
        if self.side == "client":
            self._note_weights(args)
        formula = _formula(func)
        if formula is None:
            if torch.is_inference_mode_enabled():  # composite operations arrive undivided there
                with self:
                    parts = func.decompose(*args, **kwargs)
                if parts is not NotImplemented:
                    return parts
            return func(*args, **kwargs)
        if func in PRODUCTS and not self.compute and not any(isinstance(t, FakeTensor) for t in args):
            result = self._make_up(PRODUCTS[func](*args), args[0])
        else:
            result = func(*args, **kwargs)
        injection = _injection.get()
        counts = self.flops if injection is None or injection.reached else self.placeholder_flops
        counts[self.side] += int(formula(*args, **kwargs, out_val=result))
        return result

    @contextmanager
    def on_client(self) -> Iterator[None]:
        """Count what runs inside as the client's."""
        self.side = "client"
        try:
            yield
        finally:
            self.side = "server"

    def _make_up(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        size = prod(shape)
        if len(self._made_up) < size:  # random: equal entries would make matrices singular
            self._made_up = 0.1 * torch.randn(size, generator=torch.Generator().manual_seed(size))
        return self._made_up[:size].to(like.device, like.dtype, copy=True).view(shape)

    def _note_weights(self, args: tuple[Any, ...]) -> None:
        for value in args:
            for leaf in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(leaf, nn.Parameter):
                    self.client_weights[leaf.untyped_storage()._cdata] = leaf


class SavedActivations:
    """Follows the bytes that autograd keeps for the backward passes of the client, and their peak.

    Weights do not count: they are there anyway. A storage that is kept several times counts once.
    """

    def __init__(self, is_weight: Callable[[Tensor], bool]):
        self.is_weight = is_weight
        self.live, self.peak = 0, 0
        self._uses: dict[int, int] = {}

    def recording(self) -> saved_tensors_hooks:
        """Follow what is kept inside this context, for as long as it is kept."""
        return saved_tensors_hooks(self._pack, lambda kept: kept.tensor)

    def _pack(self, tensor: Tensor) -> _Kept:
        kept = _Kept(tensor.detach())
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if not self.is_weight(tensor):
            self._uses[key] = self._uses.get(key, 0) + 1
            if self._uses[key] == 1:
                self.live += size
                self.peak = max(self.peak, self.live)
            weakref.finalize(kept, self._release, key, size).atexit = False
        return kept

    def _release(self, key: int, size: int) -> None:
        self._uses[key] -= 1
        if not self._uses[key]:
            del self._uses[key]
            self.live -= size


class _Kept:
    """A tensor that autograd keeps; autograd drops this object together with its graph."""

    def __init__(self, tensor: Tensor):
        self.tensor = tensor


class CountedLink(LocalLink):
    """A local link that tells a counter which operations are the client's, and follows the client's memory."""

    def __init__(self, method: Method, client: ClientSide, counter: OperationCounter):
        super().__init__(method, client)
        self.counter = counter
        self.round_messages = 0  # bytes that came down for the whole round and stay until its end
        self.batch_messages = 0  # bytes of the largest message for single batches
        self.last_flops = 0  # of the client's updates for the whole round, which no server waits for,
        self._server_flops: int | None = None  # and of the server until they began
        own = {t.untyped_storage()._cdata for t in (*client.half.parameters(), *client.half.buffers())}

        def is_weight(tensor: Tensor) -> bool:
            storage = tensor.untyped_storage()._cdata
            return storage in own or storage in counter.client_weights

        self.saved = SavedActivations(is_weight)

    def upload(self, batches: Sequence[int] | None = None) -> Sequence[SmashedData]:
        """Count the client's upload."""
        with self.counter.on_client(), self.saved.recording():
            return super().upload(batches)

    def update(self, messages: Sequence[Message] | None = None, batches: Sequence[int] | None = None) -> None:
        """Count the client's update, and note how much it is given at once."""
        before, flops = sum(self.meter.down.values()), dict(self.counter.flops)
        with self.counter.on_client(), self.saved.recording():
            super().update(messages, batches)
        size = sum(self.meter.down.values()) - before
        if batches is None:
            self.round_messages += size
            self.last_flops, self._server_flops = self.counter.flops["client"] - flops["client"], flops["server"]
        else:
            self.batch_messages = max(self.batch_messages, size)

    @property
    def server_flops_before_last(self) -> int:
        """Operations of the server until the client's updates for the whole round began; all, if there were none."""
        return self.counter.flops["server"] if self._server_flops is None else self._server_flops

    def foreign_weights(self) -> int:
        """Bytes of the weights that the client worked with and that are not its half's: auxiliary networks."""
        own = {id(p) for p in self.client.half.parameters()}
        return sum(nbytes(p) for p in self.counter.client_weights.values() if id(p) not in own)

    def optimizer_bytes(self) -> int:
        """Bytes of the gradients and of the optimizer's state on the client."""
        optimizer = self.client.optimizer
        state = [t for t in tree_leaves(list(optimizer.state.values())) if isinstance(t, Tensor)]
        return sum(map(nbytes, (*optimizer.state, *state)))  # a gradient is as large as its weight


class RoundFlops:
    """Repeats one client's round under a counter, every round if enabled, and keeps what the last one took."""

    def __init__(self, enabled: bool):
        self.enabled = enabled
        self.gflops: dict[str, float] = {}  # of each side, per sample

    def due(self, round_index: int) -> bool:
        """Return whether this round is counted."""
        return self.enabled

    def examine(self, method: Method, client: ClientSide, server: ServerSide, num_samples: int) -> dict[str, float]:
        """Return the GFLOPs of each side, per sample."""
        method = copy.deepcopy(method)  # the run's own keeps its state
        counter = OperationCounter()
        with differentiable_attention(), counter:  # a fused attention would not be seen
            method.round(CountedLink(method, client, counter), server)
        return {f"{side}_gflops": flops / 1e9 / num_samples for side, flops in counter.flops.items()}

    def take(self, result: dict[str, float]) -> None:
        """Keep the counts of a round."""
        self.gflops = result

    def summary(self, num_samples: int) -> dict[str, float]:
        """Return the counts per sample, and for all samples of a round."""
        return self.gflops | {f"{name}_per_round": value * num_samples for name, value in self.gflops.items()}


def is_meta(t: Tensor) -> bool:
    """Return whether a tensor is on the meta device; a fake one is not."""
    return not isinstance(t, FakeTensor) and t.is_meta


def nbytes(t: Tensor) -> int:
    """Bytes of a tensor."""
    return t.numel() * t.element_size()
