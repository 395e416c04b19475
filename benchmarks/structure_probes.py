"""How often does the probe of model/checked_shortcuts.py accept a right structure, and a wrong one?

    python benchmarks/structure_probes.py --out benchmarks/results/structure_probes_cpu.json

SmolLM2-135M and tiny random models of other families, in bfloat16. Each probe is 24 random tokens. Every kind
of wrong structure (tests/wrong_structures.py) gets the same number of probes. Reports how many were accepted,
and the largest and smallest mean logprob difference.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from itertools import chain
from pathlib import Path
from typing import Any

from command_line import argument_parser
from machine_info import machine_info

from skylite.hub.resolve import resolve_model
from skylite.model.checked_shortcuts import TOLERANCE
from skylite.model.policy import Policy, load_policy
from skylite.model.process_group import Dist
from skylite.run.files import write_json
from tests.small_run import lone_rank, resolved, settings
from tests.tiny_models import make_tiny_model
from tests.wrong_structures import WRONG, tree_gap, wrong_norm_gap

FAMILIES = ("smollm2-135m", "qwen3", "llama", "gemma3", "mistral")
PROBE_TOKENS = 24


def main() -> None:
    args = parse_arguments()
    kinds = ["right", *WRONG, "wrong norm"]
    gaps: dict[str, dict[str, list[float]]] = {kind: {} for kind in kinds}
    with tempfile.TemporaryDirectory(prefix="skylite-") as folder, lone_rank() as dist:
        for family in FAMILIES:
            policy = policy_of(family, Path(folder), dist)
            for kind in kinds:
                count = args.right if kind == "right" else args.wrong
                gaps[kind][family] = measure(policy, kind, -(-count // len(FAMILIES)))
                print(family, kind, json.dumps(summary(gaps[kind][family])), flush=True)
    result: dict[str, Any] = {kind: summary([*chain(*gaps[kind].values())]) for kind in kinds}
    print(json.dumps(result, indent=1))
    if args.out:
        by_family = {kind: {f: summary(g) for f, g in gaps[kind].items()} for kind in kinds}
        write_json(args.out, machine_info() | {"tolerance": TOLERANCE, "all": result, "families": by_family})


def parse_arguments() -> argparse.Namespace:
    parser = argument_parser(__doc__)
    parser.add_argument("--right", type=int, default=1000, help="probes of the right structure")
    parser.add_argument("--wrong", type=int, default=200, help="probes of each wrong structure")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def policy_of(family: str, folder: Path, dist: Dist) -> Policy:
    tiny = family != "smollm2-135m"
    model = make_tiny_model(folder / family, family) if tiny else Path(resolve_model(family).path)
    return load_policy(resolved(model, model).model_copy(update={"dtype": "bfloat16"}), settings(), dist)


def measure(policy: Policy, kind: str, count: int) -> list[float]:
    """The gaps of `count` random probes."""
    gap = wrong_norm_gap if kind == "wrong norm" else tree_gap
    tokens = range(min(policy.model.config.vocab_size, 256))
    probes = [random.Random(seed).choices(tokens, k=PROBE_TOKENS) for seed in range(count)]
    if kind not in WRONG:
        return [gap(policy, probe) for probe in probes]
    with WRONG[kind]():
        return [gap(policy, probe) for probe in probes]


def summary(gaps: list[float]) -> dict[str, float]:
    return {
        "probes": len(gaps),
        "accepted": sum(gap <= TOLERANCE for gap in gaps),
        "smallest": min(gaps),
        "largest": max(gaps),
    }


if __name__ == "__main__":
    main()
