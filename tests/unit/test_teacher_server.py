"""A teacher on a server: its scores, its tokenizer, its faults, and rollout files that keep what it said."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from skylite.config.algorithm import AlgorithmConfig
from skylite.config.train import TrainConfig
from skylite.environments.teacher_server import TeacherServer, teacher_running
from skylite.errors import ConfigError, DataError, RunFailed
from skylite.rollout.resume import check_changes
from skylite.rollout.teacher_check import check_teacher_server
from skylite.rollout.trusted_programs import allow_teacher
from skylite.run.rollout_file import read_examples, read_rollouts, write_rollouts
from skylite.trainer.step import train_step
from skylite.trainer.trainer import make_trainer
from skylite.types import TEACHER_LOGPROBS, Group
from tests.cases import flat_gradient, plain_model, policy_of, relative_difference
from tests.fakes.teacher_server import TeacherStub, teacher_server
from tests.reference import reference_logprobs, reference_loss
from tests.rows import groups_of, random_samples
from tests.settings import typed
from tests.small_run import settings
from tests.tiny_models import CHAT_TEMPLATE, tiny_tokenizer
from tests.unit.environment_cases import make_prompt, shared_tokenizer
from tests.unit.simulated_run import run_of
from tests.unit.test_dry_run import plan


def flat(token_ids: Sequence[int]) -> list[float]:
    """-0.5 for all tokens."""
    return [-0.5] * (len(token_ids) - 1)


def by_id(token_ids: Sequence[int]) -> list[float]:
    """-1/4 of its id for a token: a number that float32 holds exactly."""
    return [-token / 4 for token in token_ids[1:]]


def config_of(url: str, **algorithm: Any) -> TrainConfig:
    return settings(algorithm={"name": "opd", "teacher": url, "teacher_model": "big", **algorithm})


def taught(
    config: TrainConfig, groups: Sequence[Group], slept: list[float] | None = None, patience_s: float = 300
) -> tuple[list[Group], dict[str, float]]:
    async def sleep(seconds: float) -> None:
        assert slept is not None
        slept.append(seconds)

    async def run() -> tuple[list[Group], dict[str, float]]:
        server = TeacherServer(config.algorithm, patience_s, sleep)
        try:
            return await server.taught(groups)
        finally:
            await server.aclose()

    return asyncio.run(run())


# Scores


def test_each_sampled_token_gets_the_servers_logprob_of_it() -> None:
    groups = groups_of(random_samples(0, num_groups=2))
    with teacher_server(None, by_id) as stub:
        found, metrics = taught(config_of(stub.url), groups)
    calls = [call for group in found for t in group.trajectories for call in t.calls]
    for call in calls:
        assert call.teacher_logprobs == [-token / 4 for token in call.completion_token_ids]
    assert sorted(stub.prompts) == sorted(c.prompt_token_ids + c.completion_token_ids for c in calls)
    assert stub.named == {"big"}
    assert metrics["teacher/repeated"] == 0
    assert metrics["time/teacher_server_s"] > 0
    cleared = [replace(call, teacher_logprobs=[]) for call in calls]
    assert cleared == [call for group in groups for t in group.trajectories for call in t.calls]


def with_prompts(groups: Sequence[Group]) -> list[Group]:
    """The third trajectory of a group has no prompt for a teacher."""
    return [
        replace(
            group,
            trajectories=tuple(
                replace(t, calls=(replace(t.calls[0], teacher_prompt_token_ids=[] if i == 2 else [7, 8, 9]),))
                for i, t in enumerate(group.trajectories)
            ),
        )
        for group in groups
    ]


def test_a_server_reads_the_teachers_own_prompt_and_no_completion_without_one(tmp_path: Path) -> None:
    groups = with_prompts(groups_of(random_samples(0)))
    with teacher_server(None, flat) as stub:
        config = config_of(stub.url, name="sdpo", reward_weight=1.0)
        found, _ = taught(config, groups)
    assert len(stub.prompts) == 12
    assert {tuple(prompt[:3]) for prompt in stub.prompts} == {(7, 8, 9)}
    calls = [call for group in found for t in group.trajectories for call in t.calls]
    assert [len(c.teacher_logprobs) for c in calls] == [
        len(c.completion_token_ids) if c.teacher_prompt_token_ids else 0 for c in calls
    ]
    write_rollouts(tmp_path / "step.parquet", found)
    assert read_rollouts(tmp_path / "step.parquet")[0].trajectories[2].calls[0].teacher_logprobs == []


def test_the_trainer_learns_from_the_stored_logprobs(tiny_llama: Path, tmp_path: Path, dist: Any) -> None:
    """As from a teacher that the reference computes, and without a pass of its own."""
    config = config_of("http://127.0.0.1:1")
    rows = random_samples(0)
    policy = policy_of(tiny_llama, config, dist)
    plain = plain_model(tiny_llama, policy, config)

    def scores(token_ids: list[int]) -> list[float]:
        with torch.no_grad(), plain.disable_adapter():
            logits = plain(torch.tensor([token_ids])).logits[0, :-1]
        chosen = torch.log_softmax(logits, -1).gather(1, torch.tensor(token_ids[1:])[:, None])[:, 0]
        return list(chosen.tolist())

    with teacher_server(None, scores) as stub:
        groups, _ = taught(config_of(stub.url), groups_of(rows))
    write_rollouts(tmp_path / "step.parquet", groups)
    examples = read_examples(tmp_path / "step.parquet")
    trainer = make_trainer(policy, config, dist)
    metrics = train_step(trainer, examples, 1)
    with torch.no_grad(), plain.disable_adapter():
        expected = [reference_logprobs(plain, row, 1.0) for row in rows]
    reference_loss(plain, rows, range(len(rows)), config, teacher=expected).backward()
    assert relative_difference(trainer.optimizer.grads, flat_gradient(plain, policy)) < 1e-5
    assert "time/teacher_s" not in metrics
    assert read_rollouts(tmp_path / "step.parquet")[1].trajectories[0].calls[0].teacher_logprobs == (
        pytest.approx(expected[4].tolist(), abs=1e-5)
    )
    lacking = [replace(e, extras={}) for e in examples]
    with pytest.raises(DataError, match="has no logprobs of the teacher's server"):
        train_step(trainer, lacking, 2)
    damaged = [replace(e, extras={TEACHER_LOGPROBS: e.extras[TEACHER_LOGPROBS] * math.nan}) for e in examples]
    with pytest.raises(DataError, match="has no logprobs of the teacher's server"):
        train_step(trainer, damaged, 2)


class Counting:
    """A teacher that says -0.25 for each token."""

    def __init__(self) -> None:
        self.asked = 0

    async def taught(self, groups: Sequence[Group]) -> tuple[list[Group], dict[str, float]]:
        self.asked += 1
        return [
            replace(
                g,
                trajectories=tuple(
                    replace(t, calls=tuple(replace(c, teacher_logprobs=[-0.25]) for c in t.calls))
                    for t in g.trajectories
                ),
            )
            for g in groups
        ], {"teacher/repeated": 3.0}


def test_a_step_keeps_what_the_teacher_said_and_a_resume_does_not_ask_again(tmp_path: Path) -> None:
    teacher = Counting()
    run, _, _ = run_of(tmp_path / "run", 0, 2, teacher=teacher)
    assert teacher.asked == 2
    (_, last) = map(json.loads, run.metrics_path.read_text().splitlines())
    assert last["teacher/repeated"] == 3.0
    stored = read_rollouts(run.rollout_path(2))
    assert {x for g in stored for t in g.trajectories for c in t.calls for x in c.teacher_logprobs} == {-0.25}
    run.metrics_path.write_text("")
    run_of(tmp_path / "run", 0, 2, resumed=True, teacher=teacher)
    assert teacher.asked == 2


# Faults


def test_a_busy_server_is_asked_again_and_a_dead_one_ends_the_run_in_words() -> None:
    groups = groups_of(random_samples(0, num_groups=1))
    slept: list[float] = []
    with teacher_server(
        None, flat, fault=lambda path, n: (503, "loading") if n < 2 else (200, "{}") if n == 2 else None
    ) as stub:
        _, metrics = taught(config_of(stub.url), groups, slept)
    assert metrics["teacher/repeated"] == 3
    assert slept == [1.0, 1.0, 1.0]
    with pytest.raises(RunFailed) as error:
        taught(config_of(stub.url), groups, [], patience_s=0)
    assert error.value.what.startswith(f"The teacher big at {stub.url} gave no answer in 1 attempts: the ")
    assert "--resume" in error.value.hint


@pytest.mark.parametrize(
    ("reply", "sentence"),
    [
        ((401, "no key"), r"refuses the request: HTTP 401 no key"),
        ((404, "no such model"), r"refuses the request: HTTP 404"),
        ((200, '{"choices": [{"text": "x"}]}'), r"gives no logprobs of prompts"),
        ((200, '{"choices": [{"prompt_logprobs": null}]}'), r"gives no logprobs of prompts"),
    ],
)
def test_a_server_that_cannot_teach_is_not_asked_again(reply: tuple[int, str], sentence: str) -> None:
    with teacher_server(None, flat, fault=lambda path, n: reply) as stub:
        with pytest.raises(RunFailed, match=sentence):
            taught(config_of(stub.url), groups_of(random_samples(0, num_groups=1, group_size=1)))
        assert len(stub.headers) == 1


@pytest.mark.parametrize("logprob", [-9999.0, 3.5, math.nan, None])
def test_a_number_that_is_no_logprob_ends_the_run(logprob: Any) -> None:
    def scores(ids: list[int]) -> list[Any]:
        return [*flat(ids)[:-1], logprob]

    with (
        teacher_server(None, scores) as stub,
        pytest.raises(RunFailed, match=r"gives token \d+ the logprob \S+, which is none"),
    ):
        taught(config_of(stub.url), groups_of(random_samples(0, num_groups=1, group_size=1)))


def test_the_key_is_sent_and_never_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEACHER_KEY", "s3cret")
    groups = groups_of(random_samples(0, num_groups=1, group_size=1))
    with teacher_server(None, flat) as stub:
        config = config_of(stub.url + "/v1/", teacher_key_env="TEACHER_KEY")
        taught(config, groups)
    assert [h["authorization"] for h in stub.headers] == ["Bearer s3cret"]
    assert "s3cret" not in config.model_dump_json()
    monkeypatch.delenv("TEACHER_KEY")
    with pytest.raises(ConfigError, match="teacher_key_env=TEACHER_KEY names a variable that is not set"):
        taught(config, groups)


# Before a run


def check(stub: TeacherStub, **sections: Any) -> tuple[TrainConfig, list[str]]:
    tree = {"algorithm": {"name": "opd", "teacher": stub.url, **sections.pop("algorithm", {})}, **sections}
    config, notes = check_teacher_server(
        settings(**tree), shared_tokenizer(CHAT_TEMPLATE), [make_prompt(1, extra={"hint": "x" * 40})]
    )
    return config, [note.text for note in notes]


def test_the_plan_finds_the_teachers_name_and_compares_all_tokens() -> None:
    with teacher_server(tiny_tokenizer(), flat) as stub:
        config, notes = check(stub)
    assert config.algorithm.teacher_model == "big"
    assert notes == [f"the teacher is big at {stub.url}, which has the tokenizer of {notes[0].split()[-1]}"]
    assert stub.named == {"big"}
    assert len(stub.prompts) == 1
    assert check_teacher_server(TrainConfig(), shared_tokenizer(CHAT_TEMPLATE), []) == (TrainConfig(), [])


def test_a_plan_names_the_teacher_and_a_resumed_run_compares_again(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with teacher_server(tiny_tokenizer(), flat) as stub:
        planned = plan(tmp_path, tiny_llama, algorithm={"name": "opd", "teacher": stub.url})
        assert planned.config.algorithm.teacher_model == "big"
        assert any(note.text.startswith("the teacher is big at") for note in planned.resolved.notes)
        assert planned.resolved.identity.teacher is None
        asked = len(stub.headers)

        async def run(*, is_new: bool) -> None:
            tokenizer = shared_tokenizer(CHAT_TEMPLATE)
            async with teacher_running(planned.config.algorithm, tokenizer, is_new=is_new) as teacher:
                assert teacher is not None

        asyncio.run(run(is_new=True))
        assert len(stub.headers) == asked
        asyncio.run(run(is_new=False))
        assert len(stub.headers) > asked
        stub.models = {"another": None}
        with pytest.raises(ConfigError, match="serves another, and not big"):
            asyncio.run(run(is_new=False))


class Shifted:
    """A tokenizer with another text for a token that the texts do not use."""

    def __init__(self, token: int) -> None:
        self.own, self.token = tiny_tokenizer(), token

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return list(self.own.encode(text, add_special_tokens=add_special_tokens))

    def decode(self, ids: list[int]) -> str:
        return "".join("@" if i == self.token else self.own.decode([i]) for i in ids)


class Other(Shifted):
    """One that divides texts in another way."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return super().encode(text, add_special_tokens)[::-1]


