"""reasoning-gym evaluates entries and answers as code. None of it may touch this machine."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from skylite.errors import ConfigError, RunFailed
from skylite.rewards import load_reward
from skylite.rewards import reasoning_gym as rewards
from skylite.rewards.call_rewards import score
from skylite.rewards.reasoning_gym import close_sandboxes, to_json
from skylite.rewards.worker_pool import RewardPool
from skylite.rollout.trusted_programs import remember, require_named
from skylite.sandbox.sandbox import Limits
from skylite.types import Prompt
from skylite.user_functions import REWARD
from tests.unit.data_cases import prompt

IN_ANSWER = (
    "string_insertion", "spiral_matrix", "binary_matrix", "n_queens", "puzzle24", "countdown",
    "polynomial_multiplication", "intermediate_integration", "simple_integration",
)  # fmt: skip
"""Tasks that evaluate the answer."""
IN_ENTRY = {"number_sorting": ("answer",), "bitwise_arithmetic": ("metadata", "problem")}
"""Tasks that evaluate a field of the entry."""


@pytest.fixture(autouse=True)
def no_sandbox_stays() -> Iterator[None]:
    yield
    close_sandboxes()


def entry_of(task: str) -> dict[str, Any]:
    reasoning_gym = pytest.importorskip("reasoning_gym")
    entry: dict[str, Any] = reasoning_gym.create_dataset(task, seed=1, size=1)[0]
    return entry


def asked(task: str, entry: dict[str, Any]) -> Prompt:
    answer = entry["answer"] if isinstance(entry["answer"], str) else "1"
    return prompt(answer=answer, extra={"task": task, "entry": to_json(entry)})


def command(path: Path) -> str:
    """An expression that makes a file, and has a value."""
    return f"[__import__('os').system('touch {path}'), open('{path}', 'w')]"


@pytest.mark.parametrize("task", IN_ANSWER)
def test_an_answer_runs_nothing_on_this_machine(task: str, tmp_path: Path) -> None:
    found = tmp_path / "found"
    item = (asked(task, entry_of(task)), f"<answer>{command(found)}</answer>")
    assert score("r", load_reward("reasoning-gym"), [item])[0] < 0.1
    assert not found.exists(), "the completion ran a command"


@pytest.mark.parametrize("task", IN_ENTRY)
def test_an_entry_runs_nothing_on_this_machine(task: str, tmp_path: Path) -> None:
    found, entry = tmp_path / "found", entry_of(task)
    *path, last = IN_ENTRY[task]
    part = entry
    for name in path:
        part = part[name]
    part[last] = command(found)
    answer = "[1, 2]" if task == "number_sorting" else "0x1"
    with suppress(RunFailed):
        score("r", load_reward("reasoning-gym"), [(asked(task, entry), f"<answer>{answer}</answer>")])
    assert not found.exists(), "the data ran a command"


def test_an_answer_that_never_ends_scores_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewards, "LIMITS", Limits(cpu_s=1, wall_s=2.0))
    hang = "<answer>[x for x in iter(int, 1)]</answer>"
    fill = "<answer>[0] * 10**12</answer>"
    entry = asked("spiral_matrix", entry_of("spiral_matrix"))
    reward = load_reward("reasoning-gym")
    right = f"<answer>{entry.answer}</answer>"
    assert score("r", reward, [(entry, hang), (entry, fill), (entry, right)]) == [0.0, 0.0, 1.0]


def test_workers_score_in_the_sandbox(tmp_path: Path) -> None:
    found, entry = tmp_path / "found", asked("spiral_matrix", entry_of("spiral_matrix"))
    pool = RewardPool(["reasoning-gym"])
    try:
        scores = asyncio.run(
            pool.score(
                [(entry, f"<answer>{entry.answer}</answer>"), (entry, f"<answer>{command(found)}</answer>")]
            )
        )
    finally:
        pool.close()
    assert [s.reward for s in scores] == [1.0, 0.0]
    assert not found.exists()


def test_only_data_that_names_it_does_not_suffice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with pytest.raises(ConfigError, match="data names the reward reasoning-gym, which evaluates") as error:
        require_named(["reasoning-gym"], REWARD, Path("data"))
    assert """--set 'reward.functions=["reasoning-gym"]'""" in error.value.hint
    remember("reasoning-gym")
    require_named(["reasoning-gym"], REWARD, Path("data"))


WITHOUT_SECCOMP = """
import sys
from skylite.errors import ConfigError
from skylite.rewards import load_reward
from skylite.sandbox.seccomp import _complete, _not_arguments, architecture, install
install(_complete(architecture(), _not_arguments("prctl", architecture(), 0, [22])))
try:
    load_reward("reasoning-gym")
except ConfigError as error:
    sys.exit(str(error))
"""


def test_a_machine_without_a_sandbox_is_refused() -> None:
    pytest.importorskip("reasoning_gym")
    done = subprocess.run([sys.executable, "-c", WITHOUT_SECCOMP], capture_output=True, text=True)
    assert done.returncode == 1
    assert "cannot run the reward reasoning-gym in a sandbox: prctl(PR_SET_SECCOMP) failed" in done.stderr
