"""One client's round. Weights, optimizer and exchange lie in files between messages: each may run in a new process."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..federation.coded_weights import ADAPTERS, AUXILIARY
from ..federation.schedule import local_optimizer, make_context
from ..methods import Method
from ..protocol.adapters import AS_THEY_ARE, AdapterCodec
from ..protocol.client_side import ClientSide
from ..protocol.clock import synchronize
from ..protocol.link import packed_upload
from ..protocol.messages import ClientResult, Feedback, Message, Parameters, SmashedData
from ..protocol.packing import Exchange, Places, Store
from ..protocol.padding import kept_positions
from ..protocol.seeds import preserved_random_state
from ..protocol.wire import read_exchange, read_message, write_exchange, write_message
from .checks import check_tensors, copy_checked
from .client_node import ClientNode
from .residuals import Residuals
from .wire import TransferError, integer, text

_TENSORS, _STATE, _UPLOAD, _INITIAL, _SENT = "round.safetensors", "round.json", "upload", "initial", "sent"
_FILES = (_TENSORS, _STATE, _UPLOAD, _INITIAL, _SENT)
_SLACK = 8 * 2**20  # bytes that names and shapes of weights may have


@dataclass(frozen=True)
class _Between(ClientResult):
    """Where a client's round stands between two messages."""

    kinds: ClassVar[dict[str, str]] = {**ClientResult.kinds, "federated": "auxiliary_models", "optimizer": "extras"}

    federated: dict[str, Tensor] = field(default_factory=dict)
    optimizer: dict[str, Tensor] = field(default_factory=dict)


