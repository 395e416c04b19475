"""From settings to a run directory. Everything is checked here, before a process starts."""

from __future__ import annotations

import contextlib
import hashlib
import math
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from fractions import Fraction
from pathlib import Path
from typing import Any

import skylite
from skylite.adapters.import_adapter import (
    adopt_adapter,
    copy_adapter,
    expand_adapter_path,
)
from skylite.config.loading import read_recipe
from skylite.config.provenance import NOTHING_TYPED, Provenance
from skylite.config.resolved import (
    MemoryPlan,
    ModelFiles,
    Placement,
    Resolved,
    RunIdentity,
    TeacherModel,
    Trust,
)
from skylite.config.train import HIGHEST_USUAL_LR, LOWEST_USUAL_LR, RunConfig, TrainConfig
from skylite.data.chat_tokenizer import (
    ChatTemplate,
    clock_note,
    keep_clock,
    load_tokenizer,
    read_template,
    template_notes,
)
from skylite.data.prompt_history import merged
from skylite.data.prompt_order import steps_per_epoch
from skylite.data.prompts import PromptFileInfo, read_info
from skylite.engine.connections import open_files
from skylite.engine.interface import Launcher
from skylite.engine.launchers import load_launcher
from skylite.engine.model_check import check_model
from skylite.engine.model_limits import check_trainable
from skylite.errors import ConfigError, DataError, convert_os_errors
from skylite.evaluation.confidence_interval import wilson
from skylite.hub.resolve import ResolvedModel, resolve_model
from skylite.loggers.writers import require_libraries
from skylite.notes import Note, log_notes, notes_of, warning
from skylite.processes.gpus import Gpu, visible_gpus, why_no_gpu
from skylite.processes.hardware import (
    Device,
    choose_device,
    choose_dtype,
    cpu_cores,
    machine_facts,
    threads_per_rank,
    triton_note,
)
from skylite.processes.own_network import check_network
from skylite.processes.streams import raise_file_limit
from skylite.resources.gpu_fit import chosen_fit, free_settings
from skylite.resources.gpu_memory_plan import Setup, fit_memory
from skylite.resources.gpu_placement import GpuChoice, place, placer
from skylite.rollout.engine_check import check_engines
from skylite.rollout.judge_check import check_judge
from skylite.rollout.prompt_check import check_teacher_prompts, without
from skylite.rollout.reward_check import without_reward
from skylite.rollout.sources import ScoredData, Source, source_for
from skylite.rollout.teacher_check import check_teacher, with_own_teacher
from skylite.rollout.trusted_programs import (
    allow_algorithm,
    allow_launcher,
    allow_servers,
)
from skylite.run.files import sha256_file, write_json
from skylite.run.own_folders import mark_sync_folder, refuse_live
from skylite.run.run_dir import RunDir, published_versions
from skylite.sandbox.sandbox import require_sandbox
from skylite.types import Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """A checked run: all that the parent needs to start it."""

    run: RunDir
    config: TrainConfig
    resolved: Resolved
    train: Sequence[Prompt]
    held_out: Sequence[Prompt]
    """The first eval.limit problems of eval.split."""
    rewards: tuple[str, ...]
    """Specs of what scores: reward functions, or the episodes of an environment."""
    first_step: int
    """1, or the step after the checkpoint a resumed run continues from."""
    resumed: bool = False
    """Continues an existing run, from a checkpoint or, if there is none, from its start."""
    reuse_rollouts: bool = False
    """Train again on the stored rollouts of steps after the checkpoint."""
    mixed: Mapping[str, str] = field(default_factory=dict)
    """Prompt id -> its folder in data.mix, or empty for data.path."""
    pause_after: int | None = None
    """The session ends after this step, with a checkpoint, before the last one: at a rung of a sweep."""

    @property
    def last_step(self) -> int:
        """Of the session."""
        return self.pause_after or self.config.num_steps

    @property
    def scored(self) -> ScoredData:
        """What scores the completions."""
        return ScoredData(config=self.config, rewards=self.rewards, programs=self.resolved.trust.programs)

    @property
    def run_config(self) -> RunConfig:
        """What config.json holds."""
        return run_config_of(self.config, self.resolved)


