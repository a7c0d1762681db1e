"""Tiny models with random weights, one per architecture and head, and a batch for each.

entry = MODELS["bert"]
model, batch = entry.make(), entry.batch()
model(**batch).loss
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers

HIDDEN, BLOCKS, VOCAB, LABELS, BATCH, LENGTH, PADDED = 32, 4, 99, 3, 3, 9, 3
PAD = 1  # also RoBERTa's, whose positions count from it

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class TinyModel:
    """One tiny model: its class, its config, and the kind of batch that it takes."""

    name: str
    head: str
    options: dict[str, Any]
    data: Callable[[], Batch]
    targets: Callable[[], Batch]
    lora: tuple[str, ...]
    attention: tuple[str, ...] = ("eager", "sdpa")
    checkpointing: bool = True
    cuts: tuple[int, ...] = tuple(range(1, BLOCKS))
    make_config: Callable[[dict[str, Any]], Any] | None = field(default=None)

    def make(self, attention: str | None = None, **changes: Any) -> Any:
        """The model, always with the same weights; `changes` go to its config."""
        model_class = getattr(transformers, self.head)
        labels = 2 if "QuestionAnswering" in self.head else LABELS
        options = self.options | {"num_labels": labels} | changes
        config = self.make_config(options) if self.make_config else model_class.config_class(**options)
        config._attn_implementation = attention or self.attention[-1]
        for part in (config, config.get_text_config()):
            if getattr(part, "use_cache", False):  # keys that went through a cache lie in memory in another way, and
                part.use_cache = False  # some processors round products by that; the halves make no cache
        torch.manual_seed(0)
        model = model_class(config)
        with torch.no_grad():  # norms and biases start as ones and zeros: too regular to show mistakes
            for p in model.parameters():
                if p.is_floating_point():
                    p.add_(0.02 * torch.randn_like(p))
        return model

    def batch(self, seed: int = 0) -> Batch:
        """Inputs with padding, and labels."""
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return self.data() | self.targets()


def text() -> Batch:
    """Token ids with the last tokens of the second and third row padded."""
    ids = torch.randint(10, VOCAB, (BATCH, LENGTH))
    mask = torch.ones_like(ids)
    for row in range(1, BATCH):
        ids[row, -PADDED * row + row :], mask[row, -PADDED * row + row :] = PAD, 0
    return {"input_ids": ids, "attention_mask": mask}


def image(side: int = 16) -> Batch:
    """Images with three channels."""
    return {"pixel_values": torch.randn(BATCH, 3, side, side)}


def sound() -> Batch:
    """Waveforms, the second and third shorter than the first."""
    values, mask = torch.randn(BATCH, 400), torch.ones(BATCH, 400, dtype=torch.long)
    for row in range(1, BATCH):
        values[row, -80 * row :], mask[row, -80 * row :] = 0, 0
    return {"input_values": values, "attention_mask": mask}


def spectrogram() -> Batch:
    """Mel features of fixed length."""
    return {"input_features": torch.randn(BATCH, 8, 40)}


def classes() -> Batch:
    """One class per sample."""
    return {"labels": torch.randint(0, LABELS, (BATCH,))}


def spans() -> Batch:
    """Where an answer starts and ends."""
    return {"start_positions": torch.tensor([1, 0, 2]), "end_positions": torch.tensor([3, 2, 4])}


def tags() -> Batch:
    """One class per token."""
    return {"labels": torch.randint(0, LABELS, (BATCH, LENGTH))}


def tokens() -> Batch:
    """The next tokens."""
    return {"labels": torch.randint(10, VOCAB, (BATCH, LENGTH))}


_SIZES = {
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "num_hidden_layers": BLOCKS, "num_attention_heads": 4,
    "intermediate_size": 48, "max_position_embeddings": 64, "pad_token_id": PAD, "bos_token_id": 2, "eos_token_id": 3,
}  # fmt: skip
_DECODER = _SIZES | {"num_key_value_heads": 2, "head_dim": 8, "attention_dropout": 0.1}
_IMAGE = {
    "hidden_size": HIDDEN, "num_hidden_layers": BLOCKS, "num_attention_heads": 4, "intermediate_size": 48,
    "image_size": 16, "patch_size": 4, "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1,
}  # fmt: skip
_SEQ2SEQ = {
    "vocab_size": VOCAB, "d_model": HIDDEN, "encoder_layers": BLOCKS, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": 64,
    "pad_token_id": PAD, "bos_token_id": 2, "eos_token_id": 3, "decoder_start_token_id": 3, "forced_eos_token_id": None,
    "attention_dropout": 0.1, "activation_dropout": 0.1,
}  # fmt: skip
_GPT2 = {
    "vocab_size": VOCAB, "n_embd": HIDDEN, "n_layer": BLOCKS, "n_head": 4, "n_positions": 64, "pad_token_id": PAD,
    "bos_token_id": 2, "eos_token_id": 3,
}  # fmt: skip
_T5 = {
    "vocab_size": VOCAB, "d_model": HIDDEN, "d_kv": 8, "d_ff": 48, "num_layers": BLOCKS, "num_decoder_layers": 2,
    "num_heads": 4, "pad_token_id": PAD, "eos_token_id": 3, "decoder_start_token_id": PAD,
}  # fmt: skip
_DEBERTA = _SIZES | {
    "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8, "norm_rel_ebd": "layer_norm",
    "position_biased_input": False, "share_att_key": True, "type_vocab_size": 0,
}  # fmt: skip
_WAV2VEC2 = {
    "hidden_size": HIDDEN, "num_hidden_layers": BLOCKS, "num_attention_heads": 4, "intermediate_size": 48,
    "conv_dim": (8, 8, 8), "conv_stride": (4, 2, 2), "conv_kernel": (5, 3, 3), "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2, "layerdrop": 0.0, "mask_time_length": 2, "mask_time_prob": 0.2,
    "classifier_proj_size": 16, "vocab_size": VOCAB, "feat_proj_dropout": 0.1,
}  # fmt: skip
_WHISPER = {
    "vocab_size": VOCAB, "d_model": HIDDEN, "encoder_layers": BLOCKS, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "num_mel_bins": 8, "dropout": 0.1,
    "max_source_positions": 20, "max_target_positions": 20, "pad_token_id": PAD, "bos_token_id": 2, "eos_token_id": 3,
    "decoder_start_token_id": 3, "classifier_proj_size": 16, "begin_suppress_tokens": None,
}  # fmt: skip
_SWIN = {
    "image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [2, 2, 2], "num_heads": [2, 2, 4], "window_size": 4,
    "drop_path_rate": 0.2, "hidden_dropout_prob": 0.1,
}  # fmt: skip
_FALCON = {key: value for key, value in _SIZES.items() if key != "intermediate_size"} | {
    "hidden_dropout": 0.1, "attention_dropout": 0.1, "new_decoder_architecture": False, "multi_query": True,
}  # fmt: skip


def _clip_config(options: dict[str, Any]) -> Any:
    labels = options.pop("num_labels")
    vision = _IMAGE | {"attention_dropout": 0.1} | options
    text_part = _SIZES | {"num_hidden_layers": 1}
    return transformers.CLIPConfig(vision_config=vision, text_config=text_part, num_labels=labels)


def _timm_config(options: dict[str, Any]) -> Any:
    labels = options.pop("num_labels")
    return transformers.TimmWrapperConfig(num_labels=labels, **options)


_TIMM_VIT = {
    "architecture": "vit_tiny_patch16_224",
    "model_args": {
        "img_size": 32, "patch_size": 8, "embed_dim": HIDDEN, "depth": BLOCKS, "num_heads": 4, "pos_drop_rate": 0.1,
        "proj_drop_rate": 0.1, "attn_drop_rate": 0.1, "drop_path_rate": 0.2,
    },
}  # fmt: skip


def _entries() -> list[TinyModel]:
    attention, qv, two = ("query", "value"), ("q_proj", "v_proj"), (1, 2)
    eager = ("eager",)
    return [
        TinyModel("bert", "BertForSequenceClassification", _SIZES, text, classes, attention),
        TinyModel("bert-mlm", "BertForMaskedLM", _SIZES, text, tokens, attention),
        TinyModel("roberta-qa", "RobertaForQuestionAnswering", _SIZES, text, spans, attention),
        TinyModel("distilbert-tags", "DistilBertForTokenClassification", {
            "vocab_size": VOCAB, "dim": HIDDEN, "n_layers": BLOCKS, "n_heads": 4, "hidden_dim": 48,
            "max_position_embeddings": 64, "pad_token_id": PAD,
        }, text, tags, ("q_lin", "v_lin")),
        TinyModel("deberta-v2", "DebertaV2ForSequenceClassification", _DEBERTA, text, classes,
                  ("query_proj", "value_proj"), attention=eager),
        TinyModel("mpnet", "MPNetForSequenceClassification", _SIZES, text, classes, ("q", "v"), attention=eager,
                  checkpointing=False),
        TinyModel("electra-qa", "ElectraForQuestionAnswering", _SIZES | {"embedding_size": 16}, text, spans, attention),
        TinyModel("modernbert-tags", "ModernBertForTokenClassification", _SIZES | {
            "cls_token_id": 2, "sep_token_id": 3, "local_attention": 4, "attention_dropout": 0.1, "mlp_dropout": 0.1,
            "embedding_dropout": 0.1, "reference_compile": False,
        }, text, tags, ("Wqkv",)),
        TinyModel("gpt2", "GPT2ForSequenceClassification", _GPT2, text, classes, ("c_attn",)),
        TinyModel("gpt2-lm", "GPT2LMHeadModel", _GPT2, text, tokens, ("c_attn",)),
        TinyModel("opt", "OPTForSequenceClassification", {
            "vocab_size": VOCAB, "hidden_size": HIDDEN, "num_hidden_layers": BLOCKS, "num_attention_heads": 4,
            "ffn_dim": 48, "max_position_embeddings": 64, "word_embed_proj_dim": HIDDEN, "pad_token_id": PAD,
            "bos_token_id": 2, "eos_token_id": 3,
        }, text, classes, qv),
        TinyModel("gpt-neox-qa", "GPTNeoXForQuestionAnswering", _SIZES | {"attention_dropout": 0.1}, text, spans,
                  ("query_key_value",)),
        TinyModel("bloom-tags", "BloomForTokenClassification", {
            "vocab_size": VOCAB, "hidden_size": HIDDEN, "n_layer": BLOCKS, "n_head": 4, "pad_token_id": PAD,
            "hidden_dropout": 0.1, "attention_dropout": 0.1,
        }, text, tags, ("query_key_value",), attention=eager),
        TinyModel("falcon", "FalconForSequenceClassification", _FALCON, text, classes, ("query_key_value",)),
        TinyModel("falcon-alibi", "FalconForSequenceClassification", _FALCON | {"alibi": True}, text, classes,
                  ("query_key_value",)),
        TinyModel("llama", "LlamaForSequenceClassification", _DECODER, text, classes, qv),
        TinyModel("llama-lm", "LlamaForCausalLM", _DECODER, text, tokens, qv),
        TinyModel("mistral-tags", "MistralForTokenClassification", _DECODER | {"sliding_window": 4}, text, tags, qv),
        TinyModel("qwen2-lm", "Qwen2ForCausalLM", _DECODER | {"tie_word_embeddings": True}, text, tokens, qv),
        TinyModel("qwen3-qa", "Qwen3ForQuestionAnswering", _DECODER, text, spans, qv),
        TinyModel("gemma2", "Gemma2ForSequenceClassification", _DECODER | {"sliding_window": 4}, text, classes, qv,
                  attention=eager),
        TinyModel("gemma3-lm", "Gemma3ForCausalLM", _DECODER | {"sliding_window": 4}, text, tokens, qv),
        TinyModel("phi", "PhiForSequenceClassification", _SIZES | {"resid_pdrop": 0.1, "attention_dropout": 0.1}, text,
                  classes, qv),
        TinyModel("mixtral", "MixtralForSequenceClassification", _DECODER | {"num_local_experts": 4}, text, classes,
                  qv),
        TinyModel("t5", "T5ForConditionalGeneration", _T5, text, tokens, ("q", "v"), attention=eager),
        TinyModel("t5-tags", "T5ForTokenClassification", _T5, text, tags, ("q", "v"), attention=eager),
        TinyModel("bart", "BartForConditionalGeneration", _SEQ2SEQ, text, tokens, qv),
        TinyModel("vit", "ViTForImageClassification", _IMAGE, image, classes, qv),
        TinyModel("deit", "DeiTForImageClassification", _IMAGE, image, classes, qv),
        TinyModel("beit", "BeitForImageClassification", _IMAGE | {
            "use_relative_position_bias": True, "drop_path_rate": 0.2, "layer_scale_init_value": 0.1,
        }, image, classes, qv),
        TinyModel("beit-shared", "BeitForImageClassification", _IMAGE | {
            "use_shared_relative_position_bias": True, "drop_path_rate": 0.2,
        }, image, classes, qv),
        TinyModel("dinov2", "Dinov2ForImageClassification", _IMAGE | {"drop_path_rate": 0.2}, image, classes, qv),
        TinyModel("swin", "SwinForImageClassification", _SWIN, lambda: image(32), classes, qv, cuts=two),
        TinyModel("swinv2", "Swinv2ForImageClassification", _SWIN, lambda: image(32), classes, attention,
                  attention=eager, cuts=two),
        TinyModel("clip-vision", "CLIPForImageClassification", {}, image, classes, qv, make_config=_clip_config),
        TinyModel("wav2vec2", "Wav2Vec2ForSequenceClassification", _WAV2VEC2, sound, classes, qv),
        TinyModel("whisper-encoder", "WhisperForAudioClassification", _WHISPER, spectrogram, classes, qv),
        TinyModel("whisper", "WhisperForConditionalGeneration", _WHISPER, spectrogram, tokens, qv),
        TinyModel("timm-vit", "TimmWrapperForImageClassification", _TIMM_VIT, lambda: image(32), classes, ("qkv",),
                  attention=("sdpa",), make_config=_timm_config),
    ]  # fmt: skip


MODELS = {entry.name: entry for entry in _entries()}
