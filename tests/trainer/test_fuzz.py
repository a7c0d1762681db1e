"""Any configuration trains a round to finite weights, or is refused by a message that names what is wrong with it."""

import copy
import dataclasses
import math
import re
import tempfile
from functools import cache
from typing import Any, get_type_hints

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hf_coefsfl import METHODS, SplitFedConfig, SplitFedTrainer
from tests.support.federated import FEWER_PASSES, config, images, texts, tiny_bert, tiny_vit, weights

NAN, INFINITY = math.nan, math.inf
NOT_A_COUNT = (0, -1, 1.5, "2", None, True)  # where a whole number of at least 1 is asked for
NOT_A_SHARE = (-0.1, 1.5, NAN, INFINITY, "half", None)
NOT_POSITIVE = (0.0, -1.0, NAN, INFINITY, "much", None)
NOT_A_FACTOR = (-1.0, NAN, INFINITY, "much")
NOT_A_SWITCH = (2, "perhaps")

# What an option may be, and what it may not be, for 24 rows of 3 classes and a model of 4 blocks.
OPTIONS: dict[str, tuple[tuple[Any, ...], tuple[Any, ...]]] = {
    "cut": ((1, 2, 3), (4, 100, *NOT_A_COUNT)),
    "num_clients": ((1, 2, 4, 24), (25, *(x for x in NOT_A_COUNT if x is not None))),
    "participation": ((1e-9, 0.3, 1, 1.0), (0, *NOT_A_SHARE)),
    "local_epochs": ((1, 2), NOT_A_COUNT),
    "warmup_rounds": ((0, 1, 5), (-1, 0.5, "1", None)),
    "partition": (("iid", "dirichlet", "column"), ("random", "", None, 1)),
    "partition_column": ((None, "labels", "owner", "colour", 3), ()),  # not read for partition="iid"
    "dirichlet_alpha": ((0.1, 1, 100.0), NOT_POSITIVE),
    "min_client_samples": ((1, 2), (100, *NOT_A_COUNT)),
    "per_device_train_batch_size": ((1, 5, 64), NOT_A_COUNT),
    "dropout": (("synced", "off"), ("on", None, True)),
    "head": ((None, "full", "lora", "frozen"), ("half", True)),
    "full_finetuning": ((False, True), ()),
    "learning_rate": ((1e-4, 1, 1e3), NOT_POSITIVE),
    "max_grad_norm": ((0, 0.0, 1.0), (None, *NOT_A_FACTOR)),
    "weight_decay": ((0.0, 0.1), (None, *NOT_A_FACTOR)),
    "client_dropout_rate": ((0.0, 0.5, 1), NOT_A_SHARE),
    "on_client_failure": (("raise", "skip"), ("ignore", None, False)),
    "staleness_probe": ((0, 1, 2, False, True), (-1, "often", None)),
    "count_flops": ((False, True), ()),
    "lr_scheduler_type": (
        ("constant", "linear", "cosine"),
        ("cubic", 3, "warmup_stable_decay", "cosine_with_min_lr", "reduce_lr_on_plateau"),
    ),
    "optim": (("adamw_torch", "sgd", "adafactor", "rmsprop"), ("adam", 3, "lomo")),
    "dataloader_drop_last": ((False, True), ()),
    "gradient_checkpointing": ((False, True), ()),
    "bf16": ((False, True), ()),
    "seed": ((0, 7, 2**32 - 1), (-1, 2**32, 0.5, "x", None)),
    "data_seed": ((None, 0, 7), (-1, 0.5, "x")),
    "num_rounds": ((1,), NOT_A_COUNT),
    "gradient_accumulation_steps": ((1,), (2,)),
    "label_smoothing_factor": ((0.0,), (0.1,)),
    "neftune_noise_alpha": ((None,), (5.0,)),
    "fp16": ((False,), (True,)),
    "max_steps": ((-1, 1), (2,)),
    "logging_strategy": (("no", "steps"), ("epoch",)),
    "hub_strategy": (("end", "every_save"), ("checkpoint", "all_checkpoints")),
    "blocks": ((None,), ("no.such.blocks", "")),
    "exchange_dtype": (("float32", "bfloat16", "float16", "int8", "int4"), ("int5", None, 8, "topk8")),
    "adapter_codec": (("float32", "bfloat16", "int8"), ("float16", "int4", None, 8)),
    "exchange_codec": (
        (None, {}, {"gradients": "int3"}, '{"curvature": "int4_stochastic"}'),
        (
            "int5",
            8,
            {"gradient": "int8"},
            {"gradients": "int5"},
            {"smashed_data": "topk8"},
            {"gradients": None},
            '{"gradients"',
            "",
            ["int8"],
        ),
    ),
    "exchange_memory_limit": ((None, 0, 1000, "2GiB"), ("much", -1, "2 parsecs", 1.5)),
}
# The same for the methods' own options; whole numbers and switches go by their type.
KEYWORDS: dict[str, tuple[tuple[Any, ...], tuple[Any, ...]]] = {
    "compensation_factor": ((0, 0.5, 3000.0, None), NOT_A_FACTOR),
    "feedback_at": (("initial", "walk", "final"), ("start", "", None, 3, True)),
    "max_angle": ((None, 60.0, 90), (0, 91, -1.0, NAN, INFINITY, "much")),
    "server_epochs": ((None, 1, 2), (0, -1, 0.5, "1", True)),
    "curvature_bound": ((None, 0, 0.5), NOT_A_FACTOR),
    "relative_step": ((1e-3, 0.5), NOT_POSITIVE),
    "perturbation_scale": ((1e-3, 0.1), NOT_POSITIVE),
    "learning_rate": ((None, 1e-3), tuple(x for x in NOT_POSITIVE if x is not None)),
    "align_learning_rate": ((1e-4, 0.1), NOT_POSITIVE),
    "align_warmup_steps": ((0, 2), (-1, 0.5, "1", None)),
    "head": (("fc", "fc_lora", "mlp"), ("conv", None)),
    "init": (("random", "copy_server"), ("zeros", None)),
}

