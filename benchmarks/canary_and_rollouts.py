"""At which step do the canary and the judged rollouts find an engine that serves a wrong adapter?

    python benchmarks/canary_and_rollouts.py RUN [RUN ...] --dtype float32 --raw /tmp/raw.json --out FILE

Each RUN kept all its adapters (--set sync.keep_last=1000). vLLM computes in --dtype, and scores the canary
and the rollouts of the first run with every adapter of --versions, right or damaged
(tests/damaged_adapters.py), with the version before and with the base. The trainer scores the same tokens
with the right adapter. --raw keeps the logprobs; if the file exists, nothing is scored again, and only the
rules judge.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import lora_sampling
import numpy as np
import torch
from canary_bf16 import BASE, in_chunks, prompt_logprobs
from command_line import argument_parser
from machine_info import machine_info
from safetensors.torch import load_file, save_file

from skylite.adapters.manifest import Canary
from skylite.config.loading import read_run_config
from skylite.config.train import RunConfig
from skylite.engine.canary import DEFAULT_TOLERANCE, MAX_TOKENS, NUM_SEQUENCES, EarlierAnswers, verify
from skylite.errors import SyncFailed
from skylite.model.checked_shortcuts import enable_shortcuts
from skylite.model.load_adapter import load_adapter_file
from skylite.model.packing import pack_tokens
from skylite.model.policy import Policy, load_policy, score
from skylite.rollout.judge_rollouts import MIN_TOKENS, RolloutJudge, mean_gap
from skylite.run.files import write_json
from skylite.run.rollout_file import read_rollouts
from skylite.run.run_dir import AdapterVersion, RunDir, adapter_name
from skylite.trainer.canary import base_canary_logprobs, canary_logprobs, sequences_of
from skylite.trainer.rollout_gaps import CLIP, depth_edges
from skylite.types import Sample
from tests.damaged_adapters import DAMAGE
from tests.small_run import lone_rank

BEFORE, RIGHT = "version-before", "right"
Rows = list[list[float]]


def main() -> None:
    args = parse_arguments()
    if args.raw.exists():
        raw = json.loads(args.raw.read_text())
    else:
        raw = {}
        samples = [
            s for g in groups_of(args.runs[0], args.rollout_steps) for t in g.trajectories for s in t.samples
        ]
        samples = samples[: args.completions]
        raw["depths"] = [
            [len(s.prompt_token_ids) + k for k in range(len(s.completion_token_ids))] for s in samples
        ]
        raw["runs"] = score_runs(args, samples)
        write_json(args.raw, raw)
    result: dict[str, Any] = {}
    for run, found in raw["runs"].items():
        drawn = Rollouts(found, raw["depths"], args.dtype, args.draws)
        result[run] = {
            "canary": asyncio.run(judged(found, args.dtype)),
            "noise": drawn.noise,
            "rollouts": {kind: drawn.of_kind(kind) for kind in kinds_of(found)},
        }
    print(json.dumps(result, indent=1))
    if args.out:
        write_json(args.out, machine_info() | {"dtype": args.dtype} | result)


def parse_arguments() -> argparse.Namespace:
    parser = argument_parser(__doc__)
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--versions", type=int, nargs="+", default=[1, 2, 3, 4, 6, 8, 12, 16])
    parser.add_argument("--kinds", nargs="+", default=list(DAMAGE))
    parser.add_argument("--rollout-steps", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--completions", type=int, default=64)
    parser.add_argument("--draws", type=int, default=1000, help="of as many completions, with replacement")
    parser.add_argument("--raw", type=Path, required=True)
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def canary_of_run(path: Path, samples: list[Sample], dtype: str) -> list[list[int]]:
    """The run's own canary in float32. In bfloat16 24 ends of prompts: the run may have been in float32."""
    if dtype == "float32":
        found: list[list[int]] = json.loads(RunDir(path).canary_path.read_text())["sequences"]
        return found
    ends = dict.fromkeys(tuple(s.prompt_token_ids[-MAX_TOKENS - 8 : -8]) for s in samples)
    ends |= dict.fromkeys(tuple(s.prompt_token_ids[-2 * MAX_TOKENS - 8 : -MAX_TOKENS - 8]) for s in samples)
    return [list(ids) for ids in ends][: NUM_SEQUENCES[dtype]]


