"""A client on another machine, as a round script sees it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ..federation.averaging import flatten, unflatten_
from ..protocol.context import RoundContext
from ..protocol.link import ClientLink
from ..protocol.messages import ClientResult, Message, Parameters, SmashedData
from ..protocol.packing import Exchange
from ..protocol.padding import kept_positions
from ..protocol.wire import read_exchange, read_message, write_exchange, write_message
from .checks import UploadCheck, check_observed, check_tensors
from .transport import Channel
from .wire import TransferError, integer

_REPORT = 2**23  # bytes: room for the losses that come with the trained weights, and the names of all


class Turn:
    """The server half computes for one client at a time, with that client's weights in it.

    A client's thread gives its turn up while it waits for the network.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]):
        self.parameters = list(parameters)
        self._lock = threading.Lock()
        self._since = 0.0
        self.seconds: dict[int, float] = {}  # for which each client had its turn

    @contextmanager
    def taken(self, client: int, weights: Tensor) -> Iterator[None]:
        """Compute for a client with these weights."""
        with self._lock:
            self._begin(weights)
            try:
                yield
            finally:
                self._end(client)

    @contextmanager
    def given_up(self, client: int) -> Iterator[None]:
        """Let others compute; at the end this client's weights are back."""
        weights = flatten(self.parameters)
        self._end(client)
        self._lock.release()
        try:
            yield
        finally:
            self._lock.acquire()
            self._begin(weights)

    def _begin(self, weights: Tensor) -> None:
        unflatten_(self.parameters, weights)
        self._since = time.perf_counter()

    def _end(self, client: int) -> None:
        self.seconds[client] = self.seconds.get(client, 0.0) + time.perf_counter() - self._since


class FlowerLink(ClientLink):
    """The client is on the other side of a channel.

    Updates of single batches wait for the next upload and go with it: one message each way for a batch. The update of
    the whole round starts at once, in the background.

    Args:
        channel: to the client.
        context: of the round.
        check: what an upload must be.
        turn: given up while waiting.
        weights: what the client begins with.
        num_samples: that the client has.
    """

    def __init__(
        self,
        channel: Channel,
        context: RoundContext,
        check: UploadCheck,
        turn: Turn,
        weights: Parameters,
        num_samples: int,
    ):
        super().__init__(context)
        self.channel, self.check, self.turn = channel, check, turn
        self.weights, self.num_samples = weights, num_samples
        self.trained: dict[str, Tensor] = {}
        self._num_batches: int | None = None
        self._ahead: Exchange[SmashedData] | None = None  # batch 0, if it was uploaded before it was asked for
        self._waiting: list[dict[str, Any]] = []
        self._payload: Path | None = None
        self._finishing: Future[None] | None = None

    @property
    def num_batches(self) -> int:
        """How many batches the client has. If no answer has said so yet, the first is uploaded ahead."""
        if self._num_batches is None:
            self._ahead = self._ask_for([0])
        assert self._num_batches is not None
        return self._num_batches

    def fetch(self, batches: Sequence[int] | None) -> Exchange[SmashedData]:
        """Have the client upload; batch 0 may be here already."""
        asked = None if batches is None else list(batches)
        ahead, self._ahead = self._ahead, None
        return ahead if ahead is not None and asked == [0] else self._ask_for(asked)

    def _ask_for(self, asked: list[int] | None) -> Exchange[SmashedData]:
        with self.turn.given_up(self.context.client):
            path = self._step([{"do": "upload", "batches": asked}])
            if path is None:
                raise TransferError("smashed data was asked for, none came")
            sent: Exchange[SmashedData] = read_exchange(
                path,
                SmashedData,
                self.context.store,
                lambda _, message: kept_positions(self.check.sound(message), self.check.loss_spec),
                self.context.device,
                most=self.num_samples,
            )
            path.unlink()  # an open file stays
            assert self._num_batches is not None  # a step tells it
            self.check.exchange(sent, self._num_batches if asked is None else len(asked))
        return sent

    def deliver(self, messages: Exchange[Message] | None, batches: Sequence[int] | None) -> None:
        """Send down what there is, with the next message to the client; that of the whole round goes at once."""
        if messages is not None:
            if self._payload is not None:
                raise RuntimeError("A round script sent two updates without an upload between them.")
            self._payload = self.channel.file("to")
            write_exchange(messages, self._payload)
        self._waiting.append({"do": "update", "batches": None if batches is None else list(batches)})
        if batches is None:
            self._finishing = _started(self._finish)

    def finish(self) -> None:
        """Wait for the trained weights of the client, which `trained` then holds."""
        with self.turn.given_up(self.context.client):
            if self._finishing is None:
                self._finish()
            else:
                self._finishing.result()

    def _finish(self) -> None:
        own = sum(t.numel() * t.element_size() for t in (self.weights.adapters | self.weights.auxiliary).values())
        path = self._step([{"do": "finish"}], limit=2 * own + _REPORT)
        if path is None:
            raise TransferError("trained weights were asked for, none came")
        result = read_message(path, ClientResult)
        path.unlink()
        check_tensors(self.weights.adapters, result.adapters)
        check_tensors(self.weights.auxiliary, result.kept)
        most = 8 * (self.local_epochs + 1) * (self._num_batches or 0) + len(self.weights.adapters)
        check_observed(result.observed, most)
        self.trained, self.kept = result.adapters, result.kept
        self.observed.values = {name: list(t.unbind()) for name, t in result.observed.items()}
        self.meter.federate(self.weights.adapters, self.weights.auxiliary)

    def _step(self, calls: list[dict[str, Any]], limit: int | None = None) -> Path | None:
        payload, self._payload = self._payload, None
        calls, self._waiting = [*self._waiting, *calls], []
        if self.channel.sequence == 0:
            payload = self.channel.file("weights")
            write_message(self.weights, payload)
        answer, received = self.channel.step(calls, payload, limit)
        count, samples = integer(answer, "num_batches"), integer(answer, "num_samples")
        if samples != self.num_samples:
            raise TransferError(f"the client has {samples} samples now, it had {self.num_samples}")
        if not 1 <= count <= samples or self._num_batches not in (None, count):
            raise TransferError(f"the client has {count} batches of {samples} samples, it had {self._num_batches}")
        self._num_batches = count
        seconds = answer.get("seconds")
        if not isinstance(seconds, float) or not 0 <= seconds < float("inf"):
            raise TransferError(f"the client worked for {seconds!r} seconds")
        self.client_seconds += seconds
        return received


def _started(function: Any) -> Future[None]:
    """Run a function in a thread of its own."""
    result: Future[None] = Future()

    def run() -> None:
        try:
            function()
        except BaseException as error:
            result.set_exception(error)
        else:
            result.set_result(None)

    threading.Thread(target=run, daemon=True).start()
    return result
