"""Train several policies at once on one base. Each is a run; they share the engines and the trainer."""

from __future__ import annotations

import contextlib
import itertools
import logging
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import Field

from skylite.cli.options import RUNS, numbers
from skylite.cli.setting_flags import Flags, takes_settings
from skylite.config.base_section import LENGTH, RUN, SAFETY, WHAT, Flag
from skylite.config.provenance import Provenance, Typed, parse_value
from skylite.config.train import all_settings
from skylite.errors import ConfigError, DoesNotFit
from skylite.run.sweep_dir import SweepDir
from skylite.ui.logs import run_log, show, show_printed

if TYPE_CHECKING:
    from skylite.rollout.plan import RunPlan
    from skylite.rollout.sweep import End

logger = logging.getLogger(__name__)
SHARED = ("model", "engine", "trainer", "shared_network", "lora.lora_sync_path", "lora.target_parameters")
"""Settings that cannot differ between the policies of a sweep."""
GRID = "--grid"


class SweepFlags(Flags):
    """The flags of `skylite sweep` that are not settings."""

    provenance: Provenance
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="stop POLICY",
            help="stop runs/sweep/rank-8: this policy leaves a running sweep after its step; its run stays.",
            show_default=False,
        ),
    ] = None
    recipe: Annotated[str | None, Flag("--recipe", WHAT, default="the bundled one for this machine")] = None
    """TOML or YAML file, or the name of a bundled recipe: what all policies have in common."""
    grid: Annotated[
        list[str] | None, Flag(GRID, WHAT, default="nothing varies", metavar="A.B=VALUE,VALUE")
    ] = None
    """A setting to vary, with its values. Repeatable: every combination is a policy."""
    seeds: Annotated[str | None, Flag("--seeds", WHAT, default="the seed of the recipe")] = None
    """Seeds such as 0,1,2: every combination is trained with each."""
    together: Annotated[int | None, Flag("--together", LENGTH, default="as many as fit")] = Field(None, ge=1)
    """Policies that train at the same time; more run in turns. The memory plan must allow so many."""
    halve_every: Annotated[int | None, Flag("--halve-every", LENGTH, default="off")] = Field(None, ge=1)
    """Every so many steps the worse half of the settings leaves, by held-out score (eval.every)."""
    out: Annotated[Path | None, Flag("--out", RUN, default="runs/sweep-DATE")] = None
    """Folder of the new sweep, with a run folder for each policy."""
    resume: Annotated[Path | None, Flag("--resume", RUN, default="start a new sweep")] = None
    """Resume every policy of this sweep that is not done, stopped or failed."""
    dry_run: Annotated[bool, Flag("--dry-run", SAFETY)] = False
    """Check everything, list the policies, start nothing."""


@takes_settings("all", of="recipe")
def sweep(flags: SweepFlags) -> None:
    """Start, resume or shorten a sweep. Raises SkyliteError subclasses.

    Exits 130 after a clean stop by Ctrl-C, and 1 if a policy failed.
    """
    if flags.words:
        _stop_policy(flags, flags.words)
        return
    if flags.dry_run:
        show_printed()
    ends = {end.how for end in (_resume(flags) if flags.resume is not None else _start(flags)).values()}
    if "stopped" in ends:
        sys.exit(130)
    if "failed" in ends:
        sys.exit(1)


def _start(flags: SweepFlags) -> Mapping[str, End]:
    from skylite.cli.train import plan_new
    from skylite.rollout.halving import check_halving, combinations
    from skylite.rollout.plan import write_run
    from skylite.run.files import write_json

    policies = policies_of(flags.grid or [], flags.seeds)
    folder = SweepDir((flags.out or RUNS / f"sweep-{time.strftime('%Y%m%d-%H%M%S')}").resolve())
    if folder.manifest_path.exists():
        raise ConfigError(
            f"{folder.root} is a sweep already.", "Give --resume to continue it, or another --out."
        )

    def planned(name: str, together: int) -> RunPlan:
        own = varied(flags.provenance, policies[name], together)
        return plan_new(own, flags.recipe, folder.run(name).root, keep=not flags.dry_run)[0]

    plans, together = plan_together([*policies], planned, flags.together, len(policies))
    values = {name: {key: typed.value for key, typed in own.items()} for name, own in policies.items()}
    if flags.halve_every:
        check_halving(flags.halve_every, plans, combinations(values))
    plans = shared_plans(plans)
    if flags.dry_run:
        for name, plan in plans.items():
            show(f"{name}: {plan.config.num_steps} steps")
        logger.info(f"ready: {len(plans)} policies, {together} at once; without --dry-run they train")
        return {}
    with _locked(folder, plans):
        for plan in plans.values():
            write_run(plan)
        halve_every = flags.halve_every or 0
        write_json(
            folder.manifest_path, {"policies": values, "together": together, "halve_every": halve_every}
        )
        return _train(folder, plans, together, halve_every)


def plan_together(
    names: Sequence[str], plan: Callable[[str, int], RunPlan], asked: int | None, most: int
) -> tuple[dict[str, RunPlan], int]:
    """The plans of all policies, and how many train at once: `asked`, or of `most` as many as fit in memory.

    `plan`: of a policy, with memory for so many of it. Raises ConfigError if `asked` does not fit.
    """
    from skylite.engine.start_engines import refuse_urls, require_awake
    from skylite.processes.hosts import require_one_host

    plans: dict[str, RunPlan] = {}
    together = wanted = min(asked or most, most)
    why: DoesNotFit | None = None
    while waiting := [n for n in names if n not in plans or plans[n].config.engine.policies != together]:
        logger.info(f"policy {waiting[0]}")
        try:
            plans[waiting[0]] = plan(waiting[0], together)
            refuse_urls(plans[waiting[0]].config, "sweep")
            require_one_host(plans[waiting[0]].config, "a sweep")
            require_awake(plans[waiting[0]].config, "sweep")
        except DoesNotFit as error:
            if together == 1:
                raise
            why, together = why or error, together - 1
    if why is not None and asked:
        raise ConfigError(f"--together {wanted} does not fit: {why.what}", f"--together {together} fits.")
    if why is not None:
        logger.warning(f"{together} policies train at once, the others in turn: {why.what}")
    return plans, together