def run_config_of(config: TrainConfig, resolved: Resolved) -> RunConfig:
    return RunConfig(skylite_version=skylite.__version__, config=config, resolved=resolved)


def plan_run(
    config: TrainConfig,
    run: RunDir,
    provenance: Provenance = NOTHING_TYPED,
    *,
    notes: Sequence[Note] = (),
) -> RunPlan:
    """Check data, reward, model and machine. Writes nothing. Raises SkyliteError subclasses.

    `provenance`: what the user typed, and the recipe. `notes`: choices made before, to print and record.
    """
    check_folders(config, run)
    config = with_own_teacher(config)
    config, filter_note = without_foreign_filter(config, provenance)
    source = source_for(config)
    train, info, mixed = read_train(config)
    template = replace(read_template(config.data), now=datetime.now().replace(microsecond=0))
    scored = plan_rewards(source, config, info, train, provenance)
    held_out = held_out_prompts(scored.config)
    launcher = load_launcher(scored.config, scored.programs)
    config, device_notes = device_defaults(scored.config, choose_device())
    model = choose_model(config, launcher)
    config, adapter_notes = adopt_adapter(config, _chosen(config, provenance), model.path)
    with contextlib.closing(load_tokenizer(model.path, template)) as tokenizer:
        dropped, prompt_notes = source.check_prompts(tokenizer, config, model.path, train, held_out)
        prompt_notes += source.check_completions(scored, info, tokenizer, train)
        config, teacher, teacher_notes = check_teacher(config, launcher, tokenizer, train)
        train, held_out = without(train, dropped), without(held_out, dropped)
        check_teacher_prompts(tokenizer, config, model.path, train)
        template = keep_clock(template, tokenizer)
    config, length_note = epochs_to_steps(config, len(train))
    notes = notes_of(
        *notes,
        *(data_note(config, info, len(train)), filter_note, held_out_note(held_out)),
        *(*template_notes(config.data), clock_note(template)),
        *(*prompt_notes, *teacher_notes, *scored.notes),
        *(*adapter_notes, length_note, *device_notes),
    )
    images = max(len(prompt.images) for prompt in (*train, *held_out))
    config, placement, memory, notes = choose_placement(config, model, launcher, notes, images, teacher)
    resolved = Resolved(
        model=_model_files(model, template, images),
        teacher=teacher,
        placement=placement,
        memory=memory,
        trust=Trust(programs=scored.programs),
        identity=_new_identity(config, run, dropped),
    )
    notes += check_engines(run_config_of(config, resolved))
    log_notes(notes)
    return RunPlan(
        run=run,
        config=config,
        resolved=resolved.model_copy(update={"notes": notes}),
        train=train,
        held_out=held_out,
        rewards=scored.rewards,
        first_step=1,
        mixed=mixed,
    )


def _model_files(model: ResolvedModel, template: ChatTemplate, images: int) -> ModelFiles:
    return ModelFiles(
        path=model.path,
        revision=model.revision,
        fingerprint=model.fingerprint,
        chat_template=template.text,
        template_time=template.now,
        max_images=images,
    )


def _new_identity(config: TrainConfig, run: RunDir, dropped: list[str]) -> RunIdentity:
    return RunIdentity(
        run_id=uuid.uuid4().hex,
        lora_sync_path=sync_folder(config, run),
        warm_start=run.warm_start if config.lora.from_adapter is not None else None,
        teacher=run.teacher if config.algorithm.teacher_folder is not None else None,
        data_sha256=train_data_hash(config),
        dropped_prompts=dropped,
    )


