"""Split federated fine-tuning of Hugging Face models with compensated feedback (CoeF-SFL)."""

from __future__ import annotations

import logging
import re
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .config import SplitFedConfig as SplitFedConfig
    from .methods import METHODS as METHODS
    from .methods import Method as Method
    from .protocol.injection import inject as inject
    from .protocol.messages import Feedback as Feedback
    from .protocol.messages import Message as Message
    from .protocol.messages import SmashedData as SmashedData
    from .split import SplitModel as SplitModel
    from .split import load_client as load_client
    from .split import load_server as load_server
    from .split import split_model as split_model
    from .split.lora import load_adapter as load_adapter
    from .trainer.trainer import SplitFedTrainer as SplitFedTrainer

    __version__: str

# Where each public name lives. They are imported when first asked for: a device that only passes on a part of a
# message need not load PyTorch for it.
_MODULES = {
    "METHODS": "methods",
    "Feedback": "protocol.messages",
    "Message": "protocol.messages",
    "Method": "methods",
    "SmashedData": "protocol.messages",
    "SplitFedConfig": "config",
    "SplitFedTrainer": "trainer",
    "SplitModel": "split",
    "inject": "protocol.injection",
    "load_adapter": "split.lora",
    "load_client": "split",
    "load_server": "split",
    "split_model": "split",
}
__all__ = sorted(_MODULES)

# PEFT imports bitsandbytes wherever it is installed, which then says that a kernel of the Hub for 4-bit inference in
# bfloat16 is missing.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return _version()
    if name in _MODULES:
        return getattr(import_module(f".{_MODULES[name]}", __name__), name)
    try:
        return import_module(f".{name}", __name__)  # hf_coefsfl.methods, say
    except ModuleNotFoundError as error:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from error


def _version() -> str:
    """Return the version of the clone that this file lies in, else of the installed package."""
    from importlib.metadata import PackageNotFoundError, version

    project = Path(__file__).parents[1] / "pyproject.toml"
    if project.is_file():
        found = re.search(r'^name = "hf_coefsfl"\nversion = "(.+)"$', project.read_text(encoding="utf-8"), re.MULTILINE)
        if found is not None:
            return found[1]
    try:
        return version("hf_coefsfl")
    except PackageNotFoundError:  # the folder alone was copied
        return "unknown"


def __dir__() -> list[str]:
    return [*globals(), *_MODULES, "__version__"]
