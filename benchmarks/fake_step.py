"""What a micro-batch does on a GPU, without one, on fake tensors: kernels, their least seconds, peak bytes.

    python benchmarks/fake_step.py --out benchmarks/results/fake_step.json
    python benchmarks/memory.py --fake benchmarks/results/fake_step.json

One group of 8 completions. Each operation takes the longer of its FLOP at RATE and its bytes at BANDWIDTH, at
least LAUNCH; attention by the pairs of tokens that it computes. The sum, times OVERHEAD, is an H100's
estimate, not a measurement. Peaks count every storage that an operation returns, rounded up as torch's
allocator does: no CUDA contexts, fragmentation, workspaces of libraries.
"""

# ruff: noqa: E402 -- the fake device comes before torch
from __future__ import annotations

import argparse
import importlib
import itertools
import json
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from gpu_sizes import SHAPES, model_config
from shared import argument_parser, machine_info

importlib.import_module("tests.fake_gpu.preload")  # before torch

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from skylite.config.train import TrainConfig
from skylite.model import fast_path_check, triton_kernels
from skylite.run.files import write_json
from skylite.trainer.metrics import MetricSums
from skylite.trainer.optimizer import make_optimizer
from skylite.trainer.trainer import Trainer
from tests.cases import table_of
from tests.fake_gpu.memory import LiveBytes
from tests.fake_gpu.mode import fake_gpu
from tests.fake_gpu.policies import fake_policy, micro_batch, one_rank
from tests.rows import Row

RATE, BANDWIDTH, LAUNCH, OVERHEAD = 790e12, 3.0e12, 2e-6, 1.12
ATTENTION_RATE = {"flex": 300e12, "sdpa": 110e12}
PEAK = 989e12
"""An H100's, and its unit for MFU: bfloat16 without sparsity, by its data sheet."""
FORMS = {"torch, sdpa": ("sdpa", False), "torch, flex": ("flex", False), "kernels, flex": ("flex", True)}
"""Name -> tree attention, Triton's kernels."""
MODES = ["none", "selective", "full"]
NO_KERNEL = {
    *("view", "_unsafe_view", "reshape", "_reshape_alias", "expand", "squeeze", "unsqueeze", "as_strided"),
    *("t", "transpose", "permute", "slice", "select", "split", "split_with_sizes", "unbind"),
    *("alias", "detach", "empty", "empty_like", "empty_strided", "new_empty"),
}
"""Operations that only give a tensor another form, or memory."""
PRODUCTS = {"mm": (0, 1), "bmm": (0, 1), "addmm": (1, 2), "addmm_": (1, 2), "baddbmm": (1, 2)}
"""Operation -> which of its tensors are multiplied."""
KERNELS = ["normalize", "normalize_backward", "gate_and_multiply", "gate_and_multiply_backward", "rotate"]


@dataclass(slots=True)
class Cost:
    launches: int = 0
    seconds: float = 0.0
    flop: float = 0.0


