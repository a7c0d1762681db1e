"""The specs that come with the package, found by name from a clone and from an installed wheel."""

from __future__ import annotations

from pathlib import Path

from ._suggest import did_you_mean

_FOLDERS = ("compare", "paper", "study")


def recipes_folder() -> Path:
    """Return the folder of the recipes: in the package of a wheel, beside the package of a clone."""
    package = Path(__file__).parent
    inside = package / "recipes"  # setup.py puts it there
    return inside if inside.is_dir() else package.parent / "recipes"


def specs() -> dict[str, Path]:
    """Return the specs of comparisons by name."""
    return {path.stem: path for folder in _FOLDERS for path in sorted((recipes_folder() / folder).glob("*.yaml"))}


def find_spec(name: str | Path) -> Path:
    """Return the file of a spec: an existing file, or one that comes with the package, by its name or path there.

    `tiny`, `tiny.yaml`, `compare/tiny.yaml` and `recipes/compare/tiny.yaml` are the same spec, in any folder.
    """
    path, known = Path(name), specs()
    if path.is_file():
        return path
    found = known.get(path.stem) if path.suffix in ("", ".yaml") else None
    if found is not None and found.with_suffix("").parts[-len(path.parts) :] == path.with_suffix("").parts:
        return found
    raise ValueError(
        f"The spec {str(name)!r} cannot be read: it does not exist.{did_you_mean(path.stem, known)} Give the path "
        f"of a YAML file, or one of the specs that come with the package: {', '.join(known)}."
    )
