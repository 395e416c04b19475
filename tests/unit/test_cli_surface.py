"""The command line people script against: a flag is added here on purpose or not at all."""

from __future__ import annotations

import typer

from skylite.cli import app

FLAGS = {
    "prepare": {"--out", "--source", "--synthetic", "--first-source", "--difficulty", "--question", "--answer", "--reward", "--limit", "--seed"},
    "train": {
        "--recipe", "--model", "--data", "--rank", "--alpha", "--steps", "--lr", "--group-size", "--seed", "--from-adapter", "--run",
        "--resume", "--at", "--max-hours", "--max-restarts", "--dry-run", "--set",
    },
    "eval": {"--base", "--model", "--data", "--split", "--limit", "--n", "--step", "--seed", "--set"},
    "replay": {"--step"},
    "sync": set(),
    "serve": {"--model", "--step", "--port"},
}  # fmt: skip


def test_the_flags_are_these() -> None:
    group = typer.main.get_command(app)
    found = {
        name: {o for p in c.params for o in p.opts if o.startswith("--")}
        for name, c in group.commands.items()
    }  # type: ignore[attr-defined]
    assert found == FLAGS