class ClientRound:
    """The calls that a server makes of one client's round.

    Args:
        node: the client.
        folder: where the round lies between two messages, in a folder that is named after run and node.
        header: of the message: which round, which call of it, and how it is run.
    """

    def __init__(self, node: ClientNode, folder: Path, header: Mapping[str, Any]):
        if integer(header, "client") != node.client:
            raise TransferError(f"this is client {node.client}, the message is for client {header['client']}")
        self.node, self.folder = node, folder
        self.round_index, self.sequence = integer(header, "round"), integer(header, "sequence")
        self.token = text(header, "token")
        learning_rate = header.get("learning_rate")
        if not isinstance(learning_rate, float) or not 0 <= learning_rate < float("inf"):
            raise TransferError(f"the learning rate is {learning_rate!r}")
        self.method: Method = node.methods.of_round(self.round_index)
        self.store = Store(
            node.config.exchange_codecs,
            integer(header, "memory_limit"),
            folder,
            leading=bool(header.get("leading")),
            trailing=bool(header.get("trailing")),
        )
        batches = node.batches(self.round_index)
        secret = node.lasting.secret if node.config.smashed_noise else None
        context = make_context(node.config, self.round_index, node.client, self.store, node.autocast, secret)
        optimizer = local_optimizer(node.config, node.parameters, learning_rate)
        self.side = ClientSide(node.half, batches, optimizer, context, node.loss_spec)
        self.uploaded: list[int] | None = None  # batches of the last upload; None: all
        self.is_unanswered = False  # whether no update has come to it yet
        self.codecs: dict[str, AdapterCodec] = {}  # of the weights that come and go; none: as they are
        if node.config.adapter_codec != AS_THEY_ARE:
            weights: dict[str, Mapping[str, Tensor]] = {ADAPTERS: node.parameters, AUXILIARY: self.method.federated()}
            self.codecs = {part: AdapterCodec(node.config.adapter_codec, named) for part, named in weights.items()}
            self.residuals = Residuals(node.lasting, header)

    def _state(self) -> dict[str, Any]:
        path = self.folder / _STATE
        state: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        return state

    def run(self, calls: list[Any], payload: Path | None, outbox: Path) -> dict[str, Any]:
        """Do the calls of one message; return what is answered. What is to be sent is left in `outbox`."""
        answer: dict[str, Any] = {"num_batches": len(self.side.batches), "num_samples": self.node.num_samples}
        seconds = 0.0
        if any(call["do"] == "finish" for call in calls[:-1]):
            raise TransferError("a round goes on after its end")
        with preserved_random_state(self.node.config.device):
            if self.sequence == 0:
                self._begin(payload)
                payload = None
            else:
                self._restore()
            for call in calls:
                start = time.perf_counter()
                if call["do"] == "upload":
                    self._upload(call["batches"], outbox)
                elif call["do"] == "update":
                    self._update(call["batches"], payload)
                elif call["do"] == "finish":
                    self._finish(outbox)
                else:
                    raise TransferError(f"there is no call {call['do']!r}")
                synchronize(self.node.config.device)
                seconds += time.perf_counter() - start
        if calls and calls[-1]["do"] == "finish":
            for name in _FILES:
                (self.folder / name).unlink(missing_ok=True)
        else:
            self._save()
        return answer | {"seconds": seconds}

    # ---- The calls ----

    @torch.no_grad()
    def _begin(self, payload: Path | None) -> None:
        """Take the round's weights."""
        for name in _FILES:
            (self.folder / name).unlink(missing_ok=True)
        if payload is None:
            raise TransferError("a round begins with weights, there are none")
        own = sum(
            t.numel() * t.element_size() for t in (*self.node.parameters.values(), *self.method.federated().values())
        )
        if payload.stat().st_size > 2 * own + _SLACK:  # before it is read into memory
            raise TransferError(f"weights of {payload.stat().st_size} bytes came, this client's have {own}")
        received = read_message(payload, Parameters)
        if self.codecs:
            for part, codec in self.codecs.items():
                check_tensors(codec.form(), getattr(received, part))
            os.link(payload, self.folder / _SENT)
            received = Parameters(**{n: c.named(c.decode(getattr(received, n))) for n, c in self.codecs.items()})
        copy_checked(self.node.parameters, received.adapters)
        copy_checked(self.method.federated(), received.auxiliary)

    def _upload(self, batches: list[int] | None, outbox: Path) -> None:
        if self.node.has_own_data:
            number = len(self.side.batches)
            counted = [batch % number for batch in (range(number) if batches is None else batches)]
            self.node.lasting.count(self.folder.parent.name, self.round_index, counted)
        write_exchange(packed_upload(self.method, self.side, batches), outbox)
        self.uploaded, self.is_unanswered = batches, True
        for name in (_UPLOAD, *([_INITIAL] if batches is None else [])):  # other names of the same file
            (self.folder / name).unlink(missing_ok=True)
            os.link(outbox, self.folder / name)

    def _update(self, batches: list[int] | None, payload: Path | None) -> None:
        if not self.is_unanswered or batches != self.uploaded:  # else trained weights would tell more than uploads
            raise TransferError(f"an update came for batches {batches}, which were not uploaded since the last one")
        self.is_unanswered = False
        messages = None
        uploaded = self._read_own(_UPLOAD, self.uploaded)
        if payload is not None:
            sent = self.uploaded if self.uploaded is not None else range(len(uploaded))
            place_of = {batch: place for place, batch in enumerate(sent)}
            walked = batches if batches is not None else list(place_of)

            def kept(place: int, message: Message) -> Places | None:
                return uploaded.places(place_of[walked[place]])

            messages = read_exchange(payload, Message, self.store, kept, self.side.context.device, batches=batches)
            self._check_feedback(messages, uploaded, [place_of[b] for b in walked])
        if batches is not None:  # the pass whose graph the update needs was another process's
            observed = {name: list(values) for name, values in self.side.observed.values.items()}
            packed_upload(self.method, self.side, self.uploaded)
            self.side.observed.values = observed
        self.method.update(self.side, messages, batches)

    def _check_feedback(self, messages: Exchange[Message], uploaded: Exchange[Any], places: list[int]) -> None:
        """Refuse feedback that does not fit the activations it speaks of, or that is not finite."""
        if len(messages) != len(places):
            raise TransferError(f"{len(messages)} messages came for {len(places)} batches")
        for place, outline in zip(places, messages.outlines(), strict=True):  # before anything is decoded
            if isinstance(outline, Feedback):
                expected = uploaded.packed[place].tensors["activations"].shape
                shape = outline.gradient.shape
                if shape != expected:
                    raise TransferError(f"a gradient has shape {tuple(shape)}, the activations {tuple(expected)}")
        for number, message in enumerate(messages):
            for name, t in message.tensors().items():
                if t.is_floating_point() and not bool(t.isfinite().all()):
                    raise TransferError(f"the {name} of batch {number} holds NaN or infinity")

    def _finish(self, outbox: Path) -> None:
        """Leave the trained weights, and what was seen and kept on the way."""
        self.side.finish()
        write_message(ClientResult(**(self._result() | self._updates())), outbox)

    def _updates(self) -> dict[str, Any]:
        """Return what is sent of the trained weights if a codec changes it, and keep the residuals that this leaves."""
        if not self.codecs:
            return {}
        device = self.side.context.device
        sent = read_message(self.folder / _SENT, Parameters, device)
        before = self.residuals.load({part: sum(codec.sizes) for part, codec in self.codecs.items()}, device)
        kept = {name: t.to(device) for name, t in self.side.kept.items()}
        trained: dict[str, Mapping[str, Tensor]] = {ADAPTERS: self.node.parameters, AUXILIARY: kept}
        after = dict(before)
        coded: dict[str, dict[str, Tensor]] = {}
        for part, codec in self.codecs.items():
            coded[part], left = codec.encode_update(getattr(sent, part), trained[part], before.get(part))
            if len(left):
                after[part] = left
        self.residuals.keep(self.round_index, after)
        return {"adapters": coded[ADAPTERS], "kept": coded[AUXILIARY]}

    # ---- Between two messages ----

    def _save(self) -> None:
        tensors: dict[str, Tensor] = {}
        plain: dict[str, Any] = {}
        for place, state in self.side.optimizer.state_dict()["state"].items():
            for key, value in state.items():
                (tensors if isinstance(value, Tensor) else plain)[f"{place}.{key}"] = value
        between = _Between(**self._result(), federated=self.method.federated(), optimizer=tensors)
        write_message(between, self.folder / _TENSORS)
        state = {
            "token": self.token, "sequence": self.sequence, "uploaded": self.uploaded,
            "is_unanswered": self.is_unanswered, "optimizer": plain,
        }  # fmt: skip
        (self.folder / _STATE).write_text(json.dumps(state))

    def _restore(self) -> None:
        state = self._state()
        if state.get("token") != self.token or state.get("sequence") != self.sequence - 1:
            raise TransferError(
                f"step {self.sequence} of a round came, but here the last one was {state.get('sequence')} of "
                f"{'this' if state.get('token') == self.token else 'another'} round"
            )
        self.uploaded, self.is_unanswered = state["uploaded"], state["is_unanswered"]
        between = read_message(self.folder / _TENSORS, _Between, self.side.context.device)
        copy_checked(self.node.parameters, between.adapters)
        copy_checked(self.method.federated(), between.federated)
        self.side.kept = {name: t.cpu() for name, t in between.kept.items()}
        self.side.observed.values = {name: list(t.unbind()) for name, t in between.observed.items()}
        states: dict[int, dict[str, Any]] = {}
        for name, value in (between.optimizer | state["optimizer"]).items():
            place, _, key = name.partition(".")
            states.setdefault(int(place), {})[key] = value
        whole_state = self.side.optimizer.state_dict()
        self.side.optimizer.load_state_dict({**whole_state, "state": states})
        if (self.folder / _INITIAL).exists():
            self.side.initial = self._read_own(_INITIAL)

    def _result(self) -> dict[str, Any]:
        """Return the fields of a `ClientResult`."""
        observed = {name: torch.stack(values) for name, values in self.side.observed.values.items()}
        return {"adapters": dict(self.node.parameters), "kept": self.side.kept, "observed": observed}

    def _read_own(self, name: str, batches: list[int] | None = None) -> Exchange[Any]:
        """Return what this client has uploaded, of some batches or of all (None)."""

        def kept(place: int, message: SmashedData) -> Places | None:
            return self.store.places(kept_positions(message, self.node.loss_spec))

        device = self.side.context.device
        return read_exchange(self.folder / name, SmashedData, self.store, kept, device, batches=batches)
