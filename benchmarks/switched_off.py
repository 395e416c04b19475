"""The special paths for speed, and what takes the place of each when special_paths.py switches it off."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal

SWITCH = "SKYLITE_SWITCHED_OFF"
"""Environment variable: names of paths, joined by `+`."""
Kind = Literal["train", "sample", "start"]
Replacements = Mapping[str, Any]
"""`module:attribute` to its replacement."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecialPath:
    """A special path and how to switch it off."""

    kind: Kind
    off: Callable[[], Replacements] = dict
    flags: tuple[str, ...] = ()
    """Flags of train_phase.py (kind train) or of vLLM's server (kind sample)."""
    env: tuple[tuple[str, str], ...] = ()
    """An empty value removes the variable."""
    without: str = ""
    """A path that is off on both sides, because this one acts only without it."""


def nothing(*_: Any, **__: Any) -> None:
    return None


@contextmanager
def no_block() -> Iterator[None]:
    yield


def replaced(place: str, value: Any) -> Callable[[], Replacements]:
    return lambda: {place: value}


def attention_by_autograd() -> Replacements:
    """Attention over a tree as devices other than CPUs compute it."""
    import torch

    from skylite.model import tree_attention as tree

    class Plain:
        @staticmethod
        def apply(query: Any, key: Any, value: Any, layout: Any, biases: Any, scaling: float) -> Any:
            repeats = query.shape[1] // key.shape[1]
            key, value = (x.repeat_interleave(repeats, dim=1) for x in (key, value))
            queries, keys, values = (torch.split(x, layout.sizes, dim=2) for x in (query, key, value))
            settings, outputs = tree.ScoreSettings(scaling), []
            for index, bias in enumerate(biases):
                seen_keys, seen_values = (tree._visible(x, layout, index) for x in (keys, values))
                outputs.append(tree._attend(queries[index], seen_keys, seen_values, bias, settings))
            return torch.cat(outputs, dim=2).transpose(1, 2)

    return {"skylite.model.tree_attention:_CpuTreeAttention": Plain}


def masks_computed_again() -> Replacements:
    from skylite.model import tree_attention as tree

    cached = tree._additive_masks

    def masks(layout: Any, *args: Any) -> Any:
        layout.masks.clear()
        return cached(layout, *args)

    return {"skylite.model.tree_attention:_additive_masks": masks}


def logprobs_by_autograd() -> Replacements:
    import torch

    def logprobs(logits: Any, rows: Any, targets: Any, temperature: float) -> Any:
        log_probs = torch.log_softmax(logits.float() / temperature, dim=1)
        entropies = -(log_probs.exp() * log_probs).sum(dim=1)
        return log_probs[rows, targets], entropies[rows]

    return {"skylite.model.policy:token_logprobs": logprobs}


def all_threads() -> Replacements:
    return {"skylite.trainer.loop:half_the_threads": no_block}


def rows_by_index() -> Replacements:
    import torch

    return {"skylite.vllm_plugin.lora_math:_compact": torch.tensor}


def torch_product() -> Replacements:
    from torch.nn import functional

    def product(weight: Any) -> Any:
        return lambda x, bias: functional.linear(x, weight, bias)

    return {"skylite.vllm_plugin.merged_weights:packed_product": product}


def engines_after_the_trainer() -> Replacements:
    """vLLM starts when the adapter's manifest names its modules."""
    from skylite.engine import start_engines

    start_now, known = start_engines.start_engines, list[Any]()

    @asynccontextmanager
    async def remember(*args: Any) -> Any:
        known.extend(args)
        yield []

    @asynccontextmanager
    async def start(*_: Any, wanted: list[str], **__: Any) -> Any:
        run_config, logs, _modules, supervisor, restarts = known
        opened = start_now(run_config, logs, wanted, supervisor, restarts)
        async with opened as watchdogs, start_engines.engines_kept_alive(watchdogs, supervisor) as ready:
            yield ready

    session = "skylite.orchestrator.run_session"
    return {f"{session}:start_engines": remember, f"{session}:engines_for_modules": start}


