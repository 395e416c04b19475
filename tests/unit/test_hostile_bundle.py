"""Every command on a bundle from a stranger: none of its code runs, and nothing outside of it changes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
import typer

from skylite.cli import watch as watch_command
from skylite.cli.main import app
from skylite.processes.child import ProcessSpec
from skylite.rollout import run_session
from skylite.run.run_dir import RunDir
from tests.hostile_bundle import RUNS, Bundle, Trap, make_bundle, opened_bundle
from tests.unit.bad_inputs import Reply, call
from tests.unit.test_logger_faults import FAKE_WANDB

SMALL = ["--set", "eval.limit=0", "--set", "data.difficulty=[]", "--set", "rollout.prompts_per_step=2"]
START = "import sys\nfrom skylite.entry_point import main\nsys.exit(main())\n"


@pytest.fixture
def bundle(tmp_path: Path, tiny_llama: Path) -> Iterator[Bundle]:
    with opened_bundle(tmp_path, tiny_llama) as made:
        yield made


def refused(args: list[str], words: str) -> None:
    reply = call(args)
    assert reply.code == 2, reply.output
    assert words in reply.output
    assert "\x1b" not in reply.output


def ran(args: list[str]) -> Reply:
    reply = call(args)
    assert reply.code == 0, reply.output
    assert "\x1b" not in reply.output
    return reply


def train(*words: str) -> list[str]:
    return ["train", "--model", "model", "--run", "new", *SMALL, *words]


def test_its_code_would_leave_a_trace(tmp_path: Path, tiny_llama: Path) -> None:
    """So that the other tests can fail."""
    made = make_bundle(tmp_path, tiny_llama)
    for name in ("vllm.py", "data_prep/gsm8k.py", "model/modeling_evil.py"):
        subprocess.run([sys.executable, str(made.folder / name)], check=True)
    subprocess.run([str(made.folder / "nvidia-smi")], check=True)
    exec(*Trap(made.trace).__reduce__()[1])
    assert made.trace.read_text() == "vllm data_prep/gsm8k model/modeling_evil nvidia-smi pickle "


def test_the_program_itself_in_the_bundle(bundle: Bundle, tmp_path_factory: pytest.TempPathFactory) -> None:
    """As pip installs it. The other tests call it in this process, which has imported nearly everything."""
    script = tmp_path_factory.mktemp("bin") / "skylite"
    script.write_text(START)
    words = ["adapters", "list", "run-files"]
    done = subprocess.run([sys.executable, str(script), *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "policy-v000002" in done.stdout


def test_prepare(bundle: Bundle) -> None:
    columns = ["--question", "q", "--answer", "a", "--reward", "math"]
    ran(["prepare", "rows.jsonl", *columns, "--out", "own"])
    ran(["prepare", "gsm8k", "--synthetic", "--out", "gsm8k-data"])


def test_train_on_its_data_and_recipe(bundle: Bundle) -> None:
    for more in ([], ["--dry-run"]):
        refused(train("--recipe", "gsm8k_cpu", "--data", "data", *more), "not named on this machine yourself")
        refused(train("--recipe", "gsm8k_cpu", "--data", "data-gym", *more), "evaluates parts of data")
        refused(train("--recipe", "./evil.toml", *more), "not named on this machine yourself")
        refused(train("--recipe", "./recipes/gsm8k_cpu.toml", *more), "not named on this machine yourself")
        refused(train("--recipe", "./launcher.toml", *more), "launcher.toml names the launcher")


def test_train_with_its_model_and_a_reward_of_ones_own_ends_before_the_engines(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its adapter and data. The model's chat template asks for more than the sandbox gives."""
    started = []

    async def stop(plan: Any, **_: Any) -> bool:
        started.append(plan.config.model.name)
        return True

    monkeypatch.setattr(run_session, "run_session", stop)
    words = ["--recipe", "gsm8k_cpu", "--data", "data-gym", "--from-adapter", "adapter"]
    lora = ["--rank", "4", "--alpha", "8", "--set", 'reward.functions=["format"]']
    for more in (["--dry-run"], []):
        refused(train(*words, *lora, *more), "'__class__' of 'str' object is unsafe")
    assert started == []


@pytest.mark.parametrize("kind", RUNS)
def test_resume(bundle: Bundle, kind: str) -> None:
    words = {
        "programs": "not named on this machine",
        "launcher": "names the launcher",
        "links": "is a link out of the run",
        "outputs": "is a link out of the run",
        "sync": "another run",
        "files": "is not the one that the run was trained on",
    }
    for more in ([], ["--dry-run"]):
        refused(["train", "--resume", f"run-{kind}", *more], words[kind])


def test_eval_on_its_data(bundle: Bundle) -> None:
    refused(["eval", "--base", "--model", "model", "--data", "data"], "not named on this machine yourself")
    refused(["eval", "adapter", "--model", "model", "--data", "data-gym"], "evaluates parts of data")


