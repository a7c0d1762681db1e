"""Mutated answers and introductions: no crash, no hang, bounded memory and disk, and a bounded average.

A failure names the seed of its answer. `attack(target, random.Random(seed))` repeats it.
"""

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from flwr.app import Message
from torch import Tensor

from hf_coefsfl import METHODS, __version__
from hf_coefsfl.federation.bounds import update_norms
from hf_coefsfl.federation.ledger import ClientReport
from hf_coefsfl.flower.link import FlowerLink
from hf_coefsfl.flower.roster import Roster
from hf_coefsfl.flower.transport import Courier
from hf_coefsfl.flower.wire import PROTOCOL
from hf_coefsfl.methods import make_method
from hf_coefsfl.protocol.adapters import ADAPTER_CODECS
from hf_coefsfl.protocol.codecs import for_all_kinds
from tests.support.federated import config
from tests.support.forged import with_bodies
from tests.support.fuzzing import CLIENTS, ReplayingGrid, Target, Task
from tests.support.mutations import MUTATIONS, STRANGE
from tests.support.packed import MIXED

SEED = 13
TASKS = {"text": "bert", "image": "vit", "question answering": "electra-qa", "language model": "gpt2-lm"}
ANSWERS, INTRODUCTIONS = 2500, 1000  # answers for each task
SECONDS, MEMORY, DISK = 50.0, 2**29, 10 * 2**20  # that an answer may take, that all may add, that one may leave


def damage(rng: random.Random) -> Callable[[str, bytes], bytes]:
    """Return what spoils the bodies of a message's records."""

    def change(kind: str, body: bytes) -> bytes:
        if rng.random() < 0.5 or not body:
            return body
        place = rng.randrange(len(body))
        flipped = body[:place] + bytes([body[place] ^ (1 << rng.randrange(8))]) + body[place + 1 :]
        return rng.choice([b"\xff" * 10, b"", body[:place], flipped, body + body, rng.randbytes(len(body) % 999)])

    return change


def attack(target: Target, rng: random.Random) -> str:
    """Give one forged answer; return what became of it."""
    step = rng.randrange(len(target.asked))
    forged = target.answers[rng.choice([0, 0, 0, 1])][step if rng.random() < 0.95 else rng.randrange(len(target.asked))]
    for _ in range(rng.choice([0, 1, 1, 1, 1, 1, 2, 3])):
        with suppress(Exception):  # what the last mutation has destroyed cannot be read any more
            forged = rng.choice(MUTATIONS)(rng, forged)
    whole = rng.random() < 0.2  # the script of the round as well, on what is accepted

    part = rng.choice([None, None, 1000])  # bytes of the payload in a message

    def answer(kind: str, header: dict[str, Any], chunk: bytes | None) -> tuple[dict[str, Any], bytes]:
        if kind != "train.step" and part is None:  # the server asks for more of a payload
            return {}, rng.choice([b"", b"x", rng.randbytes(2**16)])
        told, data = forged if not whole or header["sequence"] == step else target.answers[0][header["sequence"]]
        return told if kind == "train.step" else {}, data[header.get("offset", 0) :][:part]

    target.grid.answer = answer
    spoilt = rng.random() < 0.08
    target.grid.decode = lambda reply: with_bodies(reply, damage(rng)) if spoilt else reply
    if whole:
        report, flat = target.run(0)
        if report.failure is not None:
            return str(report.failure).replace(" on", ": on", 1)
        return judged(target, report, flat)
    link = target.link(0)
    try:
        with target.round.turn.taken(0, target.round.start, link.channel.deadline):
            if target.asked[step] != "finish":
                for message in link.fetch(target.asked[step]):
                    assert message.activations.isfinite().all()
                return "accepted"
            link._finish()
    except AssertionError:
        raise
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        link.channel.deadline.cancelled.set()  # as at the end of a failed round: nobody asks for more chunks
    return judged(target, *finished(target, link))


def finished(target: Target, link: FlowerLink) -> tuple[ClientReport, Tensor]:
    """Return the report and the weights of a client that has finished."""
    assert all(abs(link.observed.mean(name)) <= 1e15 for name in link.observed.values)
    client = torch.cat([link.trained[name].flatten() for name in target.deployment.client_parameters])
    beside = [link.kept[name].flatten() for name in target.deployment.method.federated()]
    server = target.flat[0][len(client) : len(target.flat[0]) - sum(map(len, beside))]
    report = replace(target.reports[0], kept=target.reports[0].kept | link.kept)
    return report, torch.cat([client, server, *beside])


