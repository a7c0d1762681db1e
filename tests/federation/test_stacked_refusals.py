"""What clients that are stacked would not do as one after the other is refused before training starts."""

from pathlib import Path
from typing import Any

import pytest
from torch import nn
from transformers import (
    BertConfig,
    BertForTokenClassification,
    DebertaV2Config,
    DebertaV2ForSequenceClassification,
)
from transformers.models.vit.modeling_vit import ViTEmbeddings

from hf_coefsfl import METHODS
from tests.support.federated import config, tiny_bert, tiny_vit
from tests.support.stacked import STACKABLE, make, of_clients


@pytest.mark.parametrize("method", sorted(METHODS.keys() - STACKABLE))
def test_other_methods(tmp_path: Path, method: str) -> None:
    with pytest.raises(
        ValueError, match=f"stacked_clients=2 does not work with method='{method}'.*: vanilla, .*coef_d"
    ):
        config(tmp_path, stacked_clients=2, method=method)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"smashed_noise": 0.1}, "smashed_noise=0.1: each client draws noise of its own"),
        ({"exchange_dtype": "int4"}, "the codec int4: each client has random numbers or a scale of its own"),
        ({"exchange_codec": {"gradients": "topk8"}}, "the codec topk8: each client has"),
        ({"exchange_dtype": "float16"}, "the codec float16: each client has"),
        ({"torch_compile": True}, "torch_compile=True: compiled blocks hold the weights of one client"),
        ({"optim": "adafactor"}, "optim='adafactor': its steps are not elementwise. Use one of adamw_torch, "),
    ],
)
def test_options(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    settings = {"method": "coef_w", **changes}
    config(tmp_path, **settings)
    with pytest.raises(ValueError, match=f"stacked_clients=2 does not work with {reason}.*stacked_clients at 1"):
        config(tmp_path, stacked_clients=2, **settings)


@pytest.mark.parametrize("value", [0, -1, 2.0, True])
def test_values(tmp_path: Path, value: Any) -> None:
    with pytest.raises(ValueError, match=r"stacked_clients=.* must be a whole number of at least 1"):
        config(tmp_path, stacked_clients=value, method="coef_w")


@pytest.mark.parametrize("kind", ["vit", "bert"])
def test_dropout(tmp_path: Path, kind: str) -> None:
    """It is refused where it draws, not where it stands: switched off it may stay."""
    model = {"vit": tiny_vit, "bert": tiny_bert}[kind]
    with pytest.raises(ValueError, match=r"does not work with random numbers: .* Set dropout='off', or the model's"):
        make(tmp_path, 2, kind, model(0.1))
    make(tmp_path, 2, kind, model(0.1), dropout="off")


def test_a_layer_of_a_table_that_samples_share(tmp_path: Path) -> None:
    """DeBERTa adapts layers that it applies to its table of positions, whose rows are no samples."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 32}
    relative = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 16}
    shared: Any = {"share_att_key": True, "position_biased_input": False, "norm_rel_ebd": "layer_norm"}
    settings = DebertaV2Config(
        vocab_size=40, num_labels=3, type_vocab_size=0, pad_token_id=0, **sizes, **relative, **shared
    )
    model = DebertaV2ForSequenceClassification(settings)
    with pytest.raises(ValueError, match=r"raises ValueError: .* tensor of shape \(1, \d+, 16\), which has no samples"):
        make(tmp_path, 2, "bert", model, dropout="off")


def test_layers_that_are_not_linear(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"with vit\.embeddings\.\S+, which is trained and belongs to a \w+: only lin"):
        make(tmp_path, 2, model=tiny_vit(0.0), full_finetuning=True)


def test_a_loss_over_tokens(tmp_path: Path) -> None:
    sizes = {"hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 32}
    model = BertForTokenClassification(BertConfig(vocab_size=40, **sizes, num_labels=3))
    data = [rows.map(lambda row: {"labels": [0] * len(row["input_ids"])}) for rows in of_clients("bert", (4, 4))]
    with pytest.raises(ValueError, match="for a ForTokenClassification loss, in which samples do not weigh the same"):
        make(tmp_path, 2, "bert", model, data=data, data_collator=None)


def test_a_weight_that_is_used_without_its_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_vit(0.0)

    def functional(self: Any, x: Any) -> Any:
        return nn.functional.linear(x, self.modules_to_save["default"].weight, self.modules_to_save["default"].bias)

    monkeypatch.setattr("peft.utils.other.ModulesToSaveWrapper.forward", functional)
    with pytest.raises(ValueError, match=r"classifier.*, which the model uses otherwise than by calling its layer"):
        make(tmp_path, 2, model=model)


def test_samples_that_are_not_independent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = ViTEmbeddings.forward

    def mixing(self: Any, *args: Any, **kwargs: Any) -> Any:
        embedded = own(self, *args, **kwargs)
        return embedded + embedded.roll(1, 0)

    monkeypatch.setattr(ViTEmbeddings, "forward", mixing)
    with pytest.raises(ValueError, match=r"outputs differ by \S+ of the largest from .* its samples are not independ"):
        make(tmp_path, 2, model=tiny_vit(0.0))
