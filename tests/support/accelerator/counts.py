"""What a batch and a client cost an accelerator beside computing: launches, waits of the host, copies to the device.

    python -m tests.support.accelerator.counts

prints the tables of docs/performance.md.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any
from unittest import mock

from hf_coefsfl import METHODS
from hf_coefsfl.federation.simulation import Simulation
from tests.support.accelerator.emulated import device_code
from tests.support.accelerator.runs import DEVICE, make

BATCH_SIZE = 4
Counts = dict[str, float]
# Launches of a batch, at most: what was counted, and a twentieth.
# FSL-SAGE's alignment takes as many steps with three batches as with six: one of five goes into its buffer.
LAUNCHES = {
    "acc_sfl vit": 615,
    "celu_vfl vit": 846,
    "coef_d vit": 841,
    "coef_j vit": 985,
    "coef_p vit": 882,
    "coef_w vit": 882,
    "cycle_sl vit": 847,
    "fsl_sage vit": 813,
    "gas vit": 910,
    "ggn vit": 2620,
    "ho_sfl vit": 3106,
    "hutchinson vit": 1722,
    "mu_splitfed vit": 2206,
    "oracle vit": 813,
    "reuse vit": 836,
    "vanilla vit": 505,
    "coef_w vit int4": 974,
    "coef_j bert": 1103,
    "coef_w bert": 992,
    "cycle_sl bert": 970,
    "gas bert": 1009,
    "vanilla bert": 561,
}
CLIENT_LAUNCHES = 167  # of a client of vanilla on images beside its batches: three for each weight are its optimizers'
# Waits of a client on images beside its batches: for its clock and its report; AccSFL's head; GAS's labels and moments;
# FSL-SAGE's buffer, network and whether the gradients are finite that it is aligned to.
CLIENT_WAITS = {"vanilla": 2, "coef_j": 2, "acc_sfl": 3, "gas": 4, "fsl_sage": 5}
STACKED = 5  # clients, and of a round the launches over those of one client, at most: what was counted, and a twentieth
STACKED_LAUNCHES = {"vanilla": 1.17, "coef_w": 1.16}
WAITS: dict[str, Counts] = {"ggn vit": {"aten::_linalg_eigh": 1}}  # that stay, by batch


@contextmanager
def counted() -> Iterator[list[Counts]]:
    """Note what was counted for each round."""
    found: list[Counts] = []
    run_round = Simulation.run_round

    def noted(self: Simulation, *args: Any) -> Any:
        before = device_code.counts()
        result = run_round(self, *args)
        found.append({name: number - before.get(name, 0) for name, number in device_code.counts().items()})
        return result

    with mock.patch.object(Simulation, "run_round", noted):
        yield found


def of_a_round(
    folder: Path, method: str, kind: str, clients: int, batches: int, codec: str = "float32", stacked: int = 1
) -> Counts:
    """Return what a round takes, of so many clients with so many batches each."""
    run = make(folder / f"{clients} {batches} {stacked}", DEVICE, kind, method=method, num_clients=clients,
               num_rounds=1, logging_strategy="no", rows=BATCH_SIZE * batches * clients,
               per_device_train_batch_size=BATCH_SIZE, exchange_dtype=codec, stacked_clients=stacked)  # fmt: skip
    with counted() as found:
        run.train()
    return found[0]


def of_a_batch(folder: Path, method: str, kind: str, codec: str = "float32") -> Counts:
    """Return what a batch more takes."""
    few, many = (of_a_round(folder, method, kind, 1, batches, codec) for batches in (3, 6))
    return {name: (many[name] - few.get(name, 0)) / 3 for name in many if many[name] != few.get(name, 0)}


def of_a_client(folder: Path, method: str, kind: str) -> Counts:
    """Return what a client more takes beside its batches: its start, its end and its part of the average."""
    one, longer, two = (of_a_round(folder, method, kind, *sizes) for sizes in ((1, 1), (1, 2), (2, 1)))
    return {n: two[n] - one.get(n, 0) - (longer.get(n, 0) - one.get(n, 0)) for n in two}


def of_stacked(folder: Path, method: str, kind: str) -> list[Counts]:
    """Return what a round of four batches takes: of one client, of five, of five that are stacked."""
    ways = ((1, 1), (STACKED, 1), (STACKED, STACKED))
    return [of_a_round(folder, method, kind, clients, 4, stacked=stacked) for clients, stacked in ways]


def part(counts: Counts, heading: str) -> Counts:
    """Return the entries under launch, wait or upload."""
    return {name.removeprefix(heading + " "): n for name, n in counts.items() if name.startswith(heading + " ")}


def lean(folder: Path, name: str) -> None:
    """A batch waits for nothing that is not listed, and takes no more launches than it did."""
    _, kind, *_ = name.split()
    counts = of_a_batch(folder, *name.split())
    waits, launches = part(counts, "wait"), sum(part(counts, "launch").values())
    allowed = WAITS.get(name, {})
    assert all(number <= allowed.get(what, 0) for what, number in waits.items()), waits
    assert launches <= LAUNCHES[name], launches
    uploads = part(counts, "upload")
    assert uploads["pinned"] == (3 if kind == "bert" else 2), uploads  # inputs and labels, once
    assert uploads.get("pageable", 0) <= 8, uploads


def lean_client(folder: Path, method: str) -> None:
    """The weights of a client are given, looked at and averaged together, its numbers are read together."""
    counts = of_a_client(folder, method, "vit")
    launches, waits = part(counts, "launch"), part(counts, "wait")
    assert sum(waits.values()) <= CLIENT_WAITS[method], waits
    if method == "vanilla":  # others do not run the first batch of a client twice
        assert sum(launches.values()) <= CLIENT_LAUNCHES, launches


def lean_stack(folder: Path, method: str, kind: str) -> None:
    """Clients that are stacked take hardly more than one, and wait no more often."""
    one, _, stacked = of_stacked(folder, method, kind)
    launches = [sum(part(counts, "launch").values()) for counts in (one, stacked)]
    assert launches[1] <= STACKED_LAUNCHES[method] * launches[0], launches
    for heading in ("wait", "upload"):
        assert part(stacked, heading) == part(one, heading), (heading, part(stacked, heading), part(one, heading))


def cases() -> dict[str, Any]:
    clients = {f"a client of {method}": partial(lean_client, method=method) for method in CLIENT_WAITS}
    stacks = {
        f"stacked {method} {kind}": partial(lean_stack, method=method, kind=kind)
        for method in STACKED_LAUNCHES
        for kind in ("vit", "bert")
    }
    return {**{name: partial(lean, name=name) for name in LAUNCHES}, **clients, **stacks}


def main() -> None:
    print("| method | launches | waits | uploads |\n|---|--:|--:|--:|")
    for kind in ("vit", "bert"):
        for method in METHODS:
            with tempfile.TemporaryDirectory() as folder, redirect_stdout(StringIO()):
                counts = of_a_batch(Path(folder), method, kind)
            figures = [f"{sum(part(counts, heading).values()):,.0f}" for heading in ("launch", "wait", "upload")]
            print(f"| {method}, {kind} | {' | '.join(figures)} |", flush=True)
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(StringIO()):
        counts = of_a_client(Path(folder), "vanilla", "vit")
    launches, waits = (sum(part(counts, heading).values()) for heading in ("launch", "wait"))
    print("\n| a round of | one client | five | five stacked |\n|---|--:|--:|--:|")
    for kind in ("vit", "bert"):
        for method in (name for name, cls in METHODS.items() if cls.stackable):
            with tempfile.TemporaryDirectory() as folder, redirect_stdout(StringIO()):
                found = of_stacked(Path(folder), method, kind)
            figures = [f"{sum(part(counts, 'launch').values()):,.0f}" for counts in found]
            print(f"| {method}, {kind} | {' | '.join(figures)} |", flush=True)
    print(f"\nA client of vanilla on images, beside its batches: {launches:,.0f} launches, {waits:,.0f} waits.")


if __name__ == "__main__":
    main()
