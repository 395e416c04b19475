"""Runs the episodes of episodes.py in one environment and checks what each left behind."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from skylite.environments.episodes_source import Episodes
from skylite.environments.trajectory_log import TrajectoryLog
from skylite.errors import RunFailed
from skylite.types import Group, Prompt, Trajectory
from tests.faults.episodes import FAULTS
from tests.unit.environment_cases import ScriptedEngine, environment, make_prompt, make_request, to_text

PROGRAM = Path(__file__).with_name("episodes.py")
MAX_TURNS = 4
FAILING = {
    "raise_error": "raised ValueError",
    "raise_unprintable": "ended its process",
    "exit_now": "ended its process with 3",
    "kill_itself": "ended its process with -9",
    "return_none": "returned no component",
    "return_nan": "nan",
    "return_too_much": "more than fits",
    "write_everywhere": "ended its process with",
}
"""Faults after which an episode has no reward, and a word of the reason."""
HANGING = ("hang", "hang_busy")
STATUS = {
    "flood": {200, 400}, "use_other_keys": {401}, "call_after_its_end": {401}, "malformed": {400},
    "image": {400}, "several_choices": {400}, "huge_limit": {200}, "huge_body": {413}, "other_paths": {404},
}  # fmt: skip
CALLS = {"flood": MAX_TURNS, "huge_limit": 3, "cancel_stream": 3, "hang": 1, "hang_busy": 1}
"""Recorded calls, where they are not two."""


@dataclass(frozen=True)
class Found:
    """What a run of many faulty episodes gave."""

    faults: list[str]
    """Of each prompt."""
    trajectories: dict[int, Trajectory]
    """Without those whose episode failed."""
    answers: list[dict[str, Any]]
    """Status and error of the bad requests."""
    unread: int
    """Replies of the engine that no trajectory holds, beside those of failed episodes."""


def choose(count: int, seed: int, without: Sequence[str] = ()) -> list[str]:
    """Each fault once, then random ones, in random order."""
    rng, names = random.Random(seed), [name for name in FAULTS if name not in without]
    chosen = [*names, *rng.choices(names, k=max(0, count - len(names)))]
    rng.shuffle(chosen)
    return chosen


def reply_to(prompt: str) -> str:
    """The scripted model repeats whose conversation it reads."""
    names = re.findall(r"I am (?:still )?(p\d+)\.", prompt)
    return f"You are {names[-1] if names else 'nobody'}."


def prompt_of(number: int, fault: str) -> Prompt:
    return make_prompt(number, extra={"fault": fault})


async def run_faults(folder: Path, faults: list[str], patch: pytest.MonkeyPatch, **env: Any) -> Found:
    """All episodes at once; a failed one is left out."""
    notes = folder / "notes.jsonl"
    notes.touch()
    patch.setenv("SKYLITE_FAULTS", str(notes))
    engine = ScriptedEngine(reply_to, delay_s=0.3)
    options = {"max_turns": MAX_TURNS, "on_error": "drop", "timeout_s": 120.0, **env}
    async with environment(folder, "", episode=f"{PROGRAM}:episode", **options) as running:
        leave_ended_keys(running, notes.with_suffix(".keys"))
        prompts = [prompt_of(n, fault) for n, fault in enumerate(faults)]
        groups = await running.sample(prompts, make_request(engine))
        await asyncio.sleep(0.1)
    by_number = {int(g.prompt.id[1:]): g.trajectories[0] for g in groups}
    answers = [json.loads(line) for line in notes.read_text(encoding="utf-8").splitlines()]
    return Found(faults, by_number, answers, _unread(engine, faults, by_number))


def _unread(engine: ScriptedEngine, faults: list[str], kept: dict[int, Trajectory]) -> int:
    names = {f"p{n}" for n, fault in enumerate(faults) if n in kept and fault != "cancel_stream"}
    given = Counter(json.dumps(r) for r in engine.replies if reply_to(to_text(r[0]))[8:-1] in names)
    held = Counter(
        json.dumps((s.prompt_token_ids, s.completion_token_ids))
        for n, t in kept.items() if f"p{n}" in names for s in t.calls
    )  # fmt: skip
    return sum((given - held).values()) + sum((held - given).values())


def leave_ended_keys(running: Episodes, path: Path) -> None:
    engine: Any = ScriptedEngine()
    keys = []
    for number in range(2):
        log = TrajectoryLog(
            name=f"ended {number}", model="m", version=1, engine=engine, seed=1, temperature=1.0
        )
        keys.append(running.server.open(log))
        running.server.close(keys[-1])
    path.write_text(" ".join(keys), encoding="utf-8")


def wrong(found: Found) -> list[str]:
    """What is not as it should be, one line each."""
    lines = [f"{found.unread} replies are not recorded exactly once"] if found.unread else []
    for number, fault in enumerate(found.faults):
        trajectory = found.trajectories.get(number)
        if (trajectory is None) != (fault in FAILING):
            lines.append(f"p{number} ({fault}): {'left out' if trajectory is None else 'not left out'}")
        elif trajectory is not None:
            lines += [f"p{number} ({fault}): {text}" for text in _wrong_trajectory(number, fault, trajectory)]
    for answer in found.answers:
        if answer["status"] not in STATUS.get(answer["fault"], {200}) or not _is_openais(answer):
            lines.append(f"{answer['id']} ({answer['fault']}): {answer['status']} {answer['error']}")
    return lines


def _wrong_trajectory(number: int, fault: str, trajectory: Trajectory) -> list[str]:
    lines = []
    for sample in trajectory.calls:
        text = to_text(sample.prompt_token_ids + sample.completion_token_ids)
        names = set(re.findall(r"(?:am|still|are) (p\d+)\.", text))
        if names != {f"p{number}"}:
            lines.append(f"a call holds {sorted(names)}")
    expected = "time" if fault in HANGING else "turns" if fault == "flood" else "stop"
    if trajectory.end != expected:
        lines.append(f"end {trajectory.end}")
    if len(trajectory.calls) != CALLS.get(fault, 2):
        lines.append(f"{len(trajectory.calls)} calls")
    if trajectory.reward != (0.0 if expected != "stop" else 1.0):
        lines.append(f"reward {trajectory.reward}")
    return lines


def _is_openais(answer: dict[str, Any]) -> bool:
    """Whether a refusal has OpenAI's form."""
    error = answer["error"]
    if answer["status"] == 200:
        return error is None
    return (
        isinstance(error, dict)
        and error.keys() == {"message", "type", "param", "code"}
        and error["type"] == "invalid_request_error"
        and bool(error["message"])
    )


def living_processes(word: str) -> list[int]:
    """Processes whose command line holds `word`."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if word in (entry / "cmdline").read_text(encoding="utf-8", errors="replace"):
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


async def reasons_of_stops(folder: Path, patch: pytest.MonkeyPatch) -> dict[str, str]:
    """With env.on_error=stop: the error of the run for each fault that leaves no reward."""
    patch.setenv("SKYLITE_FAULTS", str(folder / "notes.jsonl"))
    engine, reasons = ScriptedEngine(reply_to), {}
    async with environment(folder, "", episode=f"{PROGRAM}:episode", timeout_s=120.0) as running:
        for number, fault in enumerate(FAILING):
            prompts = [prompt_of(number, fault)]
            try:
                groups: list[Group] = await running.sample(prompts, make_request(engine))
                reasons[fault] = f"no error but {groups}"
            except RunFailed as error:
                reasons[fault] = error.what
    return reasons
