"""At which step do the canary and the judged rollouts find a wrong adapter in bfloat16? Without vLLM.

    python benchmarks/canary_and_rollouts_bf16.py --raw /tmp/raw.json --out FILE

A random Llama (6 layers, width 128) trains in bfloat16 for 12 steps. In place of the engine, transformers'
plain forward with PEFT computes in bfloat16: other kernels, so other rounding. It samples 16 completions of
40 tokens for prompts of 24 to 150 tokens from the base, and scores them with every adapter, right or damaged.
canary_and_rollouts.py does the same with vLLM and a real run.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from canary_and_rollouts import Rollouts, judged, kinds_of, rollout_logprobs
from canary_bf16 import BASE, in_chunks
from command_line import argument_parser
from machine_info import machine_info
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from skylite.model.checked_shortcuts import enable_shortcuts
from skylite.model.load_adapter import load_adapter_file
from skylite.model.policy import Policy, load_policy
from skylite.run.files import write_json
from skylite.run.run_dir import adapter_name
from skylite.trainer.canary import base_canary_logprobs, canary_logprobs
from skylite.trainer.optimizer import make_optimizer
from skylite.trainer.publish_adapter import adapter_tensors
from skylite.trainer.step import train_step
from skylite.types import Sample
from tests.damaged_adapters import DAMAGE
from tests.rows import Row, groups_of
from tests.small_run import lone_rank, resolved, settings

VOCAB, CANARY, VERSIONS, STEPS = 256, 24, [1, 2, 4, 8, 12], 12
PROMPT_LENGTHS = (24, 60, 100, 150)
GROUP, TOKENS = 4, 40


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
    drawn = Rollouts(raw, raw["depths"], "bfloat16", args.draws)
    result = {
        "lr": args.lr,
        "noise": drawn.noise,
        "canary": asyncio.run(judged(raw, "bfloat16")),
        "rollouts": {kind: drawn.of_kind(kind) for kind in kinds_of(raw)},
    }
    print(json.dumps(result, indent=1))
    if args.out:
        write_json(args.out, machine_info() | result)


def measured(folder: Path, lr: float) -> dict[str, Any]:
    """The raw logprobs, as canary_and_rollouts.py keeps them."""
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


if __name__ == "__main__":
    main()
