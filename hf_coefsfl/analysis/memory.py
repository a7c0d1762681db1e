"""What a run needs, without training: memory of the processes, and files on the disk.

Memory is followed through rounds of two and three samples a batch: after every operation, all the bytes that
live. Operation by operation these grow linearly with the batch size, so the peak of any batch size
is the largest of the extrapolated values, wherever it comes to lie.
"""

from __future__ import annotations

import tempfile
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..federation.ledger import Ledger
from ..methods import Method
from ..methods.base import ClientState
from ..methods.parts.costs import RoundKind
from ..protocol.adapters import AS_THEY_ARE
from ..protocol.client_side import ClientSide
from ..protocol.link import LocalLink
from ..protocol.messages import Message, SmashedData
from ..protocol.seeds import preserved_random_state
from ..protocol.server_side import ServerSide
from ..split import SplitModel
from ..split.lora import save_halves, trainable_sides
from .flops import PRODUCTS, OperationCounter, is_meta, nbytes
from .storage import block_weights
from .tables import MIB
from .weightless import CPU, DEVICE_OF, Watching

if TYPE_CHECKING:
    from .cost import Cost, CostModel, Round

CLIENT, SERVER = 0, 1
# Files whose size hardly depends on the run, as `save_model` and a checkpoint write them: the model card,
# training_args.json, run.json and the halves' config.json; optimizer.pt, scheduler.pt, rng_state.pth,
# training_args.json, run.json, README.md and sealed.json.
SAVED_BYTES, CHECKPOINT_BYTES = 13_500, 31_700
LOG_BYTES = 530  # of trainer_state.json for each logged round


@dataclass(frozen=True)
class Run:
    """How long a run is, over how many clients, and what it keeps on the disk."""

    num_rounds: int = 100
    clients_per_round: int = 5
    num_clients: int = 50
    save_steps: int = 10
    save_total_limit: int | None = None

    def __post_init__(self) -> None:
        """Refuse runs in which nothing happens."""
        for name, value in asdict(self).items():
            if value is not None and value < 1:
                raise ValueError(f"{name.replace('_', ' ')} must be at least 1, got {value}.")
        if self.clients_per_round > self.num_clients:
            raise ValueError(
                f"clients per round ({self.clients_per_round}) cannot be more than the clients ({self.num_clients})."
            )

    def checkpoints(self) -> list[int]:
        """Return the rounds whose checkpoints are left at the end; the last round is always saved."""
        rounds = sorted({*range(self.save_steps, self.num_rounds + 1, self.save_steps), self.num_rounds})
        return rounds[-self.save_total_limit :] if self.save_total_limit is not None else rounds

    def distinct(self, rounds: int) -> int:
        """Return how many of the clients have taken part after so many rounds, as expected of random sampling."""
        return round(self.num_clients * (1 - (1 - self.clients_per_round / self.num_clients) ** rounds))


@dataclass(frozen=True)
class Footprint:
    """Bytes that a run takes, by what they are for. Memory is that beyond imports and dataset."""

    process: dict[str, int]  # memory of the process that simulates the clients and their server sides
    client: dict[str, int]  # memory of a client that runs alone
    server: dict[str, int]  # memory of the server's side of one client, alone
    disk: dict[str, int]  # files that are left at the end
    disk_peak: int  # with the checkpoint that is written before the oldest one is deleted
    peaks: dict[str, int] = field(default_factory=dict)  # of the round, by who is at work: see `peaks`
    copied_peaks: dict[str, int] = field(default_factory=dict)  # the same if products copy the weights of the blocks

    def with_round(self, peaks: dict[str, int]) -> Footprint:
        """Return the same run with these peaks of its rounds."""
        both = max(peaks["process_client"], peaks["process_server"])
        client, server = self.client | {"round": peaks["client"]}, self.server | {"round": peaks["server"]}
        return replace(self, process=self.process | {"round": both}, client=client, server=server, peaks=peaks)

    def row(self) -> dict[str, Any]:
        """Return the entries of a table's row, in MiB."""
        parts = {
            "process_memory": self.process,
            "client_alone": self.client,
            "server_alone": self.server,
            "disk": self.disk,
        }
        row: dict[str, Any] = {f"{name}_mib": sum(sizes.values()) / MIB for name, sizes in parts.items()}
        row["disk_peak_mib"] = self.disk_peak / MIB
        return row | {f"{n}_parts_mib": {p: size / MIB for p, size in sizes.items()} for n, sizes in parts.items()}


