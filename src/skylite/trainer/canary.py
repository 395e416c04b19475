"""The canary on the trainer's side: fixed sequences from the parent, and their logprobs."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import cast

import torch
from pydantic import ValidationError
from torch import Tensor

from skylite.adapters.manifest import SEQUENCES_PER_VERSION, CanaryImage
from skylite.algorithms.kl import k3
from skylite.errors import ConfigError, TrainingDiverged
from skylite.model.float32_arithmetic import Float32Arithmetic
from skylite.model.packing import pack_tokens
from skylite.model.policy import REF, Policy, frozen_policy, score
from skylite.model.process_group import Dist
from skylite.run.run_dir import RunDir
from skylite.trainer.optimizer import is_b_matrix
from skylite.types import ImageTokens, completion_example

EFFECTS_EVERY = 8
"""Versions in float32 from one with effects to the next: they cost a pass for each kind of module."""


def wait_for_canary(run: RunDir, dist: Dist) -> tuple[list[list[int]], ImageTokens | None]:
    """The canary's token ids and picture. The parent writes them once its tokenizer is loaded.

    All ranks call it.
    """
    sequences, image = dist.wait_for(
        lambda: (read_canary(run), read_canary_image(run)) if run.canary_path.exists() else None
    )
    return sequences, image


def read_canary_image(run: RunDir) -> ImageTokens | None:
    """The picture with which every sequence begins, if there is one."""
    image = run.read_json(run.canary_path).get("image")
    try:
        return None if image is None else CanaryImage.model_validate(image).tokens
    except ValidationError:
        raise ConfigError(
            f"{run.canary_path} holds a picture without a place.", "The run is damaged; start a new one."
        ) from None


def read_canary(run: RunDir) -> list[list[int]]:
    sequences = run.read_json(run.canary_path).get("sequences")
    if not _are_sequences(sequences):
        raise ConfigError(
            f"{run.canary_path} holds no sequences of token ids.", "The run is damaged; start a new one."
        )
    return cast(list[list[int]], sequences)


def _are_sequences(value: object) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(ids, list) and len(ids) > 1 for ids in value)
        and all(type(token) is int and 0 <= token < 2**31 for ids in value for token in ids)
    )


def sequences_of(version: int, count: int) -> list[int]:
    """Which of `count` sequences a version is scored on: all before the first step, then two in turn.

    The first of the two is the second of the version before: the bits of its logprobs show an engine that
    still serves that version. Only bfloat16 has more than two, because rounding hides an adapter that is
    applied in part. Such an engine does so to every version, so the sequences of many versions show it.
    """
    if version == 0 or count <= SEQUENCES_PER_VERSION:
        return list(range(count))
    return [(version - 1 + k) % count for k in range(SEQUENCES_PER_VERSION)]


def has_effects(version: int, dtype: torch.dtype) -> bool:
    """Whether the canary of a version also tells the kinds of modules apart.

    In bfloat16 all do, because only many versions together show a kind. Version 0 equals the base.
    """
    return version > 0 and (dtype == torch.bfloat16 or version % EFFECTS_EVERY == 1)


def longest_prompt(run: RunDir) -> int:
    """Tokens of the longest training prompt, which the parent has looked up."""
    return run.read_count(run.canary_path, "longest_prompt_tokens")


def canary_logprobs(
    policy: Policy, sequences: Sequence[list[int]], image: ImageTokens | None = None
) -> list[list[float]]:
    """[S][L - 1] logprobs at temperature 1 of every token but the first. All ranks call it.

    `image`: with which every sequence begins. Computed in float32 also for a bfloat16 policy, so that only
    the engine's rounding is in the canary.
    """
    images = () if image is None else (image,)
    examples = [completion_example(s[:1], s[1:], group=i, images=images) for i, s in enumerate(sequences)]
    tokens = pack_tokens(examples, policy.packing, policy.device, policy.images)
    exact = Float32Arithmetic() if policy.dtype == torch.bfloat16 else nullcontext()
    with torch.no_grad(), exact:
        logprobs, _ = score(replace(policy, dtype=torch.float32), tokens, temperature=1.0)
    return [part.tolist() for part in torch.split(logprobs, [len(s) - 1 for s in sequences])]


def kind_effects(
    policy: Policy,
    sequences: Sequence[list[int]],
    logprobs: Sequence[Sequence[float]],
    image: ImageTokens | None = None,
) -> dict[str, list[list[float]]]:
    """Kind of module -> [S][L - 1] what the `logprobs` lose without its LoRA.

    The B matrices of one kind at a time are 0 for a pass, then get their bits back. All ranks call it.
    """
    effects = {}
    for kind, matrices in _b_matrices(policy).items():
        saved = [matrix.detach().clone() for matrix in matrices]
        with torch.no_grad():
            torch._foreach_zero_(matrices)
            without = canary_logprobs(policy, sequences, image)
            torch._foreach_copy_(matrices, saved)
        effects[kind] = [
            [a - b for a, b in zip(row, less, strict=True)]
            for row, less in zip(logprobs, without, strict=True)
        ]
    return effects


def _b_matrices(policy: Policy) -> dict[str, list[Tensor]]:
    """By the last name of their module."""
    found: dict[str, list[Tensor]] = {}
    for name, parameter in policy.lora.items():
        if is_b_matrix(name):
            module = name.partition(".lora_")[0].split(".")
            kind = next(part for part in reversed(module) if part != "base_layer")
            found.setdefault(kind, []).append(parameter)
    return found


def base_canary_logprobs(
    policy: Policy, sequences: Sequence[list[int]], image: ImageTokens | None = None
) -> list[list[float]]:
    """The same for the base model, without the adapter."""
    with policy.model.disable_adapter():
        return canary_logprobs(policy, sequences, image)


def check_reference(
    policy: Policy, sequences: Sequence[list[int]], must_agree: bool, image: ImageTokens | None = None
) -> float:
    """KL (k3, mean over the canary's tokens) of the policy to its reference before the first step.

    Raises TrainingDiverged if `must_agree` and the logprobs differ at all: the KL would pull the policy away
    from its start.
    """
    own = [x for row in canary_logprobs(policy, sequences, image) for x in row]
    with frozen_policy(policy, REF) as reference:
        ref = [x for row in canary_logprobs(reference, sequences, image) for x in row]
    kl = float(k3(torch.tensor(own), torch.tensor(ref)).mean())
    if must_agree and own != ref:
        raise TrainingDiverged(
            f"The KL to the reference is {kl:.3g} before the first step and must be 0: "
            "policy and reference differ.",
            "This is a bug in the model's code or in skylite. Set algorithm.kl_coef=0 to train without one.",
        )
    return kl
