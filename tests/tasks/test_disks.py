"""Disks that are read-only or full: one line that says which checkpoint is whole, at the start and in between."""

import errno
import os
import re
import resource
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from hf_coefsfl._io import disk_fault, sync, write_atomically
from hf_coefsfl.cli import main as coefsfl
from hf_coefsfl.federation.simulation import Simulation
from hf_coefsfl.tasks.run import run
from hf_coefsfl.trainer.checkpoints import last_complete
from tests.support.posts import make_posts, small


@pytest.fixture
def options(tmp_path: Path) -> dict[str, str]:
    return make_posts(tmp_path) | {"save_steps": "1", "method": "vanilla", "disable_tqdm": "true"}


@pytest.fixture
def limited() -> Iterator[Any]:
    """Let no file grow beyond a size: what writes is refused by the operating system, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def stopped(argv: list[str], capsys: pytest.CaptureFixture[str], status: int = 1) -> str:
    with pytest.raises(SystemExit) as left:
        run("newsgroups", argv=argv, prog="coefsfl train newsgroups")
    said = capsys.readouterr().err
    assert left.value.code == status and "Traceback" not in said, said
    return said.strip().splitlines()[-1]


@pytest.mark.parametrize(("most", "done"), [(1_000, 1), (6_000, 2)], ids=["the ledger", "the weights"])
def test_full_in_the_middle(
    options: dict[str, str], most: int, done: int, limited: Any, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    run_round, output = Simulation.run_round, options["output_dir"]

    def filling(self: Simulation, index: int, *args: Any) -> Any:
        found = run_round(self, index, *args)
        if index == 1:
            limited(most)
        return found

    monkeypatch.setattr(Simulation, "run_round", filling)
    said = stopped(small(options), capsys)
    assert said.startswith(
        f"Stopped after {done} of 3 rounds because a file cannot be written (File too large). The last"
    )
    assert f" checkpoint is {output}/checkpoint-1. To go on: coefsfl train newsgroups --num_clients 4" in said
    assert last_complete(output) == f"{output}/checkpoint-1"


def test_full_from_the_start(
    options: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    said = stopped(small(options), capsys)
    assert (
        "Stopped after 0 of 3 rounds" in said and "because a file cannot be written (No space left on device)" in said
    )
    assert "before the first checkpoint. To begin again: " in said
    assert not [
        path.name for path in Path(options["output_dir"]).iterdir() if path.name != ".lock"
    ]  # no half of a file


def test_a_place_that_cannot_be_written_to(
    options: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Refused before the data is loaded. Root may write everywhere, so access is denied by hand."""
    file, access = f"{options['dataset_name']}/train.parquet", os.access
    monkeypatch.setattr(os, "access", lambda path, mode: str(path) != str(tmp_path) and access(path, mode))
    for place, reason in ((f"{file}/out", f"{file} is not a folder"), (f"{tmp_path}/a/b", f"{tmp_path} is read-only")):
        said = stopped(small(options | {"output_dir": place, "dataset_name": "/nowhere"}), capsys, 2)
        assert f"output_dir='{place}' cannot be written to: {reason}. Give another one." in said


def test_other_commands(options: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    names = ("model_name_or_path", "dataset_name")
    argv = [word for name in names for word in (f"--{name}", options[name])]
    columns = ["--columns", "text=body", "--use_cpu", "true", "--max_length", "8"]
    assert coefsfl(["split", "newsgroups", *argv, *columns, "--output_dir", str(tmp_path / "file" / "half")]) == 1
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert said.startswith("coefsfl split: error: a file cannot be read or written (Not a directory")


def test_an_answer_that_finds_no_room(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("hf_coefsfl.cli.methods_command.run", lambda arguments: "an answer")  # which takes a while
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert coefsfl(["methods"]) == 1
    assert capsys.readouterr().err == "coefsfl methods: error: a file cannot be written (No space left on device).\n"


def test_errors_of_every_writer(tmp_path: Path, limited: Any) -> None:
    many = torch.zeros(10_000)
    limited(1_000)
    for write, reason in (
        (lambda path: path.write_bytes(bytes(10_000)), "written (File too large)"),
        (lambda path: save_file({"a": many}, path), "written (File too large)"),
        (lambda path: torch.save(many, path), "written (not in full)"),
        (lambda path: torch.save(many, path / "nowhere" / "x"), None),  # not the disk's fault
        (lambda path: torch.load(path), None),
    ):
        with pytest.raises(Exception) as failed:  # noqa: PT011 - each writer has its own
            write(tmp_path / "file")
        assert disk_fault(failed.value) == (reason and f"a file cannot be {reason}"), failed.value


def test_errors_of_reading_are_not_called_errors_of_writing(tmp_path: Path) -> None:
    denied = PermissionError(errno.EACCES, os.strerror(errno.EACCES), "/data/train.csv")
    assert disk_fault(denied) == "a file cannot be read or written (Permission denied: /data/train.csv)"
    assert disk_fault(FileNotFoundError(errno.ENOENT, "gone")) is None


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP, errno.EBADF])
def test_folders_that_cannot_be_synced(tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    fsync, refusing = os.fsync, [stat.S_ISDIR]

    def some(handle: int) -> None:
        if refusing[0](os.fstat(handle).st_mode):
            raise OSError(number, os.strerror(number))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", some)
    write_atomically(tmp_path / "file", "content")
    assert (tmp_path / "file").read_text() == "content"
    refusing[0] = stat.S_ISREG
    with pytest.raises(OSError, match=re.escape(os.strerror(number))):
        sync(tmp_path / "file")


def test_another_error_keeps_its_traceback(options: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any) -> None:
        raise RuntimeError("a fault of the code")

    monkeypatch.setattr(Simulation, "run_round", broken)
    with pytest.raises(RuntimeError, match="a fault of the code"):
        run("newsgroups", argv=small(options))
