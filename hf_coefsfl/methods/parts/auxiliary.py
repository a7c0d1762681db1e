"""Auxiliary networks beside the model: heads for a loss of the client's own, truncated copies of the server half."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from transformers.loss.loss_utils import LOSS_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_MASKED_LM_MAPPING_NAMES

from ...protocol.devices import is_device_error, to_device, to_host
from ...protocol.loss import LANGUAGE_MODELS, SPANS, LossSpec
from ...protocol.messages import SmashedData
from ...protocol.modes import evaluating
from ...protocol.padding import position_mask
from ...protocol.seeds import derive_seed, preserved_random_state, set_random_state
from ...protocol.server_side import on_graph
from ...split import ServerHalf, SplitModel
from ...split.placeholders import example_inputs, unwrapped
from ...split.precision import adapter_modules
from ...split.surgery import clone, cut_path, drop_blocks

HEADS = ("fc", "fc_lora", "mlp")
_LORA_SCALE = 2.0  # alpha / r, as in the adapter of the model
_CLASS_TOKENS = ("cls_token", "class_embedding", "class_token")


def example_smashed(split: SplitModel) -> SmashedData:
    """Return what the client half makes of an example batch: the shapes at the cut."""
    device = next(split.client.parameters()).device
    with torch.no_grad(), evaluating(split.client), preserved_random_state(device):
        smashed: SmashedData = split.client(**example_inputs(split.model))
    return smashed.detach()


# ---- Heads: the client's own loss ----


class AuxiliaryHead(nn.Module):
    """A small network on the smashed data with a loss of its own, that of the task.

    Sizes for d = 192 and 100 classes: "fc" 19,300 parameters; "fc_lora", whose weight is frozen
    under a trained pair of rank r, 684 at r = 2; "mlp", hidden layers of width d/2, 28,228 with one.

    Args:
        kind: one of `HEADS`.
        width: d, the features of a token at the cut.
        outputs: of the task: classes, words, or 2 for the start and the end of an answer.
        loss_spec: whose loss is computed.
        pooling: "tokens" (an output for each token), "first", "last" (the last that is not padding) or "mean".
        rank: r of "fc_lora".
        hidden_layers: of "mlp".
    """

    def __init__(
        self,
        kind: str,
        width: int,
        outputs: int,
        loss_spec: LossSpec,
        pooling: str,
        rank: int = 2,
        hidden_layers: int = 1,
    ):
        super().__init__()
        self.loss_spec, self.pooling = loss_spec, pooling
        self.layers: nn.Module
        if kind == "fc":
            self.layers = nn.Linear(width, outputs)
        elif kind == "fc_lora":
            self.layers = LowRankLinear(width, outputs, rank)
        else:
            hidden = max(width // 2, 1)
            stack: list[nn.Module] = [nn.Linear(width, hidden), nn.GELU()]
            for _ in range(hidden_layers - 1):
                stack += [nn.Linear(hidden, hidden), nn.GELU()]
            self.layers = nn.Sequential(*stack, nn.Linear(hidden, outputs))

    @classmethod
    def of(
        cls, split: SplitModel, loss_spec: LossSpec, kind: str, seed: int, *, rank: int = 2, hidden_layers: int = 1
    ) -> AuxiliaryHead:
        """Return the head for the cut of a model, on the model's device; equal seeds give equal weights."""
        activations = example_smashed(split).activations
        if activations.dim() != 3:
            raise ValueError(
                f"The auxiliary head needs activations (samples, tokens, features) at the cut, got "
                f"{activations.dim()} dimensions: {tuple(activations.shape)}. Use a method without such a head."
            )
        outputs = loss_spec.num_labels
        if loss_spec.loss_type == SPANS:
            outputs = 2
        elif loss_spec.loss_type in LANGUAGE_MODELS:
            outputs = unwrapped(split.model).config.get_text_config().vocab_size
        with preserved_random_state():
            set_random_state(derive_seed(seed, "method"))
            head = cls(
                kind, activations.shape[-1], outputs, loss_spec, choose_pooling(split, loss_spec), rank, hidden_layers
            )
        return head.to(activations.device)

    def forward(self, smashed: SmashedData) -> Tensor:
        """Return the loss on smashed data with labels, on the graph of its activations."""
        pooled = pool(smashed, self.pooling).float()
        return task_loss(self.loss_spec, self.layers(pooled).float(), smashed.labels)


