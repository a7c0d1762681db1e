"""The documentation: its code runs, its links lead somewhere, its lines are short."""

import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import hf_coefsfl
from tests.support.paths import ROOT

PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in ("*.md", "docs/*.md", "recipes/*.md", "benchmarks/*.md", ".github/*.md")
    for path in ROOT.glob(pattern)
)


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", PAGES)
def test_links(name: str) -> None:
    page = ROOT / name
    prose = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)|src=\"([^\"]+)\"", prose):
        path, _, anchor = "".join(target).partition("#")
        if path.startswith("http"):
            continue
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), f"{name} links to {path}"
        assert not anchor or anchor in anchors(there), f"{name} links to {path}#{anchor}"


@pytest.mark.parametrize("name", PAGES)
def test_prose_wraps(name: str) -> None:
    lines = (ROOT / name).read_text().splitlines()
    assert not [line for line in lines if len(line) > 120 and not line.startswith("|")]


def test_the_readme_is_short_and_the_index_has_every_page() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150
    index = (ROOT / "docs" / "README.md").read_text()
    assert not [path.name for path in ROOT.glob("docs/*.md") if f"({path.name})" not in index and path.stem != "README"]


@pytest.mark.parametrize("name", PAGES)
def test_named_files_exist(name: str) -> None:
    """Files of the project that a page names in code quotes or commands are there."""
    pattern = r"\b(?:hf_coefsfl|tests|recipes|benchmarks|docs)/[\w./-]+\.(?:py|yaml|toml|md)\b"
    named = re.findall(pattern, (ROOT / name).read_text())
    assert not [path for path in named if "your_" not in path and not (ROOT / path).exists()]


@pytest.mark.parametrize("name", PAGES)
def test_named_tests_exist(name: str) -> None:
    """A page that names a test, as `room/test_file.py::test_name`, names one that is there."""
    at = ""
    for cell in re.findall(r"`((?:tests/)?\w+/test_\w+\.py(?:::test_\w+)?|::test_\w+)`", (ROOT / name).read_text()):
        path, _, test = cell.partition("::")
        at = path.removeprefix("tests/") or at
        source = ROOT / "tests" / at
        assert source.is_file(), f"{name} names {at}"
        assert not test or f"def {test}(" in source.read_text(), f"{name} names {at}::{test}"


@pytest.mark.slow
def test_the_site(tmp_path: Path) -> None:
    """It builds without a warning (a dead link, a page that the menu lacks), and a reader needs no network."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    pages = {path.relative_to(tmp_path).as_posix(): path.read_text() for path in tmp_path.rglob("*.html")}
    loaded = r"<(?:script|img|iframe)[^>]* src=\"?https?:|<link[^>]* rel=\"?(?:stylesheet|preconnect)[^>]*https?:"
    assert not [name for name, text in pages.items() if re.search(loaded, text)]
    assert not [name for name in hf_coefsfl.__all__ if f">{name}<" not in pages["api.html"]]
    assert {"notebook.ipynb.html", "project/recipes/mnli_coefw.py.html", "project/CHANGELOG.html"} <= set(pages)
    assert '<a href="project/recipes/mnli_coefw.py.html">' in pages["tasks.html"]
    assert "save_model" in (tmp_path / "search" / "search_index.json").read_text()


def test_the_journey_passes_through_code_that_exists() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    rows = re.findall(r"^\|[^|]*\| `([\w/]+)\.py` \| `([\w.]+)` \|", page, flags=re.MULTILINE)
    assert len(rows) > 30
    for path, name in rows:
        found = import_module(f"hf_coefsfl.{path.replace('/', '.')}")
        for part in name.split("."):
            found = getattr(found, part)
    drawn = re.findall(r"[\w/]+\.py", (ROOT / "docs" / "journey.svg").read_text())
    assert len(drawn) > 15
    assert not [path for path in drawn if not (ROOT / "hf_coefsfl" / path).exists()]
