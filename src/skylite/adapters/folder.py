"""Find the adapters that commands use after training: in a run, or in any PEFT adapter folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from skylite.adapters.experts import module_of
from skylite.adapters.import_adapter import path_of, read_warm_start
from skylite.adapters.target_modules import last_names
from skylite.config.loading import read_run_config
from skylite.config.train import RunConfig
from skylite.errors import ConfigError, ModelError
from skylite.hub.text_model import TOWER
from skylite.run.run_dir import AdapterVersion, RunDir, published_versions


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedAdapter:
    """An adapter to serve and its base model."""

    adapter: AdapterVersion
    base_model: str
    """Name or folder recorded with the adapter."""
    rank: int
    """The highest rank of a module."""
    target_modules: list[str] | None
    """Module names; None when the adapter has a pattern instead."""
    is_on_tower: bool
    """Whether it also changes modules that read images."""
    run: RunDir | None
    run_config: RunConfig | None


def find_adapter(target: Path, step: int | None) -> ServedAdapter:
    """The newest adapter of a run, its adapter of `step`, or an adapter folder.

    Checks the adapter files as far as possible without the base model; an engine would find errors after its
    start. Raises ConfigError or ModelError.
    """
    if (target / "adapter_config.json").is_file():
        if step is not None:
            raise ConfigError(
                f"--step {step} chooses a version of a run, but {target} is an adapter folder.",
                "Remove --step, or give the run folder.",
            )
        return _served(AdapterVersion(_version_of(target), target.resolve()), None, None)
    steps = None if step is None else [step]
    return find_versions(target, steps)[-1]


def find_versions(target: Path, steps: Sequence[int] | None) -> list[ServedAdapter]:
    """The adapters of a run's `steps`, oldest first; None: its newest only. Raises as `find_adapter` does."""
    run = RunDir(target.resolve())
    config = read_run_config(run.config_path)
    versions = published_versions(run.adapters(config))
    chosen = versions[-1:] if steps is None else [v for v in versions if v.version in set(steps)]
    missing = sorted(set(steps or ()) - {v.version for v in chosen})
    if missing or not chosen:
        wanted = f" of step {', '.join(map(str, missing))}" if missing else ""
        raise ConfigError(
            f"{target} has no adapter{wanted} (available steps: {_available(versions)}).",
            "Choose an available step." if versions else "Train the run first, or give another folder.",
        )
    return [_served(version, run, config) for version in chosen]


def available_steps(target: Path) -> list[int]:
    """The steps whose adapters a run keeps, oldest first. Raises ConfigError if it is not a run."""
    run = RunDir(target.resolve())
    return [v.version for v in published_versions(run.adapters(read_run_config(run.config_path)))]


def _available(versions: Sequence[AdapterVersion]) -> str:
    return ", ".join(str(v.version) for v in versions) or "none"


def _served(adapter: AdapterVersion, run: RunDir | None, config: RunConfig | None) -> ServedAdapter:
    found = read_warm_start(adapter.path)
    odd = None if found.odd_name is None else f"{adapter.path} has a tensor {found.odd_name}, "
    if not adapter.weights_path.is_file():
        odd = f"{adapter.path} has no {adapter.weights_path.name} but a pickle, "
    if odd is not None:
        raise ModelError(
            f"{odd}which engines do not read.",
            "A run that starts from it (train --from-adapter) publishes it in the usual form.",
        )
    modules = found.target_modules
    if found.target_parameters:  # an engine starts for experts only if they are named
        modules = last_names(module_of(path_of(name)) for name in found.shapes)
    base_model = str(config.resolved.model.path) if config is not None else found.base_model
    return ServedAdapter(
        adapter=adapter,
        base_model=base_model,
        rank=found.max_rank,
        target_modules=modules,
        is_on_tower=any(path_of(name).startswith(TOWER) for name in found.shapes),
        run=run,
        run_config=config,
    )


def _version_of(folder: Path) -> int:
    """The version in the name of a published folder; 0 for any other adapter folder."""
    tail = folder.resolve().name.removeprefix("policy-v")
    return int(tail) if tail.isdigit() else 0
