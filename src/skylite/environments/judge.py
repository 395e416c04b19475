"""The reward `judge`: asks a model about each group, and adds its score to the trajectories' rewards.

Its answers are kept in logs/judge.jsonl, so a resumed run asks nothing twice and gets the same scores.

Consumes: groups as they are sampled. Waits for: the judge. Produces: groups with the component `judge`.
Unblocks: the end of a group.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import json
import logging
import statistics
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from skylite.config.judge import BASE, EPISODE, JUDGE, JudgeConfig
from skylite.config.rollout import weight_of
from skylite.config.train import TrainConfig
from skylite.data.chat_tokenizer import ChatTokenizer
from skylite.environments.judge_servers import BaseJudge, HttpJudge, JudgeServer
from skylite.environments.source import EVAL_STEP, GroupRequest, Sampler, gather_or_cancel
from skylite.errors import DataError, RunFailed, convert_os_errors
from skylite.rewards.judge_question import Question, question_about
from skylite.run.files import append_line
from skylite.types import Group, Prompt, Trajectory
from skylite.untrusted_files import read_bytes
from skylite.untrusted_text import parse_json, plain

logger = logging.getLogger(__name__)
Shares = tuple[float, ...]


class JudgeAnswers:
    """The points of every question that was asked, in a file that survives the run's process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._shares: dict[str, Shares | None] = {}
        self._new: list[str] = []
        with convert_os_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            lines = read_bytes(path).split(b"\n") if path.exists() else []
        for line in lines:
            with contextlib.suppress(ValueError, KeyError, TypeError):  # damaged: asked again
                row = parse_json(line)
                self._shares[row["key"]] = None if row["points"] is None else _shares(row["points"])

    def __contains__(self, key: str) -> bool:
        return key in self._shares

    def __getitem__(self, key: str) -> Shares | None:
        """None: its replies had no points."""
        return self._shares[key]

    def add(self, key: str, shares: Shares | None, **facts: str) -> None:
        self._shares[key] = shares
        self._new.append(json.dumps({"key": key, "points": shares, **facts}))

    def save(self) -> None:
        """Append the new ones to the file. Raises WriteFailed."""
        if self._new:
            lines, self._new = self._new, []
            append_line(self.path, "\n".join(lines))


def _shares(values: Any) -> Shares:
    if not all(isinstance(value, int | float) and 0 <= value <= 1 for value in values):
        raise ValueError("no shares")
    return tuple(map(float, values))


@dataclass(slots=True)
class JudgeCounts:
    """What the judge did since the step before."""

    calls: int = 0
    cached: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    unparsed: int = 0
    spreads: list[float] = field(default_factory=list)

    def metrics(self) -> dict[str, float]:
        """For metrics.jsonl."""
        spread = {"judge/disagreement": statistics.fmean(self.spreads)} if self.spreads else {}
        return {
            "judge/calls": float(self.calls),
            "judge/cached": float(self.cached),
            "judge/prompt_tokens": float(self.prompt_tokens),
            "judge/completion_tokens": float(self.completion_tokens),
            "judge/unparsed": float(self.unparsed),
            **spread,
        }


