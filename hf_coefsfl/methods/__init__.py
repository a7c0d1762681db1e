"""The training methods, one file each. `METHODS` maps a name to its class."""

from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from .base import METHODS, Method, make_method, ordered_methods

for _file in iter_modules(__path__):
    if not _file.ispkg:
        import_module(f".{_file.name}", __name__)

DEFAULT_METHOD = "coef_w"
WARM_UP_METHOD = "vanilla"  # of the first rounds, whatever the method of the run

__all__ = ["DEFAULT_METHOD", "METHODS", "WARM_UP_METHOD", "Method", "make_method", "ordered_methods"]


def __getattr__(name: str) -> Any:
    """Return the class of a method by its own name: `from hf_coefsfl.methods import GradientReuse`."""
    for cls in METHODS.values():
        if cls.__name__ == name:
            return cls
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
