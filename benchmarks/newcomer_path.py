"""A newcomer's first session, timed: a fresh clone, the first run, then everything after it.

    python benchmarks/newcomer_path.py --out benchmarks/results/newcomer_path_cpu.json

Clones this checkout's commit into an empty folder and runs there, one after another, what README and
quickstart show. Packages come from pip's cache if it has them. The time of a person who reads is not in it.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from command_line import argument_parser
from machine_info import machine_info

from skylite.run.files import write_json

ROOT = Path(__file__).resolve().parents[1]
SKYLITE = ".venv/bin/skylite"
AFTER_THE_RUN = {
    "look at completions": f"{SKYLITE} samples RUN --best",
    "report": f"{SKYLITE} report RUN",
    "evaluate 64 problems": f"{SKYLITE} eval RUN --limit 64",
    "evaluate the base on them": f"{SKYLITE} eval RUN --limit 64 --step 0",
    "export the adapter": f"{SKYLITE} export RUN",
    "export merged weights": f"{SKYLITE} export RUN --merge",
    "chat: one question": f"echo 'What is 7 plus 5?' | {SKYLITE} chat RUN --temperature 0 --max-tokens 32",
}
"""What each command is for, and the command."""


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--steps", type=int, help="steps of the first run")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory(prefix="skylite-") as text:
        clone = Path(text) / "skylite"
        rows.append(timed("clone", f"git clone --quiet {ROOT} {clone}", Path(text)))
        first = "make lora-gsm8k" + (f" ARGS='--steps {args.steps}'" if args.steps else "")
        rows.append(timed("install, prepare, train", first, clone))
        (run,) = (clone / "runs").iterdir()
        for purpose, command in AFTER_THE_RUN.items():
            rows.append(timed(purpose, command.replace("RUN", f"runs/{run.name}"), clone))
    total = sum(row["seconds"] for row in rows)
    print(f"{total:7.1f} s  in {len(rows)} commands")
    if args.out is not None:
        for row in rows:
            row["command"] = row["command"].replace(str(ROOT), "CHECKOUT").replace(text, "FOLDER")
        write_json(args.out, machine_info() | {"seconds": round(total, 1), "commands": rows})


def timed(purpose: str, command: str, folder: Path) -> dict[str, Any]:
    """Run in a shell as a newcomer types it. Ends the script with the command's output if it fails."""
    started = time.perf_counter()
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command],
        cwd=folder,
        env=clean_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    seconds = time.perf_counter() - started
    last = done.stdout.strip().splitlines()[-1:]
    if done.returncode != 0:
        raise SystemExit(f"{command} ended with {done.returncode}:\n{done.stdout[-3000:]}")
    print(f"{seconds:7.1f} s  {purpose}: {' '.join(last)[:100]}", flush=True)
    return {"purpose": purpose, "command": command, "seconds": round(seconds, 1)}


def clean_environment() -> dict[str, str]:
    """Without this script's own virtual environment."""
    return {key: value for key, value in os.environ.items() if key not in ("VIRTUAL_ENV", "PYTHONPATH")}


if __name__ == "__main__":
    main()
