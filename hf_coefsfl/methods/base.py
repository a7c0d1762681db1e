"""Base class of all training methods, and the table that finds them by name."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, cast, get_type_hints

from torch import Tensor

from .._suggest import did_you_mean
from ..protocol.client_side import ClientSide
from ..protocol.link import ClientLink
from ..protocol.loss import LossSpec
from ..protocol.messages import Feedback, Message, SmashedData
from ..protocol.packing import Exchange
from ..protocol.server_side import ServerSide
from .parts.costs import RoundKind, Workload

if TYPE_CHECKING:
    from ..split import SplitModel

M = TypeVar("M", bound=Message)
METHODS: dict[str, type[Method]] = {}


@dataclass(frozen=True)
class ClientState:
    """What both sides of one client's round left for `Method.merge`."""

    client: int
    num_samples: int
    tensors: dict[str, Tensor]


class Method:
    """One training method: a round script, which runs on the server, and two handlers, which run on the client.

    A subclass is a dataclass whose fields (`option`) are its hyper-parameters, the `method_kwargs` of
    the config. Giving it a `name` registers it. Its `__post_init__` raises ValueError for values
    that cannot work.
    """

    name: ClassVar[str]
    title: ClassVar[str]  # the paper's name of the method
    table_position: ClassVar[int] = 100  # in tables and lists; the paper's methods come first, in its order
    is_reference: ClassVar[bool] = False  # references are not ranked with the other methods
    deployable: ClassVar[bool] = True  # False if a client needs more of the model than its own half
    differentiates_twice: ClassVar[bool] = False  # the server's passes; compiled blocks can be differentiated once
    trains_block_copies: ClassVar[bool] = False  # of the model, whose weights must then be numbers, not quantised
    stackable: ClassVar[bool] = False  # whether its rule works on several clients' samples below each other in a batch
    upload_tensors: ClassVar[int] = 1  # of the size of the activations, in the upload of a batch

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Register the method under its name."""
        super().__init_subclass__(**kwargs)
        # Which a subclass does not inherit from another method.
        for own in ("table_position", "is_reference", "stackable"):
            if own not in cls.__dict__:
                setattr(cls, own, getattr(Method, own))
        if "name" in cls.__dict__:
            METHODS[cls.name] = cls

    def check_loss(self, loss_spec: LossSpec) -> None:
        """Raise ValueError if the method cannot train with this loss. Called before training starts."""

    def exchanges_each_batch(self) -> bool:
        """Return whether every batch crosses the cut on its own, which is slow over a network."""
        return bool(getattr(self, "per_batch", False))

    @property
    def full_title(self) -> str:
        """The title, with the options that make it another method than the paper's."""
        return self.title

    def defaults_of_run(self, batch_size: int) -> str | None:
        """Return what the log says about defaults that follow the run's settings; None: nothing."""
        return None

    def can_be_probed(self) -> bool:
        """Return whether gradients enter the client half at the cut, which the staleness probe measures."""
        return True

    def probed_factor(self, batch_size: int) -> float | None:
        """Return the λ that the probe compares with the λ* of Proposition 1; None: no gradient is reused."""
        return None

    def effective_options(self) -> dict[str, Any]:
        """Return the options that change the result, given the others."""
        return dataclasses.asdict(self)  # type: ignore[call-overload]

    def round_kinds(self, work: Workload) -> list[RoundKind]:
        """Return the kinds of round that the method has, for the table of costs; the usual one first."""
        return [RoundKind(self)]

    def state_nbytes(self, measured: int, work: Workload) -> int:
        """Return the bytes of `state_dict` after `work.rounds` rounds, for the table of costs.

        Called after one round of client 0 with one batch of two samples of class 0; `measured` is what is kept of it.
        """
        return measured

    def setup(self, split: SplitModel, loss_spec: LossSpec, seed: int, first_round: int = 0) -> None:
        """Build the state beside the model (auxiliary networks, statistics). Called before each training.

        `first_round` is the first round after the warm-up.
        """

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state beside the model, for a checkpoint."""
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state_dict` returned."""

    def federated(self) -> dict[str, Tensor]:
        """Return the weights beside the model that travel to each client and back, with its adapter.

        What a client has made of them is in its `ClientSide.kept`, under the same names.
        """
        return {}

    def adopt(self, averaged: Mapping[str, Tensor]) -> None:
        """Take `federated` as the run's aggregation has made it of the clients'. Called before `merge`."""

    def merge(self, kept: Sequence[ClientState]) -> None:
        """Update the state from the clients' rounds, in client order. Called at the end of each round.

        It gets all surviving clients, also those whose weights the run's aggregation leaves out, and their `federated`
        as it was sent, without a bound: average that in `adopt`.
        """

    def magnitude(self, kept: Mapping[str, Tensor]) -> float:
        """Return how large the smashed data is of which `merge` would use statistics; 0 if it uses none.

        A client far above the others is left out of `merge`.
        """
        return 0.0

    def round(self, client: ClientLink, server: ServerSide) -> None:
        """Run one communication round with one client. Runs on the server."""
        raise NotImplementedError(f"{type(self).__name__} does not define a round.")

    def upload(self, client: ClientSide, batches: Sequence[int] | None) -> Iterable[SmashedData]:
        """Return the smashed data of the whole round (None), or of some batches, whose graph stays for `update`.

        The link packs it, one message at a time: a generator need not hold all of them.
        """
        if batches is None:
            return client.exchange()
        return [client.smash(batch) for batch in batches]

    def update(self, client: ClientSide, messages: Sequence[Message] | None, batches: Sequence[int] | None) -> None:
        """Descend along the gradient of the batch last uploaded. Runs on the client."""
        for message in expect(Feedback, messages):
            client.descend(message.gradient)


