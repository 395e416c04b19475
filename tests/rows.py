"""Trajectories as flat rows: random ones, and rows as the groups that the trainer gets."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from skylite.config.rollout import GREEDY
from skylite.run.rollout_file import write_rollouts
from skylite.types import Call, Group, Message, Prompt, TrainingExample, Trajectory, completion_example

VOCAB = 256


@dataclass(frozen=True, kw_only=True)
class Row:
    """A trajectory of one call, or of `calls`; then `completion_token_ids` joins their completions."""

    group: int
    prompt_token_ids: list[int]
    completion_token_ids: list[int]
    sampling_logprobs: list[float]
    reward: float
    truncated: bool = False
    prompt_id: str = ""
    calls: tuple[tuple[list[int], list[int]], ...] = ()
    """(prompt, completion) of each call. Empty: one call, described by the other fields."""
    components: dict[str, float] = field(default_factory=dict)

    @property
    def all_calls(self) -> tuple[tuple[list[int], list[int]], ...]:
        return self.calls or ((self.prompt_token_ids, self.completion_token_ids),)


def groups_of(rows: Sequence[Row]) -> list[Group]:
    """The rows as groups of trajectories, in the order of their group numbers."""
    found: dict[int, list[Row]] = {}
    for row in rows:
        found.setdefault(row.group, []).append(row)
    return [
        Group(
            prompt=Prompt(
                id=found[g][0].prompt_id or f"test/{g}",
                messages=[Message(role="user", content="")],
                answer="",
                source="",
            ),
            trajectories=tuple(trajectory_of(row) for row in found[g]),
        )
        for g in sorted(found)
    ]


def completions_of(
    prompts: Sequence[list[int]], completions: Sequence[list[int]], groups: Sequence[int]
) -> list[TrainingExample]:
    """One trajectory of one call for each prompt and its completion."""
    rows = zip(prompts, completions, groups, strict=True)
    return [completion_example(p, c, group=g, trajectory=i) for i, (p, c, g) in enumerate(rows)]


def trajectory_of(row: Row) -> Trajectory:
    logprobs, samples = iter(row.sampling_logprobs), []
    for prompt, completion in row.all_calls:
        sample = Call(
            prompt_token_ids=prompt,
            completion_token_ids=completion,
            sampling_logprobs=[next(logprobs) for _ in completion] if row.calls else row.sampling_logprobs,
            finish_reason="length" if row.truncated else "stop",
        )
        samples.append(sample)
    return Trajectory(calls=tuple(samples), reward=row.reward, components=row.components)


def random_samples(seed: int, num_groups: int = 4, group_size: int = 4, shared: int = 12) -> list[Row]:
    """Groups with a shared prefix, prompts of several lengths, and completions that partly begin alike."""
    rng = random.Random(seed)
    tokens = lambda n: [rng.randrange(VOCAB) for _ in range(n)]  # noqa: E731
    prefix = tokens(shared)
    samples: list[Row] = []
    for group in range(num_groups):
        prompt, opening = prefix + tokens(rng.randrange(2, 9)), tokens(2)
        for index in range(group_size):
            completion = (opening if index % 2 else []) + tokens(rng.randrange(1, 9))
            if index == 3:
                completion = samples[-1].completion_token_ids
            logprobs = [-5.0 + rng.uniform(-2, 2) for _ in completion]
            reward = float(index == group % group_size) if group != 1 else 1.0
            samples.append(
                Row(
                    group=group,
                    prompt_token_ids=prompt,
                    completion_token_ids=completion,
                    sampling_logprobs=logprobs,
                    reward=reward,
                    truncated=group == 2 and index == 1,
                    components=_components(group, reward, len(completion)),
                )
            )
    return samples


def _components(group: int, reward: float, length: int) -> dict[str, float]:
    return {"right": reward, "long": length / 100, GREEDY: group / 4}


def random_episodes(seed: int, num_groups: int = 4, group_size: int = 4) -> list[Row]:
    """Trajectories of one to four calls. Most prompts extend the previous call, some rewrite it (branch)."""
    rng = random.Random(seed)
    tokens = lambda n: [rng.randrange(VOCAB) for _ in range(n)]  # noqa: E731
    prefix, rows = tokens(12), []
    for group in range(num_groups):
        question = prefix + tokens(rng.randrange(2, 6))
        for index in range(group_size):
            prompt, calls = question, []
            for turn in range(1 + (index + group) % 4):
                completion = tokens(rng.randrange(1, 6))
                calls.append((prompt, completion))
                kept = question + tokens(1) if turn == 1 else prompt + completion
                prompt = kept + tokens(rng.randrange(1, 4))
            reward = float(index == group % group_size) if group != 1 else 1.0
            row = _row_of_calls(rng, group, calls, reward)
            rows.append(replace(row, truncated=group == 2 and index == 1))
    return rows


def _row_of_calls(
    rng: random.Random, group: int, calls: Sequence[tuple[list[int], list[int]]], reward: float
) -> Row:
    """A trajectory of these calls, with random logprobs."""
    sampled = [token for _, completion in calls for token in completion]
    return Row(
        group=group,
        prompt_token_ids=calls[0][0],
        completion_token_ids=sampled,
        sampling_logprobs=[-5.0 + rng.uniform(-2, 2) for _ in sampled],
        reward=reward,
        calls=tuple(calls),
        components=_components(group, reward, len(sampled)),
    )


def random_call_trees(seed: int, num_groups: int = 3, group_size: int = 3) -> list[Row]:
    """Trajectories of random calls. A call continues, branches off or repeats an earlier one, or starts new.

    Every second seed has few different tokens, so that calls share prefixes by chance, too.
    """
    rng = random.Random(seed)
    vocab = 4 if seed % 2 else VOCAB
    tokens = lambda n: [rng.randrange(vocab) for _ in range(n)]  # noqa: E731
    prefix, rows = tokens(rng.randrange(8)), []
    for group in range(num_groups):
        question = prefix + tokens(rng.randrange(1, 6))
        for index in range(group_size):
            calls = [(question, tokens(rng.randrange(1, 6)))]
            for _ in range(rng.randrange(6)):
                calls.append((_next_prompt(rng, calls, tokens), tokens(rng.randrange(1, 6))))
            rows.append(_row_of_calls(rng, group, calls, reward=rng.choice([-1.0, 0.0, 0.5]) + index))
    return rows


def _next_prompt(
    rng: random.Random, calls: list[tuple[list[int], list[int]]], tokens: Callable[[int], list[int]]
) -> list[int]:
    prompt, completion = rng.choice([*calls, calls[-1], calls[-1]])
    match rng.choice(["continue", "continue", "branch", "repeat", "sub-agent"]):
        case "continue":
            return prompt + completion + tokens(rng.randrange(1, 4))
        case "branch":
            history = prompt + completion
            return history[: rng.randrange(1, len(history) + 1)] + tokens(rng.randrange(1, 4))
        case "repeat":
            return prompt
    return tokens(rng.randrange(1, 9))


def write_samples(path: Path, samples: Sequence[Row]) -> None:
    write_rollouts(path, groups_of(samples))
