"""Train several policies at once on one base. Each is a run; they share the engines and the trainer."""

from __future__ import annotations

import contextlib
import itertools
import logging
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from skylite.cli.options import RUNS, numbers
from skylite.cli.setting_flags import Flags, takes_settings
from skylite.config.base_section import LENGTH, RUN, SAFETY, WHAT, Flag
from skylite.config.provenance import Provenance, Typed, parse_value
from skylite.config.train import all_settings
from skylite.errors import ConfigError
from skylite.run.sweep_dir import SweepDir
from skylite.ui.logs import run_log, show, show_printed

if TYPE_CHECKING:
    from skylite.rollout.plan import RunPlan

logger = logging.getLogger(__name__)
SHARED = ("model", "engine", "trainer", "shared_network", "lora.lora_sync_path", "lora.target_parameters")
"""Settings that cannot differ between the policies of a sweep."""
GRID = "--grid"


class SweepFlags(Flags):
    """The flags of `skylite sweep` that are not settings."""

    provenance: Provenance
    recipe: Annotated[str | None, Flag("--recipe", WHAT, default="the bundled one for this machine")] = None
    """TOML or YAML file, or the name of a bundled recipe: what all policies have in common."""
    grid: Annotated[
        list[str] | None, Flag(GRID, WHAT, default="nothing varies", metavar="A.B=VALUE,VALUE")
    ] = None
    """A setting to vary, with its values. Repeatable: every combination is a policy."""
    seeds: Annotated[str | None, Flag("--seeds", WHAT, default="the seed of the recipe")] = None
    """Seeds such as 0,1,2: every combination is trained with each."""
    together: Annotated[int | None, Flag("--together", LENGTH, default="all")] = Field(None, ge=1)
    """Policies that train at the same time; more run in turns. Memory is planned for so many."""
    out: Annotated[Path | None, Flag("--out", RUN, default="runs/sweep-DATE")] = None
    """Folder of the new sweep, with a run folder for each policy."""
    resume: Annotated[Path | None, Flag("--resume", RUN, default="start a new sweep")] = None
    """Resume every policy of this sweep that is not done, stopped or failed."""
    stop: Annotated[Path | None, Flag("--stop", RUN, default="stop nothing")] = None
    """SWEEP/POLICY: let this policy leave a running sweep after its step. Its run stays."""
    dry_run: Annotated[bool, Flag("--dry-run", SAFETY)] = False
    """Check everything, list the policies, start nothing."""


@takes_settings("all", of="recipe")
def sweep(flags: SweepFlags) -> None:
    """Start, resume or shorten a sweep. Raises SkyliteError subclasses.

    Exits 130 after a clean stop by Ctrl-C, and 1 if a policy failed.
    """
    if flags.stop is not None:
        _stop_policy(flags)
        return
    if flags.dry_run:
        show_printed()
    results = _resume(flags) if flags.resume is not None else _start(flags)
    if any(result == "stopped" for result in results.values()):
        sys.exit(130)
    if any(result not in ("done", "planned") for result in results.values()):
        sys.exit(1)


def _start(flags: SweepFlags) -> dict[str, str]:
    from skylite.cli.train import plan_new
    from skylite.rollout.plan import write_run
    from skylite.run.files import write_json

    policies = policies_of(flags.grid or [], flags.seeds)
    folder = SweepDir((flags.out or RUNS / f"sweep-{time.strftime('%Y%m%d-%H%M%S')}").resolve())
    if folder.manifest_path.exists():
        raise ConfigError(
            f"{folder.root} is a sweep already.", "Give --resume to continue it, or another --out."
        )
    together = min(flags.together or len(policies), len(policies))
    plans = {}
    for name, settings in policies.items():
        provenance = varied(flags.provenance, settings, together)
        logger.info(f"policy {name}")
        plans[name], _ = plan_new(provenance, flags.recipe, folder.run(name).root, keep=not flags.dry_run)
    plans = shared_plans(plans)
    if flags.dry_run:
        for name, plan in plans.items():
            show(f"{name}: {plan.config.num_steps} steps")
        logger.info(f"ready: {len(plans)} policies, {together} at once; without --dry-run they train")
        return dict.fromkeys(plans, "planned")
    with _locked(folder, plans):
        for plan in plans.values():
            write_run(plan)
        values = {
            name: {key: typed.value for key, typed in settings.items()} for name, settings in policies.items()
        }
        write_json(folder.manifest_path, {"policies": values, "together": together})
        return _train(folder, plans, together)


