"""Bad input is refused before any training, with what was got, what is allowed and what to do."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import DatasetDict
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import (
    BertConfig,
    BertForTokenClassification,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    HfArgumentParser,
    TrainingArguments,
)

from hf_coefsfl import SplitFedConfig, SplitFedTrainer
from tests.support.federated import config, images, texts, tiny_bert, tiny_vit, trainer


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": "fedavg"}, r"Unknown method 'fedavg'\. Choose one of: .*acc_sfl.*coef_d, coef_j"),
        ({"method_kwargs": {"projections": 2}}, r"no option 'projections'.*num_projections \(default 1\)"),
        ({"method": "coef_d", "method_kwargs": {"compensation_factor": "x"}}, r"must be float or None, got 'x'"),
        ({"cut": 0}, r"cut=0 must be a whole number of at least 1"),
        ({"cut": 1.5}, r"cut=1.5 must be a whole number"),
        ({"participation": 0}, r"participation=0 selects no client"),
        ({"participation": 1.2}, r"participation=1.2 selects no client, or more than there are"),
        ({"num_clients": 0}, r"num_clients=0 must be a whole number of at least 1"),
        ({"num_rounds": 0}, r"num_rounds=0 must be"),
        ({"local_epochs": 0}, r"local_epochs=0 must be"),
        ({"warmup_rounds": -1}, r"warmup_rounds=-1 must be a whole number of at least 0"),
        ({"min_client_samples": 0}, r"min_client_samples=0 must be"),
        ({"per_device_train_batch_size": 0}, r"per_device_train_batch_size=0 must be"),
        ({"partition": "random"}, r"partition='random' is not allowed. Choose one of: iid, dirichlet, column"),
        ({"dropout": "on"}, r"dropout='on' is not allowed. Choose one of: synced, off"),
        ({"head": "half"}, r"head='half' is not allowed. Choose one of: full, lora, frozen"),
        ({"dirichlet_alpha": 0.0}, r"dirichlet_alpha=0.0 must be a finite number above 0"),
        ({"learning_rate": float("nan")}, r"learning_rate=nan must be a finite number above 0"),
        ({"max_steps": 7}, r"max_steps=7 disagrees with num_rounds=4"),
        ({"gradient_accumulation_steps": 2}, r"gradient_accumulation_steps=2 does not work.*Leave it at 1"),
        ({"label_smoothing_factor": 0.1}, r"label_smoothing_factor=0.1 does not work"),
        ({"neftune_noise_alpha": 5.0}, r"neftune_noise_alpha=5.0 does not work"),
        ({"auto_find_batch_size": True}, r"auto_find_batch_size=True does not work"),
        ({"num_train_epochs": 5}, r"num_train_epochs=5 does not work.*it counts rounds: set num_rounds"),
        ({"fp16": True}, r"fp16=True does not work.*use bf16"),
        ({"fsdp": "full_shard"}, r"fsdp='full_shard' does not work"),
        ({"eval_strategy": "epoch"}, r"eval_strategy='epoch': there are no epochs over rounds"),
        ({"dropout": "off", "gradient_checkpointing": True}, r"dropout='off' runs the model in eval mode"),
    ],
    ids=str,
)
def test_config(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config(tmp_path, **changes)


def test_launcher_cannot_ask_for_fp16_either(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    with pytest.raises(ValueError, match="fp16 does not work"):
        config(tmp_path)


@pytest.mark.parametrize("cut", [4, 9])
def test_cut_outside_the_model(tmp_path: Path, cut: int) -> None:
    with pytest.raises(ValueError, match=rf"cut must be from 1 to 3 for the 4 blocks.*got {cut}"):
        trainer(tmp_path, cut=cut)


def test_more_clients_than_rows(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="72 rows cannot give 100 clients 1 each: use at most 72 clients"):
        trainer(tmp_path, num_clients=100)


def test_impossible_dirichlet(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="larger dirichlet_alpha, fewer clients or a smaller min_client_samples"):
        trainer(tmp_path, partition="dirichlet", dirichlet_alpha=0.01, num_clients=30)


@pytest.mark.parametrize("drop_last", [False, True])
def test_client_without_data(tmp_path: Path, drop_last: bool) -> None:
    small = images(3 if drop_last else 0) if drop_last else images(4).select([])
    message = "1 of 2 clients have fewer than the 4 samples" if drop_last else "1 of 2 clients have no data: b"
    with pytest.raises(ValueError, match=message):
        trainer(tmp_path, data={"a": images(8), "b": small}, num_clients=None, dataloader_drop_last=drop_last)


def test_splits_are_no_clients(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="DatasetDict of the splits 'train', 'test', which are not clients"):
        trainer(tmp_path, data=DatasetDict(train=images(8), test=images(8)), num_clients=None)


def test_every_client_is_looked_at(tmp_path: Path) -> None:
    for column, message in (("labels", "no labels, only"), ("pixel_values", "no 'pixel_values', only")):
        with pytest.raises(ValueError, match=message):
            trainer(tmp_path, data=[images(8), images(8).remove_columns(column)], num_clients=None)


def test_half_precision_weights(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"trained weights are float16.*dtype=torch\.float32"):
        trainer(tmp_path, tiny_vit().half())


def test_a_loss_of_ones_own(tmp_path: Path) -> None:
    class Weighted(SplitFedTrainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            raise AssertionError

    with pytest.raises(ValueError, match="Weighted overrides compute_loss, which training would not call"):
        Weighted(tiny_vit(), config(tmp_path), train_dataset=images())


def test_frozen_adapter(tmp_path: Path) -> None:
    run = trainer(tmp_path, num_rounds=1)
    run.save_model()
    with pytest.raises(ValueError, match="is_trainable=True"):
        trainer(tmp_path / "again", PeftModel.from_pretrained(tiny_vit(), tmp_path))


def test_warmup_that_covers_everything_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config(tmp_path, warmup_rounds=4)
    assert "only Vanilla SFL will run, not coef_j" in caplog.text
    caplog.clear()
    config(tmp_path, warmup_rounds=4, method="vanilla")
    assert not caplog.text


def test_labels_that_are_all_ignored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    none = {"labels": [-100] * 8}
    some = {"labels": [1, 2, *[-100] * 6]}
    tokens = texts(8).remove_columns("labels")
    blank = tokens.map(lambda row: none).with_format("torch")
    mixed = tokens.map(lambda row, i: none if i < 4 else some, with_indices=True).with_format("torch")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 32}
    changes: dict[str, Any] = {"num_clients": None, "participation": 1.0, "eval_dataset": None, "num_rounds": 2}
    model = BertForTokenClassification(BertConfig(vocab_size=40, **sizes, num_labels=3))
    run = trainer(tmp_path, copy.deepcopy(model), [mixed], per_device_train_batch_size=1, **changes)
    run.train()
    assert "4 batches without a label are left out" in caplog.text
    with pytest.raises(ValueError, match="no label that enters the loss: all are -100"):
        trainer(tmp_path, model, [blank], **changes).train()


def test_client_count_against_the_data(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="num_clients=6, but train_dataset holds the data of 2 clients"):
        trainer(tmp_path, data=[images(8), images(8)])
    with pytest.raises(ValueError, match="empty collection"):
        trainer(tmp_path, data={}, num_clients=None)
    with pytest.raises(ValueError, match=r"num_clients=6, but column 'owner' has 4 distinct values"):
        trainer(tmp_path, partition="column", partition_column="owner")


def test_missing_partition_column(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"partition_column='site': .*only pixel_values, labels, owner. Name one of"):
        trainer(tmp_path, partition="dirichlet", partition_column="site")
    with pytest.raises(ValueError, match=r"partition_column='owners': .*Did you mean owner\?"):
        trainer(tmp_path, partition="column", partition_column="owners", num_clients=None)


def test_a_partition_column_without_effect_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config(tmp_path, partition_column="owner")
    assert "partition_column='owner' has no effect on partition='iid'" in caplog.text


def test_data_without_length(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="IterableDataset without a length, which cannot be partitioned"):
        trainer(tmp_path, data=images().to_iterable_dataset())


def test_missing_labels(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no labels, only pixel_values: the loss needs labels"):
        trainer(tmp_path, data=images().remove_columns("labels"))


def test_missing_input_column(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no 'pixel_values', only labels"):
        trainer(tmp_path, data=images().remove_columns("pixel_values"))


def test_labels_beyond_the_head(tmp_path: Path) -> None:
    data = images().map(lambda row: {"labels": row["labels"] + 1}).with_format("torch")
    with pytest.raises(ValueError, match=r"Label 3 of client \d+, row \d+, is outside 0..2.*num_labels=3"):
        trainer(tmp_path, data=data)


def test_model_without_a_head(tmp_path: Path) -> None:
    sizes = {"hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 32}
    with pytest.raises(
        ValueError, match=r"BertModel has no head that computes a loss.*AutoModelForSequenceClassification"
    ):
        trainer(tmp_path, BertModel(BertConfig(vocab_size=40, **sizes)), texts())


def test_wrong_types(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="args must be a SplitFedConfig, got TrainingArguments"):
        SplitFedTrainer(tiny_vit(), TrainingArguments(str(tmp_path)))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="model must be a PreTrainedModel or a PeftModel, got Linear"):
        SplitFedTrainer(torch.nn.Linear(2, 2), config(tmp_path))  # type: ignore[arg-type]


def test_two_adapters_or_none(tmp_path: Path) -> None:
    lora = LoraConfig(r=2, target_modules=["q_proj"])
    with pytest.raises(ValueError, match="PeftModel already and peft_config is given"):
        trainer(tmp_path, get_peft_model(tiny_vit(), lora), peft_config=lora)
    with pytest.raises(ValueError, match="full_finetuning=True trains every weight, yet peft_config is given"):
        trainer(tmp_path, full_finetuning=True, peft_config=lora)


def test_a_model_used_twice(tmp_path: Path) -> None:
    model = tiny_vit()
    trainer(tmp_path, model)
    with pytest.raises(ValueError, match="holds PEFT layers already"):
        trainer(tmp_path, model)


def test_a_merged_adapter(tmp_path: Path) -> None:
    def adapted() -> PeftModel:
        return get_peft_model(tiny_vit(), LoraConfig(r=2, target_modules=["q_proj"]))

    merged, unloaded = adapted(), adapted()
    merged.merge_adapter()
    plain = unloaded.merge_and_unload()
    for model in (merged, merged.get_base_model()):
        with pytest.raises(ValueError, match=r"PeftModel whose adapter is merged.*unmerge_adapter\(\)"):
            trainer(tmp_path, model)
    with pytest.raises(ValueError, match="PeftModel without adapter layers: merge_and_unload"):
        trainer(tmp_path, unloaded)
    assert trainer(tmp_path, plain) is not None
    merged.unmerge_adapter()
    assert trainer(tmp_path, merged) is not None


def test_nothing_to_train_on_a_side(tmp_path: Path) -> None:
    above = LoraConfig(r=2, target_modules=["q_proj"], layers_to_transform=[2, 3])
    with pytest.raises(ValueError, match="Nothing is trained below the cut at block 2 of 4"):
        trainer(tmp_path, peft_config=above)
    below = LoraConfig(r=2, target_modules=["q_proj"], layers_to_transform=[0, 1])
    with pytest.raises(ValueError, match="Nothing is trained above the cut"):
        trainer(tmp_path, peft_config=below)


def test_tied_weights_across_the_cut(tmp_path: Path) -> None:
    model = GPT2LMHeadModel(GPT2Config(vocab_size=40, n_embd=16, n_layer=4, n_head=2, n_positions=16))
    data = texts().map(lambda row: {"labels": row["input_ids"]})
    with pytest.raises(ValueError, match=r"Both halves need to train transformer\.wte\.weight"):
        trainer(tmp_path, model, data.with_format("torch"), full_finetuning=True)


def test_training_without_data(tmp_path: Path) -> None:
    run = SplitFedTrainer(tiny_bert(), config(tmp_path))
    with pytest.raises(ValueError, match="needs a train_dataset"):
        run.train()


def test_coef_j_refuses_a_loss_it_does_not_know(tmp_path: Path) -> None:
    """Before training, not in the first round after warm-up."""
    from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

    sizes = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 32}
    audio = {"conv_dim": (8, 8), "conv_kernel": (4, 4), "conv_stride": (2, 2), "num_feat_extract_layers": 2}
    extra = {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "layerdrop": 0.0, "vocab_size": 12}
    model = Wav2Vec2ForCTC(Wav2Vec2Config(**sizes, **audio, **extra))
    data = [{"input_values": torch.randn(400), "labels": torch.randint(1, 12, (5,))} for _ in range(24)]
    with pytest.raises(ValueError, match="curvature of a ForCTC loss is not known"):
        trainer(tmp_path, model, data, method="coef_j", eval_dataset=None)
    assert trainer(tmp_path, model, data, method="coef_d", eval_dataset=None) is not None


def test_config_from_the_command_line() -> None:
    words = ["--output_dir", "out", "--method", "coef_j", "--method_kwargs", '{"num_projections": 2}', "--cut", "3"]
    (args,) = HfArgumentParser(SplitFedConfig).parse_args_into_dataclasses(words)
    assert args.method_kwargs == {"num_projections": 2} and args.cut == 3 and args.max_steps == args.num_rounds == 100
    assert args.make_method().num_projections == 2


def test_defaults_are_the_papers() -> None:
    args = SplitFedConfig(output_dir="out")
    assert (args.per_device_train_batch_size, args.local_epochs, args.num_rounds) == (32, 1, 100)
    assert (args.participation, args.warmup_rounds, args.adam_epsilon) == (0.1, 3, 1e-8)
    assert args.lr_scheduler_type == "constant" and args.max_grad_norm == 0
