"""The LoRA adapter over both halves: where it sits, which side owns it, how it is saved and loaded."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

from peft import LoraConfig, PeftModel, get_peft_model_state_dict, set_peft_model_state_dict
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.utils import CONFIG_NAME

from . import Half, SplitModel, find_blocks
from .placeholders import unwrapped
from .sources import side_folder

_LINEAR = (nn.Linear, Conv1D)
_WEIGHTS = "adapter_model.safetensors"


def default_lora(
    model: PreTrainedModel, *, head: str | None = None, blocks: str | None = None, rank: int = 4, alpha: int = 8
) -> LoraConfig:
    """Return the paper's adapter: LoRA on every attention and MLP projection of the blocks, and the head.

    Args:
        model: the model that will carry the adapter.
        head: "full" trains the task head itself, "lora" puts LoRA on its linear layers, "frozen" leaves it.
            None is "full", but "frozen" if the head is the output embedding of a language model.
        blocks: dotted path of the block list, if `find_blocks` does not find it.
        rank: r of LoRA.
        alpha: its scale.
    """
    path, _ = find_blocks(model, blocks)
    inside = {name.removeprefix(f"{path}.").split(".", 1)[1] for name in _linear_layers(model, f"{path}.")}
    if not inside:
        raise ValueError(
            f"The blocks {path!r} of {type(model).__name__} hold no linear layers for LoRA. Pass a peft_config with "
            "target_modules of this model, or set full_finetuning=True."
        )
    targets = rf"{re.escape(path)}\.\d+\.(?:{'|'.join(sorted(map(re.escape, inside)))})"
    heads = find_head(model, path)
    if head is None:
        head = "frozen" if heads and _is_output_embedding(model, heads) else "full"
    if head == "lora":
        layers = [name for top in heads for name in _linear_layers(model, top)]
        targets = rf"(?:{targets}|{'|'.join(map(re.escape, layers))})"
    saved = heads if head == "full" and heads else None
    return LoraConfig(r=rank, lora_alpha=alpha, target_modules=targets, modules_to_save=saved)


def find_head(model: nn.Module, path: str) -> list[str]:
    """Return the names of the modules that turn the last block's output into the task's output.

    They are the top-level children with parameters that come after the one holding the blocks; a
    timm model keeps its head inside and says where.
    """
    body = path.split(".", 1)[0]
    inner = getattr(model, body)
    if hasattr(inner, "get_classifier"):  # timm
        return [name for name, module in model.named_modules() if module is inner.get_classifier() and name]
    names = [name for name, child in model.named_children() if any(True for _ in child.parameters())]
    return names[names.index(body) + 1 :] if body in names else []


def _linear_layers(model: nn.Module, prefix: str) -> list[str]:
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, _LINEAR) and (name == prefix or name.startswith(prefix.rstrip(".") + "."))
    ]


def _is_output_embedding(model: PreTrainedModel, heads: list[str]) -> bool:
    output = model.get_output_embeddings()
    return output is not None and any(output is m for name in heads for m in model.get_submodule(name).modules())


def trainable_sides(split: SplitModel) -> tuple[dict[str, nn.Parameter], dict[str, nn.Parameter]]:
    """Return the trainable parameters (client, server) of a split model, by their names in the model."""
    ours = {id(p) for p in split.client.parameters()}
    trainable = {name: p for name, p in split.model.named_parameters() if p.requires_grad}
    client = {name: p for name, p in trainable.items() if id(p) in ours}
    return client, {name: p for name, p in trainable.items() if name not in client}


def save_halves(split: SplitModel, folder: str | Path) -> None:
    """Write `client/` and `server/` below `folder`, each loadable on its own half.

    With PEFT each is a standard adapter restricted to its half; without, each is the half itself.
    """
    client_storage = {p.data_ptr() for p in split.client.parameters()}
    if not isinstance(split.model, PeftModel):
        split.client.save_pretrained(Path(folder) / "client")
        split.server.save_pretrained(Path(folder) / "server")
        return
    tensors = get_peft_model_state_dict(split.model)
    on_client = {name: t.data_ptr() in client_storage for name, t in tensors.items()}
    for side, wanted in (("client", True), ("server", False)):
        part = {name: t for name, t in tensors.items() if on_client[name] is wanted}
        _save_adapter(split.model, part, Path(folder) / side)


def _save_adapter(model: PeftModel, tensors: dict[str, Tensor], folder: Path) -> None:
    """Write a standard PEFT adapter that holds just `tensors`."""
    config: Any = copy.deepcopy(model.peft_config[model.active_adapters[0]])
    names = {name.removeprefix("base_model.model.") for name in tensors}
    tuned = [
        name.removeprefix("base_model.model.")
        for name, module in model.named_modules()
        if isinstance(module, BaseTunerLayer)
    ]
    config.target_modules = {name for name in tuned if any(key.startswith(f"{name}.") for key in names)}
    config.modules_to_save = [
        name for name in config.modules_to_save or [] if any(f".{name}." in f".{key}" for key in names)
    ] or None
    config.inference_mode = True
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(str(folder))
    # The names of the classes. Not beside the whole adapter: transformers would take that for a whole model.
    unwrapped(model).config.save_pretrained(str(folder))
    save_file({name: t.detach().contiguous().cpu() for name, t in tensors.items()}, folder / _WEIGHTS, {"format": "pt"})


def load_adapter(half: Half, source: str | Path, revision: str | None = None, token: str | None = None) -> None:
    """Load a half's own part of an adapter that a `SplitFedTrainer` saved or pushed.

    A half of a base model gets the adapter; a half that has one already gets its weights. Both get the names of the
    classes.

    Args:
        half: a client or server half; its side decides between `client/` and `server/`.
        source: the folder or the id of a repo that holds both, or the folder of this side. Of a repo, only this side's
            files are downloaded.
        revision: branch, tag or commit of the repo.
        token: for private repos; default: the one of `hf auth login` or HF_TOKEN.
    """
    folder = side_folder(source, half.side, _WEIGHTS, revision=revision, token=token)
    if isinstance(half.model, PeftModel):
        result: Any = set_peft_model_state_dict(half.model, load_file(folder / _WEIGHTS))
        if result.unexpected_keys:
            raise ValueError(f"{source} does not fit this half: it has no place for {result.unexpected_keys[:3]} ...")
    else:
        training = half.training
        half.model = PeftModel.from_pretrained(half.model, str(folder))
        half.train(training)
    config: Any = unwrapped(half.model).config
    if (folder / CONFIG_NAME).is_file():
        saved = type(config).from_pretrained(folder)
        if saved.num_labels == config.num_labels:
            config.id2label, config.label2id = saved.id2label, saved.label2id
