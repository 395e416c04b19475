"""Find the adapter that `eval` and `serve` use: in a run, or in any PEFT adapter folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from skylite.adapters.import_adapter import read_warm_start
from skylite.config.loading import read_run_config
from skylite.config.train import RunConfig
from skylite.errors import ConfigError
from skylite.run.run_dir import AdapterVersion, RunDir, published_versions


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedAdapter:
    """An adapter to serve and its base model."""

    adapter: AdapterVersion
    base_model: str
    """Name or folder recorded with the adapter."""
    rank: int
    target_modules: list[str] | None
    """Module names; None when the adapter has a pattern instead."""
    run: RunDir | None
    run_config: RunConfig | None


def find_adapter(target: Path, step: int | None) -> ServedAdapter:
    """The newest adapter of a run, its adapter of `step`, or an adapter folder.

    Checks the adapter files as far as possible without the base model; vLLM would find errors only after its
    start. Raises ConfigError or ModelError.
    """
    if (target / "adapter_config.json").is_file():
        if step is not None:
            raise ConfigError(
                f"--step {step} chooses a version of a run, but {target} is an adapter folder.",
                "Remove --step, or give the run folder.",
            )
        return _served(AdapterVersion(_version_of(target), target.resolve()), None, None)
    run = RunDir(target.resolve())
    config = read_run_config(run.config_path)
    versions = published_versions(run.adapters(config))
    chosen = [v for v in versions if step is None or v.version == step]
    if not chosen:
        have = ", ".join(str(v.version) for v in versions) or "none"
        raise ConfigError(
            f"{target} has no adapter{'' if step is None else f' of step {step}'} (available steps: {have}).",
            "Choose an available step." if versions else "Train the run first, or give another folder.",
        )
    return _served(chosen[-1], run, config)


def _served(adapter: AdapterVersion, run: RunDir | None, config: RunConfig | None) -> ServedAdapter:
    found = read_warm_start(adapter.path)
    base_model = config.resolved.model_path if config is not None else found.base_model
    return ServedAdapter(
        adapter=adapter,
        base_model=base_model,
        rank=found.rank,
        target_modules=found.target_modules,
        run=run,
        run_config=config,
    )


def _version_of(folder: Path) -> int:
    """The version in the name of a published folder; 0 for any other adapter folder."""
    tail = folder.resolve().name.removeprefix("policy-v")
    return int(tail) if tail.isdigit() else 0
