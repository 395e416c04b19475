"""Made-up run folders with all files that a run writes: healthy ones, and one for each way to go wrong.

    python -m tests.made_up_runs FOLDER

The completions are sampled first; rewards, lengths and repetition in the metrics follow from them.
"""

from __future__ import annotations

import random
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from skylite.config.train import RunConfig, TrainConfig
from skylite.notes import Note
from skylite.processes.hardware import machine_facts
from skylite.rollout.step_metrics import correlation
from skylite.run.files import write_json
from skylite.run.metrics_file import Label, append_metrics, write_score
from skylite.run.rollout_file import write_rollouts
from skylite.run.run_dir import RunDir, adapter_name
from skylite.run.status import Phase, Status, write_status
from skylite.types import Call, Group, Message, Prompt, Trajectory
from tests.decisions import resolved

STEPS, PROMPTS, GROUP, HELD_OUT = 40, 8, 8, 100


@dataclass(frozen=True, kw_only=True)
class Story:
    """What happens over a run; each function gets its progress from 0 to 1."""

    reward: Callable[[float], float]
    """Share of completions with reward 1."""
    held_out: Callable[[float], float]
    entropy: Callable[[float], float]
    length: Callable[[float], float]
    """Tokens of a completion."""
    repeats: Callable[[float], float] = lambda t: 0.0
    """Share of a completion that repeats one phrase."""
    whole_groups: Callable[[float], float] = lambda t: 0.0
    """Share of groups whose completions all get the same reward."""
    score: Callable[[int], float] | None = None
    """Reward of a completion from its tokens; None: 1 for the share `reward`, else 0."""
    spread: float = 2
    """Standard deviation of the length."""
    max_tokens: int = 1000
    """Longer completions are cut off."""


STORIES = {
    "healthy": Story(
        reward=lambda t: 0.2 + 0.5 * t,
        held_out=lambda t: 0.3 + 0.35 * t,
        entropy=lambda t: 1.2 - 0.8 * t,
        length=lambda t: 20 - 5 * t,
    ),
    "collapsed": Story(
        reward=lambda t: 0.2 + t if t < 0.4 else max(0.02, 0.6 - 2 * (t - 0.4)),
        held_out=lambda t: 0.3 + 0.5 * t if t < 0.4 else 0.05,
        entropy=lambda t: 1.2 * max(0.01, 1 - 2.2 * t),
        length=lambda t: 20,
    ),
    "hacked": Story(
        reward=lambda t: 0.2 + 0.75 * t,
        held_out=lambda t: 0.5 - 0.4 * t,
        entropy=lambda t: 1.2 - 0.4 * t,
        length=lambda t: 20 + 40 * t,
        repeats=lambda t: 0.8 * t,
    ),
    "no-signal": Story(
        reward=lambda t: 0.0,
        held_out=lambda t: 0.02,
        entropy=lambda t: 1.2,
        length=lambda t: 20,
        whole_groups=lambda t: 0.95,
    ),
    # 41.7 % before the first step, 0 % in all others: a learning rate of 2e-2.
    "instant-collapse": Story(
        reward=lambda t: 0.417 if t * STEPS <= 1 else 0.0,
        held_out=lambda t: 0.417 if t == 0 else 0.0,
        entropy=lambda t: 1.2 if t * STEPS <= 1 else 0.7,
        length=lambda t: 20,
    ),
    # The reward is the length in tens of tokens. Completions grow until most of them are cut off.
    "length": Story(
        reward=lambda t: 0.0,
        held_out=lambda t: 0.0,
        entropy=lambda t: 1.2 - 0.4 * t,
        length=lambda t: 8 + 24 * t,
        score=lambda tokens: tokens / 10,
        spread=4,
        max_tokens=32,
    ),
    "constant": Story(
        reward=lambda t: 0.0,
        held_out=lambda t: 0.0,
        entropy=lambda t: 1.2,
        length=lambda t: 20,
        score=lambda tokens: 0.5,
    ),
    # Long answers are right ones, as when a policy learns to think first.
    "thinks-longer": Story(
        reward=lambda t: 0.2 + 0.5 * t,
        held_out=lambda t: 0.3 + 0.35 * t,
        entropy=lambda t: 1.2 - 0.5 * t,
        length=lambda t: 10 + 20 * t,
        score=lambda tokens: float(tokens >= 22),
        spread=4,
    ),
}


def write_made_up_run(
    root: Path, name: str, *, steps: int = STEPS, phase: Phase = "done", seed: int = 0
) -> RunDir:
    """Write the run STORIES[name] under `root`."""
    run, story, rng = RunDir(root / name), STORIES[name], random.Random(f"{name} {seed}")
    run.default_adapters.mkdir(parents=True)
    config = _write_config(run)
    for step in range(steps + 1):
        t = step / STEPS
        _write_adapter(run, step)
        if step % 10 == 0:
            _write_held_out(run, config, step, story, t, rng)
        if step:
            groups = [_group(number, step, story, t, rng) for number in range(PROMPTS)]
            write_rollouts(run.rollout_path(step), groups)
            append_metrics(run.metrics_path, _metrics(step, groups, story, t, rng))
    status = Status(phase=phase, step=steps, num_steps=STEPS, adapter_version=steps)
    write_status(run.status_path, status)
    return run


def _write_config(run: RunDir) -> TrainConfig:
    tree = {
        "num_steps": STEPS,
        "lora": {"rank": 4, "alpha": 8},
        "rollout": {"prompts_per_step": PROMPTS, "group_size": GROUP},
        "eval": {"every": 10, "limit": HELD_OUT},
    }
    config = TrainConfig.model_validate(tree)
    decided = resolved(Path("model"), run.default_adapters)
    decided = decided.model_copy(update={"notes": [Note("data: made up")]})
    whole = RunConfig(skylite_version="test", config=config, resolved=decided)
    write_json(run.config_path, whole.model_dump(mode="json"))
    write_json(run.machine_path, machine_facts())
    return config


