"""Makes what a stranger could send: runs, data, adapter, recipe, model and a working folder, all hostile.

Every piece of code in it appends its name to the file `trace`. The runs also point at the folder `precious`,
which is not theirs.
"""

from __future__ import annotations

import json
import pickle
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from skylite.data.prompts import PromptFileInfo, write_rows
from skylite.run.files import sha256_file
from skylite.run.own_folders import MARK_NAME
from skylite.run.run_dir import RunDir
from tests.engines import write_random_adapter
from tests.rows import random_samples
from tests.small_run import make_run, settings
from tests.unit.data_cases import prompt

MODULES = (
    "vllm", "torch", "transformers", "peft", "pyarrow", "numpy", "pydantic", "math_verify", "reasoning_gym",
    "skylite", "json", "typing", "sitecustomize", "usercustomize", "conftest", "reward", "gsm8k",
    "modeling_evil", "configuration_evil", "tokenization_evil",
)  # fmt: skip
PROGRAMS = ("nvidia-smi", "torchrun", "vllm", "python", "git", "skylite", "gcc")
JINJA = "{{ ''.__class__.__mro__[1].__subclasses__()[0].__init__.__globals__['os'].system('touch TRACE') }}"
RUNS = ("programs", "launcher", "links", "outputs", "sync", "files")
"""What is hostile about each run: programs in its settings; one that would start the engines; links out of it
in place of what it holds; links in place of what commands write below a finished run; a lora_sync_path that
is not its own; pickles, the model and an adapter with code."""


@dataclass(frozen=True, slots=True)
class Bundle:
    """The downloaded folder, and what it must not touch."""

    folder: Path
    """The working folder of the commands."""
    precious: Path
    trace: Path

    def snapshot(self) -> dict[str, tuple[int, int, bytes]]:
        """Mode, modification time and content of everything in `precious`, its own metadata included."""
        paths = [self.precious, *sorted(self.precious.rglob("*"))]
        return {str(p): (*_metadata(p), p.read_bytes() if p.is_file() else b"") for p in paths}


