"""What a round reports: losses, displacement, what crossed the cut, seconds on each side."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor

from .._io import write_atomically
from ..protocol.context import Observations, on_host
from ..protocol.link import ClientLink
from ..protocol.meter import Meter
from ..protocol.server_side import ServerSide

# Over several rounds these add up; the others are averaged.
SUMMED = (
    "bytes_up",
    "bytes_down",
    "transfers",
    "client_seconds",
    "server_seconds",
    "failed_clients",
    "bounded_clients",
)

DROPPED = "dropped out"  # a failure on purpose, of `client_dropout_rate`


@dataclass(frozen=True)
class ClientReport:
    """One client's round, in plain numbers."""

    num_samples: int
    server_loss: float
    client_loss: float
    displacement_norm: float
    correction_ratio: float
    meter: Meter
    client_seconds: float
    server_seconds: float
    kept: dict[str, Tensor]  # what the method keeps, see `Method.merge`
    failure: str | None = None  # why the client is left out of the average
    bounded: dict[str, float] = field(default_factory=dict)  # by what it was scaled, see `SplitFedConfig.client_bound`

    @classmethod
    def of_absent(cls, reason: str, num_samples: int) -> ClientReport:
        """Report on a client that gave nothing."""
        nothing = math.nan
        return cls(num_samples, nothing, nothing, nothing, nothing, Meter(), 0.0, 0.0, {}, reason)

    @classmethod
    def of(cls, link: ClientLink, server: ServerSide, seconds: float, num_samples: int) -> ClientReport:
        """Report on a finished round that took `seconds` on both sides together.

        Of clients that are stacked it is the report on all of them: their mean losses, and their seconds together.
        """
        client, seen = on_host(link.observed, server.observed)
        clients = server.context.num_stacked  # whose losses were added up
        server_loss = seen.mean("loss") / clients
        # The loss whose gradient the client followed: its own (an auxiliary network's), or that of the feedback
        # if it was taken, plus the predicted change.
        followed = seen.mean("feedback_loss", default=seen.mean("loss")) + client.mean("loss_change")
        followed /= clients
        client_loss = client.mean("client_loss", default=followed)
        return cls(
            num_samples=num_samples,
            server_loss=server_loss,
            client_loss=client_loss,
            displacement_norm=client.mean("displacement_norm"),
            correction_ratio=client.mean("correction_ratio"),
            meter=link.meter,
            client_seconds=link.client_seconds,
            server_seconds=seconds - link.client_seconds,
            kept={**link.kept, **server.kept},
            failure=_failure(client, seen, server_loss, client_loss),
        )


def _failure(client: Observations, server: Observations, server_loss: float, client_loss: float) -> str | None:
    side = _failed_side(client, server)
    if side is not None:
        return f"NaN or infinity on the {side} side (server loss {server_loss})"
    if not (math.isfinite(server_loss) and math.isfinite(client_loss)):
        return f"losses beyond all bounds (server loss {server_loss}, client loss {client_loss})"
    return None


def _failed_side(client: Observations, server: Observations) -> str | None:
    """Name the side on which something stopped being finite first, in the order of the passes."""
    activations = client.first_nonfinite("activations")
    losses = server.first_nonfinite("feedback_loss", "loss")
    weights = client.first_nonfinite("weights"), server.first_nonfinite("weights")
    if activations is None and losses is None:
        return "client" if weights[0] is not None else "server" if weights[1] is not None else None
    if activations is None:
        return "server"
    return "server" if losses is not None and losses < activations else "client"


def gather_reports(mine: dict[int, ClientReport], accelerator: Accelerator) -> dict[int, ClientReport]:
    """Return the reports of all processes in client order."""
    everyone = list(mine.items()) if accelerator.num_processes == 1 else gather_object(list(mine.items()))
    return dict(sorted(everyone, key=lambda item: item[0]))


def summarize(reports: dict[int, ClientReport]) -> dict[str, float]:
    """Return a round's numbers: means weighted by the clients' samples, and sums of bytes, transfers and seconds.

    A client that failed counts in the sums only; there are no means of a round in which all did.
    """
    sound = [report for report in reports.values() if report.failure is None]
    total = sum(report.num_samples for report in sound)
    means = {
        name: sum(getattr(report, name) * report.num_samples for report in sound) / total
        for name in ("server_loss", "client_loss", "displacement_norm", "correction_ratio")
        if sound
    }
    sums = {
        "bytes_up": sum(sum(report.meter.up.values()) for report in reports.values()),
        "bytes_down": sum(sum(report.meter.down.values()) for report in reports.values()),
        "transfers": sum(report.meter.transfers for report in reports.values()),
        "client_seconds": sum(report.client_seconds for report in reports.values()),
        "server_seconds": sum(report.server_seconds for report in reports.values()),
    }
    counts = {
        "failed_clients": len(reports) - len(sound),
        "bounded_clients": sum(bool(report.bounded) for report in sound),
    }
    return means | sums | {name: count for name, count in counts.items() if count}


@dataclass
class Ledger:
    """All that has crossed the cut since the run began: by round and client, over every process."""

    entries: list[dict[str, Any]] = field(default_factory=list)

    def add(self, round_index: int, reports: Mapping[str, ClientReport]) -> None:
        """Enter a round; rounds are counted from 1, clients go by their names."""
        for client, report in reports.items():
            noted: dict[str, Any] = {"failure": report.failure} if report.failure is not None else {}
            noted |= {"bounded": report.bounded} if report.bounded else {}
            self.entries.append({"round": round_index + 1, "client": client, **asdict(report.meter), **noted})

    @property
    def total(self) -> Meter:
        """The sum over all rounds and clients."""
        total = Meter()
        for entry in self.entries:
            total.add(Meter(entry["up"], entry["down"], entry["transfers"]))
        return total

    @property
    def mib(self) -> float:
        """Mebibytes of all kinds in both directions."""
        total = self.total
        return (sum(total.up.values()) + sum(total.down.values())) / 2**20

    @property
    def exchange_mib(self) -> float:
        """The same without adapters."""
        total = self.total
        return sum(size for way in (total.up, total.down) for kind, size in way.items() if kind != "adapters") / 2**20

    def clients_left(self, *, dropped: bool) -> dict[int, int]:
        """Return how many clients of each round did not fail, with or without those that dropped out on purpose."""
        left: dict[int, int] = {}
        sound = (None, DROPPED) if dropped else (None,)
        for entry in self.entries:
            left[entry["round"]] = left.get(entry["round"], 0) + (entry.get("failure") in sound)
        return left

    def until(self, last_round: int) -> Ledger:
        """Return the entries of the rounds up to this one, which is counted from 1."""
        return Ledger([entry for entry in self.entries if entry["round"] <= last_round])

    def save(self, path: Path) -> None:
        """Write the ledger as JSON."""
        content = {"unit": "bytes", "total": asdict(self.total), "entries": self.entries}
        write_atomically(path, json.dumps(content, indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> Ledger:
        """Read what `save` wrote."""
        return cls(json.loads(path.read_text())["entries"])
