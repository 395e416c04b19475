"""Programs that files from elsewhere name never run before the user names them, nor with other content.

No code in the files runs, and no pickle is opened.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import pickle
import py_compile
import re
from pathlib import Path

import pytest

from skylite.adapters.retention import clean_up
from skylite.algorithms import user_functions
from skylite.config.loading import read_run_config
from skylite.errors import ConfigError
from skylite.processes.private_folders import state_folder
from skylite.rollout.plan import plan_run, write_run
from skylite.rollout.resume import plan_resume
from skylite.rollout.sources import reward_pool
from skylite.rollout.trusted_programs import remember, require_named
from skylite.run.run_dir import RunDir, published_versions
from skylite.user_functions import EPISODE, REWARD, FunctionKind, load_function
from tests.engines import write_random_adapter
from tests.settings import load_config, typed
from tests.small_run import settings
from tests.unit.bad_inputs import Reply, call
from tests.unit.data_cases import prompt

SOURCES = Path(__file__).parents[2] / "src" / "skylite"
GOOD = "def f(prompt, completion): return 1.0\n"
BAD = "open('ran', 'w')\n" + GOOD
PROGRAM = """
from pathlib import Path
Path({ran!r}).touch()
def reward(prompt, completion):
    return 1.0
"""


def prepare(reward: str) -> None:
    """Data in the working folder with this reward."""
    Path("rows.jsonl").write_text("".join(json.dumps({"q": f"{i}?", "a": "1"}) + "\n" for i in range(60)))
    columns = ["--question", "q", "--answer", "a"]
    done = call(["prepare", "rows.jsonl", *columns, "--reward", reward, "--out", "data"])
    assert done.code == 0, done.output


@pytest.fixture
def downloaded(tmp_path: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with downloaded data whose reward is a program that the user has not passed explicitly."""
    monkeypatch.chdir(tmp_path)
    Path("reward.py").write_text(PROGRAM.format(ran=str(tmp_path / "ran")))
    prepare("reward.py:reward")
    (tmp_path / "ran").unlink()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "fresh-home"))
    return tmp_path


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with colons in its name, with data whose reward is own.py:f."""
    folder = tmp_path / "a:b.py:f"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    Path("own.py").write_text(GOOD)
    prepare("own.py:f")
    return folder


def dry_run(model: Path, *more: str) -> Reply:
    flags = ["--model", str(model), "--data", "data", "--set", "eval.limit=0", "--set", "data.difficulty=[]"]
    return call(["train", "--recipe", "gsm8k_cpu", *flags, "--run", "new", "--dry-run", *more])


def evaluate(model: Path, *more: str) -> Reply:
    return call(["eval", "--base", "--data", "data", "--model", str(model), *more])


def test_a_reward_program_that_only_the_data_names_does_not_run(downloaded: Path, tiny_llama: Path) -> None:
    for reply in (dry_run(tiny_llama), evaluate(tiny_llama)):
        assert reply.code == 2, reply.output
        assert f"--set 'reward.functions=[\"{downloaded / 'reward.py'}:reward\"]'" in reply.output
        assert not (downloaded / "ran").exists()


def test_a_reward_program_passed_explicitly_runs_and_is_logged(downloaded: Path, tiny_llama: Path) -> None:
    words = ["--set", f"reward.functions=['{downloaded / 'reward.py'}:reward']"]
    assert dry_run(tiny_llama, *words).code == 0
    assert (downloaded / "ran").exists()
    reply = dry_run(tiny_llama)
    assert reply.code == 0, reply.output
    assert f"the program {downloaded / 'reward.py'}:reward runs" in reply.output


def test_every_function_of_a_list_must_be_named(downloaded: Path, tiny_llama: Path) -> None:
    """The user names one function. The data's list names another, which must not run."""
    (downloaded / "mine.py").write_text("def reward(prompt, completion): return 0.5")
    mine, theirs = f"{downloaded / 'mine.py'}:reward", f"{downloaded / 'reward.py'}:reward"
    assert dry_run(tiny_llama, "--set", f"reward.functions=['{mine}']").code == 0
    assert not (downloaded / "ran").exists()
    with pytest.raises(ConfigError, match=r"names the reward \S+reward\.py:reward") as error:
        require_named([mine, theirs], REWARD, Path("run"))
    assert error.value.hint.endswith(f'--set \'reward.functions=["{mine}", "{theirs}"]\'.')
    assert dry_run(tiny_llama, "--set", f"reward.functions=['{mine}', '{theirs}']").code == 0
    require_named([mine, theirs], REWARD, Path("run"))


