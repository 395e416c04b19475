"""`verifiers:NAME KEY=VALUE`: how it is read, who may name it, and what an episode of verifiers returns."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from skylite.config.provenance import Provenance
from skylite.config.rollout import EnvConfig
from skylite.data.prompts import PromptFileInfo
from skylite.data.verifiers import check_verifiers, parse_verifiers
from skylite.environments.episode_spec import check_episode_data
from skylite.environments.episodes_source import read_reward
from skylite.environments.verifiers_episode import VerifiersFailed, read_episode
from skylite.errors import ConfigError
from skylite.rollout.trusted_programs import allow_episode, allow_rewards
from skylite.user_functions import is_program, is_verifiers
from tests.prepared import prepare


def test_settings_are_paths_with_json_or_text() -> None:
    spec = parse_verifiers(
        "verifiers:owner/my_env@1.2 taskset.game=Wordle-v0 taskset.n=3 agent.max_turns=2 id='best of'"
    )
    assert (spec.name, spec.module) == ("owner/my_env@1.2", "my-env")
    assert spec.settings == {
        "taskset": {"game": "Wordle-v0", "n": 3},
        "agent": {"max_turns": 2},
        "id": "best of",
    }


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("verifiers:", "names no environment: '' is not a package name"),
        ("verifiers:a;b", "names no environment: 'a;b' is not a package name"),
        ("verifiers:'a", "cannot be read as words: No closing quotation"),
        ("verifiers:a game", "'game' is not a setting"),
        ("verifiers:a taskset.id=b", "'taskset.id=b' is not a setting"),
        ("verifiers:a x=1 x=2", "gives x twice"),
        ("verifiers:a x=1 x.y=2", "gives x a value and then parts"),
    ],
)
def test_another_text_is_refused(spec: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_verifiers(spec)


def test_without_the_package_the_error_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    with pytest.raises(ConfigError, match=r"needs the package verifiers, which is not installed") as error:
        check_verifiers("verifiers:a")
    assert error.value.hint == "Run `pip install verifiers==0.4.0`."
    with pytest.raises(ConfigError, match="not installed"):
        prepare("verifiers:a")


def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: "0.1.14")
    with pytest.raises(ConfigError, match=r"needs verifiers==0\.4\.0, and 0\.1\.14 is installed"):
        check_verifiers("verifiers:a")


def test_only_the_user_names_an_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A recipe may name installed code with settings that load more of it."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(metadata, "version", lambda name: "0.4.0")
    recipe = tmp_path / "recipe.toml"
    with pytest.raises(ConfigError, match="names the episode verifiers:a, installed code that you have not"):
        allow_episode("verifiers:a", Provenance(file=recipe))
    allow_episode("verifiers:a")
    allow_episode("verifiers:a", Provenance(file=recipe))
    with pytest.raises(ConfigError, match="you have not named"):
        allow_episode("verifiers:a taskset.task.rewards.x.fn=os:system", Provenance(file=recipe))


def test_a_files_function_behind_the_prefix_is_no_program() -> None:
    """A spec is either: the file would run unchecked."""
    assert is_verifiers("verifiers:a.py:f")
    assert not is_program("verifiers:a.py:f")


def info(reward: str) -> PromptFileInfo:
    """The footer of data that was prepared with this reward."""
    return PromptFileInfo(
        dataset="t", source_kind="generated", source="t", source_sha256="0", count=1, seed=0, split="train",
        reward=reward, system="", few_shot=[],
    )  # fmt: skip


def test_an_environments_data_has_no_reward_of_its_own() -> None:
    with pytest.raises(ConfigError, match="data/a holds tasks of verifiers:a n=1, whose episodes") as error:
        allow_rewards((), info("verifiers:a n=1"), Path("data/a"))
    assert "--env 'verifiers:a n=1'" in error.value.hint
    assert allow_rewards(("length",), info("verifiers:a"), Path("data/a")) == (("length",), {})


def test_an_environment_needs_data_with_its_tasks() -> None:
    check_episode_data("verifiers:my_env agent.max_turns=2", "verifiers:my-env taskset.n=3", "data/a")
    check_episode_data("guess", "verifiers:my-env", "data/a")
    for made_for in ("gsm8k", "verifiers:other"):
        with pytest.raises(ConfigError, match="data/a holds no tasks of verifiers:a") as error:
            check_episode_data("verifiers:a n=1", made_for, "data/a")
        assert error.value.hint == "Prepare them: skylite prepare 'verifiers:a n=1'."


def test_prepare_refuses_the_flags_of_other_data() -> None:
    with pytest.raises(ConfigError, match="--question cannot be used with an environment of verifiers"):
        prepare("verifiers:a", question="q")


def trace(**fields: Any) -> SimpleNamespace:
    """A run of an agent in an episode of verifiers."""
    given = {"agent": SimpleNamespace(name="agent"), "ok": True, "last_error": None, "metrics": {}}
    return SimpleNamespace(**{**given, "rewards": {"right": SimpleNamespace(value=0.5)}, **fields})


def episode(*traces: SimpleNamespace, **fields: Any) -> SimpleNamespace:
    """An episode of verifiers."""
    task = SimpleNamespace(data=SimpleNamespace(name=None, id="t-7", idx=7))
    return SimpleNamespace(**{"task": task, "ok": True, "last_error": None, "traces": traces, **fields})


def test_rewards_are_components_and_metrics_are_shown_only() -> None:
    rewards = {"right": SimpleNamespace(value=0.5), "short": SimpleNamespace(value=0.25)}
    found = read_episode(episode(trace(rewards=rewards, metrics={"turns": 3.0, "unseen": None})), "agent")
    assert found == {"right": 0.5, "short": 0.25, "metric/turns": 3.0}
    assert read_reward(found, EnvConfig(), 1).reward == 0.75
    assert read_reward(found, EnvConfig(weights={"metric/turns": 0.1, "short": 0.0}), 1).reward == 0.8


ERROR = SimpleNamespace(type="TaskError", message="scoring: KeyError: 'x'")


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (episode(trace(), ok=False, last_error=ERROR), "task t-7: TaskError: scoring: KeyError: 'x'"),
        (episode(trace(ok=False, last_error=ERROR)), "task t-7: TaskError: scoring: KeyError: 'x'"),
        (episode(trace(), trace()), "its agent agent ran 2 times"),
        (episode(trace(agent=SimpleNamespace(name="judge"))), "its agent agent ran 0 times"),
        (episode(trace(rewards={"right": None})), r"it gave no reward \(right\)"),
        (episode(trace(rewards={})), r"it gave no reward \(any\)"),
    ],
)
def test_a_failed_episode_is_never_a_reward(found: SimpleNamespace, message: str) -> None:
    with pytest.raises(VerifiersFailed, match=message):
        read_episode(found, "agent")


def test_another_agents_run_has_no_say_in_the_reward() -> None:
    other = trace(agent=SimpleNamespace(name="user"), rewards={"x": SimpleNamespace(value=9.0)})
    assert read_episode(episode(other, trace()), "agent") == {"right": 0.5}
