"""Predicted against measured memory: passes and engines on a CPU, and fake tensors of GPU shapes.

    python benchmarks/memory.py --model MODEL_FOLDER --out benchmarks/results/memory_cpu.json
    python benchmarks/memory.py --runs RUN_FOLDERS
    python benchmarks/memory.py --fake benchmarks/results/fake_step.json

The prediction is resources/gpu_memory_plan.py. A pass is a forward and backward pass over one group, in a
process of its own; its bytes are the growth of the resident set. --engines also starts a vLLM server and sums
the memory that its processes share or own (PSS). --runs compares with the largest resident set of the trainer
that each run recorded. --fake compares with peaks of fake tensors (benchmarks/README.md).
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from shared import argument_parser, machine_info

from skylite.config.train import RunConfig, TrainConfig
from skylite.engine.model_sizes import model_sizes, sizes_of
from skylite.engine.vllm.memory import engine_memory
from skylite.processes.torchrun import trainer_env
from skylite.resources import gpu_memory_plan
from skylite.run.files import write_json
from skylite.run.metrics_file import read_metrics
from skylite.run.run_dir import RunDir

PROMPT, GROUP = 128, 8
GIB = 2**30


def main() -> None:
    args = parse_arguments()
    if args.one:
        print(json.dumps(measure_pass(args.model, *args.one.split(","))))
        return
    rows = []
    for row in compared(args):
        print(json.dumps(row), flush=True)
        rows.append(row)
    if args.out:
        write_json(args.out, machine_info() | {"rows": rows})


def parse_arguments() -> argparse.Namespace:
    parser = argument_parser(__doc__)
    parser.add_argument("--model", type=Path, help="folder of a model, to measure on this machine's CPU")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[512, 2048])
    parser.add_argument("--checkpointing", nargs="+", default=["none", "selective", "full"])
    parser.add_argument("--engines", nargs="*", default=[], help="dtypes of the servers to start")
    parser.add_argument("--engine-models", nargs="*", type=Path, help="folders; default: --model")
    parser.add_argument("--runs", nargs="*", type=Path, default=[], help="folders of runs on a CPU, one rank")
    parser.add_argument("--fake", type=Path, help="the file of peaks of fake tensors")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def compared(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The rows, as they are measured."""
    if args.fake:
        yield from map(fake_row, json.loads(args.fake.read_text())["rows"])
    yield from map(compare_run, args.runs)
    if args.model:
        for dtype, tokens, mode in itertools.product(args.dtypes, args.tokens, args.checkpointing):
            yield compare_pass(args.model, dtype, tokens, mode)
        for model, dtype in itertools.product(args.engine_models or [args.model], args.engines):
            yield compare_engine(model, dtype)


def settings(
    tokens: int, checkpointing: str, attention: str = "sdpa", prompt: int = PROMPT, group: int = GROUP
) -> TrainConfig:
    tree = {
        "lora": {"rank": 32, "alpha": 32},
        "trainer": {"checkpointing": checkpointing, "attention": attention},
        "rollout": {
            "max_prompt_tokens": prompt,
            "max_completion_tokens": (tokens - prompt) // group,
            "group_size": group,
        },
    }
    return TrainConfig.model_validate(tree)


def compare_pass(model: Path, dtype: str, tokens: int, checkpointing: str) -> dict[str, Any]:
    """One case in a new process, so that no memory of an earlier pass is counted."""
    case = f"{dtype},{tokens},{checkpointing}"
    command = [sys.executable, __file__, "--model", str(model), "--one", case]
    env = os.environ | trainer_env(1)
    done = subprocess.run(command, env=env, check=True, capture_output=True, text=True)
    measured = json.loads(done.stdout.splitlines()[-1])
    config = settings(tokens, checkpointing)
    sizes = model_sizes(model, config.lora, config.critic_lora)
    trainer = gpu_memory_plan.trainer_memory(sizes, config, "cpu", dtype)
    names = {"what": "pass", "dtype": dtype, "checkpointing": checkpointing, "tokens": measured["tokens"]}
    return names | {
        **ratio("pass", trainer.total(measured["tokens"]) - trainer.state(), measured["pass_bytes"]),
        **ratio("rank", trainer.total(measured["tokens"]), measured["process_bytes"]),
    }


def compare_run(folder: Path) -> dict[str, Any]:
    """The trainer of a whole run: loading, probes, every step with its update, canary and checkpoints."""
    run = RunDir(folder)
    run_config = RunConfig.model_validate_json(run.config_path.read_text(encoding="utf-8"))
    config, dtype = run_config.config, run_config.resolved.placement.dtype
    sizes = model_sizes(run_config.resolved.model.path, config.lora, config.critic_lora)
    trainer = gpu_memory_plan.trainer_memory(sizes, config, "cpu", dtype)
    tokens, last = config.trainer.tokens_per_micro_batch, read_metrics(run.metrics_path)[-1]
    assert isinstance(tokens, int)
    names = {"what": "run", "dtype": dtype, "checkpointing": config.trainer.checkpointing, "tokens": tokens}
    return names | {"steps": last["step"], **ratio("rank", trainer.total(tokens), last["mem/rss_peak_bytes"])}