@pytest.mark.parametrize("words", [["serve", "--model", "model"], ["chat", "--model", "model"], ["eval"]])
def test_a_launcher_that_only_its_run_names(bundle: Bundle, words: list[str]) -> None:
    command, *more = words
    refused([command, "run-launcher", *more], "policy-v000002 names the launcher" if more else "run-launcher")


@pytest.mark.parametrize("kind", ["programs", "links", "sync"])
def test_eval_and_replay_of_its_runs(bundle: Bundle, kind: str) -> None:
    """tests/e2e has the run whose trainer and engine really start."""
    program = "a Python program that you have not named on this machine yourself"
    refused(["eval", f"run-{kind}"], program if kind == "programs" else "is not an adapter folder")
    refused(["replay", f"run-{kind}", "--step", "1"], program if kind == "programs" else "is not a published")


@pytest.mark.parametrize("kind", ["programs", "links"])
def test_a_machine_that_joins_its_run(bundle: Bundle, kind: str) -> None:
    config = bundle.folder / f"run-{kind}" / "config.json"
    tree = json.loads(config.read_text())
    tree["config"]["trainer"] |= {"hosts": 2, "interface": "lo"}
    config.write_text(json.dumps(tree))
    program = "a Python program that you have not named on this machine yourself"
    words = program if kind == "programs" else "is a link out of the run"
    refused(["worker", "--join", f"run-{kind}"], words)


def test_a_link_in_place_of_what_a_command_writes_below_a_run(bundle: Bundle) -> None:
    run = RunDir(bundle.folder / "run-outputs")
    refused(["eval", "run-outputs"], f"{run.evals} is a link out of")
    refused(["export", "run-outputs"], f"{run.exports} is a link out of")
    refused(["log", "run-outputs", "--to", "tensorboard"], f"{run.logs} is a link out of")
    for folder in (run.logs, run.loggers):
        folder.unlink()
        folder.mkdir()
        (folder / "tensorboard").symlink_to(bundle.precious)
        refused(["log", "run-outputs", "--to", "tensorboard"], f"{folder / 'tensorboard'} is a link out of")
        (folder / "tensorboard").unlink()
        (folder / "logger-tensorboard.log").symlink_to(bundle.precious / "file")
        refused(["log", "run-outputs", "--to", "tensorboard"], f"{folder / 'logger-tensorboard.log'} is a")
        (folder / "logger-tensorboard.log").unlink()


def test_a_link_in_place_of_the_evals_of_the_working_folder(bundle: Bundle) -> None:
    (bundle.folder / "evals").symlink_to(bundle.precious)
    refused(["eval", "--base", "--model", "model", "--data", "data"], "evals is a link out of")


