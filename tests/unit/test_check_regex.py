"""Regexes of settings and data that would fill the memory or never end."""

from __future__ import annotations

import resource
import time

import pytest
from pydantic import ValidationError

from skylite.adapters.target_modules import matches
from skylite.config.check_regex import check_regex
from skylite.config.lora import LoraConfig
from skylite.config.rollout import RewardParameters
from skylite.errors import ConfigError

LARGE = [
    "((a{1000}){1000}){30}",
    "(?:(?:x{1000}){1000}){1000}",
    "(?x)(?:a{1000}) # text\n{1000}",
    "(?:a{1000})(?#text){1000}",
    "(?i:[a-z]{999999999999999999999999})",
    "(?:a{1000}|b)?{1000}",
    "(" * 3000 + ")" * 3000,
]


@pytest.mark.parametrize("pattern", LARGE)
def test_a_large_regex_is_refused_before_it_takes_memory(pattern: str) -> None:
    before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    for name in ("answer_pattern", "pattern"):
        with pytest.raises(ValidationError, match=r"repeats written out|too deeply"):
            RewardParameters.model_validate({name: pattern})
    for name in ("target_modules", "exclude_modules"):
        with pytest.raises(ValidationError, match=r"repeats written out|too deeply"):
            LoraConfig.model_validate({name: [pattern]})
    assert time.process_time() - started < 2
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000, "KiB"


@pytest.mark.parametrize(
    "pattern",
    [
        r"<answer>(.*?)</answer>",
        r"(?s)<think>.*</think>\s*\\boxed\{([^{}]*)\}",
        r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}",
        r"(?:\d{1,3}(?:,\d{3})*){1,20}",
        r"[](){}]{5}",
        r"a{2000}",
        "",
    ],
)
def test_usual_regexes_stay(pattern: str) -> None:
    check_regex(pattern)


def test_no_regex_is_an_error_in_a_sentence() -> None:
    with pytest.raises(ValidationError, match="is not a regex: missing"):
        LoraConfig(target_modules=["(q_proj"])


def test_a_regex_of_modules_that_does_not_end_is_refused() -> None:
    with pytest.raises(ConfigError, match="takes longer than 1 s for the module"):
        matches("a" * 60 + "b", ["(a|a)+"])
    assert matches("model.layers.3.q_proj", [r".*\.\d+\.q_proj"])
    assert not matches("model.layers.3.q_proj", ["k_proj", r".*\.v_proj"])