class LowRankLinear(nn.Module):
    """A linear layer whose weight is frozen; a pair of rank r and the bias are trained."""

    def __init__(self, width: int, outputs: int, rank: int):
        super().__init__()
        frozen, down = nn.Linear(width, outputs), nn.Linear(width, rank, bias=False)
        self.register_buffer("weight", frozen.weight.detach())
        self.bias = nn.Parameter(frozen.bias.detach())
        self.down = down.weight
        self.up = nn.Parameter(torch.zeros(outputs, rank))

    def forward(self, x: Tensor) -> Tensor:
        """Return x (W + 2 B A)ᵀ + b."""
        low = nn.functional.linear(nn.functional.linear(x, self.down), self.up)
        return nn.functional.linear(x, self.weight, self.bias) + _LORA_SCALE * low  # type: ignore[arg-type]


def check_head_loss(loss_spec: LossSpec) -> None:
    """Refuse a task whose loss a head at the cut cannot compute."""
    if not loss_spec.has_known_curvature:
        raise ValueError(
            f"The auxiliary head does not know a {loss_spec.loss_type} loss. It works for classification of sequences, "
            "tokens, images and audio, extractive question answering and language modelling; use another method for "
            "this model."
        )
    if loss_spec.loss_type in ("ForCausalLM", "ForConditionalGeneration") and not loss_spec.shifts_labels:
        raise ValueError(
            "The auxiliary head cannot learn to generate with an encoder-decoder: the tokens at the cut are those of "
            "the input, not those of the labels. Use another method for this model, such as reuse or coef_j."
        )


def choose_pooling(split: SplitModel, loss_spec: LossSpec) -> str:
    """Return which tokens the head reads: as the task asks, else as models of this kind summarise their input."""
    if loss_spec.loss_type in (*LANGUAGE_MODELS, SPANS, "ForTokenClassification"):
        return "tokens"
    base = unwrapped(split.model)
    if base.main_input_name == "input_ids":
        kind = base.config.get_text_config().model_type
        # Models that read both ways are listed for masked language modelling too, whatever else they can do.
        decoder = kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and kind not in MODEL_FOR_MASKED_LM_MAPPING_NAMES
        return "last" if decoder else "first"
    # Looked up on the client: a token that joins above the cut (PVT) is not there to be read.
    has_class_token = any(name.rpartition(".")[2] in _CLASS_TOKENS for name, _ in split.client.named_parameters())
    return "first" if has_class_token else "mean"


def pool(smashed: SmashedData, pooling: str) -> Tensor:
    """Return (b, d) of the activations (b, T, d), or all of them for "tokens"."""
    s = smashed.activations
    if pooling == "tokens":
        return s
    if pooling == "first":
        return s[:, 0]
    unpadded = _unpadded(smashed)
    if pooling == "last":
        positions = torch.arange(s.shape[1], device=s.device) * unpadded
        return s[torch.arange(len(s), device=s.device), positions.argmax(1)]
    return (s * unpadded[..., None]).sum(1) / unpadded.sum(1, keepdim=True).clamp(min=1)


def _unpadded(smashed: SmashedData) -> Tensor:
    """Return (b, T): True for the tokens that the context does not mark as padding."""
    shape, padding = smashed.activations.shape[:2], smashed.context.get("padding")
    mask = position_mask(smashed)
    if mask is not None:
        return mask
    if padding is not None and padding.shape == shape:
        return ~padding
    return torch.ones(shape, dtype=torch.bool, device=smashed.activations.device)


def task_loss(loss_spec: LossSpec, outputs: Tensor, labels: Mapping[str, Tensor]) -> Tensor:
    """Return the loss of a task, as transformers computes it, of outputs (b, C) or (b, T, C)."""
    loss: Any = LOSS_MAPPING[loss_spec.loss_type]
    if loss_spec.loss_type == SPANS:
        start, end = outputs.unbind(-1)
        return loss(start, end, labels["start_positions"], labels["end_positions"])
    target = labels["labels"]
    if loss_spec.loss_type in LANGUAGE_MODELS:
        return loss(outputs, target, vocab_size=outputs.shape[-1])
    # A stand-in for the config: transformers writes the problem type that it infers into it.
    config = SimpleNamespace(num_labels=loss_spec.num_labels, problem_type=loss_spec.problem_type)
    if loss_spec.loss_type == "ForTokenClassification":
        return loss(outputs, target, config)
    return loss(target, outputs, config)


# ---- Truncated copies of the server half ----


