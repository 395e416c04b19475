"""A whole step against TRL's GRPOTrainer with PEFT, same work in one run: 4 GSM8K prompts x 8 completions of at most 128 tokens, r 32, T 1.

    python benchmarks/step_vs_trl.py --gsm8k FOLDER_WITH_train.jsonl --out benchmarks/results/step_vs_trl.json

Both sides get the same model, the same questions in the same words, the same type of number, the same threads and the same memory
allocator and its settings (--trl-allocator plain: what a TRL user gets who sets nothing). TRL samples with transformers' generate, as it
does without a GPU; --trl-checkpointing gives it its default, activation checkpointing. The sides take turns
(--rounds), each in a process of its own. The first step of each is left out. Ratios are TRL's median over ours. Both get a
reward that differs within every group (the model hardly ever earns GSM8K's): we do not compute a group without a gradient, and TRL does.

mfu: of our train phase, by the arithmetic of train_phase.py, against a large matrix product on the same threads, between the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from surroundings import about
from sync import plain_io

from skylite.data.prompts import read_prompts
from skylite.hub.resolve import resolve_model
from skylite.processes.machine import cpu_cores
from skylite.processes.torchrun import trainer_env
from skylite.run.files import write_json
from skylite.run.metrics import read_metrics
from skylite.run.run_dir import RunDir, published_versions

NUM_QUESTIONS = 64
REWARD = """def score(prompt, completion):
    return 1.0 if completion.strip() == prompt.answer else len(completion) % 7 / 8
"""


def main() -> None:
    args = parse_arguments()
    model = resolve_model(args.model, say=print).path
    if args.inner:
        trl_steps(args, model)
        return
    with tempfile.TemporaryDirectory(prefix="skylite-") as folder:
        data = prepare(args.gsm8k, Path(folder))
        peaks = [matrix_peak(args)]
        ours: list[dict[str, float]] = []
        theirs: list[dict[str, float]] = []
        for index in range(args.rounds):
            ours += skylite_steps(args, data, Path(folder, f"run{index}"))
            peaks.append(matrix_peak(args))
            theirs += in_own_process(args, data)
            peaks.append(matrix_peak(args))
            print(json.dumps(compared(ours, theirs), indent=1), flush=True)
        io = plain_io(published_versions(RunDir(Path(folder, "run0")).default_adapters)[-1].weights_path)
    mfu = utilisation(model, ours, statistics.median(peaks))
    result = {
        **compared(ours, theirs),
        **mfu,
        **sync_share(ours, io["write_s"] + io["read_s"]),
        **lora_sampling(),
        **about(),
        "dtype": args.dtype,
        "checkpointing": args.checkpointing,
        "trl_allocator": args.trl_allocator,
        "skylite_steps": ours,
        "trl_steps": theirs,
    }
    print(json.dumps({k: v for k, v in result.items() if not isinstance(v, list)}, indent=1))
    if args.out:
        write_json(args.out, result)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gsm8k", type=Path, required=True, help="folder with train.jsonl as released")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3, help="a round and side; the first is not counted")
    parser.add_argument("--budget", type=int, default=1200, help="our trainer.tokens_per_micro_batch")
    parser.add_argument(
        "--checkpointing", choices=["none", "selective", "full"], default="selective", help="ours"
    )
    parser.add_argument("--trl-micro", type=int, default=8, help="TRL's per_device_train_batch_size")
    parser.add_argument("--trl-checkpointing", action="store_true")
    parser.add_argument("--trl-allocator", choices=["ours", "plain"], default="ours")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--inner", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def prepare(gsm8k: Path, folder: Path) -> Path:
    """The questions as a prepared data set: system text and question, which both sides ask in these words."""
    questions = folder / "questions.jsonl"
    lines = (gsm8k / "train.jsonl").read_text(encoding="utf-8").splitlines()[:NUM_QUESTIONS]
    questions.write_text("\n".join(lines) + "\n", encoding="utf-8")
    out = folder / "data"
    os.environ["XDG_STATE_HOME"] = str(folder)  # the reward that is named here is no choice of the user's
    (folder / "reward.py").write_text(REWARD, encoding="utf-8")
    reward = f"{folder / 'reward.py'}:score"
    command = [
        skylite(),
        "prepare",
        str(questions),
        "--question",
        "question",
        "--answer",
        "answer",
        "--reward",
        reward,
        "--out",
        str(out),
    ]
    subprocess.run(command, check=True)
    return out


def skylite() -> str:
    return str(Path(sys.executable).with_name("skylite"))


def skylite_steps(args: argparse.Namespace, data: Path, run: Path) -> list[dict[str, float]]:
    """Our steps but the first and the last: at a run's end nothing is sampled beside the canary, and a checkpoint is waited for."""
    settings = {
        "model.name": args.model, "model.dtype": args.dtype, "rollout.prompts_per_step": 4, "rollout.group_size": 8,
        "rollout.max_completion_tokens": 128, "rollout.max_prompt_tokens": 512, "optim.lr": 1e-4, "engine.kv_cache_gib": 0.5,
        "trainer.tokens_per_micro_batch": args.budget, "trainer.checkpointing": args.checkpointing, "num_steps": args.steps + 1,
        "eval.limit": 0,
    }  # fmt: skip
    recipe = run.with_suffix(".toml")
    recipe.write_text("", encoding="utf-8")
    command = [
        skylite(),
        "train",
        "--recipe",
        str(recipe),
        "--data",
        str(data),
        "--rank",
        "32",
        "--alpha",
        "32",
        "--run",
        str(run),
    ]
    subprocess.run([*command, *(x for k, v in settings.items() for x in ("--set", f"{k}={v}"))], check=True)
    metrics = read_metrics(RunDir(run).metrics_path)[1:-1]
    return [
        {
            "step_s": m["time/step_s"],
            "sample_s": m["time/rollout_s"],
            "train_s": m["time/train_s"],
            "publish_s": m["time/publish_s"],
            "load_s": m["time/load_s"],
            "canary_s": m["time/canary_s"],
            "overhead_s": m["time/overhead_s"],
            "completion_tokens": m["tokens/completion"],
            "tokens_total": m["tokens/total"],
            "tokens_computed": m["tokens/unique"],
            "peak_gib": m["mem/rss_peak_bytes"] / 2**30,
        }
        for m in metrics
    ]


