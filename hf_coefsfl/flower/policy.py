"""What a client allows: a file at the site that no run can change. It is read, and obeyed, before any data is.

The node config names it (`policy="policy.yaml"`), or else the environment variable HF_COEFSFL_POLICY. Without a file
the defaults of `Policy` hold.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml

from .._suggest import did_you_mean
from ..methods.base import at_least
from ..split.surgery import Cut
from ..tasks import TASKS
from .errors import ClientFailure, Code
from .lasting import MOST_ROUNDS, MOST_UPLOADS
from .options import RunOptions

VARIABLE = "HF_COEFSFL_POLICY"
_MAY_CROSS = frozenset({"token_type_ids"})  # inputs that some models need again in the server's blocks


@dataclass(frozen=True)
class Policy:
    """The terms of a site. A run that does not meet one is refused as a whole."""

    tasks: list[str] | None = field(
        default=None,
        metadata={"help": "Tasks that may run. Default: all but those whose labels are the text itself (causal_lm)."},
    )
    columns: dict[str, str] | None = field(
        default=None,
        metadata={
            "help": "The column of each role, the label's included; no other is read. Default: the task's own names; "
            "a run that names others is refused."
        },
    )
    train_split: str = field(default="train", metadata={"help": "The split that is trained on."})
    min_noise: float = field(default=0.0, metadata={"help": "The least smashed_noise."})
    min_blocks: int = field(default=1, metadata={"help": "The fewest blocks in the client half."})
    max_rounds: int = field(
        default=MOST_ROUNDS, metadata={"help": "The most rounds, of a run and of all runs together."}
    )
    max_uploads: int = field(default=MOST_UPLOADS, metadata={"help": "How often the data of one round may be sent."})

    def __post_init__(self) -> None:
        """Check the terms, whatever the file held."""
        if self.tasks is not None:
            if not isinstance(self.tasks, list) or not self.tasks:
                raise ValueError(f"tasks={self.tasks!r} must be a list of tasks, such as [text_classification].")
            for name in self.tasks:
                if name not in TASKS:
                    raise ValueError(
                        f"tasks: {name!r} is not known.{did_you_mean(name, TASKS)} Choose from: {', '.join(TASKS)}."
                    )
        if self.columns is not None and not (
            isinstance(self.columns, dict)
            and self.columns
            and all(isinstance(word, str) and word for pair in self.columns.items() for word in pair)
        ):
            raise ValueError(f"columns={self.columns!r} must map roles to columns, such as text: note.")
        if not isinstance(self.train_split, str) or not self.train_split:
            raise ValueError(f"train_split={self.train_split!r} must be the name of a split.")
        noise = self.min_noise
        if isinstance(noise, bool) or not isinstance(noise, (int, float)) or not 0 <= noise < math.inf:
            raise ValueError(f"min_noise={noise!r} must be a finite number of at least 0.")
        for name in ("min_blocks", "max_rounds", "max_uploads"):
            at_least(name, getattr(self, name), 1)

    @classmethod
    def of(cls, node_config: Mapping[str, Any]) -> Policy:
        """Return the policy of a node; a file that is missing or wrong is an error, never no policy."""
        name = node_config.get("policy", os.environ.get(VARIABLE))
        if name is None:
            return cls()
        path = Path(str(name))
        try:
            found = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise ValueError(f"The policy {path} cannot be read: {error}") from error
        if not isinstance(found, dict):
            raise ValueError(f"The policy {path} must hold terms and their values, got {type(found).__name__}.")
        known = [f.name for f in fields(cls)]
        for key in found:
            if key not in known:
                raise ValueError(
                    f"The policy {path} has the term {key!r}.{did_you_mean(key, known)} There are: {', '.join(known)}."
                )
        try:
            return cls(**found)
        except ValueError as error:
            raise ValueError(f"The policy {path}: {error}") from error

    def check_run(self, options: RunOptions, own_data: bool) -> None:
        """Refuse a run whose options break a term. What is read of data that the run names is the run's matter."""
        task, config, arguments = options.task, options.config, options.arguments
        allowed = self.tasks or [name for name, other in TASKS.items() if not other.labels_are_text]
        if task.name not in allowed:
            why = " Its labels are the text itself, which the server reads." if task.labels_are_text else ""
            raise _refused(f"the task is {task.name}.{why} `tasks` allows {', '.join(allowed)}")
        if config.smashed_noise < self.min_noise:
            raise _refused(f"smashed_noise is {config.smashed_noise}, min_noise {self.min_noise}")
        if self.min_noise and getattr(arguments, "augment", False):
            raise _refused("min_noise is set, and each change of an image by `augment` has another draw of the noise")
        if config.num_rounds > self.max_rounds:
            raise _refused(f"the run has {config.num_rounds} rounds, max_rounds is {self.max_rounds}")
        if own_data and arguments.train_split != self.train_split:
            raise _refused(f"the run's train_split is {arguments.train_split!r}, the policy's {self.train_split!r}")
        if self.columns is not None:
            for role in self.columns:
                if role not in task.columns:
                    raise _refused(
                        f"`columns` names the role {role!r}, which {task.name} does not have."
                        f"{did_you_mean(role, task.columns)} It has {', '.join(task.columns)}"
                    )
            for role in task.columns:
                if role not in self.columns and role not in task.optional_roles:
                    raise _refused(f"`columns` names no column for the role {role!r} of {task.name}")
        if not own_data and self.columns is None:
            return
        for item in arguments.columns or ():
            role, _, column = item.partition("=")
            fit = (self.columns.get(role),) if self.columns is not None else (task.columns.get(role), role)
            if column not in fit:
                raise _refused(
                    f"the run takes the column {column!r} as {role!r}. `columns` of a policy file says which is meant"
                )

    def check_half(self, cut: Cut) -> None:
        """Refuse a half with too few blocks, as its activations tell more of the input, and one that sends inputs."""
        if cut.index < self.min_blocks:
            raise _refused(f"the client half has {cut.index} blocks, min_blocks is {self.min_blocks}")
        raw = sorted(set(cut.crossing) - _MAY_CROSS)
        if raw:
            raise _refused(f"the client half would send {', '.join(raw)} as they are")


def _refused(why: str) -> ClientFailure:
    return ClientFailure(Code.POLICY, f"The policy refuses the run: {why}.")
