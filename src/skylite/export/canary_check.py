"""Checks an exported model: its logprobs on the run's canary must be those that its weights should give."""

from __future__ import annotations

import importlib.metadata
import io
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from skylite.adapters.manifest import Canary, CanaryImage
from skylite.engine.canary_limits_bf16 import MAX_VISIBLE, Scores
from skylite.engine.canary_limits_float32 import read_float32
from skylite.engine.canary_reading import TOO_SMALL
from skylite.errors import ModelError, RunFailed
from skylite.hub.quantised import stored_tensors, widened
from skylite.hub.text_model import auto_class, quantised_format
from skylite.processes.hardware import Dtype

TOLERANCE = 0.002  # as for the engines of a run in float32
"""Largest difference of a logprob in nats, when the arithmetic is float32."""
ROUNDING_LIMIT = 0.1
"""Largest mean difference in nats of a program that computes in 16 bits."""
MAX_STANDARD_ERRORS, SLACK = 4.0, 0.05
"""How far the projection of such a program may be from 1."""
KEPT = 0.9
"""A note says what rounding took if the weights keep less than this share of the adapter's move."""

Rows = Sequence[Sequence[float]]
"""[S][L - 1] logprobs of the canary's tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """What a canary showed about an exported model."""

    what: str
    """Such as `merged weights in bfloat16`."""
    by: str
    """What computed the logprobs."""
    tokens: int
    gap_max: float
    """max |export - trainer| in nats."""
    gap_mean: float
    base_distance: float
    """mean |trainer - base| in nats: how far training moved the logprobs."""
    projection: float | None
    """How much of that move the export has; None if the adapter did not move them."""
    is_verified: bool
    """Whether the export is told from the base. Otherwise the move is too small to tell."""
    note: str = ""
    reference: str = "the trainer's"
    """Whose logprobs these should be."""

    def __str__(self) -> str:
        moved = "" if self.projection is None else f", {100 * self.projection:.1f} % of the adapter's move"
        return (
            f"{self.what}, computed by {self.by}: logprobs of {self.tokens} canary tokens differ from "
            f"{self.reference} by {self.gap_mean:.2g} nats on average, {self.gap_max:.2g} at most{moved}"
            f"{'' if self.is_verified else f' ({TOO_SMALL} from the base)'}"
        )


def check_export(
    what: str,
    by: str,
    logprobs: Rows,
    canary: Canary,
    *,
    is_exact: bool,
    rounded: Rows | None = None,
    base: Rows | None = None,
    reference: str = "the trainer's",
) -> Check:
    """Compare an export's logprobs with the right ones. Raises RunFailed if it is another model.

    Args:
        is_exact: the arithmetic is float32.
        rounded: what the adapter's weights give once they are rounded to the export's type. So rounding is no
            difference. None: the weights are not rounded, and the trainer's logprobs are right.
        base: of the base, computed by the same program. None: not known.
        reference: whose logprobs are in the canary.
    """
    own, policy, start = flat(logprobs), flat(canary.policy_logprobs), flat(canary.base_logprobs)
    right = policy if rounded is None else flat(rounded)
    if is_exact and base is not None:
        fault, is_verified = _compare_with_noise(Scores(
            engine=own, engine_base=flat(base), policy=right, base=start
        ))  # fmt: skip
    else:
        fault, is_verified = _compare(own, right, start, is_exact)
    if fault:
        raise RunFailed(
            f"The {what} compute other logprobs than they should ({by}): {fault}. Nothing was written.",
            "Report this with the versions of torch, transformers and peft.",
        )
    kept = _projection(own, policy, start)
    lost = rounded is not None and _projection(right, policy, start) < KEPT
    return Check(
        what=what,
        by=by,
        **_measured(own, policy, start, kept),
        is_verified=is_verified,
        note=f"the rounded weights keep {100 * kept:.0f} % of the adapter's move; --dtype float32 keeps all"
        if lost
        else "",
        reference=reference,
    )


def _measured(
    own: Sequence[float], policy: Sequence[float], start: Sequence[float], kept: float
) -> dict[str, Any]:
    """The numbers of a Check. `kept`: its projection, NaN if it has none."""
    gaps = [abs(a - b) for a, b in zip(own, policy, strict=True)]
    return {
        "tokens": len(own),
        "gap_max": max(gaps),
        "gap_mean": sum(gaps) / len(gaps),
        "base_distance": sum(abs(p - b) for p, b in zip(policy, start, strict=True)) / len(own),
        "projection": None if math.isnan(kept) else kept,
    }


def compare_bases(what: str, by: str, logprobs: Rows, base: Rows, canary: Canary) -> Check:
    """How an adapter moves the logprobs of another base than its own, beside how it moves those of its own.

    Another base has other logprobs, so nothing is refused.
    """
    own, own_base, policy, start = map(flat, (logprobs, base, canary.policy_logprobs, canary.base_logprobs))
    moved = [s + o - b for s, o, b in zip(start, own, own_base, strict=True)]
    kept = _projection(moved, policy, start)
    between = sum(abs(b - s) for b, s in zip(own_base, start, strict=True)) / len(own)
    return Check(
        what=what,
        by=by,
        **_measured(own, policy, start, kept),
        is_verified=True,
        note="this is not the model that was trained: without the adapter its logprobs differ by "
        f"{between:.2g} nats on average from those of the quantised base",
    )


def _compare_with_noise(scores: Scores) -> tuple[str, bool]:
    """(what is wrong, whether the export is told from the base), by the noise of the base's logprobs."""
    found = read_float32(scores)
    reading, moved = found.reading, abs(found.reading.projection - 1)
    is_near = max(found.base_gap, reading.gap_max) <= TOLERANCE and found.gap_rms <= found.gap_limit
    fault = "" if is_near and not moved > found.projection_limit else (
        f"{reading.gap_max:.3g} nats at most, {found.gap_rms:.3g} root mean square (allowed: {TOLERANCE} and "
        f"{found.gap_limit:.3g}), and {reading.projection:.2f} of the adapter's move (expected 1.00 +- "
        f"{found.projection_limit:.2g})"
    )  # fmt: skip
    return fault, reading.is_verified


