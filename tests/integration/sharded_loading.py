"""`torchrun -m tests.integration.sharded_loading OUT MODEL...`: what two ranks hold of each model, and the
logprobs they compute.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

from skylite.model.policy import load_policy, score
from skylite.model.process_group import process_group, set_threads
from tests.cases import PROBE
from tests.small_run import resolved, settings


def main(out: Path, models: list[Path]) -> None:
    from skylite.model.fast_paths import enable_fast_paths
    from skylite.model.packing import pack_tokens

    set_threads(1)
    found = {}
    with process_group("cpu") as dist:
        for model in models:
            policy, _ = enable_fast_paths(load_policy(resolved(model, model), settings(), dist), PROBE)
            sharded = {n: p for n, p in policy.model.named_parameters() if isinstance(p, DTensor)}
            here = torch.tensor([float(sum(p.to_local().numel() for p in sharded.values()))])
            tokens = pack_tokens(
                [PROBE[:5]] * 2, [PROBE[5:9], PROBE[9:14]], [0, 0], policy.packing, policy.device
            )
            with torch.no_grad():
                logprobs = score(policy, tokens, 1.0)[0]
            weights = {n: p.full_tensor() for n, p in sharded.items()}
            total = float(sum(p.numel() for p in sharded.values()))
            found[model.name] = {
                "logprobs": logprobs,
                "weights": weights,
                "share": float(dist.all_reduce_max_(here)) / total,
            }
        if dist.is_main:
            torch.save(found, out)


if __name__ == "__main__":
    main(Path(sys.argv[1]), [Path(m) for m in sys.argv[2:]])