def groups_of(run: Path, steps: Sequence[int]) -> list[Any]:
    return [group for step in steps for group in read_rollouts(RunDir(run).rollout_path(step))]


def score_runs(args: argparse.Namespace, samples: list[Sample]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for path in args.runs:
        run = read_run_config(path / "config.json")
        sequences = canary_of_run(path, samples, args.dtype)
        versions = [v for v in args.versions if (path / "adapters" / adapter_name(v)).exists()]
        found[path.name] = {"versions": versions, "canary": sequences}
        needed = sorted({0, *versions, *(v - 1 for v in versions)})
        found[path.name]["trainer"] = trainer_scores(
            run, path / "adapters", needed, sequences, samples, args.dtype
        )
        print(path.name, "scored by the trainer", flush=True)
    with tempfile.TemporaryDirectory(prefix="skylite-") as text:
        model = read_run_config(args.runs[0] / "config.json").resolved.model_path
        rank = read_run_config(args.runs[0] / "config.json").config.lora.rank
        options = argparse.Namespace(model=Path(model), dtype=args.dtype, rank=rank)
        first = args.runs[0] / "adapters" / adapter_name(1)
        variant = lora_sampling.Variant("engine", cpu_lora="dense")
        with lora_sampling.running(variant, options, Path(text), first) as http:
            for path in args.runs:
                of_run = found[path.name]
                of_run["engine"] = engine_scores(http, path, of_run, samples, args.kinds, Path(text))
    return found


def trainer_scores(
    run: RunConfig,
    adapters: Path,
    versions: list[int],
    sequences: list[list[int]],
    samples: list[Sample],
    dtype: str,
) -> dict[str, dict[str, Rows]]:
    """By adapter: logprobs of the canary in float32, and of the rollouts in the trainer's own type."""
    resolved = run.resolved.model_copy(update={"dtype": dtype, "warm_start": None})
    with lone_rank() as dist:
        policy, _ = enable_shortcuts(load_policy(resolved, run.config, dist), sequences[0])
        found = {BASE: {"canary": in_chunks(policy, sequences, base_canary_logprobs)}}
        for version in versions:
            load_adapter_file(adapters / adapter_name(version), policy.lora)
            found[adapter_name(version)] = {
                "canary": in_chunks(policy, sequences, canary_logprobs),
                "rollouts": rollout_logprobs(policy, samples),
            }
    return found


def rollout_logprobs(policy: Policy, samples: list[Sample]) -> Rows:
    found: Rows = []
    with torch.no_grad():
        for start in range(0, len(samples), 16):
            part = samples[start : start + 16]
            tokens = pack_tokens(
                [s.prompt_token_ids for s in part],
                [s.completion_token_ids for s in part],
                range(len(part)),
                policy.packing,
                policy.device,
            )
            logprobs, _ = score(policy, tokens, 1.0)
            sizes = [len(s.completion_token_ids) for s in part]
            found += [row.tolist() for row in torch.split(logprobs, sizes)]
    return found


def engine_scores(
    http: Any, path: Path, of_run: dict[str, Any], samples: list[Sample], kinds: list[str], folder: Path
) -> dict[str, dict[str, Rows]]:
    """By `KIND-of-VERSION`, or the name of a right version."""
    found = {BASE: score_in_engine(http, BASE, of_run["canary"], samples)}
    adapters = path / "adapters"
    served = {adapter_name(v): adapters / adapter_name(v) for v in range(max(of_run["versions"]) + 1)}
    wanted = {adapter_name(v) for v in {0, *of_run["versions"], *(v - 1 for v in of_run["versions"])}}
    todo = {name: source for name, source in served.items() if name in wanted}
    for version in of_run["versions"]:
        source = adapters / adapter_name(version)
        tensors = load_file(source / "adapter_model.safetensors")
        for kind in kinds:
            name = f"{kind}-of-{adapter_name(version)}"
            todo[name] = folder / path.name / name
            todo[name].mkdir(parents=True)
            shutil.copy(source / "adapter_config.json", todo[name])
            save_file({n: t.contiguous() for n, t in DAMAGE[kind](tensors).items()},
                      todo[name] / "adapter_model.safetensors")  # fmt: skip
    for name, source in todo.items():
        served_as = f"{path.name}-{name}"
        body = {"lora_name": served_as, "lora_path": str(source.resolve())}
        http.post("/v1/load_lora_adapter", json=body).raise_for_status()
        found[name] = score_in_engine(http, served_as, of_run["canary"], samples)
        http.post("/v1/unload_lora_adapter", json={"lora_name": served_as}).raise_for_status()
        print(path.name, name, flush=True)
    return found


def score_in_engine(http: Any, model: str, canary: list[list[int]], samples: list[Sample]) -> dict[str, Rows]:
    def of(sample: Sample) -> list[float]:
        [row] = prompt_logprobs(http, model, [sample.prompt_token_ids + sample.completion_token_ids])
        return row[len(sample.prompt_token_ids) - 1 :]

    found = {"canary": prompt_logprobs(http, model, canary)}
    with ThreadPoolExecutor(16) as pool:
        return found | {"rollouts": list(pool.map(of, samples))}


class Answers:
    """An engine that serves `kind` in place of each version."""

    name = "engine"

    def __init__(self, scored: dict[str, Any], kind: str) -> None:
        self.scored, self.kind, self.version = scored, kind, 0

    def served(self) -> dict[str, Rows]:
        names = {
            BASE: BASE,
            RIGHT: adapter_name(self.version),
            BEFORE: adapter_name(max(0, self.version - 1)),
        }
        name = names.get(self.kind, f"{self.kind}-of-{adapter_name(self.version)}")
        found: dict[str, Rows] = self.scored["engine"][name]
        return found

    async def prompt_logprobs(self, model: str, token_ids: Sequence[int]) -> list[float]:
        answers = self.scored["engine"][BASE] if model == BASE else self.served()
        row: list[float] = answers["canary"][self.scored["canary"].index(list(token_ids))]
        return row


class Rollouts:
    """The mean gaps of steps that draw completions, by depth and over all tokens, as the judge sees them."""

    def __init__(self, scored: dict[str, Any], depths: list[list[int]], dtype: str, draws: int) -> None:
        self.scored, self.depths, self.dtype, self.draws = scored, depths, dtype, draws
        base, own = scored["engine"][BASE]["canary"], scored["trainer"][BASE]["canary"]
        self.noise = float(
            np.abs(np.concatenate([np.subtract(a, b) for a, b in zip(base, own, strict=True)])).mean()
        )
        """mean |engine - trainer| of the base on the canary."""

    def of_kind(self, kind: str) -> dict[str, Any]:
        """By version: the share of draws over the limits, and the ratios that decide it."""
        engine, found = Answers(self.scored, kind), dict[str, Any]()
        for version in self.scored["versions"]:
            engine.version = version
            rng = np.random.default_rng(version)
            first = self.gaps(self.scored["engine"][adapter_name(0)]["rollouts"], 0)
            gaps = self.gaps(engine.served()["rollouts"], version)
            trainer = self.scored["trainer"]
            moved = distance(trainer[adapter_name(version)]["canary"], trainer[BASE]["canary"])
            growth, depth, warned, stops = list[float](), list[float](), 0, 0
            for _ in range(self.draws):
                judge = RolloutJudge(self.dtype, 1.0, "stop")  # type: ignore[arg-type]
                judge.reference, _ = mean_gap(self.draw(first, rng))
                bins = self.draw(gaps, rng)
                fault, is_sure = judge.fault(bins, self.noise, moved)
                warned += bool(fault)
                stops += is_sure
                growth.append(mean_gap(bins)[0] / judge.reference)
                large = [row["gap_mean"] for row in bins if row["tokens"] >= MIN_TOKENS[self.dtype]]
                depth.append(max(large, default=0.0) / self.noise)
            found[str(version)] = {
                "moved": moved, "warned": warned / self.draws, "could_stop": stops / self.draws,
                "growth": quantiles(growth), "worst_depth_in_noise": quantiles(depth),
            }  # fmt: skip
        return found

    def gaps(self, served: Rows, version: int) -> list[Any]:
        own = self.scored["trainer"][adapter_name(version)]["rollouts"]
        return [np.abs(np.subtract(a, b)) for a, b in zip(served, own, strict=True)]

    def draw(self, gaps: list[Any], rng: np.random.Generator) -> list[dict[str, Any]]:
        """Rows as trainer/rollout_gaps.py makes them."""
        chosen = rng.integers(len(gaps), size=len(gaps))
        values = np.concatenate([gaps[k] for k in chosen])
        depths = np.concatenate([self.depths[k] for k in chosen])
        clipped = np.minimum(values, CLIP * values.mean())
        edges = np.array(depth_edges(int(depths.max())))
        places = np.searchsorted(edges, depths, side="right") - 1
        rows = []
        for place in np.unique(places):
            inside = places == place
            rows.append({"from": int(edges[place]), "tokens": int(inside.sum()),
                         "gap_mean": float(clipped[inside].mean()), "gap_max": float(values[inside].max()),
                         "worst_depth": 0, "worst_prompt": ""})  # fmt: skip
        return rows


def quantiles(values: list[float]) -> dict[str, float]:
    return {"1 %": float(np.quantile(values, 0.01)), "50 %": float(np.median(values)),
            "99 %": float(np.quantile(values, 0.99)), "max": max(values)}  # fmt: skip


def distance(rows: Rows, others: Rows) -> float:
    return float(
        np.abs(np.concatenate([np.subtract(a, b) for a, b in zip(rows, others, strict=True)])).mean()
    )


async def judged(scored: dict[str, Any], dtype: str) -> dict[str, Any]:
    """By kind: the first version that the canary refuses, and those that it passes as too small to tell."""
    return {kind: await canary_of(scored, kind, dtype) for kind in kinds_of(scored)}


def kinds_of(scored: dict[str, Any]) -> list[str]:
    damaged = {name.split("-of-")[0] for name in scored["engine"] if "-of-" in name}
    return [RIGHT, BASE, BEFORE, *(kind for kind in DAMAGE if kind in damaged)]


async def canary_of(scored: dict[str, Any], kind: str, dtype: str) -> dict[int, str]:
    engine, earlier, outcome = Answers(scored, kind), EarlierAnswers(), dict[int, str]()
    for version in scored["versions"]:
        engine.version = version
        chosen = sequences_of(version, len(scored["canary"]))
        trainer = scored["trainer"]
        canary = Canary(
            sequences=[scored["canary"][k] for k in chosen],
            policy_logprobs=[trainer[adapter_name(version)]["canary"][k] for k in chosen],
            base_logprobs=[trainer[BASE]["canary"][k] for k in chosen],
        )
        adapter = AdapterVersion(version, Path(adapter_name(version)))
        try:
            reading = await verify(engine, adapter, canary, DEFAULT_TOLERANCE[dtype], earlier)
            outcome[version] = f"{reading.verdict} ({reading.visible:.2g})"
        except SyncFailed as error:
            outcome[version] = "refused"
            print(kind, version, error.what, flush=True)
    return outcome


if __name__ == "__main__":
    main()
