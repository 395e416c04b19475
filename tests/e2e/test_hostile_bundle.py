"""A hostile bundle whose trainer and engine really start: the other commands are in tests/unit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.hostile_bundle import opened_bundle
from tests.unit.bad_inputs import call

pytestmark = [pytest.mark.e2e, pytest.mark.dist]


@pytest.mark.usefixtures("fake_engine")
def test_replay_and_eval_of_a_run_run_no_code_of_its_model_and_adapters(
    tmp_path: Path, tiny_llama: Path
) -> None:
    with opened_bundle(tmp_path, tiny_llama):
        replayed = call(["replay", "run-files", "--step", "1"])
        assert replayed.code == 1, replayed.output
        assert "different: step 1 again" in replayed.output
        evaluated = call(["eval", "run-files", "--data", "data"])
        assert evaluated.code == 2, evaluated.output
        assert "raised SecurityError" in evaluated.output, "its chat template, in the sandbox"


@pytest.mark.vllm
def test_vllm_loads_its_model_and_adapter_and_runs_no_code_of_them(
    tmp_path: Path,
    tiny_llama: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a template and a reward of the user's own, so that nothing refuses the run before vLLM starts."""
    own = tmp_path_factory.mktemp("own")
    (own / "template.jinja").write_text("{% for m in messages %}{{ m['content'] }}\n{% endfor %}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(own / "cache"))  # vLLM and Torch keep files there
    with opened_bundle(tmp_path, tiny_llama) as bundle:
        words = [
            "eval",
            "run-files",
            "--base",
            "--limit",
            "2",
            "--chat-template",
            str(own / "template.jinja"),
        ]
        small = [
            "--set",
            "rollout.max_prompt_tokens=256",
            "--set",
            "rollout.max_completion_tokens=4",
            "--set",
            "engine.kv_cache_gib=0.25",
        ]
        evaluated = call([*words, *small, "--set", 'reward.functions=["format"]', "--json"])
        assert evaluated.code == 0, evaluated.output
        results = json.loads((bundle.folder / "run-files/evals/compared-test-greedy.json").read_text())
        assert [r["adapter"] for r in results["results"]] == ["base", "policy-v000002"]
