"""The order of a run's steps on recorded events, on-policy and one step ahead: real files, a fake engine and a fake trainer."""

from __future__ import annotations

import asyncio
import io
import json
import math
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from rich.console import Console

from skylite.adapters.retention import held_out_scores
from skylite.config.loading import load_config
from skylite.config.train import Resolved, TrainConfig
from skylite.data.order import prompts_for_step
from skylite.data.tokenizer import ChatTokenizer
from skylite.engine.client import Sampling
from skylite.engine.collect import Scorer, request_seed
from skylite.engine.pool import Engines
from skylite.errors import ConfigError, RunFailed, SyncFailed
from skylite.orchestrator.loop import run_steps
from skylite.orchestrator.metrics import covered_s
from skylite.orchestrator.plan import RunPlan
from skylite.orchestrator.progress import Progress
from skylite.orchestrator.resume import forget_after
from skylite.orchestrator.session import Session
from skylite.orchestrator.shutdown import TimeLimit
from skylite.run.events import read_events
from skylite.run.files import write_json
from skylite.run.metrics import read_metrics
from skylite.run.rollout_file import read_rollouts
from skylite.run.run_dir import AdapterVersion, RunDir, published_versions
from skylite.types import Prompt, Sample, Score
from skylite.ui.dashboard import Screen
from tests.unit.data_cases import prompt
from tests.unit.test_engine_pool import BASE, POLICY, publish

PROMPTS = [prompt(id=str(i), messages=[{"role": "user", "content": str(i)}]) for i in range(14)]
MAX_LORAS = 2


class FakeEngine:
    """Holds two names at most, answers only those, and refuses to forget a name that a request in flight carries, as vLLM would break."""

    name = "fake"

    def __init__(self, sample_s: float, wrong_version: int | None = None) -> None:
        self.sample_s, self.wrong = sample_s, wrong_version
        self.names: list[str] = []
        self.in_flight: Counter[str] = Counter()
        self.requests: list[tuple[str, int, int]] = []

    def is_wrong(self, name: str) -> bool:
        return self.wrong is not None and name.endswith(str(self.wrong))

    async def load_adapter(self, adapter: AdapterVersion) -> None:
        assert adapter.manifest_path.exists()
        self.names.append(adapter.name)
        assert len(self.names) <= MAX_LORAS

    async def unload_adapter(self, name: str) -> None:
        if not self.is_wrong(name):  # that one's requests are thrown away
            assert not self.in_flight[name]
        self.names.remove(name)

    async def prompt_logprobs(self, model: str, token_ids: Sequence[int]) -> list[float]:
        assert model in self.names
        await asyncio.sleep(0.01)
        return BASE if self.is_wrong(model) else POLICY

    async def generate(
        self, model: str, ids: list[int], n: int, sampling: Sampling, version: int
    ) -> list[Sample]:
        assert model in self.names
        assert model.endswith(str(version))
        self.requests.append((model, ids[0], sampling.seed))
        self.in_flight[model] += 1
        await asyncio.sleep(self.sample_s)
        self.in_flight[model] -= 1
        return [
            Sample(
                prompt_token_ids=list(ids),
                completion_token_ids=[7],
                rollout_logprobs=[-0.5],
                adapter_version=version,
            )
        ] * n


class Half:
    """The first of a group is right."""

    async def score(self, items: Sequence[tuple[Prompt, str]]) -> list[Score]:
        return [Score(float(i == 0)) for i in range(len(items))]


class Broken:
    """No completion of this prompt earns a number."""

    def __init__(self, prompt_id: str) -> None:
        self.bad = prompt_id

    async def score(self, items: Sequence[tuple[Prompt, str]]) -> list[Score]:
        return [Score(math.nan if p.id == self.bad else float(i == 0)) for i, (p, _) in enumerate(items)]


class NumberTokenizer:
    def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> list[int]:
        return [int(messages[-1]["content"])]


