"""Training steps of skylite and of TRL with Liger's layer kernels on the same random batch, on one GPU.

    python benchmarks/gpu_trl.py --shape qwen2.5-0.5b --out FILE      (needs trl and liger-kernel)
    python benchmarks/gpu_trl.py --dry-run --out FILE                 (tiny sizes, on any machine)

Completion lengths are log-normal (gpu_sizes.py). No sampling: TRL's GRPOTrainer gets the batch where it would
have sampled it, and pads, splits, computes and updates as it does in a run. Each side is one process, without
activation checkpointing first, and with it if memory runs out. The first step of each side is not counted.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpu_sizes import SHAPES, Sizes, model_config, sizes_of, varied_groups
from shared import argument_parser, machine_info

from skylite.run.files import write_json

ROOT = Path(__file__).parents[1]
STEPS = 3
RANK = 32
MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--shape", choices=list(SHAPES), default="qwen2.5-0.5b")
    parser.add_argument("--micro", type=int, default=8, help="TRL's per_device_train_batch_size")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds of each side")
    parser.add_argument("--only", nargs="+", choices=["skylite", "trl"], help="run one side alone")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--side", choices=["skylite", "trl"], help=argparse.SUPPRESS)
    parser.add_argument("--checkpointing", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        print("\n" + json.dumps((skylite_side if args.side == "skylite" else trl_side)(args)))
        return
    result: dict[str, Any] = {"shape": args.shape, "micro": args.micro}
    for side in args.only or ("skylite", "trl"):
        result[side] = in_own_process(args, side, [])
        if "OutOfMemoryError" in result[side].get("failed", ""):
            result[f"{side}, without checkpointing"] = result[side]
            result[side] = in_own_process(args, side, ["--checkpointing"])
        print(side, json.dumps(result[side]), flush=True)
    seconds = [result.get(side, {}).get("median_s") for side in ("skylite", "trl")]
    if all(seconds):
        result["trl_over_skylite"] = round(seconds[1] / seconds[0], 2)
    if args.out:
        write_json(args.out, machine_info() | result)
    print(json.dumps({"trl_over_skylite": result.get("trl_over_skylite")}))


def in_own_process(args: argparse.Namespace, side: str, more: Sequence[str]) -> dict[str, Any]:
    """The last line of a side's output, or the reason why it failed."""
    words = [sys.executable, __file__, "--side", side, "--shape", args.shape, f"--micro={args.micro}", *more]
    words += ["--dry-run"] if args.dry_run else []
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=args.limit)
    except subprocess.TimeoutExpired:
        return {"failed": f"did not end within {args.limit:.0f} s"}
    if done.returncode:
        return {"failed": done.stderr[-1500:]}
    row: dict[str, Any] = json.loads(done.stdout.strip().rpartition("\n")[2])
    return row


def skylite_side(args: argparse.Namespace) -> dict[str, Any]:
    """Our trainer's steps with the attention and the checkpointing that a GPU gets by default."""
    sys.path.insert(0, str(ROOT))
    import gpu_train

    gpu_train.use_trainer_environment()
    shape, sizes = sizes_of(args.shape, args.dry_run)
    attention = "sdpa" if args.dry_run else "flex"
    rate = gpu_train.device_rate(args.dry_run)
    checkpointing = "full" if args.checkpointing else "selective"
    row = gpu_train.measured(shape, sizes, rate, attention, checkpointing, "tree")
    return row | ({"median_s": statistics.median(row["seconds"])} if row.get("seconds") else {})


