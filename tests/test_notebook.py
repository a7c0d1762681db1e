"""The notebook runs, shows one table and its plots, and is committed without outputs."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from tests.support.paths import ROOT

NOTEBOOK = ROOT / "docs" / "notebook.ipynb"


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def test_it_is_short_and_has_no_outputs() -> None:
    cells = code_cells(nbformat.read(NOTEBOOK, as_version=4))
    assert not [cell for cell in cells if cell.outputs or cell.execution_count]
    assert sum(bool(line.strip()) for cell in cells for line in cell.source.splitlines()) <= 35


@pytest.mark.slow
def test_from_a_csv_to_an_adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kernels" / "python3").mkdir(parents=True)  # of this Python, whatever is installed beside it
    command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    kernel = {"argv": command, "display_name": "Python 3", "language": "python"}
    (tmp_path / "kernels" / "python3" / "kernel.json").write_text(json.dumps(kernel))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    NotebookClient(notebook, timeout=1000, resources={"metadata": {"path": str(tmp_path)}}).execute()

    outputs = [output for cell in code_cells(notebook) for output in cell.outputs]
    data = [output.data for output in outputs if "data" in output]
    (table,) = [shown["text/html"] for shown in data if "text/html" in shown]
    assert "<th>Accuracy</th>" in table and "[8/8 " in table
    assert len(re.findall("<tr>", table)) == 4  # a row for each evaluation, none for a round or a client
    assert not [kind for shown in data for kind in shown if "widget" in kind]
    assert sum("image/png" in shown for shown in data) == 2
    printed = "".join(output.text for output in outputs if output.output_type == "stream")
    printed = re.sub(r".*TqdmWarning: IProgress not found.*\n.*\n", "", printed)  # without ipywidgets
    # Bitsandbytes is loaded by PEFT, which the notebook imports before the package that would keep it quiet.
    printed = re.sub(r"Failed to load CPU gemm_4bit_forward.*\n", "", printed)
    share = re.fullmatch(r"\s*accuracy ([\d.]+)% on the test rows\n", printed)
    assert share and float(share[1]) > 40, printed  # no bar, no warning, only what the last cell prints
    for name in ("adapter_model.safetensors", "client/adapter_model.safetensors", "README.md", "communication.json"):
        assert (tmp_path / "digits-adapter" / name).is_file()