def _resume(flags: SweepFlags) -> dict[str, str]:
    from skylite.rollout.resume import plan_resume
    from skylite.run.own_folders import require_own_folders
    from skylite.run.run_dir import RunDir

    assert flags.resume is not None
    if flags.grid or flags.seeds or flags.out or flags.recipe or flags.together:
        raise ConfigError(
            "--resume continues a sweep as it was, and flags of a new one were given too.",
            "Remove --grid, --seeds, --recipe, --together and --out.",
        )
    from skylite.config.loading import read_run_config

    folder = SweepDir(flags.resume.resolve())
    states = {name: state_of(folder, name) for name in folder.policies()}
    for name, state in states.items():
        logger.info(f"{name}: {state}")
    unfinished = [name for name, state in states.items() if state in ("unfinished", "not started")]
    if not unfinished:
        raise ConfigError(f"{folder.root} has no policy left to train.", "See `skylite report`.")
    together = min(RunDir(folder.root).read_count(folder.manifest_path, "together"), len(unfinished))
    recorded = {name: read_run_config(folder.run(name).config_path) for name in unfinished}
    for name, run_config in recorded.items():
        require_own_folders(folder.run(name), run_config)
    plans = {name: plan_resume(folder.run(name), flags.provenance) for name in unfinished}
    if flags.dry_run:
        logger.info(f"ready: {len(plans)} policies, {together} at once; without --dry-run they train")
        return dict.fromkeys(plans, "planned")
    with _locked(folder, plans):
        return _train(folder, shared_plans(plans), together)


def _train(folder: SweepDir, plans: Mapping[str, RunPlan], together: int) -> dict[str, str]:
    import asyncio

    from skylite.report.sweep import table_text
    from skylite.rollout.sweep import run_sweep

    folder.stops.mkdir(exist_ok=True)
    folder.shared.logs.mkdir(parents=True, exist_ok=True)
    with run_log(folder.shared.log_path("skylite")):
        results = asyncio.run(run_sweep(folder, plans, together))
    for name, result in results.items():
        logger.info(f"{name}: {result}")
    show(table_text(folder))
    return results


def _stop_policy(flags: SweepFlags) -> None:
    """Ask a running sweep to let a policy go."""
    assert flags.stop is not None
    path = flags.stop.resolve()
    folder = SweepDir(path.parent)
    if not SweepDir.is_one(path.parent) or path.name not in folder.policies():
        raise ConfigError(
            f"{flags.stop} is not a policy of a sweep.", "Give SWEEP/POLICY, such as runs/sweep/rank-8."
        )
    folder.stops.mkdir(exist_ok=True)
    (folder.stops / path.name).touch()
    show(f"{path.name} leaves the sweep after its step")


def state_of(folder: SweepDir, name: str) -> str:
    """Whether a resumed sweep trains this policy: not started, unfinished; else done, stopped or failed."""
    from skylite.run.status import read_status

    if (folder.stops / name).exists():
        return "stopped by `skylite sweep --stop`"
    path = folder.run(name).status_path
    if not path.exists():
        return "not started"
    phase = read_status(path).phase
    return phase if phase in ("done", "failed") else "unfinished"


