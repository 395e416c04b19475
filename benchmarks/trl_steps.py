"""TRL's side of step_vs_trl.py: GRPOTrainer with PEFT. The last line of its output is JSON, with the times of
each step.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from pathlib import Path
from typing import Any

import datasets
import peft
import transformers
from trl import GRPOConfig, GRPOTrainer

from skylite.data.prompts import read_prompts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="prepared data set")
    parser.add_argument("--model", type=Path, required=True, help="model folder")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--trl-micro", type=int, required=True, help="per_device_train_batch_size")
    parser.add_argument("--trl-checkpointing", action="store_true")
    args = parser.parse_args()
    prompts, _ = read_prompts(args.data / "train.parquet")
    clock = Clock()
    TimedTrainer(
        clock,
        model=str(args.model),
        reward_funcs=length_reward,
        args=trl_config(args),
        train_dataset=datasets.Dataset.from_list([{"prompt": p.messages, "gold": p.answer} for p in prompts]),
        peft_config=peft.LoraConfig(r=32, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"),
        callbacks=[clock],
    ).train()
    print("\n" + json.dumps(clock.steps))


def trl_config(args: argparse.Namespace) -> GRPOConfig:
    return GRPOConfig(
        output_dir=str(args.data.parent / "trl"),
        use_cpu=True,
        bf16=args.dtype == "bfloat16",
        fp16=False,
        gradient_checkpointing=args.trl_checkpointing,
        per_device_train_batch_size=args.trl_micro,
        gradient_accumulation_steps=32 // args.trl_micro,
        num_generations=8,
        max_completion_length=128,
        learning_rate=1e-4,
        lr_scheduler_type="constant",
        beta=0.0,
        temperature=1.0,
        max_steps=args.steps,
        save_strategy="no",
        report_to=[],
        use_vllm=False,
        disable_tqdm=True,
        model_init_kwargs={"dtype": args.dtype},
    )


def length_reward(completions: list[Any], gold: list[str], **_: Any) -> list[float]:
    """The same as REWARD in step_vs_trl.py."""
    texts = [c[0]["content"] for c in completions]
    return [1.0 if c.strip() == g else len(c) % 7 / 8 for c, g in zip(texts, gold, strict=True)]


class Clock(transformers.TrainerCallback):  # type: ignore[misc]
    """Records seconds, tokens and peak memory of each step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self.started = self.sample_s = self.tokens = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.started, self.sample_s = time.perf_counter(), 0.0

    def on_step_end(self, *_: Any, **__: Any) -> None:
        seconds = time.perf_counter() - self.started
        self.steps.append(
            {
                "step_s": seconds,
                "sample_s": self.sample_s,
                "train_s": seconds - self.sample_s,
                "completion_tokens": self.tokens,
                "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
            }
        )


class TimedTrainer(GRPOTrainer):  # type: ignore[misc]
    """GRPOTrainer that adds the time of its sampling to a clock."""

    def __init__(self, clock: Clock, **arguments: Any) -> None:
        self.clock = clock
        super().__init__(**arguments)

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        started = time.perf_counter()
        found = super()._generate_and_score_completions(inputs)
        self.clock.sample_s += time.perf_counter() - started
        self.clock.tokens = float(found["completion_mask"].sum())
        return found


if __name__ == "__main__":
    main()
