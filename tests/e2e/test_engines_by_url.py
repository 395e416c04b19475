"""A run on engines that somebody else started, in folders of their own: one is killed and restarted, and a
resume names another.
"""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest

from skylite.rollout.session import read_events
from skylite.run.run_dir import RunDir
from tests.e2e.project import Project
from tests.e2e.running import DEADLINE_S, running, wait_for_step
from tests.fakes.receiver import Receiver, receivers
from tests.fakes.vllm_server import VllmStub, vllm_servers
from tests.tiny_models import tiny_tokenizer

pytestmark = [pytest.mark.e2e, pytest.mark.dist]


def engine_events(root: Path) -> list[tuple[str, int]]:
    events = read_events(RunDir(root).events_path)
    return [(e["event"], e["engine"]) for e in events if e["event"].startswith("engine_")]


def urls(stubs: list[VllmStub], made: list[Receiver]) -> tuple[str, ...]:
    pairs = (("engine.urls", stubs), ("engine.push_urls", made))
    return tuple(w for name, all in pairs for w in ("--set", f"{name}={json.dumps([x.url for x in all])}"))


def test_a_run_goes_on_without_a_killed_engine_and_takes_it_back(
    project: Project, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("THEIR_KEY", "sesame")
    root = project.root / "by-url"
    flags = (
        "--set",
        "eval.limit=0",
        "--set",
        "sync.rollout_mismatch=warn",
        "--set",
        "engine.key_env=THEIR_KEY",
        "--set",
        "engine.push_key_env=THEIR_KEY",
    )
    stubs = vllm_servers(2, token="sesame", tokenizer=tiny_tokenizer(), sample_s=0.1, hidden=root)
    with stubs as (first, second), receivers(tmp_path, 2) as made:
        args = project.train_args("by-url", 900, *flags, *urls([first, second], made))
        with running(project, *args) as process:
            wait_for_step(project, process, "by-url", 1)
            second.stop()
            for back, events in ((False, 1), (True, 2)):
                if back:
                    second.log.clear()
                    second.start()
                deadline = time.monotonic() + DEADLINE_S
                while len(engine_events(root)) < events:
                    assert process.poll() is None, process.communicate()[0]
                    assert time.monotonic() < deadline
                    time.sleep(0.05)
            wait_for_step(project, process, "by-url", len(project.metrics("by-url")) + 2)
            process.send_signal(signal.SIGINT)
            output, _ = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 130, output
        assert engine_events(root) == [("engine_left_out", 1), ("engine_taken_back", 1)]
        assert "It is left out until it is back; 1 of 2 engines do its work." in output
        steps = [m["step"] for m in project.metrics("by-url")]
        assert steps == list(range(1, len(steps) + 1))
        assert (
            "sesame" not in (root / "config.json").read_text() + (root / "logs" / "skylite.log").read_text()
        )
        verbs = [line.split()[0] for line in second.log if "probe" not in line]
        assert verbs.index("load") < verbs.index("score") < verbs.index("sample")

        second.stop()
        names = {line.split()[1] for line in first.log if line.startswith("load ")}
        first.log.clear()
        words = ("train", "--resume", "by-url", "--steps", str(steps[-1] + 1))
        # The key may go to an address that you name together with its variable.
        key = ("--set", "engine.key_env=THEIR_KEY", "--set", "engine.push_key_env=THEIR_KEY")
        done = project.run(*words, *key, *urls([first], made[:1]), timeout_s=DEADLINE_S)
        assert done.returncode == 0, done.stderr
        again = {line.split()[1] for line in first.log if line.startswith("load ")}
        assert again
        assert first.adapters == {}, "the run's end unloads them"
        assert made[0].names == [], "and deletes what it sent"
        assert not names & again, "its cache would answer for the names that it knows"
    assert not list((root / "logs").glob("engine-*")), "skylite started none"