def publish_update(run: RunDir, version: int, started: float, skipped: dict[str, str] | None = None) -> None:
    """What the trainer leaves behind a step."""
    if not (run.default_adapters / f"policy-v{version:06d}").exists():
        publish(run.default_adapters, version)
    keys = ("time/canary_s", "time/publish_s", "time/train_s", "policy/entropy", "mismatch/logprob_diff_mean")
    write_json(
        run.trainer_step_path(version),
        {"metrics": dict.fromkeys(keys, 0.01), "trained": (started, time.monotonic()), **(skipped or {})},
    )


async def fake_trainer(
    run: RunDir, first_step: int, num_steps: int, train_s: float, skipped_step: int | None
) -> None:
    """Learns from each file as it appears."""
    publish_update(run, first_step - 1, time.monotonic())
    for step in range(first_step, num_steps + 1):
        while not run.rollout_path(step).exists():
            await asyncio.sleep(0.002)
        started = time.monotonic()
        await asyncio.sleep(train_s)
        publish_update(
            run, step, started, {"skipped": "loss/policy is nan"} if step == skipped_step else None
        )


def run_of(
    root: Path, staleness: int, num_steps: int, *, first_step: int = 1, sample_s: float = 0.06, train_s: float = 0.06,
    wrong_version: int | None = None, limit: TimeLimit | None = None,
    eval_every: int = 0, skipped_step: int | None = None, scorer: Scorer | None = None, resumed: bool = False,
) -> tuple[RunDir, FakeEngine, str]:  # fmt: skip
    """A whole run: its folder, the engine, what was said."""
    run = RunDir(root)
    for folder in (run.rollouts, run.trainer_steps, run.checkpoints, run.default_adapters):
        folder.mkdir(parents=True, exist_ok=True)
    rollout = {"prompts_per_step": 2, "group_size": 2, "max_staleness": staleness}
    config = TrainConfig.model_validate(
        {"num_steps": num_steps, "rollout": rollout, "eval": {"every": eval_every, "limit": 2}}
    )
    resolved = Resolved(
        model_path="m",
        model_fingerprint="f",
        dtype="float32",
        device="cpu",
        lora_sync_path=str(run.default_adapters.resolve()),
    )
    held_out = PROMPTS[:2] if eval_every else []
    plan = RunPlan(
        run=run, config=config, resolved=resolved, train=PROMPTS, held_out=held_out, rewards=("math",), first_step=first_step,
        resumed=resumed or first_step > 1,
    )  # fmt: skip
    engine, said = FakeEngine(sample_s, wrong_version), io.StringIO()
    session = Session(
        plan=plan,
        engines=Engines([engine], 0.002),  # type: ignore[list-item]
        scorer=scorer or Half(),
        tokenizer=ChatTokenizer(NumberTokenizer(), (5,), ""),
        progress=Progress(run, num_steps, Screen(num_steps, Console(file=said, width=400)), dict),
        limit=limit,
    )

    async def both() -> None:
        trainer = asyncio.create_task(fake_trainer(run, first_step, num_steps, train_s, skipped_step))
        ends = [
            asyncio.create_task(run_steps(session)),
            *([asyncio.create_task(limit.stop.wait())] if limit else []),
        ]
        try:
            done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            done.pop().result()
        finally:
            for task in (trainer, *ends):
                task.cancel()

    asyncio.run(both())
    return run, engine, said.getvalue()


def times(run: RunDir, event: str, key: str) -> dict[int, float]:
    """Step or version -> when the event was."""
    return {e[key]: e["monotonic"] for e in read_events(run.events_path) if e["event"] == event}


def sampled_from(run: RunDir) -> dict[int, int]:
    """Step -> version, of the completions in the rollout files."""
    found = {}
    for path in sorted(run.rollouts.iterdir()):
        (found[int(path.stem.removeprefix("step-"))],) = set(
            pq.read_table(path)["adapter_version"].to_pylist()
        )
    return found


