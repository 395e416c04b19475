"""How often does the bfloat16 canary refuse a right adapter, and how often a wrong one?

    python benchmarks/canary_bf16.py RUN --data DATA --raw /tmp/raw.json --out FILE

RUN is a run that kept all its adapters (--set sync.keep_last=1000). vLLM computes in bfloat16; the trainer
scores the same sequences in float32, from bfloat16 weights, as it does at every publish.
tests/damaged_adapters.py lists the wrong adapters. --draws canaries are drawn from the sequences, and each
goes through all versions of the run. The engine serves the right adapters, or wrong ones from version 1 on,
or a wrong one just once.
--raw keeps the logprobs; if the file exists, nothing is scored again.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import lora_sampling
import numpy as np
from command_line import argument_parser
from machine_info import machine_info
from safetensors.torch import load_file, save_file

from skylite.adapters.manifest import Canary
from skylite.config.loading import read_run_config
from skylite.config.train import RunConfig
from skylite.data.prompts import read_prompts
from skylite.data.tokenizer import load_tokenizer
from skylite.engine.canary import MAX_TOKENS, NUM_SEQUENCES, EarlierAnswers, verify
from skylite.engine.canary_reading import CanaryReading
from skylite.errors import SyncFailed
from skylite.model.checked_shortcuts import enable_shortcuts
from skylite.model.load_adapter import load_adapter_file
from skylite.model.policy import Policy, load_policy
from skylite.run.files import write_json
from skylite.run.run_dir import AdapterVersion, adapter_name
from skylite.trainer.canary import base_canary_logprobs, canary_logprobs, sequences_of
from tests.damaged_adapters import DAMAGE
from tests.small_run import lone_rank

AT_A_TIME = 16
"""Sequences per pass of the trainer."""
BASE = "base"
ByAdapter = dict[str, list[list[float]]]
"""[S][L - 1] logprobs by adapter."""


def main() -> None:
    args = parse_arguments()
    if args.raw is not None and args.raw.exists():
        raw = json.loads(args.raw.read_text())
    else:
        raw = score_all(args)
        if args.raw is not None:
            write_json(args.raw, raw)
    result = asyncio.run(rates(raw, args))
    print(json.dumps(result, indent=1))
    if args.out:
        count = len(raw["trainer"][BASE])
        write_json(args.out, machine_info() | {"sequences": count, "draws": args.draws} | result)


def parse_arguments() -> argparse.Namespace:
    parser = argument_parser(__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--data", type=Path, required=True, help="the run's data folder")
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--draws", type=int, default=1000, help="canaries of right adapters")
    parser.add_argument("--wrong-draws", type=int, default=200, help="canaries of each wrong adapter")
    parser.add_argument(
        "--once", type=int, nargs="+", default=[1, 2, 4, 8, 20], help="versions wrong just once"
    )
    parser.add_argument("--raw", type=Path)
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def score_all(args: argparse.Namespace) -> dict[str, Any]:
    """Logprobs of every adapter, from the trainer and from the engine."""
    run = read_run_config(args.run / "config.json")
    versions = sorted(int(p.name[-6:]) for p in (args.run / "adapters").glob("policy-v*"))
    model = Path(run.resolved.model_path)
    sequences = choose_sequences(args, model)
    trainer = trainer_scores(run, args.run / "adapters", versions, sequences)
    with tempfile.TemporaryDirectory(prefix="skylite-") as text:
        folders = {adapter_name(v): args.run / "adapters" / adapter_name(v) for v in versions}
        folders |= wrong_adapters(args.run / "adapters", versions[1:], Path(text))
        engine = engine_scores(model, folders, sequences, Path(text), run.config.lora.rank)
    return {"versions": versions, "trainer": trainer, "engine": engine}


def choose_sequences(args: argparse.Namespace, model: Path) -> list[list[int]]:
    """Different sequences of MAX_TOKENS tokens from the first prompts."""
    prompts, _ = read_prompts(args.data / "train.parquet")
    tokenizer = load_tokenizer(model)
    texts = [f"{p.messages[-1]['content']}\n{p.answer}" for p in prompts[: 4 * args.sequences]]
    with contextlib.closing(tokenizer):
        encoded = dict.fromkeys(tuple(ids[:MAX_TOKENS]) for ids in tokenizer.encode_texts(texts))
    return [list(ids) for ids in encoded if len(ids) == MAX_TOKENS][: args.sequences]


def trainer_scores(
    run: RunConfig, adapters: Path, versions: list[int], sequences: list[list[int]]
) -> ByAdapter:
    resolved = run.resolved.model_copy(update={"dtype": "bfloat16", "warm_start": None})
    with lone_rank() as dist:
        policy, choices = enable_shortcuts(load_policy(resolved, run.config, dist), sequences[0])
        print(*choices, sep="\n", flush=True)
        scores = {BASE: in_chunks(policy, sequences, base_canary_logprobs)}
        for version in versions:
            load_adapter_file(adapters / adapter_name(version), policy.lora)
            scores[adapter_name(version)] = in_chunks(policy, sequences, canary_logprobs)
    return scores


def in_chunks(policy: Policy, sequences: list[list[int]], score: Any) -> list[list[float]]:
    starts = range(0, len(sequences), AT_A_TIME)
    return [row for start in starts for row in score(policy, sequences[start : start + AT_A_TIME])]


def wrong_adapters(adapters: Path, versions: list[int], folder: Path) -> dict[str, Path]:
    """Damaged copies of adapters by name: `KIND-of-VERSION`."""
    found = {}
    for version in versions:
        source = adapters / adapter_name(version)
        tensors = load_file(source / "adapter_model.safetensors")
        for kind, damage in DAMAGE.items():
            name = f"{kind}-of-{adapter_name(version)}"
            found[name] = folder / name
            found[name].mkdir()
            shutil.copy(source / "adapter_config.json", found[name])
            save_file(damage(tensors), found[name] / "adapter_model.safetensors")
    return found


def engine_scores(
    model: Path, folders: dict[str, Path], sequences: list[list[int]], folder: Path, rank: int
) -> ByAdapter:
    args = argparse.Namespace(model=model, dtype="bfloat16", rank=rank)
    first = next(iter(folders.values()))
    with lora_sampling.running(
        lora_sampling.Variant("engine", cpu_lora="dense"), args, folder, first
    ) as http:
        scores = {BASE: prompt_logprobs(http, BASE, sequences)}
        for name, path in folders.items():
            body = {"lora_name": f"adapter-{name}", "lora_path": str(path.resolve())}
            http.post("/v1/load_lora_adapter", json=body).raise_for_status()
            scores[name] = prompt_logprobs(http, f"adapter-{name}", sequences)
            http.post("/v1/unload_lora_adapter", json={"lora_name": f"adapter-{name}"}).raise_for_status()
            print(name, flush=True)
    return scores


def prompt_logprobs(http: Any, model: str, sequences: list[list[int]]) -> list[list[float]]:
    """One sequence at a time, as in a run."""
    rows = []
    for ids in sequences:
        body = {"model": model, "prompt": ids, "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}
        [choice] = http.post("/v1/completions", json=body).raise_for_status().json()["choices"]
        given = choice["prompt_logprobs"][1:]
        rows.append([row[str(i)]["logprob"] for i, row in zip(ids[1:], given, strict=True)])
    return rows


@dataclass(slots=True)
class Scorer:
    """Answers from the logprobs in `raw`. A canary's sequence has one id here: its place."""

    raw: dict[str, Any]
    served: str = ""
    """What it serves under the name of any adapter."""
    name: str = "engine"

    async def prompt_logprobs(self, model: str, token_ids: Sequence[int]) -> list[float]:
        rows: list[list[float]] = self.raw["engine"][BASE if model == BASE else self.served]
        return rows[token_ids[0]]

    async def judge(
        self, version: int, served: str, drawn: Sequence[int], earlier: EarlierAnswers
    ) -> CanaryReading | str:
        """The reading of a version while the engine serves `served`, or why it is refused."""
        self.served = served
        trainer, name = self.raw["trainer"], adapter_name(version)
        chosen = [drawn[place] for place in sequences_of(version, len(drawn))]
        canary = Canary(
            sequences=[[place] for place in chosen],
            policy_logprobs=[trainer[name][place] for place in chosen],
            base_logprobs=[trainer[BASE][place] for place in chosen],
        )
        try:
            return await verify(self, AdapterVersion(version, Path(name)), canary, None, earlier)
        except SyncFailed as error:
            return error.what


