"""The bfloat16 canary finds the base and the version before by equal bits."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from skylite.engine.canary_bf16 import Scores, check_paired, read_paired, read_together
from skylite.errors import SyncFailed
from tests.unit.canary_cases import scores


def test_the_version_before_is_compared_on_its_first_tokens() -> None:
    engine = [-1.0, -2.0, -3.0, -4.0]
    found = read_paired(
        Scores(
            engine=engine,
            engine_base=[x + 0.1 for x in engine],
            policy=[x + 0.2 for x in engine],
            base=engine,
            engine_before=engine[:2],
            policy_before=engine[:2],
        )
    )
    assert found.same_tokens == {"the base": 0.0, "the version before": 1.0}
    assert found.same_as == "the version before"
    with pytest.raises(ValueError, match="is longer"):
        read_paired(
            Scores(engine=[-1.0], engine_base=[-1.0], policy=[-1.0], base=[-1.0], engine_before=engine)
        )


@pytest.mark.parametrize(
    ("equal", "move", "same_as"),
    [(3, 0.4, "the version before"), (2, 0.4, ""), (3, 0.09, ""), (50, 0.09, "the version before")],
)
def test_a_few_tokens_with_the_same_bits_are_the_version_before(
    equal: int, move: float, same_as: str
) -> None:
    """Other requests beside the canary change the bits of most tokens. The base's rounding is 0.51."""
    engine = [-1.0 - k / 8 for k in range(50)]
    found = read_paired(
        Scores(
            engine=engine,
            engine_base=[-3.01] * 50,
            policy=[-1.5] * 50,
            base=[-2.5] * 50,
            engine_before=[x if k < equal else x - 1e-6 for k, x in enumerate(engine)],
            policy_before=[-1.5 - move] * 50,
        )
    )
    assert found.same_as == same_as
    assert found.same_tokens == {"the base": 0.0, "the version before": equal / 50}


@pytest.mark.parametrize(("equal", "same_as"), [(3, ""), (4, "the base")])
def test_of_many_tokens_a_fiftieth_must_have_the_same_bits(equal: int, same_as: str) -> None:
    """A warm start scores all sequences of the canary: three of 200 tokens may be equal by chance."""
    engine = [-1.0 - k / 8 for k in range(200)]
    served = [x if k < equal else x - 1e-6 for k, x in enumerate(engine)]
    base = [x - 0.1 for x in served]
    found = Scores(engine=engine, engine_base=served, policy=[x + 0.2 for x in base], base=base)
    assert read_paired(found).same_as == same_as


def test_a_version_before_without_the_trainers_scores_is_not_compared() -> None:
    found = scores(0, 0.01, lambda move, _: move)
    assert read_paired(replace(found, engine_before=found.engine)).same_as == ""
    assert read_paired(replace(found, policy_before=found.base)).same_as == ""


@pytest.mark.parametrize(("move", "same"), [(0.0021, "the base"), (0.0019, "")])
def test_equal_bits_are_found_if_the_adapter_moved_by_a_fiftieth_of_the_rounding(
    move: float, same: str
) -> None:
    engine = [-0.9, -2.1]
    found = Scores(engine=engine, engine_base=engine, policy=[-1.0 + move, -2.0 - move], base=[-1.0, -2.0])
    assert read_paired(found).same_as == same


@pytest.mark.parametrize("same", ["the base", "the version before"])
def test_the_bits_of_another_version_are_refused_while_rounding_hides_the_move(same: str) -> None:
    found = scores(0, 0.01, lambda move, _: move)
    other = found.engine_base if same == "the base" else [x + 0.01 for x in found.engine]
    served = Scores(
        engine=other,
        engine_base=found.engine_base,
        policy=found.policy,
        base=found.base,
        engine_before=other if same != "the base" else None,
        policy_before=[x + 0.02 for x in found.policy] if same != "the base" else None,
    )
    with pytest.raises(SyncFailed, match=f"100% of the canary logprobs are those of {same}, to the bit"):
        check_paired("policy-v000001", "engine-0", read_paired(served))


def test_an_unmoved_adapter_may_have_the_bases_bits() -> None:
    found = scores(0, 0.0, lambda move, _: move)
    equal = Scores(
        engine=found.engine_base, engine_base=found.engine_base, policy=found.base, base=found.base
    )
    reading = read_paired(equal)
    assert math.isnan(reading.reading.projection)
    check_paired("policy-v000000", "engine-0", reading)


def test_versions_judged_together_may_share_bits_with_the_base() -> None:
    """One that hardly differs from the base may have its bits; each was compared when it was new."""
    found = scores(0, 0.1, lambda move, _: move)
    equal = replace(found, engine=found.engine_base)
    assert read_paired(equal).same_as == "the base"
    assert read_together([equal]).same_as == ""
    together, alone = (r.reading for r in (read_together([equal]), read_paired(equal)))
    assert str(together) == str(alone)  # NaN among the numbers
