"""The page of a comparison in a real browser, where one is installed."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from hf_coefsfl.compare import expand, parse_spec, write_report
from tests.support.comparisons import content, summary

_QUIET = (
    "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip
# What a reader does: sort by the score, twice, and ask for MiB. What the page says then goes to an element of its own.
_READER = """<script>{
const told = [], first = (css) => document.querySelector(css);
window.onerror = (message) => told.push("error: " + message);
const names = () => [...first("table").tBodies[0].rows].map((row) => row.cells[0].textContent).join(", ");
const head = first("table").tHead.rows[0].cells[1].querySelector("button");
for (let i = 0; i < 2; i++) { head.click(); told.push(head.closest("th").getAttribute("aria-sort") + ": " + names()); }
const drawn = () => document.querySelectorAll("svg path, svg polyline").length;
const axis = () => [...document.querySelectorAll("svg text")].some((text) => text.textContent.includes("MiB"));
told.push("lines: " + drawn(), "over MiB: " + axis());
document.querySelectorAll("input[type=radio]")[1].click();
told.push("over MiB: " + axis());
document.body.append(Object.assign(document.createElement("output"), { textContent: told.join(" | ") }));
}</script></body>"""


@pytest.fixture
def browser() -> str:
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        pytest.skip("no Chromium or Chrome is installed")
    return found


def test_a_reader_sorts_the_table_and_sees_the_curves(tmp_path: Path, browser: str) -> None:
    spec = parse_spec(content(learning_rates=[0.1], seeds=[0]), "t")
    cells = expand(spec)
    finished = {cell.first()[0].id: summary(value) for cell, value in zip(cells, (60.0, 50.0), strict=True)}
    write_report(spec, cells, tmp_path, finished, plots=False)
    page = tmp_path / "report.html"
    page.write_text(page.read_text().replace("</body>", _READER))
    command = [browser, *_QUIET, f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", page.as_uri()]
    shown = subprocess.run(command, capture_output=True, text=True).stdout
    (told,) = re.findall(r"<output>(.*?)</output>", shown)
    up, down, lines, before, after = told.replace("&lt;", "<").split(" | ")
    reuse, coef_d = "Gradient reuse (w/o comp.)", "CoeF-D"
    orders = {up.partition(":")[0]: up.partition(": ")[2], down.partition(":")[0]: down.partition(": ")[2]}
    assert orders == {"ascending": f"{coef_d}, {reuse}", "descending": f"{reuse}, {coef_d}"}
    assert int(lines.removeprefix("lines: ")) >= 2 and (before, after) == ("over MiB: false", "over MiB: true")