def ratio(name: str, predicted: float, measured: float) -> dict[str, float]:
    return {
        f"{name}_predicted_gib": round(predicted / GIB, 3),
        f"{name}_measured_gib": round(measured / GIB, 3),
        f"{name}_ratio": round(predicted / measured, 3),
    }


def measure_pass(model: Path, dtype: str, tokens: str, checkpointing: str) -> dict[str, float]:
    """Bytes of a forward and backward pass over one group, with the trainer's own functions."""
    import torch

    from skylite.model.fast_path_check import enable_shortcuts
    from skylite.model.packing import pack_tokens
    from skylite.model.policy import load_policy, score
    from skylite.trainer.micro_batch_memory import peak_bytes, release_cached_memory, reset_peak_bytes
    from skylite.trainer.optimizer import make_optimizer
    from skylite.types import completion_example
    from tests.decisions import resolved
    from tests.small_run import lone_rank

    config = settings(int(tokens), checkpointing)
    compute: Literal["float32", "bfloat16"] = "float32" if dtype == "float32" else "bfloat16"
    decided = resolved(model, Path(), placement={"dtype": compute, "device": "cpu"})
    with lone_rank() as dist:
        policy = load_policy(decided, config, dist)
        policy, _ = enable_shortcuts(policy, list(range(20, 44)))
        make_optimizer("policy", policy.lora, 1e-4, 1.0, config.optim)
        length = config.rollout.max_completion_tokens
        packed = pack_tokens(
            [completion_example([1] * PROMPT, [2 + i] * (length + 1), trajectory=i) for i in range(GROUP)],
            policy.packing,
            policy.device,
        )
        release_cached_memory()
        before = reset_peak_bytes(policy.device)
        logprobs, _ = score(policy, packed, temperature=1.0)
        torch.autograd.grad(logprobs.sum(), list(policy.lora.values()), allow_unused=True)
        peak = peak_bytes(policy.device)
    return {"tokens": packed.num_nodes, "pass_bytes": peak - before, "process_bytes": peak}


def compare_engine(model: Path, dtype: str) -> dict[str, Any]:
    """A vLLM server of benchmarks/lora_sampling.py, after it sampled."""
    import lora_sampling
    import psutil

    config = settings(512, "selective")
    sizes = model_sizes(model, config.lora, config.critic_lora)
    variant = lora_sampling.Variant("engine", cpu_lora="merged" if dtype == "float32" else "dense")
    engine = engine_memory(sizes, config, "cpu", dtype, max_loras=2, cpu_lora=variant.cpu_lora)
    args = argparse.Namespace(model=model, dtype=dtype, rank=32)
    with tempfile.TemporaryDirectory(prefix="skylite-") as text:
        folder = Path(text)
        adapter = lora_sampling.write_adapter(model, folder / lora_sampling.ADAPTER, 32)
        # The weights were loaded into this process too; only its children count.
        with lora_sampling.running(variant, args, folder, adapter) as http:
            prompts = lora_sampling.make_prompts(model)
            lora_sampling.sample(http, lora_sampling.ADAPTER, prompts, 16, "memory")
            below = psutil.Process().children(recursive=True)
            measured = sum(p.memory_full_info().pss for p in below)
    spec = lora_sampling.engine_spec(variant, args, Path())
    predicted = engine.before_kv() + spec.kv_cache_gib * GIB
    names = {"what": "engine", "parameters": sizes.parameters, "dtype": dtype}
    return names | ratio("engine", predicted, measured)


def fake_row(row: dict[str, Any]) -> dict[str, Any]:
    """A row of the fake tensors: weights, LoRA with its gradients, and the pass; no moments, no process."""
    prompt, group, nodes = row["prompt"], row["group"], row["nodes"]
    config = settings(nodes, row["checkpointing"], row["attention"], prompt, group)
    any_length = settings(prompt + 2048 * group, row["checkpointing"], row["attention"], prompt, group)
    tensors = meta_shapes(row["shape"])
    adapted = {n.removesuffix(".weight") for n, s in tensors.items() if ".layers." in n and len(s) == 2}
    sizes = sizes_of(
        tensors, {"architectures": ["Qwen2ForCausalLM"]}, dict.fromkeys(adapted, config.lora.rank)
    )
    trainer = gpu_memory_plan.trainer_memory(sizes, config, "cuda", "bfloat16")
    without = trainer.process + 5 * gpu_memory_plan.FLOAT32 * sizes.lora
    names = {k: row[k] for k in ("shape", "checkpointing", "attention", "nodes", "prompt", "group")}
    exact, worst = (
        trainer.total(nodes, group * prompt),
        trainer.total(nodes, gpu_memory_plan.worst_copies(nodes, any_length)),
    )
    return {"what": "fake", **names} | {
        **ratio("rank", exact - without, row["peak"]),
        **ratio("worst", worst - without, row["peak"]),
    }


@functools.cache
def meta_shapes(shape: str) -> dict[str, list[int]]:
    """The tensors of a model of benchmarks/gpu_sizes.py, without memory for them."""
    import torch
    import transformers
    from gpu_sizes import model_config

    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(model_config(shape))
    # As in a file: a tied head is not stored.
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    return {name: list(t.shape) for name, t in model.state_dict().items() if name not in tied}


if __name__ == "__main__":
    main()
