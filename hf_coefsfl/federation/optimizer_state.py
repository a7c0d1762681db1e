"""The state of the server's optimizer between rounds: averaged like its weights, if `keep_server_optimizer` says so."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

PREFIX = "server_optimizer."  # of its tensors in a checkpoint


class OptimizerState:
    """What an optimizer remembers of each parameter, as one list of tensors. It begins as that of a fresh optimizer.

    Args:
        make: returns an optimizer of some parameters.
        parameters: those that the server trains.
    """

    def __init__(
        self, make: Callable[[dict[str, nn.Parameter]], torch.optim.Optimizer], parameters: Mapping[str, nn.Parameter]
    ):
        self.parameters = list(parameters.values())
        copies = {name: nn.Parameter(p.detach().clone()) for name, p in parameters.items()}
        optimizer = make(copies)
        for copy in copies.values():
            copy.grad = torch.zeros_like(copy)
        optimizer.step()
        self.named: dict[str, Tensor] = {}  # "name of the parameter.name of the state"
        for name, copy in copies.items():
            for key, value in optimizer.state[copy].items():
                if not isinstance(value, Tensor) or not value.is_floating_point():
                    raise ValueError(
                        f"keep_server_optimizer cannot average the state of {type(optimizer).__name__}, in which {key} "
                        f"is a {type(value).__name__}. Use optim='adamw_torch'."
                    )
                self.named[f"{name}.{key}"] = torch.zeros_like(value)
        self._keys = [list(optimizer.state[copy]) for copy in copies.values()]

    @property
    def tensors(self) -> list[Tensor]:
        """The state, in the order of the parameters."""
        return list(self.named.values())

    def load_into(self, optimizer: torch.optim.Optimizer, stacks: Sequence[Tensor] | None = None) -> None:
        """Have an optimizer of the same parameters begin with a copy of this state.

        If it trains several clients at once, `stacks` are its parameters, (clients, *shape): each client has a copy.
        """
        values = iter(self.tensors)
        for parameter, stack, keys in zip(self.parameters, stacks or self.parameters, self._keys, strict=True):
            state = {key: next(values) for key in keys}
            optimizer.state[stack] = {
                key: value.expand_as(stack).clone() if value.shape == parameter.shape else value.clone()
                for key, value in state.items()
            }

    def of(
        self, optimizer: torch.optim.Optimizer, stacks: Sequence[Tensor] | None = None, client: int = 0
    ) -> Sequence[Tensor]:
        """Return the tensors of an optimizer that began with this state; of one client, if several are stacked."""
        found = []
        for parameter, stack, keys in zip(self.parameters, stacks or self.parameters, self._keys, strict=True):
            for value in map(optimizer.state[stack].__getitem__, keys):
                found.append(value if value.shape == parameter.shape or not value.dim() else value[client])
        return found
