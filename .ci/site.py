"""Hooks of the documentation site: what GitHub does with docs/ and MkDocs does not.

- Links out of docs/ (`../recipes/mnli_coefw.py`) lead to a page of the site that shows the file or lists the folder.
- docs/notebook.ipynb is a page.
- A list needs no blank line before it.
"""

import json
import os
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
FENCE = re.compile(r"^(```.*?^```)", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"(?<=\]\()(?!https?:|mailto:|#)([^)\s]+)(?=\))")
IMAGE = re.compile(r'<img src="([^"]+)"[^>]* alt="([^"]+)">')
PICTURES = (".png", ".svg")
ITEM = re.compile(r"^ *(?:[-*]|\d+\.) ")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for the notebook and for everything outside docs/ that a page links to, or such a page in turn."""
    notebook = ROOT / "docs" / "notebook.ipynb"
    files.append(File.generated(config, "notebook.ipynb.md", content=read_notebook(notebook)))
    pages = [ROOT / "docs" / file.src_uri for file in files.documentation_pages() if file.generated_by is None]
    seen = set(pages)
    wanted = [ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *(path for page in pages for path in linked(page))]
    while wanted:
        path = wanted.pop().resolve()
        if path in seen or path.is_relative_to(ROOT / "docs") or not path.exists():  # a wrong link is MkDocs' to report
            continue
        seen.add(path)
        if path.suffix in PICTURES:
            files.append(File.generated(config, uri(path), abs_src_path=str(path)))
            continue
        file = File.generated(config, uri(path), content=shown(path))
        if path.name not in ("CONTRIBUTING.md", "CHANGELOG.md"):
            file.inclusion = InclusionLevel.NOT_IN_NAV
        files.append(file)
        wanted += linked(path)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point the links of a page into the site, and set lists apart."""
    source = original(page.file.src_uri)
    parts = FENCE.split(IMAGE.sub(r"![\2](\1)", markdown))
    parts[::2] = [separate_lists(LINK.sub(lambda link: relink(link[1], source), prose)) for prose in parts[::2]]
    return "".join(parts)


def linked(page: Path) -> list[Path]:
    """Return what a Markdown page links to, without code blocks."""
    if page.is_dir() and (page / "README.md").exists():
        page = page / "README.md"
    if not is_page(page):
        return []
    prose = IMAGE.sub(r"![\2](\1)", FENCE.sub("", page.read_text(encoding="utf-8")))
    return [page.parent / target.partition("#")[0] for target in LINK.findall(prose)]


def relink(target: str, page: Path) -> str:
    """Return a link of a page of the project as the site's page needs it."""
    path, hash_, anchor = target.partition("#")
    there = (page.parent / path).resolve()
    return os.path.relpath(uri(there), Path(uri(page)).parent) + hash_ + anchor


def uri(path: Path) -> str:
    """Return where a file or folder of the project lies in the site's sources."""
    docs = ROOT / "docs"
    if path.is_relative_to(docs) and path != docs:
        inside = path.relative_to(docs).as_posix()
        return inside + ".md" if path.suffix == ".ipynb" else inside
    if path == docs:
        return "README.md"
    inside = "project/" + path.relative_to(ROOT).as_posix()
    if path.is_dir():
        return f"{inside}/README.md"
    return inside if is_page(path) or path.suffix in PICTURES else inside + ".md"


def is_page(path: Path) -> bool:
    """Tell Markdown to read from the templates that the package holds."""
    return path.suffix == ".md" and not path.is_relative_to(ROOT / "hf_coefsfl")


def original(src_uri: str) -> Path:
    """Return the file of the project that a page of the site shows."""
    if not src_uri.startswith("project/"):
        return ROOT / "docs" / src_uri
    path = ROOT / src_uri.removeprefix("project/")
    if path.exists():
        return path
    return path if path.name == "README.md" else path.with_suffix("")


def shown(path: Path) -> str:
    """Return the page of a file or folder: Markdown as it is, other text as a code block, a folder as a list."""
    if path.is_dir():
        if (path / "README.md").exists():
            return (path / "README.md").read_text(encoding="utf-8")
        names = sorted(p.name + "/" * p.is_dir() for p in path.iterdir() if not p.name.startswith(("_", ".")))
        return "\n".join([f"# {path.relative_to(ROOT)}/", "", *(f"- `{name}`" for name in names)])
    text = path.read_text(encoding="utf-8")
    if is_page(path):
        return text
    language = {".py": "python", ".yaml": "yaml", ".toml": "toml", ".json": "json", ".md": "markdown"}.get(
        path.suffix, "text"
    )
    head = f"---\nsearch: {{exclude: true}}\n---\n\n# {path.relative_to(ROOT)}\n\n"
    return f"{head}````{language}\n{text}````\n"


def separate_lists(prose: str) -> str:
    """Return prose with a blank line between a paragraph and the list that follows it."""
    lines: list[str] = []
    for line in prose.split("\n"):
        before = lines[-1] if lines else ""
        if ITEM.match(line) and before.strip() and not ITEM.match(before) and not before.startswith((" ", "|")):
            lines.append("")
        lines.append(line)
    return "\n".join(lines)


def read_notebook(path: Path) -> str:
    """Return a notebook without outputs as Markdown."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    texts = [(cell["cell_type"], "".join(cell["source"])) for cell in cells]
    return "\n\n".join(text if kind == "markdown" else f"```python\n{text}\n```" for kind, text in texts)