def in_own_process(args: argparse.Namespace, data: Path) -> list[dict[str, float]]:
    command = [
        sys.executable,
        __file__,
        "--inner",
        str(data),
        "--gsm8k",
        str(args.gsm8k),
        "--model",
        args.model,
        "--dtype",
        args.dtype,
    ]
    command += ["--steps", str(args.steps), "--trl-micro", str(args.trl_micro)]
    command += ["--trl-checkpointing"] if args.trl_checkpointing else []
    ours = trainer_env(cpu_cores())
    plain = {name: ours[name] for name in ("HF_HUB_OFFLINE", "TOKENIZERS_PARALLELISM", "OMP_NUM_THREADS")}
    env = os.environ | (ours if args.trl_allocator == "ours" else plain)
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True)
    steps: list[dict[str, float]] = json.loads(done.stdout.splitlines()[-1])
    return steps[1:]


def trl_steps(args: argparse.Namespace, model: Path) -> None:
    """TRL's side; prints its steps as JSON."""
    import datasets
    import peft
    import transformers
    import trl

    prompts, _ = read_prompts(args.inner / "train.parquet")
    data = datasets.Dataset.from_list([{"prompt": p.messages, "gold": p.answer} for p in prompts])

    def reward(completions: list[Any], gold: list[str], **_: Any) -> list[float]:
        said = [c[0]["content"] for c in completions]
        return [1.0 if c.strip() == g else len(c) % 7 / 8 for c, g in zip(said, gold, strict=True)]

    class Clock(transformers.TrainerCallback):  # type: ignore[misc]
        def __init__(self) -> None:
            self.steps: list[dict[str, float]] = []
            self.sample_s = 0.0

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.started, self.sample_s = time.perf_counter(), 0.0

        def on_step_end(self, *_: Any, **__: Any) -> None:
            seconds = time.perf_counter() - self.started
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
            self.steps.append(
                {
                    "step_s": seconds,
                    "sample_s": self.sample_s,
                    "train_s": seconds - self.sample_s,
                    "completion_tokens": self.tokens,
                    "peak_gib": peak,
                }
            )

    clock = Clock()

    class Timed(trl.GRPOTrainer):  # type: ignore[misc]
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            started = time.perf_counter()
            found = super()._generate_and_score_completions(inputs)
            clock.sample_s += time.perf_counter() - started
            clock.tokens = float(found["completion_mask"].sum())
            return found

    config = trl.GRPOConfig(
        output_dir=str(args.inner.parent / "trl"), use_cpu=True, bf16=args.dtype == "bfloat16", fp16=False,
        gradient_checkpointing=args.trl_checkpointing, per_device_train_batch_size=args.trl_micro,
        gradient_accumulation_steps=32 // args.trl_micro, num_generations=8, max_completion_length=128, learning_rate=1e-4,
        lr_scheduler_type="constant", beta=0.0, temperature=1.0, max_steps=args.steps, save_strategy="no", report_to=[], use_vllm=False,
        disable_tqdm=True, model_init_kwargs={"dtype": args.dtype},
    )  # fmt: skip
    lora = peft.LoraConfig(r=32, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    Timed(
        model=str(model),
        reward_funcs=reward,
        args=config,
        train_dataset=data,
        peft_config=lora,
        callbacks=[clock],
    ).train()
    print("\n" + json.dumps(clock.steps))


def compared(ours: list[dict[str, float]], theirs: list[dict[str, float]]) -> dict[str, float]:
    """Ratios of medians; tokens beside them, because each side draws its own completions."""

    def median(steps: list[dict[str, float]], key: str) -> float:
        return statistics.median(s[key] for s in steps)

    tokens = median(theirs, "completion_tokens") / median(ours, "completion_tokens")
    return {
        "step_ratio": round(median(theirs, "step_s") / median(ours, "step_s"), 2),
        "train_ratio": round(median(theirs, "train_s") / median(ours, "train_s"), 2),
        "sample_ratio": round(median(theirs, "sample_s") / median(ours, "sample_s"), 2),
        "completion_tokens_ratio": round(tokens, 3),
        "trainer_peak_gib": round(max(s["peak_gib"] for s in ours), 2),
        "trl_peak_gib": round(max(s["peak_gib"] for s in theirs), 2),
        "overhead_share": round(statistics.median(s["overhead_s"] / s["step_s"] for s in ours), 4),
    }


def matrix_peak(args: argparse.Namespace) -> float:
    """FLOP a second of a large product on all threads, as train_phase.py measures it."""
    import torch
    import train_phase

    torch.set_num_threads(cpu_cores())
    return train_phase.matrix_peak(SimpleNamespace(dtype=getattr(torch, args.dtype), device="cpu"))


def utilisation(model: Path, ours: list[dict[str, float]], peak: float) -> dict[str, float]:
    import train_phase
    from accelerate import init_empty_weights
    from torch import nn
    from transformers import AutoConfig, AutoModelForCausalLM

    with init_empty_weights():
        base = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model, local_files_only=True))
    linear = [m for n, m in base.named_modules() if isinstance(m, nn.Linear) and n != "lm_head"]
    weights = {
        "body": sum(m.weight.numel() for m in linear),
        "head": base.get_output_embeddings().weight.numel(),
        "lora": sum(32 * (m.in_features + m.out_features) for m in linear),
    }

    def flop(step: dict[str, float]) -> float:
        tokens = {"tokens/unique": step["tokens_computed"], "tokens/completion": step["completion_tokens"]}
        return train_phase.work(weights, tokens, is_tree=True)

    shares = statistics.median(flop(s) / s["train_s"] / peak for s in ours)
    return {"mfu": round(shares, 3), "matrix_gflops": round(peak / 1e9, 1)}


def lora_sampling() -> dict[str, Any]:
    """Of its own script, on one server; not measured here."""
    path = Path(__file__).parent / "results" / "lora_sampling_cpu.json"
    body = json.loads(path.read_text(encoding="utf-8"))
    return {
        "lora_vs_base": body["servers"]["skylite"]["lora_over_base"],
        "lora_vs_base_from": f"results/{path.name}",
    }


def sync_share(ours: list[dict[str, float]], io: float) -> dict[str, float]:
    seconds = statistics.median(s["publish_s"] + s["load_s"] for s in ours)
    share = statistics.median((s["publish_s"] + s["load_s"]) / s["step_s"] for s in ours)
    return {
        "sync_share": round(share, 4),
        "sync_s": round(seconds, 3),
        "plain_io_s": round(io, 3),
        "sync_vs_plain_io": round(seconds / io, 2),
    }


if __name__ == "__main__":
    main()
