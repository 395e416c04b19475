"""The built-in rewards that settings describe, and their settings from `prepare` to the run and `eval`."""

from __future__ import annotations

import asyncio
import json
import re
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from skylite.cli.eval import EvalFlags, plan_eval
from skylite.config.provenance import NOTHING_TYPED
from skylite.config.rollout import RewardParameters
from skylite.data.prompts import read_prompts
from skylite.errors import ConfigError, DataError
from skylite.rewards import load_reward, text_rewards
from skylite.rewards.call_rewards import score
from skylite.rollout.plan import RunPlan, plan_run
from skylite.rollout.sources import reward_pool
from skylite.run.run_dir import RunDir
from tests.settings import load_config, typed
from tests.unit.bad_inputs import Reply, call, printed_json
from tests.unit.data_cases import prompt

TAGS = r"(?s)<answer>(.*?)</answer>"


def reward_of(spec: str, completion: str, answer: str = "7", **parameters: Any) -> float:
    reward = load_reward(spec, RewardParameters(**parameters))
    return score(spec, reward, [(prompt(answer=answer), completion)])[0]


@pytest.mark.parametrize(
    ("completion", "answer", "parameters", "value"),
    [
        ("Paris", "Paris", {}, 1.0),
        (" Paris \n", "Paris", {}, 1.0),
        ("New\n York", "New York", {}, 1.0),
        ("paris", "Paris", {}, 0.0),
        ("PARIS", "Paris", {"ignore_case": True}, 1.0),
        ("It is Paris", "Paris", {}, 0.0),
        ("<answer>Lyon</answer> no, <answer> Paris </answer>", "Paris", {"answer_pattern": TAGS}, 1.0),
        ("<answer>Paris</answer> no, <answer>Lyon</answer>", "Paris", {"answer_pattern": TAGS}, 0.0),
        ("Paris", "Paris", {"answer_pattern": TAGS}, 0.0),
        ("so 3, then 4", "4", {"answer_pattern": r"-?\d+"}, 1.0),
        ("A: x", "x", {"answer_pattern": r"(?i)(answer|a): *(.*)"}, 1.0),
        ("B=x", "x", {"answer_pattern": r"A=(\w)|B=(\w)"}, 1.0),
        ("A=x B=y", "x", {"answer_pattern": r"A=(\w)|B=(\w)"}, 0.0),
        ("key:", "key", {"answer_pattern": r"key:(\w)?"}, 0.0),
        ("1,080.0", "1080", {"compare": "number"}, 1.0),
        ("1,080.5", "1080", {"compare": "number"}, 0.0),
        ("many", "1080", {"compare": "number"}, 0.0),
        ("1/2", "0.5", {"compare": "math"}, 1.0),
        ("<answer>x+1</answer>", "1+x", {"compare": "math", "answer_pattern": TAGS}, 1.0),
        ("2/2", "0.5", {"compare": "math"}, 0.0),
        ("nothing at all", "0.5", {"compare": "math"}, 0.0),
    ],
)
def test_exact_match(completion: str, answer: str, parameters: dict[str, Any], value: float) -> None:
    assert reward_of("exact_match", completion, answer, **parameters) == value


def test_format_and_regex_ask_for_no_answer() -> None:
    assert [reward_of("format", c, "") for c in ("#### 3", "3")] == [1.0, 0.0]
    tags = [reward_of("format", c, "", answer_pattern=TAGS) for c in ("<answer>3</answer>", "#### 3")]
    assert tags == [1.0, 0.0]
    think = [
        reward_of("regex", c, "", pattern=r"^<think>.+</think>") for c in ("<think>a</think>3", "a<think>")
    ]
    assert think == [1.0, 0.0]


@pytest.mark.parametrize(
    ("length", "value"),
    [(0, 0.0), (5, 0.5), (10, 1.0), (15, 1.0), (20, 1.0), (25, 0.75), (40, 0.0), (99, 0.0)],
)
def test_length_rises_to_the_minimum_and_falls_after_the_maximum(length: int, value: float) -> None:
    assert reward_of("length", " " + "x" * length + "\n", min_length=10, max_length=20) == value