def test_on_policy_a_step_is_sampled_from_the_version_before_it_and_nothing_overlaps(tmp_path: Path) -> None:
    run, engine, _ = run_of(tmp_path, 0, 4)
    assert sampled_from(run) == {k: k - 1 for k in range(1, 5)}
    started, loaded = times(run, "sampling_started", "step"), times(run, "adapter_loaded", "version")
    assert all(started[k] > loaded[k - 1] for k in started)
    metrics = read_metrics(run.metrics_path)
    assert {m["staleness/max"] for m in metrics} == {0}
    assert max(m["time/overlap_s"] for m in metrics) == 0.0
    assert engine.names == ["policy-v000004"]


def test_after_the_last_step_the_newest_version_stays_for_what_comes_after(tmp_path: Path) -> None:
    run, engine, _ = run_of(tmp_path, 0, 4, first_step=5)
    assert engine.names == ["policy-v000004"]
    assert read_metrics(run.metrics_path) == []


@pytest.mark.parametrize("staleness", [0, 1])
def test_held_out_problems_are_scored_every_so_many_steps(tmp_path: Path, staleness: int) -> None:
    run, engine, _ = run_of(tmp_path, staleness, 5, eval_every=2)
    assert sorted(p.name for p in run.evals.glob("*.json")) == [
        "after-v000005.json",
        "before-v000000.json",
        "step-v000002.json",
        "step-v000004.json",
    ]
    assert held_out_scores(run, TrainConfig.model_validate({"eval": {"limit": 2}}).eval) == dict.fromkeys(
        (0, 2, 4, 5), 1.0
    )
    assert len(engine.requests) == 5 * 2 + 4 * 2, "two prompts a step, two problems an evaluation"
    assert sampled_from(run) == {k: max(0, k - 1 - staleness) for k in range(1, 6)}


@pytest.mark.parametrize(("staleness", "first_step"), [(0, 3), (1, 3), (1, 4)])
def test_an_evaluation_that_the_run_died_in_is_made_up_before_anything_is_sampled(
    tmp_path: Path, staleness: int, first_step: int
) -> None:
    """Sampling ahead, the step after it may be trained, and have a checkpoint, by then."""
    evaluation = [("policy-v000002", index, request_seed(0, -1, index)) for index in range(2)]
    requests, scores, said = {}, {}, ""
    for name in ("whole", "died"):
        run, _, _ = run_of(tmp_path / name, staleness, 4, eval_every=2)
        if name == "died":
            (run.evals / "step-v000002.json").unlink()  # its completions are written first
        forget_after(run, run.default_adapters, first_step - 1, print, reuse_rollouts=False)
        _, engine, said = run_of(tmp_path / name, staleness, 6, first_step=first_step, eval_every=2)
        requests[name], scores[name] = (
            engine.requests,
            held_out_scores(run, TrainConfig.model_validate({"eval": {"limit": 2}}).eval),
        )
    assert not set(evaluation) & set(requests["whole"])
    assert requests["died"] == evaluation + requests["whole"]
    assert scores["died"] == scores["whole"]
    assert "held out, step: step 2: greedy pass@1" in said


def test_a_resumed_run_proves_what_it_goes_on_from_before_it_samples(tmp_path: Path) -> None:
    for first_step in (1, 3):
        run, _, _ = run_of(tmp_path / str(first_step), 0, 3, first_step=first_step, resumed=True)
        assert (
            times(run, "sampling_started", "step")[first_step]
            > times(run, "adapter_verified", "version")[first_step - 1]
        )


def test_a_step_that_the_trainer_skipped_is_said_and_recorded(tmp_path: Path) -> None:
    run, _, said = run_of(tmp_path, 0, 3, skipped_step=2)
    assert "step 2 is skipped, policy-v000002 is the adapter before it: loss/policy is nan (kept in" in said
    assert [m.get("anomaly/reason") for m in read_metrics(run.metrics_path)] == [
        None,
        "loss/policy is nan",
        None,
    ]


