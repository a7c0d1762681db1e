"""What a round of each method costs one client and the server, without training.

The method's own round script runs on the two halves of the model, with one or two samples a batch, and is
counted. It moves and computes a + b·B + c·N + d·n₁ for B batches of N samples in all and n₁ in the first,
whose forward pass the client need not repeat. So four such rounds determine the cost of any round. A method
whose rounds also do other work says how much (`Method.round_kinds`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from peft import get_peft_model
from transformers import PreTrainedModel

from ..federation.sampling import shuffled_batches
from ..methods import Method
from ..methods.parts.costs import RoundKind, StoredWork, Workload
from ..methods.parts.math_attention import differentiable_attention
from ..protocol.adapters import ADAPTER_CODECS, AS_THEY_ARE, sent_form
from ..protocol.codecs import resolve_codecs
from ..protocol.context import RoundContext
from ..protocol.packing import Store
from ..protocol.seeds import preserved_random_state
from ..split import SplitModel, find_blocks, split_model
from ..split.blocks import members
from ..split.lora import default_lora, trainable_sides
from ..split.precision import train_in_float32
from .backbones import Samples
from .flops import CountedLink, OperationCounter
from .memory import Footprint, Run, footprint
from .passes import CountedClient, CountedServer, Passes
from .storage import block_weights
from .tables import MIB
from .timing import Devices, Network, RoundWork
from .weightless import Shapes, is_weightless, with_trained_values

# Headings of the meter that the paper's table leaves out: labels, masks, scalars; federated averaging.
EXTRAS = ("extras", "adapters")
Numbers = dict[str, int]  # what was counted, by name
Coefficients = dict[str, tuple[int, int, int]]  # a, b and c of a + b·B + c·N, and (d, 0, 0) under `first.<name>`


@dataclass(frozen=True)
class Cost:
    """One client's round with one method."""

    method: str
    title: str
    cut: int
    num_samples: int
    transfers: int
    up: Numbers  # bytes by heading of the ledger
    down: Numbers
    client_flops: int
    server_flops: int
    placeholder_flops: int  # of embeddings that run on placeholders, not part of the others
    client_memory: Numbers = field(default_factory=dict)  # bytes by what they are for
    footprint: Footprint | None = None  # of a run of such rounds, if asked for
    client_last_flops: int = 0  # of the client's last local updates,
    server_meanwhile_flops: int = 0  # and of the server while they run
    share: float = 1.0  # of a run's rounds that are of this kind
    dtype: str = "float32"  # of the base weights
    block_weights: Numbers = field(default_factory=dict)  # sizes of what quantisation would apply to, by side

    @property
    def num_bytes(self) -> int:
        """All bytes of both directions."""
        return sum(self.up.values()) + sum(self.down.values())

    @property
    def work(self) -> RoundWork:
        """The operations of both sides."""
        return RoundWork(self.client_flops, self.server_flops, self.client_last_flops, self.server_meanwhile_flops)

    def row(self, networks: Mapping[str, Network] | None = None, devices: Devices | None = None) -> dict[str, Any]:
        """Return the cost as one row of the table: MiB, GFLOPs per sample and per round.

        With `devices` also the seconds of computing. With `networks` also those of a round over each of them,
        computing included if `devices` are given.
        """
        per_sample = 1e9 * self.num_samples
        row: dict[str, Any] = {
            "method": self.method,
            "dtype": self.dtype,
            "cut": self.cut,
            "transfers": self.transfers,
            "up_mib": _main(self.up) / MIB,
            "down_mib": _main(self.down) / MIB,
            "extra_up_mib": _extra_bytes(self.up) / MIB,
            "extra_down_mib": _extra_bytes(self.down) / MIB,
            "client_gflops": self.client_flops / per_sample,
            "server_gflops": self.server_flops / per_sample,
            "client_memory_mib": sum(self.client_memory.values()) / MIB,
            "client_gflops_per_round": self.client_flops / 1e9,
            "server_gflops_per_round": self.server_flops / 1e9,
            "placeholder_gflops": self.placeholder_flops / per_sample,
            "client_memory_parts_mib": {name: size / MIB for name, size in self.client_memory.items()},
        }
        computing = 0.0
        if devices is not None:
            computing = row["compute_seconds"] = devices.seconds(self.work)
        for name, network in (networks or {}).items():
            row[f"seconds_{name}" if len(networks or {}) > 1 else "seconds"] = computing + network.seconds(
                self.num_bytes, self.transfers
            )
        return row | (self.footprint.row() if self.footprint is not None else {})


