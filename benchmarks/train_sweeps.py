"""Sweep the train phase over group size (with and without shared prompts), completion length, rank and ranks.

    python benchmarks/train_sweeps.py --out FILE.json --picture FILE.svg         (needs the bench extra)

Each row is one process of train_phase.py on random samples: one group of 8 completions of 128 tokens after a
prompt of 106 tokens, LoRA rank 32, except for the swept size. Rows that --out already holds are not measured
again.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import train_phase
from command_line import argument_parser
from machine_info import machine_info

from skylite.run.files import write_json

BASE: dict[str, Any] = {
    "prompts": 1,
    "group_size": 8,
    "prompt": 106,
    "completion": 128,
    "rank": 32,
    "budget": 1200,
    "packing": "tree",
    "checkpointing": "selective",
}
SWEEPS: dict[str, list[dict[str, Any]]] = {
    "sharing": [
        {"group_size": size, "packing": packing} for size in (4, 8, 16) for packing in ("tree", "padded")
    ],
    "rank": [{"rank": rank} for rank in (8, 16, 32, 64, 128)],
    "ranks": [{"prompts": 2, "ranks": ranks} for ranks in (1, 2)],
    "completion": [{"completion": length} for length in (64, 128, 256, 512, 1024)],
}


def main() -> None:
    args = parse_arguments()
    rows = json.loads(args.out.read_text(encoding="utf-8"))["rows"] if args.out.exists() else []
    for sweep, points in SWEEPS.items():
        for point in points:
            if sweep in args.sweeps and not any(row["sweep"] == sweep and row | point == row for row in rows):
                axes = BASE | {"ranks": 1} | point
                args.ranks = axes.pop("ranks")
                rows.append({"sweep": sweep, **train_phase.in_own_process(args, axes)})
                print(json.dumps(rows[-1]), flush=True)
                write_json(
                    args.out,
                    machine_info() | {"counted_steps": args.steps - 1, "dtype": args.dtype, "rows": rows},
                )
    if args.picture:
        draw(rows, args.picture)


def parse_arguments() -> argparse.Namespace:
    parser = argument_parser(__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--sweeps", nargs="+", choices=SWEEPS, default=list(SWEEPS))
    parser.add_argument("--steps", type=int, default=4, help="per row; the first is not counted")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--picture", type=Path)
    return parser.parse_args(namespace=argparse.Namespace(vocab=20000, publish=False, offload=False))


def draw(rows: list[dict[str, Any]], picture: Path) -> None:
    """Plot seconds per step over each swept size, and peak memory."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot as plt

    figure, (sharing, length, rank) = plt.subplots(1, 3, figsize=(12, 3.8), layout="constrained")
    of = {name: [row for row in rows if row["sweep"] == name] for name in SWEEPS}
    for packing, label in (("tree", "prompt once a group"), ("padded", "prompt in every row")):
        points = [row for row in of["sharing"] if row["packing"] == packing]
        sharing.plot(
            [p["group_size"] for p in points], [p["seconds"] for p in points], marker="o", label=label
        )
    sharing.set(xlabel="group size", ylabel="seconds per step", ylim=0, xticks=[4, 8, 16])
    sharing.legend(fontsize="small")
    for axes, key, label in ((length, "completion", "completion tokens"), (rank, "rank", "LoRA rank")):
        seconds = axes.plot(
            [p[key] for p in of[key]], [p["seconds"] for p in of[key]], marker="o", label="seconds per step"
        )
        axes.set(xlabel=label, ylim=0, xticks=[p[key] for p in of[key]])
        axes.tick_params(axis="x", rotation=45)
        memory = axes.twinx()
        peak = memory.plot(
            [p[key] for p in of[key]],
            [p["peak_gib"] for p in of[key]],
            marker="s",
            color="grey",
            label="peak GiB",
        )
        memory.set_ylim(bottom=0)
        memory.set_ylabel("GiB")
        axes.legend(handles=[*seconds, *peak], fontsize="small")
    figure.savefig(picture, metadata={"Date": None})


if __name__ == "__main__":
    main()
