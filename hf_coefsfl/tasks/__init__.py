"""The tasks: what is fine-tuned on which data, and how it is measured. `TASKS` maps a name to its `Task`."""

from typing import TYPE_CHECKING, Any

from .arguments import TaskArguments
from .presets import TASKS, Task

if TYPE_CHECKING:
    from .base import FineTuningTask, Prepared

__all__ = ["TASKS", "FineTuningTask", "Prepared", "Task", "TaskArguments"]


def __getattr__(name: str) -> Any:
    """Import what needs PyTorch when it is asked for: the command line only needs the names."""
    if name in __all__:
        from . import base

        return getattr(base, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
