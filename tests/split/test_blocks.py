"""Finding the blocks of a model, and refusing cuts that cannot be."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import nn

from hf_coefsfl.split import find_blocks, split_model
from tests.support.models import MODELS

torch.set_num_threads(1)

PATHS = {
    "bert": "bert.encoder.layer",
    "roberta-qa": "roberta.encoder.layer",
    "distilbert-tags": "distilbert.transformer.layer",
    "gpt2": "transformer.h",
    "opt": "model.decoder.layers",
    "llama": "model.layers",
    "t5": "encoder.block",
    "bart": "model.encoder.layers",
    "vit": "vit.layers",
    "swin": "swin.encoder.layers",
    "clip-vision": "vision_model.encoder.layers",
    "wav2vec2": "wav2vec2.encoder.layers",
    "whisper": "model.encoder.layers",
    "timm-vit": "timm_model.blocks",
}


@pytest.mark.parametrize("name", PATHS)
def test_the_blocks_are_found(name: str) -> None:
    model = MODELS[name].make()
    path, container = find_blocks(model)
    assert path == PATHS[name]
    assert container is model.get_submodule(path)
    assert len(container) == (3 if name == "swin" else 4)


def test_the_blocks_are_found_under_peft() -> None:
    model = get_peft_model(MODELS["bert"].make(), LoraConfig(target_modules=["query"]))
    assert find_blocks(model)[0] == "base_model.model.bert.encoder.layer"
    assert find_blocks(model, "bert.encoder.layer")[0] == "base_model.model.bert.encoder.layer"


def test_a_path_can_be_named() -> None:
    model = MODELS["bart"].make()
    assert find_blocks(model, "model.decoder.layers")[1] is model.model.decoder.layers
    resnet = timm_model("resnet18")
    split = split_model(resnet, 1, blocks="timm_model.layer4")
    assert (split.blocks, split.cut, split.num_blocks) == ("timm_model.layer4", 1, 2)
    x = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        split.eval()
        assert torch.equal(split.server(split.client(pixel_values=x)).logits, resnet(x).logits)


def timm_model(architecture: str) -> Any:
    config = transformers.TimmWrapperConfig(architecture=architecture, num_labels=3)
    return transformers.TimmWrapperForImageClassification(config)


def test_blocks_that_are_sequences() -> None:
    """MobileNet's blocks are nn.Sequential, with batch norm inside."""
    model = timm_model("mobilenetv3_small_050").eval()
    split = split_model(model, 2)
    assert split.blocks == "timm_model.blocks"
    x = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        assert torch.equal(split.server(split.client(pixel_values=x)).logits, model(x).logits)
    whole = sum(p.numel() for p in model.parameters())
    assert split.client.num_parameters() + split.server.num_parameters() == whole
    assert 0 < split.client.num_parameters() < whole / 10


def test_small_lists_lose_to_large_ones() -> None:
    """wav2vec2's list of convolutions comes first but is not the list of blocks."""
    model = nn.Module()
    model.stem = nn.ModuleList(nn.Sequential(nn.Linear(2, 2)) for _ in range(3))
    model.body = nn.ModuleList(nn.Sequential(nn.Linear(20, 20)) for _ in range(3))
    model.tail = nn.ModuleList(nn.Sequential(nn.Linear(30, 30)) for _ in range(3))
    assert find_blocks(model)[0] == "body"


def test_a_wrong_path_lists_the_candidates() -> None:
    model = MODELS["bart"].make()
    for path in ("model.layers", "model.encoder", "model.encoder.layers.0"):
        with pytest.raises(ValueError, match=rf"blocks='{path}'.*'model.encoder.layers' \(4 modules\)"):
            find_blocks(model, path)


def test_a_model_without_lists() -> None:
    with pytest.raises(ValueError, match=r"no list of blocks in Linear.*`blocks=`.*none"):
        find_blocks(nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"no list of blocks in Sequential.*'0' \(2 modules\)"):
        find_blocks(nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))))


@pytest.mark.parametrize("model", ["bert-base-uncased", None, 3])
def test_what_is_no_model(model: Any) -> None:
    with pytest.raises(ValueError, match=f"Expected a PreTrainedModel.*got {type(model).__name__}"):
        split_model(model, 2)


@pytest.mark.parametrize("cut", [0, 4, -1, 17])
def test_a_cut_outside(cut: int) -> None:
    with pytest.raises(
        ValueError, match=rf"cut must be from 1 to 3 for the 4 blocks in 'bert.encoder.layer', got {cut}"
    ):
        split_model(MODELS["bert"].make(), cut)


@pytest.mark.parametrize("cut", [2.0, "2", None, True])
def test_a_cut_that_is_no_int(cut: Any) -> None:
    with pytest.raises(ValueError, match=f"int from 1 to 3, got {cut!r} of type {type(cut).__name__}"):
        split_model(MODELS["bert"].make(), cut)


def test_a_shared_block() -> None:
    options = MODELS["bert"].options | {"embedding_size": 16}
    model = transformers.AlbertForSequenceClassification(transformers.AlbertConfig(**options))
    with pytest.raises(ValueError, match=r"applies one shared block 4 times.*BERT instead of ALBERT"):
        split_model(model, 1)
    bert = MODELS["bert"].make()
    bert.bert.encoder.layer[3] = bert.bert.encoder.layer[0]
    with pytest.raises(ValueError, match="lists one block module several times"):
        split_model(bert, 2)


def test_one_block() -> None:
    with pytest.raises(ValueError, match="holds 1 block: a cut needs at least 2"):
        split_model(MODELS["bert"].make(num_hidden_layers=1), 1)