def expect(kind: type[M], messages: Sequence[Message] | None) -> Sequence[M]:
    """Return the messages if they are all of one kind."""
    if messages is None:
        raise ValueError(f"The client expected {kind.__name__} messages, got none.")
    for cls in messages.types() if isinstance(messages, Exchange) else map(type, messages):
        if not issubclass(cls, kind):
            raise ValueError(f"The client expected {kind.__name__} messages, got {cls.__name__}.")
    return cast("Sequence[M]", messages)


def option(default: Any, help: str, choices: Sequence[Any] | None = None) -> Any:
    """Return a dataclass field for an option of a method; `coefsfl methods NAME` shows its help."""
    if choices is not None:
        help = f"{help}: {', '.join(map(str, choices))}"
    return field(default=default, metadata={"help": help, "choices": choices})


def ordered_methods() -> list[str]:
    """Return the names of the methods in the order of tables."""
    return sorted(METHODS, key=lambda name: METHODS[name].table_position)


def make_method(name: str, kwargs: Mapping[str, Any] | None = None) -> Method:
    """Return the method of that name; a ValueError says which option or value is wrong."""
    if name not in METHODS:
        near = did_you_mean(name, METHODS)
        raise ValueError(f"Unknown method {name!r}.{near} Choose one of: {', '.join(ordered_methods())}.")
    cls, kwargs = METHODS[name], dict(kwargs or {})
    options = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    types = get_type_hints(cls)
    for key, value in kwargs.items():
        if key not in options:
            known = ", ".join(f"{n} (default {f.default!r})" for n, f in options.items()) or "none"
            raise ValueError(f"Method {name!r} has no option {key!r} in method_kwargs. Its options: {known}.")
        if not _fits(value, types[key]):
            raise ValueError(
                f"Option {key!r} of method {name!r} must be {_describe(types[key])}, got {value!r} "
                f"({type(value).__name__})."
            )
        choices = options[key].metadata.get("choices")
        if choices is not None and value not in choices:
            raise ValueError(
                f"Option {key!r} of method {name!r} must be one of {', '.join(map(str, choices))}, got {value!r}."
            )
    return cls(**kwargs)


def at_least(name: str, value: Any, least: int) -> None:
    """Refuse a value that is not a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name}={value!r} must be a whole number of at least {least}.")


def above_zero(name: str, value: float | None) -> None:
    """Refuse a number that is not finite or not above 0. None stands for a default."""
    if value is not None and not (value > 0 and math.isfinite(value)):
        raise ValueError(f"{name}={value!r} must be a finite number above 0.")


def _members(hint: Any) -> tuple[Any, ...]:
    return getattr(hint, "__args__", None) or (hint,)


def _fits(value: Any, hint: Any) -> bool:
    for member in _members(hint):
        if member is float and isinstance(value, (int, float)) and not isinstance(value, bool):
            return True
        if isinstance(value, member) and not (member is int and isinstance(value, bool)):
            return True
    return False


def _describe(hint: Any) -> str:
    return " or ".join("None" if m is type(None) else m.__name__ for m in _members(hint))
