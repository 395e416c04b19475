"""Enables the shortcuts that leave a model's results unchanged. Each one is checked on a probe first.

Shortcuts: the LM head in chunks, fused norms and MLPs (on a GPU in Triton, with rotary embedding), frozen
weights in bfloat16, prefix-tree packing.

The check compares logprobs of the same tokens. It computes in float32, also for a bfloat16 policy, to judge
the structure (masks, positions, gains) and not the rounding. The reference comes from the plain form, which
is right for every model: padded rows, the model's own eager attention, all logits together. (transformers'
sdpa attention, for example, ignores the softcap of Gemma 2.) A shortcut stays enabled if the mean absolute
difference is within TOLERANCE; otherwise the plain form stays.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from skylite.errors import ModelError
from skylite.model.attention_backends import IMPLEMENTATIONS
from skylite.model.bf16_weights import store_in_bf16
from skylite.model.flex_attention import BLOCK
from skylite.model.float32_arithmetic import Float32Arithmetic
from skylite.model.fused_ops import RMS_NORM_GAINS, fuse_mlps, fuse_norms, fuse_rotary_embedding, rms_norms
from skylite.model.images import set_attention
from skylite.model.kernel_check import kernel_fault
from skylite.model.lm_head import linear_head
from skylite.model.loading import text_model
from skylite.model.packing import pack_tokens
from skylite.model.policy import Policy, is_lora_param, score
from skylite.types import completion_example

TOLERANCE = 1e-3
"""Largest mean |logprob difference| in nats.

Float32's rounding stays below it. A wrong mask, or a head that scales its logits, differs by tenths of nats.
"""

OWN_ATTENTION = "the model's own attention function"
ATTENTION_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}
"""Names in `layer_types` of a config; other layers (mamba, linear_attention, conv) are recurrent."""


def enable_shortcuts(policy: Policy, probe: list[int]) -> tuple[Policy, list[str]]:
    """Enable each shortcut that passes the check on `probe`, a sequence of token ids.

    Returns:
        The policy with its packing and LM head, and a log line per shortcut: enabled or not, and why.
    """
    with _short_windows(policy.model.get_base_model(), max(2, len(probe) // 4)):
        return _enable_shortcuts(policy, probe)


def _enable_shortcuts(policy: Policy, probe: list[int]) -> tuple[Policy, list[str]]:
    base: PreTrainedModel = policy.model.get_base_model()
    set_attention(base, "eager")
    reference = _probe_logprobs(policy, probe)
    (policy, lines), head = _with_kernels(policy), linear_head(base)
    if head is not None:
        gap, reason = _gap(replace(policy, lm_head=head), probe, reference)
        policy = replace(policy, lm_head=head if gap <= TOLERANCE else None)
        lines.append(f"LM head in chunks: {policy.lm_head is not None}; {reason}")
    lines += _replace_modules(policy, probe, reference)
    policy, of_packing = _pack_as_tree(policy, probe, reference)
    lines += of_packing
    if policy.packing == "padded" and _has_own_attention(base):
        lines.append(f"attention of padded rows: {OWN_ATTENTION}")
    elif policy.packing == "padded":
        gap, reason = _gap(policy, probe, reference, "sdpa")
        chosen = "sdpa" if gap <= TOLERANCE else "eager"
        set_attention(base, chosen)
        lines.append(f"attention of padded rows: {chosen}; sdpa: {reason}")
    return policy, lines


def _with_kernels(policy: Policy) -> tuple[Policy, list[str]]:
    """The policy with Triton's kernels, on a GPU where they compute what torch does; a log line says so."""
    if policy.device.type != "cuda":
        return policy, []
    widths = {norm.weight.numel() for norm in rms_norms(policy.model)}
    fault = kernel_fault(policy.device, policy.dtype, sorted(widths))
    line = "used, equal to torch's operations within rounding" if fault is None else f"not used; {fault}"
    return replace(policy, kernels=fault is None), [f"Triton kernels: {line}"]


def _pack_as_tree(policy: Policy, probe: list[int], reference: Tensor) -> tuple[Policy, list[str]]:
    """Use the policy's attention over a tree, else sdpa's, whichever passes the check first. Else no tree."""
    if _is_recurrent(policy.model.get_base_model()):
        reason = "recurrent layers carry a state from token to token, also across branches"
        return policy, [f"packing: {policy.packing}; {reason}"]
    if _has_own_attention(policy.model.get_base_model()):
        return policy, [f"packing: {policy.packing}; {OWN_ATTENTION} takes no tree"]
    lines: list[str] = []
    for attention in dict.fromkeys([policy.attention, "sdpa"]):
        tree = replace(policy, packing="tree", attention=attention)
        gap, reason = _gap(tree, probe, reference, IMPLEMENTATIONS[attention])
        if gap <= TOLERANCE:
            return tree, [*lines, f"packing: tree; {reason}; tree attention: {attention}"]
        lines.append(f"tree attention: not {attention}; {reason}")
    lines[-1] = f"packing: {policy.packing}; {reason}; tree attention: none"
    return policy, lines


