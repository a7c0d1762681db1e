"""Which architectures can be split: a tiny model of every one in transformers, halves against the unsplit model.

python benchmarks/architectures.py                       # the table of all, about five minutes on one core
python benchmarks/architectures.py --only roformer pvt   # some model types, with the full reasons
python benchmarks/architectures.py --write docs/architectures.md
"""

from __future__ import annotations

import argparse
import gc
import re
import sys
import textwrap
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from tqdm import tqdm
from transformers.models.auto import modeling_auto

from hf_coefsfl import split_model
from hf_coefsfl.split.blocks import find_blocks, members
from hf_coefsfl.split.placeholders import example_inputs

HEADS = {  # columns of the table: the auto class whose models have this head
    "sequence classification": "SEQUENCE_CLASSIFICATION",
    "token classification": "TOKEN_CLASSIFICATION",
    "question answering": "QUESTION_ANSWERING",
    "causal LM": "CAUSAL_LM",
    "masked LM": "MASKED_LM",
    "text to text": "SEQ_TO_SEQ_CAUSAL_LM",
    "image classification": "IMAGE_CLASSIFICATION",
    "video classification": "VIDEO_CLASSIFICATION",
    "audio classification": "AUDIO_CLASSIFICATION",
    "speech to text": "SPEECH_SEQ_2_SEQ",
}
VOCAB, LAYERS, HIDDEN, HEADS_OF_ATTENTION, LARGEST = 160, 4, 32, 4, 20_000_000
TOLERANCE = 1e-4

# The fields of a config that set its size, and a small value for each.
SIZES: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCAB),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "emb_dim", "dim", "word_embed_proj_dim", "embedding_size"),
                    HIDDEN),
    **dict.fromkeys(("num_hidden_layers", "encoder_layers", "decoder_layers", "num_layers", "n_layer", "n_layers",
                     "num_decoder_layers", "depth"), LAYERS),
    **dict.fromkeys(("num_attention_heads", "encoder_attention_heads", "decoder_attention_heads", "n_head", "n_heads",
                     "num_heads"), HEADS_OF_ATTENTION),
    **dict.fromkeys(("intermediate_size", "encoder_ffn_dim", "decoder_ffn_dim", "ffn_dim", "d_ff", "d_inner",
                     "moe_intermediate_size", "shared_expert_intermediate_size", "hidden_dim", "ffn_hidden_size"), 48),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_source_positions", "max_target_positions",
                     "max_length", "max_seq_len"), 64),
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts", "rotary_dim",
                     "num_conv_pos_embedding_groups", "num_groups", "sliding_window", "coordinate_size"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "num_encoder_layers", "num_frames"), 2),
    **dict.fromkeys(("projection_dim", "codevector_dim", "proj_codevector_dim", "embed_dim", "num_mel_bins",
                     "shape_vocab_size", "pronunciation_vocab_size", "entity_vocab_size", "entity_emb_size"), 16),
    **dict.fromkeys(("head_dim", "d_kv", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "kv_lora_rank",
                     "q_lora_rank", "num_conv_pos_embeddings", "mamba_n_heads", "mamba_d_head", "shape_size",
                     "shape_embed_dim", "pronunciation_embed_dim"), 8),
    **dict.fromkeys(("layerdrop", "encoder_layerdrop", "speech_encoder_layerdrop"), 0.0),
    **dict.fromkeys(("image_size", "input_size"), 64),
    "patch_size": 16, "pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 3, "use_cache": False, "n_group": 1,
    "topk_group": 1, "conv_pos_kernel_size": 3,
}  # fmt: skip
LISTS: dict[str, Callable[[list[Any]], list[Any]]] = {  # the same for fields with a value for each stage
    **dict.fromkeys(("hidden_sizes", "embed_dims"), lambda sizes: [16 * max(1, round(s / sizes[0])) for s in sizes]),
    **dict.fromkeys(("num_heads", "num_attention_heads"), lambda heads: [2] * len(heads)),
    "conv_dim": lambda sizes: [16] * len(sizes),
    "depths": lambda depths: [min(depth, 2) for depth in depths],
    "image_size": lambda sides: [64] * len(sides),
}
# What these do not get right.
CHANGES: dict[str, dict[str, Any]] = {
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "lilt": {"hidden_size": 48},
    "mamba2": {"num_heads": 8},
    **{name: {"patch_size": 4, "window_size": 2} for name in ("swin", "swinv2", "donut-swin")},
    "xmod": {"languages": ["en"], "default_language": "en"},
    "zaya": {"num_experts_per_tok": 1},
}