@pytest.mark.parametrize("target", [*(f"run-{kind}" for kind in RUNS), "adapter"])
def test_serve_up_to_the_start_of_vllm(bundle: Bundle, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[ProcessSpec] = []

    def stop(spec: ProcessSpec) -> NoReturn:
        assert os.path.isdir(spec.argv[spec.argv.index("--model") + 1])
        started.append(spec)
        raise SystemExit(0)

    monkeypatch.setattr("skylite.cli.serve.start", stop)
    monkeypatch.setattr("skylite.cli.serve.check_address", lambda *_: "http://127.0.0.1:8000")
    call(["serve", target, "--model", "model"])
    for spec in started:
        assert spec.argv[0] == sys.executable, (
            "an absolute path, so that no program of the working folder runs"
        )
        assert "--trust-remote-code" not in spec.argv
        assert bundle.folder not in spec.log_path.parents
    assert len(started) == (target in ("run-programs", "run-outputs", "run-files", "adapter"))


@pytest.mark.parametrize("kind", RUNS)
def test_adapters(bundle: Bundle, kind: str) -> None:
    for words in (["adapters", "list", f"run-{kind}"], ["adapters", "verify", f"run-{kind}"]):
        reply = call(words)
        assert reply.code in (0, 1), reply.output
        assert "\x1b" not in reply.output
    reply = call(["adapters", "gc", f"run-{kind}"])
    assert reply.code == (2 if kind in ("links", "outputs", "sync") else 0), reply.output
    assert os.path.lexists(bundle.folder / f"run-{kind}" / "config.json")


@pytest.mark.parametrize("kind", RUNS)
def test_watch_report_samples_and_runs(bundle: Bundle, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page must not hold a file of the user that the run links to, either."""
    monkeypatch.setattr(watch_command, "SILENT_S", 0.0)  # watch ends at once with a run that has no process
    secret = bundle.folder / "secret.json"
    secret.write_text('{"token": "mine alone"}')
    (bundle.folder / f"run-{kind}" / "machine.json").symlink_to(secret)
    for words in (["watch", f"run-{kind}"], ["samples", f"run-{kind}"], ["runs", "."]):
        reply = call(words)
        assert reply.code in (0, 2), reply.output
        assert "\x1b" not in reply.output
    ran(["report", f"run-{kind}", "--out", "page.html"])
    assert "mine alone" not in (bundle.folder / "page.html").read_text()


@pytest.mark.parametrize("kind", RUNS)
def test_export(bundle: Bundle, kind: str) -> None:
    """Its adapter was trained on another model."""
    words = "is not an adapter folder" if kind in ("links", "sync") else "files of the model changed"
    reply = call(["export", f"run-{kind}", "--out", "exported"])
    assert reply.code in (1, 2), reply.output
    assert words in reply.output
    assert "\x1b" not in reply.output
    assert not (bundle.folder / "exported").exists()


@pytest.mark.parametrize("kind", RUNS)
def test_log(
    bundle: Bundle,
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """To a library that does nothing."""
    package = tmp_path_factory.mktemp("packages") / "wandb"
    package.mkdir()
    (package / "__init__.py").write_text(FAKE_WANDB.format(log=str(package / "got"), fault="pass"))
    monkeypatch.setenv("PYTHONPATH", f"{package.parent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.syspath_prepend(str(package.parent))
    words = ["log", f"run-{kind}", "--to", "wandb"]
    if kind in ("links", "outputs"):
        refused(words, "is a link out of")
    else:
        ran(words)


@pytest.mark.parametrize("target", [*(f"run-{kind}" for kind in RUNS), "adapter"])
def test_chat(bundle: Bundle, target: str) -> None:
    reply = call(["chat", target, "--model", "model", "--url", "http://127.0.0.1:1"])
    assert reply.code in (1, 2), reply.output
    assert "\x1b" not in reply.output


def test_doctor(bundle: Bundle) -> None:
    reply = call(["doctor"])
    assert reply.code in (0, 1), reply.output
    assert "\x1b" not in reply.output


def test_models(bundle: Bundle) -> None:
    reply = call(["models", "model"])
    assert reply.code in (0, 2), reply.output
    assert "\x1b" not in reply.output


def test_plan(bundle: Bundle) -> None:
    """It computes, and runs nothing that a recipe names."""
    for recipe in ([], ["--recipe", "./evil.toml"]):
        reply = call(["plan", "--model", "model", "--gpus", "8x80", *recipe])
        assert reply.code in (0, 1, 2), reply.output
        assert "\x1b" not in reply.output


def test_sweep(bundle: Bundle) -> None:
    words = ["sweep", "--model", "model", "--grid", "seed=0,1", "--out", "new", *SMALL]
    for more in ([], ["--dry-run"]):
        refused(
            [*words, "--recipe", "gsm8k_cpu", "--data", "data", *more], "not named on this machine yourself"
        )
        refused([*words, "--recipe", "./evil.toml", *more], "not named on this machine yourself")
    for kind in RUNS:
        refused(["sweep", "--resume", f"run-{kind}"], "")


def test_service_up_to_its_start(bundle: Bundle) -> None:
    reply = call(["service", "--model", "model", "--out", "new", "--dry-run"])
    assert reply.code in (0, 2), reply.output
    assert "\x1b" not in reply.output
    for kind in RUNS:
        refused(["service", "--model", "model", "--out", f"run-{kind}", "--dry-run"], "")


def test_receive_into_a_link(bundle: Bundle) -> None:
    (bundle.folder / "there").symlink_to(bundle.precious)
    refused(["receive", "there"], "there is a symbolic link")


@pytest.mark.parametrize("target", [*(f"run-{kind}" for kind in RUNS), "adapter"])
def test_probe(bundle: Bundle, target: str) -> None:
    reply = call(["probe", "http://127.0.0.1:1", "--adapter", target, "--base", "model"])
    assert reply.code in (1, 2), reply.output
    assert "\x1b" not in reply.output


@pytest.mark.parametrize(("episode", "data"), [("guess", "data"), ("reasoning-gym", "data-gym")])
def test_env_check(bundle: Bundle, episode: str, data: str) -> None:
    words = ["env", "check", episode, "--data", data, "--episodes", "1", "--reply", "x"]
    refused([*words, "--model", "model"], "'__class__' of 'str' object is unsafe")
    (bundle.folder / "model" / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    reply = call([*words, "--model", "model"])
    assert reply.code == 1, reply.output
    assert "The episode of prompt t/train/0" in reply.output, "it reads what its own data lacks"
    assert "\x1b" not in reply.output


def test_every_command_is_called_here() -> None:
    group: Any = typer.main.get_command(app)
    words = [
        (name, sub) if sub else (name,)
        for name, entry in group.commands.items()
        for sub in getattr(entry, "commands", {"": entry})
    ]
    text = Path(__file__).read_text()
    called = lambda w: any(f"{str(list(w))[:-1]}{end}".replace("'", '"') in text for end in ",]")  # noqa: E731
    assert [w for w in words if not called(w)] == []