def _compare(
    own: Sequence[float], right: Sequence[float], start: Sequence[float], is_exact: bool
) -> tuple[str, bool]:
    """The same without the base: the gaps themselves are the noise."""
    gaps = [a - b for a, b in zip(own, right, strict=True)]
    mean, largest = sum(map(abs, gaps)) / len(gaps), max(map(abs, gaps))
    energy = sum((p - b) ** 2 for p, b in zip(right, start, strict=True))
    error = math.sqrt(sum(g * g for g in gaps) / len(gaps) / energy) if energy > 0 else math.inf
    limit, projection = MAX_STANDARD_ERRORS * error + SLACK, _projection(own, right, start)
    is_near = largest <= TOLERANCE if is_exact else mean <= ROUNDING_LIMIT
    if is_near and not abs(projection - 1) > limit:
        return "", limit <= MAX_VISIBLE
    allowed = f"{TOLERANCE} at most" if is_exact else f"{ROUNDING_LIMIT} on average"
    return (
        f"{mean:.3g} nats on average, {largest:.3g} at most (allowed: {allowed}), and {projection:.2f} of "
        f"the adapter's move (expected 1.00 +- {limit:.2g})"
    ), False


def check_base(logprobs: Rows, canary: Canary) -> None:
    """Raise RunFailed unless the base computes what it did for the trainer."""
    own, base = flat(logprobs), flat(canary.base_logprobs)
    gap = max(abs(a - b) for a, b in zip(own, base, strict=True))
    if not gap <= TOLERANCE:
        raise RunFailed(
            f"The base model computes other logprobs than for the trainer: up to {gap:.3g} nats "
            f"(allowed: {TOLERANCE}). Nothing was written.",
            "Report this with the versions of torch and transformers.",
        )


def _projection(own: Sequence[float], policy: Sequence[float], start: Sequence[float]) -> float:
    """How much of the way from `start` to `policy` is gone: 1 for `policy`, NaN if they are equal."""
    energy = sum((p - b) ** 2 for p, b in zip(policy, start, strict=True))
    seen = sum((o - b) * (p - b) for o, p, b in zip(own, policy, start, strict=True))
    return seen / energy if energy > 0 else math.nan


def flat(rows: Rows) -> list[float]:
    return [x for row in rows for x in row]


def load_float32(folder: Path, widened_in: Dtype = "float32", **options: Any) -> Any:
    """A local transformers model in float32. Never runs code from the folder.

    `widened_in`: the dtype in which the trainer widened the matrices of a quantised model.
    """
    # Before torch is loaded: threads that spin take the cores from an engine on the same machine.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, modeling_gguf_pytorch_utils
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()  # skylite shows its own
    # The bar of GGUF files ignores that.
    modeling_gguf_pytorch_utils.tqdm = lambda items, **_: items
    path, model_class = str(folder), AutoModelForCausalLM  # that of a GGUF file, if there are options
    try:
        if not options:
            config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
            model_class = auto_class(config)
            if (form := quantised_format(folder)) is not None:
                del config.quantization_config
                model = model_class.from_config(config, dtype=torch.float32, trust_remote_code=False)
                tensors = widened(form, stored_tensors(folder), getattr(torch, widened_in))
                model.load_state_dict(dict(tensors), strict=False)  # the trainer has loaded all of them
                return model.eval()
        model = model_class.from_pretrained(
            path, dtype=torch.float32, local_files_only=True, trust_remote_code=False, **options
        )
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise ModelError(
            f"transformers cannot load {folder}: {type(error).__name__} {error}.",
            "Check that this version of transformers knows the model.",
        ) from None
    return model.eval()


def _read_image(image: CanaryImage, base: Path) -> dict[str, Any]:
    """The model's arguments for a picture."""
    from PIL import Image
    from transformers import AutoImageProcessor

    processor = AutoImageProcessor.from_pretrained(base, local_files_only=True, trust_remote_code=False)
    return dict(processor(images=[Image.open(io.BytesIO(image.data))], return_tensors="pt"))


def versions(*packages: str) -> str:
    """Such as `transformers 5.19.0 and peft 0.21.2`."""
    return " and ".join(f"{name} {importlib.metadata.version(name)}" for name in packages)


def model_logprobs(
    model: Any, sequences: Sequence[Sequence[int]], image: CanaryImage | None = None, base: Path | None = None
) -> list[list[float]]:
    """[S][L - 1] logprobs in nats of all tokens but each first, by a transformers model.

    Neighbours of one length are computed together, those with an image alone.
    `image`: with which every sequence begins, read by the image processor of the folder `base`.
    """
    import torch

    seen = {} if image is None or base is None else _read_image(image, base)
    found: list[list[float]] = []
    with torch.inference_mode():
        for _, rows in groupby(enumerate(sequences), key=lambda x: len(x[1]) if image is None else x[0]):
            tokens = torch.tensor([list(ids) for _, ids in rows])
            if image is not None:
                places = torch.zeros_like(tokens)
                places[:, image.start : image.start + image.length] = 1
                seen["mm_token_type_ids"] = places
            logits = model(input_ids=tokens, use_cache=False, **seen).logits[:, :-1].float()
            chosen = torch.log_softmax(logits, dim=-1).gather(2, tokens[:, 1:, None])
            found += chosen[..., 0].tolist()
    return found