# ---- Following memory ----


class LiveMemory(Watching):
    """Follows every storage that is made inside it for as long as it lives.

    After each operation it notes the bytes that live in all, and those that the side at work would
    hold in a process of its own: what it made itself, and what it was sent. `copied` are weights that a product
    works with a copy of, which is noted beside.
    """

    def __init__(self, existing: Sequence[Tensor], copied: Sequence[Tensor] = ()):
        super().__init__()
        self._existing = existing  # referenced, so that no new storage gets the address of one of these
        self._sizes = {t.untyped_storage()._cdata: (0, CLIENT) for t in existing}
        self._copied = {t.untyped_storage()._cdata: nbytes(t) for t in copied}
        self.side = SERVER
        self.live = [0, 0]  # by the side that made it
        self.received = [0, 0]
        # In all, of the side at work, which side, which segment, and the copy of a weight.
        self.history: list[tuple[int, int, int, int, int]] = []
        self.ends: list[tuple[int, int, int]] = []  # the same at the end of each segment

    def __torch_dispatch__(
        self, func: Any, types: Sequence[Any], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation and note what lives after it."""
        if func is DEVICE_OF:
            return CPU
        result = func(*args, **(kwargs or {}))
        leaves = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if any(map(is_meta, leaves)):
            return result  # only shapes, and asked for once only
        for leaf in leaves:
            storage = leaf.untyped_storage()
            if storage._cdata not in self._sizes:
                self._sizes[storage._cdata] = (storage.nbytes(), self.side)
                self.live[self.side] += storage.nbytes()
                weakref.finalize(storage, self._release, storage._cdata).atexit = False
        copy = 0
        if func in PRODUCTS:
            copy = sum(self._copied.get(t.untyped_storage()._cdata, 0) for t in args if isinstance(t, Tensor))
        self.history.append((*self._now(), self.side, len(self.ends), copy))
        return result

    def _now(self) -> tuple[int, int]:
        return sum(self.live), self.live[self.side] + self.received[self.side]

    def _release(self, address: int) -> None:
        size, side = self._sizes.pop(address)
        self.live[side] -= size

    def switch(self, side: int) -> None:
        """End a segment: the other side goes to work."""
        self.ends.append((*self._now(), self.side))
        self.side = side


class _FollowedLink(LocalLink):
    """A local link that says which side is at work and what it was sent."""

    def __init__(self, method: Method, client: ClientSide, memory: LiveMemory):
        super().__init__(method, client)
        self.memory = memory

    def upload(self, batches: Sequence[int] | None = None) -> Sequence[SmashedData]:
        """Follow the client's upload, which the server then holds."""
        before = sum(self.meter.up.values())
        self.memory.switch(CLIENT)
        sent = super().upload(batches)
        self.memory.switch(SERVER)
        self.memory.received[SERVER] = sum(self.meter.up.values()) - before
        return sent

    def update(self, messages: Sequence[Message] | None = None, batches: Sequence[int] | None = None) -> None:
        """Follow the client's update, during which it holds what it was sent."""
        self.memory.switch(CLIENT)
        self.memory.received[CLIENT] = _message_bytes(messages)
        super().update(messages, batches)
        self.memory.switch(SERVER)
        self.memory.received[CLIENT] = 0


def _message_bytes(messages: Any) -> int:
    if hasattr(messages, "nbytes"):
        return sum(messages.nbytes().values())
    return sum(sum(message.nbytes().values()) for message in messages or ())


@dataclass(frozen=True)
class History:
    """What lived after each operation of a round, and at the end of each of its segments."""

    total: NDArray[np.int64]
    own: NDArray[np.int64]
    side: NDArray[np.int64]
    segment: NDArray[np.int64]
    copies: NDArray[np.int64]
    ends: NDArray[np.int64]  # (segments, 3): total, own, side
    inputs: int  # bytes of the collated batches
    state: int  # bytes of what the method keeps from round to round

    def with_copies(self) -> History:
        """Return the values with the copies of weights among them."""
        return replace(self, total=self.total + self.copies, own=self.own + self.copies)

    def by_segment(self) -> History:
        """Return the largest values of each segment instead of those of each operation."""
        present = np.unique(self.segment)
        rows = [np.array([v[self.segment == s].max() for s in present]) for v in (self.total, self.own, self.side)]
        return replace(self, total=rows[0], own=rows[1], side=rows[2], segment=present)


def follow(model: CostModel, method: Method, cut: int, sizes: Sequence[int], round_index: int = 0) -> History:
    """Run a round of the method over batches of the given sizes and follow what lives."""
    split, loss_spec, context = model.split(cut), model.samples.loss_spec, model.round_context(round_index=round_index)
    ours, theirs = trainable_sides(split)
    batches = model.samples.batches(sizes)
    inputs = [t for batch in batches for t in batch.values()]
    memory = LiveMemory([*existing_tensors(split), *inputs], block_weights(split).tensors)
    with preserved_random_state(), model.shapes(), _usual_attention(split), OperationCounter(), memory:
        memory.side = CLIENT  # where the auxiliary networks are used
        method.setup(split, loss_spec, seed=0)
        # A learning rate of zero: the weights stay as they are for the next round.
        optimizers = [torch.optim.AdamW(list(side.values()), lr=0.0) for side in (ours, theirs)]
        client = ClientSide(split.client, batches, optimizers[0], context, loss_spec)
        server = ServerSide(split.server, optimizers[1], context, loss_spec)
        memory.side = SERVER
        memory.history.clear()
        method.round(_FollowedLink(method, client, memory), server)
        memory.switch(SERVER)
    method.merge([ClientState(0, sum(sizes), {**client.kept, **server.kept})])
    state = sum(map(nbytes, method.state_dict().values()))
    for half in (split.client, split.server):
        half.zero_grad(set_to_none=True)
    total, own, side, segment, copies = np.array(memory.history, dtype=np.int64).T
    ends = np.array(memory.ends, dtype=np.int64)
    return History(total, own, side, segment, copies, ends, sum(map(nbytes, inputs)), state)


def existing_tensors(split: SplitModel) -> list[Tensor]:
    """Return the weights and buffers of the model and of both halves, each once."""
    modules: tuple[nn.Module, ...] = (split.model, split.client, split.server)
    tensors = chain.from_iterable((*module.parameters(), *module.buffers()) for module in modules)
    return list({t.untyped_storage()._cdata: t for t in tensors}.values())


@contextmanager
def _usual_attention(split: SplitModel) -> Iterator[None]:
    """Run attention as in a model that is loaded with its defaults, not as operations are counted."""
    modules = [module for half in (split.client, split.server) for module in half.modules()]
    can = all(getattr(module, "_supports_sdpa", True) for module in modules)
    every: list[Any] = [getattr(module, "config", None) for module in modules]
    configs = {id(config): config for config in every if hasattr(config, "_attn_implementation")}
    before = {key: config._attn_implementation for key, config in configs.items()}
    try:
        for config in configs.values() if can else ():
            config._attn_implementation = "sdpa"
        yield
    finally:
        for key, config in configs.items():
            config._attn_implementation = before[key]


# ---- Memory of a run ----


def peaks(two: History, three: History, more: NDArray[np.int64], size: int, generated: int = 0) -> dict[str, int]:
    """Return the peaks of the round from rounds with batches of two and of three samples.

    "client" and "server" are those of each alone, "process_client" and "process_server" those of all while it works.
    `size` is the batch size. `more` (segments, 2) is what is added in all and to the side at work, because a round
    has more than two batches; `generated` samples are in the server's batches beside those of the client.
    """
    if len(two.total) != len(three.total):  # the operations depend on the samples: compare whole segments
        two, three = two.by_segment(), three.by_segment()
    per_sample = three.own - two.own
    on_server = generated * per_sample * (two.side == SERVER)
    total = two.total + (three.total - two.total) * (size - 2) + more[two.segment, 0] + on_server
    own = two.own + per_sample * (size - 2) + more[two.segment, 1] + on_server
    found: dict[str, int] = {}
    for side, name in ((CLIENT, "client"), (SERVER, "server")):
        found[name] = int(own[two.side == side].max(initial=0))
        found[f"process_{name}"] = int(total[two.side == side].max(initial=0))
    return found


def footprint(
    model: CostModel, kind: RoundKind, cut: int, plan: Round, run: Run, cost: Cost | None = None
) -> Footprint:
    """Return what a run takes whose rounds are all of one kind; `docs/costs.md` says what is in it.

    The files are left out without a `cost`.
    """
    N, b, B = plan.num_samples, plan.sizes[0], len(plan.sizes)

    def followed(size: int, batches: int) -> History:
        return follow(model, kind.method, cut, [size] * batches, kind.index)

    one = followed(2, 1)  # not one sample: a dimension of 1 saves copies
    two, shown, more = one, 1, np.zeros((len(one.ends), 2), dtype=np.int64)
    if B > 1:
        two, shown = followed(2, 2), 2
        more = np.zeros((len(two.ends), 2), dtype=np.int64)
        if len(one.ends) == len(two.ends):
            more = (two.ends - one.ends)[:, :2]
        elif B > 2:  # segments for each batch, of which the first is another case: compare two with three
            before, two, shown = two, followed(2, 3), 3
            last = [[h.ends[h.ends[:, 2] == side][-1, :2] for h in (before, two)] for side in (CLIENT, SERVER)]
            more = np.array([after - earlier for earlier, after in last])[two.ends[:, 2]]
    more = more * (N - shown * b) // 2
    three, generated = followed(3, shown), -(-kind.generated // B)
    of_round = peaks(two, three, more, b, generated)
    copied = peaks(two.with_copies(), three.with_copies(), more, b, generated)
    split = model.split(cut)
    trained = 4 * sum(p.numel() for side in trainable_sides(split) for p in side.values())
    residual = 0  # of a client
    if model.adapter_codec != AS_THEY_ARE:
        federated = *trainable_sides(split)[0].values(), *kind.method.federated().values()
        residual = 4 * sum(t.numel() for t in federated)
    state = {
        rounds: kind.method.state_nbytes(one.state, model.workload(plan, run, rounds)) + residual * run.distinct(rounds)
        for rounds in {*run.checkpoints(), run.num_rounds}
    }
    inputs = one.inputs * N // 2
    process = {
        "weights": sum(map(nbytes, existing_tensors(split))),
        "inputs": inputs,
        "round": 0,
        # The global vector and those of the clients; what clients begin with, and their new residuals.
        "averaging": (run.clients_per_round + 1) * trained
        + (trained + (run.clients_per_round + 1) * residual if residual else 0),
        "state": state[run.num_rounds],
    }
    files, files_peak = ({}, 0) if cost is None else disk(split, cost, run, state)
    client = {"weights": split.client.nbytes(), "inputs": inputs}
    server = {"weights": split.server.nbytes()}
    return Footprint(process, client, server, files, files_peak, copied_peaks=copied).with_round(of_round)


# ---- Files of a run ----


def disk(split: SplitModel, cost: Cost, run: Run, state: Mapping[int, int]) -> tuple[dict[str, int], int]:
    """Return the bytes of the files that a run leaves, by what they are, and the most there are at a time.

    `state` is what the method and simulated clients keep, after so many rounds.
    """
    with tempfile.TemporaryDirectory() as folder:
        model: Any = split.model
        model.save_pretrained(folder)
        (Path(folder) / "README.md").unlink(missing_ok=True)  # PEFT's card, which ours replaces
        adapter = _folder_bytes(Path(folder))
        save_halves(split, folder)
        halves = _folder_bytes(Path(folder)) - adapter
    ledgers = {done: ledger_bytes(cost, done * run.clients_per_round) for done in state}
    kept = [adapter + CHECKPOINT_BYTES + LOG_BYTES * done + ledgers[done] + state[done] for done in run.checkpoints()]
    left = {
        "adapter": adapter,
        "halves": halves,
        "checkpoints": sum(kept),
        "communication": ledgers[run.num_rounds],
        "state": state[run.num_rounds],
        "card": SAVED_BYTES,
    }
    # A checkpoint is sealed before the oldest is deleted.
    passing = kept[-1] if len(kept) < len(replace(run, save_total_limit=None).checkpoints()) else 0
    return left, sum(left.values()) + passing


def ledger_bytes(cost: Cost, entries: int) -> int:
    """Return the size of a `communication.json` with so many entries like this cost."""
    entry = {"round": 10, "client": "10", "up": cost.up, "down": cost.down, "transfers": cost.transfers}
    with tempfile.TemporaryDirectory() as folder:
        sizes = []
        for number in (1, 2):
            Ledger([entry] * number).save(Path(folder) / "ledger.json")
            sizes.append((Path(folder) / "ledger.json").stat().st_size)
    return sizes[0] + (entries - 1) * (sizes[1] - sizes[0])


def _folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
