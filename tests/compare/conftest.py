"""A comparison whose runs are a script of a few lines."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import yaml

from hf_coefsfl.compare import runner
from tests.support.comparisons import content

# Writes its id to a journal when the work is done, then the summary; FAKE_FAIL names a method
# that fails, FAKE_WAIT a file whose coming it waits for.
WORKER = """
import json, os, sys, time
task, path = sys.argv[1:]
o = json.load(open(path))
folder = o["output_dir"]
print("working", o["method"], os.environ["OMP_NUM_THREADS"], flush=True)
while "FAKE_WAIT" in os.environ and not os.path.exists(os.environ["FAKE_WAIT"]):
    time.sleep(0.005)
if o["method"] == os.environ.get("FAKE_FAIL"):
    sys.exit("the reason of the failure")
score = 100 * o["learning_rate"] + o["seed"] + len(o["method"])
curve = [{"round": 1, "mib": 1.5, "scores": {"accuracy": 1.0}}, {"round": 2, "mib": 3, "scores": {"accuracy": score}}]
with open(os.path.join(os.path.dirname(folder), "journal"), "a") as journal:
    journal.write(os.path.basename(folder) + "\\n")
with open(folder + "/summary.tmp", "w") as file:
    json.dump({"task": task, "method": o["method"], "scores": {"accuracy": score}, "curve": curve, "mib": 3.0,
               "transfers": 4, "seconds": 1.0, "versions": {"torch": "<2>"}}, file)
os.replace(folder + "/summary.tmp", folder + "/summary.json")
"""


@pytest.fixture
def worker(tmp_path: Path) -> tuple[str, ...]:
    (tmp_path / "worker.py").write_text(WORKER)
    return sys.executable, "-S", str(tmp_path / "worker.py")


@pytest.fixture
def command(tmp_path: Path, worker: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A comparison of four runs with the worker above, its report beside the spec."""
    monkeypatch.setattr(runner, "WORKER", worker)
    monkeypatch.setattr(runner, "_POLL", 0.02)
    (tmp_path / "few.yaml").write_text(yaml.safe_dump(content(learning_rates=[0.1], seeds=[0, 1])))
    return ["compare", str(tmp_path / "few.yaml"), "--output_dir", str(tmp_path / "out")]
