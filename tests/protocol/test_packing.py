"""What crosses the cut: without padding, in a chosen dtype, metered as it is sent."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    ConvBertConfig,
    ConvBertForSequenceClassification,
    GPT2Config,
    GPT2ForSequenceClassification,
    HfArgumentParser,
)

from hf_coefsfl import METHODS, SplitFedConfig, split_model
from hf_coefsfl.methods import make_method
from hf_coefsfl.methods.parts.auxiliary import example_smashed
from hf_coefsfl.protocol.codecs import CODECS, power_above
from hf_coefsfl.protocol.link import LocalLink
from hf_coefsfl.protocol.messages import Feedback, SmashedData
from hf_coefsfl.protocol.packing import Store
from hf_coefsfl.protocol.padding import ignores_padding, kept_positions
from tests.support.federated import same, texts, tiny_bert, trainer, weights
from tests.support.packed import MIXED, packed, texts_run, values
from tests.support.selection import slow_except
from tests.support.toy import CAUSAL, CLASSIFICATION, SPANS, TOKENS, toy_sides

# ---- Dtypes ----


@pytest.mark.parametrize("scale", [1.0, 1e-9, 1e6])  # gradients are small, and float16 alone would lose both
@pytest.mark.parametrize("dtype", CODECS)
def test_rounding(dtype: str, scale: float) -> None:
    t = values(scale)
    exchange = packed(Store(dtype), Feedback(t))
    back = exchange[0].gradient
    assert back.dtype == t.dtype and back.shape == t.shape
    if dtype == "float32":
        assert torch.equal(back, t)
    elif dtype == "bfloat16":
        assert torch.equal(back, t.bfloat16().float())
    elif dtype == "float16":
        assert ((back - t).abs() <= t.abs() * 2**-11 + scale * 1e-9).all()
    elif dtype == "int8":
        assert ((back - t).abs() <= t.abs().amax(-1, keepdim=True) / 253).all()
    else:  # tests/protocol/test_codecs.py has the rest
        assert 0.01 < (back - t).norm() / t.norm() < (0.9 if dtype == "topk8" else 0.5)
    # Of 15 tokens with 8 features: float16 has a scale for all, the others for each token; topk8 keeps two of them.
    size = {
        "float32": 15 * 32, "bfloat16": 15 * 16, "float16": 15 * 16 + 4, "int8": 15 * (8 + 4), "int4": 15 * (4 + 2),
        "int3": 15 * (3 + 2), "int2": 15 * (2 + 2), "topk8": 2 * (4 + 4 + 2),
    }[dtype.removesuffix("_stochastic")]  # fmt: skip
    assert exchange.nbytes() == {"gradients": size}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_scale_of_float16_is_that_of_frexp(dtype: torch.dtype) -> None:
    special = [0.0, 1.0, 0.5, 2.0**-99, 2.0**-100, 2.0**-101, 1e-40, 1e-45, 3e38, 2.0**127, float("nan"), float("inf")]
    drawn = torch.randn(500, generator=torch.Generator().manual_seed(0), dtype=dtype).abs()
    for number in [*torch.tensor(special, dtype=dtype), *drawn, *(drawn * 1e-20), 1 - drawn[0] * 1e-12]:
        expected = torch.ldexp(torch.ones(()), torch.frexp(number).exponent.clamp(min=-100))
        assert torch.equal(power_above(number), expected), number


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", CODECS)
def test_what_is_not_finite_stays_so(dtype: str, bad: float) -> None:
    t = values()
    t[1, 2, 3] = bad
    back = packed(Store(dtype), Feedback(t))[0].gradient
    assert not back.isfinite().all() and back[0].isfinite().all() | (dtype == "float16")
    assert packed(Store(dtype), Feedback(torch.zeros(2, 3, 4)))[0].gradient.count_nonzero() == 0


def test_small_and_whole_numbers_go_as_they_are() -> None:
    message = SmashedData(values(), {"attention_mask": torch.ones(3, 5).bool()}, {"labels": torch.tensor([7, 8, 9])})
    exchange = packed(Store("int8"), message)
    assert torch.equal(exchange[0].labels["labels"], message.labels["labels"])
    assert exchange.nbytes() == {"smashed_data": 3 * 5 * (8 + 4), "extras": 15 + 24}
    narrow = packed(Store("float16"), Feedback(values().bfloat16()))[0].gradient
    assert narrow.dtype == torch.bfloat16 and torch.equal(narrow, values().bfloat16())  # not rounded


# ---- Padding ----


def test_padding_is_left_out() -> None:
    kept = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [0, 0, 0, 1, 1]]).bool()
    curvature = torch.randn(3, 2, 4, 5, 8)  # (b, blocks, R, T, d)
    exchange = packed(Store(leading=True, trailing=True), Feedback(values(), curvature, torch.ones(3, 2)), kept)
    back = exchange[0]
    assert torch.equal(back.gradient, values() * kept[..., None])
    assert torch.equal(back.curvature, curvature * kept[:, None, None, :, None])
    assert exchange.nbytes() == {"gradients": 10 * 8 * 4, "curvature": 10 * 2 * 4 * 8 * 4, "extras": 24}
    assert packed(Store(), Feedback(values()), kept).places(0) is None  # not asked for


def test_what_the_loss_reads_is_kept() -> None:
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]]).bool()
    smashed = SmashedData(torch.zeros(2, 4, 3), {"attention_mask": mask}, {"labels": torch.tensor([0, 1])})
    assert torch.equal(kept_positions(smashed, CLASSIFICATION), mask)
    target = torch.tensor([[-100, -100, 1, 1], [1, 1, 1, 1]])
    tokens = SmashedData(smashed.activations, smashed.context, {"labels": target})
    assert torch.equal(kept_positions(tokens, TOKENS), mask)
    # Padded on the left, the padding before the first token predicts it.
    expected = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]]).bool()
    assert torch.equal(kept_positions(tokens, CAUSAL), expected)
    spans = SmashedData(smashed.activations, smashed.context, {n: torch.ones(2).long() for n in SPANS.label_names})
    assert kept_positions(spans, SPANS) is None  # their softmax runs over padding too
    assert kept_positions(SmashedData(smashed.activations), CLASSIFICATION) is None
    full = SmashedData(smashed.activations, {"attention_mask": torch.ones_like(mask)}, smashed.labels)
    assert kept_positions(full, CLASSIFICATION) is None


def test_models_that_read_padding_are_found() -> None:
    sizes = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 32}
    torch.manual_seed(0)
    convolving = ConvBertForSequenceClassification(ConvBertConfig(vocab_size=40, embedding_size=16, **sizes))
    decoder = GPT2ForSequenceClassification(
        GPT2Config(vocab_size=40, n_embd=16, n_layer=3, n_head=2, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    )
    for model, expected in ((convolving, False), (decoder, True), (tiny_bert(), True)):
        split = split_model(model, 1)
        assert ignores_padding(split.server, example_smashed(split)) is expected


@pytest.mark.parametrize("method", slow_except("vanilla", "coef_j", of=sorted(METHODS)))
def test_without_padding_nothing_changes_but_the_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    options: dict[str, Any] = {"method": method}
    if method == "fsl_sage":
        options["method_kwargs"] = {"num_blocks": 1, "align_epochs": 2}
    short = texts_run(tmp_path / "short", **options)
    monkeypatch.setattr("hf_coefsfl.federation.server.ignores_padding", lambda *_: False)
    padded = texts_run(tmp_path / "padded", **options)
    if method != "hutchinson":  # whose steps are relative to the norm of a sample, with its padding where there is any
        assert same(weights(short), weights(padded))
    for direction in ("up", "down"):
        less, more = (getattr(run.ledger.total, direction) for run in (short, padded))
        for heading in ("smashed_data", "gradients", "curvature"):
            if heading in more and (method, heading) != ("mu_splitfed", "gradients"):  # a float a batch
                assert less[heading] < 0.9 * more[heading]
        assert less.get("extras") == more.get("extras")


def padded_left(size: int) -> Any:
    """The texts with their padding in front."""

    def shift(row: dict[str, Any]) -> dict[str, Any]:
        places = (8 - int(sum(row["attention_mask"])) + torch.arange(8)).remainder(8).argsort()
        return {name: torch.as_tensor(row[name])[places].tolist() for name in ("input_ids", "attention_mask")}

    return texts(size).map(shift)


def test_padding_that_is_read_is_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """BERT's classifier reads the first position, whatever is there."""
    data = padded_left(48)
    assert data[0]["attention_mask"].tolist() == sorted(data[0]["attention_mask"].tolist())
    short = texts_run(tmp_path / "short", data=data, method="vanilla")
    monkeypatch.setattr("hf_coefsfl.federation.server.ignores_padding", lambda *_: False)
    whole = texts_run(tmp_path / "whole", data=data, method="vanilla")
    assert same(weights(short), weights(whole)) and short.ledger.entries == whole.ledger.entries


