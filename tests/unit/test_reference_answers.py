"""A run whose reward gives no reference answer anything does not start."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from skylite.config.rollout import RewardConfig
from skylite.data.prompts import PromptFileInfo
from skylite.errors import ConfigError
from skylite.rewards import load_components
from skylite.rewards.right_completion import PROBES
from skylite.rollout.reward_check import check_references
from skylite.types import Prompt
from tests.unit.bad_inputs import Reply, call
from tests.unit.data_cases import prompt

REWARDS = """
import asyncio, os, re, time

def zero(completion, *, prompt, answer, **columns):
    return 0.0

def rest(completions, **kwargs):
    return [0.0 for _ in completions]

def style(completion):
    return 0.0

def penalty(completion, answer):
    return -1.0

def think(completion, answer):
    found = re.fullmatch(r"<think>.+</think>\\s*<answer>(.+)</answer>", completion, re.DOTALL)
    return float(found is not None and found[1] == answer)

async def judge(completion, answer):
    await asyncio.sleep(0.01)
    return 0.5 * (completion == answer)

def batch(completions, answer):
    return [float("#### " + a in c) for a, c in zip(answer, completions)]

def verl(data_source, solution_str, ground_truth, extra_info):
    return float(solution_str == ground_truth)

def last_only(completion, answer):
    return float(answer == "79" and completion == answer)

def breaks(completion, answer):
    if answer != "0":
        raise KeyError(answer)
    return 0.0

def hangs(completion, answer):
    time.sleep(60 if answer != "0" else 0)
    return 0.0

def dies(completion, answer):
    os.kill(os.getpid(), 9)

def pids(completion, answer):
    with open(os.environ["PIDS"], "a") as file:
        file.write(f"{os.getpid()} {answer}\\n")
    return float(completion == answer)

def error(completion, answer):
    return -abs(float(completion) - float(answer)) if completion.isdecimal() else -100.0

def constant(completion, answer):
    return 1.0