@dataclass(slots=True)
class Judge:
    """Judges groups. All requests share one rate limit."""

    config: TrainConfig
    server: JudgeServer
    answers: JudgeAnswers
    _counts: JudgeCounts = field(default_factory=JudgeCounts)

    @property
    def settings(self) -> JudgeConfig:
        return self.config.reward.judge

    def take_metrics(self) -> dict[str, float]:
        """Metrics of what it did since the last call. Requests of evaluations are not counted."""
        repeated, counts, self._counts = self.server.take_repeated(), self._counts, JudgeCounts()
        return {**counts.metrics(), "judge/repeated": float(repeated)}

    async def judged(self, group: Group, request: GroupRequest) -> Group | None:
        """The group with the judge's scores. None if one has none and reward.judge.on_unparsed is drop.

        In an evaluation only a judge that decides what is right is asked.

        Raises RunFailed if the judge gives no answer, or no points and on_unparsed is stop.
        """
        is_first = not self.config.env.episode and self.config.reward.functions[0] == JUDGE
        if request.step == EVAL_STEP and not is_first:
            return group
        counts = JudgeCounts() if request.step == EVAL_STEP else self._counts
        texts = [self._text(t) for t in group.trajectories]
        try:
            tokens = self.settings.votes * self.settings.max_tokens if self.settings.url == BASE else 0
            with request.engine(tokens) as engine:
                asked = (
                    self._vote(texts, group.prompt, v, engine, counts) for v in range(self.settings.votes)
                )
                votes = await gather_or_cancel([asyncio.create_task(vote) for vote in asked])
        finally:
            self.answers.save()
        scores = []
        for given in zip(*votes, strict=True):
            known = [share for share in given if share is not None]
            if not known:
                logger.warning(f"the group of prompt {group.prompt.id} is left out: the judge gave no points")
                return None
            if len(known) > 1:
                counts.spreads.append(statistics.pstdev(known))
            scores.append(statistics.fmean(known))
        trajectories = [
            self._with_score(t, score, is_first=is_first)
            for t, score in zip(group.trajectories, scores, strict=True)
        ]
        return replace(group, trajectories=tuple(trajectories))

    def _text(self, trajectory: Trajectory) -> str:
        """What the judge reads: without the rewards of turns, which would tell it the environment's view."""
        text = trajectory.text_without_rewards
        return text if self.config.env.episode else self.config.reward.prefill + text

    async def _vote(
        self, texts: Sequence[str], prompt: Prompt, vote: int, engine: Sampler, counts: JudgeCounts
    ) -> list[float | None]:
        """One vote about each text, 0 to 1, or None."""

        def about(*chosen: str) -> asyncio.Task[Shares | None]:
            return asyncio.create_task(
                self._ask(self._question(chosen, prompt, vote), prompt, engine, counts)
            )

        match self.settings.compare:
            case "score":
                distinct = list(dict.fromkeys(texts))
                found = await gather_or_cancel([about(text) for text in distinct])
                by_text = dict(zip(distinct, found, strict=True))
                return [None if (shares := by_text[text]) is None else shares[0] for text in texts]
            case "group":
                (shares,) = await gather_or_cancel([about(*texts)])
                return [None] * len(texts) if shares is None else list(shares)
            case "pairs":
                pairs = list(itertools.combinations(range(len(texts)), 2))
                found = await gather_or_cancel([about(texts[a], texts[b]) for a, b in pairs])
                return wins(len(texts), dict(zip(pairs, found, strict=True)))

    def _question(self, texts: Sequence[str], prompt: Prompt, vote: int) -> Question:
        return question_about(
            texts,
            task=prompt.messages,
            answer=prompt.answer,
            rubric=rubric_of(prompt, self.settings),
            max_points=self.settings.max_points,
            vote=vote,
        )

    async def _ask(
        self, question: Question, prompt: Prompt, engine: Sampler | None, counts: JudgeCounts
    ) -> Shares | None:
        """The points as shares, from the file if the question is in it. None: see `judged`."""
        settings = self.settings
        asked = [settings.model or BASE, settings.temperature, settings.max_tokens, question.text]
        key = hashlib.sha256(json.dumps(asked).encode()).hexdigest()
        if key in self.answers:
            counts.cached += 1
            return self.answers[key]
        messages = question.messages
        for attempt in range(1 + settings.retries):
            reply = await self.server.ask(messages, int(question.nonce[:8], 16) + attempt, engine)
            counts.calls += 1
            counts.prompt_tokens += reply.prompt_tokens
            counts.completion_tokens += reply.completion_tokens
            if (points := question.points(reply.text)) is not None:
                self.answers.add(key, tuple(points), prompt=prompt.id, reply=reply.text)
                return tuple(points)
            counts.unparsed += 1
            messages = question.reminder(reply.text)
        if settings.on_unparsed == "stop":
            raise no_points(settings, f"prompt {prompt.id}", 1 + settings.retries, reply.text)
        self.answers.add(key, None, prompt=prompt.id, reply=reply.text)
        return None

    def _with_score(self, trajectory: Trajectory, score: float, *, is_first: bool) -> Trajectory:
        """The trajectory with the component `judge`, by its weight."""
        own, reward, turns = dict(trajectory.components), trajectory.reward, trajectory.turn_rewards
        if self.config.env.episode:
            weights, factor = self.config.env.weights, 1.0
            if not own:
                own, factor = {EPISODE: reward}, weight_of(EPISODE, weights)
            earned = weight_of(JUDGE, weights) * score
            reward, turns = factor * reward, tuple(factor * turn for turn in turns)
            turns = (*turns[:-1], turns[-1] + earned) if turns else ()
        else:
            earned = judge_weight(self.config) * score
        if JUDGE in own:
            raise RunFailed(
                "The environment or a reward function has a component `judge`, too.", "Rename it."
            )
        components: Mapping[str, float] = {JUDGE: score, **own} if is_first else {**own, JUDGE: score}
        return replace(trajectory, reward=reward + earned, components=components, turn_rewards=turns)