async def rates(raw: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """The shares of drawn canaries that skylite refuses, and readings of right adapters."""
    random, places = np.random.default_rng(0), len(raw["trainer"][BASE])
    draws: list[list[int]] = [
        random.permutation(places)[: NUM_SEQUENCES["bfloat16"]].tolist() for _ in range(args.draws)
    ]
    few = draws[: args.wrong_draws]
    return {
        "right": await right_adapters(raw, draws),
        "found_by_version": {kind: await found_by_version(raw, kind, few) for kind in DAMAGE},
        "found_at_once": {
            kind: await found_at_once(raw, kind, few, args.once) for kind in (BASE, "stale", *DAMAGE)
        },
    }


async def right_adapters(raw: dict[str, Any], draws: Sequence[Sequence[int]]) -> dict[int, Any]:
    """By version: the share refused, and means of the readings of those that pass."""
    scorer, found = Scorer(raw), {version: list[CanaryReading | str]() for version in raw["versions"]}
    for drawn in draws:
        earlier = EarlierAnswers()
        for version in raw["versions"]:
            found[version].append(await scorer.judge(version, adapter_name(version), drawn, earlier))
    return {version: described(outcomes) for version, outcomes in found.items()}


def described(outcomes: Sequence[CanaryReading | str]) -> dict[str, float]:
    passed = [reading for reading in outcomes if not isinstance(reading, str)]
    found = {"refused": 1 - len(passed) / len(outcomes)}
    for name in ("rounding", "base_distance", "projection", "projection_error"):
        found[name] = round(float(np.mean([getattr(reading, name) for reading in passed])), 4)
    return {name: value for name, value in found.items() if value == value}  # version 0 has no projection


async def found_by_version(
    raw: dict[str, Any], kind: str, draws: Sequence[Sequence[int]]
) -> dict[int, float]:
    """By version: the share refused in it or before, if the engine does `kind` to all versions."""
    scorer, first = Scorer(raw), list[int]()
    for drawn in draws:
        earlier = EarlierAnswers()
        for version in raw["versions"][1:]:
            said = await scorer.judge(version, served_name(kind, version), drawn, earlier)
            if isinstance(said, str):
                first.append(version)
                break
    return {v: sum(version <= v for version in first) / len(draws) for v in raw["versions"][1:]}


async def found_at_once(
    raw: dict[str, Any], kind: str, draws: Sequence[Sequence[int]], versions: Sequence[int]
) -> dict[int, float]:
    """By version: the share refused in it, if the engine serves `kind` for the first time."""
    scorer, refused = Scorer(raw), dict.fromkeys(versions, 0)
    for drawn in draws:
        earlier = EarlierAnswers()
        for version in raw["versions"][: max(versions) + 1]:
            if version in refused:
                said = await scorer.judge(version, served_name(kind, version), drawn, replace(earlier))
                refused[version] += isinstance(said, str)
            await scorer.judge(version, adapter_name(version), drawn, earlier)
    return {version: count / len(draws) for version, count in refused.items()}


def served_name(kind: str, version: int) -> str:
    """Key of what the engine serves instead of `version`."""
    if kind == BASE:
        return BASE
    return adapter_name(version - 1) if kind == "stale" else f"{kind}-of-{adapter_name(version)}"


if __name__ == "__main__":
    main()
