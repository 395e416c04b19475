"""The flags of the command line: scripts depend on them, so a change must be deliberate."""

from __future__ import annotations

from typing import Any

import typer

from skylite.cli.main import app

LOGGING = {"--verbose", "--quiet"}
FLAGS = {
    "prepare": {
        "--out", "--source", "--synthetic", "--first-source", "--difficulty", "--question", "--answer",
        "--no-answer", "--reward", "--set", "--limit", "--seed", "--config", "--split", "--validation-split",
        "--test-split", "--system", "--few-shot", "--answer-template", "--best-reward", "--replace",
        "--model", "--sft", "--pairs",
        "--where", "--drop-failing", "--json", *LOGGING,
    },
    "train": {
        "--recipe", "--model", "--data", "--rank", "--alpha", "--steps", "--epochs", "--lr",
        "--group-size", "--seed",
        "--reward", "--env", "--from-adapter", "--run", "--resume", "--at", "--max-hours", "--max-restarts",
        "--log", "--dry-run", "--set", "--chat-template", "--template-arg", *LOGGING,
    },
    "sweep": {
        "--recipe", "--model", "--data", "--rank", "--alpha", "--steps", "--epochs", "--lr",
        "--group-size", "--seed", "--reward", "--env", "--from-adapter", "--max-restarts", "--log", "--set",
        "--chat-template", "--template-arg", "--grid", "--seeds", "--together", "--halve-every", "--out",
        "--resume", "--dry-run", *LOGGING,
    },
    "eval": {
        "--base", "--model", "--data", "--env", "--split", "--limit", "--n", "--step", "--steps", "--all",
        "--max-loras", "--seed", "--json", "--set", "--chat-template", "--template-arg", *LOGGING,
    },
    "chat": {
        "--model", "--step", "--base", "--url", "--system", "--temperature", "--max-tokens", "--set",
        *LOGGING,
    },
    "export": {
        "--step", "--best", "--merge", "--merge-into", "--dtype", "--gguf", "--out", "--base-name",
        "--check-vllm", "--push", "--public", "--json", *LOGGING,
    },
    "worker": {"--join", "--interface", "--set", *LOGGING},
    "receive": {"--host", "--port", "--ssl-certfile", "--ssl-keyfile", *LOGGING},
    "replay": {"--set", "--step", "--json", *LOGGING},
    "serve": {"--model", "--step", "--host", "--port", "--set", *LOGGING},
    "service": {
        "--out", "--host", "--port", "--dry-run", "--max-length", "--policies", "--session-timeout",
        "--model", "--rank", "--set", *LOGGING,
    },
    "probe": {"--adapter", "--base", "--step", "--name", "--text", "--depth", "--json", *LOGGING},
    "adapters": set(),
    "watch": {"--json", *LOGGING},
    "report": {"--out", "--completions", "--json", *LOGGING},
    "samples": {
        "--step", "--held-out", "--prompt", "--contains", "--min-reward", "--max-reward", "--best", "--worst",
        "--limit", "--json", *LOGGING,
    },
    "runs": {"--json", *LOGGING},
    "env": set(),
    "doctor": {"--json", *LOGGING},
    "models": {"--from-adapter", "--chat-template", "--set", "--json", *LOGGING},
    "plan": {"--model", "--gpus", "--rank", "--tokens", "--recipe", "--set", "--json", *LOGGING},
    "log": {"--to", "--json", *LOGGING},
}  # fmt: skip


def test_the_flags_are_unchanged() -> None:
    group: Any = typer.main.get_command(app)
    found = {
        name: {o for p in c.params for o in (*p.opts, *p.secondary_opts) if o.startswith("--")}
        for name, c in group.commands.items()
    }
    assert found == FLAGS
    assert set(group.commands["adapters"].commands) == {"list", "verify", "gc"}


WITHOUT_JSON = {
    "train": "--dry-run prints JSON; watch --json follows a run",
    "sweep": "watch --json follows each of its runs; report --json compares them",
    "worker": "watch --json follows the run",
    "serve": "runs until it is stopped",
    "service": "runs until it is stopped",
    "receive": "runs until it is stopped",
    "chat": "a conversation",
}


def test_every_command_that_prints_facts_has_json() -> None:
    group: Any = typer.main.get_command(app)
    commands = {
        f"{name} {sub}".strip(): command
        for name, entry in group.commands.items()
        for sub, command in getattr(entry, "commands", {"": entry}).items()
    }
    without = {name for name, c in commands.items() if "--json" not in {o for p in c.params for o in p.opts}}
    assert without == set(WITHOUT_JSON)