def test_another_tokenizer_is_refused_by_a_text_or_by_a_token() -> None:
    for tokenizer, how in (
        (Other(-1), r"it reads 'The answer is 42.*' as \["),
        (Shifted(len(tiny_tokenizer()) - 1), r"it has other texts for the tokens \d+ to \d+"),
    ):
        with (
            teacher_server(tokenizer, flat) as stub,
            pytest.raises(ConfigError, match=f"has another tokenizer than .*: {how}") as error,
        ):
            check(stub)
        assert error.value.exit_code == 2
    unknown = lambda path, n: (404, "Not Found") if path == "/tokenize" else None  # noqa: E731
    with teacher_server(tiny_tokenizer(), flat, fault=unknown) as stub:
        with pytest.raises(ConfigError, match="HTTP 404") as error:
            check(stub)
        assert "must be vLLM's" in error.value.hint


def test_one_model_must_be_chosen_and_be_long_enough() -> None:
    with teacher_server(tiny_tokenizer(), flat, models={"a": 4096, "b": 100}) as stub:
        with pytest.raises(ConfigError, match=r"serves a, b\."):
            check(stub)
        with pytest.raises(ConfigError, match=r"serves a, b, and not c\."):
            check(stub, algorithm={"teacher_model": "c"})
        limits = {"max_prompt_tokens": 90, "max_completion_tokens": 9}
        assert check(stub, algorithm={"teacher_model": "b"}, rollout=limits)[0].algorithm.teacher_model == "b"
        with pytest.raises(ConfigError, match=r"reads 100 tokens, and this run may send 101\."):
            check(stub, algorithm={"teacher_model": "b"}, rollout=limits | {"max_completion_tokens": 10})
        hint = {"name": "opsd", "teacher_column": "hint", "teacher_model": "b"}
        with pytest.raises(ConfigError, match=r"reads 100 tokens, and this run may send \d\d\d\."):
            check(stub, algorithm=hint, rollout=limits)