def test_a_pattern_that_takes_exponential_time_finds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_rewards, "MATCH_TIMEOUT_S", 0.2)
    evil, text = r"((?:a|a|aa)+)$", "a" * 60 + "b"
    started = time.monotonic()
    assert reward_of("regex", text, pattern=evil) == 0.0
    assert reward_of("exact_match", text, answer_pattern=evil) == 0.0
    assert time.monotonic() - started < 5


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ("regex", "reward regex needs reward.pattern"),
        ("length", "needs reward.min_length or reward.max_length"),
    ],
)
def test_a_reward_without_its_setting_is_refused(spec: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        load_reward(spec)


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ("reward.answer_pattern='('", r"'\(' is not a regex: missing \)"),
        ("reward.compare=fuzzy", "reward.compare='fuzzy'"),
        ("reward.min_length=-1", "greater than or equal to 0"),
        ("reward.patern=x", "there is no such setting, did you mean pattern"),
    ],
)
def test_bad_settings_are_refused(setting: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        load_config(None, {}, [setting])
    with pytest.raises(ConfigError, match=r"max_length=3 is under reward.min_length=9"):
        load_config(None, {}, ["reward.min_length=9", "reward.max_length=3"])


# From `skylite prepare` to a run


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    rows = [{"q": f"capital {i}?", "a": f"so <answer>C{i}</answer>"} for i in range(20)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def prepare(*flags: str) -> Reply:
    return call(["prepare", "rows.jsonl", "--question", "q", *flags, "--out", "data"])


def plan(model: Path, *settings: str) -> RunPlan:
    overrides = {"model.name": str(model), "data.path": "data"}
    config = load_config(None, overrides, ["rollout.prompts_per_step=2", *settings])
    return plan_run(config, RunDir(Path("run").resolve()), typed({}, settings))


def test_settings_of_prepare_reach_the_run_and_eval(here: Path, tiny_llama: Path) -> None:
    done = prepare("--answer", "a", "--reward", "exact_match", "--set", f"reward.answer_pattern='{TAGS}'",
                   "--set", "reward.ignore_case=true")  # fmt: skip
    assert done.code == 0, done.output
    assert "every reference answer scores 1.0 under the reward exact_match" in done.output
    train, info = read_prompts(here / "data" / "train.parquet")
    assert {p.answer[0] for p in train} == {"C"}, "the answer in the column's text is the reference"
    assert info.reward_settings == {"answer_pattern": TAGS, "ignore_case": True}
    assert f"--set {json.dumps('reward.answer_pattern=')[1:-1]}" in info.made_by.replace("'", "")
    ready = plan(tiny_llama, "reward.ignore_case=false")
    reward = ready.config.reward
    assert (reward.answer_pattern, reward.ignore_case) == (TAGS, False), "--set wins"
    assert f"from the data: reward.answer_pattern={TAGS!r}" in map(str, ready.resolved.notes)
    replaced = plan(tiny_llama, 'reward.functions=["format"]').config.reward
    assert replaced.answer_pattern is None, "the settings belong to the data's own reward"
    flags = EvalFlags(base=True, model=str(tiny_llama), data=[Path("data")], provenance=NOTHING_TYPED)
    assert plan_eval(flags).data[0].scored.config.reward.answer_pattern == TAGS


def test_the_workers_of_a_run_get_the_settings(here: Path, tiny_llama: Path) -> None:

    assert (
        prepare("--answer", "a", "--reward", "exact_match", "--set", f"reward.answer_pattern='{TAGS}'").code
        == 0
    )
    planned = plan(tiny_llama)
    pool = reward_pool(planned.scored, planned.run.logs)
    try:
        scores = asyncio.run(
            pool.score([(prompt(answer="C1"), f"<answer>{c}</answer>") for c in ("C1", "C2")])
        )
    finally:
        pool.close()
    assert [s.reward for s in scores] == [1.0, 0.0]


def test_settings_in_data_from_elsewhere_are_checked(here: Path, tiny_llama: Path) -> None:
    assert prepare("--answer", "a", "--reward", "exact_match").code == 0
    for settings, reason in (
        ({"answer_pattern": "("}, "answer_pattern: Value error, '.' is not a regex"),
        ({"functions": ["x.py:f"]}, "functions: Extra inputs are not permitted"),
        ({"timeout_s": 1e9}, "timeout_s: Extra inputs"),
    ):
        path = here / "data" / "train.parquet"
        table = pq.read_table(path)
        footer = json.loads(table.schema.metadata[b"skylite"]) | {"reward_settings": settings}
        pq.write_table(table.replace_schema_metadata({b"skylite": json.dumps(footer).encode()}), path)
        with pytest.raises(DataError, match=f"prepared with a reward setting that is refused: {reason}"):
            plan(tiny_llama)


def test_an_answer_that_never_equals_itself_is_named(here: Path) -> None:
    done = prepare("--answer", "a", "--reward", "exact_match", "--set", "reward.compare=number")
    assert done.code == 2
    assert "scores 0 under the reward exact_match; it must score 1.0" in done.output
    assert not Path("data").exists()


def test_prepare_has_no_other_settings(here: Path) -> None:
    done = prepare("--answer", "a", "--reward", "math", "--set", "reward.num_workers=2")
    assert (done.code, "`skylite prepare` has no setting reward.num_workers" in done.output) == (2, True)


JUDGE = "async def judge(completion, prompt): return len(completion) / 10 - 1\n"


def test_data_without_reference_answers(here: Path, tiny_llama: Path) -> None:
    Path("mine.py").write_text(JUDGE)
    done = prepare("--no-answer", "--reward", "mine.py:judge")
    assert done.code == 0, done.output
    assert "uses no reference answers" in done.output
    train, info = read_prompts(here / "data" / "train.parquet")
    assert ({p.answer for p in train}, info.has_answers) == ({""}, False)
    assert " --no-answer " in info.made_by
    assert plan(tiny_llama).rewards == (f"{here}/mine.py:judge",)
    with pytest.raises(
        ConfigError, match=r"gsm8k does not work: .* it asks for answer, but prompt rows/train/"
    ):
        plan(tiny_llama, 'reward.functions=["gsm8k"]')
    flags = EvalFlags(base=True, model=str(tiny_llama), data=[Path("data")], provenance=NOTHING_TYPED)
    assert plan_eval(flags).data[0].reward == f"{here}/mine.py:judge"


def test_data_without_a_reward_is_only_distilled_on(here: Path, tiny_llama: Path) -> None:
    assert prepare("--reward", "none").code == 2, "answers or --no-answer"
    done = prepare("--no-answer", "--reward", "none")
    assert done.code == 0, done.output
    assert "without a reward: train on it with --set algorithm.name=opd" in done.output
    hint = ["algorithm.name=opsd", "algorithm.teacher_column=a"]
    made = plan(tiny_llama, *hint, "eval.limit=2")
    assert (made.rewards, list(made.held_out), made.config.eval.limit) == (("none",), [], 0)
    assert "eval.limit=0: the reward none scores no held-out rows" in map(str, made.resolved.notes)
    for settings, reason in (
        ([], "algorithm.name=grpo learns from rewards"),
        ([*hint, "algorithm.reward_weight=0.5"], "algorithm.name=opsd learns from rewards"),
        ([*hint, 'reward.functions=["none", "gsm8k"]'], "is one of 2"),
        (["algorithm.name=sdpo"], "teacher_sees_success shows what earned one"),
        ([*hint, "checkpoint.keep_best=1", "eval.limit=2", "eval.every=1"], "keep_best=1 compares held-out"),
    ):
        with pytest.raises(ConfigError, match=f"The reward none gives no points, and .*{reason}"):
            plan(tiny_llama, *settings)
    flags = EvalFlags(base=True, model=str(tiny_llama), data=[Path("data")], provenance=NOTHING_TYPED)
    with pytest.raises(ConfigError, match=r"data was prepared without a reward .*nothing says what is right"):
        plan_eval(flags)


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--reward", "length", "--set", "reward.max_length=9"], "data without them give --no-answer"),
        (["--no-answer", "--answer", "a", "--reward", "length"], "--no-answer says that there are none"),
        (["--no-answer", "--reward", "exact_match"], "exact_match compares with a reference answer"),
        (["--no-answer", "--reward", "length"], "needs reward.min_length or reward.max_length"),
        (["--no-answer", "--reward", "mine.py:needs"], "it asks for level, but prompt rows/"),
        (
            ["--no-answer", "--reward", "mine.py:text"],
            r"mine.py:text returned 'good' for prompt rows/train/\d+",
        ),
        (
            ["--answer", "a", "--reward", "mine.py:chat"],
            r"mine.py:chat does not work: .* annotate it: completions: ",
        ),
    ],
)
def test_prepare_refuses_in_words(here: Path, flags: list[str], reason: str) -> None:

    Path("mine.py").write_text(
        "def needs(completion, level): return 1.0\ndef text(completion): return 'good'\n"
        "def chat(completions, **rest): return [float(c[0]['content'] == '1') for c in completions]\n"
    )
    done = prepare(*flags)
    assert done.code == 2, done.output
    assert re.search(reason, done.output), done.output
    assert not Path("data").exists()