def _completion(length: int, repeats: float, rng: random.Random) -> list[int]:
    """Random tokens, of which the last part repeats one phrase."""
    repeated = round(length * repeats)
    phrase = [7, 8, 9, 10]
    return [
        *(rng.randrange(1000) for _ in range(length - repeated)),
        *(phrase[k % 4] for k in range(repeated)),
    ]


def _group(number: int, step: int, story: Story, t: float, rng: random.Random) -> Group:
    share = story.reward(t)
    is_whole = rng.random() < story.whole_groups(t)
    trajectories = []
    for k in range(GROUP):
        score = float(rng.random() < share)
        if is_whole:
            score = 0.0
        elif story.whole_groups(t) and k == 0:
            score = 1.0
        length = max(4, round(rng.gauss(story.length(t), story.spread)))
        is_cut, length = length > story.max_tokens, min(length, story.max_tokens)
        score = score if story.score is None else story.score(length)
        tokens = _completion(length, story.repeats(t), rng)
        text = " ".join(f"w{token}" for token in tokens)
        sample = Call(
            prompt_token_ids=[1, 2, 3], completion_token_ids=tokens, sampling_logprobs=[-0.5] * len(tokens),
            adapter_version=step - 1, text=text, finish_reason="length" if is_cut else "stop",
        )  # fmt: skip
        trajectories.append(Trajectory(calls=(sample,), reward=score, components={"math": score}))
    # Each prompt comes again every second step.
    prompt = f"made-up/train/{PROMPTS * (step % 2) + number}"
    question = [Message(role="user", content=f"What is {number} + {step % 2}?")]
    return Group(
        prompt=Prompt(id=prompt, messages=question, answer=str(number + step % 2), source=""),
        trajectories=tuple(trajectories),
    )


def _metrics(step: int, groups: list[Group], story: Story, t: float, rng: random.Random) -> dict[str, Any]:
    all_of = [trajectory for group in groups for trajectory in group.trajectories]
    rewards = [trajectory.reward for trajectory in all_of]
    zero_std = statistics.fmean(group.is_zero_std for group in groups)
    lengths = statistics.fmean(trajectory.num_tokens for trajectory in all_of)
    noise = rng.uniform(0.95, 1.05)
    return {
        "step": step, "adapter/version": step, "adapter/b_norm": 2 * t,
        "reward/mean": statistics.fmean(rewards), "reward/std": statistics.pstdev(rewards),
        "reward/right_frac": statistics.fmean(reward == 1.0 for reward in rewards),
        "reward/partial_frac": statistics.fmean(reward not in (0, 1) for reward in rewards),
        "reward/tokens_corr": correlation(rewards, [t.num_tokens for t in all_of]),
        "groups/zero_std_frac": zero_std, "groups/zero_std_sampled_frac": zero_std,
        "completion/tokens_mean": lengths,
        "completion/truncated_frac": statistics.fmean(t.is_truncated for t in all_of),
        "perf/completion_tokens_per_s": 100 * noise,
        "policy/entropy": story.entropy(t) * noise, "loss/policy": 0.01 * noise,
        "optim/grad_norm": 0.2 * noise, "optim/lr": 1e-4,
        "mismatch/logprob_diff_mean": 5e-6 * noise, "mismatch/logprob_diff_max": 5e-5 * noise,
        "mismatch/ess_frac": 1.0, "canary/gap_max": 4e-5 * noise, "canary/gap_mean": 2e-5 * noise,
        "time/step_s": 20.0, "time/rollout_s": 12.0, "time/train_s": 6.0, "time/sync_s": 1.0,
        "mem/rss_peak_bytes": 2.0 * 2**30, "restarts": 0,
    }  # fmt: skip


def _write_held_out(
    run: RunDir, config: TrainConfig, version: int, story: Story, t: float, rng: random.Random
) -> None:
    label: Label = "before" if version == 0 else "after" if version == STEPS else "step"
    correct = round(HELD_OUT * story.held_out(t))
    own = random.Random(version)
    lengths = [
        min(story.max_tokens, max(4, round(own.gauss(story.length(t), story.spread))))
        for _ in range(HELD_OUT)
    ]
    rewards = [float(k < correct) for k in range(HELD_OUT)]
    if story.score is not None and correct == 0:
        rewards = list(map(story.score, lengths))
    rows = [
        {
            "prompt_id": f"made-up/test/{k}", "difficulty": 1, "question": f"Held-out question {k}?",
            "answer": str(k), "turns": [f"version {version} says {rng.randrange(100)}"],
            "observed": [""], "end": "stop", "reward": rewards[k],
            "tokens": 5, "finish_reason": "stop", "model": adapter_name(version), "temperature": 0.0,
        }
        for k in range(HELD_OUT)
    ]  # fmt: skip
    run.evals.mkdir(exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), run.evals / f"{label}-v{version:06d}.parquet")
    write_score(run, label, version, statistics.fmean(rewards), config.eval, is_binary=set(rewards) <= {0, 1})


def _write_adapter(run: RunDir, version: int) -> None:
    folder = run.default_adapters / adapter_name(version)
    folder.mkdir()
    (folder / "adapter_model.safetensors").write_bytes(b"%d" % version)


if __name__ == "__main__":
    for story_name in STORIES:
        print(write_made_up_run(Path(sys.argv[1]), story_name).root)
