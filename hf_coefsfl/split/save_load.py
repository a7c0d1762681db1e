"""Writing a half of a model to a folder and reading it back, without the other half's weights.

The folder holds `config.json` (the model's), `split.json` (where it was cut), `model.safetensors`
(this half's parameters and all its buffers) and, under PEFT, the adapters' configs. Reading builds
the model on the meta device, cuts it, and fills in the tensors: the whole model is never allocated,
and nothing is unpickled.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import transformers
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .blocks import members
from .placeholders import unwrapped
from .precision import bridge_dtypes
from .quantized import beside_weights, check_can_be_saved, fill_quantised, is_quantised, quantise_skeleton
from .sources import side_folder
from .surgery import Cut, cut_path, handover_path, make_client, make_server

if TYPE_CHECKING:
    from .halves import ClientHalf, Half, ServerHalf

_FORMAT = 1
_SPLIT, _TENSORS = "split.json", "model.safetensors"


def save_half(half: Half, folder: str | Path) -> None:
    """Write a half to `folder`, which is made if needed."""
    folder = Path(folder)
    base = unwrapped(half.model)
    _model_class(type(base).__name__, type(base))
    adapters = getattr(half.model, "peft_config", {}) if base is not half.model else {}
    for name, config in adapters.items():
        if config.is_prompt_learning:
            raise ValueError(
                f"Adapter {name!r} ({config.peft_type}) makes virtual tokens from the whole model's embeddings: a half "
                "with it cannot be saved. Use an adapter of the weights, such as LoRA."
            )
    check_can_be_saved(half.model)
    folder.mkdir(parents=True, exist_ok=True)
    base.config.save_pretrained(folder)
    for name, config in adapters.items():
        config.save_pretrained(str(_adapter_folder(folder, name)))
    parameters = dict(half.model.named_parameters())
    description = {
        "format": _FORMAT,
        "side": half.side,
        "model_class": type(base).__name__,
        "attention": getattr(base.config, "_attn_implementation", None),
        "adapters": list(adapters),
        "active_adapters": list(cast(Any, half.model).active_adapters) if adapters else [],
        "parameters": sorted(parameters),
        "trainable": sorted(name for name, p in parameters.items() if p.requires_grad),
        # A wrapper may have moved the blocks since the split.
        "cut": asdict(half.cut) | {"blocks": cut_path(half.model), "handover": handover_path(half.model)},
    }
    (folder / _SPLIT).write_text(json.dumps(description, indent=2) + "\n", encoding="utf-8")
    tensors: dict[str, Tensor] = {}
    for (module, key), name in _slots(half.model).items():
        value = _get(module, key)
        if name not in tensors and not any(value is t for t in tensors.values()):
            tensors[name] = value
    tensors |= dict(beside_weights(half.model))
    save_file({name: t.detach().clone().contiguous() for name, t in tensors.items()}, folder / _TENSORS)


def load_client(source: str | Path, revision: str | None = None, token: str | None = None) -> ClientHalf:
    """Read a client half that `save_pretrained` wrote; it is in evaluation mode, on the CPU.

    Args:
        source: the half's folder, or a folder or the id of a repo with `client/` in it, as full fine-tuning leaves
            them. Of a repo, only `client/` is downloaded.
        revision: branch, tag or commit of the repo.
        token: for private repos; default: the one of `hf auth login` or HF_TOKEN.
    """
    from .halves import ClientHalf

    model, cut = _load(side_folder(source, "client", _SPLIT, revision=revision, token=token), "client")
    return ClientHalf(model, cut)


def load_server(source: str | Path, revision: str | None = None, token: str | None = None) -> ServerHalf:
    """Read a server half that `save_pretrained` wrote; it is in evaluation mode, on the CPU.

    Args:
        source: the half's folder, or a folder or the id of a repo with `server/` in it, as full fine-tuning leaves
            them. Of a repo, only `server/` is downloaded.
        revision: branch, tag or commit of the repo.
        token: for private repos; default: the one of `hf auth login` or HF_TOKEN.
    """
    from .halves import ServerHalf

    model, cut = _load(side_folder(source, "server", _SPLIT, revision=revision, token=token), "server")
    return ServerHalf(model, cut)


def _load(folder: Path, side: str) -> tuple[nn.Module, Cut]:
    description, cut = _read_description(folder, side)
    model = _skeleton(folder, description)
    _check_cut(model, cut, folder)
    named = dict(model.named_parameters())
    unknown = [name for name in description["parameters"] if name not in named]
    if unknown:
        raise ValueError(f"{folder / _SPLIT} names {unknown[0]!r}, which {description['model_class']} does not have.")
    owned = {id(named[name]) for name in description["parameters"]}
    (make_client if side == "client" else make_server)(model, cut, owned)
    try:
        tensors = load_file(folder / _TENSORS)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{folder / _TENSORS} cannot be read ({error}). Copy or write the half anew.") from error
    fill_quantised(model, tensors)
    _fill(model, tensors, set(description["trainable"]))
    bridge_dtypes(model)
    return model.eval(), cut


def _read_description(folder: Path, side: str) -> tuple[dict[str, Any], Cut]:
    try:
        description = json.loads((folder / _SPLIT).read_text(encoding="utf-8"))
        if description["format"] != _FORMAT:
            raise ValueError(f"it has format {description['format']}, this version reads {_FORMAT}")
        missing = {"side", "model_class", "attention", "adapters", "active_adapters", "parameters", "trainable"}
        missing -= description.keys()
        if missing:
            raise ValueError(f"it lacks {', '.join(sorted(missing))}")
        lists = {name: tuple(description["cut"][name]) for name in ("templates", "crossing")}
        cut = Cut(**{**description["cut"], **lists})
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"{folder / _SPLIT} cannot be read ({type(error).__name__}: {error}). Copy or write the half anew."
        ) from error
    if description["side"] != side:
        raise ValueError(f"{folder} holds a {description['side']} half; read it with load_{description['side']}.")
    return description, cut


def _check_cut(model: nn.Module, cut: Cut, folder: Path) -> None:
    """Refuse a cut that the model does not have."""
    try:
        blocks = len(members(model.get_submodule(cut.blocks)))
    except AttributeError:
        raise ValueError(f"{folder / _SPLIT} names the blocks {cut.blocks!r}, which the model does not have.") from None
    if cut.num_blocks != blocks or type(cut.index) is not int or not 0 < cut.index < blocks:
        raise ValueError(
            f"{folder / _SPLIT} has the cut {cut.index!r} of {cut.num_blocks!r} blocks, and the model has {blocks}: a "
            f"cut is a number 1..{blocks - 1}."
        )


def _skeleton(folder: Path, description: dict[str, Any]) -> nn.Module:
    """The whole model with its adapters, without any memory for its weights."""
    model_class = _model_class(description["model_class"])
    config = model_class.config_class.from_pretrained(folder)
    known = ("eager", *ALL_ATTENTION_FUNCTIONS.valid_keys())  # others are loaded from the Hub, with their code
    if description["attention"] not in (None, *known):
        raise ValueError(
            f"{folder / _SPLIT} names the attention implementation {description['attention']!r}. Choose one of: "
            f"{', '.join(known)}."
        )
    config._attn_implementation = description["attention"]
    with torch.device("meta"):
        model = model_class(config)
        quantise_skeleton(model, folder)
        if not description["adapters"]:
            return model
        from peft import PeftConfig, get_peft_model

        first, *others = description["adapters"]
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*base_model_name_or_path")  # a skeleton has no name
            wrapped = get_peft_model(model, PeftConfig.from_pretrained(str(_adapter_folder(folder, first))), first)
        for name in others:
            wrapped.add_adapter(name, PeftConfig.from_pretrained(str(_adapter_folder(folder, name))))
    if description["active_adapters"] != [first]:
        wrapped.base_model.set_adapter(description["active_adapters"])
    return wrapped


def _model_class(name: str, own: type | None = None) -> Any:
    """The class of this name in transformers; code from elsewhere is never run."""
    model_class = getattr(transformers, name, None)
    if not (isinstance(model_class, type) and issubclass(model_class, transformers.PreTrainedModel)) or own not in (
        None,
        model_class,
    ):
        raise ValueError(
            f"{name!r} is not a model class of transformers {transformers.__version__}: a half of a class from "
            "elsewhere cannot be saved to or read from a folder. Keep it in memory, or use a class of transformers."
        )
    return model_class


def _adapter_folder(folder: Path, name: str) -> Path:
    return folder if name == "default" else folder / name


def _slots(model: nn.Module) -> dict[tuple[nn.Module, str], str]:
    """Every place in a half that holds a tensor of its own, with its name; what is hollow is left out."""
    return {
        (module, key): f"{path}.{key}" if path else key
        for path, module in model.named_modules()
        for key, value in _tensors(module)
        if not (value.dim() and 0 in value.stride() and value.untyped_storage().nbytes() == value.element_size())
    }


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for group in (module._parameters, module._buffers, vars(module)):
        yield from ((key, value) for key, value in list(group.items()) if isinstance(value, Tensor))


def _get(module: nn.Module, key: str) -> Tensor:
    return next(value for name, value in _tensors(module) if name == key)


def _fill(model: nn.Module, tensors: dict[str, Tensor], trainable: set[str]) -> None:
    """Put loaded tensors where the skeleton has tensors on the meta device; tied ones stay tied."""
    filled: dict[int, Tensor] = {}
    missing: list[str] = []
    for (module, key), name in _slots(model).items():
        value = _get(module, key)
        if is_quantised(value):
            continue
        if id(value) not in filled:
            if name not in tensors:
                missing.append(name)
                continue
            loaded = tensors[name]
            _check_tensor(name, loaded, value)
            is_parameter = isinstance(value, nn.Parameter)
            filled[id(value)] = nn.Parameter(loaded, name in trainable) if is_parameter else loaded
        groups: tuple[dict[str, Any], ...] = (module._parameters, module._buffers, vars(module))
        next(group for group in groups if group.get(key) is value)[key] = filled[id(value)]
    if missing:
        raise ValueError(f"{_TENSORS} lacks {len(missing)} tensors of this half: {', '.join(missing[:5])}.")


def _check_tensor(name: str, loaded: Tensor, wanted: Tensor) -> None:
    if loaded.shape != wanted.shape or loaded.is_floating_point() != wanted.is_floating_point():
        raise ValueError(
            f"{name} in {_TENSORS} is {loaded.dtype} of shape {tuple(loaded.shape)}, and the model of config.json "
            f"needs {wanted.dtype} of shape {tuple(wanted.shape)}. Copy or write the half anew."
        )
    if not (isinstance(wanted, nn.Parameter) and loaded.is_floating_point() and loaded.numel()):
        return  # a buffer may hold infinity, as masks do
    low, high = loaded.aminmax()  # which allocates nothing, and is NaN if an entry is
    if not (math.isfinite(low) and math.isfinite(high)):
        raise ValueError(f"{name} in {_TENSORS} holds NaN or infinity. Copy or write the half anew.")
