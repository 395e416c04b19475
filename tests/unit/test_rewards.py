from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path

import pytest

from skylite.config.rollout import RewardParameters
from skylite.errors import ConfigError, DataError, RunFailed
from skylite.rewards import load_reward
from skylite.rewards.built_in import BUILT_IN, reference_completion
from skylite.rewards.call_rewards import finite_scores, reward_function, score
from skylite.rewards.gsm8k import final_number
from skylite.rewards.math import parse_truth
from skylite.rewards.reasoning_gym import from_json, to_json
from skylite.types import Prompt, is_number
from tests.unit.data_cases import RELEASED, prompt


def reward_of(spec: str, asked: Prompt, completion: str) -> float:
    return score(spec, load_reward(spec), [(asked, completion)])[0]


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("3 + 4 = 7\n#### 7", 7),
        ("#### 1,080", 1080),
        ("#### $1,234.50", Fraction(2469, 2)),
        ("####-$5", -5),
        ("#### $-5", -5),
        ("#### 72%", 72),
        ("#### 72 apples.", 72),
        ("#### .5", Fraction(1, 2)),
        ("#### 7.\nuser: 8", 7),
        ("#### 1\n#### 2", 2),
        ("7", None),
        ("The answer is 7.", None),
        ("####", None),
        ("#### seven", None),
        ("####\n7", None),
        ("#### 14 / 2", None),
        ("#### 3 + 4 = 7", None),
        ("#### 1,08", None),
        ("#### 7 8", None),
        ("#### " + "9" * 5000, None),
        ("", None),
    ],
)
def test_number_after_the_last_mark(text: str, number: int | Fraction | None) -> None:
    assert final_number(text) == number


def test_gsm8k_compares_numbers_not_text() -> None:
    asked = prompt(answer="1080")
    assert reward_of("gsm8k", asked, "so\n#### 1,080.00") == 1.0
    assert reward_of("gsm8k", asked, "so\n#### 1,081") == 0.0
    assert reward_of("gsm8k", asked, "1080") == 0.0
    assert reward_of("gsm8k", prompt(answer="unknown"), "nothing here") == 0.0


@pytest.mark.skipif(not RELEASED.is_dir(), reason="the released GSM8K files are not next to this checkout")
def test_every_released_gsm8k_answer_is_parsed_as_a_number() -> None:
    for name in ("train", "test"):
        for line in (RELEASED / f"{name}.jsonl").read_text(encoding="utf-8").splitlines():
            assert final_number(json.loads(line)["answer"]) is not None


@pytest.mark.parametrize(
    ("answer", "completion", "value"),
    [
        ("1/2", "so \\boxed{\\frac{1}{2}}", 1.0),
        ("\\frac{1}{2}", "The answer is 0.5", 1.0),
        ("x^2+1", "\\boxed{1+x^2}", 1.0),
        ("x^2+1", "\\boxed{x^2-1}", 0.0),
        ("7", "1, 2, 3 and so \\boxed{7}", 1.0),
        ("7", "I do not know", 0.0),
        ("7", "\\boxed{\\frac{}{", 0.0),
        ("7", "", 0.0),
        # Answers of MATH-500. Without LaTeX's delimiters math-verify would take the first number of each.
        ("3\\sqrt{13}", "\\boxed{3\\sqrt{13}}", 1.0),
        ("3\\sqrt{13}", "\\boxed{13}", 0.0),
        ("3\\sqrt{13}", "\\boxed{3}", 0.0),
        ("6 - 5i", "\\boxed{6 - 5i}", 1.0),
        ("6 - 5i", "\\boxed{6}", 0.0),
        ("\\left( 3, \\frac{\\pi}{2} \\right)", "so \\boxed{(3, \\pi/2)}", 1.0),
        (
            "\\begin{pmatrix} -7 \\\\ 16 \\end{pmatrix}",
            "\\boxed{\\begin{pmatrix} -7 \\\\ 16 \\end{pmatrix}}",
            1.0,
        ),
        ("\\begin{pmatrix} -7 \\\\ 16 \\end{pmatrix}", "\\boxed{-7}", 0.0),
        ("\\text{Evelyn}", "\\boxed{\\text{Evelyn}}", 1.0),
        ("\\text{Evelyn}", "\\boxed{\\text{Carla}}", 0.0),
        ("18 dollars", "\\boxed{18}", 1.0),
    ],
)
def test_math_compares_formulas(answer: str, completion: str, value: float) -> None:
    assert reward_of("math", prompt(answer=answer), completion) == value


@pytest.mark.parametrize("answer", ["no solution exists", "", "unknown"])
def test_math_refuses_prose_as_ground_truth(answer: str) -> None:
    with pytest.raises(DataError, match="not a number or a formula"):
        parse_truth(answer)


