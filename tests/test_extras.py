"""The core trains, writes a card and reports a comparison without what the extras install."""

import subprocess
import sys

import tomllib

from tests.support.paths import ROOT

SCRIPT = """
import sys
from pathlib import Path

sys.modules |= dict.fromkeys(("matplotlib", "sklearn", "flwr", "bitsandbytes"))  # None: importing it raises ImportError

from hf_coefsfl.compare import expand, parse_spec, write_report
from tests.support.comparisons import content, summary
from tests.support.federated import trainer

folder = Path(sys.argv[1])
run = trainer(folder / "run", num_rounds=2, staleness_probe=1, eval_strategy="steps", eval_steps=1)
run.train()
run.save_model()
run.create_model_card()
spec = parse_spec(content(), "test")
cells = expand(spec)
(folder / "report").mkdir()
write_report(spec, cells, folder / "report", {r.id: summary(0.5) for c in cells for r in c.first()})
try:
    run.plot_partition(folder / "partition.png")
except ImportError as error:
    print(error)
"""


def test_the_core_runs_without_the_extras(tmp_path):
    done = subprocess.run([sys.executable, "-c", SCRIPT, tmp_path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    names = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")}
    assert {"run/README.md", "run/adapter_model.safetensors", "run/staleness.json", "report/report.html"} <= names
    assert not [name for name in names if name.endswith(".png")]
    card = (tmp_path / "run" / "README.md").read_text()
    assert "accuracy" in card and "![" not in card
    assert done.stderr.count("Plots are skipped. Plots need Matplotlib") == 1  # not once a plot
    assert done.stdout.splitlines()[-1].endswith("pip install 'hf_coefsfl[plots]'")


def test_the_lower_bounds_are_those_that_are_tried():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = (ROOT / "constraints-lowest.txt").read_text().splitlines()
    tried = [line.replace("==", ">=") for line in lines if not line.startswith("#")]
    assert sorted(project["dependencies"]) == sorted(tried)
