"""Nothing outside methods/ names a method: what the rest of the package must know of one, the class itself says."""

import io
import re
import tokenize
from pathlib import Path

import pytest

import hf_coefsfl
from hf_coefsfl.methods import METHODS

PACKAGE = Path(hf_coefsfl.__file__).parent
OURS = [cls for cls in METHODS.values() if cls.__module__.startswith("hf_coefsfl.")]


def named(source: str) -> set[str]:
    """Return the methods that a source file names, in its code, strings or comments.

    A name that is also an English word (reuse, oracle) counts as an identifier, or between quotes.
    """
    identifiers = {t.string for t in tokenize.generate_tokens(io.StringIO(source).readline) if t.type == tokenize.NAME}
    hits = set()
    for cls in OURS:
        plain = cls.name.isalpha()
        exact = {cls.__name__, cls.title} if plain else {cls.__name__, cls.title, cls.name}
        pattern = "|".join(rf"(?<!\w){re.escape(word)}(?!\w)" for word in exact)
        if re.search(rf"{pattern}|[\"'`]{cls.name}[\"'`]", source) or identifiers & {cls.name, cls.__name__}:
            hits.add(cls.name)
    return hits


def test_nothing_outside_names_a_method() -> None:
    files = [path for path in PACKAGE.rglob("*.py") if path.relative_to(PACKAGE).parts[0] != "methods"]
    assert len(files) > 50
    hits = {str(path.relative_to(PACKAGE)): found for path in files if (found := named(path.read_text()))}
    assert not hits, hits


@pytest.mark.parametrize("cls", OURS, ids=lambda cls: cls.name)
def test_a_name_would_be_noticed(cls: type) -> None:
    sources = [
        f'method = "{cls.name}"',
        f"from ..methods.{cls.name} import something",
        f"assert isinstance(method, {cls.__name__})",
        f"x = 1  # as {cls.title} does",
        f'help = "such as `{cls.name}`"',
    ]
    assert all(cls.name in named(source) for source in sources)
