"""One, two and three processes, on one node or two, give the same bits; so does resuming with another number."""

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hf_coefsfl import METHODS
from hf_coefsfl.trainer.checkpoints import last_complete
from tests.support.launched import CASES, EVAL_BATCH, EVALUATED, INTERRUPTED, PREDICTED
from tests.support.paths import LIGHT, SUPPORT

ENVIRONMENT = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "PYTHONPATH": LIGHT}


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def launch(*launchers: list[str], arguments: list[str]) -> list[tuple[int, str]]:
    """Run the script by all launchers at once, and return the exit status and the errors of each."""
    command = [str(SUPPORT / "launched.py"), *arguments]
    output: Any = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    started = [
        subprocess.Popen([sys.executable, *launcher, *command], env=ENVIRONMENT, **output) for launcher in launchers
    ]
    errors = [process.communicate()[1] for process in started]
    return [(process.returncode, error) for process, error in zip(started, errors, strict=True)]


def rows_seen(total: int, world: int) -> list[int]:
    """Return the rows that each process evaluates: whole batches in turn; one without a batch repeats some other."""
    batches = [min(EVAL_BATCH, total - start) for start in range(0, total, EVAL_BATCH)]
    batches += [EVAL_BATCH] * (-len(batches) % world)
    return [sum(batches[process::world]) for process in range(world)]


def result(folder: Path, world: int) -> object:
    found = json.loads((folder / "result.json").read_text())
    assert found["world"] == world, folder
    seen = [json.loads((folder / f"rows-{process}.json").read_text()) for process in range(world)]
    assert seen == [list(pair) for pair in zip(rows_seen(EVALUATED, world), rows_seen(PREDICTED, world), strict=True)]
    return found["logs"]


def files(folder: Path) -> dict[str, bytes]:
    """Return what must be the same to the last bit: weights and predictions, the ledger, the probe's points."""
    names = ("result.safetensors", "communication.json", "staleness.json")
    return {name: (folder / name).read_bytes() for name in names if (folder / name).exists()}


@pytest.mark.slow
def test_the_number_of_processes_does_not_matter(tmp_path: Path) -> None:
    """Every method, launched by two nodes, then by three processes, then by one; killed runs go on with the next."""
    in_round, in_evaluation = INTERRUPTED
    folders = {world: tmp_path / str(world) for world in (1, 2, 3)}
    run = ["-m", "torch.distributed.run"]
    node = [*run, "--nnodes", "2", "--nproc_per_node", "1", "--master_addr", "127.0.0.1"]
    node += ["--master_port", str(free_port()), "--node_rank"]
    two = launch([*node, "0"], [*node, "1"], arguments=[str(folders[2]), "--kill", in_round])
    assert [status != 0 for status, _ in two] == [True, True]
    assert "SIGKILL" in two[1][1], two[1][1][-4000:]
    shutil.copytree(folders[2] / in_round, folders[3] / in_round)
    three = launch(
        [*run, "--standalone", "--nproc_per_node", "3"],
        arguments=[str(folders[3]), "--resume", in_round, "--kill", in_evaluation],
    )
    assert three[0][0] != 0 and "SIGKILL" in three[0][1], three[0][1][-4000:]
    shutil.copytree(folders[3] / in_evaluation, folders[1] / in_evaluation)
    one = launch([], arguments=[str(folders[1]), "--resume", in_evaluation, "--whole"])
    assert one[0][0] == 0, one[0][1][-4000:]

    assert set(METHODS) < set(CASES) and (folders[1] / "measured" / "staleness.json").exists()
    for case in CASES:
        expected = result(folders[1] / case, 1)
        for world in (2, 3):
            folder = folders[world] / case
            assert result(folder, world) == expected, (case, world)
            assert files(folder) == files(folders[1] / case), (case, world)
    # Round 4 was cut off, so that the last checkpoint is that of round 2.
    for case, killed_by, world in ((in_round, 2, 3), (in_evaluation, 3, 1)):
        assert last_complete(folders[killed_by] / case) == str(folders[killed_by] / case / "checkpoint-2")
        whole, folder = folders[1] / f"{case}, whole", folders[world] / case
        refused = [(folder / f"refused-{process}.txt").read_text() for process in range(world)]
        assert all("learning_rate: 0.005, now 1.0" in text for text in refused), refused
        assert result(folder, world) == result(whole, 1), case
        assert files(folder) == files(whole), case