def plan_rewards(
    source: Source,
    config: TrainConfig,
    info: PromptFileInfo,
    train: Sequence[Prompt],
    provenance: Provenance,
) -> ScoredData:
    """What scores the data, after a call of each reward, with all programs that the user allows.

    Raises SkyliteError subclasses.
    """
    scored = source.allow(
        config,
        info,
        data=Path(config.data.path),
        provenance=provenance,
        keep=config.reward.model_fields_set,
    )
    config, note = without_reward(scored.config, scored.rewards)
    scored = replace(scored, config=config)
    notes = [*notes_of(*scored.notes, note), *source.check_rewards(scored, info, train)]
    allow_servers(scored.config, provenance)
    notes += check_judge(scored.config, train)
    programs = scored.programs | allow_algorithm(scored.config, provenance)
    programs |= allow_launcher(scored.config, provenance)
    return replace(scored, programs=programs, notes=notes)


def _chosen(config: TrainConfig, provenance: Provenance) -> set[str]:
    """The settings of LoRA that the user chose, and not a recipe."""
    names = {f"lora.{name}" for name in config.lora.model_fields_set}
    return {name for name in names if provenance.file_of(name) is None}


def choose_model(config: TrainConfig, launcher: Launcher) -> ResolvedModel:
    """The model's folder, on a machine that can train it. Raises SkyliteError."""
    device = choose_device()
    choose_dtype(config.model.dtype, device)
    check_device(config, device)
    check_network(config)
    if config.engine.num_engines:
        launcher.check_machine(device)
    model = resolve_model(config.model.name)
    check_trainable(model.path, config.trainer)
    return model


def choose_placement(
    config: TrainConfig,
    model: ResolvedModel,
    launcher: Launcher,
    notes: Sequence[Note],
    max_images: int = 0,
    teacher: TeacherModel | None = None,
) -> tuple[TrainConfig, Placement, MemoryPlan, list[Note]]:
    """Choose dtype, GPUs, checkpointing, sequences at once and memory; add a note on each choice.

    Raises SkyliteError.
    """
    device = choose_device()
    bf16_reason = launcher.bf16_reason(model.path, device) if config.engine.count else ""
    dtype, dtype_note = choose_dtype(config.model.dtype, device, bf16_reason=bf16_reason)
    gpus = visible_gpus() if device == "cuda" else []
    free = placement_settings(config, gpus)
    at = GpuChoice(rank_gpus=[], engine_gpus=[], notes=[]) if free else place(config, device)
    model_notes = check_model(config, model, launcher, device, max_images)
    cpu_lora = launcher.choose_cpu_lora(config, dtype, model.path)
    of_engines = launcher.notes(config, device, dtype, cpu_lora) if config.engine.num_engines else []
    setup = Setup(launcher, model.path, device, dtype, cpu_lora, at, teacher)
    if free:
        fit = chosen_fit(config, setup, gpus, placer(gpus))
        config, at, memory, memory_notes = fit.config, fit.placement, fit.memory, fit.notes
    else:
        config, memory, memory_notes = fit_memory(config, setup)
    notes = notes_of(
        *notes,
        why_no_gpu() if device == "cpu" else None,
        *at.notes,
        dtype_note,
        *settings_notes(config),
        model.note,
        *model_notes,
        triton_note(device),
        *of_engines,
        *memory_notes,
    )
    placement = Placement(
        device=device,
        dtype=dtype,
        cpu_lora=cpu_lora,
        rank_gpus=at.rank_gpus,
        engine_gpus=at.engine_gpus,
        free_settings=free,
    )
    return config, placement, memory, notes


def placement_settings(config: TrainConfig, gpus: Sequence[Gpu]) -> list[str]:
    """The settings that `placement` chooses on these GPUs; none where that is left to the user.

    Several policies share one trainer and one engine, and without a GPU's size nothing can be predicted.
    """
    is_left = config.placement == "explicit" or config.engine.gpus or config.trainer.hosts > 1
    if is_left or config.engine.policies > 1 or not gpus or any(gpu.total_bytes is None for gpu in gpus):
        return []
    return free_settings(config)


CPU_MICRO_BATCH_TOKENS = 2048
"""On a CPU larger micro-batches need more memory and are not faster."""