"""


@pytest.fixture
def own(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(REWARDS)
    return str(tmp_path / "mine.py")


def check(
    *functions: str, answers: list[str] | None = None, prepared_for: str = "math", **settings: object
) -> list[str]:
    config = RewardConfig.model_validate({"functions": list(functions), **settings})
    info = PromptFileInfo(
        dataset="t", source_kind="generated", source="t", source_sha256="0", count=1, seed=0, split="train",
        reward=prepared_for, system="", few_shot=[],
    )  # fmt: skip
    texts = [str(i) for i in range(80)] if answers is None else answers
    train: list[Prompt] = [prompt(id=f"t/train/{i}", answer=text) for i, text in enumerate(texts)]
    components = load_components(functions, config.weights, parameters=config)
    return [*map(str, check_references(config, info, train, components, {}))]


@pytest.mark.parametrize("name", ["zero", "penalty"])
def test_a_function_that_asks_for_the_answer_and_never_scores_is_refused(name: str, own: str) -> None:
    with pytest.raises(ConfigError) as error:
        check(f"{own}:{name}")
    assert error.value.what == (
        f"None of 8 reference answers scores above 0 under the reward {own}:{name}; "
        "the first is '0' of prompt t/train/0."
    )
    assert "let it not ask for it" in error.value.hint


def test_a_built_in_reward_that_does_not_fit_the_answers_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"None of 2 .* under the reward gsm8k; .* prepared for exact_match"
    ):
        check("format", "gsm8k", answers=["Paris", "", "Rome"], prepared_for="exact_match")


@pytest.mark.parametrize("name", ["think", "judge", "batch", "verl", "error"])
def test_a_function_of_any_kind_and_form_that_scores_is_fine(name: str, own: str) -> None:
    assert check(f"{own}:{name}") == []


def test_the_pattern_of_exact_match_does_not_matter() -> None:
    assert check("exact_match", answers=["Paris"], answer_pattern=r"It is (\w+)") == []


def test_a_reward_that_needs_no_answer_is_fine(own: str) -> None:
    assert check(f"{own}:style", "length", "format", max_length=1) == []
    assert check(f"{own}:zero", answers=["", ""]) == [], "data without answers"
    assert check() == [], "the data's own reward"


def test_what_may_be_right_is_a_warning(own: str) -> None:
    text = "warning: none of 8 reference answers scores above 0 under the reward"
    warnings = check("gsm8k", f"{own}:penalty", f"{own}:rest")
    assert [w.partition(";")[0] for w in warnings] == [f"{text} {own}:penalty", f"{text} {own}:rest"]
    assert check(f"{own}:zero", prepared_for=f"{own}:zero")[0].startswith(text), "it may want its own form"


def test_a_reward_that_cannot_tell_right_from_wrong_is_a_warning(own: str) -> None:
    [warning] = check(f"{own}:constant")
    assert "no more than a wrong" in warning


def test_a_few_references_from_all_of_the_data_are_scored_in_a_worker(
    own: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIDS", str(tmp_path / "pids"))
    assert check(f"{own}:pids") == []
    calls = [line.split() for line in (tmp_path / "pids").read_text().splitlines()]
    assert sorted({int(answer) for _, answer in calls}) == list(range(0, 80, 80 // PROBES))
    assert len(calls) == 3 * PROBES, "an empty, a right and a wrong completion of each row, in the first form"
    assert len({pid for pid, _ in calls}) == 1
    assert str(os.getpid()) not in {pid for pid, _ in calls}


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("breaks", r"raised KeyError: '10' \(prompt t/train/10"),
        ("hangs", "Scoring took longer than 2 s"),
        ("dies", "A reward worker ended"),
    ],
)
def test_a_reward_that_fails_for_a_reference_is_one_sentence(name: str, reason: str, own: str) -> None:
    with pytest.raises(ConfigError, match=rf"The reward {own}:{name} does not work: .*{reason}") as error:
        check(f"{own}:{name}", timeout_s=2.0 if name == "hangs" else 60.0)
    assert "\n" not in str(error.value)


def test_only_the_content_that_was_named_is_scored(own: str) -> None:
    config = RewardConfig(functions=[f"{own}:verl"])
    components = load_components(config.functions)
    Path(own).write_text(REWARDS + "\n# changed")
    info = PromptFileInfo(
        dataset="t", source_kind="generated", source="t", source_sha256="0", count=1, seed=0, split="train",
        reward="math", system="", few_shot=[],
    )  # fmt: skip
    with pytest.raises(ConfigError, match="has changed since skylite checked it"):
        check_references(config, info, [prompt()], components, {f"{own}:verl": "0" * 64})


# From the command line


def dry_run(model: Path, *flags: str) -> Reply:
    settings = ["--set", "eval.limit=0", "--set", "rollout.prompts_per_step=2"]
    return call(["train", "--recipe", "gsm8k_cpu", "--model", str(model), "--data", "data", *settings,
                 "--run", "run", "--dry-run", *flags])  # fmt: skip


def test_a_dry_run_refuses_rewards_that_never_score_and_names_those_it_uses(
    own: str, tmp_path: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    rows = [{"question": f"capital {i}?", "answer": f"C{'abcdefghij'[i]}"} for i in range(10)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert call(["prepare", "rows.jsonl", "--reward", "exact_match", "--out", "data"]).code == 0

    for reward in ("gsm8k", "mine.py:zero"):
        refused = dry_run(tiny_llama, "--reward", reward)
        assert (refused.code, "None of 8 reference answers scores above 0" in refused.output) == (2, True)
        assert "ready" not in refused.output
    plain = dry_run(tiny_llama)
    assert "8 training problems, reward exact_match" in plain.output
    both = dry_run(tiny_llama, "--reward", "mine.py:verl", "--reward", "mine.py:style",
                   "--set", "reward.weights=[1, -0.2]")  # fmt: skip
    assert both.code == 0, both.output
    assert f"8 training problems, rewards {own}:verl (weight 1), {own}:style (weight -0.2)" in both.output
    assert not Path("run").exists()
