"""What skylite decided on the run's machine: one class per kind of decision."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Literal

from skylite.config.base_section import Section
from skylite.config.engine import CpuLora
from skylite.notes import Note


class ModelFiles(Section):
    """The model, and how its prompts are rendered."""

    path: Path
    """Local folder with config, tokenizer and safetensors."""
    revision: str | None = None
    """Commit of a model from the hub. A resume that finds `path` gone downloads this commit."""
    fingerprint: str
    """sha256 of the model: its config, tokenizer, chat templates and generation_config, and of each weight
    file name, size, header and data samples."""
    chat_template: str | None = None
    """Text of data.chat_template when the run started; the run and its evaluations use it."""
    template_time: datetime | None = None
    """The time that a chat template with strftime_now writes wherever it renders this run's prompts: the
    run's start. None: the template does not write the time."""
    max_images: int = 0
    """Most images of a prompt of the run. 0: engines serve text alone."""


class TeacherModel(ModelFiles):
    """The whole model that teaches from an engine of its own."""

    dtype: Literal["bfloat16", "float32"]
    max_tokens: int
    """Tokens of the longest sequence that it reads, and the one that its engine samples."""


class Placement(Section):
    """Where trainer and engines compute, and in what type."""

    device: Literal["cpu", "cuda"]
    dtype: Literal["bfloat16", "float32"]
    cpu_lora: CpuLora = "dense"
    """How a CPU engine computes LoRA; not used on a GPU."""
    rank_gpus: list[int] = []
    """GPU of each rank, by nvidia-smi's numbers; empty on a CPU."""
    engine_gpus: list[int] = []
    """GPUs of the engines, engine.tensor_parallel for each in turn, by nvidia-smi's numbers; empty on a
    CPU."""
    free_settings: list[str] = []
    """Settings that `placement` chooses, because nobody set them; empty if it chooses none."""


class MemoryPlan(Section):
    """What engines and trainer may use. None on a CPU, or if the size of a GPU is unknown."""

    kv_cache_bytes: int | None = None
    """KV cache of each engine on each of its GPUs. None: engine.kv_cache_gib on a CPU."""
    engine_share: float | None = None
    """Share of its GPUs that must be free for an engine to start; None: engine.gpu_memory_utilization."""
    teacher_kv_cache_bytes: int | None = None
    """The same of a teacher's engine, which is on the GPUs of the first engine."""
    teacher_share: float | None = None
    trainer_bytes: int | None = None
    """What torch may allocate on each rank's GPU; None: no limit."""


class Trust(Section):
    """What the user allowed to run."""

    programs: dict[str, str] = {}
    """FILE.py:function -> sha256 of the file. Rewritten by every start of the run."""


class RunIdentity(Section):
    """Which run this is: its folders, and what a resume must find again."""

    run_id: str | None = None
    """Random id that marks a lora_sync_path outside the run as its own (run/own_folders.py).

    None: no mark.
    """
    lora_sync_path: Path
    """Absolute path of the folder that adapters are published in."""
    warm_start: Path | None = None
    """The run's own copy of lora.from_adapter."""
    teacher: Path | None = None
    """The run's own copy of the adapter that algorithm.teacher names."""
    data_sha256: str | None = None
    """sha256 of train.parquet, compared on resume; None: not compared."""
    dropped_prompts: list[str] = []
    """Ids of the prompts that data.filter_overlong_prompts left out."""


class Resolved(Section):
    """All decisions; config.json records them, so that no choice is silent."""

    model: ModelFiles
    teacher: TeacherModel | None = None
    """The model of algorithm.teacher, if it is a whole one."""
    placement: Placement
    memory: MemoryPlan = MemoryPlan()
    trust: Trust = Trust()
    identity: RunIdentity
    choices: list[str] = []
    """Which shortcuts the trainer uses for this model, and why (model/fast_path_check.py)."""
    notes: list[Note] = []
    """The choices and substitutions that skylite printed at the start."""
