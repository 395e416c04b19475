"""A run with real files, a fake engine and a fake trainer. It records the order of events."""

from __future__ import annotations

import asyncio
import io
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pyarrow.parquet as pq
from rich.console import Console

from skylite.config.train import TrainConfig
from skylite.data.chat_tokenizer import ChatTokenizer
from skylite.engine.engine_pool import EnginePool
from skylite.engine.interface import Sampling
from skylite.environments.judge import Judge, JudgeAnswers
from skylite.environments.judge_servers import HttpJudge
from skylite.environments.single_turn import Scorer, SingleTurn
from skylite.rollout.loop import run_steps
from skylite.rollout.plan import RunPlan
from skylite.rollout.session import Progress, Session, TimeLimit, prompt_history, read_events
from skylite.run.files import write_json
from skylite.run.run_dir import AdapterVersion, RunDir
from skylite.types import Call, EncodedPrompt, Prompt, Score
from skylite.ui.dashboard import Screen
from tests.decisions import resolved
from tests.logs import logged_messages
from tests.unit.data_cases import prompt
from tests.unit.engine_cases import BASE, POLICY, publish

PROMPTS = [
    prompt(id=str(i), messages=[{"role": "user", "content": str(i)}], extra={"reply": str(100 + i)})
    for i in range(14)
]
MAX_LORAS = 2
StepFacts = Mapping[int, Mapping[str, Any]]
"""Step -> what the trainer adds to its file of the step."""


class FakeEngine:
    """Holds few adapters. Like vLLM, it fails if an adapter is unloaded while a request uses it.

    `sample_s`: seconds of a request, or what waits for one by the number that is its prompt.
    """

    name = "fake"
    tokens_in_flight = 0

    def __init__(
        self,
        sample_s: float | Callable[[int], Awaitable[None]],
        wrong_version: int | None = None,
        max_loras: int = MAX_LORAS,
    ) -> None:
        self.sample_s, self.wrong, self.max_loras = sample_s, wrong_version, max_loras
        self.names: list[str] = []
        self.in_flight: Counter[str] = Counter()
        self.requests: list[tuple[str, int, int]] = []

    def is_wrong(self, name: str) -> bool:
        return self.wrong is not None and name.endswith(str(self.wrong))

    async def load_adapter(self, adapter: AdapterVersion) -> None:
        assert adapter.manifest_path.exists()
        self.names.append(adapter.name)
        assert len(self.names) <= self.max_loras

    async def unload_adapter(self, name: str) -> None:
        assert not self.in_flight[name]
        self.names.remove(name)

    async def score(self, model: str, prompt: EncodedPrompt) -> list[float]:
        assert model in {*self.names, "base"}
        await asyncio.sleep(0.01)
        return BASE if model == "base" or self.is_wrong(model) else POLICY

    async def generate(
        self, model: str, prompt: EncodedPrompt, n: int, sampling: Sampling, version: int
    ) -> list[Call]:
        assert model in self.names
        assert model.endswith(str(version))
        self.requests.append((model, prompt.token_ids[0], sampling.seed))
        self.in_flight[model] += 1
        if isinstance(self.sample_s, float):
            await asyncio.sleep(self.sample_s)
        else:
            await self.sample_s(prompt.token_ids[0])
        self.in_flight[model] -= 1
        return [
            Call(
                prompt_token_ids=list(prompt.token_ids),
                completion_token_ids=[7],
                sampling_logprobs=[-0.5],
                adapter_version=version,
                text=f"{prompt.token_ids[0]}/{sampling.seed + i}",
            )
            for i in range(n)
        ]


class Half:
    """Scores the first completion of a group 1, the others 0."""

    async def score(self, items: Sequence[tuple[Prompt, str]]) -> list[Score]:
        return [Score(float(i == 0)) for i in range(len(items))]


class Broken:
    """Scores one prompt NaN."""

    def __init__(self, prompt_id: str) -> None:
        self.bad = prompt_id

    async def score(self, items: Sequence[tuple[Prompt, str]]) -> list[Score]:
        return [Score(math.nan if p.id == self.bad else float(i == 0)) for i, (p, _) in enumerate(items)]


def encode_numbers(jobs: Sequence[Any]) -> list[dict[str, list[Any]]]:
    """A prompt is one token, its number. The last turn of a chat to learn, if there is one, is two."""
    return [
        {"calls": [[[int(job["messages"][-2]["content"])], [int(job["messages"][-1]["content"]), 5]]]}
        if job.get("learned")
        else {"ids": [int(job["messages"][-1]["content"])]}
        for job in jobs
    ]


NUMBERS = ChatTokenizer(run_jobs=encode_numbers, stop_token_ids=(5,))


def publish_update(run: RunDir, version: int, started: float, facts: Mapping[str, Any]) -> None:
    """Write the files that the trainer writes after a step."""
    if not (run.default_adapters / f"policy-v{version:06d}").exists():
        publish(run.default_adapters, version)
    keys = ("time/canary_s", "time/publish_s", "time/train_s", "policy/entropy", "mismatch/logprob_diff_mean")
    write_json(
        run.trainer_step_path(version),
        {"metrics": dict.fromkeys(keys, 0.01), "trained": (started, time.monotonic()), **facts},
    )