def dry_run(model: Path, *flags: str) -> Reply:
    settings = ["eval.limit=0", "data.difficulty=[]", "rollout.prompts_per_step=2"]
    given = [word for setting in settings for word in ("--set", setting)]
    return call(["train", "--recipe", "gsm8k_cpu", "--model", str(model), "--data", "data", *given,
                 "--run", "run", "--dry-run", *flags])  # fmt: skip


def test_train_takes_rewards_by_flag_which_is_the_users_word(here: Path, tiny_llama: Path) -> None:
    assert prepare("--answer", "a", "--reward", "exact_match").code == 0
    Path("data.py").write_text("def style(completion, *, prompt, answer, **columns): return 0.5\n")
    refused = dry_run(tiny_llama, "--reward", "data.py:styel")
    assert (refused.code, "has no function 'styel'" in refused.output) == (2, True)
    named = dry_run(tiny_llama, "--reward", "exact_match", "--reward", "data.py:style")
    assert named.code == 0, named.output
    settings = printed_json(named)
    assert settings["reward"]["functions"] == ["exact_match", f"{here}/data.py:style"]
    both = dry_run(tiny_llama, "--reward", "format", "--set", 'reward.functions=["format"]')
    assert (both.code, "--reward and --set reward.functions both choose" in both.output) == (2, True)


def test_a_wrong_signature_is_found_by_a_dry_run(here: Path, tiny_llama: Path) -> None:
    assert prepare("--answer", "a", "--reward", "exact_match").code == 0
    Path("mine.py").write_text("def f(completion, solution): return 1.0\n")
    reply = dry_run(tiny_llama, "--reward", "mine.py:f")
    assert reply.code == 2
    assert "it asks for solution, but prompt rows/train/" in reply.output
    assert "Rename the parameter, give it a default, or prepare the data with that column." in reply.output
    assert not Path("run").exists()