class AuxiliaryNetwork:
    """The first blocks of the server and all that follows its last one, with tensors of its own.

    It runs the model's own code on smashed data. Dropout is off: the gradient at the cut is meant
    to imitate the server's, and masks would only add noise to both.
    """

    def __init__(self, split: SplitModel, num_blocks: int):
        self.half = _truncated(split.server, num_blocks).eval()
        _own_tensors(self.half)
        try:
            used = _used_parameters(self.half, example_smashed(split))
        except Exception as error:
            if is_device_error(error):
                raise  # says nothing about the blocks
            raise ValueError(
                f"{type(unwrapped(split.model)).__name__} does not run without its blocks after number "
                f"{split.cut + num_blocks} ({error}). Set num_blocks to {split.num_blocks - split.cut}, all that the "
                "server has, or use another method."
            ) from error
        self.parameters: dict[str, nn.Parameter] = used

    def num_parameters(self) -> int:
        """Return the number of scalars that it uses and that are sent."""
        return sum(p.numel() for p in self.parameters.values())

    def weights(self) -> dict[str, Tensor]:
        """Return a copy of the weights, off the device."""
        there = [p.detach() for p in self.parameters.values()]
        return {name: t.clone() for name, t in zip(self.parameters, to_host(there), strict=True)}

    @torch.no_grad()
    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Take the weights of one client."""
        for name, p in self.parameters.items():
            p.copy_(to_device(weights[name], p.device))

    def gradient(self, smashed: SmashedData, create_graph: bool = False) -> tuple[Tensor, Tensor]:
        """Return its loss on smashed data and the gradient of that loss w.r.t. the activations."""
        leaf = on_graph(smashed)
        loss = self.half(leaf).loss
        (gradient,) = torch.autograd.grad(loss, leaf.activations, create_graph=create_graph)
        return loss.detach(), gradient

    def draw(self, model: nn.Module, seed: int) -> None:
        """Re-initialise as the model's class does, on the CPU, so that every device starts from the same bits.

        A parameter that neither its module nor the model's class knows how to draw keeps the server's value.
        """
        device = next(iter(self.parameters.values())).device
        self.half.to("cpu")
        with preserved_random_state(), torch.no_grad():
            set_random_state(derive_seed(seed, "method"))
            _draw(self.half, unwrapped(model))
        self.half.to(device)


def _truncated(server: ServerHalf, num_blocks: int) -> ServerHalf:
    """Return a server half with the tensors of `server` and no more than the first `num_blocks` of its blocks."""
    half = clone(server)
    assert isinstance(half, ServerHalf)
    drop_blocks(half.get_submodule(cut_path(half)), server.cut.index + num_blocks)
    for module in half.modules():  # recomputing saves nothing in so few blocks, and the loss is differentiated twice
        for flag in ("gradient_checkpointing", "grad_checkpointing"):
            if getattr(module, flag, False) is True:
                setattr(module, flag, False)
    return half


def _own_tensors(half: nn.Module) -> None:
    """Give a half trainable copies of its parameters, tied ones still tied, and copies of its buffers."""
    copies: dict[int, nn.Parameter] = {}
    for module in half.modules():
        for name, t in module._buffers.items():
            if t is not None and 0 not in t.stride():  # placeholders stay as light as they are
                module._buffers[name] = t.clone()
        for name, p in module._parameters.items():
            if p is not None:
                if id(p) not in copies:
                    copies[id(p)] = nn.Parameter(p.detach().clone(), requires_grad=p.is_floating_point())
                module._parameters[name] = copies[id(p)]


def _used_parameters(half: nn.Module, smashed: SmashedData) -> dict[str, nn.Parameter]:
    """Return the parameters that the outputs depend on: PEFT leaves the head that it replaced in its wrapper."""
    trainable = {name: p for name, p in half.named_parameters() if p.requires_grad}
    with torch.enable_grad():
        outputs = [t for t in half(smashed).values() if isinstance(t, Tensor) and t.requires_grad]
        gradients = torch.autograd.grad([t.float().sum() for t in outputs], list(trainable.values()), allow_unused=True)
    return {name: p for (name, p), g in zip(trainable.items(), gradients, strict=True) if g is not None}


def _draw(half: nn.Module, base: Any) -> None:
    tuned: list[Any] = [module for module in half.modules() if isinstance(module, BaseTunerLayer)]
    adapters = {id(m) for m in adapter_modules(half)}
    for module in reversed(list(half.modules())):  # from the inside out, as transformers does
        if id(module) in adapters or not any(True for _ in module.parameters()):
            continue
        reset: Any = getattr(module, "reset_parameters", None)
        if callable(reset):
            reset()
        with suppress(RuntimeError):  # placeholders of the client's tensors cannot be written, and need not be
            base._init_weights(module)
    for layer in tuned:  # the model's class would draw both factors of LoRA; the second has to start at zero
        if hasattr(layer, "reset_lora_parameters"):
            for adapter in layer.active_adapters:
                layer.reset_lora_parameters(adapter, True)
