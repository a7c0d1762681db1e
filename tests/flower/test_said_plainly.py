"""What a deployed run says of itself: whose the data was, and that the labels of a language model are the text."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import yaml
from flwr.app import Message
from safetensors.torch import load
from transformers import LlamaConfig, LlamaForCausalLM

from hf_coefsfl.flower.client_node import ClientNode
from hf_coefsfl.flower.errors import ClientFailure
from hf_coefsfl.flower.options import LABELS_ARE_TEXT, read_run_config
from hf_coefsfl.flower.server import serve
from hf_coefsfl.flower.wire import chunk_of, has_chunk
from hf_coefsfl.trainer.model_card import write_card
from tests.support.deployed import LocalGrid, Site
from tests.support.words import WORDS, words_tokenizer


class Writers(Site):
    """Sites that train a language model."""

    task = "causal_lm"

    def make_model(self, folder: Path, dropout: float) -> None:
        config = LlamaConfig(
            vocab_size=len(WORDS), hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=16,
            bos_token_id=4, eos_token_id=5, pad_token_id=0,
        )  # fmt: skip
        LlamaForCausalLM(config).save_pretrained(folder)
        words_tokenizer().save_pretrained(folder)

    def row(self, site: int, i: int) -> dict[str, Any]:
        return {"completion": super().row(site, i)["text"]}

    def node_config(self, client: int) -> dict[str, Any]:
        consent = self.folder / "policy.yaml"
        consent.write_text("tasks: [causal_lm]")
        return super().node_config(client) | {"policy": str(consent)}

    def options(self, **changes: Any) -> dict[str, Any]:
        return super().options(**{"max_length": 16, "num_rounds": 1} | changes)


@pytest.fixture(scope="module")
def writers(tmp_path_factory: pytest.TempPathFactory) -> Writers:
    return Writers(tmp_path_factory.mktemp("writers"), sizes=(3, 2))


def test_a_language_model_is_deployed_only_if_asked_for(writers: Writers) -> None:
    refused = r"task='causal_lm' is not deployed unasked: The labels of a language model are the text itself.*set "
    refused += "labels_reveal_text = true"
    for changes in ({}, {"labels_reveal_text": False}):
        config = writers.run_config(**changes)
        with pytest.raises(ValueError, match=refused):
            serve(LocalGrid(config, []), config)
    without_policy = {name: value for name, value in writers.node_config(0).items() if name != "policy"}
    with pytest.raises(ClientFailure, match=r"the task is causal_lm. Its labels are the text itself"):
        ClientNode(writers.run_config(labels_reveal_text=True), without_policy)  # the site decides for itself
    for value in ("yes", 1):
        with pytest.raises(ValueError, match=rf"labels_reveal_text={value!r} must be true or false"):
            read_run_config(writers.run_config(labels_reveal_text=value))


def read_off(message: Message) -> list[str]:
    """Return the texts that the labels of a message spell."""
    tensors = load(chunk_of(message.content)) if message.has_content() and has_chunk(message.content) else {}
    rows = [row for name, t in tensors.items() if "labels" in name and t.dim() == 2 for row in t.tolist()]
    return [" ".join(WORDS[token] for token in row if token > 5) for row in rows]


def test_the_texts_are_the_labels(writers: Writers, caplog: pytest.LogCaptureFixture) -> None:
    """As the log, the card and the docs say."""
    with caplog.at_level(logging.WARNING):
        trainer, grid = writers.deployed(labels_reveal_text=True, method="coef_j")
    assert LABELS_ARE_TEXT in caplog.text
    seen = {text for message in grid.received for text in read_off(message)}
    assert seen == {writers.row(site, i)["completion"] for site, size in enumerate((3, 2)) for i in range(size)}
    card = (Path(str(trainer.args.output_dir)) / "README.md").read_text()
    assert "The labels are tokens of the text: the server saw every text that the loss was on in the clear." in card
    node = ClientNode(grid.run_config, writers.node_config(0))
    caplog.clear()
    node.introduce()
    assert LABELS_ARE_TEXT in caplog.text  # in the client's own log


def test_the_card_of_a_deployed_run(site: Site, tmp_path: Path) -> None:
    trainer, _ = site.deployed(num_rounds=1, method="vanilla")
    output = Path(str(trainer.args.output_dir))
    card = (output / "README.md").read_text()
    flat = " ".join(card.split())
    assert "trained on the clients' own data and evaluated by the server on test." in flat
    assert "The clients were real: they ran on their own machines" in flat and "simulated" not in card
    assert "| the server's own: test " in card and "| the clients' own, which did not leave them " in card
    assert "trained on test" not in card and "labels are tokens" not in card
    summary = json.loads((output / "summary.json").read_text())
    assert (summary["clients"], summary["partition"], summary["dirichlet_alpha"]) == ("real", None, None)
    trainer.create_model_card(dataset="someone/reviews", dataset_tags="someone/reviews")
    header = yaml.safe_load((output / "README.md").read_text().split("---")[1])
    assert "datasets" not in header  # the Hub takes them for the training data
    assert header["model-index"][0]["results"][0]["dataset"]["name"] == "someone/reviews"
    trainer.clients = None  # also before any client has come
    write_card(trainer, tmp_path)
    assert "The clients were real" in (tmp_path / "README.md").read_text()


def test_the_card_of_a_simulated_run(site: Site) -> None:
    trainer = site.simulated(num_rounds=1, method="vanilla")
    trainer.create_model_card(dataset="posts")
    card = (Path(str(trainer.args.output_dir)) / "README.md").read_text()
    assert ", trained on posts." in card and "The clients were simulated" in card and "real:" not in card
