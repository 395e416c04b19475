"""Quantised bases: the values of their matrices, and a trainer that keeps them quantised."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationScheme
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from skylite.hub.quantised import read_format
from skylite.model.packing import pack_tokens
from skylite.model.policy import score
from skylite.model.process_group import Dist
from skylite.model.quantised_weights import QuantisedWeight
from skylite.run.rollout_file import examples_of
from tests import record_bitsandbytes
from tests.cases import gradients_after_step, policy_of, relative_difference
from tests.quantised_models import AWQ_ORDER, FORMATS, GROUP, NF4, quantise_model, widen_model
from tests.rows import groups_of, random_samples
from tests.small_run import settings
from tests.tiny_models import make_tiny_model


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "plain", "qwen3")


@pytest.fixture(scope="module", params=["fp8 block", "awq", "nf4 nested"])
def quantised(request: pytest.FixtureRequest, plain: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return quantise_model(plain, tmp_path_factory.mktemp("quantised") / request.param, request.param)


def matrix() -> Tensor:
    return torch.randn(96, 128, generator=torch.Generator().manual_seed(0)) * 0.1


def widen(name: str, parts: dict[str, Tensor], dtype: torch.dtype = torch.float32) -> Tensor:
    form = read_format(FORMATS[name][0], "base")
    parts = form.prepare("m", dict(parts))
    assert form.shape(parts[form.parts[0]].shape) == [96, 128]
    return form.widen(parts, dtype)


@pytest.mark.parametrize("name", FORMATS)
def test_a_widened_matrix_is_near_the_one_it_was_made_from(name: str) -> None:
    weight = matrix()
    error = (widen(name, FORMATS[name][1](weight)) - weight).abs().max()
    half_step = 0.075 if "nf4" in name else 0.035 if "int4" in name or name in ("gptq", "awq") else 0.02
    assert 0 < error <= half_step


@pytest.mark.parametrize("name", ["fp8 block", "ct fp8 block"])
def test_fp8_blocks_have_the_values_of_transformers(name: str) -> None:
    weight = matrix().new_zeros(96, 80) + matrix()[:, :80]  # transformers takes whole blocks alone
    parts = FORMATS[name][1](weight)
    of_transformers = Fp8Dequantize(None)._dequantize_one(*parts.values(), output_dtype=torch.float32)
    assert torch.equal(read_format(FORMATS[name][0], "base").widen(parts, torch.float32), of_transformers)


@pytest.mark.parametrize("name", [name for name in FORMATS if name.startswith("ct ") and "block" not in name])
def test_values_are_those_of_compressed_tensors(name: str) -> None:
    config, quantise = FORMATS[name]
    parts = {
        part: value.float() if value.dtype == torch.half else value
        for part, value in quantise(matrix()).items()
    }
    compressor = BaseCompressor.get_value_from_registry(config["format"])
    scheme = QuantizationScheme(**config["config_groups"]["group_0"])
    expected = compressor.decompress(dict(parts), scheme)["weight"].float()
    found = widen(name, parts)
    assert torch.equal(found, expected) or "channel" in name
    torch.testing.assert_close(found, expected, rtol=4e-3, atol=0)  # its channel scales stay bfloat16


@pytest.mark.parametrize("name", ["gptq", "awq"])
def test_integers_are_read_one_by_one(name: str) -> None:
    parts = FORMATS[name][1](matrix())
    found = widen(name, parts)

    def number(part: str, row: int, column: int) -> int:
        """Of GPTQ's or AWQ's matrix [I, O]."""
        if name == "gptq":
            return int(parts[part][row // 8, column]) >> (4 * (row % 8)) & 15
        return int(parts[part][row, column // 8]) >> (4 * AWQ_ORDER.index(column % 8)) & 15

    for o, i in itertools.product(range(0, 96, 5), range(0, 128, 7)):
        zero = 8 if name == "gptq" else number("qzeros", i // GROUP, o)
        assert found[o, i] == (number("qweight", i, o) - zero) * parts["scales"][i // GROUP, o].float()


@pytest.mark.parametrize("case", record_bitsandbytes.CASES)
def test_4_bit_values_are_those_that_bitsandbytes_computed(case: str) -> None:
    kind, nested = record_bitsandbytes.CASES[case]
    with safe_open(record_bitsandbytes.FILE, "pt") as file:
        digests = json.loads(file.metadata()["digests"])
    tensors, start = load_file(record_bitsandbytes.FILE), f"{case}."
    parts = {name.removeprefix(start): tensor for name, tensor in tensors.items() if name.startswith(start)}
    form = read_format({**NF4, "bnb_4bit_quant_type": kind, "bnb_4bit_use_double_quant": nested}, "base")
    assert parts.keys() == {*form.parts}
    prepared = form.prepare("m", parts)
    for dtype in record_bitsandbytes.DTYPES:
        values = form.widen(prepared, getattr(torch, dtype))
        assert values.shape == (record_bitsandbytes.ROWS, record_bitsandbytes.COLUMNS)
        assert record_bitsandbytes.digest(values) == digests[f"{case} {dtype}"]


def test_a_nested_scale_is_widened_first() -> None:
    state = {"shape": [2, 2], "blocksize": 2, "nested_blocksize": 256, "nested_offset": 0.5}
    form = read_format({**NF4, "bnb_4bit_use_double_quant": True}, "base")
    found = form.prepare("m", {
        "weight": torch.tensor([[0x2F], [0x03]], dtype=torch.uint8),
        "weight.quant_map": torch.arange(16) / 8.0,
        "weight.absmax": torch.tensor([3, 200], dtype=torch.uint8),
        "weight.nested_absmax": torch.tensor([4.0]),
        "weight.nested_quant_map": torch.arange(256) / 256.0,
        form.parts[3]: torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
    })  # fmt: skip
    first, second = 4 * 3 / 256 + 0.5, 4 * 200 / 256 + 0.5
    assert form.widen(found, torch.float32).tolist() == [[first * 2 / 8, first * 15 / 8], [0, second * 3 / 8]]


def test_in_bfloat16_scales_are_rounded_first_and_values_once() -> None:
    parts = {
        "weight": torch.tensor([[3.5, -448.0]]).to(torch.float8_e4m3fn),
        "weight_scale": torch.tensor([0.1]),
    }
    found = widen_one(parts)
    scale = torch.tensor(0.1).to(torch.bfloat16).double()  # 0.10009765625
    assert found.tolist() == [[0.3496_09375, -44.75]]
    assert found.double().tolist() == (parts["weight"].double() * scale).to(torch.bfloat16).double().tolist()


def widen_one(parts: dict[str, Tensor]) -> Tensor:
    return read_format(FORMATS["fp8 tensor"][0], "base").widen(parts, torch.bfloat16)


def logprobs(policy: Any) -> Tensor:
    examples = examples_of(groups_of(random_samples(0)))
    return score(policy, pack_tokens(examples, policy.packing, policy.device), temperature=1.0)[0]


def saved_tensors(policy: Any) -> list[Tensor]:
    """What autograd keeps from a forward pass to its backward pass."""
    saved = list[Tensor]()

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        logprobs(policy).sum().backward()
    return saved


def test_a_policy_computes_what_it_does_with_widened_weights(
    quantised: Path, tmp_path: Path, dist: Dist
) -> None:
    config = settings()
    policy = policy_of(quantised, config, dist)
    expected = policy_of(widen_model(quantised, tmp_path / "widened"), config, dist)
    assert policy.packing == "tree"
    torch.testing.assert_close(logprobs(policy), logprobs(expected), atol=1e-5, rtol=0)
    gradient, of_plain = (gradients_after_step(p, config, dist)[0] for p in (policy, expected))
    assert relative_difference(gradient, of_plain) < 1e-5


def test_no_widened_matrix_is_kept(quantised: Path, dist: Dist) -> None:
    policy = policy_of(quantised, settings(), dist)
    weights = [
        m.weight
        for m in policy.model.modules()
        if isinstance(m, nn.Linear) and type(m.weight) is QuantisedWeight
    ]
    assert len(weights) == 14
    held = sum(part.nbytes for weight in weights for part in weight._parts.values())
    elements = sum(weight.numel() for weight in weights)
    assert held < elements * (1.4 if "fp8" in str(quantised) or "int8" in str(quantised) else 0.8)

    saved = saved_tensors(policy)
    kept = {tuple(t.shape) for t in saved if type(t) is not QuantisedWeight}
    assert not kept & {tuple(w.shape) for w in weights} - {(64, 64)}
    assert any(type(t) is QuantisedWeight for t in saved)


def test_a_layer_without_lora_keeps_none_either(quantised: Path, dist: Dist) -> None:
    policy = policy_of(quantised, settings(lora={"target_modules": ["q_proj"]}), dist)
    saved = saved_tensors(policy)
    assert sum(type(t) is QuantisedWeight for t in saved) >= 12
    assert not any(type(t) is not QuantisedWeight and tuple(t.shape) in ((128, 64), (64, 128)) for t in saved)