def policies_of(grid: Sequence[str], seeds: str | None) -> dict[str, dict[str, Typed]]:
    """Name -> its settings, for every combination. Raises ConfigError."""
    axes: list[list[tuple[str, Typed]]] = []
    names = {name for name, _ in all_settings()}
    for text in grid:
        setting, equals, values = (part.strip() for part in text.partition("="))
        if not equals or not values:
            raise ConfigError(f"{GRID} {text} varies nothing.", "Give A.B=VALUE,VALUE, e.g. lora.rank=8,32.")
        if any(setting == s or setting.startswith(f"{s}.") for s in SHARED):
            raise ConfigError(
                f"{GRID} {setting} cannot vary: all policies of a sweep share the base, the trainer and the "
                "engines.",
                "Start a sweep for each value.",
            )
        if setting not in names:
            raise ConfigError(f"{GRID} {setting} is not a setting.", "docs/reference/config.md lists them.")
        axes.append([(setting, Typed(parse_value(value), GRID)) for value in split_values(values)])
    if seeds is not None:
        axes.append([("seed", Typed(seed, "--seeds")) for seed in numbers(seeds)])
    policies: dict[str, dict[str, Typed]] = {}
    for combination in itertools.product(*axes):
        settings = dict(combination)
        if len(settings) < len(combination):
            raise ConfigError(f"{GRID} names a setting twice.", "Give all of its values in one --grid.")
        policies[name_of(settings)] = settings
    if not axes or len(policies) < 2:
        raise ConfigError(
            f"A sweep trains several policies, and this one has {len(policies)}.",
            "Give --grid lora.rank=8,32, or --seeds 0,1; or use `skylite train`.",
        )
    if len(policies) < len(list(itertools.product(*axes))):
        raise ConfigError("Two policies of the sweep have the same settings.", "Give each value once.")
    return policies


def split_values(text: str) -> list[str]:
    """The values between the commas that are in no brackets or quotes."""
    parts, depth, quote = [""], 0, ""
    for char in text:
        if quote:
            quote = "" if char == quote else quote
        elif char in "\"'":
            quote = char
        else:
            depth += (char in "[{(") - (char in "]})")
        if char == "," and not depth and not quote:
            parts.append("")
        else:
            parts[-1] += char
    return [part.strip() for part in parts if part.strip()]


def name_of(settings: Mapping[str, Typed]) -> str:
    """The policy's folder: `rank-8_lr-1e-05`."""
    parts = []
    for setting, typed in settings.items():
        value = Path(typed.value).name if isinstance(typed.value, str) else typed.value
        text = re.sub(r"[^A-Za-z0-9.+-]+", "-", "none" if value is None else str(value)).strip("-.")
        parts.append(f"{setting.rpartition('.')[2]}-{text or 'other'}")
    return "_".join(parts)[:120]


def varied(provenance: Provenance, settings: Mapping[str, Typed], together: int) -> Provenance:
    """What the user typed, with the settings of one policy. Raises ConfigError if a flag sets one, too."""
    for setting in settings:
        if provenance.is_typed(setting):
            flag = provenance.typed[setting].flag
            raise ConfigError(f"{flag} and the sweep both choose {setting}.", "Remove one of them.")
    own = {"engine.policies": Typed(together, "--together"), **settings}
    return replace(provenance, typed={**provenance.typed, **own})


def shared_plans(plans: Mapping[str, RunPlan]) -> dict[str, RunPlan]:
    """The plans with one trainer, placement and memory: those of the largest policy.

    Raises ConfigError for what cannot be shared.
    """
    largest = max(plans.values(), key=lambda plan: plan.config.lora.max_rank)
    sequences = max(plan.config.engine.max_num_seqs for plan in plans.values())
    common: dict[str, Any] = {
        "trainer": largest.config.trainer,
        "engine": largest.config.engine.model_copy(update={"max_num_seqs": sequences}),
    }
    for name, plan in plans.items():
        mine, theirs = plan.config.source.name == "offline", largest.config.source.name == "offline"
        if mine != theirs:
            raise ConfigError(
                f"{name} and other policies of the sweep differ in whether they sample.",
                "Sweep algorithms that sample, or sft or dpo, apart.",
            )
    resolved = {"placement": largest.resolved.placement, "memory": largest.resolved.memory}
    return {
        name: replace(
            plan,
            config=plan.config.model_copy(update=common),
            resolved=plan.resolved.model_copy(update=resolved),
        )
        for name, plan in plans.items()
    }


@contextlib.contextmanager
def _locked(folder: SweepDir, plans: Mapping[str, RunPlan]) -> Any:
    """Lock the folders of all runs."""
    from skylite.run.own_folders import lock_folder, lock_run

    with contextlib.ExitStack() as locks:
        locks.enter_context(lock_folder(folder.root))
        for plan in plans.values():
            locks.enter_context(
                lock_run(plan.run.root, plan.resolved.identity.lora_sync_path, plan.config.lora)
            )
        yield
