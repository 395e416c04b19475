"""From a model and settings to the service's folder: everything is checked here, before a process starts."""

from __future__ import annotations

import contextlib
import uuid
from dataclasses import dataclass
from pathlib import Path

import skylite
from skylite.adapters.target_modules import last_names, predict_modules
from skylite.config.lora import LoraConfig
from skylite.config.provenance import Provenance
from skylite.config.resolved import ModelFiles, Resolved, RunIdentity, Trust
from skylite.config.train import RunConfig, TrainConfig
from skylite.data.chat_tokenizer import load_tokenizer
from skylite.engine.canary import canary_sequences
from skylite.engine.launchers import load_launcher
from skylite.engine.model_sizes import model_sizes
from skylite.engine.start_engines import refuse_urls, require_awake
from skylite.errors import ConfigError, convert_os_errors
from skylite.hub.resolve import ResolvedModel
from skylite.notes import log_notes, notes_of
from skylite.processes.file_tree import remove_tree
from skylite.processes.hardware import choose_device, machine_facts
from skylite.processes.hosts import require_one_host
from skylite.rollout.plan import choose_model, choose_placement, device_defaults
from skylite.rollout.trusted_programs import allow_launcher
from skylite.run.files import write_json
from skylite.run.run_dir import RunDir
from skylite.types import Prompt

TEXTS = tuple(
    f"{person} {verb} {count} {thing} {place}. How many {thing} are left, and why?"
    for count, (person, verb) in enumerate(
        [("Ann", "sold"), ("A farmer", "found"), ("The museum", "lent"), ("My neighbour", "painted")], start=3
    )
    for thing, place in [
        ("red boxes", "before noon"),
        ("old maps", "at the station"),
        ("small boats", "on Monday"),
        ("letters", "without a word"),
        ("wooden chairs", "near the river"),
        ("lamps", "for the party"),
    ]
)
"""The canary: what trainer and engine score to verify each adapter."""
ATTENTION = ("attn", "attention", "mixer")
"""Parts of the names of modules around attention. The other modules with LoRA count as MLP."""
MARK = "service.json"
"""File that tells a service's folder from a run's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """A checked base, and what the front must know of it."""

    run: RunDir
    """The folder. Its files are those of a run: config.json, canary.json, adapters, logs."""
    run_config: RunConfig
    canary: list[list[int]]
    vocabulary: int
    """Tokens that the model knows."""
    modules: list[str]
    """Last names of the modules with LoRA."""
    attention: list[str]
    """Those of them around attention."""
    others: list[str]
    """Those of them elsewhere, such as in MLPs."""

    @property
    def model(self) -> str:
        """The base's name, as clients ask for it: what the user typed."""
        return self.run_config.config.model.name

    @property
    def max_tokens(self) -> int:
        """Of a sequence."""
        return self.run_config.config.max_sequence_tokens

    def lora(self, rank: int, *, attention: bool, mlp: bool) -> LoraConfig:
        """The LoRA configuration of a policy. Raises ConfigError."""
        largest = self.run_config.config.lora
        if not 1 <= rank <= largest.rank:
            raise ConfigError(
                f"The rank {rank} is not between 1 and {largest.rank}, the largest of this service.",
                "Start the service with a larger --rank.",
            )
        chosen = (self.attention if attention else []) + (self.others if mlp else [])
        is_part = not (attention and mlp)
        if not chosen or (is_part and set(self.attention) & set(self.others)):
            raise ConfigError(
                f"train_attn={attention} and train_mlp={mlp} choose no modules of this model that have names "
                "of their own.",
                "Set both to true.",
            )
        names = sorted(chosen) if is_part else largest.target_modules
        return largest.model_copy(update={"rank": rank, "target_modules": names})


def plan_base(config: TrainConfig, folder: Path, provenance: Provenance) -> Base:
    """Check the model, the machine and the settings. Writes nothing. Raises SkyliteError subclasses."""
    run, device = RunDir(folder.resolve()), choose_device()
    if run.config_path.exists() and not (run.root / MARK).exists():
        raise ConfigError(f"{folder} holds something else than a service.", "Choose another folder.")
    refuse_urls(config, "service")
    require_one_host(config, "a service")
    require_awake(config, "service")
    programs = allow_launcher(config, provenance)
    launcher = load_launcher(config, programs)
    config = config.model_copy(update={"placement": "explicit"})  # its policies share trainer and engine
    config, device_notes = device_defaults(config, device)
    model = choose_model(config, launcher)
    config, placement, memory, notes = choose_placement(config, model, launcher, notes_of(*device_notes))
    resolved = Resolved(
        model=ModelFiles(path=model.path, revision=model.revision, fingerprint=model.fingerprint),
        placement=placement,
        memory=memory,
        trust=Trust(programs=programs),
        identity=RunIdentity(run_id=uuid.uuid4().hex, lora_sync_path=run.default_adapters),
        notes=notes,
    )
    log_notes(notes)
    modules = predict_modules(model.path, config.lora)[1]
    around = {name for name in modules if any(part in name for part in ATTENTION)}
    return Base(
        run=run,
        run_config=RunConfig(skylite_version=skylite.__version__, config=config, resolved=resolved),
        canary=_canary(model, placement.dtype),
        vocabulary=model_sizes(model.path, config.lora).vocabulary,
        modules=last_names(modules),
        attention=last_names(around),
        others=last_names(modules - around),
    )


def _canary(model: ResolvedModel, dtype: str) -> list[list[int]]:
    prompts = [
        Prompt(id=str(i), messages=[{"role": "user", "content": text}], answer="", source="canary")
        for i, text in enumerate(TEXTS)
    ]
    with contextlib.closing(load_tokenizer(model.path)) as tokenizer:
        return canary_sequences(tokenizer, prompts, dtype)


def write_base(base: Base) -> None:
    """Write what the trainer reads. The caller holds the folder's lock."""
    run = base.run
    with convert_os_errors(run.root):
        for folder in (run.logs, run.default_adapters):
            folder.mkdir(parents=True, exist_ok=True)
        run.trainer_error_path.unlink(missing_ok=True)
        if problem := remove_tree(run.rendezvous):
            raise problem
        run.rendezvous.mkdir(mode=0o700)
    write_json(run.root / MARK, {"model": base.model})
    write_json(run.machine_path, machine_facts())
    write_json(run.config_path, base.run_config.model_dump(mode="json"))
    longest = base.run_config.config.rollout.max_prompt_tokens
    write_json(run.canary_path, {"sequences": base.canary, "longest_prompt_tokens": longest})
