"""Three runs made to go bad, judged by the alarms of `skylite report` alone.

    python benchmarks/bad_runs.py --folder FOLDER --out benchmarks/results/bad_runs_cpu.json

SmolLM2-135M on generated grade-school problems, with real vLLM and a real trainer:

- collapse: a learning rate 20 times that of the recipe
- reward hacking: the weight of the right answer is small against a reward for long completions
- no signal: problems with four reasoning steps, which the model never solves

FOLDER keeps runs and reports; a run that is there is not run again. Exit code 1 if an alarm is missing.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from command_line import SKYLITE, argument_parser, set_flags
from machine_info import machine_info

from skylite.report.read_run import read_facts
from skylite.run.files import write_json

REWARD = "def long(completion):\n    return min(len(completion), 300) / 300\n"
SHOWN = (
    "reward/mean",
    "reward/right_frac",
    "policy/entropy",
    "completion/tokens_mean",
    "groups/zero_std_frac",
)


@dataclass(frozen=True)
class BadRun:
    """What is wrong with a run, and the alarm that must say so."""

    alarm: str
    settings: dict[str, object]
    rewards: tuple[str, ...] = ()
    num_steps: int = 20
    every: int = 5
    """Steps between evaluations."""


RUNS = {
    "collapse": BadRun("collapse", {"optim.lr": 3e-3}),
    "hacked": BadRun(
        "reward hacking", {"optim.lr": 3e-4, "reward.weights": [0.1, 1.0]}, rewards=("gsm8k", "long")
    ),
    "no-signal": BadRun("no signal", {"data.difficulty": [4]}, every=0),
}


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="for runs and reports")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=list(RUNS))
    args = parser.parse_args()
    folder = args.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "hack.py").write_text(REWARD, encoding="utf-8")
    data = folder / "data"
    if not (data / "train.parquet").exists():
        skylite("prepare", "gsm8k", "--synthetic", "--out", str(data))
    found = {name: judged(name, RUNS[name], folder, data) for name in args.runs}
    if args.out:
        write_json(args.out, machine_info() | {"runs": found})
    missing = [
        name for name, row in found.items() if row["expected"] not in [a["kind"] for a in row["alarms"]]
    ]
    if missing:
        sys.exit(f"no alarm said what is wrong with: {', '.join(missing)}")


def judged(name: str, bad: BadRun, folder: Path, data: Path) -> dict[str, Any]:
    """Train the run, and what its report says."""
    run = folder / name
    if not run.exists():
        train(bad, run, folder, data)
    said = skylite("report", str(run), "--out", str(folder / f"{name}.html"), "--json")
    (report,) = json.loads(said)["runs"]
    facts = read_facts(run)
    first, last = facts.metrics[0], facts.metrics[-1]
    row = {
        "expected": bad.alarm,
        "settings": bad.settings,
        "steps": report["steps"],
        "held_out": {h.version: h.score.mean for h in facts.held_out},
        "metrics": {key: [first.get(key), last.get(key)] for key in SHOWN},
        "alarms": report["alarms"],
    }
    print(json.dumps({name: row}, indent=1), flush=True)
    return row


def train(bad: BadRun, run: Path, folder: Path, data: Path) -> None:
    settings = {
        "rollout.prompts_per_step": 4,
        "eval.limit": 64 if bad.every else 0,
        "eval.every": bad.every,
        **{key: value for key, value in bad.settings.items() if not isinstance(value, list)},
        **{key: json.dumps(value) for key, value in bad.settings.items() if isinstance(value, list)},
    }
    rewards = [word if word == "gsm8k" else f"{folder}/hack.py:{word}" for word in bad.rewards]
    skylite(
        "train", "--recipe", "gsm8k_cpu", "--data", str(data), "--run", str(run),
        "--steps", str(bad.num_steps), *set_flags(settings),
        *[word for reward in rewards for word in ("--reward", reward)],
    )  # fmt: skip


def skylite(*words: str) -> str:
    """The stdout of a skylite command, which must succeed."""
    return subprocess.run([*SKYLITE, *words], stdout=subprocess.PIPE, text=True, check=True).stdout


if __name__ == "__main__":
    main()