def judged(target: Target, report: ClientReport, flat: Tensor) -> str:
    """Check that an accepted answer moves the average no further than the bound allows."""
    honest = torch.equal(flat, target.flat[0])
    average = target.average(report, flat.clone())
    assert average.isfinite().all()
    parts = target.deployment._parts(len(flat))
    allowed = [update_norms(vector, target.initial, parts) for vector in target.flat]
    for name, norm in update_norms(average, target.initial, parts).items():
        most = target.args.client_bound * max(norms[name] for norms in allowed)
        assert norm <= 1.001 * most, f"{name}: {norm} of at most {most}"
    return "equal" if honest else "bounded"


def targets(task: Task, folder: Path) -> Iterator[Target]:
    """Yield a server for each method that the task can have; the codecs change from one to the next."""
    rounds = {"num_clients": CLIENTS, "participation": 1.0, "warmup_rounds": 0, "on_client_failure": "skip"}
    args = config(folder, per_device_train_batch_size=3, **rounds)
    assert args.device.type == "cpu"
    for number, method in enumerate(sorted(name for name in METHODS if METHODS[name].deployable)):
        with suppress(ValueError):
            make_method(method).check_loss(task.loss_spec)
            codecs: list[Any] = [*for_all_kinds(), MIXED]
            chosen = codecs[(number + list(TASKS.values()).index(task.name)) % len(codecs)]
            adapters = ADAPTER_CODECS[number % len(ADAPTER_CODECS)]
            yield Target(task, method, chosen, folder / ".exchange", args, Accelerator(cpu=True), adapters)


def peak() -> int:
    """Return the most bytes of memory that this process has had."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
def test_answers(task: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / ".exchange").mkdir()
    tally: Counter[str] = Counter()
    servers = list(targets(Task.of(TASKS[task]), tmp_path))
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew: earlier tests may have needed more
    before = peak()
    for number in range(ANSWERS):
        target = servers[number * len(servers) // ANSWERS]
        seed, start = f"{SEED} {task} {target.method} {number}", time.monotonic()
        try:
            outcome = attack(target, random.Random(seed))
            assert not outcome.startswith("MemoryError")
            assert target.deployment.courier.broken is None
            assert time.monotonic() - start < SECONDS
            assert target.on_disk() <= DISK
        except BaseException as error:
            error.add_note(f"seed {seed!r}, {target.codecs}, {target.adapter_codec}")
            raise
        tally[outcome.partition(":")[0]] += 1
    grown = peak() - before
    with capsys.disabled():
        print(f"\n{task}, seed {SEED}: {dict(tally)}, {grown / 2**20:.0f} MiB more at the peak")
    assert grown <= MEMORY
    assert tally["equal"] and tally["bounded"] and tally["accepted"] and tally["TransferError"] > ANSWERS / 10


@pytest.mark.slow
def test_introductions() -> None:
    """Whoever is taken on is who a client can be, and an honest client stays."""
    rng, taken_on = random.Random(SEED), 0
    print(f"seed {SEED}")
    for run in range(INTRODUCTIONS // 50):
        grid = ReplayingGrid()
        roster = Roster(Courier(grid), "h", rng.choice([None, 4]), 1000)
        for node in range(1, 52):
            said: dict[str, Any] = {
                "protocol": PROTOCOL, "client": rng.randrange(1, 4) if node > 1 else 0, "name": f"site {node}",
                "num_samples": 7, "version": __version__, "half": "h",
            }  # fmt: skip
            spoilt = node > 1 and rng.random() < 0.2
            for _ in range(rng.choice([0, 1, 1, 2, 3]) if node > 1 else 0):
                said[rng.choice([*said, "x"])] = rng.choice([*STRANGE, "0", "site 1", 0])
                if rng.random() < 0.2:
                    said.pop(rng.choice(list(said)))
            grid.answer = lambda kind, header, chunk, said=said: (said, None)  # type: ignore[misc]
            grid.decode = lambda reply, spoilt=spoilt: pulled(reply, rng, spoilt)  # type: ignore[misc]
            grid.names[node] = rng.choice(["", "", "x", "2", "9" * 30]) if node > 1 else ""
            roster.refresh()
            end = time.monotonic() + SECONDS
            while node in roster._asked:
                assert time.monotonic() < end, f"run {run}, node {node}: {said}"
                time.sleep(0.001)
                roster.refresh()
            assert roster.courier.broken is None
            assert roster.members[0].node == 1
            for client, member in roster.members.items():
                assert type(client) is int and 0 <= client < 10**6 and 1 <= member.num_samples <= 1000
                assert member.name.isprintable() and 0 < len(member.name) <= 100 and member.node in grid.names
        taken_on += len(roster.members) - 1
    assert taken_on


def pulled(reply: Message, rng: random.Random, spoilt: bool) -> Any:
    return with_bodies(reply, damage(rng)) if spoilt else reply