# Reasons of `split_model` in a few words.
SHORT = {
    "applies one shared block": "one shared block is applied several times",
    "ran 0 times": "the first list of blocks does not run on this input alone; name another with `blocks=`",
    r"ran \d+ times": "its blocks run several times",
    "changes its own parameters": "its forward pass changes its own weights",
    "must contain at least one <eos>|decoder_inputs_embeds": "its server side needs the token ids as well",
    "'NoneType' object has no attribute": "it reads weights outside its blocks without gradients",
    "support the deepcopy": "it keeps tensors of an earlier forward pass",
    "outputs differ": "its server side needs more than the hidden state at the cut",
    "gradients differ": "gradients differ",
}


@dataclass
class Result:
    """What became of one model class."""

    model_type: str
    head: str
    name: str
    verdict: str  # exact, refused, wrong, error or not built
    reason: str = ""


def model_classes(only: Iterable[str] = ()) -> list[tuple[str, str, str]]:
    """Every (model type, head, name of the class) of the auto classes, each class once."""
    seen: dict[str, tuple[str, str, str]] = {}
    for head, mapping in HEADS.items():
        for model_type, names in getattr(modeling_auto, f"MODEL_FOR_{mapping}_MAPPING_NAMES").items():
            for name in (names,) if isinstance(names, str) else names:
                seen.setdefault(name, (model_type, head, name))
    return sorted(entry for entry in seen.values() if not only or entry[0] in only)


def tiny_config(config_class: Any) -> Any:
    """A config whose size fields, and those of the configs in it, are small."""
    default = config_class()
    fields = default.to_dict()
    inner = {name: part for name in default.sub_configs if (part := getattr(default, name, None)) is not None}
    options: dict[str, Any] = {name: tiny_config(type(part)).to_dict() for name, part in inner.items()}
    for name, value in fields.items():
        if name in inner or name in default.attribute_map:
            continue
        if isinstance(value, (list, tuple)):
            if name in LISTS:
                options[name] = LISTS[name](list(value))
        elif name in SIZES:
            options[name] = SIZES[name]
        elif name == "num_key_value_heads":
            options[name] = 2 if value and value < fields["num_attention_heads"] else HEADS_OF_ATTENTION
        elif name.endswith(("_token_id", "_token_index")) and isinstance(value, int) and value >= VOCAB:
            options[name] = VOCAB - 1 - len(options) % 20
    if default.is_encoder_decoder:
        options["decoder_start_token_id"] = SIZES["bos_token_id"]
    return config_class(**(options | CHANGES.get(default.model_type, {})))


def build(name: str) -> Any:
    """The tiny model with random weights, none of them regular."""
    model_class = getattr(transformers, name)
    config = tiny_config(model_class.config_class)
    with torch.device("meta"):
        size = sum(p.numel() for p in model_class(config).parameters())
    if size > LARGEST:
        raise ValueError(f"still has {size:,} parameters")
    torch.manual_seed(0)
    model = model_class(config)
    with torch.no_grad():
        for p in model.parameters():
            if p.is_floating_point():
                p.add_(0.1 * torch.randn_like(p))
    return model.float()


