"""Which shortcuts a model takes without changing what it computes: packing, head, fused parts. Each is tried on a probe."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel

from skylite.model.attention_backends import implementation
from skylite.model.bf16_weights import hold_in_bf16
from skylite.model.fused_ops import GAINS, fuse_mlps, fuse_norms
from skylite.model.lm_head import plain_head
from skylite.model.packing import pack_tokens
from skylite.model.policy import Policy, is_adapter, score

SHORTCUT_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.05}
"""Mean logprob difference to the plain form that rounding explains. Wrong masks, or a head with a twist, differ by tenths of nats."""


def choose_passes(policy: Policy, probe: list[int]) -> tuple[Policy, list[str]]:
    """The policy with the cheapest packing and head that its model provably understands, and the reasons in words.

    The probe is scored with padded rows, the model's own (eager) attention and all logits first: slow, but right for every model
    (transformers' sdpa ignores Gemma 2's score cap, say). Each shortcut is kept where it gives the same.
    """
    base: PreTrainedModel = policy.model.get_base_model()
    base.set_attn_implementation("eager")
    plain = _probe_logprobs(policy, probe)
    reasons, head = [], plain_head(base)
    if head is not None:
        gap, reason = _gap(replace(policy, head=head), probe, plain)
        policy = replace(policy, head=head if gap <= SHORTCUT_TOLERANCE[policy.dtype] else None)
        reasons.append(f"head in chunks: {policy.head is not None}; {reason}")
    reasons += _replace_parts(policy, probe, plain)
    base.set_attn_implementation(implementation(policy.attention))
    gap, reason = _gap(replace(policy, packing="tree"), probe, plain)
    policy = replace(policy, packing="tree" if gap <= SHORTCUT_TOLERANCE[policy.dtype] else "padded")
    if policy.packing == "padded":
        base.set_attn_implementation("eager")
    return policy, [
        *reasons,
        f"packing: {policy.packing}; {reason}; attention over a tree: {policy.attention}",
    ]


def _replace_parts(policy: Policy, probe: list[int], plain: Tensor) -> list[str]:
    """Fuse the model's norms and MLPs, and hold its matrices narrow, where that gives the same; what came of it, in words."""
    again = policy.checkpointing != "none"
    attempts = [
        ("norms", f"fused as {gain}", partial(fuse_norms, policy.model, multiply, again))
        for gain, multiply in GAINS.items()
    ]
    attempts.append(("MLPs", "fused as act(gate) * up", partial(fuse_mlps, policy.model, again)))
    if policy.dtype == torch.float32:
        own = [m for n, m in policy.model.named_modules() if not is_adapter(f"{n}.")]
        attempts.append(
            ("frozen matrices", "held in bfloat16, which has their values", partial(hold_in_bf16, own))
        )
    reasons: dict[str, str] = {}
    done: set[str] = set()
    for part, form, attempt in attempts:
        if part in done:
            continue
        undo = attempt()
        if undo is None:
            reasons[part] = "none of a known form"
            continue
        gap, reason = _gap(policy, probe, plain)
        if gap <= SHORTCUT_TOLERANCE[policy.dtype]:
            done.add(part)
        else:
            undo()
        reasons[part] = f"{form if part in done else 'left alone'}; {reason}"
    return [f"{part}: {reason}" for part, reason in reasons.items()]


def _gap(policy: Policy, probe: list[int], plain: Tensor) -> tuple[float, str]:
    """Mean |logprob difference| to the plain form, infinite where the model cannot do it; and the same in words."""
    try:
        gap = float((_probe_logprobs(policy, probe) - plain).abs().mean())
    except torch.OutOfMemoryError:
        raise
    except (TypeError, ValueError, KeyError, RuntimeError) as error:
        return float("inf"), f"the model does not take it: {error}"
    return gap, f"logprobs differ from the plain form's by {gap:.1e} on average"


@torch.no_grad()
def _probe_logprobs(policy: Policy, probe: list[int]) -> Tensor:
    stem = probe[: max(1, len(probe) // 2)]
    branches = [probe[len(stem) :], probe[:0:-1]]
    return score(
        policy, pack_tokens([stem, stem], branches, [0, 0], policy.packing, policy.device), temperature=1.0
    )[0]