def test_a_reward_that_is_no_number_reaches_the_trainer_and_is_null_in_the_metrics(tmp_path: Path) -> None:
    bad = prompts_for_step(PROMPTS, 2, 2, 0)[1].id
    run, _, said = run_of(tmp_path, 0, 3, skipped_step=2, scorer=Broken(bad))
    rewards = [t.reward for g in read_rollouts(run.rollout_path(2)) for t in g.trajectories]
    assert list(map(math.isnan, rewards)) == [False, False, True, True]
    assert [
        json.loads(line, parse_constant=pytest.fail)["reward/mean"]
        for line in run.metrics_path.read_text().splitlines()
    ][1] is None
    assert "step 2/3  reward nan" in said


def test_a_held_out_score_that_is_no_number_is_refused_with_the_problem(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match="returned nan for prompt 1 "):
        run_of(tmp_path, 0, 3, eval_every=1, scorer=Broken("1"))
    assert list(RunDir(tmp_path).evals.glob("*")) == []


def test_a_time_limit_ends_the_run_after_a_whole_step(tmp_path: Path) -> None:
    limit = TimeLimit(hours=0.35 / 3600)
    run, _, said = run_of(tmp_path, 0, 40, limit=limit)
    steps = [m["step"] for m in read_metrics(run.metrics_path)]
    assert 1 <= len(steps) < 10
    assert "--max-hours 9.72222e-05: the next step" in said
    assert not run.trainer_step_path(steps[-1] + 1).exists()


@pytest.mark.parametrize(
    ("sample_s", "train_s"),
    [(0.06, 0.06), (0.12, 0.02), (0.02, 0.12)],
    ids=["equal", "slow engine", "slow trainer"],
)
def test_a_step_ahead_is_sampled_while_the_step_before_is_trained(
    tmp_path: Path, sample_s: float, train_s: float
) -> None:
    run, engine, _ = run_of(tmp_path, 1, 5, sample_s=sample_s, train_s=train_s)
    assert sampled_from(run) == {1: 0, 2: 0, 3: 1, 4: 2, 5: 3}
    started, seen = times(run, "sampling_started", "step"), times(run, "trainer_step_seen", "step")
    assert all(started[k + 1] < seen[k] for k in range(1, 5)), "step k + 1 begins before step k is trained"
    written = times(run, "rollouts_written", "step")
    assert all(written[k] < written[k + 1] for k in range(1, 5))
    metrics = read_metrics(run.metrics_path)
    assert [m["staleness/max"] for m in metrics] == [0, 1, 1, 1, 1]
    assert [m["staleness/mean"] for m in metrics] == [0, 1, 1, 1, 1]
    assert all(m["time/overlap_s"] > 0.5 * min(sample_s, train_s) for m in metrics[1:])
    assert engine.names == ["policy-v000005"]


def test_a_version_goes_only_after_the_last_step_sampled_from_it(tmp_path: Path) -> None:
    run, _, _ = run_of(tmp_path, 1, 5, sample_s=0.12, train_s=0.02)
    ended, unloaded, loaded = (
        times(run, "sampling_ended", "step"), times(run, "adapter_unloaded", "version"), times(run, "adapter_loaded", "version")
    )  # fmt: skip
    assert all(loaded[v + 1] < ended[v + 2] < unloaded[v] for v in range(3)), (
        "the next is loaded while requests name this one"
    )


def test_no_completion_of_an_unproven_version_is_handed_over(tmp_path: Path) -> None:
    for staleness in (0, 1):
        root = tmp_path / str(staleness)
        with pytest.raises(SyncFailed, match="policy-v000002"):
            run_of(root, staleness, 5, wrong_version=2)
        assert 2 not in sampled_from(RunDir(root)).values()


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_resumed_run_samples_as_one_that_was_not_interrupted(tmp_path: Path, staleness: int) -> None:
    straight, engine, _ = run_of(tmp_path / "straight", staleness, 6)
    run, first, _ = run_of(tmp_path / "cut", staleness, 4)
    run.checkpoint_path(3).mkdir()
    forget_after(run, run.default_adapters, 3, print, reuse_rollouts=False)
    assert 4 not in sampled_from(run), "what the dead attempt sampled beyond the checkpoint is sampled again"
    _, second, said = run_of(tmp_path / "cut", staleness, 6, first_step=4)
    assert sampled_from(run) == sampled_from(straight)
    assert first.requests[:6] + second.requests == engine.requests
    assert "not interrupted" not in said


