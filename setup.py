"""What pyproject.toml cannot say: the recipes lie in the wheel, and the README has no links to files of the clone."""

import re
from pathlib import Path

from setuptools import find_packages, setup

NOTE = "Files that are named here are in the source distribution.\n"


def long_description(readme: str) -> str:
    """Return the README for a package index: relative links become their text, pictures of the clone go."""
    text = re.sub(r'<img src="(?!https?:)[^>]*>\n*', "", readme)
    text = re.sub(r"!\[[^\]]*\]\((?!https?:)[^)]*\)\n*", "", text)
    text = re.sub(r"\[([^\]]*)\]\((?!https?:|#)[^)]*\)", r"\1", text)
    title, rest = text.split("\n", 1)
    return f"{title}\n\n{NOTE}{rest}"


folders = sorted({path.parent.as_posix() for path in Path("recipes").rglob("*.*") if "__pycache__" not in path.parts})
setup(
    long_description=long_description(Path("README.md").read_text(encoding="utf-8")),
    long_description_content_type="text/markdown",
    packages=[*find_packages(include=["hf_coefsfl*"]), *(f"hf_coefsfl.{f.replace('/', '.')}" for f in folders)],
    package_dir={"hf_coefsfl.recipes": "recipes"},
)
