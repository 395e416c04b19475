"""What a GPU would wait for, measured without one: masks, block masks, returns and host syncs.

    python benchmarks/gpu_prework.py --out benchmarks/results/gpu_prework_cpu.json

- masks: of a step of 32 groups of 8 completions of 8,192 tokens after a shared prompt of 512, in bfloat16.
  Each group is a micro-batch and is computed once: bytes of one while it is computed, the most that the step
  holds at once, bytes after it, and seconds of one group and of the step
- block mask: FlexAttention's for the same group, beside torch's create_block_mask at 16,384 nodes
- returns: of 256 trajectories of 512 tokens, as PPO (gae) and REINFORCE++ need them
- syncs: how often one micro-batch of a tiny model fetches a value from the device, forward and backward

`before` in the result file: the same figures of commit 952a437, by this script without what that code lacks,
with one group only: a step of 32 would hold 54.8 GB.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from command_line import argument_parser
from machine_info import commit, machine_info

from skylite.run.files import write_json

if TYPE_CHECKING:
    import torch

PROMPTS, PROMPT, GROUP, COMPLETION = 32, 512, 8, 8192
TRAJECTORIES, TOKENS = 256, 512
FETCHES = ("item", "tolist", "cpu", "numpy", "__float__", "__int__", "__bool__", "__index__", "nonzero")


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--out", type=Path, help="JSON file")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    args: argparse.Namespace = parser.parse_args()
    found: dict[str, Any] = {"commit": commit()}
    for name in args.only:
        found[name] = PARTS[name]()
        print(name, found[name], flush=True)
    if args.out:
        known = json.loads(args.out.read_text("utf-8")) if args.out.exists() else {}
        write_json(args.out, known | machine_info() | found)


def masks() -> dict[str, float]:
    """The masks of a step. It packs all micro-batches before it computes the first."""
    import torch

    from skylite.model import tree_attention
    from skylite.model.packing import pack_tokens

    groups, device = [long_group(seed) for seed in range(PROMPTS)], torch.device("cpu")
    started = time.perf_counter()
    step = [pack_tokens(*group, [0] * GROUP, "tree", device) for group in groups]
    packed = time.perf_counter()
    held, most, during, mask_s = mask_bytes(step), 0, 0, []
    for tokens in step:
        before = time.perf_counter()
        layout = tokens.model_inputs()["tree"]
        tree_attention._additive_masks(layout, None, torch.bfloat16)
        mask_s.append(time.perf_counter() - before)
        during = mask_bytes([layout])
        most = max(most, mask_bytes([step, layout]))
        del layout
    gc.collect()
    return {
        "groups": len(step),
        "nodes": step[0].num_nodes,
        "pack_s": round((packed - started) / PROMPTS, 3),
        "masks_s": round(sum(mask_s) / PROMPTS, 3),
        "step_s": round(packed - started + sum(mask_s), 2),
        "mb_packed": round(held / 1e6, 1),
        "mb_during": round(during / 1e6, 1),
        "mb_at_once": round(most / 1e6, 1),
        "mb_after": round(mask_bytes(step) / 1e6, 1),
    }


def long_group(seed: int = 0) -> tuple[list[list[int]], list[list[int]]]:
    rng = np.random.default_rng(seed)
    prompt = rng.integers(0, 20000, PROMPT).tolist()
    return [prompt] * GROUP, [rng.integers(0, 20000, COMPLETION).tolist() for _ in range(GROUP)]


def mask_bytes(found: Any) -> int:
    """Bytes of all two-dimensional tensors with more than one row that an object holds."""
    storages: dict[int, int] = {}
    for tensor in tensors(found):
        if tensor.dim() == 2 and len(tensor) > 1:
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return sum(storages.values())


def tensors(found: Any) -> Iterator[torch.Tensor]:
    import torch

    if isinstance(found, torch.Tensor):
        yield found
    elif isinstance(found, dict):
        yield from tensors(list(found.values()))
    elif isinstance(found, (list, tuple)):
        for x in found:
            yield from tensors(x)
    elif is_dataclass(found):
        yield from tensors([getattr(found, f.name) for f in fields(found)])


def block_mask() -> dict[str, float]:
    import torch
    from torch.nn.attention.flex_attention import create_block_mask

    from skylite.model import flex_attention
    from skylite.model.prefix_tree import build_tree

    prompts, completions = long_group()
    found: dict[str, float] = {}
    for name, length in (("16k", 2048), ("64k", COMPLETION)):
        tree = build_tree([p + c[:length] for p, c in zip(prompts, completions, strict=True)], [0] * GROUP)
        depths, ends = torch.from_numpy(tree.depths), torch.from_numpy(tree.ends)
        started = time.perf_counter()
        mask = flex_attention.block_mask(depths, ends, None)
        found[f"{name}_s"] = round(time.perf_counter() - started, 4)
        found[f"{name}_mb"] = round(block_mask_bytes(mask) / 1e6, 2)
        if name == "16k":
            started, size = time.perf_counter(), len(tree.depths)
            create_block_mask(mask.mask_mod, None, None, size, size, device="cpu")
            found["16k_torch_s"] = round(time.perf_counter() - started, 3)
    return found


def block_mask_bytes(mask: Any) -> int:
    parts = (x for x in mask.as_tuple() if hasattr(x, "nbytes"))
    return sum(x.nbytes for x in parts)


def returns() -> dict[str, float]:
    """Seconds of assign_advantages with 16 micro-batches, in its own process group."""
    from skylite.config.train import TrainConfig
    from skylite.trainer.assign_advantages import assign_advantages
    from skylite.trainer.micro_batch_plan import arrange
    from tests.rows import groups_of
    from tests.small_run import lone_rank

    groups = groups_of(random_rows())
    trajectories, size = [t for g in groups for t in g.trajectories], TRAJECTORIES // 16
    parts = [micro_batch(trajectories[first : first + size], first) for first in range(0, TRAJECTORIES, size)]
    micro_batches, known = [micro for micro, _ in parts], [values for _, values in parts]
    found = {}
    with lone_rank() as dist:
        for name in ("ppo", "reinforce++"):
            config = TrainConfig.model_validate({"algorithm": {"name": name}}).algorithm
            started = time.perf_counter()
            assign_advantages(arrange(groups, config), micro_batches, known, config, dist)
            found[f"{name}_s"] = round(time.perf_counter() - started, 4)
    return found


def random_rows() -> list[Any]:
    from tests.rows import Row

    rng = np.random.default_rng(0)
    return [
        Row(
            group=number // 8,
            prompt_token_ids=[1],
            completion_token_ids=rng.integers(0, 20000, TOKENS).tolist(),
            rollout_logprobs=[-1.0] * TOKENS,
            reward=float(number % 2),
        )
        for number in range(TRAJECTORIES)
    ]


def micro_batch(trajectories: list[Any], first: int) -> tuple[Any, Any]:
    """A micro-batch without inputs, and random values of a critic."""
    import torch

    from skylite.model.packing import PackedTokens
    from skylite.trainer.micro_batches import MicroBatch
    from skylite.trainer.precompute_logprobs import Precomputed

    size = len(trajectories)
    segments = torch.arange(size).repeat_interleave(TOKENS)
    tokens = PackedTokens(
        inputs={},
        rows=segments,
        targets=segments,
        segments=segments,
        num_segments=size,
        num_nodes=0,
        tokens_before=np.zeros(1, dtype=np.int64),
    )
    micro = MicroBatch(
        trajectories=trajectories,
        numbers=list(range(first, first + size)),
        tokens=tokens,
        keys=segments,
        token_weights=torch.ones(size * TOKENS),
        num_update_tokens=TRAJECTORIES * TOKENS,
        rollout_logprobs=torch.zeros(size * TOKENS),
    )
    return micro, Precomputed(values=torch.randn(size * TOKENS))


def syncs() -> dict[str, int]:
    """Fetches of one micro-batch of a tiny model on a CPU, where each would wait for a GPU."""
    import tempfile

    from skylite.trainer import step
    from tests.cases import gradients_after_step, policy_of
    from tests.small_run import lone_rank, settings
    from tests.tiny_models import make_tiny_model

    counts: list[int] = []
    run = step._forward_backward_micro

    def counted(*args: Any) -> None:
        with counted_fetches() as fetches:
            run(*args)
        counts.append(len(fetches))

    with tempfile.TemporaryDirectory(prefix="skylite-") as folder, lone_rank() as dist:
        config = settings()
        policy = policy_of(make_tiny_model(Path(folder, "model")), config, dist)
        setattr(step, "_forward_backward_micro", counted)  # noqa: B010 -- mypy refuses an assignment
        gradients_after_step(policy, config, dist)
    return {"micro_batches": len(counts), "fetches": sum(counts)}


@contextmanager
def counted_fetches() -> Iterator[list[str]]:
    import torch

    found: list[str] = []

    def counting(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            found.append(name)
            return method(*args, **kwargs)

        return call

    before = {(o, n): getattr(o, n) for o, n in [*((torch.Tensor, n) for n in FETCHES), (torch, "nonzero")]}
    for (owner, name), method in before.items():
        setattr(owner, name, counting(name, method))
    try:
        yield found
    finally:
        for (owner, name), method in before.items():
            setattr(owner, name, method)


PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    "masks": masks,
    "block_mask": block_mask,
    "returns": returns,
    "syncs": syncs,
}

if __name__ == "__main__":
    main()