class Prices(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside, prices every operation on a fake GPU by its kind."""

    supports_higher_order_operators = True

    def __init__(self, pair_flop: float) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.pair_flop = pair_flop
        """FLOP of a layer's FlexAttention, forward."""
        self.costs: dict[str, Cost] = defaultdict(Cost)
        self.is_off = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = str(func).removeprefix("aten.").partition(".")[0]
        tensors = [x for x in tree_leaves((args, kwargs)) if is_on_gpu(x)]
        outputs = [x for x in tree_leaves(out) if is_on_gpu(x)]
        is_kernel = name not in NO_KERNEL and not str(func).startswith("prim.")
        if self.is_off or not is_kernel or not tensors + outputs:
            return out
        kind, flop, rate = "other", 0.0, RATE
        num_bytes = sum(map(bytes_of, tensors + outputs))
        if name in PRODUCTS:
            a, b = (tensors[i] for i in PRODUCTS[name])
            flop = 2.0 * a.numel() * b.shape[-1]
            kind = "products" if min(*a.shape[-2:], b.shape[-1]) >= 256 else "LoRA's thin products"
        elif "attention" in name:
            factor = 2.5 if "backward" in name else 1.0
            is_flex = name.startswith("flex")
            flop = factor * (
                self.pair_flop if is_flex else pair_flop_of(*tensors[name.count("backward") :][:2])
            )
            kind, rate = "attention", ATTENTION_RATE["flex" if is_flex else "sdpa"]
        elif name in ("index", "gather", "index_select", "embedding"):
            num_bytes = 2 * sum(map(bytes_of, outputs))
        self.add(kind, num_bytes, flop, rate)
        return out

    def add(self, kind: str, num_bytes: float, flop: float = 0.0, rate: float = RATE) -> None:
        cost = self.costs[kind]
        cost.launches += 1
        cost.seconds += max(flop / rate, num_bytes / BANDWIDTH, LAUNCH)
        cost.flop += flop

    def as_kernel(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """A Triton kernel: its inputs read and outputs written once. Its launch is left out."""
        self.is_off = True
        out = original(*args, **kwargs)
        self.is_off = False
        tensors = [x for x in tree_leaves((args, kwargs, out)) if is_on_gpu(x)]
        self.add("Triton's kernels", sum(map(bytes_of, {id(x): x for x in tensors}.values())))
        return out


def is_on_gpu(x: Any) -> bool:
    return isinstance(x, Tensor) and x.device.type == "cuda"


def bytes_of(x: Tensor) -> int:
    """An expanded dimension counts once."""
    count = 1
    for size, stride in zip(x.shape, x.stride(), strict=True):
        count *= size if stride else 1
    return count * x.element_size()


def pair_flop_of(query: Tensor, key: Tensor) -> float:
    """FLOP of attention that computes every pair: queries [B, heads, Q, D], keys [B, heads, K, D]."""
    return 4.0 * query.numel() * key.shape[-2]


@contextmanager
def fake_kernels(prices: Prices, used: bool) -> Iterator[None]:
    """Triton's kernels pass the check where they are used, and do nothing but allocate."""

    class NoLaunch:
        def __getitem__(self, grid: Any) -> Any:
            return lambda *args, **kwargs: None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fast_path_check, "kernel_fault", lambda *_: None if used else "not used here")
        for name in ("_normalize", "_normalize_backward", "_gate", "_gate_backward", "_rotate"):
            patch.setattr(triton_kernels, name, NoLaunch())
        for name in ("_token_logprobs", "_logits_gradient"):
            patch.setattr(triton_kernels, name, NoLaunch())
        for name in (*KERNELS, "token_logprobs", "logits_gradient_"):
            patch.setattr(triton_kernels, name, partial(prices.as_kernel, getattr(triton_kernels, name)))
        yield


@dataclass(frozen=True, slots=True)
class GroupSizes:
    prompt: int
    completions: list[int]

    @property
    def pairs(self) -> float:
        """Pairs of tokens that see each other in a tree."""
        completions = sum(self.prompt * n + n * n / 2 for n in self.completions)
        return self.prompt**2 / 2 + completions

    def rows(self) -> list[Row]:
        """Completions differ from their first token on; the last one is never an input."""
        return [
            Row(
                group=0,
                prompt_token_ids=[1] * self.prompt,
                completion_token_ids=[2 + index] * (length + 1),
                sampling_logprobs=[-1.0] * (length + 1),
                reward=float(index == 0),
            )
            for index, length in enumerate(self.completions)
        ]


@dataclass(slots=True)
class Found:
    """Of one micro-batch. Bytes on the GPU."""

    nodes: int = 0
    before: int = 0
    """Weights, LoRA, its gradients."""
    peak: int = 0
    at_peak: str = ""
    costs: dict[str, Cost] = field(default_factory=dict)


def priced(shape: str, group: GroupSizes, checkpointing: str, form: str, rank: int = 32) -> Found:
    """A forward and backward pass of the group in bfloat16, as the trainer computes it."""
    attention, kernels = FORMS[form]
    trainer = {"checkpointing": checkpointing, "attention": attention}
    config = TrainConfig.model_validate({"lora": {"rank": rank, "alpha": rank}, "trainer": trainer})
    model = model_config(shape)
    prices = Prices(4.0 * group.pairs * model.hidden_size)
    table = table_of(group.rows(), config)
    with fake_gpu(), LiveBytes() as memory, fake_kernels(prices, kernels):
        policy = fake_policy(model, config, "tree")
        optim = config.optim
        optimizer = make_optimizer("policy", policy.lora, optim.lr, optim.max_grad_norm, optim)
        verbs = Trainer(config=config, dist=one_rank(), policy=policy, optimizer=optimizer)
        micro = micro_batch(table, range(len(group.completions)), policy, config)
        before = memory.reset_peak()
        with prices:
            micro = replace(verbs.forward(micro), advantages=torch.empty_like(micro.token_weights))
            verbs.forward_backward("policy", [micro], MetricSums())
    costs = dict(prices.costs)
    return Found(micro.tokens.num_nodes, before, memory.peak, memory.at_peak, costs)


def main() -> None:
    args = parse_arguments()
    group = GroupSizes(args.prompt, args.completions)
    rows: list[dict[str, Any]] = []
    for shape, checkpointing, form in itertools.product(args.shapes, args.checkpointing, FORMS):
        found, layers = priced(shape, group, checkpointing, form), SHAPES[shape][2]
        seconds = OVERHEAD * sum(cost.seconds for cost in found.costs.values())
        names = {"shape": shape, "checkpointing": checkpointing, "form": form, "attention": FORMS[form][0]}
        sizes = {"prompt": group.prompt, "group": len(group.completions), "nodes": found.nodes}
        work = {
            "launches_per_layer": round(sum(c.launches for c in found.costs.values()) / layers, 1),
            "ms": {kind: round(1e3 * c.seconds, 2) for kind, c in sorted(found.costs.items())},
            "us_per_token": round(1e6 * seconds / found.nodes, 2),
            "mfu": round(sum(c.flop for c in found.costs.values()) / seconds / PEAK, 3),
        }
        peaks = {"before": found.before, "peak": found.peak, "at_peak": found.at_peak}
        rows.append(names | sizes | work | peaks)
        print(json.dumps(rows[-1]), flush=True)
    if args.out:
        write_json(args.out, machine_info() | {"rows": rows})


def parse_arguments() -> argparse.Namespace:
    parser = argument_parser(__doc__)
    shapes = ["qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-7b"]
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=shapes)
    parser.add_argument("--checkpointing", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--prompt", type=int, default=200, help="tokens")
    lengths = [512 + 73 * i for i in range(8)]
    parser.add_argument("--completions", nargs="+", type=int, default=lengths, help="tokens of each")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
