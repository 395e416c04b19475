"""`skylite eval`, `chat` and `export`, with the fake engine in place of vLLM."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from skylite.evaluation.versions import Subject, waves
from skylite.run.run_dir import AdapterVersion, RunDir
from tests.e2e.project import FAKE_ENGINE
from tests.unit.bad_inputs import call
from tests.unit.export_cases import make_run

FAKE = ("--set", FAKE_ENGINE[0])
COMMAND = [sys.executable, "-c", "from skylite.cli.main import main; main()"]


@pytest.fixture(scope="module")
def run(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    return make_run(tmp_path_factory.mktemp("eval"), tiny_llama, versions=(0, 1, 2))


@pytest.fixture(autouse=True)
def in_its_folder(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2] / "src"))
    monkeypatch.chdir(run.root.parent)


def skylite(*args: str, text: str) -> subprocess.CompletedProcess[str]:
    """A process that reads `text`."""
    return subprocess.run([*COMMAND, *args], input=text, capture_output=True, text=True, timeout=300)


def test_many_versions_and_the_base_are_evaluated_and_compared(run: RunDir) -> None:
    done = call(["eval", "run", "--steps", "0,2", "--base", "--n", "4", "--max-loras", "1", "--json", *FAKE])
    assert done.code == 0, done.output
    assert done.output == done.out
    facts = json.loads(done.out)
    assert [r["adapter"] for r in facts["results"]] == ["base", "policy-v000000", "policy-v000002"]
    assert [r["version"] for r in facts["results"]] == [None, 0, 2]
    assert [(c["adapter"], c["baseline"], c["test"]) for c in facts["comparisons"]] == [
        ("policy-v000000", "base", "paired bootstrap"),
        ("policy-v000002", "base", "paired bootstrap"),
    ]
    first = facts["results"][0]
    assert (first["problems"], first["n"]) == (4, 4)
    assert set(first["pass_at"]) == {"1", "2", "4"}
    assert "majority" in first
    stored = json.loads((run.evals / "compared-test-mean4.json").read_text())
    assert stored == facts
    rows = {
        name: pq.read_table(run.evals / f"{name}-data-test-mean4.parquet").to_pylist()
        for name in ("base", "policy-v000000", "policy-v000002")
    }
    assert all(len(r) == 16 for r in rows.values())
    texts = {name: [row["completion"] for row in r] for name, r in rows.items()}
    assert texts["policy-v000000"] != texts["policy-v000002"] != texts["base"], "each sampled its own"


def test_one_version_is_printed_for_a_person(run: RunDir) -> None:
    done = call(["eval", "run", *FAKE])
    assert done.code == 0, done.output
    assert "policy-v000002 on data (test)" in done.out
    assert "accuracy, greedy" in done.out
    assert (run.evals / "policy-v000002-data-test-greedy.json").exists()


def test_the_base_alone_and_every_kept_version(run: RunDir, tiny_llama: Path) -> None:
    settings = ("--set", "rollout.max_completion_tokens=8")
    done = call(["eval", "--base", "--model", str(tiny_llama), "--data", "data", *settings, *FAKE])
    assert done.code == 0, done.output
    assert (run.root.parent / "evals" / "base-data-test-greedy.json").exists()
    every = call(["eval", "run", "--all", *FAKE])
    assert every.code == 0, every.output
    assert [f"policy-v{v:06d} on data (test)" in every.out for v in range(3)] == [True] * 3
    assert "against policy-v000000: " in every.out
    assert "learning curve" in every.out


def test_the_base_plays_the_episodes_of_an_environment(run: RunDir, tiny_llama: Path) -> None:
    prepared = call(["prepare", "guess", "--synthetic", "--out", "guess"])
    assert prepared.code == 0, prepared.output
    words = ("--base", "--model", str(tiny_llama), "--env", "guess", "--data", "guess", "--limit", "2")
    limits = ("env.max_turns=3", "env.max_tokens=1536", "rollout.max_completion_tokens=8")
    done = call(["eval", *words, *FAKE, *(word for limit in limits for word in ("--set", limit))])
    assert done.code == 0, done.output
    assert "base on guess (test)" in done.out
    rows = pq.read_table(run.root.parent / "evals" / "base-guess-test-greedy.parquet").to_pylist()
    assert [len(row["turns"]) for row in rows] == [3, 3], "a byte model names no number"
    assert all(row["observed"][1].startswith("user: ") for row in rows)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("run", "--steps", "0,7"), "no adapter of step 7 (available steps: 0, 1, 2)"),
        (("run", "--steps", "0", "--all"), "exclude each other"),
        (("--base", "--all"), "no run was given"),
        (("run", "--data", "data", "--data", "data"), "Two data sets are named 'data'"),
    ],
)
def test_bad_flags_are_one_sentence(run: RunDir, args: tuple[str, ...], message: str) -> None:
    done = call(["eval", *args])
    assert (done.code, done.out) == (2, "")
    assert message in done.output
    assert "Traceback" not in done.output


def test_waves_hold_at_most_so_many_adapters_and_the_base_needs_no_place() -> None:
    subjects = [Subject(None), *(Subject(AdapterVersion(v, Path("x"))) for v in range(5))]
    names = [[s.name for s in wave] for wave in waves(subjects, 2)]
    assert [len(n) for n in names] == [3, 2, 1]
    assert names[0][0] == "base"


def test_a_chat_begins_as_the_training_prompts_and_remembers(run: RunDir) -> None:
    done = skylite("chat", "run", "--step", "1", *FAKE, text="hello\nagain\n/reset\nnew\n/quit\nignored\n")
    assert done.returncode == 0, done.stderr
    # System prompt and one example are three messages; each turn adds two.
    assert "policy-v000001 4 hello" in done.stdout
    assert "policy-v000001 6 again" in done.stdout
    assert "policy-v000001 4 new" in done.stdout
    assert "ignored" not in done.stdout
    assert "\x1b" not in done.stdout, "the model's escape sequences do not reach the terminal"


def test_a_chat_with_the_base_and_another_system_prompt(run: RunDir) -> None:
    done = skylite("chat", "run", "--base", "--system", "Be brief.", *FAKE, text="hello\n")
    assert "base 2 hello" in done.stdout, "it ends with the input"


def test_a_server_that_is_not_there_is_a_sentence(run: RunDir) -> None:
    done = call(["chat", "--url", "http://127.0.0.1:9"])
    assert done.code == 1
    assert "does not answer" in done.output
    assert call(["chat", "--url", "nonsense"]).code == 2


@pytest.mark.parametrize("form", [("--step", "1"), ("--merge", "--dtype", "bfloat16")])
def test_an_export_prints_what_its_check_measured(run: RunDir, tmp_path: Path, form: tuple[str, ...]) -> None:
    done = call(["export", "run", *form, "--out", str(tmp_path / "out")])
    assert done.code == 0, done.output
    assert "canary tokens differ from the trainer's by" in done.output
    assert done.out.startswith("exported policy-v00000")
    assert (tmp_path / "out" / "README.md").exists()
    done = call(["export", "run", *form, "--out", str(tmp_path / "again"), "--json"])
    found = json.loads(done.out)
    assert (found["folder"], found["checks"][0]["tokens"] > 0) == (str(tmp_path / "again"), True)


@pytest.mark.parametrize(
    ("form", "message"),
    [
        (("--gguf",), "nor convert-hf-to-gguf is on the PATH"),
        (("--push", "mine"), "has no owner"),
        (("--best",), "which is not trained"),  # the fixture's run scores best before its first step
    ],
)
def test_an_export_that_cannot_work_is_refused_at_once(
    run: RunDir, form: tuple[str, ...], message: str
) -> None:
    done = call(["export", "run", *form])
    assert (done.code, done.out) == (2, "")
    assert message in done.output
    assert not (run.root / "exports").exists()