@contextmanager
def _short_windows(base: PreTrainedModel, length: int) -> Iterator[None]:
    """Shorten sliding windows and chunks to `length` tokens, so that the probe reaches past them.

    transformers reads them from the config in each pass, for masks of every form.
    """
    config = base.config.get_text_config()
    names = ("sliding_window", "attention_chunk_size")
    lengths: dict[str, int] = {n: getattr(config, n) for n in names if getattr(config, n, None)}
    for name, value in lengths.items():
        setattr(config, name, min(value, length))
    try:
        yield
    finally:
        for name, value in lengths.items():
            setattr(config, name, value)


def _has_own_attention(base: PreTrainedModel) -> bool:
    """Whether the text model computes attention itself, whatever `attn_implementation` says: GPT-J."""
    text = text_model(base)
    return isinstance(text, PreTrainedModel) and not text._can_set_attn_implementation()


def _is_recurrent(base: PreTrainedModel) -> bool:
    """Whether tokens also meet outside attention: in a state, or a convolution along the row."""
    layer_types = set(getattr(base.config.get_text_config(), "layer_types", None) or ())
    return bool(layer_types - ATTENTION_LAYERS) or any(
        isinstance(m, nn.Conv1d) for m in text_model(base).modules()
    )


def _replace_modules(policy: Policy, probe: list[int], reference: Tensor) -> list[str]:
    """Fuse norms and MLPs and store frozen weights in bfloat16, if the check passes. Returns log lines."""
    # Not with full checkpointing: what recomputes a tensor holds its inputs, which backward computes anyway.
    recompute = policy.checkpointing == "selective"
    model, kernels = policy.model, policy.kernels
    attempts = [
        ("norms", f"fused as {gain}", partial(fuse_norms, model, offset, recompute, kernels))
        for gain, offset in RMS_NORM_GAINS.items()
    ]
    attempts.append(("MLPs", "fused as act(gate) * up", partial(fuse_mlps, model, recompute, kernels)))
    if kernels:
        attempts.append(("rotary embedding", "fused", partial(fuse_rotary_embedding, model)))
    if policy.dtype == torch.float32:
        frozen = [m for n, m in policy.model.named_modules() if not is_lora_param(f"{n}.")]
        attempts.append(("frozen weights", "stored in bfloat16 without loss", partial(store_in_bf16, frozen)))
    lines: dict[str, str] = {}
    enabled: set[str] = set()
    for part, form, attempt in attempts:
        if part in enabled:
            continue
        undo = attempt()
        if undo is None:
            lines[part] = "none that qualify"
            continue
        gap, reason = _gap(policy, probe, reference)
        if gap <= TOLERANCE:
            enabled.add(part)
        else:
            undo()
        lines[part] = f"{form if part in enabled else 'unchanged'}; {reason}"
    return [f"{part}: {line}" for part, line in lines.items()]


def _gap(
    policy: Policy, probe: list[int], reference: Tensor, attention: str | None = None
) -> tuple[float, str]:
    """Mean |logprob difference| to the reference, and the reason in words. An error counts as infinite.

    attention: transformers' `attn_implementation` to set before.
    """
    try:
        if attention is not None:
            set_attention(policy.model.get_base_model(), attention)
        gap = float((_probe_logprobs(policy, probe) - reference).abs().mean())
        if policy.packing == "tree" and policy.attention == "flex" and policy.device.type == "cuda":
            _train_on(policy, probe)  # kernels of other types, with gradients: they are compiled now, too
    except torch.OutOfMemoryError:
        raise
    except (
        TypeError,
        ValueError,
        LookupError,
        AttributeError,
        AssertionError,
        RuntimeError,
        ModelError,
    ) as error:
        line = str(error).strip().partition("\n")[0]  # a compiler's error also holds its graph and stack
        return float("inf"), f"the model does not support it: {line}"
    return gap, f"mean logprob difference to the plain form {gap:.1e}"


@torch.no_grad()
def _probe_logprobs(policy: Policy, probe: list[int]) -> Tensor:
    """Logprobs of two completions of the probe's first half: its second half, and the probe reversed.

    They share a prompt, so a tree with a wrong mask gives other logprobs.
    """
    prompt = probe[: max(1, len(probe) // 2)]
    completions = [probe[len(prompt) :], probe[:0:-1]]
    examples = [completion_example(prompt, c, trajectory=i) for i, c in enumerate(completions)]
    tokens = pack_tokens(examples, policy.packing, policy.device)
    with Float32Arithmetic() if policy.dtype == torch.bfloat16 else nullcontext():
        return score(replace(policy, dtype=torch.float32), tokens, temperature=1.0)[0]


def _train_on(policy: Policy, probe: list[int]) -> None:
    """A training pass as the run will make it, over a tree of several blocks of nodes. Its result is lost."""
    prompt = (probe * BLOCK)[:BLOCK]
    examples = [completion_example(prompt, [p, *prompt], trajectory=i) for i, p in enumerate(probe[:2])]
    logprobs, _ = score(policy, pack_tokens(examples, policy.packing, policy.device), temperature=1.0)
    torch.autograd.grad(logprobs.sum(), list(policy.lora.values()), allow_unused=True)
