"""Peak bytes of one micro-batch at real shapes, forward and backward, on fake CUDA tensors.

    python benchmarks/fake_peaks.py --out benchmarks/results/fake_peaks.json
    python benchmarks/fake_peaks.py --shapes qwen2.5-7b --trees 16384:256x8 --checkpointing selective

Needs no GPU: the tensors have sizes and no values. Counts every storage that an operation returns, rounded up
as torch's allocator does. Not counted: CUDA contexts, fragmentation, workspaces inside kernels (cuBLAS and
attention), and what a communication library takes.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from command_line import argument_parser
from gpu_sizes import SHAPES, model_config
from machine_info import machine_info

from skylite.run.files import write_json

TREES = ("16384:256x8", "4608:1024x24", "4608:1024x64")
"""Tokens, prompt and group. The last two are many short completions of a long prompt."""


@dataclass(frozen=True, slots=True)
class Peak:
    """Bytes on one GPU."""

    nodes: int
    """Tokens of the micro-batch, the shared prompt once in a tree."""
    rows: int
    """Rows of the LM head: tokens that predict a completion token."""
    before: int
    """Live before the pass: weights, LoRA, the flat gradient, the tokens."""
    kept: int
    """Live after the forward pass, above `before`: what autograd keeps."""
    activations: int
    """The peak above `before`."""
    at_peak: str
    """The operation that reached it."""

    @property
    def peak(self) -> int:
        return self.before + self.activations


def main() -> None:
    args = parse_arguments()
    rows: list[dict[str, Any]] = []
    axes = (args.shapes, args.trees, args.checkpointing, args.attention)
    for shape, tree, checkpointing, attention in itertools.product(*axes):
        tokens, prompt, group = map(int, re.split("[:x]", tree))
        found = peak_bytes(
            shape,
            tokens,
            checkpointing,
            attention=attention,
            packing=args.packing,
            prompt=prompt,
            group=group,
        )
        names = {
            "shape": shape,
            "prompt": prompt,
            "group": group,
            "checkpointing": checkpointing,
            "attention": attention,
            "packing": args.packing,
        }
        rows.append(names | asdict(found) | {"peak": found.peak})
        print(json.dumps(rows[-1]), flush=True)
    if args.out:
        write_json(args.out, machine_info() | {"rows": rows})


def parse_arguments() -> argparse.Namespace:
    parser = argument_parser(__doc__)
    parser.add_argument(
        "--shapes", nargs="+", choices=list(SHAPES), default=[s for s in SHAPES if s != "tiny"]
    )
    parser.add_argument("--trees", nargs="+", default=TREES, help="TOKENS:PROMPTxGROUP")
    modes = ["none", "selective", "full"]
    parser.add_argument("--checkpointing", nargs="+", choices=modes, default=modes)
    parser.add_argument("--attention", nargs="+", choices=["sdpa", "flex"], default=["sdpa"])
    parser.add_argument("--packing", choices=["tree", "padded"], default="tree")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def peak_bytes(
    shape: str,
    tokens: int,
    checkpointing: str,
    *,
    attention: str = "sdpa",
    packing: str = "tree",
    rank: int = 32,
    prompt: int = 256,
    group: int = 8,
) -> Peak:
    """The peak of a micro-batch of one group in bfloat16.

    Args:
        shape: a key of SHAPES.
        tokens: about this many tokens are computed, padding included: a prompt of `prompt` tokens (once in a
            tree, in every row else) and `group` completions of equal length.
        rank: LoRA rank, on all linear layers but the head.

    Raises RuntimeError if torch was imported before tests.fake_gpu.preload.
    """
    importlib.import_module("tests.fake_gpu.preload")  # before torch

    from skylite.config.train import TrainConfig
    from tests.fake_gpu.memory import LiveBytes
    from tests.fake_gpu.mode import fake_gpu
    from tests.fake_gpu.policies import fake_policy

    config = TrainConfig.model_validate(
        {
            "lora": {"rank": rank, "alpha": rank},
            "trainer": {"checkpointing": checkpointing, "attention": attention},
        }
    )
    batch = group_batch(tokens, packing, prompt, group, config)
    with fake_gpu(), LiveBytes() as memory:
        policy = fake_policy(model_config(shape), config, "tree" if packing == "tree" else "padded")
        return measure_pass(policy, batch, config, memory)


def measure_pass(policy: Any, batch: Any, config: Any, memory: Any) -> Peak:
    """Forward and backward of the batch's group. `memory` counts the bytes."""
    import torch

    from skylite.model.policy import score
    from skylite.trainer.metrics import MetricSums
    from skylite.trainer.optimizer import make_optimizer
    from skylite.trainer.precompute_logprobs import Precomputed
    from skylite.trainer.step import micro_batch_loss
    from tests.fake_gpu.policies import micro_batch

    optimizer = make_optimizer("policy", policy.lora, 1e-4, 1.0, config.optim)
    micro = micro_batch(batch, range(batch.group_size), policy, config)
    advantages, choice = torch.empty_like(micro.token_weights), (micro.token_weights, None)
    before = memory.reset_peak()
    logprobs, entropies = score(policy, micro.tokens, 1.0)
    known = Precomputed()
    loss, found = micro_batch_loss(micro, known, advantages, choice, logprobs, entropies, None, config)
    kept = memory.now - before
    loss.backward()  # type: ignore[no-untyped-call]
    MetricSums().add(found)
    del optimizer
    return Peak(
        nodes=micro.tokens.num_nodes,
        rows=len(micro.tokens.tokens_before) - 1,
        before=before,
        kept=kept,
        activations=memory.peak - before,
        at_peak=memory.at_peak,
    )


def group_batch(tokens: int, packing: str, prompt: int, group: int, config: Any) -> Any:
    """A group that computes about `tokens` tokens. Completions differ from their first token on."""
    from skylite.trainer.micro_batch_plan import arrange
    from tests.rows import Row, groups_of

    length = (tokens - prompt) // group if packing == "tree" else tokens // group - prompt
    rows = [
        Row(
            group=0,
            prompt_token_ids=[1] * prompt,
            completion_token_ids=[2 + index] * (length + 1),  # the last token is never an input
            rollout_logprobs=[-1.0] * (length + 1),
            reward=float(index == 0),
        )
        for index in range(group)
    ]
    return arrange(groups_of(rows), config.algorithm)


if __name__ == "__main__":
    main()
