"""The configuration of a split federated run."""

from __future__ import annotations

import logging
import math
import os
from dataclasses import dataclass, field
from numbers import Real

import torch
from accelerate.utils import convert_file_size_to_int, parse_flag_from_env
from torch.optim import SGD
from transformers import SchedulerType, Trainer, TrainingArguments, get_scheduler
from transformers.training_args import OptimizerNames

from ._bfloat16 import check_bfloat16
from ._suggest import did_you_mean
from .methods import DEFAULT_METHOD, METHODS, WARM_UP_METHOD, Method, make_method, ordered_methods
from .methods.base import at_least
from .protocol.adapters import ADAPTER_CODECS, AS_THEY_ARE
from .protocol.codecs import CODECS, COMPACT, KINDS, for_all_kinds, resolve_codecs

logger = logging.getLogger(__name__)
_CHOICES: dict[str, tuple[str, ...]] = {
    "partition": ("iid", "dirichlet", "column"),
    "dropout": ("synced", "off"),
    "head": ("full", "lora", "frozen"),
    "adapter_codec": ADAPTER_CODECS,
    "on_client_failure": ("raise", "skip"),
    "aggregation": ("mean", "trimmed_mean", "median", "krum"),
    "train_sampling_strategy": ("random", "group_by_length"),
    "optim": tuple(name.value for name in OptimizerNames),
    "lr_scheduler_type": tuple(name.value for name in SchedulerType),
}
_NUMBERS = (
    "participation", "client_dropout_rate", "dirichlet_alpha", "learning_rate", "max_grad_norm", "weight_decay",
    "smashed_noise", "client_bound",
)  # fmt: skip
_AT_LEAST_ONE = (
    "cut", "num_rounds", "local_epochs", "min_client_samples", "per_device_train_batch_size", "hostile_clients",
    "stacked_clients",
)  # fmt: skip
_ELEMENTWISE = ("adamw_torch", "adamw_torch_fused", "adagrad", "rmsprop", "sgd")  # so that stacked weights do not mix
_HUB_STRATEGIES = ("end", "every_save")
_COMPILE_MODES = ("default", "max-autotune-no-cudagraphs")
_SHARDING = {
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_FSDP": "FSDP",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
}


