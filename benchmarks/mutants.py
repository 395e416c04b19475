"""`make mutants`: change one token of the code at a time, and count the changes that no unit test notices.

benchmarks/mutants.toml names the test files of each module, and explains the mutants that cannot be noticed.
--again RESULT tries only the survivors of an earlier result and corrects its numbers.
Exit code 1 if fewer than 95 % are noticed, unless each of the others has an explanation.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from queue import Queue
from typing import Any

from command_line import argument_parser
from machine_info import machine_info
from mutant_list import Mutant, changed_lines, mutants_of, mutated_source

ROOT = Path(__file__).resolve().parents[1]
PLAN = ROOT / "benchmarks" / "mutants.toml"
COPIED = (
    "src",
    "tests",
    "benchmarks",
    "recipes",
    "data_prep",
    "docs",
    "pyproject.toml",
    "Makefile",
    "README.md",
)
OUTCOMES = ("killed", "timeout", "survived")
MIN_KILLED = 0.95
ATTEMPTS = 3
"""Tests with time limits can fail on a busy machine."""
MAX_SECONDS = 60
"""CPU seconds of the tests of a module without a mutant."""
HEAVY = (
    "torch", "torch.distributed.fsdp", "transformers.models.llama.modeling_llama", "pyarrow.parquet",
    "pydantic", "safetensors.torch",
)  # fmt: skip
"""What a worker imports before it forks. Others take little time, and asyncio can fail after the fork."""


class Worker:
    """A process that tests mutants in its own copy of the repository."""

    def __init__(self, folder: Path, number: int) -> None:
        self.copy = copy_repository(folder / f"copy-{number}")
        script = [sys.executable, str(self.copy / "benchmarks" / "mutant_worker.py"), *HEAVY]
        self._process = subprocess.Popen(
            script, cwd=self.copy, env=environment(self.copy), stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def run(self, path: str, source: str, tests: Sequence[str], cpu_s: int) -> tuple[str, float, str]:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        job = {"path": path, "source": source, "tests": tests, "cpu_s": cpu_s}
        stdin.write(json.dumps(job).encode() + b"\n")
        stdin.flush()
        outcome, seconds, words = json.loads(stdout.readline())
        return outcome, seconds, words

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def test_path(name: str) -> str:
    """The argument of pytest for a name in the map, NAME or NAME::test_function."""
    file, colons, function = name.partition("::")
    return f"tests/unit/test_{file}.py{colons}{function}"


def copy_repository(target: Path) -> Path:
    target.mkdir()
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, target / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copyfile(source, target / name)
    return target


def environment(copy: Path) -> dict[str, str]:
    paths = {"PYTHONPATH": f"{copy / 'src'}:{copy}"}
    return {**os.environ, **paths, "OMP_NUM_THREADS": "1", "TMPDIR": str(copy.parent)}


class Tester:
    """Gives mutants to the workers until the time is over."""

    def __init__(self, workers: Sequence[Worker], tests: Mapping[str, list[str]], minutes: float) -> None:
        self.results: dict[Mutant, dict[str, Any]] = {}
        self._idle: Queue[Worker] = Queue()
        for worker in workers:
            self._idle.put(worker)
        self._num_workers, self._tests = len(workers), tests
        self._deadline = time.monotonic() + 60 * minutes
        self._locks = {path: threading.Lock() for path in tests}
        self._limits: dict[str, int] = {}

    def run(self, mutants: Sequence[Mutant]) -> None:
        """Fill `results`, in the order of `mutants`."""
        with ThreadPoolExecutor(self._num_workers) as pool:
            for work in [pool.submit(self._take, mutant) for mutant in mutants]:
                work.result()

    def _take(self, mutant: Mutant) -> None:
        if time.monotonic() > self._deadline:
            return
        source, text = (ROOT / mutant.path).read_text(encoding="utf-8"), mutated_source(ROOT, mutant)
        with self._locks[mutant.path]:
            if mutant.path not in self._limits:
                self._limits[mutant.path] = self._time_tests(mutant.path, source)
        outcome, seconds, words = self._test(mutant.path, text, self._limits[mutant.path])
        before, after = changed_lines(source, text)
        self.results[mutant] = {"outcome": outcome, "before": before, "after": after, "noticed_by": words}
        print(f"{len(self.results)} {outcome} {mutant.path}:{mutant.line} "
              f"{before}  ->  {after}  ({seconds:.1f} s) {words}", flush=True)  # fmt: skip

    def _test(self, path: str, source: str, cpu_s: int) -> tuple[str, float, str]:
        worker = self._idle.get()
        try:
            return worker.run(path, source, self._tests[path], cpu_s)
        finally:
            self._idle.put(worker)

    def _time_tests(self, path: str, source: str) -> int:
        """The limit of CPU seconds for a mutant of the module. Exits if its tests fail without one."""
        for _ in range(ATTEMPTS):
            outcome, seconds, words = self._test(path, source, MAX_SECONDS)
            if outcome == "survived":
                return 5 + int(4 * seconds)
        raise SystemExit(f"The tests of {path} fail without a mutant: {words}")


def report(
    every: Sequence[Mutant], results: Mapping[Mutant, dict[str, Any]], explained: Sequence[dict[str, str]]
) -> dict[str, Any]:
    """The numbers, and each survivor with its explanation ("" if there is none)."""
    reasons = {(e["path"], e["before"], e["after"]): e["reason"] for e in explained}
    survivors = [
        {"path": m.path, "line": m.line, "before": r["before"], "after": r["after"],
         "reason": reasons.get((m.path, r["before"], r["after"]), "")}
        for m, r in results.items() if r["outcome"] == "survived"
    ]  # fmt: skip
    modules: dict[str, dict[str, int]] = {}
    for path in dict.fromkeys(m.path for m in every):
        found = Counter(r["outcome"] for m, r in results.items() if m.path == path)
        modules[path] = {
            "mutants": sum(m.path == path for m in every), **{name: found[name] for name in OUTCOMES}
        }  # fmt: skip
    total = {name: sum(m[name] for m in modules.values()) for name in ("mutants", *OUTCOMES)}
    noticed = (total["killed"] + total["timeout"]) / len(results)
    return {
        "tried": len(results),
        **total,
        "noticed": round(noticed, 4),
        "modules": modules,
        "survivors": survivors,
    }


def is_enough(found: Mapping[str, Any]) -> bool:
    """Whether 95 % are noticed, or every survivor is explained."""
    return found["noticed"] >= MIN_KILLED or all(s["reason"] for s in found["survivors"])


def description(mutant: Mutant) -> tuple[str, str, str]:
    """Path, and the changed line before and after. Survives changes of other lines."""
    source = (ROOT / mutant.path).read_text(encoding="utf-8")
    return (mutant.path, *changed_lines(source, mutated_source(ROOT, mutant)))


def survivors_of(result: Mapping[str, Any]) -> set[tuple[str, str, str]]:
    return {(s["path"], s["before"], s["after"]) for s in result["survivors"]}


def corrected(earlier: Mapping[str, Any], again: Mapping[str, Any]) -> dict[str, Any]:
    """The earlier numbers, with its survivors counted by their second try.

    Exits if a survivor of the earlier result was not tried: its line has changed since.
    """
    if again["tried"] < len(earlier["survivors"]):
        raise SystemExit(
            f"{again['tried']} of {len(earlier['survivors'])} survivors still exist: run all again."
        )
    modules = {path: dict(counts) for path, counts in earlier["modules"].items()}
    for path, counts in again["modules"].items():
        # Equal lines of a file have one description, so that mutants killed before are tried again too.
        survived = modules[path]["survived"]
        modules[path]["survived"] = counts["survived"]
        modules[path]["timeout"] += counts["timeout"]
        modules[path]["killed"] += survived - counts["survived"] - counts["timeout"]
    total = {name: sum(m[name] for m in modules.values()) for name in ("mutants", *OUTCOMES)}
    return {
        "tried": earlier["tried"],
        **total,
        "noticed": round((total["killed"] + total["timeout"]) / earlier["tried"], 4),
        "first_commit": earlier["commit"],
        "modules": modules,
        "survivors": again["survivors"],
    }


def parse_arguments() -> argparse.Namespace:
    parser = argument_parser(__doc__)
    parser.add_argument("--minutes", type=float, default=1e6, help="stop then; the order is random")
    parser.add_argument("--seed", type=int, default=1, help="of the order")
    parser.add_argument(
        "--files", nargs="*", default=[], help="only modules whose path contains one of these"
    )
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--again", type=Path, help="a result; try only its survivors")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    plan = tomllib.loads(PLAN.read_text(encoding="utf-8"))
    tests = {
        f"src/skylite/{path}": [test_path(name) for name in names]
        for path, names in plan["tests"].items()
        if not args.files or any(part in path for part in args.files)
    }
    every = [mutant for path in tests for mutant in mutants_of(ROOT, path)]
    earlier = json.loads(args.again.read_text()) if args.again else {}
    if args.again:
        every = [mutant for mutant in every if description(mutant) in survivors_of(earlier)]
    mutants, started = random.Random(args.seed).sample(every, len(every)), time.monotonic()
    print(f"{len(every)} mutants", flush=True)
    with tempfile.TemporaryDirectory(prefix="skylite-mutants-") as name:
        workers = [Worker(Path(name), number) for number in range(args.workers)]
        try:
            tester = Tester(workers, tests, args.minutes)
            tester.run(mutants)
        finally:
            for worker in workers:
                worker.close()
    found = report(every, tester.results, plan.get("explained", []))
    if args.again:
        found = corrected(earlier, found)
    if args.out is not None:
        facts = {
            "cosmic-ray": version("cosmic-ray"),
            "seed": args.seed,
            "seconds": round(time.monotonic() - started),
        }
        args.out.write_text(json.dumps({**machine_info(), **facts, **found}, indent=1) + "\n")
    print({key: value for key, value in found.items() if key not in ("modules", "survivors")})
    unexplained = [s for s in found["survivors"] if not s["reason"]]
    print(
        "\n".join(
            f"no explanation: {s['path']}:{s['line']} {s['before']}  ->  {s['after']}" for s in unexplained
        )
    )
    sys.exit(not is_enough(found))


if __name__ == "__main__":
    main()
