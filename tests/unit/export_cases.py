"""A small run of a real tiny model: trained adapters with true canaries, metrics and held-out results."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from skylite.adapters.manifest import Canary, Manifest
from skylite.config.loading import read_run_config
from skylite.config.train import TrainConfig
from skylite.data.prompts import PromptFileInfo, write_rows
from skylite.export.canary_check import load_float32, model_logprobs
from skylite.export.plan import ExportFlags
from skylite.hub.resolve import resolve_model
from skylite.rollout.plan import plan_run, write_run
from skylite.run.files import sha256_file
from skylite.run.metrics_file import append_metrics, write_score
from skylite.run.run_dir import RunDir, adapter_name
from skylite.types import Message
from tests.engines import TARGET_MODULES, write_random_adapter
from tests.unit.data_cases import prompt

CANARY = [list(b"Natalia sold 48 clips"), list(b"in April and May. #### 72")]
SYSTEM = "Answer with a number."


def write_problems(folder: Path, split: str = "train", count: int = 4, **info: Any) -> None:
    facts: dict[str, Any] = {
        "dataset": "tiny", "source_kind": "generated", "source": "t", "source_sha256": "0", "seed": 0,
        "reward": "gsm8k", "system": SYSTEM,
        "few_shot": [Message(role="user", content="1 + 1?"), Message(role="assistant", content="#### 2")],
    }  # fmt: skip
    footer = PromptFileInfo(**{**facts, **info}, split=split, count=count)  # type: ignore[arg-type]
    rows = [prompt(id=f"t/{split}/{i}", answer=str(i)) for i in range(count)]
    write_rows(folder / f"{split}.parquet", rows, footer)


def make_run(root: Path, model: Path, versions: Sequence[int] = (0, 2), scale: float = 0.02) -> RunDir:
    """A run of two steps in `root`/run with adapters of `versions`, as the trainer publishes them."""
    for split in ("train", "test"):
        write_problems(root / "data", split)
    tree = {
        "num_steps": 2,
        "model": {"name": str(model)},
        "data": {"path": str(root / "data")},
        "lora": {"rank": 4, "alpha": 8},
        "eval": {"limit": 4},
        "rollout": {"max_prompt_tokens": 256, "max_completion_tokens": 16},
    }
    config = TrainConfig.model_validate(tree)
    run = RunDir(root / "run")
    write_run(plan_run(config, run))
    adapters = run.adapters(read_run_config(run.config_path))
    for version in versions:
        publish(adapters / adapter_name(version), model, version, scale)
        append_metrics(run.metrics_path, {"step": version + 1, "reward/mean": 0.25 * version})
    write_score(run, "before", 0, 0.75, config.eval, is_binary=True)
    write_score(run, "after", 2, 0.5, config.eval, is_binary=True)
    return run


def publish(folder: Path, model: Path, version: int, scale: float) -> None:
    """A random adapter with a manifest whose canary transformers and PEFT computed."""
    from peft import PeftModel

    write_random_adapter(folder, model, seed=version + 1, scale=scale)
    base = load_float32(model)
    base_logprobs = model_logprobs(base, CANARY)
    policy_logprobs = model_logprobs(PeftModel.from_pretrained(base, str(folder)).eval(), CANARY)
    weights = folder / "adapter_model.safetensors"
    assert load_file(weights)
    manifest = Manifest(
        version=version,
        step=version,
        parent=None,
        weights_sha256=sha256_file(weights),
        weights_bytes=weights.stat().st_size,
        base_model=str(model),
        base_fingerprint=resolve_model(str(model)).fingerprint,
        rank=4,
        alpha=8.0,
        dtype="float32",
        target_modules=TARGET_MODULES,
        canary=Canary(sequences=CANARY, policy_logprobs=policy_logprobs, base_logprobs=base_logprobs),
    )
    (folder / "manifest.json").write_text(manifest.model_dump_json(), encoding="utf-8")


def flags(run: RunDir, **changes: Any) -> ExportFlags:
    given: dict[str, Any] = {
        "run": run.root, "step": None, "best": False, "merge": False, "merge_into": None, "gguf": False,
        "dtype": None, "out": None, "base_name": None, "push": None, "public": False,
    }  # fmt: skip
    return ExportFlags(**(given | changes))


def install_converter(folder: Path, monkeypatch: Any) -> Path:
    """Put a converter of Llama models on the PATH, and return it (tests/fakes/convert_hf_to_gguf.py).

    Like llama.cpp's it imports a package beside it. The environment is that of the command line.
    """
    import sys

    folder.mkdir()
    program = folder / "convert_hf_to_gguf.py"
    source = Path(__file__).parents[1] / "fakes" / "convert_hf_to_gguf.py"
    code = source.read_text(encoding="utf-8").replace(
        "import numpy", "import conversion  # noqa\nimport numpy", 1
    )
    assert "import conversion" in code
    program.write_text(f"#!{sys.executable}\n{code}", encoding="utf-8")
    (folder / "conversion").mkdir()
    (folder / "conversion" / "__init__.py").touch()
    monkeypatch.setenv("PYTHONSAFEPATH", "1")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return program


def record(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "export.json").read_text(encoding="utf-8"))
    return found