def test_reasoning_gym_entries_round_trip_through_json() -> None:
    entry = {"a": (1, (2, [3.5, None])), "b": {1: "x", 2: {"y": (True,)}}, "c": [], "d": {}}
    back = from_json(json.loads(json.dumps(to_json(entry))))
    assert back == entry
    assert isinstance(back["a"], tuple)
    assert list(back["b"]) == [1, 2]


def test_reasoning_gym_scores_the_last_answer_and_bad_ones_zero() -> None:
    reasoning_gym = pytest.importorskip("reasoning_gym")
    entry = reasoning_gym.create_dataset("prime_factorization", seed=1, size=1)[0]
    asked = prompt(answer=entry["answer"], extra={"task": "prime_factorization", "entry": to_json(entry)})
    spec = "reasoning-gym"
    assert reward_of(spec, asked, f"<answer>1</answer> no, <answer> {entry['answer']} </answer>") == 1.0
    assert reward_of(spec, asked, entry["answer"]) == 0.0
    assert reward_of(spec, asked, "<answer>(((</answer>") == 0.0  # this task's scorer raises on it


def test_reasoning_gym_does_not_hide_a_broken_entry() -> None:
    pytest.importorskip("reasoning_gym")
    asked = prompt(extra={"task": "prime_factorization", "entry": {}})
    with pytest.raises(RunFailed, match="task 'prime_factorization' raised KeyError: 'answer'") as error:
        reward_of("reasoning-gym", asked, "<answer>7</answer>")
    assert isinstance(error.value.__cause__, DataError)


def reward_file(folder: Path, text: str) -> str:
    (folder / "mine.py").write_text(text, encoding="utf-8")
    return f"{folder / 'mine.py'}:reward"


def test_a_reward_function_gets_completion_and_answer(tmp_path: Path) -> None:
    spec = reward_file(tmp_path, "def reward(completion, answer): return 0.5 * (answer in completion)\n")
    assert score("reward", load_reward(spec, example=prompt()), [(prompt(), "7!")]) == [0.5]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("def reward(prompt, completion:", "cannot be imported: SyntaxError"),
        ("import nowhere_to_be_found", "cannot be imported: ModuleNotFoundError"),
        ("def other(prompt, completion): return 1.0", "has no function 'reward'"),
        ("reward = 3", "has no function 'reward'"),
        ("def reward(prompt): return 1.0", "cannot be called as a reward: it takes .prompt. and no comp"),
        ("def reward(prompt, completion): return None", "returned None for prompt t/train/0"),
        ("def reward(prompt, completion): return float('nan')", "returned nan for prompt t/train/0"),
        ("def reward(prompt, completion): raise KeyError('x')", "raised KeyError: 'x' .prompt t/train/0"),
    ],
)
def test_a_broken_reward_file_is_refused_at_load(tmp_path: Path, text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        load_reward(reward_file(tmp_path, text), example=prompt())


@pytest.mark.parametrize("spec", ["gsm9k", "nowhere.py:reward", "mine.txt:reward", "mine.py:", ""])
def test_unknown_spec_is_refused(spec: str) -> None:
    with pytest.raises(ConfigError):
        load_reward(spec)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), 1e39, 10**400])
def test_a_nan_reward_reaches_the_anomaly_rules_in_training_and_is_refused_elsewhere(value: float) -> None:
    reward = reward_function(lambda **_: value)
    assert not is_number(score("odd_one", reward, [(prompt(), "text")])[0])
    with pytest.raises(RunFailed, match=r"function odd_one returned .* for prompt t/train/0"):
        finite_scores("odd_one", reward, [(prompt(), "text")])


RIGHT = {
    "gsm8k": ["1,080", "so 7\n#### 7"],
    "math": ["x+1"],
    "exact_match": ["blue"],
    "format": ["3"],
    "countdown": ["(1 + 2) * 3"],
}
"""Reward -> reference answers."""
EXTRA: dict[str, dict[str, object]] = {"countdown": {"numbers": [1, 2, 3], "target": 9}}


def test_each_reward_says_which_completion_is_right() -> None:
    """reasoning-gym's scorers are not installed everywhere: test_reasoning_gym_sandbox.py runs them."""
    silent = {name for name, reward in BUILT_IN.items() if reward.right("3", RewardParameters()) is None}
    assert silent == {"regex", "length", "none"}, "they look at no answer"
    assert set(RIGHT) | silent | {"reasoning-gym"} == set(BUILT_IN)


@pytest.mark.parametrize(("spec", "answer"), [(spec, answer) for spec in RIGHT for answer in RIGHT[spec]])
def test_reference_completion_scores_one(spec: str, answer: str) -> None:
    asked = prompt(answer=answer.rpartition("####")[2].strip(), extra=EXTRA.get(spec, {}))
    reference = reference_completion(spec, answer)
    assert reference is not None
    assert reward_of(spec, asked, reference) == 1.0