@dataclass(repr=False)  # that of TrainingArguments masks tokens
class SplitFedConfig(TrainingArguments):
    r"""Arguments of [`SplitFedTrainer`]: those of the federation, and every argument of `TrainingArguments`.

    A Trainer step is one communication round, so `logging_steps`, `eval_steps` and `save_steps` count rounds, and
    `max_steps` is `num_rounds`. The defaults are those of the paper, but for the method, which is our own. These differ
    from `TrainingArguments`: `per_device_train_batch_size` 32, `learning_rate` 5e-4 (of the local updates),
    `lr_scheduler_type` "constant", `max_grad_norm` 0 (no clipping), `logging_steps` 1, `save_steps` 10, `report_to`
    "none". `weight_decay` (0) applies to all trained parameters of both sides; `data_seed`, if given, governs the
    partition and the batches.

    `push_to_hub=True` uploads the same files at every save (`hub_strategy` "every_save") or when `save_model` or
    `push_to_hub` is called ("end"): weights, both halves, model card, `communication.json` and `training_args.json`,
    never a pickle. The strategies that upload checkpoints are refused, as these hold pickles.
    """

    _VALID_DICT_FIELDS = [*TrainingArguments._VALID_DICT_FIELDS, "method_kwargs", "exchange_codec"]

    # --- Method ---
    method: str = field(default=DEFAULT_METHOD, metadata={"help": "Training method; `METHODS` lists them."})
    method_kwargs: dict | str | None = field(
        default=None, metadata={"help": 'Options of the method, e.g. {"server_passes": 1}.'}
    )
    warmup_rounds: int = field(
        default=3, metadata={"help": f"First rounds, which run {METHODS[WARM_UP_METHOD].title} whatever the method."}
    )

    staleness_probe: int = field(
        default=0,
        metadata={"help": "Measure the staleness of gradients every so many rounds (1: every round; 0: never)."},
    )

    count_flops: bool = field(
        default=False, metadata={"help": "Count the operations of both sides on one client a round, and log them."}
    )

    # --- Split ---
    cut: int = field(default=2, metadata={"help": "Number of blocks on the client, from the first one on."})
    blocks: str | None = field(
        default=None, metadata={"help": "Dotted path of the list of blocks, if it cannot be detected."}
    )
    dropout: str = field(
        default="synced",
        metadata={"help": "synced: every pass over a batch in a round draws the same masks; off: no dropout."},
    )

    # --- What is trained ---
    full_finetuning: bool = field(
        default=False, metadata={"help": "Train every weight of the model instead of a LoRA adapter."}
    )
    head: str | None = field(
        default=None,
        metadata={
            "help": "Task head beside LoRA: full, lora or frozen. Default: full for a task's own head, frozen for the "
            "output embeddings of a language model."
        },
    )

    keep_server_optimizer: bool = field(
        default=False,
        metadata={
            "help": "Average the state of the server's optimizer over the clients of a round and begin the next round "
            "with it, instead of a fresh one."
        },
    )

    # --- What crosses the cut ---
    exchange_dtype: str = field(
        default="float32",
        metadata={
            "help": "Codec of smashed data, gradients and curvature, as they are sent and kept: "
            f"{', '.join(for_all_kinds())}. float32 is as computed."
        },
    )
    exchange_codec: dict | str | None = field(
        default=None,
        metadata={
            "help": f'Codecs by kind ({", ".join(KINDS)}), e.g. {{"gradients": "topk8"}}; other kinds have '
            f"exchange_dtype. Or one name for all; {COMPACT} is the setting for few bytes."
        },
    )
    adapter_codec: str = field(
        default=AS_THEY_ARE,
        metadata={
            "help": "Codec of the weights of federated averaging (adapters, trained heads, auxiliary networks): "
            f"{', '.join(ADAPTER_CODECS)}. Clients then send updates, and what rounding takes from one comes with the "
            "next. float32 is as trained."
        },
    )
    exchange_memory_limit: int | str | None = field(  # in the order that HfArgumentParser understands
        default=None,
        metadata={
            "help": "Memory for the exchange of a client's round in a process, e.g. 2GiB; what exceeds it goes to a "
            "file in output_dir. Default: no limit."
        },
    )

    smashed_noise: float = field(
        default=0.0,
        metadata={
            "help": "Standard deviation of Gaussian noise that clients add to smashed data before it is sent, the same "
            "in every pass over a batch in a round. No guarantee of privacy by itself."
        },
    )

    # --- Federation ---
    num_clients: int | None = field(
        default=None,
        metadata={"help": "Number of clients. Default: 50; given by the data for partition='column' and client lists."},
    )
    participation: float = field(default=0.1, metadata={"help": "Share of the clients that a round samples."})
    num_rounds: int = field(default=100, metadata={"help": "Number of communication rounds."})
    local_epochs: int = field(default=1, metadata={"help": "Epochs of local updates in a round."})
    stacked_clients: int = field(
        default=1,
        metadata={
            "help": "Clients of a round that train at once, if they have as many samples; 1: one after the other. An "
            "accelerator then has fewer launches. Results differ by rounding."
        },
    )

    on_client_failure: str = field(
        default="raise",
        metadata={"help": "A client whose data raises or whose round gives NaN: raise, or skip it in the average."},
    )
    client_dropout_rate: float = field(
        default=0.0, metadata={"help": "Share of the sampled clients that is lost in a round, to simulate it."}
    )

    # --- Hostile clients ---
    aggregation: str = field(
        default="mean",
        metadata={"help": "How clients' weights become one: mean (by samples), trimmed_mean, median or krum."},
    )
    hostile_clients: int = field(
        default=1, metadata={"help": "Hostile clients in a round that trimmed_mean and krum are to withstand."}
    )
    client_bound: float = field(
        default=0.0,
        metadata={
            "help": "The update of a client counts for at most this many times the median client of the round: larger "
            "ones are scaled down. 0: no bound."
        },
    )
    max_lost_rounds: int = field(
        default=3,
        metadata={"help": "End the run after so many rounds in a row in which too few clients were left; 0: never."},
    )

    # --- Partition of a single dataset ---
    partition: str = field(
        default="iid", metadata={"help": "iid, dirichlet (label skew) or column (one client per value)."}
    )
    partition_column: str | None = field(
        default=None, metadata={"help": "Column to skew or to split by. Default: labels or label."}
    )
    dirichlet_alpha: float = field(default=0.5, metadata={"help": "Concentration; smaller is more skewed."})
    min_client_samples: int = field(default=1, metadata={"help": "Fewest samples a client may get by dirichlet."})

    # --- Output folder ---
    overwrite_output_dir: bool = field(
        default=False,
        metadata={"help": "Delete the run that output_dir holds and start anew. Default: such a folder is refused."},
    )

    # --- TrainingArguments with other defaults ---
    per_device_train_batch_size: int = field(default=32, metadata={"help": "Batch size of the local updates."})
    learning_rate: float = field(default=5e-4, metadata={"help": "Learning rate of the local updates."})
    lr_scheduler_type: str = field(default="constant", metadata={"help": "Schedule of the learning rate over rounds."})
    max_grad_norm: float = field(default=0.0, metadata={"help": "Clip each side's gradient norm; 0 does not clip."})
    logging_steps: float = field(default=1, metadata={"help": "Rounds between logs."})
    save_steps: float = field(default=10, metadata={"help": "Rounds between checkpoints."})
    report_to: None | str | list[str] = field(  # noqa: RUF036 - the order that HfArgumentParser understands
        default="none", metadata={"help": "Where logs are reported to."}
    )

    def __post_init__(self) -> None:
        """Check the federation's arguments before anything is built."""
        if isinstance(self.staleness_probe, bool):
            self.staleness_probe = int(self.staleness_probe)  # True is every round
        for name, allowed in _CHOICES.items():
            value = getattr(self, name)
            if value not in allowed and not (name == "head" and value is None):
                near = did_you_mean(value, allowed)
                raise ValueError(f"{name}={value!r} is not allowed.{near} Choose one of: {', '.join(allowed)}.")
        for name in _AT_LEAST_ONE:
            at_least(name, getattr(self, name), 1)
        for name in ("warmup_rounds", "staleness_probe", "seed", "max_lost_rounds"):
            at_least(name, getattr(self, name), 0)
        if self.num_clients is not None:
            at_least("num_clients", self.num_clients, 1)
        if self.data_seed is not None:
            at_least("data_seed", self.data_seed, 0)
        if self.seed >= 2**32:
            raise ValueError(f"seed={self.seed} is too large for NumPy. Choose one below 2**32.")
        for name in _NUMBERS:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, Real):
                raise ValueError(f"{name}={value!r} must be a number, got {type(value).__name__}.")
        if not 0 < self.participation <= 1:
            raise ValueError(
                f"participation={self.participation} selects no client, or more than there are. Give the share of "
                "clients of a round, above 0 and at most 1 (at least one client is always sampled)."
            )
        if not 0 <= self.client_dropout_rate <= 1:
            raise ValueError(f"client_dropout_rate={self.client_dropout_rate} must be a share between 0 and 1.")
        if not (self.dirichlet_alpha > 0 and math.isfinite(self.dirichlet_alpha)):
            raise ValueError(f"dirichlet_alpha={self.dirichlet_alpha} must be a finite number above 0.")
        if not (self.learning_rate > 0 and math.isfinite(self.learning_rate)):
            raise ValueError(f"learning_rate={self.learning_rate} must be a finite number above 0.")
        for name in ("max_grad_norm", "weight_decay", "smashed_noise", "client_bound"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)} must be a finite number of at least 0.")
        if 0 < self.client_bound < 1:
            raise ValueError(
                f"client_bound={self.client_bound} would scale down the median client, too. Give a number of at least "
                "1, or 0 for no bound."
            )
        if self.method != WARM_UP_METHOD and self.warmup_rounds >= self.num_rounds:
            logger.warning(
                "warmup_rounds=%d covers all num_rounds=%d: only %s will run, not %s.",
                self.warmup_rounds,
                self.num_rounds,
                METHODS[WARM_UP_METHOD].title,
                self.method,
            )
        if self.partition_column is not None and self.partition == "iid":
            logger.warning(
                "partition_column=%r has no effect on partition='iid'. partition='column' makes a client of each value "
                "of the column, partition='dirichlet' skews its values.",
                self.partition_column,
            )
        self.exchange_memory_limit = read_size("exchange_memory_limit", self.exchange_memory_limit)
        resolve_codecs(self.exchange_dtype, self.exchange_codec)
        self._refuse_unsupported()
        if self.max_steps > 0 and self.max_steps != self.num_rounds:
            raise ValueError(
                f"max_steps={self.max_steps} disagrees with num_rounds={self.num_rounds}. A step is a round: set only "
                "num_rounds."
            )
        self.max_steps = self.num_rounds
        super().__post_init__()
        if self.mixed_precision == "fp16":  # by the launcher's environment
            raise ValueError("Mixed precision fp16 does not work: local optimizers run without loss scaling; use bf16.")
        if self.device.type == "cpu" and (self.mixed_precision == "bf16" or self.bf16_full_eval):
            check_bfloat16("bf16=True" if self.mixed_precision == "bf16" else "bf16_full_eval=True")
        if self.gradient_checkpointing:
            # Feedback is taken with autograd.grad, which the reentrant kind does not support.
            self.gradient_checkpointing_kwargs = dict(self.gradient_checkpointing_kwargs or {}, use_reentrant=False)  # type: ignore[arg-type]
        _check_compile(self)
        self._try_optimizer()
        self.make_method()
        _check_stacked(self)

    def _try_optimizer(self) -> None:
        """Make the optimizer's settings and the schedule once: a package or an argument may be missing."""
        name, carrier = "optim", SGD([torch.zeros(0)], self.learning_rate)
        try:
            Trainer.get_optimizer_cls_and_kwargs(self)
            name, steps = "lr_scheduler_type", self.get_warmup_steps(self.num_rounds)
            get_scheduler(self.lr_scheduler_type, carrier, steps, self.num_rounds, self.lr_scheduler_kwargs)  # type: ignore[arg-type]
        except (ImportError, TypeError, ValueError) as error:
            raise ValueError(f"{name}={str(getattr(self, name))!r} cannot be used: {error}") from error

    def _refuse_unsupported(self) -> None:
        _refuse_sharding()
        reasons = {
            "gradient_accumulation_steps": (1, "a step is a whole round; choose the batch size of the local updates"),
            "label_smoothing_factor": (0.0, "the loss is the model's own, computed in the server half"),
            "neftune_noise_alpha": (None, "noise on the embeddings would make the displacement meaningless"),
            "auto_find_batch_size": (False, "the batch size is part of the protocol"),
            "fp16": (False, "local optimizers run without loss scaling; use bf16"),
            "deepspeed": (None, "each process holds the whole model and its own clients"),
            "length_column_name": ("length", "a length is the number of tokens in input_ids"),
            "num_train_epochs": (3.0, "it counts rounds: set num_rounds, and local_epochs for the epochs in a round"),
        }
        for name, (allowed, reason) in reasons.items():
            if getattr(self, name) != allowed:
                raise ValueError(
                    f"{name}={getattr(self, name)!r} does not work with split federated training: {reason}. "
                    f"Leave it at {allowed!r}."
                )
        if self.hub_strategy not in _HUB_STRATEGIES:
            raise ValueError(
                f"hub_strategy={self.hub_strategy!r} is not allowed. Choose one of: {', '.join(_HUB_STRATEGIES)}. "
                "Checkpoints are not uploaded: they hold pickles (optimizer, random states), which run code when they "
                "are read, and may hold smashed data of clients. Keep them on a disk to resume from."
            )
        if self.fsdp:
            raise ValueError(
                f"fsdp={self.fsdp!r} does not work with split federated training: each process holds the whole model "
                "and its own clients. Leave it out."
            )
        for name in ("logging_strategy", "eval_strategy", "save_strategy"):
            if str(getattr(self, name)).endswith(("epoch", "EPOCH")):
                raise ValueError(f"{name}='epoch': there are no epochs over rounds. Use 'steps' and count rounds.")
        if self.dropout == "off" and self.gradient_checkpointing:
            raise ValueError(
                "dropout='off' runs the model in eval mode, where gradient checkpointing is inactive. Use "
                "dropout='synced', or set the model's dropout probabilities to 0."
            )

    @property
    def exchange_codecs(self) -> dict[str, str]:
        """The name of the codec of each kind of tensor that crosses the cut."""
        return resolve_codecs(self.exchange_dtype, self.exchange_codec)

    def make_method(self) -> Method:
        """Return the method of the run, with its options checked."""
        if isinstance(self.method_kwargs, str):
            raise ValueError(f"method_kwargs={self.method_kwargs!r} must be an object in JSON, such as {{}}.")
        return make_method(self.method, self.method_kwargs)


