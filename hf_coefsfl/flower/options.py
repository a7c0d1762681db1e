"""The options of a deployed run: Flower's run config, and the node config of each client."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from .._suggest import did_you_mean
from ..config import SplitFedConfig, read_size
from ..methods.base import at_least
from ..tasks import TASKS, Task, TaskArguments
from ..tasks.options import parse_values

# A restarted server resumes, a lost client does not end the run, and no update counts for much more than the others.
_DEFAULTS = {"on_client_failure": "skip", "resume_from_checkpoint": "last", "save_steps": 1, "client_bound": 5.0}


_REFUSED = {
    "staleness_probe": "it needs both sides in one process; use a simulation",
    "count_flops": "it needs both sides in one process; use a simulation",
    "stacked_clients": "each client trains on a machine of its own",
    "client_dropout_rate": "real clients drop out by themselves",
    "torch_compile": "a client's process lives for one message only",
}


# What a client takes from the run config: how it trains, and how its own data is read. All else is the server's, and
# whatever it says changes nothing at a client: no path, no code, no split or label that the site did not choose.
_OF_CLIENTS = frozenset({
    "task", "method", "method_kwargs", "num_rounds", "warmup_rounds", "local_epochs", "dropout", "exchange_dtype",
    "exchange_codec", "adapter_codec", "smashed_noise", "per_device_train_batch_size", "dataloader_drop_last",
    "train_sampling_strategy", "optim", "optim_args", "adam_beta1", "adam_beta2", "adam_epsilon",
    "weight_decay", "max_grad_norm", "seed", "data_seed", "bf16", "tf32", "use_cpu", "columns", "train_split",
    "max_train_samples", "max_length", "stride", "augment",
})  # fmt: skip
# And this, if the site has no data of its own but takes its part of the run's.
_OF_PARTS = frozenset({
    "dataset_name", "dataset_config_name", "client_half", "num_clients", "partition", "partition_column",
    "dirichlet_alpha", "min_client_samples",
})  # fmt: skip
# What clients of a language model must know.
LABELS_ARE_TEXT = "The labels of a language model are the text itself, so the server can read the clients' texts."


@dataclass
class DeploymentOptions:
    """What a deployed run needs to know beyond what a simulated one does. Every field may stand in the run config."""

    task: str = field(default="mnli", metadata={"help": "One of the tasks of `coefsfl train`."})
    min_clients: int = field(
        default=2, metadata={"help": "Clients that must be connected to begin, and that must remain for an average."}
    )
    round_timeout: float = field(
        default=3600.0, metadata={"help": "Seconds after which a round goes on without those who have not answered."}
    )
    start_timeout: float = field(default=600.0, metadata={"help": "Seconds to wait for min_clients at the start."})
    over_sampling: float = field(
        default=0.0, metadata={"help": "Ask this share of clients more than needed; the round ends without the last."}
    )
    chunk_size: int | str = field(default="16MiB", metadata={"help": "Largest part of a payload in one message."})
    max_payload: int | str = field(
        default="16GiB", metadata={"help": "Largest payload that is accepted from the other side."}
    )
    max_samples: int = field(
        default=1_000_000, metadata={"help": "Most samples a client may have: what it may cost the server."}
    )
    labels_reveal_text: bool = field(
        default=False,
        metadata={"help": "Deploy a language model, although the labels that clients send are their texts."},
    )

    def __post_init__(self) -> None:
        """Check the options before anything is built."""
        if self.task not in TASKS:
            raise ValueError(
                f"task={self.task!r} is not known.{did_you_mean(self.task, TASKS)} Choose one of: {', '.join(TASKS)}."
            )
        at_least("min_clients", self.min_clients, 1)
        at_least("max_samples", self.max_samples, 1)
        for name in ("round_timeout", "start_timeout"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
                raise ValueError(f"{name}={value!r} must be a number of seconds above 0.")
        share = self.over_sampling
        if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 <= share < float("inf"):
            raise ValueError(f"over_sampling={self.over_sampling!r} must be a share of at least 0, such as 0.2.")
        if not isinstance(self.labels_reveal_text, bool):
            raise ValueError(f"labels_reveal_text={self.labels_reveal_text!r} must be true or false.")
        for name in ("chunk_size", "max_payload"):
            size = read_size(name, getattr(self, name))
            if not size:
                raise ValueError(f"{name}={getattr(self, name)!r} must be above 0.")
            setattr(self, name, size)


@dataclass(frozen=True)
class RunOptions:
    """All options of a deployed run."""

    deployment: DeploymentOptions
    task: Task
    arguments: TaskArguments
    config: SplitFedConfig
    client_half: str | None  # where clients find their half, unless their node config says so


def read_run_config(given: Mapping[str, Any]) -> RunOptions:
    """Return the options of a run config; what is wrong with it is one ValueError.

    Its keys are the options of `coefsfl train TASK` and those of `DeploymentOptions`, with underscores or hyphens.
    An empty text stands for an option that is not given, as every key must have a value in a run config.
    """
    options: dict[str, Any] = {key.replace("-", "_"): value for key, value in given.items() if value != ""}
    overwrites = str(options.get("overwrite_output_dir", "")).lower() == "true"  # then there is nothing to resume
    defaults: dict[str, Any] = dict(_DEFAULTS)
    if overwrites:
        del defaults["resume_from_checkpoint"]
    options = defaults | options
    if "hub_token" in options:
        raise ValueError("hub_token would go to every client. Set HF_TOKEN where the server runs.")
    ours = {f.name for f in fields(DeploymentOptions)}
    deployment = DeploymentOptions(**{name: value for name, value in options.items() if name in ours})
    half = options.pop("client_half", None)
    task = TASKS[deployment.task]
    values = {name: value for name, value in options.items() if name not in ours}
    arguments, config = parse_values(task, values, "run config")
    for name, why in _REFUSED.items():
        if getattr(config, name) and getattr(config, name) != getattr(SplitFedConfig, name):
            raise ValueError(f"{name}={getattr(config, name)!r} cannot be deployed: {why}.")
    if not config.make_method().deployable:
        raise ValueError(
            f"method={config.method!r} cannot be deployed: its clients hold a copy of blocks of the server. Use a "
            "simulation, or another method."
        )
    return RunOptions(deployment, task, arguments, config, half)


def read_client_config(given: Mapping[str, Any], own_data: bool) -> RunOptions:
    """Return what a client takes from a run config; `own_data` is whether it has any, or the run names it."""
    taken = _OF_CLIENTS if own_data else _OF_CLIENTS | _OF_PARTS
    return read_run_config({key: value for key, value in given.items() if key.replace("-", "_") in taken})