async def fake_trainer(
    run: RunDir, first_step: int, num_steps: int, train_s: float, facts: StepFacts
) -> None:
    """Publish a version for each rollout file that appears."""
    publish_update(run, first_step - 1, time.monotonic(), facts.get(first_step - 1, {}))
    for step in range(first_step, num_steps + 1):
        while not run.rollout_path(step).exists():
            await asyncio.sleep(0.002)
        started = time.monotonic()
        await asyncio.sleep(train_s)
        publish_update(run, step, started, facts.get(step, {}))


def run_of(
    root: Path,
    staleness: int,
    num_steps: int,
    *,
    first_step: int = 1,
    sample_s: float | Callable[[int], Awaitable[None]] = 0.06,
    train_s: float = 0.06,
    wrong_version: int | None = None,
    limit: TimeLimit | None = None,
    eval_every: int = 0,
    facts: StepFacts = MappingProxyType({}),
    scorer: Scorer | None = None,
    resumed: bool = False,
    data: Mapping[str, Any] = MappingProxyType({}),
    teacher: Any = None,
    reward: Mapping[str, Any] = MappingProxyType({}),
    algorithm: Mapping[str, Any] = MappingProxyType({}),
) -> tuple[RunDir, FakeEngine, str]:
    """Run a simulated run to its end. Returns its folder, engine and log."""
    resumed = resumed or first_step > 1
    plan = plan_of(root, staleness, num_steps, eval_every, first_step, resumed, data, reward, algorithm)
    engine, settings = (
        FakeEngine(sample_s, wrong_version, max(MAX_LORAS, staleness + 2)),
        plan.config.reward.judge,
    )
    answers = JudgeAnswers(plan.run.logs / "judge.jsonl")
    judge = Judge(plan.config, HttpJudge(settings), answers) if plan.config.has_judge else None
    session = Session(
        plan=plan,
        engines=EnginePool([engine], 0.002),  # type: ignore[list-item]
        source=SingleTurn(plan.config, NUMBERS, scorer or Half(), judge),
        judge=judge,
        teacher=teacher,
        history=prompt_history(plan),
        progress=Progress(plan.run, num_steps, Screen(num_steps, Console(file=io.StringIO())), dict),
        watches=[limit] if limit else [],
    )

    async def both() -> None:
        trainer = asyncio.create_task(fake_trainer(plan.run, first_step, num_steps, train_s, facts))
        ends: list[asyncio.Task[Any]] = [asyncio.create_task(run_steps(session))]
        ends += [asyncio.create_task(limit.stop.wait())] if limit else []
        try:
            done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            done.pop().result()
        finally:
            for task in (trainer, *ends):
                task.cancel()
            if judge is not None:
                await judge.server.aclose()

    with logged_messages() as logged:
        asyncio.run(both())
    return plan.run, engine, "\n".join(logged)


def plan_of(
    root: Path,
    staleness: int,
    num_steps: int,
    eval_every: int,
    first_step: int,
    resumed: bool,
    data: Mapping[str, Any] = MappingProxyType({}),
    reward: Mapping[str, Any] = MappingProxyType({}),
    algorithm: Mapping[str, Any] = MappingProxyType({}),
) -> RunPlan:
    """A plan with 14 prompts and 2 prompts x 2 completions a step, and the folders of its run."""
    run = RunDir(root)
    for folder in (run.rollouts, run.trainer_steps, run.checkpoints, run.default_adapters):
        folder.mkdir(parents=True, exist_ok=True)
    rollout = {"prompts_per_step": 2, "group_size": 2, "max_staleness": staleness}
    evals = {"every": eval_every, "limit": 2}
    config = {"num_steps": num_steps, "rollout": rollout, "eval": evals, "data": dict(data), "reward": reward}
    config["algorithm"] = dict(algorithm)
    return RunPlan(
        run=run,
        config=TrainConfig.model_validate(config),
        resolved=resolved(Path("m"), run.default_adapters.resolve()),
        train=PROMPTS,
        held_out=PROMPTS[:2] if eval_every else [],
        rewards=("math",),
        first_step=first_step,
        resumed=resumed,
        mixed={p.id: next(iter(data.get("mix", ())), "") for p in PROMPTS[9:]},
    )


def times(run: RunDir, event: str, key: str) -> dict[int, float]:
    """Time of the event by step or version."""
    return {e[key]: e["monotonic"] for e in read_events(run.events_path) if e["event"] == event}


def sampled_from(run: RunDir) -> dict[int, int]:
    """Adapter version by step, from the completions in the rollout files."""
    found = {}
    for path in sorted(run.rollouts.iterdir()):
        (version,) = set(pq.read_table(path)["adapter_version"].to_pylist())
        found[int(path.stem.removeprefix("step-"))] = version
    return found
