"""The form of federated weights: blocks by hand, error feedback, and bytes in closed form."""

import re

import pytest
import torch
from torch import Tensor

from hf_coefsfl import SplitFedConfig
from hf_coefsfl.protocol.adapters import ADAPTER_CODECS, AdapterCodec, sent_form

NARROW = ADAPTER_CODECS[1:]


def test_int8_by_hand() -> None:
    """Tensors come in the order of their names, each in blocks of its own with a scale of its largest value / 127."""
    codec = AdapterCodec("int8", {"b": torch.zeros(2, 2), "a": torch.zeros(3)})
    start = {"a": torch.tensor([1.0, 2, 3]), "b": torch.zeros(2, 2)}
    sent = codec.encode(torch.zeros(7))
    update = {"a": torch.tensor([127, 0.4, -1]), "b": torch.tensor([[254, 2], [4.9, 0]])}
    coded, residual = codec.encode_update(sent, update, None)
    assert coded["values"].tolist() == [127, 0, -1, 127, 1, 2, 0] and coded["scales"].tolist() == [1, 2]
    torch.testing.assert_close(residual, torch.tensor([0, 0.4, 0, 0, 0, 0.9, 0]))
    # The next update is 0.4 and 0.9 larger than it was trained to: 0.8 becomes 1, and 5.8 becomes 6.
    coded, residual = codec.encode_update(sent, update, residual)
    assert coded["values"].tolist() == [127, 1, -1, 127, 1, 3, 0]
    torch.testing.assert_close(residual, torch.tensor([0, -0.2, 0, 0, 0, -0.2, 0]))
    # An update is the difference to what was sent, not to what it was made of.
    sent = codec.encode(codec.flat(start))
    coded, residual = codec.encode_update(sent, codec.named(codec.decode(sent)), None)
    assert not coded["values"].any() and not residual.any()


def test_bfloat16_by_hand() -> None:
    codec = AdapterCodec("bfloat16", {"a": torch.zeros(2)})
    coded, residual = codec.encode_update(codec.encode(torch.zeros(2)), {"a": torch.tensor([1 + 2**-9, -3])}, None)
    assert coded["values"].dtype == torch.bfloat16 and codec.decode(coded).tolist() == [1, -3]
    assert residual.tolist() == [2**-9, 0]


@pytest.mark.parametrize("name", NARROW)
@pytest.mark.parametrize("seed", range(3))
def test_nothing_is_lost_but_the_last_residual(name: str, seed: int) -> None:
    """Over many rounds the decoded updates add up to the true ones, less one residual. Without feedback they do not.

    Some values of a block are a thousandth of others, so that int8 rounds all of their updates to 0.
    """
    generator = torch.Generator().manual_seed(seed)
    codec = AdapterCodec(name, {"a": torch.zeros(40, 4), "b": torch.zeros(4, 40), "c": torch.zeros(3)})
    size = torch.where(torch.arange(323) % 2 == 0, 1.0, 1e-3)
    total, decoded, plain = torch.zeros(3, 323, dtype=torch.float64)
    residual: Tensor | None = None
    for _ in range(100):
        sent = codec.encode(torch.randn(323, generator=generator))
        step = size * (1 + torch.rand(323, generator=generator))
        begun = codec.decode(sent)
        trained = begun + step
        coded, residual = codec.encode_update(sent, codec.named(trained), residual)
        total, decoded = total + (trained - begun).double(), decoded + codec.decode(coded).double()
        plain = plain + codec.decode(codec.encode(trained - begun)).double()
        assert (residual.abs() <= (0.0085 if name == "int8" else 0.0085 * size)).all()  # half a step of 2 / 127, 2⁻⁸
    assert residual is not None
    torch.testing.assert_close(decoded + residual.double(), total, rtol=0, atol=1e-4)
    small = size < 1
    assert ((decoded - total)[small].abs() <= 0.0085).all()
    if name == "int8":
        assert not plain[small].any() and (total[small] > 0.1).all()


@pytest.mark.parametrize("name", NARROW)
def test_the_form_is_what_is_sent(name: str) -> None:
    shapes = [(), (1,), (127,), (128,), (129,), (4, 192), (192, 4), (3, 5, 7), (0,)]
    like = {str(i): torch.randn(shape, dtype=torch.bfloat16 if i == 5 else None) for i, shape in enumerate(shapes)}
    codec = AdapterCodec(name, like)
    coded, form = codec.encode(codec.flat(like)), codec.form()
    found = [{n: (t.dtype, t.shape) for n, t in tensors.items()} for tensors in (coded, form)]
    assert found[0] == found[1]
    values = 1 + 1 + 127 + 128 + 129 + 768 + 768 + 105
    size = {"bfloat16": 2 * values, "int8": values + 4 * (1 + 1 + 1 + 1 + 2 + 6 + 6 + 1)}[name]
    assert sum(t.numel() * t.element_size() for t in sent_form(name, like).values()) == size
    for key, t in codec.named(codec.decode(coded)).items():
        assert t.dtype == like[key].dtype and t.shape == like[key].shape
        torch.testing.assert_close(t, like[key], rtol=2**-7, atol=0.02)


def test_weights_as_they_are_and_none() -> None:
    weights = {"a": torch.ones(3)}
    assert sent_form("float32", weights) is weights
    nothing = AdapterCodec("int8", {})
    assert not nothing.form() and not nothing.encode(torch.empty(0)) and not nothing.named(nothing.decode({}))
    coded, residual = nothing.encode_update({}, {}, None)
    assert not coded and not len(residual)


@pytest.mark.parametrize("name", NARROW)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_stays_so(name: str, value: float) -> None:
    codec = AdapterCodec(name, {"a": torch.zeros(3)})
    assert not codec.decode(codec.encode(torch.tensor([1.0, value, 2.0]))).isfinite().all()


def test_a_residual_that_fades_away_does_not_come_back() -> None:
    """Weights that are not trained any more send what is left, a 254th in each round, until numbers end."""
    codec, residual = AdapterCodec("int8", {"a": torch.zeros(4)}), torch.tensor([1e-3, -7e-4, 3e-5, 0])
    sent = codec.encode(torch.zeros(4))
    for _ in range(30):
        before = residual.abs().max()
        _, residual = codec.encode_update(sent, {"a": torch.zeros(4)}, residual)
        assert residual.abs().max() <= max(before / 200, 1.5e-36)


def test_the_option() -> None:
    assert SplitFedConfig(output_dir="out").adapter_codec == "float32"
    told = re.escape("adapter_codec='int7' is not allowed. Did you mean int8? Choose one of: float32, bfloat16, int8.")
    with pytest.raises(ValueError, match=told):
        SplitFedConfig(output_dir="out", adapter_codec="int7")
    with pytest.raises(ValueError, match="adapter_codec='int4' is not allowed"):
        SplitFedConfig(output_dir="out", adapter_codec="int4")
