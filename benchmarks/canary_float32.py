"""At which step do the canary and the judged rollouts find a wrong adapter in float32?

    python benchmarks/canary_float32.py RUN [RUN ...] --out FILE

Each RUN kept all its adapters (--set sync.keep_last=1000) and trained in float32. No engine runs: the trainer
computes what an engine would answer that serves the damaged adapter (tests/damaged_adapters.py), the version
before, or the base. To each logprob comes noise with the mean size that the run measured between vLLM and the
trainer, and with heavier tails than a normal distribution (Student's t with 5 degrees of freedom).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from canary_and_rollouts import BEFORE, RIGHT, groups_of, rollout_logprobs
from canary_bf16 import BASE
from command_line import argument_parser
from machine_info import machine_info
from safetensors.torch import load_file, save_file

from skylite.adapters.manifest import Canary
from skylite.config.loading import read_run_config
from skylite.engine.canary import DEFAULT_TOLERANCE, EarlierAnswers, verify
from skylite.errors import SyncFailed
from skylite.model.checked_shortcuts import enable_shortcuts
from skylite.model.load_adapter import load_adapter_file
from skylite.model.policy import Policy, load_policy
from skylite.rollout.judge_rollouts import RolloutJudge
from skylite.run.files import write_json
from skylite.run.metrics_file import read_metrics
from skylite.run.run_dir import AdapterVersion, RunDir, adapter_name
from skylite.trainer.canary import base_canary_logprobs, canary_logprobs
from skylite.types import Sample
from tests.damaged_adapters import DAMAGE
from tests.small_run import lone_rank

Rows = list[list[float]]
Scores = dict[str, dict[str, Rows]]
"""Name of what is served -> "canary" and "rollouts"."""


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--versions", type=int, nargs="+", default=[1, 2, 3, 4, 6])
    parser.add_argument("--completions", type=int, default=8, help="of one group, for the rollouts")
    parser.add_argument("--draws", type=int, default=200)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    result: dict[str, Any] = {}
    for path in args.runs:
        result[path.name] = of_run(path, args)
        print(path.name, json.dumps(result[path.name], indent=1), flush=True)
        if args.out:
            write_json(args.out, machine_info() | {"draws": args.draws, "runs": result})


def of_run(path: Path, args: argparse.Namespace) -> dict[str, Any]:
    steps = read_metrics(RunDir(path).metrics_path)
    noise = statistics.mean(m["canary/gap_mean"] for m in steps)
    of_rollouts = statistics.mean(m["mismatch/logprob_diff_mean"] for m in steps)
    sequences = json.loads(RunDir(path).canary_path.read_text())["sequences"]
    run, found = read_run_config(path / "config.json"), dict[str, Any]()
    with lone_rank() as dist:
        policy, _ = enable_shortcuts(load_policy(run.resolved, run.config, dist), sequences[0])
        base = base_canary_logprobs(policy, sequences)
        for version in args.versions:
            if not (path / "adapters" / adapter_name(version)).exists():
                continue
            # Sampled from this version, and not what it was trained on.
            samples = [s for t in groups_of(path, [version + 1])[0].trajectories for s in t.samples]
            scores = scored(policy, path / "adapters", version, sequences, samples[: args.completions])
            scores[BASE]["canary"] = base
            found[str(version)] = judged(scores, sequences, version, (noise, of_rollouts), args.draws)
            print(path.name, version, flush=True)
    return {"noise": noise, "noise_of_rollouts": of_rollouts, "versions": found}


def scored(
    policy: Policy, adapters: Path, version: int, sequences: list[list[int]], samples: list[Sample]
) -> Scores:
    """What an engine would answer, without its noise."""
    right = adapters / adapter_name(version)
    tensors = load_file(right / "adapter_model.safetensors")
    sources = {RIGHT: right, BASE: adapters / adapter_name(0), BEFORE: adapters / adapter_name(version - 1)}
    found: Scores = {}
    with tempfile.TemporaryDirectory(prefix="skylite-") as text:
        for kind, damage in DAMAGE.items():
            sources[kind] = Path(text, kind)
            sources[kind].mkdir()
            (sources[kind] / "adapter_config.json").write_bytes((right / "adapter_config.json").read_bytes())
            damaged = {n: t.contiguous() for n, t in damage(tensors).items()}
            save_file(damaged, sources[kind] / "adapter_model.safetensors")
        for kind, source in sources.items():
            load_adapter_file(source, policy.lora)
            found[kind] = {
                "canary": canary_logprobs(policy, sequences),
                "rollouts": rollout_logprobs(policy, samples),
            }
    return found


class NoisyEngine:
    """Serves what `scores` has for `kind`, with noise."""

    name = "engine"

    def __init__(
        self, scores: Scores, sequences: list[list[int]], kind: str, noise: float, rng: np.random.Generator
    ) -> None:
        self.scores, self.sequences, self.kind, self.noise, self.rng = scores, sequences, kind, noise, rng

    async def prompt_logprobs(self, model: str, token_ids: list[int]) -> list[float]:
        rows = self.scores[BASE if model == BASE else self.kind]["canary"]
        row = rows[self.sequences.index(list(token_ids))]
        return [float(x) for x in row + noise_of(len(row), self.noise, self.rng)]


def noise_of(count: int, mean: float, rng: np.random.Generator) -> Any:
    draws = rng.standard_t(5, count)
    return draws * (mean / 0.949)  # the mean absolute value of Student's t with 5 degrees of freedom


def judged(
    scores: Scores, sequences: list[list[int]], version: int, noise: tuple[float, float], draws: int
) -> dict[str, Any]:
    """By kind: shares of draws that the canary refuses, or calls verified, and that the rollouts warn of."""
    right, base = scores[RIGHT], scores[BASE]["canary"]
    canary = Canary(sequences=sequences, policy_logprobs=right["canary"], base_logprobs=base)
    found: dict[str, Any] = {}
    for kind in scores:
        if kind == BEFORE and version == 1:
            continue  # the base
        rng, outcomes, warned = np.random.default_rng(version), list[str](), 0
        for _ in range(draws):
            engine = NoisyEngine(scores, sequences, kind, noise[0], rng)
            outcomes.append(asyncio.run(outcome(engine, canary, version, scores)))
            warned += rollouts_warn(scores, kind, noise, rng)
        found[kind] = {
            "refused": outcomes.count("refused") / draws,
            "verified": outcomes.count("verified") / draws,
            "rollouts": warned / draws,
            "canary_gap": mean_gap(scores[kind]["canary"], right["canary"]),
            "rollout_gap": mean_gap(scores[kind]["rollouts"], right["rollouts"]),
        }
    return found


async def outcome(engine: NoisyEngine, canary: Canary, version: int, scores: Scores) -> str:
    earlier = EarlierAnswers()
    adapter = AdapterVersion(version, Path(adapter_name(version)))
    try:
        if version > 1:  # served rightly, so that its answers are known
            kind, engine.kind = engine.kind, BEFORE
            before = canary.model_copy(update={"policy_logprobs": scores[BEFORE]["canary"]})
            previous = AdapterVersion(version - 1, Path(adapter_name(version - 1)))
            await verify(engine, previous, before, DEFAULT_TOLERANCE["float32"], earlier)  # type: ignore[arg-type]
            engine.kind = kind
        reading = await verify(engine, adapter, canary, DEFAULT_TOLERANCE["float32"], earlier)  # type: ignore[arg-type]
    except SyncFailed:
        return "refused"
    return reading.verdict


def rollouts_warn(scores: Scores, kind: str, noise: tuple[float, float], rng: np.random.Generator) -> bool:
    rows = zip(scores[kind]["rollouts"], scores[RIGHT]["rollouts"], strict=True)
    gaps = np.concatenate([np.subtract(a, b) for a, b in rows])
    gaps = np.abs(gaps + noise_of(len(gaps), noise[1], rng))
    gaps = np.minimum(gaps, 10 * gaps.mean())
    row = {"from": 0, "tokens": len(gaps), "gap_mean": float(gaps.mean()), "gap_max": float(gaps.max())}
    bins = [row | {"worst_depth": 0, "worst_prompt": ""}]
    moved = mean_gap(scores[RIGHT]["canary"], scores[BASE]["canary"])
    return bool(RolloutJudge("float32", 1.0, "warn").judge(1, bins, noise[0], moved))


def mean_gap(rows: Rows, others: Rows) -> float:
    return float(
        np.mean([abs(a - b) for x, y in zip(rows, others, strict=True) for a, b in zip(x, y, strict=True)])
    )


if __name__ == "__main__":
    main()