class Trap:
    """Runs a command when its pickle is opened."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return exec, (f"open({str(self.trace)!r}, 'a').write('pickle ')",)


def make_bundle(root: Path, model: Path) -> Bundle:
    """A bundle in `root`, around a copy of a tiny model."""
    bundle = Bundle(root / "download", root / "precious", root / "trace")
    _make_precious(bundle.precious)
    bundle.folder.mkdir()
    _make_working_folder(bundle)
    _make_model(bundle, model)
    _make_data(bundle)
    _make_recipe(bundle)
    adapter = write_random_adapter(bundle.folder / "adapter", bundle.folder / "model")
    _add_pickles(bundle, adapter)
    for kind in RUNS:
        _make_run(bundle, kind)
    return bundle


@contextmanager
def opened_bundle(root: Path, model: Path) -> Iterator[Bundle]:
    """The bundle as the working folder of a user who has named no program.

    At the end of the block no code of it may have run, and nothing outside may have changed.
    """
    made, home = make_bundle(root, model), root / "home"
    home.mkdir()
    (home / "own").write_text("mine")
    before = made.snapshot()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(made.folder)
        patch.setenv("HOME", str(home))
        patch.setenv("XDG_STATE_HOME", str(home / "state"))
        yield made
    assert not made.trace.exists(), f"code of the bundle ran: {made.trace.read_text()}"
    assert made.snapshot() == before
    assert {p.name for p in home.iterdir()} <= {"own", "state", ".cache"}, (
        "only skylite's own folders are new"
    )
    assert {p.parent.name for p in home.rglob("*") if p.is_file()} <= {"home", "skylite"}
    assert (home / "own").read_text() == "mine"
    assert sorted(p.name for p in root.iterdir()) == ["download", "home", "precious"]


def _metadata(path: Path) -> tuple[int, int]:
    found = path.lstat()
    return found.st_mode, found.st_mtime_ns


def _make_precious(folder: Path) -> None:
    """Looks like what a clean-up deletes: adapters, checkpoints, leftovers. It belongs to another run."""
    for name in ("policy-v000000", "policy-v000001", "step-000001", "step-000002", ".step-000003.tmp-1"):
        (folder / name).mkdir(parents=True)
        (folder / name / "adapter_model.safetensors").write_text("precious")
    for name in ("file", ".metrics.jsonl.tmp-1", "step-000001.parquet", "step-000009.json"):
        (folder / name).write_text("precious")
    (folder / MARK_NAME).write_text(json.dumps({"run_id": "another"}))


def _code(bundle: Bundle, name: str) -> str:
    """A Python file with every function that skylite looks for in one."""
    trace = f"open({str(bundle.trace)!r}, 'a').write({name + ' '!r})"
    functions = (
        "reward",
        "advantage",
        "policy_loss",
        "load_rows",
        "to_prompt",
        "synthetic_rows",
        "reference",
    )
    return "\n".join([trace, *(f"def {f}(*args, **flags): {trace}; return 1.0" for f in functions), ""])


def _make_working_folder(bundle: Bundle) -> None:
    for name in MODULES:
        (bundle.folder / f"{name}.py").write_text(_code(bundle, name))
    for folder in ("data_prep", "recipes", "bin"):
        (bundle.folder / folder).mkdir()
    (bundle.folder / "data_prep" / "gsm8k.py").write_text(_code(bundle, "data_prep/gsm8k"))
    for name in PROGRAMS:
        for place in (bundle.folder / name, bundle.folder / "bin" / name):
            place.write_text(f"#!/bin/sh\nprintf '{name} ' >> {bundle.trace}\n")
            place.chmod(place.stat().st_mode | stat.S_IXUSR)
    info = bundle.folder / "evil-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: evil\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[vllm.general_plugins]\nevil = vllm:register\n")
    (bundle.folder / "evil.pth").write_text("import vllm\n")
    rows = [{"q": f"=cmd|' /C calc'!A{i} \x1b]0;x\x07 {i} + 1?", "a": str(i + 1)} for i in range(9)]
    (bundle.folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def _make_model(bundle: Bundle, model: Path) -> None:
    """Code under every name by which transformers loads it, a pickle, and a template that escapes."""
    folder = bundle.folder / "model"
    shutil.copytree(model, folder)
    for name in ("modeling_evil", "configuration_evil", "tokenization_evil"):
        (folder / f"{name}.py").write_text(_code(bundle, f"model/{name}"))
    _change_json(
        folder / "config.json",
        auto_map={
            "AutoConfig": "configuration_evil.EvilConfig",
            "AutoModelForCausalLM": "modeling_evil.EvilModel",
        },
    )
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    _change_json(
        folder / "tokenizer_config.json",
        auto_map={"AutoTokenizer": ["tokenization_evil.Evil", "tokenization_evil.Evil"]},
        chat_template=JINJA.replace("TRACE", str(bundle.trace)),
    )
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Trap(bundle.trace)))


def _make_data(bundle: Bundle) -> None:
    """One data set names a program as its reward, the other a reward that evaluates its entries as code."""
    code = f"__import__('os').system('touch {bundle.trace}')"
    for name, reward in (("data", f"{bundle.folder / 'reward.py'}:reward"), ("data-gym", "reasoning-gym")):
        info = PromptFileInfo(
            dataset="t", source_kind="file", source="\x1b[2J../../precious", source_sha256="0", count=40,
            seed=0, split="train", reward=reward, system="", few_shot=[],
        )  # fmt: skip
        entry = {"source_dataset": "number_sorting", "answer": code, "metadata": {"sorted": code}}
        prompts = [prompt(id=f"t/train/{i}", answer=code, extra={"entry": entry}) for i in range(40)]
        (bundle.folder / name).mkdir()
        for split in ("train", "test"):
            write_rows(bundle.folder / name / f"{split}.parquet", prompts, info)


def _make_recipe(bundle: Bundle) -> None:
    """It comes under the name of a bundled one, too."""
    text = (
        '[data]\npath = "data"\ndifficulty = []\n[reward]\nfunctions = ["reward.py:reward"]\n'
        '[algorithm]\nadvantage = "reward.py:advantage"\npolicy_loss = "reward.py:policy_loss"\n'
    )
    (bundle.folder / "recipes" / "gsm8k_cpu.toml").write_text(text)
    (bundle.folder / "evil.toml").write_text(text)
    (bundle.folder / "launcher.toml").write_text(
        '[data]\npath = "data-gym"\ndifficulty = []\n[reward]\nfunctions = ["format"]\n'
        '[engine]\nlauncher = "reward.py:reward"\n'
    )


def _add_pickles(bundle: Bundle, folder: Path) -> None:
    for name in ("adapter_model.bin", "optimizer.pt", "training_args.bin", "rng.pkl"):
        (folder / name).write_bytes(pickle.dumps(Trap(bundle.trace)))


def _make_run(bundle: Bundle, kind: str) -> None:
    run = make_run(
        bundle.folder / f"run-{kind}", bundle.folder / "model",
        settings(data={"path": str(bundle.folder / "data-gym")}, reward={"functions": ["math"]}),
        {1: random_samples(1), 2: random_samples(2)},
    )  # fmt: skip
    for version in (0, 1, 2):
        adapter = write_random_adapter(
            run.default_adapters / f"policy-v{version:06d}", bundle.folder / "model"
        )
        _add_pickles(bundle, adapter)
        _write_manifest(adapter, version)
    run.checkpoint_path(1).mkdir()
    _add_pickles(bundle, run.checkpoint_path(1))
    (run.root / "metrics.jsonl").write_text('{"step": 1, "reward/mean\\u001b[2J": 1}\n')
    change = {
        "programs": _name_programs, "launcher": _name_launcher, "links": _add_links,
        "outputs": _link_outputs, "sync": _name_sync_folder, "files": _keep,
    }  # fmt: skip
    change[kind](bundle, run)


def _keep(bundle: Bundle, run: RunDir) -> None: ...


def _name_programs(bundle: Bundle, run: RunDir) -> None:
    tree = json.loads(run.config_path.read_text())
    spec = str(bundle.folder / "reward.py")
    tree["config"]["reward"]["functions"] = [f"{spec}:reward"]
    tree["config"]["algorithm"] |= {"advantage": f"{spec}:advantage", "policy_loss": f"{spec}:policy_loss"}
    run.config_path.write_text(json.dumps(tree))


def _name_launcher(bundle: Bundle, run: RunDir) -> None:
    tree = json.loads(run.config_path.read_text())
    tree["config"]["engine"]["launcher"] = f"{bundle.folder / 'reward.py'}:reward"
    run.config_path.write_text(json.dumps(tree))


def _add_links(bundle: Bundle, run: RunDir) -> None:
    """In place of every folder and of the files that a command writes."""
    for folder in (run.checkpoints, run.default_adapters, run.trainer_steps, run.logs):
        shutil.rmtree(folder)
        folder.symlink_to(bundle.precious)
    for name in ("metrics.jsonl", "status.json", ".skylite.lock", "events.jsonl"):
        (run.root / name).unlink(missing_ok=True)
        (run.root / name).symlink_to(bundle.precious / "file")


def _link_outputs(bundle: Bundle, run: RunDir) -> None:
    """Its adapters can be read, so that nothing else refuses it."""
    run.logs.rmdir()
    for folder in (run.logs, run.loggers, run.exports, run.evals):
        folder.symlink_to(bundle.precious)


def _name_sync_folder(bundle: Bundle, run: RunDir) -> None:
    tree = json.loads(run.config_path.read_text())
    tree["config"]["lora"]["lora_sync_path"] = str(bundle.precious)
    tree["resolved"]["identity"] |= {
        "lora_sync_path": str(bundle.precious), "run_id": None,
        "warm_start": str(bundle.precious / "policy-v000000"),
    }  # fmt: skip
    run.config_path.write_text(json.dumps(tree))


def _change_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def _write_manifest(adapter: Path, version: int) -> None:
    weights = adapter / "adapter_model.safetensors"
    manifest = {
        "version": version, "step": version, "parent": version - 1 if version else None,
        "weights_sha256": sha256_file(weights), "weights_bytes": weights.stat().st_size,
        "base_model": "\x1b[2Jm", "base_fingerprint": "f", "rank": 4, "alpha": 8.0, "dtype": "float32",
        "target_modules": ["q_proj"],
        "canary": {"sequences": [[1, 2]], "policy_logprobs": [[-1.0]], "base_logprobs": [[-1.0]]},
    }  # fmt: skip
    (adapter / "manifest.json").write_text(json.dumps(manifest))
