"""Does the bfloat16 canary find the base and the version before, beside the sampling of a step?

    python benchmarks/canary_beside_sampling.py RUN --data DATA --out FILE

RUN is a run in bfloat16 that kept all its adapters (--set sync.keep_last=1000). With rollout.max_staleness=1
the requests of the canary reach vLLM together with those of a step, and the rule compares bits, which depend
on the batch. So each trial sends both: the run's own canary and its prompts, sampled with the adapter that is
served. --alone sends no prompts, as on-policy. In a wrong trial the canary of a version is answered by the
base, by the version before, or by half of the adapter. As in a run, the engine scores the base once, with
nothing beside it, and the version before in a sync of its own, beside other prompts.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import shutil
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import lora_sampling
from command_line import argument_parser
from machine_info import machine_info
from safetensors.torch import load_file, save_file

from skylite.adapters.manifest import Canary, read_manifest
from skylite.config.loading import read_run_config
from skylite.config.train import RunConfig
from skylite.data.prompts import read_prompts
from skylite.data.tokenizer import load_tokenizer
from skylite.engine.canary import CanaryTokens, EarlierAnswers, Row, verify
from skylite.engine.client import Sampling, VllmClient
from skylite.engine.server_command import BASE_NAME
from skylite.errors import EngineFailed, SyncFailed
from skylite.run.files import write_json
from skylite.run.run_dir import AdapterVersion, adapter_name
from tests.damaged_adapters import DAMAGE

KINDS = ("right", "base", "before", "half")
TOKENS = 8
"""Sampled for each completion: the canary is answered long before."""


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--data", type=Path, required=True, help="the run's data folder")
    parser.add_argument("--versions", type=int, nargs="+", default=[1, 2, 4, 8, 20])
    parser.add_argument("--trials", type=int, default=10, help="of each version and kind")
    parser.add_argument("--alone", action="store_true", help="nothing is sampled beside the canary")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    run = read_run_config(args.run / "config.json")
    prompts = encoded_prompts(
        args.data, Path(run.resolved.model_path), 2 * run.config.rollout.prompts_per_step
    )
    with tempfile.TemporaryDirectory(prefix="skylite-") as folder:
        try:
            rows = asyncio.run(measure(args, run, prompts, Path(folder)))
        except EngineFailed as error:
            raise SystemExit(f"{error}\n{Path(folder, 'engine.log').read_text()[-4000:]}") from None
    if args.out:
        facts = {"trials": args.trials, "alone": args.alone}
        write_json(args.out, machine_info() | facts | {"rows": rows})


def encoded_prompts(data: Path, model: Path, count: int) -> list[list[int]]:
    prompts, _ = read_prompts(data / "train.parquet")
    with contextlib.closing(load_tokenizer(model)) as tokenizer:
        return tokenizer.encode_chats([p.messages for p in prompts[:count]])


async def measure(
    args: argparse.Namespace, run: RunConfig, prompts: list[list[int]], folder: Path
) -> list[dict[str, Any]]:
    """A row of figures for each version and kind."""
    adapters, rows = args.run / "adapters", []
    engine = argparse.Namespace(
        model=Path(run.resolved.model_path), dtype="bfloat16", rank=run.config.lora.rank
    )
    variant = lora_sampling.Variant("engine", cpu_lora="dense")
    first = adapters / adapter_name(args.versions[0])
    with lora_sampling.running(variant, engine, folder, first) as http:
        http.post("/v1/unload_lora_adapter", json={"lora_name": lora_sampling.ADAPTER}).raise_for_status()
        for version in args.versions:
            async with serving(http, folder, adapters, version) as client:
                for kind in KINDS:
                    found = [
                        await again_if_cut_off(args, run, client, kind, version, prompts)
                        for _ in range(args.trials)
                    ]
                    rows.append({"version": version, "served": kind, **figures(found)})
                    print(json.dumps(rows[-1]), found[0].said, flush=True)
    return rows


def figures(found: list[Trial]) -> dict[str, Any]:
    """Of the trials of one version and kind."""
    return {
        "refused": sum(bool(t.said) for t in found),
        "by_bits": sum("to the bit" in t.said for t in found),
        "same_as_base": [round(t.same_as_base, 3) for t in found],
        "same_as_before": [round(t.same_as_before, 3) for t in found],
    }


def half_of(adapter: Path, folder: Path) -> Path:
    """A copy of the adapter that does half as much."""
    half = folder / f"half-of-{adapter.name}"
    half.mkdir()
    shutil.copy(adapter / "adapter_config.json", half)
    name = "adapter_model.safetensors"
    save_file(DAMAGE["half"](load_file(adapter / name)), half / name)
    return half


@dataclass(frozen=True, slots=True)
class Impostor:
    """A scorer that answers for one model with another."""

    client: VllmClient
    served: Mapping[str, str]
    answers: dict[tuple[int, ...], list[float]]
    """By sequence, for the models in `served`."""

    @property
    def name(self) -> str:
        return self.client.name

    async def prompt_logprobs(self, model: str, token_ids: Sequence[int]) -> list[float]:
        found = await self.client.prompt_logprobs(self.served.get(model, model), token_ids)
        if model in self.served:
            self.answers[tuple(token_ids)] = found
        return found

    def same_tokens(self, earlier: Mapping[CanaryTokens, Row]) -> float:
        """Share of tokens with the same bits as in answers of another model to the same sequences."""
        pairs = [
            pair
            for ids, row in earlier.items()
            if ids in self.answers
            for pair in zip(self.answers[ids], row, strict=True)
        ]
        return sum(a == b for a, b in pairs) / len(pairs)


@contextlib.asynccontextmanager
async def serving(
    http: httpx.Client, folder: Path, adapters: Path, version: int
) -> AsyncIterator[VllmClient]:
    """The engine with a version, the one before, and half of the version."""
    client = VllmClient("engine", folder / "engine.sock")
    folders = {adapter_name(v): adapters / adapter_name(v) for v in (version, version - 1)}
    folders["half"] = half_of(adapters / adapter_name(version), folder)
    for name, path in folders.items():
        body = {"lora_name": name, "lora_path": str(path)}
        http.post("/v1/load_lora_adapter", json=body).raise_for_status()
    try:
        yield client
    finally:
        for name in folders:
            await client.unload_adapter(name)
        await client.aclose()


@dataclass(frozen=True, slots=True)
class Trial:
    said: str
    """Against the adapter; empty if the canary accepted it."""
    same_as_base: float
    """Share of tokens with the same bits."""
    same_as_before: float


async def again_if_cut_off(*what: Any) -> Trial:
    """A trial, once more if vLLM closed an idle connection under it. A run asks again, too."""
    with contextlib.suppress(EngineFailed):
        return await trial(*what)
    return await trial(*what)


async def trial(
    args: argparse.Namespace,
    run: RunConfig,
    client: VllmClient,
    kind: str,
    version: int,
    prompts: list[list[int]],
) -> Trial:
    now, before = (AdapterVersion(v, args.run / "adapters" / adapter_name(v)) for v in (version, version - 1))
    served = {"right": now.name, "base": BASE_NAME, "before": before.name, "half": "half"}[kind]
    canary, older = (read_manifest(a.path).canary for a in (now, before))
    sampling = Sampling(temperature=1, top_p=1, top_k=0, max_tokens=TOKENS, stop_token_ids=(), seed=version)
    middle = len(prompts) // 2

    def load(name: str, beside: list[list[int]]) -> list[Any]:
        return [
            client.sample(name, ids, run.config.rollout.group_size, sampling, version)
            for ids in ([] if args.alone else beside)
        ]

    earlier = EarlierAnswers()
    await verify(client, now, canary, None, earlier)
    await asyncio.gather(verify(client, before, older, None, earlier), *load(before.name, prompts[:middle]))
    base, rows_before = dict(earlier.base), {ids: s.engine for ids, s in earlier.before.items()}
    impostor = Impostor(client, {now.name: served}, {})
    said, *_ = await asyncio.gather(verdict(impostor, now, canary, earlier), *load(served, prompts[middle:]))
    return Trial(str(said), impostor.same_tokens(base), impostor.same_tokens(rows_before))


async def verdict(client: Impostor, now: AdapterVersion, canary: Canary, earlier: EarlierAnswers) -> str:
    try:
        await verify(client, now, canary, None, earlier)
    except SyncFailed as error:
        return error.what
    return ""


if __name__ == "__main__":
    main()
