"""`torchrun -m tests.integration.sharded_loading OUT MODEL...`: what two ranks hold of each model, how many
of them loaded it in full, and the logprobs and gradients they compute.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from skylite.adapters.experts import BOTH
from skylite.model import loading
from skylite.model.policy import load_policy, score
from skylite.model.process_group import process_group, set_threads
from skylite.types import ImageTokens, TrainingExample
from tests.cases import PROBE
from tests.decisions import resolved
from tests.pictures import picture
from tests.rows import completions_of
from tests.small_run import settings
from tests.tiny_models import IMAGE_TOKEN, READS_IMAGES


def main(out: Path, models: list[Path]) -> None:
    from skylite.model.fast_path_check import enable_shortcuts
    from skylite.model.packing import pack_tokens

    set_threads(1)
    found, full_loads = {}, count_full_loads()
    with process_group("cpu") as dist:
        for model in models:
            full_loads.clear()
            policy, _ = enable_shortcuts(
                load_policy(resolved(model, model), settings(lora=lora_of(model.name)), dist), PROBE
            )
            sharded = {n: p for n, p in policy.model.named_parameters() if isinstance(p, DTensor)}
            here = torch.tensor([float(sum(p.to_local().numel() for p in sharded.values()))])
            # Ranks of which one has images, and computes the tower, make one forward pass.
            examples = examples_of(model.name if dist.is_main else "")
            tokens = pack_tokens(examples, policy.packing, policy.device, policy.images)
            logprobs = score(policy, tokens, 1.0)[0]
            logprobs.sum().backward()
            weights = {n: p.full_tensor() for n, p in sharded.items()}
            total = float(sum(p.numel() for p in sharded.values()))
            found[model.name] = {
                "logprobs": logprobs.detach(),
                "gradients": {n: p.grad for n, p in policy.lora.items() if "lora_B" in n},
                "weights": weights,
                "share": float(dist.all_reduce_max_(here)) / total,
                "full_loads": int(dist.all_reduce_sum_(torch.tensor([float(len(full_loads))]))),
            }
        if dist.is_main:
            torch.save(found, out)


def lora_of(family: str) -> dict[str, Any]:
    """LoRA on all that the family may have it on."""
    reads_images = family in READS_IMAGES
    return {
        "target_parameters": BOTH if "moe" in family else [],
        "freeze_vision": not reads_images,
        "freeze_projection": not reads_images,
    }


def examples_of(family: str) -> list[TrainingExample]:
    """Two completions of a prompt, which has an image where the family reads images."""
    examples = completions_of([PROBE[:5]] * 2, [PROBE[5:9], PROBE[9:14]], [0, 0])
    if family not in READS_IMAGES:
        return examples
    image = ImageTokens(1, 4, picture(1, 16, 16))
    ids = [np.array([e.token_ids[0], *[IMAGE_TOKEN] * 4, *e.token_ids[5:]]) for e in examples]
    return [replace(e, token_ids=i, images=(image,)) for e, i in zip(examples, ids, strict=True)]


def count_full_loads() -> list[object]:
    """A list that gets an entry whenever this rank loads a full model."""
    calls, right = list[object](), loading._load_full

    def counted(*args: Any) -> Any:
        calls.append(args)
        return right(*args)

    setattr(loading, "_load_full", counted)  # noqa: B010
    return calls


if __name__ == "__main__":
    main(Path(sys.argv[1]), [Path(m) for m in sys.argv[2:]])
