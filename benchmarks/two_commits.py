"""What did changes between two commits cost? Both run the default job on a CPU, in turns.

    git worktree add --detach BEFORE 8d54fc0
    python benchmarks/two_commits.py BEFORE . --prepare-before="--stand-in"

Each side prepares its own data, then trains with its own recipe gsm8k_cpu. `first step` are the seconds from
the command to the first line of metrics.jsonl, `step` the median seconds between the lines after it. CPU
seconds include all processes of the run. Ratios are medians over the rounds, after / before.
"""

from __future__ import annotations

import itertools
import os
import resource
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

from command_line import SKYLITE, argument_parser
from machine_info import commit, machine_info

from skylite.run.files import write_json

POLL_S = 0.02
Figures = dict[str, float]


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("before", type=Path, help="a checkout")
    parser.add_argument("after", type=Path, help="a checkout")
    for name in ("before", "after"):
        parser.add_argument(f"--prepare-{name}", default="--synthetic", help="flag that generates the data")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument(
        "--set", action="append", default=[], help="a setting for both, e.g. model.dtype=float32"
    )
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    sides = {"before": args.before.resolve(), "after": args.after.resolve()}
    rows: dict[str, list[Figures]] = {name: [] for name in sides}
    with tempfile.TemporaryDirectory(prefix="skylite-") as folder:
        for name, checkout in sides.items():
            generate = vars(args)[f"prepare_{name}"]
            prepare = start(checkout, "prepare", "gsm8k", generate, "--out", f"{folder}/data-{name}")
            if prepare.wait() != 0:
                raise subprocess.CalledProcessError(prepare.returncode, prepare.args)
        for number in range(args.rounds):
            for name in sorted(sides, reverse=number % 2 == 0):
                data, run = f"{folder}/data-{name}", Path(folder) / f"{name}-{number}"
                rows[name].append(run_figures(sides[name], data, run, args.steps, args.set))
                print(name, rows[name][-1], flush=True)
    found = {
        unit: {**{name: [row[unit] for row in rows[name]] for name in rows}, "ratio": ratio(rows, unit)}
        for unit in rows["after"][0]
    }
    print({unit: figure["ratio"] for unit, figure in found.items()})
    if args.out is not None:
        commits = {name: commit(checkout) for name, checkout in sides.items()}
        write_json(args.out, machine_info() | {"commits": commits, "steps": args.steps, "figures": found})


def ratio(rows: dict[str, list[Figures]], unit: str) -> float:
    """Median over the rounds of after / before."""
    pairs = zip(rows["after"], rows["before"], strict=True)
    return round(statistics.median(after[unit] / before[unit] for after, before in pairs), 3)


def start(checkout: Path, *words: str) -> subprocess.Popen[bytes]:
    env = {**os.environ, "PYTHONPATH": str(checkout / "src")}
    return subprocess.Popen([*SKYLITE, *words], cwd=checkout, env=env, stdout=subprocess.DEVNULL)


def run_figures(checkout: Path, data: str, run: Path, steps: int, settings: list[str]) -> Figures:
    """Seconds of a run. Raises CalledProcessError if it fails."""
    recipe = str(checkout / "recipes" / "gsm8k_cpu.toml")
    words = ("train", "--recipe", recipe, "--data", data, "--run", str(run), "--steps", str(steps))
    cpu_before, began, lines = cpu_seconds(), time.monotonic(), [0.0]
    process = start(
        checkout, *words, *(word for setting in ("eval.limit=0", *settings) for word in ("--set", setting))
    )
    metrics = run / "metrics.jsonl"
    while process.poll() is None:
        count = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
        lines += [time.monotonic() - began] * (count - len(lines) + 1)
        time.sleep(POLL_S)
    if process.returncode != 0:
        raise subprocess.CalledProcessError(process.returncode, words)
    gaps = [after - before for before, after in itertools.pairwise(lines[1:])]
    return {
        "first step, s": round(lines[1], 2),
        "step, s": round(statistics.median(gaps), 2),
        "run, s": round(time.monotonic() - began, 2),
        "run, CPU s": round(cpu_seconds() - cpu_before, 2),
    }


def cpu_seconds() -> float:
    """Of all ended children."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    main()