QUICK = FEWER_PASSES | {"fsl_sage": {"align_epochs": 1}}
Example = tuple[str, str, dict[str, Any], set[str]]


@cache
def rows(task: str) -> Any:
    return texts(24) if task == "text" else images(24)


@cache
def model(task: str) -> Any:
    return tiny_bert() if task == "text" else tiny_vit()


def keyword(method: str, name: str) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    if name in KEYWORDS:
        return KEYWORDS[name]
    kind = get_type_hints(METHODS[method])[name]
    assert kind in (int, bool), f"KEYWORDS lacks {name}"
    return ((1, 2), NOT_A_COUNT) if kind is int else ((False, True), (1, "yes", None))


def choices(method: str) -> dict[str, tuple[tuple[Any, ...], tuple[Any, ...]]]:
    """Return the options that there are, those of the method as method_kwargs.name."""
    fields = {f.name for f in dataclasses.fields(SplitFedConfig)}
    own = [f.name for f in dataclasses.fields(METHODS[method])]  # type: ignore[arg-type]
    found = {name: values for name, values in OPTIONS.items() if name in fields}
    return found | {f"method_kwargs.{name}": keyword(method, name) for name in own}


@st.composite
def drawn(draw: st.DrawFn) -> Example:
    """Draw a task, a method, some options, and the names of those with a value that must be refused."""
    method, options = draw(st.sampled_from(sorted(METHODS))), {}
    known = choices(method)
    names = draw(st.lists(st.sampled_from(sorted(known)), unique=True, max_size=14))
    wrong = {name for name in names if known[name][1] and draw(st.integers(0, 9)) == 9}
    for name in names:
        options[name] = draw(st.sampled_from(known[name][name in wrong]))
    return draw(st.sampled_from(["image", "text"])), method, options, wrong


def build(task: str, method: str, folder: str, options: dict[str, Any]) -> SplitFedTrainer:
    clients = None if options.get("partition") == "column" else 4
    changes: dict[str, Any] = {"num_clients": clients, "participation": 0.5, "num_rounds": 1, "warmup_rounds": 0}
    changes |= {name: value for name, value in options.items() if "." not in name}
    own = {name.partition(".")[2]: value for name, value in options.items() if "." in name}
    made = config(folder, method=method, method_kwargs=QUICK.get(method, {}) | own, **changes)
    return SplitFedTrainer(copy.deepcopy(model(task)), made, train_dataset=rows(task))


@pytest.mark.slow
@settings(max_examples=25, derandomize=True, suppress_health_check=list(HealthCheck))
@given(drawn())
def test_any_configuration(example: Example) -> None:
    """What a refusal names is set back to its default until the rest is accepted; nothing wrong may be left then."""
    task, method, options, wrong = example
    with tempfile.TemporaryDirectory() as folder:
        while True:
            try:
                run = build(task, method, folder, options)
                break
            except ValueError as error:
                refusal = str(error)
            named = [name for name in options if re.search(rf"\b{name.rpartition('.')[2]}\b", refusal)]
            assert named, f"{refusal} names none of {options}"
            for name in named:
                del options[name]
        assert not wrong & options.keys()
        try:
            run.train()
        except ValueError as error:
            if run.args.on_client_failure == "skip" or "NaN or infinity" not in str(error):
                raise
        assert all(tensor.isfinite().all() for tensor in weights(run).values())
