"""Arguments of a task."""

from typing import Any

from hf_coefsfl.tasks import TASKS


def arguments(name: str, **options: Any) -> Any:
    return TASKS[name].arguments_class(**options)
