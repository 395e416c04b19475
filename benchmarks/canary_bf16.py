"""How often does the bfloat16 canary refuse a right adapter, and how often a wrong one?

    python benchmarks/canary_bf16.py RUN --data DATA --raw /tmp/raw.json --out FILE

RUN is a run that kept all its adapters (--set sync.keep_last=1000). vLLM computes in bfloat16; the trainer
scores the same sequences in float32, from bfloat16 weights, as it does at every publish. damaged_adapters.py
lists the wrong adapters. Canaries of each size in --sizes are drawn from the sequences with replacement.
--raw keeps the logprobs; if the file exists, nothing is scored again.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import lora_sampling
import numpy as np
from command_line import argument_parser
from damaged_adapters import DAMAGE
from machine_info import machine_info
from safetensors.torch import load_file, save_file

from skylite.adapters.manifest import SHORT_CANARY
from skylite.config.loading import read_run_config
from skylite.config.train import RunConfig
from skylite.data.prompts import read_prompts
from skylite.data.tokenizer import load_tokenizer
from skylite.engine.canary import MAX_TOKENS, NUM_SEQUENCES
from skylite.engine.canary_bf16 import PairedReading, Scores, check_paired, read_paired
from skylite.errors import SyncFailed
from skylite.model.checked_shortcuts import enable_shortcuts
from skylite.model.load_adapter import load_adapter_file
from skylite.model.policy import Policy, load_policy
from skylite.run.files import write_json
from skylite.run.run_dir import adapter_name
from skylite.trainer.canary import base_canary_logprobs, canary_logprobs
from tests.small_run import lone_rank

AT_A_TIME = 16
"""Sequences per pass of the trainer."""
BASE = "base"
OLD_LIMIT = 0.5
"""Nats. A limit on the largest gap that skylite once had, for comparison."""
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
    result = {str(size): rates(raw, args.wrong, args.draws, size) for size in args.sizes}
    print(json.dumps(result, indent=1))
    if args.out:
        count = len(raw["trainer"][BASE])
        write_json(args.out, machine_info() | {"sequences": count, "draws": args.draws} | result)


def parse_arguments() -> argparse.Namespace:
    parser = argument_parser(__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--data", type=Path, required=True, help="the run's data folder")
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--draws", type=int, default=1000, help="canaries per adapter and size")
    parser.add_argument("--sizes", type=int, nargs="+", default=[NUM_SEQUENCES["bfloat16"], SHORT_CANARY])
    parser.add_argument("--wrong", type=int, nargs="+", default=[1, 2, 4, 8, 20], help="versions made wrong")
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
        folders |= wrong_adapters(args.run / "adapters", args.wrong, Path(text))
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
            body = {"lora_name": f"adapter-{name}", "lora_path": str(path)}
            http.post("/v1/load_lora_adapter", json=body).raise_for_status()
            scores[name] = prompt_logprobs(http, f"adapter-{name}", sequences)
            http.post("/v1/unload_lora_adapter", json={"lora_name": f"adapter-{name}"}).raise_for_status()
            print(name, flush=True)
    return scores


def prompt_logprobs(http: Any, model: str, sequences: list[list[int]]) -> list[list[float]]:
    """Each canary of two sequences is one request pair in a run; here a pair is one request."""
    rows = []
    for start in range(0, len(sequences), 2):
        pair = sequences[start : start + 2]
        body = {"model": model, "prompt": pair, "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}
        reply = http.post("/v1/completions", json=body).raise_for_status().json()
        for ids, choice in zip(pair, reply["choices"], strict=True):
            given = choice["prompt_logprobs"][1:]
            rows.append([row[str(i)]["logprob"] for i, row in zip(ids[1:], given, strict=True)])
    return rows


def rates(raw: dict[str, Any], wrong: list[int], draws: int, size: int) -> dict[str, Any]:
    """The shares of drawn canaries that engine/canary_bf16.py refuses, and readings of right adapters.

    `size`: sequences of a canary.
    """
    random = np.random.default_rng(0)
    chosen: list[list[int]] = random.integers(len(raw["trainer"][BASE]), size=(draws, size)).tolist()
    engine = raw["engine"]
    right = {v: describe(raw, v, engine[adapter_name(v)], chosen) for v in raw["versions"]}
    kinds = (BASE, "stale", *DAMAGE)
    by_rule: dict[str, dict[int, float]] = {kind: {} for kind in kinds}
    by_statistics: dict[str, dict[int, float]] = {kind: {} for kind in kinds}
    for version in wrong:
        for kind in kinds:
            found = describe(raw, version, engine[served_name(kind, version)], chosen)
            by_rule[kind][version] = found["refused"]
            by_statistics[kind][version] = found["refused_without_bits"]
    return {"right": right, "wrong_refused": by_rule, "wrong_refused_without_bits": by_statistics}


def served_name(kind: str, version: int) -> str:
    """Key of what the engine serves instead of `version`."""
    if kind == BASE:
        return BASE
    return adapter_name(version - 1) if kind == "stale" else f"{kind}-of-{adapter_name(version)}"


def describe(
    raw: dict[str, Any], version: int, served: list[list[float]], chosen: Sequence[Sequence[int]]
) -> dict[str, float]:
    """What the drawn canaries show if the engine serves `served` as `version`.

    `over_half_a_nat`: share of canaries of two sequences whose largest gap is over 0.5 nats.
    `limit_in_deviations`: mean distance of the projection from its limit, in its standard deviations.
    """
    readings = [read_paired(drawn_scores(raw, version, served, canary)) for canary in chosen]
    gaps = np.abs(np.array(served) - np.array(raw["trainer"][adapter_name(version)])).max(axis=1)
    slack = np.array([r.projection_limit - abs(r.reading.projection - 1) for r in readings])
    found = {
        "refused": share(is_refused(r) for r in readings),
        "refused_without_bits": share(is_refused(replace(r, same_as="")) for r in readings),
        "over_half_a_nat": share(gaps[list(canary[:2])].max() > OLD_LIMIT for canary in chosen),
        "rounding": round(float(np.mean([r.reading.rounding for r in readings])), 4),
        "base_distance": round(float(np.mean([r.reading.base_distance for r in readings])), 4),
        "projection": round(float(np.mean([r.reading.projection for r in readings])), 3),
        "limit_in_deviations": round(float(slack.mean() / slack.std()), 2),
    }
    return {name: value for name, value in found.items() if value == value}  # version 0 has no projection


def drawn_scores(
    raw: dict[str, Any], version: int, served: list[list[float]], canary: Sequence[int]
) -> Scores:
    trainer, engine, name = raw["trainer"], raw["engine"], adapter_name(version)
    before = adapter_name(version - 1) if version else None

    def drawn(rows: list[list[float]]) -> list[float]:
        return [x for index in canary for x in rows[index]]

    return Scores(
        engine=drawn(served),
        engine_base=drawn(engine[BASE]),
        policy=drawn(trainer[name]),
        base=drawn(trainer[BASE]),
        engine_before=drawn(engine[before]) if before else None,
        policy_before=drawn(trainer[before]) if before else None,
    )


def is_refused(found: PairedReading) -> bool:
    try:
        check_paired("policy", "engine", found)
    except SyncFailed:
        return True
    return False


def share(outcomes: Iterable[bool]) -> float:
    return float(np.mean(list(outcomes)))


if __name__ == "__main__":
    main()
