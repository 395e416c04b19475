"""Which kinds of modules an engine leaves out, told from the canary's tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from skylite.engine.canary_kinds import check_kinds, read_kinds
from skylite.engine.canary_limits_bf16 import Scores
from skylite.errors import SyncFailed
from skylite.model.policy import Policy
from skylite.model.process_group import Dist
from skylite.trainer.canary import base_canary_logprobs, canary_logprobs, has_effects, kind_effects
from tests.cases import policy_of
from tests.small_run import settings

RANDOM = np.random.default_rng(3)
SEQUENCES = [[int(x) for x in RANDOM.integers(5, 200, 24)] for _ in range(24)]
KINDS = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]


@pytest.fixture(scope="module")
def policy(tiny_llama: Path, dist: Dist) -> Policy:
    return policy_of(tiny_llama, settings(), dist)


def with_factors(policy: Policy, factors: Mapping[str, float], count: int) -> list[list[float]]:
    """Logprobs of the first sequences with the B matrices of each kind multiplied by hand."""
    before = {n: p.detach().clone() for n, p in policy.lora.items()}
    with torch.no_grad():
        for name, parameter in policy.lora.items():
            kind = next((k for k in factors if f".{k}.lora_B." in name), "")
            parameter.mul_(factors.get(kind, 1.0))
        found = canary_logprobs(policy, SEQUENCES[:count])
        for name, parameter in policy.lora.items():
            parameter.copy_(before[name])
    return found


@dataclass(frozen=True)
class Trainer:
    """What a trainer knows of all sequences."""

    policy: Policy
    ours: list[list[float]]
    base: list[list[float]]
    effects: dict[str, list[list[float]]]

    def scores(self, factors: Mapping[str, float], noise: float, count: int) -> list[Scores]:
        """With an engine that applies each kind by a factor, and whose answers have noise."""
        engine = with_factors(self.policy, factors, count) if factors else self.ours
        return [
            Scores(
                engine=noisy(engine[i], noise),
                engine_base=noisy(self.base[i], noise),
                policy=self.ours[i],
                base=self.base[i],
                effects={kind: rows[i] for kind, rows in self.effects.items()},
            )
            for i in range(count)
        ]


def noisy(row: list[float], noise: float) -> list[float]:
    rounded: NDArray[np.float64] = np.array(row) + noise * RANDOM.normal(size=len(row))
    return rounded.tolist()


@pytest.fixture(scope="module")
def trainer(policy: Policy) -> Trainer:
    ours, base = canary_logprobs(policy, SEQUENCES), base_canary_logprobs(policy, SEQUENCES)
    return Trainer(policy, ours, base, kind_effects(policy, SEQUENCES, ours))


def test_the_effect_of_a_kind_is_what_the_logprobs_lose_without_it(policy: Policy) -> None:
    ours, before = canary_logprobs(policy, SEQUENCES[:2]), [p.detach().clone() for p in policy.lora.values()]
    effects = kind_effects(policy, SEQUENCES[:2], ours)
    assert sorted(effects) == KINDS
    without = with_factors(policy, {"v_proj": 0.0}, 2)
    assert effects["v_proj"] == [
        [a - b for a, b in zip(x, y, strict=True)] for x, y in zip(ours, without, strict=True)
    ]
    assert all(torch.equal(a, b) for a, b in zip(before, policy.lora.values(), strict=True))
    assert canary_logprobs(policy, SEQUENCES[:2]) == ours


@pytest.mark.parametrize(("noise", "count"), [(2e-6, 2), (0.02, 24)], ids=["float32", "bfloat16"])
def test_a_right_engine_applies_every_kind(trainer: Trainer, noise: float, count: int) -> None:
    for _ in range(20):
        found = read_kinds(trainer.scores({}, noise, count))
        check_kinds("policy-v000001", "engine-0", found)
        assert sorted(found) == KINDS


@pytest.mark.parametrize(("noise", "count"), [(2e-6, 2), (0.02, 24)], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_that_is_left_out_is_named(trainer: Trainer, kind: str, noise: float, count: int) -> None:
    found = read_kinds(trainer.scores({kind: 0.0}, noise, count))
    if found[kind].is_told:  # bfloat16 hides the kinds that move this model least
        assert abs(found[kind].share) < 0.1
        assert [k for k, share in found.items() if share.is_wrong] == [kind]
        with pytest.raises(SyncFailed, match=rf"where 1 is right: {kind} -?0\.0"):
            check_kinds("policy-v000001", "engine-0", found)
    assert found[kind].is_told or noise > 1e-3


def test_an_engine_without_any_lora_on_attention_is_found(trainer: Trainer) -> None:
    """Three kinds at once: their effects are not sums, but each is far from 1."""
    lost = ["q_proj", "k_proj", "v_proj"]
    found = read_kinds(trainer.scores(dict.fromkeys(lost, 0.0), 2e-6, 2))
    assert all(found[kind].is_wrong for kind in lost if found[kind].is_told)
    assert found["v_proj"].is_wrong


def test_too_few_tokens_and_versions_without_effects_say_nothing() -> None:
    two = Scores(engine=[-1.0] * 2, engine_base=[-1.0] * 2, policy=[-1.0] * 2, base=[-1.0] * 2)
    assert read_kinds([two]) == {}
    few = Scores(
        engine=[-1.0], engine_base=[-1.0], policy=[-1.0], base=[-1.0], effects={"q_proj": [0.5], "v": [0.1]}
    )
    assert read_kinds([few]) == {}


def test_effects_come_in_every_eighth_version_and_in_bfloat16_in_each() -> None:
    assert [v for v in range(20) if has_effects(v, torch.float32)] == [1, 9, 17]
    assert [v for v in range(4) if has_effects(v, torch.bfloat16)] == [1, 2, 3]
