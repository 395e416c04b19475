"""How long does each command take to start? `--help` of all, and the commands that do little else.

    python benchmarks/command_start.py --out benchmarks/results/command_start_cpu.json

Each command runs in a process of its own, in turn with the others, `--rounds` times after a first round that
is not counted. The run that commands read is made up (tests/made_up_runs.py): 40 steps. Printed: median and
largest seconds, and CPU seconds. --imports COMMAND prints the slowest imports of a command instead.
"""

from __future__ import annotations

import argparse
import resource
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import typer
from command_line import argument_parser
from machine_info import machine_info

from skylite.cli import app
from skylite.run.files import write_json

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.made_up_runs import write_made_up_run

SKYLITE = str(Path(sys.executable).with_name("skylite"))
REAL = (
    "--version",
    "runs runs",
    "samples runs/healthy",
    "watch runs/healthy --json",
    "adapters list runs/healthy",
    "adapters verify runs/healthy",
    "report runs/healthy --out report.html",
    "prepare rows.jsonl --question q --answer a --reward exact_match",
    "train --recipe gsm8k_cpu --data data/rows --set rollout.prompts_per_step=4 --dry-run",
    "doctor",
)
"""Cheap commands as a person types them, in a folder with a run and rows."""


def main() -> None:
    args = parse_arguments()
    commands = [f"{name} --help".strip() for name in ["", *command_names()]] + list(REAL)
    with tempfile.TemporaryDirectory(prefix="skylite-") as text:
        folder = Path(text)
        write_made_up_run(folder / "runs", "healthy")
        rows = (f'{{"q": "Say {i}.", "a": "{i}"}}\n' for i in range(64))
        (folder / "rows.jsonl").write_text("".join(rows), encoding="utf-8")
        if args.imports:
            return print_imports(args.imports, folder, args.count)
        every: dict[str, list[tuple[float, float]]] = {command: [] for command in commands}
        for number in range(args.rounds + 1):
            for command in commands:
                measured = timed(command, folder)
                if number:
                    every[command].append(measured)
    table = {command: summary(rounds) for command, rounds in every.items()}
    for command, row in table.items():
        print(
            f"{row['median_s']:6.2f} s  {row['max_s']:6.2f} s  CPU {row['cpu_s']:5.2f} s  skylite {command}"
        )
    if args.out:
        write_json(args.out, machine_info() | {"rounds": args.rounds, "commands": table})


def parse_arguments() -> argparse.Namespace:
    parser = argument_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--imports", metavar="COMMAND", help="print the slowest imports of this command")
    parser.add_argument("--count", type=int, default=20)
    return parser.parse_args()


def command_names() -> list[str]:
    """Every command, those of groups with the name of their group."""
    group: Any = typer.main.get_command(app)
    return [
        f"{name} {sub}".strip()
        for name, entry in group.commands.items()
        for sub in getattr(entry, "commands", {"": entry})
    ]


def timed(command: str, folder: Path) -> tuple[float, float]:
    """Wall and CPU seconds of a command, which must end with 0, or 1 where it found something wrong."""
    before, start = children_cpu_s(), time.perf_counter()
    done = subprocess.run(
        [SKYLITE, *shlex.split(command)], cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    wall = time.perf_counter() - start
    if done.returncode not in (0, 1) or "Traceback" in done.stderr:
        raise SystemExit(f"skylite {command} ended with {done.returncode}:\n{done.stderr}")
    return wall, children_cpu_s() - before


def children_cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def summary(rounds: list[tuple[float, float]]) -> dict[str, float]:
    walls, cpu = zip(*rounds, strict=True)
    return {
        "median_s": round(statistics.median(walls), 3),
        "max_s": round(max(walls), 3),
        "cpu_s": round(statistics.median(cpu), 3),
    }


def print_imports(command: str, folder: Path, count: int) -> None:
    """The modules whose own code takes longest to import, of `skylite COMMAND`."""
    code = "import sys; sys.argv = ['skylite', *sys.argv[1:]]; from skylite.entry_point import main; main()"
    words = [sys.executable, "-X", "importtime", "-c", code, *shlex.split(command)]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    lines = [
        line for line in done.stderr.splitlines() if line.startswith("import time:") and "[us]" not in line
    ]
    print(*sorted(lines, key=lambda x: int(x.split("|")[1]))[-count:], sep="\n")


if __name__ == "__main__":
    main()
