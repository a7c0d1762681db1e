"""Codecs: their bytes, their errors, and what they do with numbers that are not finite."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hf_coefsfl import SplitFedConfig
from hf_coefsfl.protocol.codecs import CODECS, KINDS, Rotated, _signs, block_size, resolve_codecs, shown
from hf_coefsfl.protocol.messages import Feedback, SmashedData
from hf_coefsfl.protocol.packing import Exchange, Store
from hf_coefsfl.protocol.seeds import derive_seed
from hf_coefsfl.tasks import TASKS
from hf_coefsfl.tasks.options import parse_options
from tests.support.packed import MIXED


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def there_and_back(name: str, t: Tensor, seed: int = 0) -> Tensor:
    values, scales = CODECS[name].encode(t, seed)
    return CODECS[name].decode(values, scales, tuple(t.shape), seed)


# ---- Bytes ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", [(3, 5, 384), (7, 48), (2, 1, 4, 9, 10), (1, 33), (0, 16)])
@pytest.mark.parametrize("name", CODECS)
def test_the_closed_form_is_what_is_made(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    codec, t = CODECS[name], normal(*shape).to(dtype)
    made = codec.encode(t, 3)
    expected = codec.parts(shape, dtype)
    for part, tensor in zip(expected, made, strict=True):
        assert (part and (tuple(part.shape), part.dtype)) == (
            None if tensor is None else (tuple(tensor.shape), tensor.dtype)
        )
    assert codec.nbytes(shape, dtype) == sum(x.numel() * x.element_size() for x in made if x is not None)
    assert codec.decode(*made, shape, 3).shape == shape


def test_bytes_by_hand() -> None:
    """A token of 384 features has three blocks. Of 16 tokens topk8 keeps two."""
    expected = {
        "float32": 4 * 384, "bfloat16": 2 * 384, "int8": 384 + 4, "int4": 192 + 6, "int3": 144 + 6, "int2": 96 + 6,
        "int4_stochastic": 192 + 6, "int3_stochastic": 144 + 6,
    }  # fmt: skip
    assert {name: CODECS[name].nbytes((16, 384)) // 16 for name in expected} == expected
    assert CODECS["topk8"].nbytes((16, 384)) == 2 * (4 + 192 + 6)
    assert [block_size(n) for n in (384, 576, 192, 768, 128, 1024, 20, 33)] == [128, 64, 64, 128, 128, 128, 4, 1]
    assert CODECS["int3"].nbytes((1, 33)) == 5 * 3 + 33 * 2  # words of eight levels, and no block of two


# ---- Twins ----


def twin(token: list[float], bits: int, seed: int) -> tuple[list[float], list[int]]:
    """Return what becomes of one token, value by value, and its levels."""
    features = len(token)
    size = block_size(features)
    signs = _signs(features, seed, torch.device("cpu")).tolist()
    assert set(signs) <= {1.0, -1.0}
    back, all_levels = [0.0] * features, []
    optimal = {4: 0.3352, 3: 0.5860, 2: 0.9957}[bits]
    for start in range(0, features, size):
        hadamard = [[(-1) ** (i & j).bit_count() / math.sqrt(size) for j in range(size)] for i in range(size)]
        signed = [token[start + i] * signs[start + i] for i in range(size)]
        rotated = [sum(signed[i] * hadamard[i][j] for i in range(size)) for j in range(size)]
        most = 2 ** (bits - 1) - 0.5
        mean = sum(map(abs, rotated)) / size
        step = min(max(map(abs, rotated)) / most, mean * math.sqrt(math.pi / 2) * optimal)
        step = torch.tensor(step).bfloat16().item()
        levels = [min(max(math.floor(x / step + 2 ** (bits - 1)), 0), 2**bits - 1) for x in rotated]
        found = [(level - most) * step for level in levels]
        all_levels += levels
        for i in range(size):
            back[start + i] = signs[start + i] * sum(found[j] * hadamard[i][j] for j in range(size))
    return back, all_levels


@pytest.mark.parametrize("features", [8, 24, 20])
@pytest.mark.parametrize("bits", [4, 3, 2])
def test_a_token_value_by_value(bits: int, features: int) -> None:
    token, codec = normal(1, features, seed=5), Rotated(bits)
    values, scales = codec.encode(token, 7)
    back, levels = twin(token[0].tolist(), bits, 7)
    words, per_word = -(-features // codec.per_word), codec.per_word
    numbers = []
    for j in range(words):
        mine = [levels[j + i * words] if j + i * words < features else 0 for i in range(per_word)]
        numbers.append(sum(level << (bits * i) for i, level in enumerate(mine)))
    expected = [(number >> (8 * i)) & 255 for i in range(codec.word) for number in numbers]
    assert values[0].tolist() == expected
    assert codec.decode(values, scales, (1, features), 7)[0].tolist() == pytest.approx(back, abs=1e-5)


@given(st.integers(1, 70), st.sampled_from([2, 3, 4]), st.integers(0, 99))
def test_levels_survive_packing(features: int, bits: int, seed: int) -> None:
    levels = torch.from_numpy(np.random.default_rng(seed).integers(0, 2**bits, (3, features), dtype=np.uint8))
    codec = Rotated(bits)
    packed = codec._pack(levels)
    assert packed.shape[1] == codec.parts((3, features), torch.float32)[0].shape[1]
    assert torch.equal(codec._unpack(packed)[:, :features].to(torch.uint8), levels)


# ---- Errors ----


@pytest.mark.parametrize(("name", "error"), [("int4", 0.1074), ("int3", 0.1935), ("int2", 0.3447)])
@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e30])
def test_errors_are_those_of_the_best_even_levels(name: str, error: float, scale: float) -> None:
    """Of Max (1960) for features that are normal, and less for those of which few are large."""
    usual, few_large = normal(200, 384) * scale, (2 * normal(200, 384)).sinh() * scale
    found = [(((there_and_back(name, t) - t) / scale).norm() / (t / scale).norm()).item() for t in (usual, few_large)]
    assert found[0] == pytest.approx(error, rel=0.04) and 0.1 * error < found[1] < error


def test_without_a_rotation_outliers_would_spoil_a_token() -> None:
    t = normal(50, 128)
    t[:, 7] = 100
    plain = (t / (t.abs().amax(-1, keepdim=True) / 7)).round() * (t.abs().amax(-1, keepdim=True) / 7)
    others = torch.arange(128) != 7
    assert (plain - t)[:, others].norm() / t[:, others].norm() > 0.99  # all zero
    assert (there_and_back("int4", t) - t).norm() / t.norm() < 0.12


@pytest.mark.parametrize("name", ["int4_stochastic", "int3_stochastic"])
def test_stochastic_rounding_is_right_in_the_mean(name: str) -> None:
    """The mean over seeds comes as near as chance allows. That of one rotation with its nearest levels does not."""
    t = normal(4, 32)
    draws = torch.stack([there_and_back(name, t, seed) for seed in range(2000)])
    away = (draws.mean(0) - t) / (draws.std(0) / math.sqrt(2000))
    assert away.abs().max() < 5 and 0.8 < away.std() < 1.2
    nearest = there_and_back(name.removesuffix("_stochastic"), t)
    assert (nearest - t).norm() > 10 * (draws.mean(0) - t).norm()
    assert (nearest - t).norm() < (draws[0] - t).norm()


def test_the_largest_tokens_are_kept() -> None:
    t = normal(2, 12, 16) * 1e-3
    large = [(0, 3), (1, 0), (1, 11)]
    for sample, token in large:
        t[sample, token] = normal(16, seed=token)
    back = there_and_back("topk8", t)
    assert {tuple(place) for place in back.norm(dim=-1).nonzero().tolist()} == set(large)
    assert (back - t).norm() / t.norm() < 0.15


def test_a_tensor_without_tokens_and_one_of_zeros() -> None:
    for name in CODECS:
        assert there_and_back(name, torch.zeros(3, 16)).count_nonzero() == 0
        assert there_and_back(name, torch.zeros(0, 16)).shape == (0, 16)
        half = there_and_back(name, normal(5, 16).bfloat16())
        assert half.shape == (5, 16) and half.isfinite().all()


# ---- Seeds ----


def test_both_sides_know_the_seeds() -> None:
    """They are of run, round, client, batch and kind, and the same on every machine."""
    store = Store("int4")
    store.location = (1, 2, 3)
    assert store.seed("gradients", 4) == derive_seed(1, "codecs", 2, 3, 4, KINDS.index("gradients"))
    assert _signs(8, 5, torch.device("cpu")).tolist() == [1, -1, -1, 1, 1, -1, -1, -1]
    t = normal(2, 3, 16)
    sent = Exchange.of([Feedback(t), Feedback(t)], store, batches=[4, 0])
    seeds = [packed.tensors["gradient"].seed for packed in sent.packed]
    assert seeds == [store.seed("gradients", 4), store.seed("gradients", 0)] and seeds[0] != seeds[1]
    values: list[Any] = [packed.tensors["gradient"].values for packed in sent.packed]
    assert not torch.equal(*values)


def test_each_kind_has_its_codec() -> None:
    store = Store(MIXED)
    curvature = normal(2, 1, 4, 5, 16)
    (feedback,) = Exchange.of([Feedback(normal(2, 5, 16), curvature)], store).packed
    smashed = Exchange.of([SmashedData(normal(2, 5, 16))], store)
    assert feedback.nbytes() == {"gradients": 10 * (6 + 2), "curvature": 5 * (4 + 8 + 2)}
    assert smashed.nbytes() == {"smashed_data": 10 * (8 + 2)}


# ---- Options ----


def test_codecs_by_kind() -> None:
    def codecs(**options: Any) -> str:
        return shown(SplitFedConfig(output_dir="out", **options).exchange_codecs)

    assert codecs() == "float32" and codecs(exchange_dtype="int3") == "int3" == codecs(exchange_codec="int3")
    assert codecs(exchange_codec="compact") == "smashed_data int3, gradients topk8, curvature topk8"
    mixed = "smashed_data int8, gradients int3, curvature int8"
    assert codecs(exchange_dtype="int8", exchange_codec={"gradients": "int3"}) == mixed
    assert codecs(exchange_dtype="int8", exchange_codec='{"gradients": "int3"}') == mixed


@pytest.mark.parametrize("shape", [(4, 65, 128), (97, 384), (4, 197, 192), (4, 197, 768)])
def test_compact_has_less_than_a_sixteenth_of_the_bytes(shape: tuple[int, ...]) -> None:
    """Of smashed data and gradients of a batch, and of curvature as large."""
    sizes = [CODECS[name].nbytes(shape) for name in resolve_codecs(given="compact").values()]
    plain = CODECS["float32"].nbytes(shape)
    assert 16 * sum(sizes[:2]) < 2 * plain and 16 * sum(sizes) < 3 * plain


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("int5", r"exchange_codec='int5' is not allowed\. Did you mean .*Choose one of: float32, .*, compact\."),
        (
            {"gradient": "int4"},
            "no kind 'gradient'. Did you mean gradients.* Choose from: smashed_data, gradients, cur",
        ),
        ({"gradients": "fp4"}, "exchange_codec of gradients='fp4' is not allowed"),
        ({"gradients": "compact"}, "exchange_codec of gradients='compact' is not allowed"),
        ({"smashed_data": "topk8"}, "exchange_codec of smashed_data='topk8' is not allowed"),
        ("topk8", "exchange_codec='topk8' is not allowed"),
        ('{"gradients": int4}', "is not JSON.*An example"),
        (["int4"], "must be a name or a mapping of kinds to names"),
    ],
)
def test_other_codecs_are_refused(given: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve_codecs("float32", given)


def test_two_words_for_everything_are_refused() -> None:
    with pytest.raises(ValueError, match="Give one of them"):
        resolve_codecs("int8", "int4")
    with pytest.raises(ValueError, match=r"exchange_dtype='int5' is not allowed\."):
        resolve_codecs("int5")


def test_codecs_on_a_command_line_and_in_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.yaml").write_text("exchange_codec: {gradients: int3}\nexchange_dtype: int8")
    given = ["--exchange_dtype", "int8", "--exchange_codec", '{"gradients": "int3"}']
    for argv in (["--config", str(tmp_path / "x.yaml")], given):
        _, _, config = parse_options(TASKS["digits"], argv=[*argv, "--use_cpu"])
        assert shown(config.exchange_codecs) == "smashed_data int8, gradients int3, curvature int8"
    with pytest.raises(SystemExit):
        parse_options(TASKS["digits"], argv=["--exchange_codec", "topk8"])
    assert "exchange_codec='topk8' is not allowed" in capsys.readouterr().err
