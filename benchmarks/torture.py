"""`make torture`: kill runs in every phase and at random moments, resume, compare; bad inputs; a soak.

Results are added to --out, so that the parts can run one at a time (--seconds limits a part). "commits"
lists the commits of all parts, "planned" the number of cases of a full `make torture`: what the file lacks
was not run. Exit code 1 if anything in the file failed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
from shared import argument_parser

from tests.tiny_models import make_tiny_model
from tests.torture.cases import KINDS, SIGNALS, Result, as_row, matrix_cases, random_cases
from tests.torture.ground import SETTINGS, VLLM_SETTINGS, Ground, make_ground
from tests.torture.kills import torture, undisturbed
from tests.torture.moments import PHASES
from tests.torture.soak import soak, soak_faults

ROOT = Path(__file__).resolve().parents[1]
FUZZ_TESTS = ("tests/unit/test_bad_inputs.py", "tests/unit/test_bad_replies.py")
LISTS = ("lost_steps", "torn", "orphans", "tracebacks", "hangs")
KEPT = 3
"""Soak: adapters that stay besides version 0."""
PLANNED = {
    "fake, matrix": len(matrix_cases()),
    "fake, 2 ranks, matrix": len(SIGNALS) * len(PHASES),
    "vllm, matrix": len(SIGNALS) * len(PHASES),
    "fake, random moments": 200,
    "fake, 2 ranks, random moments": 20,
    "vllm, random moments": 20,
    "soak_steps": 300,
    "bad_inputs": 1000,
}


def main() -> None:
    args = parse_arguments()
    # The runs must end with this process. Shells ignore SIGINT for background jobs: handle it here.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit(1))
    deadline = time.monotonic() + args.seconds
    results = load(args.out)
    for piece in map(load, args.add):
        results = {
            name: [*results[name], *(row for row in rows if row not in results[name])]
            for name, rows in piece.items()
        }
        save(args.out, results)
    with tempfile.TemporaryDirectory(prefix="torture-") as folder:
        model = make_tiny_model(Path(folder) / "model")
        settings = (*SETTINGS, *(VLLM_SETTINGS if args.engine == "vllm" else ()), *args.set)
        if args.matrix or args.random:
            kill(make_ground(Path(folder), model, args.engine, args.ranks, settings), args, results, deadline)
        if args.soak:
            # Nothing is compared here, so vLLM may batch.
            settings = (*settings, f"sync.keep_last={KEPT}", "engine.max_num_seqs=32")
            ground = make_ground(Path(folder), model, args.engine, args.ranks, settings)
            found = soak(ground, "soak", args.soak, args.restart_every, deadline - time.monotonic())
            results["soaks"].append({"commit": commit(), **found})
            save(args.out, results)
        if args.bad_inputs:
            results["bad_input_runs"].append({"commit": commit(), **bad_inputs(args.bad_inputs)})
            save(args.out, results)
    if wrong := failures(summarise(results)):
        sys.exit(f"failed: {json.dumps(wrong)}")


def parse_arguments() -> argparse.Namespace:
    parser = argument_parser(__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "torture.json")
    parser.add_argument("--engine", choices=["fake", "vllm"], default="fake")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument(
        "--matrix", action="store_true", help="every kind of process in every phase, SIGKILL and SIGSTOP"
    )
    parser.add_argument("--phases", nargs="+", default=list(PHASES), help="phases of --matrix")
    parser.add_argument("--kinds", nargs="+", help="processes of --matrix: parent, rank-1, engine-core ...")
    parser.add_argument("--random", type=int, default=0, help="number of signals at random moments")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--bad-inputs", type=float, default=0, help="how many times the 300 inputs of the unit tests"
    )
    parser.add_argument("--soak", type=int, default=0, help="steps of the soak")
    parser.add_argument(
        "--restart-every", type=int, default=50, help="steps between engine kills of the soak"
    )
    parser.add_argument("--seconds", type=float, default=86400.0, help="start no round after this time")
    parser.add_argument("--add", type=Path, nargs="+", default=[], help="result files to merge into --out")
    parser.add_argument("--keep", type=Path, help="folder for copies of failed runs")
    parser.add_argument("--set", action="append", default=[], metavar="A.B=VALUE")
    return parser.parse_args()


def kill(ground: Ground, args: argparse.Namespace, results: dict[str, Any], deadline: float) -> None:
    """Run the cases that the results lack, until the deadline."""
    expected, seconds = undisturbed(ground)
    core = ("engine-core",) if args.engine == "vllm" else ()
    kinds = (*KINDS, *(f"rank-{i}" for i in range(1, args.ranks)), *core)
    wanted = args.kinds or kinds
    matrix = matrix_cases(kinds) if args.matrix else []
    cases = [case for case in matrix if case.phase in args.phases and case.kind in wanted]
    cases += random_cases(args.random, seconds, args.seed)
    done = {key(row) for row in results["cases"]}
    cases = [c for c in cases if key(as_row(Result(c, args.engine), args.ranks)) not in done]
    for of_round in torture(ground, cases, expected, deadline):
        rows = [{**as_row(result, args.ranks), "commit": commit()[:12]} for result in of_round]
        results["cases"] += rows
        for row in rows:
            print(json.dumps(row), flush=True)
        save(args.out, results)
        if args.keep is not None and not all(result.well for result in of_round):
            shutil.copytree(
                ground.project.root, args.keep / str(int(time.time())), ignore=shutil.ignore_patterns("model")
            )


def key(row: dict[str, Any]) -> tuple[Any, ...]:
    """The fields that identify a case."""
    return tuple(row[name] for name in ("engine", "ranks", "asked", "phase", "signal", "number"))


def bad_inputs(factor: float) -> dict[str, Any]:
    """Run the fuzz tests with `factor` times their inputs and count the outcomes."""
    began = time.monotonic()
    command = [sys.executable, "-m", "pytest", "-q", "-s", *FUZZ_TESTS]
    env = {**os.environ, "FUZZ_FACTOR": str(factor)}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=env)
    text = done.stdout
    found = re.findall(r"(\d+) refused with a reason, (\d+) accepted", text)
    return {
        "factor": factor,
        "refused": sum(int(refused) for refused, _ in found),
        "accepted": sum(int(accepted) for _, accepted in found),
        "tracebacks": len(re.findall(r"^E .*Traceback", text, re.M)),
        "hangs": len(re.findall(r"^E .*DeadlineExceeded|Timeout", text, re.M)),
        "passed": done.returncode == 0,
        "seconds": round(time.monotonic() - began),
    }


def load(path: Path) -> dict[str, Any]:
    """The results so far, with this commit and command added."""
    found = json.loads(path.read_text()) if path.exists() else {}
    return {
        "commits": sorted({*found.get("commits", []), commit()}),
        "commands": sorted({*found.get("commands", []), *command()}),
        **{name: found.get(name, []) for name in ("cases", "soaks", "bad_input_runs")},
    }


def save(path: Path, results: dict[str, Any]) -> None:
    """Write the summary, then one line per case."""
    summary = summarise(results) | {
        "commit": commit(),
        "command": "; ".join(results["commands"]),
        "machine": machine(),
    }
    lines = [f" {json.dumps(k)}: {json.dumps(v)}" for k, v in summary.items()]
    for name, rows in results.items():
        body = ",\n".join(f"  {json.dumps(row)}" for row in rows)
        lines.append(f" {json.dumps(name)}: [\n{body}\n ]" if rows else f" {json.dumps(name)}: []")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def summarise(results: dict[str, Any]) -> dict[str, Any]:
    """Counts over all rows."""
    cases = [row for row in results["cases"] if row["fired"]]
    fuzz, soaks = results["bad_input_runs"], results["soaks"]
    count = {name: sum(len(row.get(name, [])) for row in cases) for name in LISTS}
    return {
        "kills": len(cases),
        "lost_steps": count["lost_steps"],
        "torn": count["torn"] + sum(len(run["torn"]) for run in soaks),
        "orphans": count["orphans"],
        "unequal_resumes": sum(bool(row.get("unequal")) for row in cases),
        "bad_inputs": sum(run["refused"] for run in fuzz),
        "tracebacks": count["tracebacks"] + sum(run["tracebacks"] for run in fuzz),
        "hangs": count["hangs"] + sum(run["hangs"] for run in fuzz),
        "failed_bad_input_runs": sum(not run["passed"] for run in fuzz),
        "soak_faults": [fault for run in soaks for fault in soak_faults(run, KEPT)],
        "kills_by": dict(sorted(Counter(part(row) for row in cases).items())),
        "resumes": sum(row["exit"] is not None for row in cases),
        "in_phase": sum(row["in_phase"] for row in cases if row["phase"] != "random"),
        "finished_steps_checked": sum(row["finished"] for row in cases),
        "not_fired": len(results["cases"]) - len(cases),
        "soak_steps": {run["engine"]: run["steps"] for run in soaks},
        "planned": PLANNED,
        "times": times(cases),
    }


def part(row: dict[str, Any]) -> str:
    """The part of `make torture` that a case belongs to."""
    ranks = "" if row["ranks"] == 1 else f"{row['ranks']} ranks, "
    return f"{row['engine']}, {ranks}{'random moments' if row['phase'] == 'random' else 'matrix'}"


def failures(summary: dict[str, Any]) -> dict[str, Any]:
    """Counts that should be 0, and lists that should be empty, but are not."""
    names = (*LISTS, "unequal_resumes", "failed_bad_input_runs", "soak_faults")
    return {name: summary[name] for name in names if summary[name]}


def times(cases: list[dict[str, Any]]) -> dict[str, dict[str, float | None]]:
    """Numbers by engine, kind and signal.

    Medians: `ended_s` from the signal to the run's end, `resume_s` from the resume to the verified adapter.
    """
    table: dict[str, dict[str, float | None]] = {}
    for engine, kind, sent in sorted({(r["engine"], r["kind"], r["signal"]) for r in cases}):
        rows = [r for r in cases if (r["engine"], r["kind"], r["signal"]) == (engine, kind, sent)]
        table[f"{engine}: {kind} {sent}"] = {
            "cases": len(rows),
            "survived": sum(r["exit"] is None for r in rows),
            "ended_s": median([r["ended_s"] for r in rows if r["exit"] is not None]),
            "resume_s": median([r["resume_s"] for r in rows if r["resume_s"] is not None]),
            "repeated_steps_max": max(r["redone"] for r in rows),
        }
    return table


def median(values: list[float]) -> float | None:
    return round(statistics.median(values), 2) if values else None


def command() -> list[str]:
    """This command without its paths. Empty if it only merges result files."""
    words = iter(sys.argv[1:])
    kept = [word for word in words if word not in ("--out", "--keep") or next(words) is None]
    return [shlex.join(["benchmarks/torture.py", *kept])] if "--add" not in kept else []


def commit() -> str:
    command = ["git", "rev-parse", "HEAD"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def machine() -> str:
    memory = psutil.virtual_memory().total / 2**30
    cpu = platform.processor() or platform.machine()
    return f"{cpu}, {os.cpu_count()} CPUs, {memory:.0f} GiB, {platform.system()}"


if __name__ == "__main__":
    main()