def epochs_to_steps(config: TrainConfig, num_prompts: int) -> tuple[TrainConfig, str]:
    """Compute num_steps from num_epochs, with a note. Raises DataError if a step takes more prompts."""
    if config.num_epochs is None:
        return config, ""
    per_step = config.rollout.prompts_per_step
    epoch = steps_per_epoch(num_prompts, per_step)
    # A Fraction of the decimal text is exact: in floating point, 0.1 * 30 steps would be rounded up to 4.
    num_steps = math.ceil(Fraction(str(config.num_epochs)) * epoch)
    note = (
        f"num_steps={num_steps}: num_epochs={config.num_epochs:g}, and an epoch of {num_prompts} prompts has "
        f"{epoch} steps (rollout.prompts_per_step={per_step})"
    )
    return config.model_copy(update={"num_steps": num_steps}), note


def device_defaults(config: TrainConfig, device: Device) -> tuple[TrainConfig, list[str]]:
    """Values for the device where nobody set one, with a note on each."""
    trainer, update, notes = config.trainer, dict[str, Any](), list[str]()
    if "tokens_per_micro_batch" not in trainer.model_fields_set:
        tokens: int | str = "auto"
        reason = "the default on a GPU; the trainer measures how many fit"
        if device == "cpu":
            tokens, reason = CPU_MICRO_BATCH_TOKENS, "larger ones are slower on a CPU and need more memory"
        update["tokens_per_micro_batch"] = tokens
        notes.append(f"trainer.tokens_per_micro_batch={tokens}: {reason}")
    if trainer.hosts > 1:
        notes.append(
            f"{trainer.hosts} machines train, {trainer.num_ranks} rank(s) each, over {trainer.interface}: "
            "ranks trust whatever connects to them there"
        )
    if device == "cuda" and "attention" not in trainer.model_fields_set:
        update["attention"] = "flex"
        notes.append("trainer.attention=flex: the default on a GPU")
    if trainer.num_threads is None:
        threads = threads_per_rank(trainer.num_ranks)
        shares = device == "cpu" and config.engine.policies > 1 and config.source.name != "offline"
        if shares:  # threads that wait for each other spin, so two sides on the same cores slow each other
            threads = max(1, threads // 2)
        notes.append(
            f"{threads} CPU threads per rank: {cpu_cores()} usable cores, {trainer.num_ranks} rank(s)"
        )
        if shares:
            notes[-1] += "; the engine samples for other policies on the rest"
        if trainer.deterministic:  # their number affects rounding, so a resume elsewhere needs the same
            notes[-1] += "; fixed, because trainer.deterministic is true"
        if shares or trainer.deterministic:
            update["num_threads"] = threads
    return config.model_copy(update={"trainer": trainer.model_copy(update=update)}), notes


def without_foreign_filter(config: TrainConfig, provenance: Provenance) -> tuple[TrainConfig, str]:
    """Leave out the recipe's data.difficulty if a flag names other data. Returns settings and note."""
    recipe = provenance.file_of("data.difficulty")
    if recipe is None:
        return config, ""
    info = read_info(Path(config.data.path) / "train.parquet")
    return fit_difficulty(config, read_recipe(recipe).get("data", {}), info, f"the recipe {recipe.stem}")


def fit_difficulty(
    config: TrainConfig, own: dict[str, Any], info: PromptFileInfo, owner: str
) -> tuple[TrainConfig, str]:
    """Remove data.difficulty from `config` if it was chosen for another data set than that of data.path.

    Args:
        own: the section `data` of `owner`, which data.difficulty comes from.
        info: footer of the data in data.path.
        owner: a recipe or a run, for the note.

    Returns the settings and a note; the note is empty if nothing changed.
    """
    wanted, own_path, path = own.get("difficulty"), own.get("path"), Path(config.data.path)
    if not wanted or own_path is None:
        return config, ""
    if Path(own_path).resolve() == path.resolve() or Path(own_path).name == info.dataset:
        return config, ""
    data = config.data.model_copy(update={"difficulty": []})
    note = (
        f"data.difficulty={wanted} in {owner} is for its own data, {own_path}; all problems of {path} are "
        "used (--set data.difficulty=... chooses some)"
    )
    return config.model_copy(update={"data": data}), note


def check_device(config: TrainConfig, device: str) -> None:
    """Raise ConfigError for settings that need a GPU if there is none, or more open files than allowed.

    ConfigError also without a sandbox or a logger's library. Raises the soft limit on open files.
    """
    require_libraries(config.log.to)
    raise_file_limit(open_files(config))
    require_sandbox("the model's chat template")
    if config.trainer.attention == "flex" and device == "cpu":
        raise ConfigError(
            "trainer.attention=flex has no backward pass on a CPU, and this run has no GPU.",
            "Use trainer.attention=sdpa.",
        )
    if config.trainer.offload and device == "cpu":
        raise ConfigError(
            "trainer.offload=true moves tensors off a GPU, and this run has no GPU.",
            "Use trainer.offload=false.",
        )


def held_out_prompts(config: TrainConfig) -> list[Prompt]:
    """The first eval.limit problems of eval.split. Raises DataError."""
    return (
        source_for(config).read(config, config.eval.split)[0][: config.eval.limit]
        if config.eval.limit
        else []
    )


def read_train(config: TrainConfig) -> tuple[list[Prompt], PromptFileInfo, dict[str, str]]:
    """The training rows of data.path and data.mix, the footer of data.path, and the folder of each prompt.

    Raises DataError for data sets that do not go together.
    """
    source = source_for(config)
    own, info = source.read(config, "train")
    parts: list[tuple[str, Sequence[Prompt]]] = [("", own)]
    for folder in config.data.mix:
        data = config.data.model_copy(update={"path": folder})
        rows, other = source.read(config.model_copy(update={"data": data}), "train")
        chosen = config.reward.functions or config.env.episode
        if not chosen and (other.reward, other.reward_settings) != (info.reward, info.reward_settings):
            raise DataError(
                f"{folder} (data.mix) was prepared for the reward {other.reward}, and {config.data.path} for "
                f"{info.reward}, or with other settings.",
                "Choose one for all with --reward; a function of yours can ask for `source`, the data set.",
            )
        parts.append((folder, rows))
    train, folders = merged(parts)
    return train, info, folders if config.data.mix else {}


def train_data_hash(config: TrainConfig) -> str:
    """sha256 of the training split: a resumed run needs the same prompts in the same order."""
    hashes = [sha256_file(Path(folder) / "train.parquet") for folder in (config.data.path, *config.data.mix)]
    return hashes[0] if len(hashes) == 1 else hashlib.sha256("".join(hashes).encode()).hexdigest()


def sync_folder(config: TrainConfig, run: RunDir) -> Path:
    return Path(config.lora.lora_sync_path or run.default_adapters).resolve()


def check_folders(config: TrainConfig, run: RunDir) -> None:
    """Raise ConfigError if a live run uses one of the folders, or as `require_unused` does."""
    for folder in (run.root, sync_folder(config, run)):
        refuse_live(folder)
    require_unused(config, run)


def require_unused(config: TrainConfig, run: RunDir) -> None:
    """Raise ConfigError if the folder holds a run or a warm start, or lora_sync_path other adapters."""
    if run.config_path.exists():
        raise ConfigError(
            f"{run.root} holds a run already.",
            f"Use --resume {run.root} to continue it, or choose another --run folder.",
        )
    for copied in (run.warm_start, run.teacher):
        if copied.exists():
            raise ConfigError(
                f"{copied} already exists, from an interrupted start.",
                "Remove it, or choose another --run folder.",
            )
    sync = sync_folder(config, run)
    if published := published_versions(sync):
        raise ConfigError(
            f"{sync} holds adapters of another run, such as {published[-1].name}; skylite never overwrites "
            "them.",
            "Move them away, or choose another lora.lora_sync_path.",
        )


def write_run(plan: RunPlan) -> None:
    """Create the run directory, its copy of a warm start, and its config.json. The caller holds the locks.

    Raises ConfigError before writing anything if another process has taken the folders since the plan.
    """
    require_unused(plan.config, plan.run)
    config, run = plan.config, plan.run
    adapters = {run.warm_start: config.lora.from_adapter, run.teacher: config.algorithm.teacher_folder}
    for copied, source in adapters.items():
        if source is not None:
            copy_adapter(expand_adapter_path(source), copied)
    for folder in (
        plan.run.rollouts,
        plan.run.trainer_steps,
        plan.run.checkpoints,
        plan.run.logs,
        plan.resolved.identity.lora_sync_path,
    ):
        with convert_os_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
    write_config(plan)


def write_config(plan: RunPlan) -> None:
    """Write config.json, which the child processes read, and mark a lora_sync_path that the user chose.

    Records the machine too (machine.json).
    """
    write_json(plan.run.machine_path, machine_facts())
    write_json(plan.run.config_path, plan.run_config.model_dump(mode="json"))
    mark_sync_folder(plan.run_config)


ENOUGH_HELD_OUT = 50
"""With fewer problems, an accuracy has a 95 % interval of more than 13 points on either side."""


def data_note(config: TrainConfig, info: PromptFileInfo, count: int) -> str:
    """The training data in one sentence, for config.json."""
    difficulty = f", difficulty {config.data.difficulty}" if config.data.difficulty else ""
    mix = "".join(f", mixed with {path} (weight {weight:g})" for path, weight in config.data.mix.items())
    source = f"{info.dataset} ({info.source_kind}: {info.source}){difficulty}{mix}"
    return f"data: {source}, {count} training problems, {rewards_text(config, info)}"


def rewards_text(config: TrainConfig, info: PromptFileInfo) -> str:
    """What scores the completions: the environment, the chosen functions, or the reward of the data."""
    specs = config.source.scorers or [info.reward]
    weights = [f" (weight {weight:g})" for weight in config.source.weights] or [""] * len(specs)
    names = [f"{spec}{weight}" for spec, weight in zip(specs, weights, strict=True)]
    return f"{config.source.scored_by}{'s' if len(names) > 1 else ''} {', '.join(names)}"


def held_out_note(held_out: Sequence[Prompt]) -> Note | None:
    """A warning if the held-out problems are too few to show what training changes."""
    count = len(held_out)
    if not 0 < count < ENOUGH_HELD_OUT or not any(prompt.answer for prompt in held_out):
        return None
    interval = wilson(count // 2, count)
    points = 50 * (interval.high - interval.low)
    return warning(
        f"{count} held-out problem(s) are too few to see what training changes: an accuracy near "
        f"50 % is known to +-{points:.0f} points only (95 % interval); raise eval.limit, or prepare more rows"
    )


def settings_notes(config: TrainConfig) -> list[Note]:
    """Notes on unusual settings, and on the scale of LoRA."""
    notes: list[Note | str] = []
    lora = config.lora
    divisor, text = (math.sqrt(lora.rank), "sqrt(rank)") if lora.use_rslora else (lora.rank, "rank")
    notes.append(
        f"LoRA rank {lora.rank}, alpha {lora.alpha:g}: the update is scaled by {lora.alpha / divisor:.3g} "
        f"(alpha / {text}); to keep it with another rank, change --alpha too"
    )
    if config.optim.lr < LOWEST_USUAL_LR:
        notes.append(
            warning(
                f"optim.lr={config.optim.lr:g} is under {LOWEST_USUAL_LR:g}; LoRA hardly learns at such rates"
            )
        )
    if config.optim.lr > HIGHEST_USUAL_LR:
        notes.append(
            warning(
                f"optim.lr={config.optim.lr:g} is over {HIGHEST_USUAL_LR:g}; policies collapse at such rates"
            )
        )
    if config.log.to:
        samples = f" and {config.log.samples} completions per step" if config.log.samples else ""
        notes.append(f"settings, metrics{samples} are logged to {', '.join(config.log.to)} (log.to)")
    return notes_of(*notes)