MODEL, MERGED = "skylite.model", "skylite.vllm_plugin.merged_weights"
NO_TBB = (("LD_PRELOAD", ""),)
PATHS: dict[str, SpecialPath] = {
    "bf16 weights": SpecialPath(
        kind="train", off=replaced(f"{MODEL}.checked_shortcuts:store_in_bf16", nothing)
    ),
    "selective checkpointing": SpecialPath(kind="train", flags=("--checkpointing=none",)),
    "fused norms": SpecialPath(kind="train", off=replaced(f"{MODEL}.checked_shortcuts:fuse_norms", nothing)),
    "fused MLPs": SpecialPath(kind="train", off=replaced(f"{MODEL}.checked_shortcuts:fuse_mlps", nothing)),
    "fused LoRA layers": SpecialPath(kind="train", off=replaced(f"{MODEL}.policy:fuse_lora_layers", nothing)),
    "siblings' A joined": SpecialPath(kind="train", off=replaced(f"{MODEL}.lora_linear:SIBLINGS", ())),
    "prefix tree": SpecialPath(kind="train", flags=("--packing=padded",)),
    "CPU tree attention": SpecialPath(kind="train", off=attention_by_autograd),
    "blocks cut at branches": SpecialPath(
        kind="train", off=replaced(f"{MODEL}.prefix_tree:SCORES_PER_CALL", 1 << 60)
    ),
    "masks cached": SpecialPath(kind="train", off=masks_computed_again),
    "LM head in chunks": SpecialPath(
        kind="train", off=replaced(f"{MODEL}.checked_shortcuts:linear_head", nothing)
    ),
    "LM head's gradient in forward": SpecialPath(
        kind="train", off=replaced(f"{MODEL}.chunked_logprobs:_in_blocks", lambda *_: False)
    ),
    "logprobs of all logits": SpecialPath(
        kind="train", off=logprobs_by_autograd, without="LM head in chunks"
    ),
    "old logprobs of the training pass": SpecialPath(
        kind="train", off=replaced("skylite.trainer.precompute_logprobs:needs_old_logprobs", lambda _: True)
    ),
    "cached blocks released": SpecialPath(
        kind="train", off=replaced("skylite.trainer.step:release_cached_memory", nothing)
    ),
    "TBB's allocator": SpecialPath(kind="train", env=NO_TBB),
    "weights merged": SpecialPath(kind="sample", env=(("SKYLITE_CPU_LORA", "dense"),)),
    "merged: oneDNN's packed product": SpecialPath(kind="sample", off=torch_product),
    "merged: copy in bf16": SpecialPath(
        kind="sample", off=replaced(f"{MERGED}:lossless_bf16", lambda weight: weight.clone())
    ),
    "dense: slices of rows": SpecialPath(kind="sample", off=rows_by_index, without="weights merged"),
    "kernels for norms": SpecialPath(
        kind="sample", off=replaced("skylite.vllm_plugin.norm_kernels:install", nothing)
    ),
    "kernels for norms and rotary": SpecialPath(
        kind="sample", flags=("--compilation-config", '{"custom_ops": ["none"]}')
    ),
    "KV blocks of 32 tokens": SpecialPath(kind="sample", flags=("--block-size", "128")),
    "half the threads at start": SpecialPath(kind="start", off=all_threads),
    "vLLM beside the trainer": SpecialPath(kind="start", off=engines_after_the_trainer),
}


def switch_off() -> None:
    """Switch off the paths that SWITCH names, in this process. vLLM calls it as a plugin in its processes."""
    for name in filter(None, os.environ.get(SWITCH, "").split("+")):
        apply(PATHS[name].off())


def apply(replacements: Replacements) -> Callable[[], None]:
    """Put replacements in place; returns what undoes it."""
    before = {place: _swap(place, value) for place, value in replacements.items()}

    def undo() -> None:
        for place, value in before.items():
            _swap(place, value)

    return undo


def _swap(place: str, value: Any) -> Any:
    module, _, attribute = place.partition(":")
    *owners, last = attribute.split(".")
    owner = import_module(module)
    for name in owners:
        owner = getattr(owner, name)
    before = getattr(owner, last)
    setattr(owner, last, value)
    return before
