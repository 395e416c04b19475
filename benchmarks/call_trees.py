"""Random trees of calls: how far is the gradient from that of padded single rows?

    python benchmarks/call_trees.py --seeds 300 --out benchmarks/results/call_trees_cpu.json

A call continues, branches off or repeats an earlier one, or starts a new history. Each seed is trained as a
tree in float32, cut into micro-batches of several sizes, as in tests/unit/test_call_tree_fuzz.py. Exit code 1
if a relative difference is 1e-5 or more.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

from command_line import argument_parser
from machine_info import machine_info

from skylite.run.files import write_json
from tests.small_run import lone_rank
from tests.tiny_models import make_tiny_model
from tests.unit.test_call_tree_fuzz import BUDGETS, differences

LIMIT = 1e-5


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--seeds", type=int, default=300)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    started = time.monotonic()
    largest = dict.fromkeys(BUDGETS, (0.0, -1))
    with tempfile.TemporaryDirectory(prefix="skylite-") as folder, lone_rank() as dist:
        model = make_tiny_model(Path(folder) / "llama")
        for seed in range(args.seeds):
            for budget, difference in differences(seed, model, dist).items():
                largest[budget] = max(largest[budget], (difference, seed))
            if (seed + 1) % 50 == 0:
                print(f"{seed + 1} seeds: {max(largest.values())[0]:.1e}", flush=True)
    rows = [
        {"tokens_per_micro_batch": budget, "largest_difference": difference, "seed": seed}
        for budget, (difference, seed) in largest.items()
    ]
    for row in rows:
        print("at most {tokens_per_micro_batch} tokens: {largest_difference:.2e}, seed {seed}".format(**row))
    if args.out is not None:
        seconds = round(time.monotonic() - started)
        write_json(args.out, {**machine_info(), "seeds": args.seeds, "seconds": seconds, "rows": rows})
    sys.exit(any(difference >= LIMIT for difference, _ in largest.values()))


if __name__ == "__main__":
    main()