def _name(kind: RoundKind) -> str:
    """Return the method's name, with what makes it another one or its round a rare one: "..., walk"."""
    method = kind.method
    name = method.name + method.full_title.removeprefix(method.title)
    return f"{name} ({kind.label})" if kind.label else name


def _main(sizes: Mapping[str, int]) -> int:
    return sum(size for heading, size in sizes.items() if heading not in EXTRAS)


def _extra_bytes(sizes: Mapping[str, int]) -> int:
    return sum(size for heading, size in sizes.items() if heading in EXTRAS)


@dataclass(frozen=True)
class Round:
    """How much one client does in a round."""

    num_samples: int = 1000
    batch_size: int = 32
    local_epochs: int = 1

    def __post_init__(self) -> None:
        """Refuse rounds in which nothing happens."""
        for name in ("num_samples", "batch_size", "local_epochs"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name.replace('_', ' ')} must be at least 1, got {getattr(self, name)}.")

    @property
    def sizes(self) -> list[int]:
        """The samples of each batch."""
        return [len(batch) for batch in shuffled_batches(0, 0, 0, self.num_samples, self.batch_size)]


class CostModel:
    """Costs the methods on one model: LoRA is put on it once, and it is split anew for each cut."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        head: str | None = None,
        sequence_length: int | None = None,
        exchange_dtype: str = "float32",
        exchange_codec: str | Mapping[str, str] | None = None,
        adapter_codec: str = AS_THEY_ARE,
        gradient_checkpointing: bool = False,
    ):
        if adapter_codec not in ADAPTER_CODECS:
            raise ValueError(f"adapter_codec={adapter_codec!r} is not one of: {', '.join(ADAPTER_CODECS)}.")
        self.codecs, self.adapter_codec = resolve_codecs(exchange_dtype, exchange_codec), adapter_codec
        self.samples = Samples(model, sequence_length)
        self._weightless = is_weightless(model)
        with self.shapes():
            self.model = get_peft_model(model, default_lora(model, head=head))
            train_in_float32(self.model)
            with_trained_values(self.model)
        if gradient_checkpointing:
            self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self._splits: dict[int, SplitModel] = {}
        self._passes = Passes()  # of the present split

    def shapes(self) -> AbstractContextManager[Any]:
        """Return what a model without weights has to run in."""
        return Shapes() if self._weightless else nullcontext()

    @property
    def cuts(self) -> range:
        """Every cut that leaves both sides a block."""
        return range(1, len(members(find_blocks(self.model)[1])))

    def split(self, cut: int) -> SplitModel:
        """Return the model split at `cut`; a cut that cannot be is a ValueError."""
        if cut not in self._splits:
            with self.shapes():
                self._splits, self._passes = {cut: split_model(self.model, cut).train()}, Passes()
        return self._splits[cut]

    def costs(self, method: Method, cut: int, plan: Round, run: Run | None = None) -> list[Cost]:
        """Return the costs of a method, one entry for each kind of round it has; with `run` also those of a run.

        Raises a ValueError if the method cannot train this model.
        """
        kinds = self.kinds(method, cut, plan)
        sizes = block_weights(self.split(cut)).sizes
        costs = [replace(self._cost(kind, found, cut, plan), block_weights=sizes) for kind, found in kinds]
        if run is None:
            return costs
        usual = replace(kinds[0][0], stored=None)  # work on stored samples is left out of the memory
        taken = footprint(self, usual, cut, plan, run, costs[0])
        return [replace(cost, footprint=taken) for cost in costs]

    def kinds(self, method: Method, cut: int, plan: Round) -> list[tuple[RoundKind, Coefficients]]:
        """Return the kinds of round that a method has, each with (a, b, c), and d, of all that is counted."""
        method.check_loss(self.samples.loss_spec)
        measured: list[tuple[RoundKind, Coefficients]] = []  # without the work on stored samples
        kinds: list[tuple[RoundKind, Coefficients]] = []
        for kind in method.round_kinds(self.workload(plan)):
            plain = next((c for k, c in measured if (k.method, k.index) == (kind.method, kind.index)), None)
            if plain is None:
                sizes = ([1], [2], [1, 1], [1, 2])
                plain = _solve(*(self.measure(kind.method, cut, s, plan.local_epochs, kind.index) for s in sizes))
                measured.append((kind, plain))
            stored = kind.stored
            kinds.append((kind, plain if stored is None else self._with_stored(plain, stored, cut, plan.local_epochs)))
        return kinds

    def workload(self, plan: Round, run: Run | None = None, rounds: int = 1) -> Workload:
        """Return a client's round, and the run around it, as methods know it."""
        labels = self.samples.loss_spec.num_labels
        return Workload(plan.sizes, labels) if run is None else Workload(plan.sizes, labels, rounds, run.distinct)

    def _cost(self, kind: RoundKind, coefficients: Coefficients, cut: int, plan: Round) -> Cost:
        N, B, first = plan.num_samples, len(plan.sizes), plan.sizes[0]

        def value(name: str, batches: int, samples: int) -> int:
            a, b, c = coefficients[name]
            return a + b * batches + c * samples + coefficients.get(f"first.{name}", (0,))[0] * first

        counted = {name: value(name, B, N) for name in coefficients if not name.startswith("first.")}
        # What is held for one batch grows with its size only.
        for name in ("memory.activations", "memory.batch_messages"):
            counted[name] = value(name, 1, first)
        for name in ("memory.weights", "memory.optimizer"):
            counted[name] = sum(coefficients[name])
        for name in ("server_flops", "placeholder_flops"):
            # Coefficients are of all epochs of a round, and so are the training steps on what is generated.
            counted[name] += kind.generated * coefficients[f"train.{name}"][2]
            if kind.stored is not None:
                counted[name] += kind.stored.samples * coefficients[f"stored.{name}"][0]
        counted["server_meanwhile_flops"] += kind.generated * coefficients["train.server_flops"][2]
        return Cost(
            method=_name(kind),
            title=kind.method.full_title,
            cut=cut,
            num_samples=N,
            transfers=counted["transfers"],
            up=_below(counted, "up"),
            down=_below(counted, "down"),
            client_flops=counted["client_flops"],
            server_flops=counted["server_flops"],
            placeholder_flops=counted["placeholder_flops"],
            client_memory=_below(counted, "memory"),
            client_last_flops=counted["client_last_flops"],
            server_meanwhile_flops=counted["server_meanwhile_flops"],
            share=kind.share,
        )

    def _with_stored(self, plain: Coefficients, work: StoredWork, cut: int, local_epochs: int) -> Coefficients:
        """Return the coefficients of a round with work on stored samples, from those of a round without.

        The work costs (what is done once + epochs · what is done in each) for each stored sample, whatever the samples
        of the client. So it is counted on one stored sample, with one epoch and with two.
        """
        once, twice = (self.measure(method, cut, [1], local_epochs) for method in (work.once, work.twice))
        coefficients = dict(plain)
        for name, counted in once.items():
            a, b, c = plain.get(name, (0, 0, 0))
            added = counted - (a + b + c + plain.get(f"first.{name}", (0,))[0])
            if name in ("server_flops", "placeholder_flops"):
                coefficients[f"stored.{name}"] = (added + (work.epochs - 1) * (twice[name] - counted), 0, 0)
            elif not name.startswith("memory."):
                coefficients[name] = (a + added, b, c)
        return coefficients

    def round_context(self, local_epochs: int = 1, round_index: int = 0) -> RoundContext:
        """Return the context of a measured round."""
        store = Store(self.codecs)
        return RoundContext(seed=0, round_index=round_index, client=0, local_epochs=local_epochs, store=store)

    def measure(
        self,
        method: Method,
        cut: int,
        sizes: Sequence[int],
        local_epochs: int = 1,
        round_index: int = 0,
        *,
        compute: bool = False,
    ) -> Numbers:
        """Run a round of the method over batches of the given sizes and return all that was counted."""
        split, loss_spec = self.split(cut), self.samples.loss_spec
        context = self.round_context(local_epochs, round_index)
        ours, theirs = trainable_sides(split)
        # A learning rate of zero: the optimizers work, and the weights stay as they are for the next round.
        optimizers = [torch.optim.AdamW(list(side.values()), lr=0.0) for side in (ours, theirs)]
        with preserved_random_state(), self.shapes():
            method.setup(split, loss_spec, seed=0)
            client = CountedClient(split.client, self.samples.batches(sizes), optimizers[0], context, loss_spec)
            server = CountedServer(split.server, optimizers[1], context, loss_spec)
            counter = client.counter = server.counter = OperationCounter(compute)
            client.passes = server.passes = None if compute else self._passes
            link = CountedLink(method, client, counter)
            with differentiable_attention(), counter:
                method.round(link, server)
        # The paper's table leaves an averaged head out.
        link.meter.federate(sent_form(self.adapter_codec, {**ours, **method.federated()}), {})
        exchanged = sum(client.initial.nbytes().values())
        numbers = {
            "transfers": link.meter.transfers,
            "client_flops": counter.flops["client"],
            "server_flops": counter.flops["server"],
            "client_last_flops": link.last_flops,
            "server_meanwhile_flops": counter.flops["server"] - link.server_flops_before_last,
            "placeholder_flops": sum(counter.placeholder_flops.values()),
            "train.server_flops": server.train_flops,
            "train.placeholder_flops": server.train_placeholder_flops,
            "memory.weights": split.client.nbytes() + link.foreign_weights(),
            "memory.optimizer": link.optimizer_bytes(),
            "memory.exchange": exchanged + link.round_messages,
            "memory.batch_messages": link.batch_messages,
            "memory.activations": link.saved.peak,
        }
        for direction in ("up", "down"):
            numbers |= {f"{direction}.{name}": size for name, size in getattr(link.meter, direction).items()}
        split.client.zero_grad(set_to_none=True)
        split.server.zero_grad(set_to_none=True)
        return numbers


def _solve(one: Numbers, two: Numbers, one_one: Numbers, one_two: Numbers) -> Coefficients:
    """Return a, b, c and d of a + b·B + c·N + d·n₁ from rounds with batches of these sizes."""
    solved: Coefficients = {}
    for name in dict.fromkeys([*one, *two, *one_one, *one_two]):
        x, y, z, w = (counted.get(name, 0) for counted in (one, two, one_one, one_two))
        per_sample = w - z
        per_batch = z - x - per_sample
        of_first = y - x - per_sample
        solved[name] = (x - per_batch - per_sample - of_first, per_batch, per_sample)
        if of_first:
            solved[f"first.{name}"] = (of_first, 0, 0)
    return solved


def _below(counted: Numbers, prefix: str) -> Numbers:
    below = {name.partition(".")[2]: size for name, size in counted.items() if name.startswith(f"{prefix}.")}
    return {name: size for name, size in below.items() if size}
