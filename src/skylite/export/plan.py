"""Decides what `skylite export` writes, and refuses what cannot work before anything is loaded."""

from __future__ import annotations

import logging
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from skylite.adapters.folder import ServedAdapter, available_steps, find_adapter
from skylite.adapters.manifest import Manifest, read_manifest
from skylite.adapters.tensor_file import WEIGHTS
from skylite.config.loading import read_run_config
from skylite.config.train import RunConfig
from skylite.errors import ConfigError, ModelError
from skylite.evaluation.confidence_interval import score_name, score_value
from skylite.export.gguf import find_converter
from skylite.export.original import check_shapes
from skylite.hub.resolve import PROMPT_FILES, ResolvedModel, model_files, resolve_model
from skylite.hub.text_model import model_shapes, quantised_format
from skylite.processes.hardware import DTYPE_BYTES, available_memory
from skylite.run.files import format_bytes
from skylite.run.metrics_file import held_out_scores, scores_are_binary
from skylite.run.own_folders import require_own_place
from skylite.run.run_dir import RunDir
from skylite.untrusted_files import read_text
from skylite.untrusted_text import parse_json

logger = logging.getLogger(__name__)
Dtype = Literal["float32", "bfloat16", "float16"]
MEMORY_FACTOR = 1.2
"""Memory of an export per byte of the float32 model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportFlags:
    """The flags of `skylite export`."""

    run: Path
    step: int | None
    best: bool
    merge: bool
    gguf: bool
    merge_into: str | None
    dtype: str | None
    out: Path | None
    base_name: str | None
    push: str | None
    public: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportPlan:
    """A checked export."""

    run: RunDir
    run_config: RunConfig
    served: ServedAdapter
    manifest: Manifest
    base: ResolvedModel
    base_name: str
    """Hub id of the base, or its local folder."""
    is_base_local: bool
    original: ResolvedModel | None
    """The 16-bit model of a quantised base, whose weights a merge takes. None: those of `base`."""
    original_name: str
    """Hub id, or local folder; "" without one."""
    scores: dict[int, float]
    """Version -> held-out score that the run recorded."""
    is_binary: bool
    """The scores are accuracies."""
    merge: bool
    gguf: bool
    dtype: Dtype
    """Of merged weights."""
    num_parameters: int
    out: Path

    @property
    def name(self) -> str:
        return self.served.adapter.name

    @property
    def has_merged_weights(self) -> bool:
        return self.merge or self.gguf

    @property
    def weights_path(self) -> Path:
        """The model to whose weights a merge adds the adapter."""
        return self.base.path if self.original is None else self.original.path

    @property
    def merged_into(self) -> str:
        """The weights to which a merge adds the adapter, for people; "" without a merge."""
        if not self.has_merged_weights:
            return ""
        form = quantised_format(self.base.path)
        if form is None or self.original is not None:
            return self.original_name or self.base_name
        return f"the widened weights of {self.base_name} ({form.name})"

    @property
    def num_bytes(self) -> int:
        """Disk space while it is written."""
        adapter = self.manifest.weights_bytes + sum(f.stat().st_size for f in prompt_files(self.base.path))
        copies = 2 if self.gguf else int(self.merge)
        return adapter + copies * self.num_parameters * DTYPE_BYTES[self.dtype]


def plan_export(flags: ExportFlags) -> ExportPlan:
    """Check the flags, the adapter, the base model, memory and the place. Raises SkyliteError subclasses."""
    if flags.dtype is not None and not (flags.merge or flags.gguf):
        raise ConfigError(
            f"--dtype {flags.dtype} is for merged weights, and an adapter keeps its own.",
            "Add --merge, or remove --dtype.",
        )
    if flags.merge_into is not None and not (flags.merge or flags.gguf):
        raise ConfigError(
            f"--merge-into {flags.merge_into} is for merged weights.",
            "Add --merge or --gguf, or remove --merge-into.",
        )
    if (flags.run / "adapter_config.json").is_file():
        raise ConfigError(
            f"{flags.run} is an adapter folder; export needs the run, for its canary and its settings.",
            "Give the run folder, with --step for another version than the newest.",
        )
    if flags.gguf:
        find_converter()
    served = find_adapter(flags.run, chosen_step(flags))
    if served.is_on_tower and flags.gguf:
        raise ConfigError(
            f"{served.adapter.path} has LoRA on the tower that reads images, and the GGUF file of a model "
            "holds its text model alone.",
            "Use --merge instead of --gguf.",
        )
    assert served.run is not None, "find_adapter read a run"
    assert served.run_config is not None, "find_adapter read a run"
    out = flags.out or default_out(served, served.run, flags)
    manifest = read_manifest(served.adapter.path, verify_hash=False)  # find_adapter has verified it
    base = recorded_base(served.run_config, manifest)
    original = None if flags.merge_into is None else resolve_model(flags.merge_into)
    if original is not None:
        check_shapes(base.path, original.path)
    base_name, is_local = name_of_base(flags.base_name, served.run_config, base, flags.push)
    plan = ExportPlan(
        run=served.run,
        run_config=served.run_config,
        served=served,
        manifest=manifest,
        base=base,
        base_name=base_name,
        is_base_local=is_local,
        original=original,
        original_name=flags.merge_into or "",
        scores=held_out_scores(served.run, served.run_config.config.eval),
        is_binary=scores_are_binary(served.run),
        merge=flags.merge,
        gguf=flags.gguf,
        dtype=checked_dtype(flags.dtype) or dtype_of((original or base).path),
        num_parameters=sum(math.prod(shape) for shape in model_shapes(base.path).values()),
        out=out.absolute(),
    )
    if plan.out.exists():
        raise ConfigError(
            f"{plan.out} already exists, and an export never overwrites.",
            "Move it away, or choose another --out.",
        )
    check_memory(plan)
    return plan


def chosen_step(flags: ExportFlags) -> int | None:
    """The step of --step or --best; None: the newest. Raises ConfigError."""
    if not flags.best:
        return flags.step
    if flags.step is not None:
        raise ConfigError("--best chooses the step, but --step was given too.", "Remove one of them.")
    kept = set(available_steps(flags.run))
    run = RunDir(flags.run.resolve())
    scores = held_out_scores(run, read_run_config(run.config_path).config.eval)
    known = {step: score for step, score in scores.items() if step in kept}
    if not known:
        raise ConfigError(
            f"--best needs held-out scores, and {flags.run} has none of an adapter that it kept.",
            "Choose with --step; eval.every and checkpoint.keep_best record and keep them in the next run.",
        )
    best = max(known, key=lambda step: (known[step], -step))
    if best == 0:
        is_binary = scores_are_binary(run)
        shown = [f"{score_value(known[step], is_binary=is_binary)} (step {step})" for step in sorted(known)]
        raise ConfigError(
            f"--best would export version 0, the start of the run, which is not trained. Held-out "
            f"{score_name(is_binary=is_binary)}: {', '.join(shown)}.",
            "Choose a trained version with --step, or --step 0 for the start.",
        )
    return best


def recorded_base(run_config: RunConfig, manifest: Manifest) -> ResolvedModel:
    """The model that the adapter was trained on. Raises ModelError if its files are not those of the run."""
    model = run_config.resolved.model
    is_here = model.path.is_dir()
    name = str(model.path) if is_here else run_config.config.model.name
    base = resolve_model(name, None if is_here else model.revision)
    if base.fingerprint != manifest.base_fingerprint:
        raise ModelError(
            f"{base.path} has the fingerprint {base.fingerprint[:12]}, and the adapter was trained on "
            f"{manifest.base_fingerprint[:12]}: files of the model changed since the run.",
            "Restore the files of the model.",
        )
    return base


def name_of_base(
    given: str | None, run_config: RunConfig, base: ResolvedModel, push: str | None
) -> tuple[str, bool]:
    """How the export names its base, and whether that is a local folder. Raises ConfigError."""
    name = run_config.config.model.name
    is_hub_id = run_config.resolved.model.revision is not None
    if given is not None:
        return given, os.path.isdir(given)
    if is_hub_id:
        return name, False
    if push is not None:
        raise ConfigError(
            f"The base model of this run is the local folder {base.path}, which nobody else can load.",
            "Name it as on the hub: --base-name OWNER/NAME.",
        )
    return str(base.path), True


def checked_dtype(given: str | None) -> Dtype | None:
    for name in get_args(Dtype):
        if given == name:
            found: Dtype = name
            return found
    if given is None:
        return None
    raise ConfigError(f"--dtype {given} is unknown.", f"Choose one of {', '.join(get_args(Dtype))}.")


def dtype_of(base: Path) -> Dtype:
    """The dtype that the base model names in its config.json; float32 without one."""
    config = parse_json(read_text(base / "config.json"))
    named = config.get("dtype") or config.get("torch_dtype")
    return (checked_dtype(named) if named in get_args(Dtype) else None) or "float32"


def default_out(served: ServedAdapter, run: RunDir, flags: ExportFlags) -> Path:
    """In RUN/exports, such as `policy-v000020-merged-float32`. Raises ConfigError if a link leads out."""
    require_own_place(run.root, run.exports)
    kinds = [kind for kind, wanted in (("merged", flags.merge), ("gguf", flags.gguf)) if wanted] or ["peft"]
    return run.exports / "-".join([served.adapter.name, *kinds, *([flags.dtype] if flags.dtype else [])])


def check_memory(plan: ExportPlan) -> None:
    """Raise ModelError if the float32 model does not fit into memory."""
    needed = int(plan.num_parameters * 4 * MEMORY_FACTOR)
    if needed > (free := available_memory()):
        raise ModelError(
            f"The export loads the model in float32, which needs about {format_bytes(needed)} of memory, "
            f"and {format_bytes(free)} are free.",
            "Stop other programs, or export on a larger machine.",
        )


def prompt_files(base: Path) -> list[Path]:
    """Tokenizer, chat templates and generation settings of the base."""
    return model_files(base, PROMPT_FILES)


def adapter_weights(plan: ExportPlan) -> Path:
    return plan.served.adapter.path / WEIGHTS