def test_what_a_classifier_pools_by_is_sent() -> None:
    """GPT-2 pools at the last id that is no padding id, even where the mask is 0."""
    mask = torch.tensor([[1, 1, 0, 0]]).bool()
    context = {"attention_mask": mask, "padding": torch.zeros(1, 4).bool()}
    assert (
        kept_positions(SmashedData(torch.zeros(1, 4, 3), context, {"labels": torch.tensor([0])}), CLASSIFICATION)
        is None
    )


# ---- Metering ----


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int8", "mixed"])
@pytest.mark.parametrize("method", ["vanilla", "coef_j", "acc_sfl"])
def test_the_ledger_counts_what_is_sent(tmp_path: Path, method: str, dtype: str) -> None:
    codecs: dict[str, Any] = {"exchange_codec": MIXED} if dtype == "mixed" else {"exchange_dtype": dtype}
    run = trainer(tmp_path, method=method, num_rounds=1, warmup_rounds=0, num_clients=4, **codecs)
    run.train()
    tokens = 36 * 5  # two clients of 18 images, four patches and a class token each
    per_token = {"float32": 64, "bfloat16": 32, "float16": 32, "int8": 16 + 4, "mixed": 8 + 2}[dtype]
    scales = 4 * 10 if dtype == "float16" else 0  # one a batch
    sizes = dict.fromkeys(("smashed_data", "gradients", "curvature"), tokens * per_token + scales)
    if dtype == "mixed":  # 16 features in 6 bytes; and of batches with 20 or 10 tokens 3 or 2 in 4 + 8 bytes
        sizes |= {"gradients": tokens * (6 + 2), "curvature": 2 * (4 * 3 + 2) * (4 + 8 + 2)}
    total = run.ledger.total
    assert total.up["smashed_data"] == sizes["smashed_data"]
    down = {"vanilla": {"gradients"}, "coef_j": {"gradients", "curvature"}, "acc_sfl": set()}[method]
    assert {heading: total.down[heading] for heading in down} == {heading: sizes[heading] for heading in down}


