"""GSM8K's strict and flexible scores equal those of lm-evaluation-harness on the same outputs.

Filters, regexes and normalisation are the harness' own code and task file.
"""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest

from skylite.evaluation.harness_gsm8k import STOPS, Kind, harness_score
from tests.unit.peer_code import load_lm_eval

OUTPUTS = (
    "He has 3 + 4 = 7.\n#### 7",
    "#### 1,080",
    "#### 1080.",
    "#### 1080.0",
    "####1080",
    "#### $1080",
    "#### -5 degrees",
    "#### - 5",
    "#### 7\n#### 8",
    "The answer is $1,080.50.",
    "The answer is 1,080.",
    "so 12 apples and 7 pears",
    "no number at all",
    "",
    "7.",
    "...",
    "$",
    "-$5",
    "5-3=2",
    "\u0661\u0662",
    "#### 7 Question: next? #### 8",
    "#### 7<|im_end|>#### 9",
    "#### 7\r\n",
    "\n\n#### 1,2,3",
    "[invalid]",
)
ANSWERS = ("7", "8", "1080", "1,080", "-5", "1080.5", "12", "5", "2", "123", "")


@pytest.fixture(scope="module")
def harness() -> SimpleNamespace:
    return load_lm_eval()


def peer_score(harness: SimpleNamespace, kind: Kind, output: str, answer: str) -> float:
    """As the harness scores an output of its generation: it ends before the task's stop strings."""
    for stop in harness.task["generation_kwargs"]["until"]:
        output = output.split(stop)[0]
    chain = {f["name"].partition("-")[0]: f["filter"] for f in harness.task["filter_list"]}[kind]
    settings = {k: v for k, v in chain[0].items() if k != "function"}
    assert [f["function"] for f in chain] == ["regex", "take_first"]
    [[found]] = harness.regex_filter(**settings).apply([[output]], [{}])
    metric = harness.task["metric_list"][0]
    options = {k: metric[k] for k in ("ignore_case", "ignore_punctuation", "regexes_to_ignore")}
    target = f"Some reasoning, with 3 steps.\n#### {answer}"
    score = harness.exact_match(predictions=[found], references=[target], **options)["exact_match"]
    return float(score)


@pytest.mark.parametrize("kind", ["strict", "flexible"])
def test_scores_equal_the_harness_on_chosen_outputs(harness: SimpleNamespace, kind: Kind) -> None:
    seen = set()
    for output in OUTPUTS:
        for answer in ANSWERS:
            ours = harness_score(kind, output, answer)
            assert ours == peer_score(harness, kind, output, answer), (output, answer)
            seen.add(ours)
    assert seen == {0.0, 1.0}


@pytest.mark.parametrize("kind", ["strict", "flexible"])
def test_scores_equal_the_harness_on_random_outputs(harness: SimpleNamespace, kind: Kind) -> None:
    rng = random.Random(0)
    parts = ["#### ", "####", "-", "$", ".", ",", "7", "12", "0", " ", "\n", "a", "Question:", "</s>"]
    right = 0.0
    for _ in range(3000):
        answer = rng.choice(["7", "12", "127", "-7", "0", "7.0", "1,200"])
        output = "".join(rng.choices([*parts, f"#### {answer}"], k=rng.randrange(12)))
        ours = harness_score(kind, output, answer)
        assert ours == peer_score(harness, kind, output, answer), (output, answer)
        right += ours
    assert right > 100


def test_the_stops_are_the_tasks(harness: SimpleNamespace) -> None:
    assert list(STOPS) == harness.task["generation_kwargs"]["until"]
