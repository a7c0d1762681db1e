"""Cutting a model in two: `split_model(model, cut)` gives a client half and a server half.

>>> split = split_model(model, cut=2)  # doctest: +SKIP
>>> smashed = split.client(input_ids=ids, attention_mask=mask)  # doctest: +SKIP
>>> split.server(smashed, labels=labels).loss  # the loss of model(...), to the last bit  # doctest: +SKIP
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ..protocol.devices import is_device_error
from ..protocol.messages import SmashedData
from ..protocol.modes import evaluating, training
from .blocks import check_cut, find_blocks, members
from .exactness import evaluation_gap, training_gap
from .halves import ClientHalf, ServerHalf, run_to_cut
from .placeholders import crossing_context, no_cache, placeholder_inputs, sort_inputs, unwrapped
from .placeholders import example_inputs as derive_inputs
from .quantized import prepare_quantised
from .stand_ins import RandomState
from .surgery import Cut, clone, make_client, make_probe, make_server
from .tracing import Ownership, Record, arguments_to_ship, find_owners, record_run

# How far the halves may be from the unsplit model, relative to its largest output. They run the
# same operations on the same numbers, so it leaves room for kernels that add in another order only.
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}


class SplitModel:
    """A model and its two halves, which share its tensors: training a half trains the model.

    Attributes: `model`, `client`, `server`, `cut` (blocks on the client), `num_blocks`, and
    `blocks`, the path of the list of blocks.
    """

    def __init__(self, model: nn.Module, cut: Cut, owners: Ownership) -> None:
        self.model = model
        self.cut, self.num_blocks, self.blocks = cut.index, cut.num_blocks, cut.blocks
        self.owners = owners
        named = dict(model.named_parameters())
        self.client = ClientHalf(make_client(clone(model), cut, {id(named[name]) for name in owners.client}), cut)
        self.server = ServerHalf(make_server(clone(model), cut, {id(named[name]) for name in owners.server}), cut)

    def shared_trainable(self) -> list[str]:
        """Names of trainable parameters whose gradient has a part from each half.

        Client-then-server in one graph is exact with them. A client that gets only the gradient at
        its activations misses the part that reaches them on the server (tied embeddings), or
        through a tensor that crosses besides the activations (T5's position bias).
        """
        both = (self.owners.client & self.owners.server) | self.owners.shipped
        return [name for name, p in self.model.named_parameters() if name in both and p.requires_grad]

    def train(self, mode: bool = True) -> SplitModel:
        """Put the model and both halves in training mode."""
        for module in (self.model, self.client, self.server):
            module.train(mode)
        return self

    def eval(self) -> SplitModel:
        """Put the model and both halves in evaluation mode."""
        return self.train(False)

    def to(self, *args: Any, **kwargs: Any) -> SplitModel:
        """Move the model and both halves, as `nn.Module.to`; parameters stay shared."""
        for module in (self.model, self.client, self.server):
            module.to(*args, **kwargs)
        return self


def split_model(
    model: nn.Module, cut: int = 2, blocks: str | None = None, example_inputs: Mapping[str, Any] | None = None
) -> SplitModel:
    """Split a Hugging Face model after its first `cut` blocks; nothing is copied.

    `model` is a PreTrainedModel, a PeftModel or a timm wrapper, and is itself left as it was.
    `blocks` is the path of the list of blocks, if it should not be guessed; `example_inputs` a
    small batch to calibrate on, if none can be derived from the config.

    Raises a ValueError for a cut that cannot be, and for models whose halves would not compute
    exactly what the model computes.
    """
    path, container = find_blocks(model, blocks)
    check_cut(model, path, container, cut)
    if not hasattr(unwrapped(model), "config"):
        raise ValueError(
            f"{type(model).__name__} has no config: expected a transformers PreTrainedModel, a PeftModel of one, "
            "or a timm model loaded as TimmWrapperForImageClassification."
        )
    _refuse_layerdrop(model, path)
    prepare_quantised(model)
    inputs = dict(example_inputs) if example_inputs is not None else derive_inputs(model)
    random_state = RandomState(next(model.parameters()).device)
    try:
        with torch.no_grad():
            return _split_exactly(model, path, container, cut, inputs)
    finally:
        random_state.restore()


def _split_exactly(model: nn.Module, path: str, container: nn.Module, cut: int, inputs: dict[str, Any]) -> SplitModel:
    """Calibrate, split and check; inputs besides the main one cross only if it is not exact without."""
    kind = type(unwrapped(model)).__name__
    record = _run_example(model, path, container, cut, inputs)
    templates = tuple(record.templates[i] for i in range(cut))
    plan = Cut(path, cut, len(members(container)), templates, handover=record.handover, in_shape=record.in_shape)
    tolerance = _TOLERANCE.get(next(iter(record.arguments.values())).dtype, 5e-2)
    problem: object = None
    for crossing in ((), *((name,) for name in inputs if name == "token_type_ids")):
        try:
            split = _split_by(replace(plan, crossing=crossing), model, inputs, record)
            problem = evaluation_gap(split, inputs).describe(tolerance)
            if problem is None and (gap := training_gap(split, inputs)) is not None:
                if gap.outputs > tolerance / 100:
                    warnings.warn(
                        f"{kind} draws random numbers for its server's blocks before the first block: in training mode "
                        f"dropout differs from the unsplit model's (outputs differ by {gap.outputs:.1e}). "
                        "In evaluation mode, or with dropout 0, the halves are exact.",
                        stacklevel=3,
                    )
                    return split
                problem = gap.describe(tolerance)
            if problem is None:
                return split
        except Exception as error:  # whatever the model raises on placeholders, the answer is the same: not this one
            if is_device_error(error):
                raise  # says nothing about the cut
            problem = error
    raise ValueError(
        f"{kind} cannot be cut after block {cut} of {path!r}: on an example, client then server do not compute what "
        f"the model computes ({problem}). Often the server side needs more of the raw input than the smashed data, as "
        "classifiers do that feed the token ids to a decoder as well (BART, T5). Use an encoder-only or decoder-only "
        "model, or its variant for generation, or cut another list of blocks with `blocks=`."
    ) from (problem if isinstance(problem, Exception) else None)


def _split_by(plan: Cut, model: nn.Module, inputs: dict[str, Any], record: Record) -> SplitModel:
    """Split as planned, with what the server cannot rebuild sent along."""
    plan = replace(plan, shipped=arguments_to_ship(record.arguments, _rebuilt_arguments(model, plan, inputs, record)))
    with evaluating(model):
        owners = find_owners(model, plan.blocks, plan.index, inputs | no_cache(model), plan.shipped, plan.handover)
    return SplitModel(model, plan, owners)


def _run_example(model: nn.Module, path: str, container: nn.Module, cut: int, inputs: dict[str, Any]) -> Record:
    """Run the unsplit model once and check that the blocks are used as blocks."""
    kind = type(unwrapped(model)).__name__
    versions = {name: p._version for name, p in model.named_parameters()}
    try:
        with evaluating(model):
            record = record_run(model, container, cut, inputs | no_cache(model))
        with training(model):
            _train_example(model, inputs)
    except ValueError as error:
        raise ValueError(f"{kind} cannot be cut in {path!r}: {error}") from error
    except Exception as error:
        if is_device_error(error):
            raise  # says nothing about the cut
        raise ValueError(
            f"{kind} could not run on an example with {sorted(inputs)}: {error}. "
            "Pass a small batch it can run on as `example_inputs={...}`."
        ) from error
    changed = [name for name, p in model.named_parameters() if p._version != versions[name]]
    if changed:
        raise ValueError(
            f"{kind} cannot be cut: its forward pass changes its own parameters ({changed[0]!r} and "
            f"{len(changed) - 1} others), as RWKV does between training and evaluation, and each half would change "
            "them again. Use a model that leaves its parameters to the optimizer."
        )
    if record.calls != 1 or len(record.templates) < cut:
        raise ValueError(
            f"Block {cut} of {path!r} ran {record.calls} times in one forward pass of {kind}, "
            "not once after the blocks before it: blocks are shared or skipped. Name another list with `blocks=`."
        )
    return record


def _train_example(model: nn.Module, inputs: dict[str, Any]) -> None:
    """Run the unsplit model in training mode, if the example is not too small for that."""
    try:
        model(**(inputs | no_cache(model)))
    except Exception as error:
        if is_device_error(error):
            raise


def _rebuilt_arguments(model: nn.Module, plan: Cut, inputs: dict[str, Any], record: Record) -> dict[str, Any]:
    """What a server makes of placeholders for the block at the cut."""
    raw, labels, shapes = sort_inputs(inputs)
    hidden = next(iter(record.arguments.values()))
    context = crossing_context(model, raw, plan.crossing, hidden.device)
    smashed = SmashedData(hidden, context, labels, shapes)
    probe = make_probe(clone(model), plan)
    with evaluating(probe):
        return run_to_cut(probe, placeholder_inputs(model, smashed) | labels | no_cache(model))


def _refuse_layerdrop(model: nn.Module, path: str) -> None:
    """Skipping blocks at random may skip the block at the cut."""
    names = ["layerdrop", "decoder_layerdrop" if "decoder" in path.split(".") else "encoder_layerdrop"]
    config = unwrapped(model).config
    for name in names:
        rate = getattr(config, name, 0.0)
        if isinstance(rate, float) and rate > 0:
            raise ValueError(
                f"config.{name} is {rate}: training would skip blocks at random, and the cut with them. "
                f"Load the model with {name}=0.0."
            )
