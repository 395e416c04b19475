"""Say what fits on GPUs that you describe, and how to run it.

Needs no GPU and no weights: config.json is enough. Exits 1 if it does not fit.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from skylite.adapters.target_modules import check_target_names
from skylite.cli.options import AsJson
from skylite.cli.setting_flags import Flags, takes_settings
from skylite.cli.train_defaults import GPU_RECIPE, find_recipe
from skylite.config.engine import VLLM
from skylite.config.loading import load_config
from skylite.config.provenance import Provenance
from skylite.config.train import TrainConfig
from skylite.engine.launchers import load_launcher
from skylite.engine.model_limits import check_context, check_trainable
from skylite.engine.tensor_parallel import check_divisible
from skylite.errors import ConfigError
from skylite.hub.outline import model_or_outline, write_quantised
from skylite.processes.gpus import visible_gpus
from skylite.processes.private_folders import temporary_folder
from skylite.resources.gpu_fit import (
    FREE,
    GIB,
    Fit,
    best_fit,
    described_machines,
    measured,
    wanted_kind,
    what_helps,
    with_settings,
)
from skylite.resources.gpu_memory_plan import Setup
from skylite.resources.gpu_placement import GpuChoice, assign_gpus
from skylite.rollout.plan import RunPlan, device_defaults
from skylite.rollout.teacher_check import with_own_teacher
from skylite.ui.logs import show

INTERFACE = "INTERFACE"
"""In the command of a plan for several machines, for the user to replace."""


class PlanFlags(Flags):
    """The flags of `skylite plan` that are not settings."""

    provenance: Provenance
    gpus: Annotated[
        str,
        typer.Option(
            "--gpus",
            metavar="NxGIB",
            help="GPUs of a machine: 8x80 is 8 of 80 GiB, 24 is one, 2x8x80 two machines with 8 each.",
        ),
    ]
    tokens: Annotated[
        int | None,
        typer.Option(min=2, help="Of the longest sequence: prompt and completion. Default: the recipe's."),
    ] = None
    recipe: Annotated[str | None, typer.Option(help=f"As of `skylite train`. Default: {GPU_RECIPE}.")] = None
    as_json: AsJson = False


@takes_settings(("model.name", "lora.rank"), of="recipe")
def plan(flags: PlanFlags) -> None:
    """Print the plan, or what would fit. Raises SkyliteError for settings that no GPUs can run."""
    hosts, gpus = described_machines(flags.gpus)
    config, lengths = plan_config(flags.recipe, flags.provenance, flags.tokens)
    config, lengths = on_machines(config, lengths, hosts)
    words, instead, other = command_words(flags, lengths), None, None
    with model_or_outline(config.model.name) as path, temporary_folder("plan-") as spare:
        setup = checked_setup(config, path)
        sizes, quantised = setup.sizes(config), spare / path.name
        found = best_fit(config, setup, gpus, wanted_kind(config))
        if isinstance(found, Fit) and config.placement == "auto":
            other = best_fit(config, setup, gpus, found.placement.other_kind)
        elif not isinstance(found, Fit):
            instead = what_helps(
                config, setup, gpus, lambda: quantised if write_quantised(path, quantised) else None
            )
    fit, reason = (found, "") if isinstance(found, Fit) else (None, found.what)
    change, better = instead or ("", None)
    model = (
        f"{path.name}: {sizes.parameters / 1e9:.1f} billion parameters, LoRA rank {config.lora.max_rank}, "
        f"sequences of {config.max_sequence_tokens:,} tokens"
    )
    where = f"{len(gpus)} GPU{'s' * (len(gpus) > 1)} of {gpus[0].name}"
    where = f"{hosts} machines with {where} each" if hosts > 1 else where
    facts = {
        "model": model,
        "gpus": where,
        "fits": fit is not None,
        "reason": reason,
        "would_fit": change,
        "plan": fit_facts(fit or better, words),
        "other_placement": fit_facts(other if isinstance(other, Fit) else None, words),
    }
    show(json.dumps(facts, indent=1) if flags.as_json else plan_text(facts))
    sys.exit(0 if facts["fits"] else 1)


def plan_config(
    recipe: str | None, provenance: Provenance, tokens: int | None
) -> tuple[TrainConfig, dict[str, Any]]:
    """The settings of a run on GPUs, and those that --tokens sets. Raises ConfigError."""
    config = load_config(find_recipe(recipe or GPU_RECIPE), provenance)
    if config.engine.launcher != VLLM:
        raise ConfigError(
            f"engine.launcher={config.engine.launcher} is a program of yours, and `skylite plan` predicts "
            "vLLM's memory.",
            "Use `skylite train --dry-run` on the machine.",
        )
    if (name := with_own_teacher(config).algorithm.own_teacher) is not None:
        raise ConfigError(
            f"The teacher {name} gets an engine of its own, which `skylite plan` does not count.",
            "Use `skylite train --dry-run` on the machine, or leave algorithm.teacher out.",
        )
    prompt, lengths = config.rollout.max_prompt_tokens, dict[str, Any]()
    if tokens is not None and config.env.episode:
        lengths = {"env.max_tokens": tokens}
    elif tokens is not None:
        lengths = {"rollout.max_completion_tokens": tokens - prompt}
    if tokens is not None and tokens <= prompt:
        raise ConfigError(
            f"--tokens {tokens} leaves no completion: a prompt may have {prompt} tokens.",
            "Raise it, or lower rollout.max_prompt_tokens with --set.",
        )
    return device_defaults(with_settings(config, lengths), "cuda")[0], lengths


def on_machines(
    config: TrainConfig, settings: dict[str, Any], hosts: int
) -> tuple[TrainConfig, dict[str, Any]]:
    """The settings of a run on so many machines, and those that this adds to `settings`."""
    if hosts == 1:
        return config, settings
    more = {"trainer.hosts": hosts, "trainer.interface": config.trainer.interface or INTERFACE}
    return with_settings(config, more), settings | more


def checked_setup(config: TrainConfig, model: Path) -> Setup:
    """What the plan of a model needs. Raises SkyliteError for one that does not train, as a run would."""
    launcher = load_launcher(config, {})
    check_trainable(model, config.trainer)
    check_target_names(model, config.lora)
    check_context(config, model)
    check_divisible(model, config.engine.tensor_parallel)
    if config.engine.num_engines:
        launcher.check_model(model, "cuda", config.lora.max_rank, config.lora)
    nowhere = GpuChoice(rank_gpus=[], engine_gpus=[], notes=[])
    return Setup(launcher, model, "cuda", "bfloat16", "dense", nowhere)


def command_words(flags: PlanFlags, lengths: dict[str, Any]) -> dict[str, list[str]]:
    """The words of `skylite train` for what the user typed, by setting."""
    words = {"recipe": ["--recipe", flags.recipe]} if flags.recipe else {}
    for name, typed in flags.provenance.typed.items():
        text = typed.value if isinstance(typed.value, str) else json.dumps(typed.value)
        if name == "model.name" and Path(text).is_file():
            text = str(Path(text).parent)
        words[name] = ["--set", f"{name}={text}"] if typed.flag == "--set" else [typed.flag, text]
    return words | setting_words(lengths)


def setting_words(settings: dict[str, Any]) -> dict[str, list[str]]:
    """The words of `skylite train` that set these, by setting."""
    return {name: ["--set", f"{name}={json.dumps(value)}"] for name, value in settings.items()}


def fit_facts(fit: Fit | None, words: dict[str, list[str]]) -> dict[str, Any] | None:
    """A plan for programs; None without one."""
    if fit is None:
        return None
    chosen = words | setting_words(fit.settings)
    return {
        "placement": fit.placement.kind,
        "where": fit.placement.notes[0].text,
        "rank_gpus": fit.placement.rank_gpus,
        "engine_gpus": fit.placement.engine_gpus,
        "bytes": fit.table(),
        "sequences": fit.sequences,
        "few": fit.is_slow,
        "micro_batch_tokens": fit.tokens,
        "others": others_text(fit),
        "checkpointing": fit.config.trainer.checkpointing,
        "settings": fit.settings,
        "warnings": [note.text for note in (*fit.placement.notes, *fit.notes) if note.is_warning],
        "command": shlex.join(["skylite", "train", *(word for two in chosen.values() for word in two)]),
    }


def plan_text(facts: dict[str, Any]) -> str:
    """The plan in a screen."""
    plan, other = facts["plan"], facts["other_placement"]
    if plan is None:
        verdict = f"does not fit. {facts['reason']}\nNothing that was tried makes it fit on one machine."
        return f"{facts['model']}\n{facts['gpus']}: {verdict}"
    verdict = f"fits, {plan['placement']}: {plan['where']}"
    if not facts["fits"]:
        verdict = (
            f"does not fit. {facts['reason']}\nIt fits {facts['would_fit']}, {verdict.partition(' ')[2]}"
        )
    lines = [facts["model"], f"{facts['gpus']}: {verdict}", "", *table(plan["bytes"]), "", left_text(plan)]
    lines += [plan["others"]] * bool(plan["others"])
    lines += [f"warning: {text}" for text in plan["warnings"]]
    if other is not None:
        settings = " ".join(f"{name}={json.dumps(value)}" for name, value in other["settings"].items())
        lines.append(f"Placement {other['placement']} fits, too ({settings}). {left_text(other)}")
    elif facts["fits"] and len(plan["bytes"]) > 1:
        lines.append("No other placement fits.")
    return "\n".join([*lines, "", plan["command"]])


def others_text(fit: Fit) -> str:
    """What the machines but the first do; "" for a run on one."""
    trainer, gpus = fit.config.trainer, fit.placement
    if trainer.hosts == 1:
        return ""
    text = (
        f"{trainer.world_size} ranks in all: each other machine has ranks on GPU "
        f"{numbers_text(gpus.rank_gpus)} (skylite worker --join RUN), and the run starts no engine there."
    )
    if free := sorted({*gpus.engine_gpus} - {*gpus.rank_gpus}):
        text += f" Its GPU {numbers_text(free)} can serve: start vLLM there, and name it in engine.urls."
    return text


def left_text(plan: dict[str, Any]) -> str:
    """What the memory leaves for speed."""
    few = " (few: sampling will be slow)" if plan["few"] else ""
    sampled = f"An engine holds {plan['sequences']} of the longest sequences at once{few}. "
    return (
        f"{sampled if plan['engine_gpus'] else ''}A micro-batch has up to {plan['micro_batch_tokens']:,} "
        f"tokens, with trainer.checkpointing={plan['checkpointing']}."
    )


def memory_of_run(plan: RunPlan) -> str:
    """The table of a checked run; "" on a CPU, and on GPUs of unknown size."""
    at = plan.resolved.placement
    if at.device == "cpu":
        return ""
    placement = assign_gpus(plan.config, visible_gpus())
    if any(gpu.total_bytes is None for gpu in placement.gpus.values()):
        return ""
    launcher = load_launcher(plan.config, plan.resolved.trust.programs)
    of_run = plan.resolved
    setup = Setup(launcher, of_run.model.path, at.device, at.dtype, at.cpu_lora, placement, of_run.teacher)
    return "\n".join(table(measured(plan.config, {}, setup).table()))


def table(on_gpus: dict[int, dict[str, int]]) -> Iterator[str]:
    """GiB by part, with a column for each kind of GPU."""
    alike = dict[tuple[tuple[str, int], ...], list[int]]()
    for gpu, parts in on_gpus.items():
        alike.setdefault(tuple(parts.items()), []).append(gpu)
    kinds = [dict(parts) for parts in alike]
    names = [*dict.fromkeys(name for parts in kinds for name in parts if name != FREE), FREE]
    rows = [["GiB", *(f"GPU {numbers_text(gpus)}" for gpus in alike.values())]]
    for name in names:
        rows.append([name, *(f"{parts[name] / GIB:.1f}" if name in parts else "" for parts in kinds)])
    yield from columns(rows)


def numbers_text(numbers: Sequence[int]) -> str:
    """Such as 0-3, or 0,2."""
    is_range = len(numbers) > 2 and numbers[-1] - numbers[0] == len(numbers) - 1
    return f"{numbers[0]}-{numbers[-1]}" if is_range else ",".join(map(str, numbers))


def columns(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Lines of a table: the first column is aligned to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for name, *cells in rows:
        right = (cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True))
        yield "  ".join([name.ljust(widths[0]), *right])