def test_both_sides_work_with_what_was_sent() -> None:
    """The server's gradient belongs to the rounded smashed data, and the displacement is counted from there."""
    client, server = toy_sides(CLASSIFICATION, store=Store("int8"))
    link = LocalLink(make_method("reuse"), client)
    received = link.upload()
    client.smash(1)
    exact = client.live.activations.detach()
    assert not torch.equal(received[1].activations, exact)
    assert torch.equal(client.displacement(1), exact - received[1].activations)
    staged = link.stage(Feedback(server.gradient(data, batch)) for batch, data in enumerate(received))
    assert not torch.equal(staged[0].gradient, server.gradient(received[0], 0))  # rounded on the way back too


@pytest.mark.parametrize(
    ("name", "value"),
    [("exchange_dtype", "int5"), ("exchange_memory_limit", "lots"), ("exchange_memory_limit", -1)],
)
def test_bad_options(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name):
        SplitFedConfig(output_dir="out", **{name: value})


def test_sizes_on_the_command_line() -> None:
    for given, expected in (("2GiB", 2**31), ("123", 123)):
        parsed = HfArgumentParser(SplitFedConfig).parse_args_into_dataclasses(
            ["--output_dir", "out", "--exchange_memory_limit", given]
        )
        assert parsed[0].exchange_memory_limit == expected


def test_sizes_are_read() -> None:
    for given, expected in (("2GiB", 2**31), ("500MB", 500 * 10**6), (123, 123), ("123", 123), (None, None)):
        assert SplitFedConfig(output_dir="out", exchange_memory_limit=given).exchange_memory_limit == expected


# ---- The first update ----


def test_the_first_pass_is_not_repeated() -> None:
    passes = []
    runs = []
    for repeated in (False, True):
        client, server = toy_sides(CLASSIFICATION, num_batches=3, local_epochs=2)
        count: list[int] = []
        client.half.register_forward_hook(lambda *_, count=count: count.append(1))
        method = make_method("coef_d")
        link = LocalLink(method, client)
        if repeated:
            link.stage = lambda messages, client=client, stage=link.stage: (  # type: ignore[method-assign]
                setattr(client, "_first", None) or stage(messages)
            )
        method.round(link, server)
        passes.append(len(count))
        runs.append({name: p.detach().clone() for name, p in client.half.named_parameters()})
    assert passes == [3 + 6 - 1, 3 + 6] and same(*runs)


def test_changed_weights_need_a_new_pass() -> None:
    client, _ = toy_sides(CLASSIFICATION)
    client.exchange()
    with torch.no_grad():
        next(client.half.parameters()).mul_(2)
    client.smash(0)
    assert client.displacement(0).abs().max() > 0
