"""Misplacements that the tests on the emulated device must notice: `python -m tests.support.accelerator.mutants`.

Each changes one line of a copy of the package, in which the cases that should notice it are run.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests.support.paths import ROOT

PROCESSES = "processes"  # the group of the test with two of them


@dataclass(frozen=True)
class Mutant:
    """A line, what becomes of it, and the group and case that should notice."""

    name: str
    file: str
    line: str
    becomes: str
    group: str
    case: str = ""

    def source(self, root: Path) -> str:
        return (root / "hf_coefsfl" / self.file).read_text()

    def noticed(self) -> str | None:
        """Return how the mutant was noticed; None: it was not."""
        with tempfile.TemporaryDirectory() as folder:
            copy, results = Path(folder) / "clone", Path(folder) / "results"
            results.mkdir()
            for part in ("hf_coefsfl", "tests", "benchmarks", "pyproject.toml"):
                (shutil.copytree if (ROOT / part).is_dir() else shutil.copy)(ROOT / part, copy / part)
            (copy / "hf_coefsfl" / self.file).write_text(self.source(ROOT).replace(self.line, self.becomes))
            return self._processes(copy) if self.group == PROCESSES else self._case(copy, results)

    def _case(self, copy: Path, results: Path) -> str | None:
        _run(copy, "tests.support.accelerator.process", self.group, str(results), self.case)
        told: str | None = json.loads((results / "results.json").read_text())[self.case]
        return told

    def _processes(self, copy: Path) -> str | None:
        test = "tests/test_accelerator.py::test_two_processes_on_two_devices_equal_one"
        status, said = _run(copy, "pytest", "-q", "-p", "no:cacheprovider", test)
        return next((line for line in said.splitlines() if "Error: " in line), "failed") if status else None


def _run(copy: Path, module: str, *arguments: str) -> tuple[int, str]:
    environment = {**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", module, *arguments]
    ended = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True)
    return ended.returncode, ended.stdout + ended.stderr


MUTANTS = [
    Mutant(
        "a batch stays on the CPU", "protocol/client_side.py",
        "to_device(t, device) if isinstance(t, Tensor) else t", "t",
        "methods", "coef_j as on the CPU",
    ),
    Mutant(
        "a method draws from a generator of the CPU", "protocol/context.py",
        "torch.Generator(self.device)", "torch.Generator()",
        "methods", "coef_j as on the CPU",
    ),
    Mutant(
        "a generator of the current device", "protocol/context.py",
        "torch.Generator(self.device)", "torch.Generator(self.device.type)",
        "methods", "coef_j resumes",
    ),
    Mutant(
        "dropout is seeded on the CPU only", "protocol/context.py",
        "derive_seed, set_random_state", "derive_seed, set_cpu_random_state as set_random_state",
        "options", "masks",
    ),
    Mutant(
        "the random state of the current device", "split/stand_ins.py",
        "set_rng_state(self._accelerator, self._device)", "set_rng_state(self._accelerator)",
        "split", "bert",
    ),
    Mutant(
        "generated labels on the CPU", "methods/gas.py",
        "to_device(torch.tensor(labels, dtype=target.dtype), target.device)",
        "torch.tensor(labels, dtype=target.dtype)",
        "methods", "gas as on the CPU",
    ),
    Mutant(
        "an auxiliary network stays on the CPU", "federation/simulation.py",
        "to_device(reports[client].kept.get(name, p), p.device)", "reports[client].kept.get(name, p)",
        "methods", "acc_sfl as on the CPU",
    ),
    Mutant(
        "a scale of int8 on the CPU", "protocol/codecs.py",
        "torch.ones_like(largest)", "torch.ones(largest.shape)",
        "options", "int8",
    ),
    Mutant(
        "the signs of a rotation stay on the CPU", "protocol/codecs.py",
        "to_device(torch.from_numpy(1.0 - 2.0 * ones).float(), device)", "torch.from_numpy(1.0 - 2.0 * ones).float()",
        "options", "int4",
    ),
    Mutant(
        "a file is written before the copy has arrived", "protocol/packing.py",
        "values.detach().contiguous().cpu()", 'values.detach().contiguous().to("cpu", non_blocking=True)',
        "options", "in a file",
    ),
    Mutant(
        "batches are not pinned", "federation/batches.py",
        "self.args.dataloader_pin_memory and pins_memory(self.args.device)", "False",
        "options", "workers",
    ),
    Mutant(
        "the probe leaves smashed data on the CPU", "analysis/staleness.py",
        "on_graph(smashed.to(self.context.device))", "on_graph(smashed)",
        "options", "measured",
    ),
    Mutant(
        "a report reads its numbers one by one", "federation/ledger.py",
        "on_host(link.observed, server.observed)", "link.observed, server.observed",
        "counts", "a client of vanilla",
    ),
    Mutant(
        "numbers are read before they have arrived", "protocol/devices.py",
        "torch.cat(away).cpu()", 'torch.cat(away).to("cpu", non_blocking=True)',
        "methods", "gas resumes",
    ),
    Mutant(
        "weights for the average are received on the CPU", "federation/averaging.py",
        "torch.empty(length, device=accelerator.device)", "torch.empty(length)",
        PROCESSES,
    ),
    Mutant(
        "a site's half stays on the CPU", "flower/client_node.py",
        "load_client(str(source)).to(self.config.device)", "load_client(str(source))",
        "sites", "coef_j on texts",
    ),
]  # fmt: skip


def main() -> int:
    missed = 0
    for mutant in MUTANTS:
        told = mutant.noticed()
        missed += told is None
        print(f"{mutant.name}: {'MISSED' if told is None else told.splitlines()[0][:200]}", flush=True)
    print(f"{len(MUTANTS) - missed} of {len(MUTANTS)} mutants were noticed")
    return missed


if __name__ == "__main__":
    sys.exit(main())