def trl_side(args: argparse.Namespace) -> dict[str, Any]:
    """TRL's steps on the batches of `varied_groups`."""
    sys.path.insert(0, str(ROOT))
    import torch
    import transformers
    from datasets import Dataset
    from peft import LoraConfig
    from trl import GRPOConfig, GRPOTrainer

    shape, sizes = sizes_of(args.shape, args.dry_run)
    on_gpu = torch.cuda.is_available()
    kernels = "none"
    if on_gpu:
        from liger_kernel.transformers import apply_liger_kernel_to_qwen2

        # As TRL's use_liger_kernel does: the layers' kernels, with TRL's own chunked LM head.
        apply_liger_kernel_to_qwen2(cross_entropy=False, fused_linear_cross_entropy=False)
        kernels = "Liger: rope, rms_norm, swiglu"
    torch.manual_seed(0)
    with torch.device("cuda" if on_gpu else "cpu"):
        model = transformers.AutoModelForCausalLM.from_config(
            model_config(shape), dtype=torch.bfloat16, attn_implementation="sdpa"
        )
    sequences = sizes.prompts * sizes.group_size
    micro = min(args.micro, sequences)
    clock = make_clock()

    class OnGivenBatches(GRPOTrainer):  # type: ignore[misc]
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            return padded_batch(sizes, self.state.global_step + 1, self.accelerator.device)

    with tempfile.TemporaryDirectory(prefix="skylite-") as folder:
        settings = GRPOConfig(
            output_dir=folder,
            use_cpu=not on_gpu,
            bf16=True,
            gradient_checkpointing=args.checkpointing,
            per_device_train_batch_size=micro,
            gradient_accumulation_steps=sequences // micro,
            num_generations=sizes.group_size,
            max_completion_length=sizes.longest,
            learning_rate=1e-5,
            beta=0.0,
            max_steps=STEPS,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            logging_steps=1000,
        )
        trainer = OnGivenBatches(
            model=model,
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=settings,
            train_dataset=Dataset.from_list([{"prompt": "a"}] * sequences),
            processing_class=small_tokenizer(),
            peft_config=LoraConfig(r=RANK, lora_alpha=RANK, target_modules=MODULES, task_type="CAUSAL_LM"),
            callbacks=[clock],
        )
        trainer.train()
    batch = padded_batch(sizes, 1, "cpu")
    return {
        "median_s": round(statistics.median(clock.seconds[1:]), 3),
        "kernels": kernels,
        "checkpointing": args.checkpointing,
        "seconds": [round(s, 3) for s in clock.seconds],
        "tokens_padded": batch["prompt_ids"].numel() + batch["completion_ids"].numel(),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2) if on_gpu else None,
    }


def padded_batch(sizes: Sizes, step: int, device: Any) -> dict[str, Any]:
    """The batch of a step, padded over all sequences as TRL does: prompts left, completions right."""
    import torch

    calls = [t.calls[0] for group in varied_groups(sizes, step) for t in group.trajectories]
    rewards = [t.reward for group in varied_groups(sizes, step) for t in group.trajectories]
    prompt = max(len(call.prompt_token_ids) for call in calls)
    completion = max(len(call.completion_token_ids) for call in calls)
    ids = torch.zeros(2, len(calls), prompt + completion, dtype=torch.long)  # token ids, then the mask
    for row, call in enumerate(calls):
        start, end = prompt - len(call.prompt_token_ids), prompt + len(call.completion_token_ids)
        ids[0, row, start:end] = torch.tensor([*call.prompt_token_ids, *call.completion_token_ids])
        ids[1, row, start:end] = 1
    ids = ids.to(device)
    advantages = torch.tensor(rewards, device=device).view(-1, sizes.group_size)
    advantages = (advantages - advantages.mean(1, keepdim=True)) / (advantages.std(1, keepdim=True) + 1e-4)
    return {
        "prompt_ids": ids[0, :, :prompt],
        "prompt_mask": ids[1, :, :prompt],
        "completion_ids": ids[0, :, prompt:],
        "completion_mask": ids[1, :, prompt:],
        "advantages": advantages.flatten(),
        "num_items_in_batch": ids[1, :, prompt:].sum(),
    }


def make_clock() -> Any:
    """A callback with the seconds of each step."""
    import torch
    import transformers

    class Clock(transformers.TrainerCallback):  # type: ignore[misc]
        def __init__(self) -> None:
            self.seconds: list[float] = []
            self.started = 0.0

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.started = now()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.seconds.append(now() - self.started)

    def now() -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()

    return Clock()


def small_tokenizer() -> Any:
    """TRL wants a tokenizer; the batches have token ids."""
    import tokenizers
    import transformers

    words = tokenizers.models.WordLevel({"<pad>": 0, "a": 1}, unk_token="<pad>")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(words), pad_token="<pad>", eos_token="<pad>"
    )


if __name__ == "__main__":
    main()
