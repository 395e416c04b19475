"""At which step do the canary and the judged rollouts find a wrong adapter in bfloat16? Without vLLM.

    python benchmarks/canary_and_rollouts_bf16.py --raw /tmp/raw.json --out FILE

A random Llama (6 layers, width 128) trains in bfloat16 for 12 steps. In place of the engine, transformers'
plain forward with PEFT computes in bfloat16: other kernels, so other rounding. It samples 16 completions of
40 tokens for prompts of 24 to 150 tokens from the base, and scores them with every adapter, right or damaged.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from canary_bf16 import BASE, in_chunks
from command_line import argument_parser
from machine_info import machine_info
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from skylite.adapters.manifest import Canary
from skylite.engine.canary import DEFAULT_TOLERANCE, EarlierAnswers, verify
from skylite.errors import SyncFailed
from skylite.model.checked_shortcuts import enable_shortcuts
from skylite.model.load_adapter import load_adapter_file
from skylite.model.packing import pack_tokens
from skylite.model.policy import Policy, load_policy, score
from skylite.orchestrator.judge_rollouts import MIN_TOKENS, RolloutJudge, mean_gap
from skylite.run.files import write_json
from skylite.run.run_dir import AdapterVersion, adapter_name
from skylite.trainer.canary import base_canary_logprobs, canary_logprobs, sequences_of
from skylite.trainer.optimizer import make_optimizer
from skylite.trainer.publish_adapter import adapter_tensors
from skylite.trainer.rollout_gaps import CLIP, depth_edges
from skylite.trainer.step import train_step
from skylite.types import Sample
from tests.damaged_adapters import DAMAGE
from tests.rows import Row, groups_of
from tests.small_run import lone_rank, resolved, settings

VOCAB, CANARY, VERSIONS, STEPS = 256, 24, [1, 2, 4, 8, 12], 12
PROMPT_LENGTHS = (24, 60, 100, 150)
GROUP, TOKENS = 4, 40
BEFORE, RIGHT = "version-before", "right"
Rows = list[list[float]]


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--draws", type=int, default=1000)
    parser.add_argument("--raw", type=Path, required=True)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if not args.raw.exists():
        with tempfile.TemporaryDirectory(prefix="skylite-") as text:
            write_json(args.raw, measured(Path(text), args.lr))
    raw = json.loads(args.raw.read_text())
    drawn = Rollouts(raw, raw["depths"], args.draws)
    result = {
        "lr": args.lr,
        "noise": drawn.noise,
        "canary": asyncio.run(judged(raw)),
        "rollouts": {kind: drawn.of_kind(kind) for kind in kinds_of(raw)},
    }
    print(json.dumps(result, indent=1))
    if args.out:
        write_json(args.out, machine_info() | result)


def measured(folder: Path, lr: float) -> dict[str, Any]:
    """The raw logprobs of trainer and engine."""
    model = make_model(folder / "model")
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16, attn_implementation="eager")
    rows = sampled(plain.eval())
    samples = [s for group in groups_of(rows) for t in group.trajectories for s in t.samples]
    random = torch.Generator().manual_seed(1)
    canary = torch.randint(0, VOCAB, (CANARY, 24), generator=random).tolist()
    trainer = trained(model, folder, rows, samples, canary, lr)
    print("trained", flush=True)
    engine = {BASE: scores(plain, canary, samples)}
    for name, path in served(folder).items():
        with_adapter = PeftModel.from_pretrained(plain, str(path), autocast_adapter_dtype=False).eval()
        engine[name] = scores(with_adapter.to(torch.bfloat16), canary, samples)
        plain = with_adapter.unload()
    depths = [[len(s.prompt_token_ids) + k for k in range(len(s.completion_token_ids))] for s in samples]
    return {"depths": depths, "versions": VERSIONS, "canary": canary, "trainer": trainer, "engine": engine}


def make_model(folder: Path) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=128, intermediate_size=256, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, initializer_range=0.08, tie_word_embeddings=False,
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).to(torch.bfloat16).save_pretrained(folder)
    return folder


@torch.no_grad()
def sampled(plain: Any) -> list[Row]:
    random = torch.Generator().manual_seed(0)
    rows = []
    for group, length in enumerate(PROMPT_LENGTHS):
        prompt = torch.randint(0, VOCAB, (length,), generator=random)
        torch.manual_seed(group)
        ids = plain.generate(
            prompt.repeat(GROUP, 1), do_sample=True, max_new_tokens=TOKENS, top_k=0, top_p=1.0
        )
        for k, row in enumerate(ids.tolist()):
            answer = row[length:]
            rows.append(Row(group=group, prompt_token_ids=prompt.tolist(), completion_token_ids=answer,
                            rollout_logprobs=[-1.0] * TOKENS, reward=float(torch.randn(1, generator=random)),
                            prompt_id=f"p{group}/{k}" if not k else ""))  # fmt: skip
    return rows


def trained(
    model: Path, folder: Path, rows: list[Row], samples: list[Sample], canary: list[list[int]], lr: float
) -> dict[str, Any]:
    """Train, keep each version in `folder`, and score with each: the canary in float32, as in a run."""
    own = settings(optim={"lr": lr, "max_grad_norm": 1.0}, lora={"rank": 16, "alpha": 16})
    where = resolved(model, folder).model_copy(update={"dtype": "bfloat16"})
    with lone_rank() as dist:
        policy, _ = enable_shortcuts(load_policy(where, own, dist), canary[0])
        found: dict[str, Any] = {BASE: {"canary": in_chunks(policy, canary, base_canary_logprobs)}}
        optimizer = make_optimizer("policy", policy.lora, lr, 1.0, own.optim)
        keep(policy, folder, 0)
        for step in range(1, STEPS + 1):
            logprobs = rollout_logprobs(policy, samples)
            fresh = [Row(**{**fields(r), "rollout_logprobs": x}) for r, x in zip(rows, logprobs, strict=True)]
            train_step(policy, optimizer, groups_of(fresh), step, own, dist)
            keep(policy, folder, step)
        for version in range(STEPS + 1):
            load_adapter_file(folder / adapter_name(version), policy.lora)
            found[adapter_name(version)] = {
                "canary": in_chunks(policy, canary, canary_logprobs),
                "rollouts": rollout_logprobs(policy, samples),
            }
    return found


def fields(row: Row) -> dict[str, Any]:
    return {name: getattr(row, name) for name in row.__dataclass_fields__}


def keep(policy: Policy, folder: Path, version: int) -> None:
    path = folder / adapter_name(version)
    path.mkdir()
    save_file(
        {n: t.contiguous() for n, t in adapter_tensors(policy).items()}, path / "adapter_model.safetensors"
    )
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": "model", "r": 16,
              "lora_alpha": 16, "target_modules": policy.target_modules, "bias": "none"}  # fmt: skip
    (path / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")


def served(folder: Path) -> dict[str, Path]:
    """All versions, and the damaged ones of VERSIONS."""
    found = {adapter_name(v): folder / adapter_name(v) for v in range(STEPS + 1)}
    for version in VERSIONS:
        right = folder / adapter_name(version)
        tensors = load_file(right / "adapter_model.safetensors")
        for kind, damage in DAMAGE.items():
            path = folder / f"{kind}-of-{adapter_name(version)}"
            path.mkdir()
            shutil.copy(right / "adapter_config.json", path)
            damaged = {n: t.contiguous() for n, t in damage(tensors).items()}
            save_file(damaged, path / "adapter_model.safetensors")
            found[path.name] = path
    return found


@torch.no_grad()
def scores(model: Any, canary: list[list[int]], samples: list[Sample]) -> dict[str, Any]:
    rows = [s.prompt_token_ids + s.completion_token_ids for s in samples]
    together = [together_scored(model, rows[k : k + GROUP]) for k in range(0, len(rows), GROUP)]
    return {
        "canary": together_scored(model, canary).tolist(),
        "rollouts": [row[-TOKENS:].tolist() for part in together for row in part],
    }


def together_scored(model: Any, rows: Sequence[list[int]]) -> Tensor:
    ids = torch.tensor(rows)
    table = model(ids, use_cache=False).logits[:, :-1].float().log_softmax(dim=-1)
    chosen: Tensor = table.gather(2, ids[:, 1:, None])[..., 0]
    return chosen


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

    def __init__(self, scored: dict[str, Any], depths: list[list[int]], draws: int) -> None:
        self.scored, self.depths, self.draws = scored, depths, draws
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
                judge = RolloutJudge("bfloat16", 1.0, "stop")
                judge.reference, _ = mean_gap(self.draw(first, rng))
                bins = self.draw(gaps, rng)
                fault, is_sure = judge.fault(bins, self.noise, moved)
                warned += bool(fault)
                stops += is_sure
                growth.append(mean_gap(bins)[0] / judge.reference)
                large = [row["gap_mean"] for row in bins if row["tokens"] >= MIN_TOKENS["bfloat16"]]
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


async def judged(scored: dict[str, Any]) -> dict[str, Any]:
    """By kind: the first version that the canary refuses, and those that it passes as too small to tell."""
    return {kind: await canary_of(scored, kind) for kind in kinds_of(scored)}


def kinds_of(scored: dict[str, Any]) -> list[str]:
    damaged = {name.split("-of-")[0] for name in scored["engine"] if "-of-" in name}
    return [RIGHT, BASE, BEFORE, *(kind for kind in DAMAGE if kind in damaged)]


async def canary_of(scored: dict[str, Any], kind: str) -> dict[int, str]:
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
            reading = await verify(engine, adapter, canary, DEFAULT_TOLERANCE["bfloat16"], earlier)
            outcome[version] = f"{reading.verdict} ({reading.visible:.2g})"
        except SyncFailed as error:
            outcome[version] = "refused"
            print(kind, version, error.what, flush=True)
    return outcome


if __name__ == "__main__":
    main()