def no_points(settings: JudgeConfig, what: str, replies: int, last: str) -> RunFailed:
    """The error for replies that cannot be read."""
    return RunFailed(
        f"The judge {settings.name} gave no points for {what} in {replies} replies; the last ends with "
        f"{plain(last[-200:])!r}.",
        "Take a better judge, or raise reward.judge.max_tokens or retries; reward.judge.on_unparsed=drop "
        "leaves such groups out.",
    )


def judge_weight(config: TrainConfig) -> float:
    """The weight of the judge among reward.functions."""
    reward = config.reward
    return config.component_weights(reward.functions)[reward.functions.index(JUDGE)]


def wins(count: int, shares: Mapping[tuple[int, int], Shares | None]) -> list[float | None]:
    """The share of its pairs that each text won; a tie counts half. None if no pair of it was judged."""
    won: list[list[float]] = [[] for _ in range(count)]
    for (a, b), points in shares.items():
        if points is not None:
            result = 0.5 if points[0] == points[1] else float(points[0] > points[1])
            won[a].append(result)
            won[b].append(1 - result)
    return [statistics.fmean(of_text) if of_text else None for of_text in won]


def rubric_of(prompt: Prompt, settings: JudgeConfig) -> str:
    """The row's own rubric, or that of all rows. Raises DataError if the row has none."""
    if not settings.rubric_column:
        return settings.rubric
    rubric = prompt.extra.get(settings.rubric_column)
    if not isinstance(rubric, str) or not rubric.strip():
        columns = ", ".join(sorted(prompt.extra)) or "none"
        raise DataError(
            f"Prompt {prompt.id} has no text in the column {settings.rubric_column} "
            f"(reward.judge.rubric_column); its columns are {columns}.",
            "Prepare the data with that column, or leave the setting out.",
        )
    return rubric


@contextlib.asynccontextmanager
async def judge_running(
    config: TrainConfig, tokenizer: ChatTokenizer, logs: Path
) -> AsyncIterator[Judge | None]:
    """The judge of the settings, if they have one. Raises ConfigError without its key."""
    settings = config.reward.judge
    if not config.has_judge:
        yield None
        return
    server: JudgeServer = (
        BaseJudge(settings, tokenizer, config.engine_sequence_tokens)
        if settings.url == BASE
        else HttpJudge(settings)
    )
    try:
        yield Judge(config, server, JudgeAnswers(logs / "judge.jsonl"))
    finally:
        await server.aclose()
