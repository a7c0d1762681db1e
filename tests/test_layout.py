"""The rules of the tests themselves: small files, in the rooms of the package, that do not import each other."""

import ast
from pathlib import Path

import hf_coefsfl
from tests.support.paths import ROOT

FILES = sorted((ROOT / "tests").rglob("*.py"))
LONGEST = 350  # lines
ROOMS = {path.name for path in Path(hf_coefsfl.__file__).parent.iterdir() if (path / "__init__.py").exists()}


def imported(path: Path) -> set[str]:
    nodes = list(ast.walk(ast.parse(path.read_text())))
    return {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names} | {
        f"{node.module}.{alias.name}" for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names
    }


def test_no_test_imports_a_test() -> None:
    found = {(path.name, name) for path in FILES for name in imported(path) if name.startswith("tests.")}
    assert found and not {(path, name) for path, name in found if not name.startswith("tests.support.")}


def test_files_are_small() -> None:
    sizes = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in FILES}
    assert not {name: size for name, size in sizes.items() if size > LONGEST}


def test_each_folder_is_a_room() -> None:
    folders = {path.parent.relative_to(ROOT / "tests").as_posix() for path in FILES}
    assert folders - {".", "support", "support/accelerator", "support/light"} <= ROOMS
