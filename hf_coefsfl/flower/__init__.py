"""The deployment on Flower: a ServerApp and a ClientApp that run the methods of this package over a network.

An app names them in its pyproject.toml, `serverapp = "hf_coefsfl.flower:server_app"` and
`clientapp = "hf_coefsfl.flower:client_app"`, or imports them. docs/deployment.md says how to run it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .client import client_app as client_app
    from .server import server_app as server_app

_MODULES = {"client_app": "client", "server_app": "server"}  # a client's device never imports the server


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(f".{_MODULES[name]}", __name__), name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "flwr":
            raise
        raise ModuleNotFoundError(
            "The deployment needs Flower: pip install 'hf_coefsfl[flower]'.", name=error.name
        ) from error
