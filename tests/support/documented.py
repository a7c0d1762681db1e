"""The method of docs/adding_a_method.md, for the tests that every method has to pass."""

import re
from types import ModuleType

from hf_coefsfl.methods import METHODS, Method
from tests.support.paths import ROOT


def documented_method() -> type[Method]:
    """Run the first code block of the page and return its class, which is not left registered."""
    source = re.findall(r"```python\n(.*?)```", (ROOT / "docs/adding_a_method.md").read_text(), flags=re.DOTALL)[0]
    module, known = ModuleType("page"), set(METHODS)
    exec(compile(source, "adding_a_method.md", "exec", dont_inherit=True), module.__dict__)
    (name,) = METHODS.keys() - known
    return METHODS.pop(name)