def _resume(flags: SweepFlags) -> Mapping[str, End]:
    from skylite.rollout.resume import plan_resume
    from skylite.run.own_folders import require_own_folders
    from skylite.run.run_dir import RunDir

    assert flags.resume is not None
    if flags.grid or flags.seeds or flags.out or flags.recipe or flags.halve_every:
        raise ConfigError(
            "--resume continues a sweep as it was, and flags of a new one were given too.",
            "Remove --grid, --seeds, --recipe, --halve-every and --out.",
        )
    from skylite.config.loading import read_run_config

    folder = SweepDir(flags.resume.resolve())
    states = {name: state_of(folder, name) for name in folder.policies()}
    for name, state in states.items():
        logger.info(f"{name}: {state}")
    unfinished = [name for name, state in states.items() if state in ("unfinished", "not started")]
    if not unfinished:
        raise ConfigError(f"{folder.root} has no policy left to train.", "See `skylite report`.")
    most = len(unfinished)
    if not flags.together:
        most = min(RunDir(folder.root).read_count(folder.manifest_path, "together"), most)
    recorded = {name: read_run_config(folder.run(name).config_path) for name in unfinished}
    for name, run_config in recorded.items():
        require_own_folders(folder.run(name), run_config)
    halve_every = folder.halve_every()
    if halve_every and (changed := [name for name in flags.provenance.typed if name.startswith("eval.")]):
        raise ConfigError(
            f"{folder.root} halves by held-out scores, which {', '.join(changed)} would change.",
            "Resume without it.",
        )

    def planned(name: str, together: int) -> RunPlan:
        return plan_resume(folder.run(name), varied(flags.provenance, {}, together))

    plans, together = plan_together(unfinished, planned, flags.together, most)
    if flags.dry_run:
        logger.info(f"ready: {len(plans)} policies, {together} at once; without --dry-run they train")
        return {}
    with _locked(folder, plans):
        return _train(folder, shared_plans(plans), together, halve_every)


def _train(
    folder: SweepDir, plans: Mapping[str, RunPlan], together: int, halve_every: int
) -> Mapping[str, End]:
    import asyncio

    from skylite.report.sweep import table_text
    from skylite.rollout.halving import Halving, combinations, read_rungs
    from skylite.rollout.sweep import run_sweep

    folder.shared.logs.mkdir(parents=True, exist_ok=True)
    halving = Halving(
        folder,
        halve_every,
        max(plan.config.num_steps for plan in plans.values()),
        combinations(folder.policies()),
        active=set(plans),
        scores=read_rungs(folder),
    )
    with run_log(folder.shared.log_path("skylite")):
        results = asyncio.run(run_sweep(halving, plans, together))
    for name, result in results.items():
        logger.info(f"{name}: {result}")
    show(table_text(folder))
    return results


def _stop_policy(flags: SweepFlags, words: Sequence[str]) -> None:
    """Ask a running sweep to let a policy go."""
    others = flags.model_dump(exclude={"words", "provenance"}, exclude_defaults=True)
    if words[0] != "stop" or len(words) != 2 or others or flags.provenance.typed:
        raise ConfigError(
            f"`skylite sweep {' '.join(words)}` is not a command: only `stop POLICY` comes without flags.",
            "Give `skylite sweep stop runs/sweep/rank-8`, or flags such as --grid lora.rank=8,32.",
        )
    path = Path(words[1]).resolve()
    folder = SweepDir(path.parent)
    if not SweepDir.is_one(path.parent) or path.name not in folder.policies():
        raise ConfigError(
            f"{words[1]} is not a policy of a sweep.", "Give SWEEP/POLICY, such as runs/sweep/rank-8."
        )
    state = state_of(folder, path.name)
    if state not in ("unfinished", "not started"):
        raise ConfigError(f"{words[1]} trains no more: {state}.", "Stop another one, or Ctrl-C the sweep.")
    folder.leave(path.name, "stopped by the user (`skylite sweep stop`)")
    show(f"{path.name} leaves the sweep after its step")


def state_of(folder: SweepDir, name: str) -> str:
    """Whether a resumed sweep trains it: not started, unfinished; else done, failed or why it left."""
    from skylite.run.status import read_status

    if why := folder.why_left(name):
        return why
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
    awake = {"engine.sleep": Typed("never", "--set")}  # one policy samples while another trains
    return replace(provenance, typed={**awake, **provenance.typed, **own})


def shared_plans(plans: Mapping[str, RunPlan]) -> dict[str, RunPlan]:
    """The plans with one trainer, placement and memory: those of the largest policy.

    Raises ConfigError for what cannot be shared.
    """
    from skylite.rollout.sweep import largest_plan

    largest = largest_plan(plans.values())
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
        if (teacher := plan.config.algorithm.own_teacher) is not None:
            raise ConfigError(
                f"{name} has the teacher {teacher}, which gets an engine of its own, and the policies of a "
                "sweep share all engines.",
                "Serve it, and give its URL as algorithm.teacher.",
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