def other_batch(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Another batch of the same kind than the one that `split_model` calibrates on: rows swapped, values changed."""
    generator = torch.Generator().manual_seed(1)
    batch = {key: t.flip(0) for key, t in inputs.items()}
    for key, t in batch.items():
        if t.is_floating_point():
            batch[key] = t + 0.3 * torch.randn(t.shape, generator=generator)
        elif key == "input_ids":
            ordinary = t > 8  # below are the special ones
            batch[key] = torch.where(ordinary, 9 + (t * 7) % (VOCAB - 12), t)
    return batch


def run(model: Any, forward: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The outputs of a forward pass, and the gradients of a weighted sum of them."""
    output = forward()
    tensors = {key: t for key, t in output.items() if isinstance(t, Tensor) and t.is_floating_point()}
    generator = torch.Generator().manual_seed(2)
    total = sum((t * torch.randn(t.shape, generator=generator)).sum() for t in tensors.values() if t.requires_grad)
    total.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return {key: t.detach() for key, t in tensors.items()}, gradients


def gap(got: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest difference of any tensor, relative to its norm or a hundredth of the largest norm."""
    largest = max(float(t.norm()) for t in expected.values())
    worst = 0.0
    for key in got.keys() | expected.keys():
        if key not in got or key not in expected:
            present = got.get(key, expected.get(key))
            difference = norm = float(present.norm())
        else:
            difference, norm = float((got[key] - expected[key]).norm()), float(expected[key].norm())
        worst = max(worst, difference / max(norm, largest / 100, 1e-12))
    return worst


def examine(model_type: str, head: str, name: str) -> Result:
    """Build one model, split it in the middle and compare it with its halves."""
    torch.manual_seed(0)
    try:
        model = build(name).eval()
        inputs = example_inputs(model)
        batch = other_batch(inputs)
        expected = run(model, lambda: model(**batch))
    except Exception as error:
        return Result(model_type, head, name, "not built", f"{type(error).__name__}: {error}")
    try:
        path, container = find_blocks(model)
        split = split_model(model, max(1, len(members(container)) // 2))
        got = run(model, lambda: split.server(split.client(**batch)))
    except ValueError as error:
        return Result(model_type, head, name, "refused", str(error))
    except Exception as error:
        return Result(model_type, head, name, "error", f"{type(error).__name__}: {error}")
    logits, gradients = gap(got[0], expected[0]), gap(got[1], expected[1])
    verdict = "exact" if max(logits, gradients) <= TOLERANCE else "wrong"
    return Result(model_type, head, name, verdict, f"{path}; outputs {logits:.0e}, gradients {gradients:.0e}")


def sweep(only: Iterable[str] = (), report: Callable[[Result], None] | None = None) -> list[Result]:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    results: list[Result] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for entry in tqdm(model_classes(only), unit="model", disable=not sys.stderr.isatty()):
            results.append(examine(*entry))
            if report:
                report(results[-1])
            if len(results) % 20 == 0:
                gc.collect()  # the halves refer to each other
    return results


def shortened(reason: str) -> str:
    """A reason in a few words, for the table."""
    text = " ".join(reason.split())
    return next((words for pattern, words in SHORT.items() if re.search(pattern, text)), text[:120]).replace("|", "/")


def as_markdown(results: list[Result]) -> str:
    """The page docs/architectures.md."""
    counts = Counter(r.verdict for r in results)
    tried = [r for r in results if r.verdict != "not built"]
    lines = [
        "# Architectures",
        "",
        "Which models of transformers can be split. `python benchmarks/architectures.py --write docs/architectures.md`",
        "writes this page: it builds a tiny model with random weights of every class of the auto classes below, splits",
        "it in the middle, and compares outputs and gradients of client-then-server with the unsplit model on a batch",
        "that `split_model` has not seen. `exact` means that both agree within 1e-4, relative. `split_model` makes the",
        "same comparison on an example before it returns, so a model that is not listed is refused if it is not exact.",
        "",
        *textwrap.wrap(
            f"transformers {transformers.__version__}: of {len(tried)} models, **{counts['exact']} are exact** and "
            f"{counts['refused']} are refused with a reason; {counts['wrong']} are accepted although they differ, "
            f"{counts['error']} end in another error.",
            118,
        ),
        f"Another {counts['not built']} were not tried (last section).",
        "",
        *textwrap.wrap(f"Heads: {', '.join(HEADS)}.", 118),
        "",
        "| model type | exact | refused, and why |",
        "|---|---|---|",
    ]
    for model_type in sorted({r.model_type for r in tried}):
        rows = [r for r in tried if r.model_type == model_type]
        exact = list(dict.fromkeys(r.head for r in rows if r.verdict == "exact"))
        reasons: dict[str, list[str]] = {}
        for r in rows:
            if r.verdict != "exact":
                why = shortened(r.reason) if r.verdict == "refused" else f"{r.verdict}: {shortened(r.reason)}"
                reasons.setdefault(why, []).append(r.head)
        why = "; ".join(f"{', '.join(dict.fromkeys(heads))}: {reason}" for reason, heads in reasons.items())
        lines.append(f"| {model_type} | {', '.join(exact)} | {why} |")
    skipped = sorted({r.model_type for r in results if r.verdict == "not built"})
    lines += [
        "",
        "## Not tried",
        "",
        "The sweep finds no small config that runs for some classes of these model types, or they need a package or an",
        "input that it does not have (boxes, visual features, the detectron2 library). That says nothing about the",
        "split: try `split_model` on the model itself.",
        "",
        textwrap.fill(", ".join(skipped) + ".", 120, break_on_hyphens=False),
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", default=[], metavar="MODEL_TYPE", help="model types to try (default: all)")
    parser.add_argument("--write", type=Path, metavar="FILE", help="also write the table to this Markdown file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    results = sweep(args.only, lambda r: tqdm.write(f"{r.verdict:10}{r.name:45}{' '.join(r.reason.split())}"))
    print(", ".join(f"{count} {verdict}" for verdict, count in Counter(r.verdict for r in results).most_common()))
    if args.write:
        args.write.write_text(as_markdown(results), encoding="utf-8")


if __name__ == "__main__":
    main()
