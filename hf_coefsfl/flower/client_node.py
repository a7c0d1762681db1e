"""What a client is: its half of the model, its data, and the options of the run."""

from __future__ import annotations

import hashlib
import inspect
import logging
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers.utils import find_labels

from .. import __version__
from ..federation.batches import Batches, ClientData
from ..federation.clients import Federation
from ..federation.data_checks import RowCheck
from ..federation.partition import Partition
from ..federation.schedule import MethodSchedule, set_mode
from ..protocol.loss import LossSpec
from ..split import ClientHalf, load_client
from ..split.placeholders import unwrapped
from ..split.quantized import beside_weights
from .errors import Code, failing_as
from .lasting import LastingState
from .memory import return_freed_memory
from .options import LABELS_ARE_TEXT, read_client_config
from .policy import Policy
from .wire import PROTOCOL

logger = logging.getLogger(__name__)


class HalfAlone:
    """A client half that stands in for a split model, as far as methods look at one on a client."""

    def __init__(self, client: ClientHalf):
        self.client, self.model = client, client.model


class ClientNode:
    """A client as Flower's run config and the node config of its SuperNode describe it.

    Args:
        run_config: the options of the run, the same for all.
        node_config: `partition-id` is the number of this client; `dataset` its own data (a folder, a file, or an id on
            the Hub), `client-half` the folder or repo of its half of the model, `name` what it is called, `policy` the
            file of what it allows. A node of Flower's simulation engine, which has `num-partitions`, may be without
            the first two: it takes its part of the run's data.
    """

    def __init__(self, run_config: Mapping[str, Any], node_config: Mapping[str, Any]):
        return_freed_memory()
        self.policy = Policy.of(node_config)
        self.client = _number(node_config)
        self.name = str(node_config.get("name", self.client))
        own = self.has_own_data = bool(node_config.get("dataset")) or "num-partitions" not in node_config
        self.lasting = LastingState(node_config, self.policy.max_rounds, self.policy.max_uploads)
        options = read_client_config(run_config, own)
        self.policy.check_run(options, own)
        self.config = options.config
        source = node_config.get("client-half") or options.client_half
        if not source:
            raise ValueError("The node config has no client-half: the folder that `coefsfl split` wrote for clients.")
        if own and not node_config.get("dataset"):
            raise ValueError("The node config has no dataset: the folder or file of the client's own data.")
        self.half = load_client(str(source)).to(self.config.device)
        self.policy.check_half(self.half.cut)
        self._read = {
            n: getattr(options.arguments, n) for n in ("max_length", "stride") if hasattr(options.arguments, n)
        }
        self.keep_noise()
        set_mode(self.half, self.config)
        model: Any = unwrapped(self.half.model)
        self.parameters = {name: p for name, p in self.half.model.named_parameters() if p.requires_grad}
        labels = find_labels(type(model))
        self.loss_spec = LossSpec.of(model, labels)
        self.methods = MethodSchedule(self.config)
        alone: Any = HalfAlone(self.half)
        self.methods.method.setup(alone, self.loss_spec, self.config.seed, first_round=self.config.warmup_rounds)
        with failing_as(Code.DATA):
            self._prepare_data(options, node_config, str(source), model, labels)

    def _prepare_data(
        self, options: Any, node_config: Mapping[str, Any], source: str, model: Any, labels: list[str]
    ) -> None:
        own = node_config.get("dataset")
        given = replace(options.arguments, model_name_or_path=source)
        if own:
            given = replace(given, dataset_name=str(own), dataset_config_name=None)
        allowed = self.policy.columns
        if allowed is not None:
            given = replace(given, columns=[f"{role}={column}" for role, column in allowed.items()])
        job = options.task(given, keep=None if own else self.config.partition_column, model=model)
        if allowed is not None:
            job.roles = dict(allowed)  # an optional role that is not named is not read
        prepared = job.prepare(self.config.seed, evaluation=False)
        rows = prepared.train_dataset
        if own:
            nothing = (np.arange(0),) * self.client
            names = tuple(map(str, range(self.client + 1)))
            federation = Federation([rows], Partition((*nothing, np.arange(len(rows))), names))
        else:
            federation = Federation.of(rows, self.config)
            if self.client >= len(federation):
                raise ValueError(f"partition-id={self.client}, but the data is split over {len(federation)} clients.")
        if job.remove_unused_columns:
            taken = {*inspect.signature(model.forward).parameters, "label", "label_ids", *labels}
            federation = federation.map_datasets(
                lambda d: d.select_columns([name for name in d.column_names if name in taken])
            )
        self.num_samples = federation.sizes[self.client]
        if not self.num_samples:
            raise ValueError(f"Client {self.name} has no data.")
        check = RowCheck.of(model, self.loss_spec)
        mine = federation.dataset(0).select(federation.partition.indices[self.client])
        alone = Federation([mine], Partition((np.arange(len(mine)),), (self.name,)))
        check.clients(alone, prepared.data_collator)
        self.data = ClientData(federation, prepared.data_collator, check, self.config)

    def keep_noise(self) -> None:
        """Refuse another noise than the client has sent its data with; what it is sent with first is kept."""
        if self.has_own_data and self.config.smashed_noise:
            self.lasting.keep({"smashed_noise": self.config.smashed_noise} | self._read)

    def batches(self, round_index: int) -> Batches:
        """Return the mini-batches of a round."""
        with failing_as(Code.DATA):
            return self.data.batches(round_index, self.client)

    @property
    def autocast(self) -> Any:
        """What passes run under."""
        if not self.config.bf16:
            return nullcontext
        return partial(torch.autocast, self.config.device.type, torch.bfloat16)

    def introduce(self) -> dict[str, Any]:
        """Return what the server is told of this client."""
        if self.loss_spec.labels_are_text:
            logger.warning(LABELS_ARE_TEXT)
        return {
            "protocol": PROTOCOL,
            "version": __version__,
            "client": self.client,
            "name": self.name,
            "num_samples": self.num_samples,
            "half": fingerprint(self.half),
        }


def _number(node_config: Mapping[str, Any]) -> int:
    value = node_config.get("partition-id")
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"The node config has partition-id={value!r}: give each client a number from 0 on.")
    return value


def fingerprint(half: ClientHalf) -> str:
    """Return a checksum of a client half: the cut, every frozen weight, and the names and shapes of the trained."""
    checksum = hashlib.sha256(f"{half.cut.blocks} {half.cut.index}".encode())
    for name, parameter in sorted(half.model.named_parameters()):
        if _is_hollow(parameter):
            continue
        checksum.update(f"{name} {tuple(parameter.shape)} {parameter.dtype} {parameter.requires_grad}".encode())
        if not parameter.requires_grad:
            checksum.update(_bytes(parameter))
    for name, scale in sorted(beside_weights(half.model)):
        checksum.update(name.encode())
        checksum.update(_bytes(scale))
    return checksum.hexdigest()


def _is_hollow(parameter: nn.Parameter) -> bool:
    """Whether it only stands in for a weight of the other half."""
    return parameter.untyped_storage().nbytes() < parameter.numel() * parameter.element_size()


def _bytes(t: Tensor) -> Any:
    return t.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy().data