def test_images_and_a_dead_server_are_refused_before_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skylite.rollout.teacher_check.PATIENCE_S", 0)
    config = config_of("http://127.0.0.1:9")
    with pytest.raises(ConfigError, match="gave no answer in 1 attempts") as error:
        check_teacher_server(config, shared_tokenizer(CHAT_TEMPLATE), [make_prompt(1)])
    assert error.value.exit_code == 2
    with pytest.raises(DataError, match="p1 has images"):
        check_teacher_server(config, shared_tokenizer(CHAT_TEMPLATE), [make_prompt(1, images=(b"x",))])


@pytest.mark.parametrize(
    ("sections", "sentence"),
    [
        ({"algorithm": {"teacher": "http://h:1"}}, "has no effect with algorithm.name=grpo"),
        ({"algorithm": {"name": "opd", "teacher": "http://u:p@h"}}, "not the address of a server"),
        ({"algorithm": {"name": "opd", "teacher": "http:/h"}}, "not the address of a server"),
        (
            {"algorithm": {"name": "opd", "teacher": "x", "teacher_model": "m"}},
            "teacher_model=m has no effect with algorithm.teacher=x",
        ),
        (
            {"algorithm": {"name": "opd", "teacher": "http://h"}, "rollout": {"temperature": 0.8}},
            r"temperature=0\.8 changes the policy's probabilities",
        ),
    ],
)
def test_settings_that_a_server_cannot_fulfil_are_refused(sections: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValidationError, match=sentence):
        settings(**sections)
    assert AlgorithmConfig(name="opd", teacher="http://h").teacher_folder is None


def test_a_server_that_only_a_file_names_gets_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    config = config_of("https://teacher.example", teacher_key_env="OPENAI_API_KEY")
    recipe = replace(typed({}), file=Path("recipe.toml"))
    with pytest.raises(ConfigError, match="sends prompts, completions and the key in OPENAI_API_KEY to the"):
        allow_teacher(config, recipe)
    names = {"algorithm.teacher": "", "algorithm.teacher_key_env": ""}
    allow_teacher(config, replace(recipe, typed=typed(names).typed))
    allow_teacher(config, recipe)  # remembered
    allow_teacher(config_of("folder", teacher_model=""), recipe)


def test_a_resume_may_move_the_server_but_not_change_the_teacher() -> None:
    old = config_of("http://127.0.0.1:1")
    check_changes(old, config_of("http://127.0.0.1:2", teacher_key_env="KEY"))
    for other in (
        config_of("http://127.0.0.1:1", teacher_model="small"),
        config_of("folder", teacher_model=""),
    ):
        with pytest.raises(ConfigError, match="this would change its result"):
            check_changes(old, other)