@pytest.mark.parametrize("staleness", [0, 1])
def test_what_was_sampled_beyond_the_checkpoint_is_trained_again_and_not_sampled_again(
    tmp_path: Path, staleness: int
) -> None:
    straight, engine, _ = run_of(tmp_path / "straight", staleness, 7)
    run, _, _ = run_of(tmp_path / "cut", staleness, 5)
    stored = {k: run.rollout_path(k).read_bytes() for k in (4, 5)}
    forget_after(run, run.default_adapters, 3, print, reuse_rollouts=True)
    _, second, _ = run_of(tmp_path / "cut", staleness, 7, first_step=4)
    assert second.requests == engine.requests[10:], "two prompts a step: steps 6 and 7 only"
    assert {k: run.rollout_path(k).read_bytes() for k in (4, 5)} == stored
    assert [m["rollout/stored"] for m in read_metrics(run.metrics_path)] == [
        0.0,
        0.0,
        0.0,
        1.0,
        1.0,
        0.0,
        0.0,
    ]
    keys = ("step", "reward/mean", "staleness/max", "completion/tokens_mean")
    found, expected = (
        [{k: m[k] for k in keys} for m in read_metrics(r.metrics_path)] for r in (run, straight)
    )
    assert found == expected


def test_a_resumed_run_whose_source_is_gone_says_so(tmp_path: Path) -> None:
    run, _, _ = run_of(tmp_path, 1, 4)
    forget_after(run, run.default_adapters, 3, print, reuse_rollouts=False)
    (run.default_adapters / "policy-v000002").rename(tmp_path / "gone")
    _, _, said = run_of(tmp_path, 1, 6, first_step=4)
    assert "policy-v000002 is not in" in said
    assert {k: v for k, v in sampled_from(run).items() if k > 3} == {4: 3, 5: 3, 6: 4}


def test_clean_up_keeps_what_a_resumed_run_is_sampled_from(tmp_path: Path) -> None:
    run, _, _ = run_of(tmp_path, 1, 3, sample_s=0.0, train_s=0.0)
    run.checkpoint_path(3).mkdir()
    (run.checkpoint_path(3) / "state.json").write_text("{}")
    run_of(tmp_path, 1, 12, first_step=4, sample_s=0.0, train_s=0.0)
    assert [a.version for a in published_versions(run.default_adapters)] == [0, 2, 3, 10, 11, 12]


def test_staleness_without_a_correction_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"importance\.mode=none would not correct"):
        load_config(None, {"rollout.max_staleness": 1, "importance.mode": "none"})
    with pytest.raises(ConfigError, match=r"rollout\.max_staleness"):
        load_config(None, {"rollout.max_staleness": 2})


def test_covered_seconds_count_once() -> None:
    assert covered_s(
        (0.0, 10.0), [(1.0, 3.0), (2.0, 4.0), (6.0, float("inf")), (-5.0, 0.5)]
    ) == pytest.approx(0.5 + 3.0 + 4.0)
    assert covered_s((0.0, 1.0), [(2.0, 3.0)]) == 0.0


def test_an_event_torn_by_a_kill_is_left_out(tmp_path: Path) -> None:
    run, _, _ = run_of(tmp_path, 0, 1)
    whole = read_events(run.events_path)
    with run.events_path.open("ab") as stream:
        stream.write(json.dumps({"event": "trainer_step_seen"}).encode()[:9])
    assert read_events(run.events_path) == whole