def test_an_empty_list_does_not_allow_the_datas_reward(downloaded: Path, tiny_llama: Path) -> None:
    assert dry_run(tiny_llama, "--set", "reward.functions=[]").code == 2
    assert evaluate(tiny_llama, "--set", "reward.functions=[]").code == 2
    assert not (downloaded / "ran").exists()


@pytest.mark.parametrize("setting", ["advantage", "policy_loss"])
def test_an_algorithm_that_only_a_run_names_does_not_run(
    setting: str, downloaded: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither on resume nor in a replay. The parent process never runs it."""
    (downloaded / "own.py").write_text(
        f"from pathlib import Path\nPath({str(downloaded / 'ran')!r}).touch()\ndef f(a, b): ..."
    )
    named = f"algorithm.{setting}={downloaded / 'own.py'}:f"
    config = load_config(
        None,
        {"num_steps": 1, "model.name": str(tiny_llama), "data.path": "data"},
        [named, f"reward.functions=['{downloaded / 'reward.py'}:reward']"],
    )
    write_run(plan_run(config, RunDir(downloaded / "run")))
    (downloaded / "ran").unlink()  # written by the reward program
    monkeypatch.setenv("XDG_STATE_HOME", str(downloaded / "their-home"))
    remember(f"{downloaded / 'reward.py'}:reward")
    resume, replay = ["train", "--resume", "run", "--dry-run"], ["replay", "run", "--step", "1"]
    for args in (resume, replay):
        reply = call(args)
        assert reply.code == 2, reply.output
        assert (
            f"run/config.json names the {setting.replace('_', ' ')} {downloaded / 'own.py'}:f, a Python"
            in reply.output
        )
        assert f"name it: --set {named}." in reply.output
    changed = call([*replay, "--set", "optim.lr=1.0"])
    assert (changed.code, "uses the run's own settings, and --set optim.lr=1.0" in changed.output) == (
        2,
        True,
    )
    named_here = call([*replay, "--set", named])
    assert "has no adapter" in named_here.output or "holds no policy-v000001" in named_here.output, (
        named_here.output
    )
    reply = call(resume)
    assert reply.code == 0, reply.output
    assert f"the program {downloaded / 'own.py'}:f runs" in reply.output
    assert not (downloaded / "ran").exists()


def test_allowed_programs_are_remembered_by_path_and_a_read_only_home_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    (tmp_path / "file").write_text("in the way")
    for name in ("x.py", "y.py"):
        (tmp_path / name).write_text("def f(prompt, completion): ...")
    remember(f"{tmp_path}/x.py:f")
    with pytest.raises(ConfigError, match="not named on this machine"):
        require_named([f"{tmp_path}/x.py:f"], REWARD, Path("data"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "home"))
    remember(f"{tmp_path}/x.py:f")
    require_named([f"{tmp_path}/x.py:f"], REWARD, Path("data"))
    for other in (f"{tmp_path}/x.py:g", f"{tmp_path}/y.py:f", "x.py:f"):
        with pytest.raises(ConfigError):
            require_named(["gsm8k", other], REWARD, Path("data"))


def test_a_pickled_adapter_is_refused_and_not_opened(downloaded: Path, tiny_llama: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return (os.mkdir, (str(downloaded / "opened"),))

    adapter = write_random_adapter(downloaded / "adapter", tiny_llama)
    (adapter / "adapter_model.safetensors").unlink()
    for name in ("adapter_model.bin", "adapter_model.pt", "adapter_model.safetensors"):
        (adapter / name).write_bytes(pickle.dumps(Trap()))
        reply = dry_run(tiny_llama, "--set", "reward.functions=['math']", "--from-adapter", "adapter")
        assert reply.code == 2, reply.output
        assert "adapter_model.safetensors" in reply.output
    assert not (downloaded / "opened").exists()


def test_a_symlink_among_the_adapters_is_neither_served_nor_removed(tmp_path: Path) -> None:
    outside, adapters = tmp_path / "precious", tmp_path / "run" / "adapters"
    for folder in (outside, adapters / "policy-v000002", adapters):
        folder.mkdir(parents=True, exist_ok=True)
    (outside / "file").write_text("mine")
    (adapters / "policy-v000001").symlink_to(outside)
    (adapters / "policy-v000003").write_text("a file")
    assert [a.path for a in published_versions(adapters)] == [adapters / "policy-v000002"]
    clean_up(RunDir(tmp_path / "run"), adapters, 99, settings(sync={"keep_last": 2}))
    assert (outside / "file").read_text() == "mine"
    assert not (adapters / "policy-v000002").exists()


def test_no_source_file_opens_a_pickle() -> None:
    """One call opens a pickle, an old adapter's, and reads tensors alone. Models come from safetensors."""
    ways = re.compile(r"torch\.load\(|pickle\.loads?\(|joblib|np\.load\(|allow_pickle|trust_remote_code=True")
    found = [f"{p.name}: {m.group()}" for p in SOURCES.rglob("*.py") for m in ways.finditer(p.read_text())]
    assert found == ["tensor_file.py: torch.load("]
    loads = re.findall(r"torch\.load\((.*)\)\n", (SOURCES / "adapters" / "tensor_file.py").read_text())
    assert len(loads) == 1
    assert "weights_only=True" in loads[0]
    sources = [p.read_text() for p in (SOURCES / "model").rglob("*.py")]
    calls = [
        call
        for text in sources
        for call in re.findall(r"auto_class\(config\)\.from_pretrained\(([^)]*)\)", text)
    ]
    assert calls
    assert all("use_safetensors=True" in text for text in calls)


def test_changed_content_asks_again(here: Path, tiny_llama: Path) -> None:
    assert dry_run(tiny_llama).code == 0
    (here / "own.py").write_text(BAD)
    for reply in (dry_run(tiny_llama), evaluate(tiny_llama)):
        assert reply.code == 2, reply.output
        assert f"names the reward {here}/own.py:f, a Python program that has changed" in reply.output
        assert f"name it again: --set 'reward.functions=[\"{here}/own.py:f\"]'" in reply.output
        assert not (here / "ran").exists()
    assert dry_run(tiny_llama, "--set", "reward.functions=['own.py:f']").code == 0
    assert (here / "ran").exists()
    assert dry_run(tiny_llama).code == 0
    (here / "own.py").write_text(GOOD)
    assert dry_run(tiny_llama).code == 2, "the older content is no longer the one that the user named"


def test_compiled_code_beside_the_file_is_not_used(here: Path) -> None:
    """Python itself would run this .pyc, which says that its source need not be checked."""
    (here / "bad.py").write_text(BAD)
    unchecked = py_compile.PycInvalidationMode.UNCHECKED_HASH
    cached = Path(importlib.util.cache_from_source(str(here / "own.py")))
    py_compile.compile("bad.py", cfile=str(cached), dfile="own.py", invalidation_mode=unchecked)
    load_function("own.py:f", REWARD)
    assert not (here / "ran").exists()


def test_the_workers_run_the_content_that_was_checked(here: Path, tiny_llama: Path) -> None:
    """The file changes after the check and before the worker loads it."""
    config = load_config(
        None, {"model.name": str(tiny_llama), "data.path": "data"}, ["rollout.prompts_per_step=2"]
    )
    plan = plan_run(config, RunDir(here / "run"))
    pool = reward_pool(plan.scored, plan.run.logs)
    try:
        assert asyncio.run(pool.score([(prompt(), "x")]))[0].reward == 1.0
    finally:
        pool.close()
    (here / "own.py").write_text(BAD)
    with pytest.raises(ConfigError, match=r"own\.py has changed since skylite checked it"):
        reward_pool(plan.scored, plan.run.logs)
    assert not (here / "ran").exists()


def test_the_trainer_runs_the_content_that_was_checked(here: Path, tiny_llama: Path) -> None:
    (here / "mine.py").write_text(GOOD)
    settings = ["rollout.prompts_per_step=2", "algorithm.advantage=mine.py:f"]
    config = load_config(None, {"model.name": str(tiny_llama), "data.path": "data"}, settings)
    write_run(plan_run(config, RunDir(here / "run")))
    recorded = read_run_config(RunDir(here / "run").config_path)
    assert set(recorded.resolved.trust.programs) == {f"{here}/own.py:f", f"{here}/mine.py:f"}
    (here / "mine.py").write_text(BAD)
    with pytest.raises(ConfigError, match=r"mine\.py has changed since skylite checked it"):
        user_functions.load_functions(config.algorithm, recorded.resolved.trust.programs)
    with pytest.raises(ConfigError, match=r"names the advantage \S+mine.py:f, .* has changed"):
        plan_resume(RunDir(here / "run"))
    named = plan_resume(RunDir(here / "run"), typed({}, ["algorithm.advantage=mine.py:f"]))
    assert named.resolved.trust.programs != recorded.resolved.trust.programs
    assert not (here / "ran").exists()


def test_a_hash_in_a_runs_config_is_not_trusted(here: Path, tiny_llama: Path) -> None:
    """A run from elsewhere records the hash of its own program; this user has named other content."""
    config = load_config(
        None, {"model.name": str(tiny_llama), "data.path": "data"}, ["rollout.prompts_per_step=2"]
    )
    run = RunDir(here / "run")
    write_run(plan_run(config, run))
    (here / "own.py").write_text(BAD)
    tree = json.loads(run.config_path.read_text())
    tree["resolved"]["trust"]["programs"] = {f"{here}/own.py:f": "0" * 64}
    run.config_path.write_text(json.dumps(tree))
    with pytest.raises(ConfigError, match="has changed"):
        plan_resume(run)
    assert not (here / "ran").exists()


@pytest.mark.parametrize(
    ("spec", "kind", "what", "setting"),
    [
        ("reasoning-gym", REWARD, "evaluates", """'reward.functions=["reasoning-gym"]'"""),
        ("command:python a.py", EPISODE, "a command that", "'env.episode=command:python a.py'"),
        ("verifiers:wordle", EPISODE, "installed code that", "env.episode=verifiers:wordle"),
    ],
)
def test_commands_and_code_in_data_run_only_after_the_user_named_them(
    here: Path, spec: str, kind: FunctionKind, what: str, setting: str
) -> None:
    """The hint is what one types in a shell."""
    with pytest.raises(ConfigError) as caught:
        require_named([spec], kind, Path("data"))
    assert what in caught.value.what
    assert f"name it: --set {setting}." in caught.value.hint
    remember(spec)
    assert require_named([spec], kind, Path("data")) == {}


@pytest.mark.parametrize("text", ["", "[]", '{"named": ["x.py:f"]}', '{"named": {"x.py:f": 3}}', "\xff"])
def test_a_damaged_list_names_nothing(tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.py").write_text(GOOD)
    (tmp_path / "skylite").mkdir()
    (tmp_path / "skylite" / "programs.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError):
        require_named(["x.py:f"], REWARD, Path("data"))
    remember("x.py:f")
    require_named(["x.py:f"], REWARD, Path("data"))


def test_what_is_remembered_is_in_the_users_state_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    assert state_folder() == tmp_path / "state" / "skylite"
    monkeypatch.setenv("XDG_STATE_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert state_folder() == tmp_path / ".local" / "state" / "skylite"
