"""The probe accepts right structures in bfloat16, and rejects wrong ones."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from skylite.model import fast_path_check
from skylite.model.fast_path_check import TOLERANCE, enable_shortcuts
from skylite.model.float32_arithmetic import Float32Arithmetic
from skylite.model.policy import Policy, load_policy
from skylite.model.process_group import Dist
from tests.decisions import resolved
from tests.small_run import settings
from tests.tiny_families import make_family
from tests.tiny_models import make_tiny_model
from tests.wrong_structures import WRONG, tree_gap, wrong_norm_gap

FAMILIES = ("llama", "qwen3", "gemma", "gemma3", "mistral")


@pytest.fixture(scope="module", params=FAMILIES)
def policy(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, dist: Dist) -> Policy:
    """A bfloat16 policy of a tiny random model."""
    model = make_tiny_model(tmp_path_factory.mktemp("model") / request.param, request.param)
    in_bf16 = resolved(model, model, placement={"dtype": "bfloat16"})
    return load_policy(in_bf16, settings(), dist)


def probes(count: int) -> list[list[int]]:
    return [random.Random(seed).choices(range(256), k=24) for seed in range(count)]


def test_the_right_structure_is_accepted_in_bfloat16(policy: Policy) -> None:
    assert max(tree_gap(policy, probe) for probe in probes(4)) < TOLERANCE / 10
    chosen, choices = enable_shortcuts(policy, probes(1)[0])
    assert chosen.packing == "tree"
    assert chosen.lm_head is not None
    assert [c.split(":")[0] for c in choices] == ["LM head in chunks", "norms", "MLPs", "packing"]
    assert not any("unchanged" in c for c in choices)


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_structure_is_rejected_in_bfloat16(policy: Policy, name: str) -> None:
    with WRONG[name]():
        gaps = [tree_gap(policy, probe) for probe in probes(4)]
    assert min(gaps) > TOLERANCE
    assert max(gaps) < math.inf, "the structure is wrong, not unsupported"


def test_a_wrong_norm_is_rejected_in_bfloat16(policy: Policy) -> None:
    assert min(wrong_norm_gap(policy, probe) for probe in probes(4)) > TOLERANCE


def test_a_model_without_tree_attention_uses_padded_rows_with_torchs_attention(
    policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    with WRONG["wrong scale"]():
        chosen, choices = enable_shortcuts(policy, probes(1)[0])
    assert chosen.packing == "padded"
    assert choices[-1].startswith("attention of padded rows: sdpa; ")
    assert policy.model.get_base_model().config._attn_implementation == "sdpa"


def test_a_compilers_error_is_one_line_of_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("LoweringException: unbacked_bindings\n\nWhile executing %x\n  File a.py, line 7")

    monkeypatch.setattr(fast_path_check, "_probe_logprobs", fail)
    gap, reason = fast_path_check._gap(policy=None, probe=[], reference=torch.zeros(1))  # type: ignore[arg-type]
    assert gap == math.inf
    assert reason == "the model does not support it: LoweringException: unbacked_bindings"


@pytest.mark.parametrize("error", [AttributeError, AssertionError, IndexError, TypeError])
def test_a_model_that_asks_a_shortcut_for_more_is_computed_without_it(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """BERT's head, for example, reads the bias of the head that the shortcut replaces."""

    def fail(*_: object) -> None:
        raise error("'LogprobHead' object has no attribute 'bias'")

    monkeypatch.setattr(fast_path_check, "_probe_logprobs", fail)
    gap, reason = fast_path_check._gap(policy=None, probe=[], reference=torch.zeros(1))  # type: ignore[arg-type]
    assert gap == math.inf
    assert "no attribute 'bias'" in reason


@pytest.mark.parametrize(
    "product",
    [
        lambda x, w: torch.nn.functional.linear(x, weight=w),
        lambda x, w: torch.einsum("ni,oi->no", x, w),
        lambda x, w: torch.einsum("ni,oi->no", [x, w]),
        lambda x, w: x @ w.t(),
    ],
    ids=["keyword", "arguments", "list", "operator"],
)
def test_a_bfloat16_argument_of_a_product_becomes_float32(product: Callable[..., Tensor]) -> None:
    x, weight = torch.randn(3, 8), torch.randn(4, 8).bfloat16()
    with Float32Arithmetic():
        y = product(x, weight)
    torch.testing.assert_close(y, x @ weight.float().t(), rtol=0, atol=1e-6)


def test_a_model_with_its_own_attention_function_uses_it_on_padded_rows_and_says_so(
    tmp_path: Path, dist: Dist
) -> None:
    """GPT-J's code asks no `attn_implementation`, so a name for it would be no true statement."""
    model = make_family(tmp_path / "gptj", "gptj")
    policy = load_policy(resolved(model, model), settings(), dist)
    layer = policy.model.get_base_model().transformer.h[0].attn
    own, calls = type(layer)._attn, []

    def counted(*args: object, **kwargs: object) -> object:
        calls.append(1)
        return own(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(layer), "_attn", counted)
        chosen, choices = enable_shortcuts(policy, probes(1)[0])
        calls.clear()
        fast_path_check._probe_logprobs(chosen, probes(1)[0])
    assert chosen.packing == "padded"
    assert len(calls) == chosen.model.config.n_layer
    assert choices[-2:] == [
        "packing: padded; the model's own attention function takes no tree",
        "attention of padded rows: the model's own attention function",
    ]
