"""A reward function gets what its signature asks for, by name: one completion or a batch, sync or async."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from trl.rewards import accuracy_reward, think_format_reward

from skylite.errors import ConfigError, RunFailed
from skylite.rewards import load_reward
from skylite.rewards.call_rewards import (
    SignatureProblem,
    finite_scores,
    read_signature,
    reward_function,
    score,
)
from skylite.types import Message, Prompt
from tests.unit.data_cases import prompt

ASKED = prompt(extra={"level": 3, "topic": "sums"})
CHAT = [{"role": "user", "content": "3 + 4?"}]


def seen_by(body: str, completion: str = "so 7", asked: Prompt = ASKED) -> Any:
    """What `def f(...)` of the body puts into `seen`."""
    seen: list[Any] = []
    names: dict[str, Any] = {"seen": seen}
    exec(body, names)
    score("f", reward_function(names["f"]), [(asked, completion)])
    return seen[0]


@pytest.mark.parametrize(
    ("parameters", "got"),
    [
        ("completion, *, prompt, answer, **columns", {
            "completion": "so 7", "prompt": CHAT, "answer": "7",
            "columns": {"id": "t/train/0", "source": "t", "difficulty": 0, "level": 3, "topic": "sums"},
        }),
        ("prompt, completion", {"prompt": CHAT, "completion": "so 7"}),
        ("completion, level, weight=2", {"completion": "so 7", "level": 3, "weight": 2}),
        ("data_source, solution_str, ground_truth, extra_info=None", {
            "data_source": "t", "solution_str": "so 7", "ground_truth": "7",
            "extra_info": {"level": 3, "topic": "sums"},
        }),
        ("completions, **kwargs", {
            "completions": ["so 7"],
            "kwargs": {
                "id": ["t/train/0"], "source": ["t"], "difficulty": [0], "level": [3], "topic": ["sums"],
                "answer": ["7"], "prompts": [CHAT],
            },
        }),
        ("prompts, completions, answer, level", {
            "prompts": [CHAT], "completions": ["so 7"], "answer": ["7"], "level": [3],
        }),
        ("completion: list[dict[str, str]]", {"completion": [{"role": "assistant", "content": "so 7"}]}),
        ("completions: list[list[dict]], **_", {
            "completions": [[{"role": "assistant", "content": "so 7"}]],
            "_": {
                "id": ["t/train/0"], "source": ["t"], "difficulty": [0], "level": [3], "topic": ["sums"],
                "answer": ["7"], "prompts": [CHAT],
            },
        }),
        ("completion: str, *args", {"completion": "so 7", "args": ()}),
    ],
)  # fmt: skip
def test_arguments_follow_the_signature(parameters: str, got: dict[str, Any]) -> None:
    value = "[1.0]" if "completions" in parameters else "1.0"
    assert seen_by(f"def f({parameters}):\n    seen.append(dict(locals()))\n    return {value}\n") == got


def test_columns_of_the_data_win_over_id_and_source_but_not_over_the_answer() -> None:
    asked = prompt(extra={"id": 5, "source": "web", "answer": "no", "completion": "no", "data_source": "x"})
    names = "id, source, answer, completion, data_source"
    got = seen_by(f"def f({names}):\n    seen.append(({names}))\n    return 1.0\n", "so", asked)
    assert got == (5, "web", "7", "so", "x")


def test_a_function_may_change_what_it_gets() -> None:
    asked = prompt(extra={"tests": [1, 2]})

    def spoil(completion: str, prompt: list[dict[str, str]], tests: list[int]) -> float:
        prompt[0]["content"] = ""
        tests.clear()
        return 1.0

    score("spoil", reward_function(spoil), [(asked, "x")])
    assert (asked.messages, asked.extra) == (CHAT, {"tests": [1, 2]})


@pytest.mark.parametrize(
    ("definition", "reason"),
    [
        ("def f(prompt): return 1.0", r"f in \S+mine.py cannot be called as a reward: it takes \(prompt\)"),
        ("def f(a, b): return 1.0", r"it takes \(a, b\) and no completion"),
        ("def f(completion, /): return 1.0", "completion is positional-only, and arguments are"),
        ("def f(completion, completions): return 1.0", "completions is for a batch and completion for one"),
        ("def f(prompts): return [1.0]", r"it takes \(prompts\) and no completion"),
        ("def f(completion: Missing): return 1.0\n", "cannot be evaluated .name 'Missing' is not defined"),
        ("def f(completion, solution): return 1.0",
         "it asks for solution, but prompt t/train/0 has only answer, completion, difficulty, id, level, "),
        ("def f(completions, completion_ids): return [1.0]", "asks for completion_ids, but prompt t/train/0"),
        ("def f(completion: list['dict']): return 1.0", "the annotation 'dict' is quoted inside another"),
    ],
)  # fmt: skip
def test_a_wrong_signature_is_refused_in_words(tmp_path: Path, definition: str, reason: str) -> None:
    (tmp_path / "mine.py").write_text(f"from __future__ import annotations\n{definition}\n")
    with pytest.raises(ConfigError, match=reason) as error:
        load_reward(f"{tmp_path}/mine.py:f", example=ASKED)
    assert error.value.hint


def test_data_without_answers_passes_none() -> None:
    silent = prompt(answer="")
    with pytest.raises(RunFailed, match="it asks for answer, but prompt t/train/0 has only completion, diff"):
        score("f", reward_function(lambda completion, answer: 1.0), [(silent, "x")])
    assert score("f", reward_function(lambda completion, answer="!": len(answer)), [(silent, "x")]) == [1.0]


def test_a_batch_is_one_call_with_lists() -> None:
    calls: list[int] = []

    def lengths(completions: list[str], level: list[int], **_: Any) -> list[float]:
        calls.append(len(completions))
        return [len(c) * k for c, k in zip(completions, level, strict=True)]

    items = [(prompt(extra={"level": k}), "x" * k) for k in (1, 2, 3)]
    assert score("lengths", reward_function(lengths), items) == [1.0, 4.0, 9.0]
    assert calls == [3]


def test_a_column_that_one_row_lacks_is_none_for_it() -> None:
    items = [(prompt(extra={"level": 1}), "x"), (prompt(id="t/2"), "x")]
    level = reward_function(lambda completions, level=None: [0.0 if k is None else k for k in level])
    assert score("f", level, items) == [1.0, 0.0]
    with pytest.raises(RunFailed, match="it asks for level, but prompt t/2 has only"):
        score("f", reward_function(lambda completions, level: level), items)


def test_rewards_of_trl_run_unchanged() -> None:
    asked = prompt(extra={"solution": "$\\frac{1}{3}$"})
    items = [(asked, "<think>a</think> \\boxed{\\frac{1}{3}}"), (asked, "it is \\boxed{\\frac{1}{2}}")]
    assert score("accuracy", reward_function(accuracy_reward), items) == [1.0, 0.0]
    assert score("think", reward_function(think_format_reward), items) == [1.0, 0.0]


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ([1.0], "returned 1 rewards for a batch of 2 .first prompt t/a."),
        ([1.0, 2.0, 3.0], "returned 3 rewards for a batch of 2"),
        (1.0, "returned 1.0 for a batch of 2"),
        (None, "returned None for a batch of 2"),
        ("ab", "returned 'ab' for a batch of 2"),
        ({"a": 1.0, "b": 2.0}, "returned .'a': 1.0, 'b': 2.0. for a batch of 2"),
        ([1.0, None], "returned None for prompt t/b"),
        ([1.0, "2"], "returned '2' for prompt t/b"),
        ([1.0, 1j], "returned 1j for prompt t/b"),
        ([1.0, math.nan], "returned nan for prompt t/b"),
    ],
)
def test_a_wrong_batch_is_refused(value: object, reason: str) -> None:
    items = [(prompt(id="t/a"), "x"), (prompt(id="t/b"), "y")]
    with pytest.raises(RunFailed, match=f"The reward function f {reason}"):
        finite_scores("f", reward_function(lambda completions: value), items)


@pytest.mark.parametrize(
    "values",
    [
        (1.0, 0.0),
        np.array([1, 0], np.float32),
        torch.tensor([1.0, 0.0]),
        iter([True, False]),
        [np.int8(1), 0],
    ],
)
def test_numbers_of_numpy_and_torch_are_numbers(values: Any) -> None:
    items = [(prompt(), "x"), (prompt(), "y")]
    assert score("f", reward_function(lambda completions: values), items) == [1.0, 0.0]


def test_an_exception_in_a_batch_names_its_size_and_first_prompt() -> None:
    def broken(completions: list[str]) -> list[float]:
        raise LookupError("odd")

    items = [(prompt(id="t/a"), "x"), (prompt(id="t/b"), "y")]
    with pytest.raises(RunFailed, match=r"raised LookupError: odd \(a batch of 2, the first is prompt t/a, "):
        score("f", reward_function(broken), items)


def test_an_annotation_with_messages_is_found_in_unions_and_typed_dicts() -> None:
    def one(completion: str | list[Message]) -> float:
        return 1.0

    def text(completion: str | None) -> float:
        return 1.0

    assert read_signature(one).wants_messages
    assert not read_signature(text).wants_messages
    with pytest.raises(SignatureProblem):
        read_signature(lambda answer: 1.0)


@pytest.mark.parametrize("completion", ["so 7", ""])
@pytest.mark.parametrize(
    ("parameters", "read", "annotation"),
    [
        ("completions, **kwargs", '[c[0]["content"] for c in completions]', "completions: list[list[dict["),
        ("completions, **kwargs", '[c[-1:][0].get("content") for c in completions]', "completions: list"),
        ("completion, **kwargs", 'completion[0]["content"]', "completion: list[dict[str, str]] "),
    ],
)
def test_a_reward_that_reads_text_as_chat_learns_how_to_get_messages(
    parameters: str, read: str, annotation: str, completion: str
) -> None:
    """TRL passes chat messages to functions without annotations. skylite passes text."""
    names: dict[str, Any] = {}
    for word in ("def", "async def"):
        exec(f"{word} f({parameters}): return {read}", names)
        with pytest.raises(RunFailed) as error:
            score("f", reward_function(names["f"]), [(ASKED, completion)])
        assert "skylite passes each completion as text" in error.value.hint
        assert f"annotate it: {annotation}" in error.value.hint


def test_the_annotation_of_the_remedy_works() -> None:
    def f(completions: list[list[dict[str, str]]], **kwargs: Any) -> list[float]:
        return [float(c[0]["content"] == "so 7") for c in completions]

    def broken(completions: list[list[dict[str, str]]], **kwargs: Any) -> list[float]:
        return [float(c[0]["content"]["text"]) for c in completions]  # type: ignore[index]

    assert score("f", reward_function(f), [(ASKED, "so 7")]) == [1.0]
    with pytest.raises(RunFailed) as error:  # it gets messages, so text is not its problem
        score("f", reward_function(broken), [(ASKED, "so 7")])
    assert "annotate" not in error.value.hint
