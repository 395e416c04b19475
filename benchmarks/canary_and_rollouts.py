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
from skylite.run.files import write_json
from skylite.run.rollout_file import read_rollouts
from skylite.run.run_dir import AdapterVersion, RunDir, adapter_name
from skylite.trainer.canary import base_canary_logprobs, canary_logprobs, sequences_of
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
    result = {run: asyncio.run(judged(found, args.dtype)) for run, found in raw["runs"].items()}
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
        body = {"lora_name": served_as, "lora_path": str(source)}
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