def _check_compile(args: SplitFedConfig) -> None:
    """Refuse settings that do not work with compiled blocks."""
    if not args.torch_compile:
        return
    if args.torch_compile_mode not in (None, *_COMPILE_MODES):
        raise ValueError(
            f"torch_compile_mode={args.torch_compile_mode!r} does not work with split federated training: it may "
            "replay CUDA graphs, which overwrite activations that a round still needs. Choose one of: "
            f"{', '.join(_COMPILE_MODES)}."
        )
    if args.gradient_checkpointing:
        raise ValueError(
            "torch_compile=True and gradient_checkpointing=True do not go together: the compiler decides itself what a "
            "block keeps for its backward pass. Leave one of them out."
        )


def _check_stacked(args: SplitFedConfig) -> None:
    """Refuse what clients that are stacked would not do as one after the other."""
    if args.stacked_clients == 1:
        return
    codecs = sorted({name for name in args.exchange_codecs.values() if not CODECS[name].stackable})
    stackable = ", ".join(name for name in ordered_methods() if METHODS[name].stackable)
    optim = OptimizerNames(args.optim).value
    reasons = {
        f"method={args.method!r}": (
            not METHODS[args.method].stackable,
            f"its rule is of one client's batch. Methods that can be stacked: {stackable}",
        ),
        f"smashed_noise={args.smashed_noise:g}": (args.smashed_noise, "each client draws noise of its own"),
        f"the codec {', '.join(codecs)}": (codecs, "each client has random numbers or a scale of its own"),
        "torch_compile=True": (args.torch_compile, "compiled blocks hold the weights of one client"),
        f"optim={optim!r}": (
            optim not in _ELEMENTWISE,
            f"its steps are not elementwise. Use one of {', '.join(_ELEMENTWISE)}",
        ),
    }
    for what, (applies, reason) in reasons.items():
        if applies:
            raise ValueError(
                f"stacked_clients={args.stacked_clients} does not work with {what}: {reason}. Or leave stacked_clients "
                "at 1."
            )


def _refuse_sharding() -> None:
    """Refuse sharding that `accelerate launch` requests in the environment, which no argument of the config shows."""
    for variable, name in _SHARDING.items():
        if parse_flag_from_env(variable):
            raise ValueError(
                f"{variable}={os.environ[variable]} asks for {name}, which does not work with split federated "
                "training: each process holds the whole model and its own clients. Launch without it: `accelerate "
                "launch --multi_gpu --num_processes N script.py` spreads the clients of a round over N processes."
            )


def read_size(name: str, size: str | int | None) -> int | None:
    """Return the bytes of an option that is given in bytes or with a unit; None stays None."""
    if size is None:
        return None
    try:
        num_bytes = convert_file_size_to_int(int(size) if str(size).isdigit() else size)
    except (ValueError, AttributeError):
        num_bytes = -1
    if num_bytes < 0:
        raise ValueError(
            f"{name}={size!r} is not a valid size. Give bytes, or a number with a unit such as 500MB or 2GiB."
        )
    return int(num_bytes)
