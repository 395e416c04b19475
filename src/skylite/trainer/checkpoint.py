"""Checkpoints: float32 parameters, AdamW's moments, a teacher's average, and the step, which seeds all that
is random.

The tensors are safetensors, hashed while they are written; the rest is JSON. The adapter is replicated on
every rank (model/policy.py), so rank 0 writes and reads everything, and any number of ranks can resume.
"""

from __future__ import annotations

import json
import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

import skylite
from skylite.config.train import TrainConfig
from skylite.errors import ModelError
from skylite.model.process_group import Dist
from skylite.run.checkpoint_folder import verify_checkpoint, write_checkpoint_manifest
from skylite.run.files import atomic_folder
from skylite.run.run_dir import RunDir
from skylite.trainer.optimizer import FlatAdamW
from skylite.trainer.publish_adapter import safetensors_buffers, write_buffers
from skylite.untrusted_files import read_text
from skylite.untrusted_text import parse_json

MOMENTS = ("exp_avg", "exp_avg_sq")
LIBRARIES = ("torch", "transformers", "peft", "safetensors")
AVERAGE = "teacher/weights"
"""The file of a teacher that is an average of the policy, and the prefix of its tensors."""
NO_AVERAGE: Mapping[str, nn.Parameter] = {}
MOST_COST = 0.02
"""Largest share of the run's time that checkpoints may take, if checkpoint.every is not set."""
RECENT = 5
"""Steps and checkpoints whose durations count."""


def save_checkpoint(
    run: RunDir,
    step: int,
    config: TrainConfig,
    optimizers: Sequence[FlatAdamW],
    learned: Mapping[str, float] = MappingProxyType({}),
    average: Mapping[str, nn.Parameter] = NO_AVERAGE,
) -> None:
    """Write `checkpoints/step-000010/` unless it exists. Rank 0 only. The parent deletes old checkpoints."""
    path = run.checkpoint_path(step)
    if not path.exists():
        write_checkpoint(path, step, config, optimizers, learned, average)


def write_checkpoint(
    path: Path,
    step: int,
    config: TrainConfig,
    optimizers: Sequence[FlatAdamW],
    learned: Mapping[str, float] = MappingProxyType({}),
    average: Mapping[str, nn.Parameter] = NO_AVERAGE,
) -> None:
    """Write a checkpoint as the folder `path`, which does not exist. Rank 0 only. Raises WriteFailed.

    `learned`: see algorithms/learned.py. `average`: of a teacher.
    """
    with atomic_folder(path, checkpoint_bytes(optimizers, average)) as folder:
        files = {k.replace("/", "-"): part for x in optimizers for k, part in _parts(x, _moments(x)).items()}
        files |= {AVERAGE.replace("/", "-"): _prefixed(AVERAGE, average)} if average else {}
        hashes = save_tensors(folder, files)
        state = {
            "step": step,
            "adapter_version": step,
            # Prompts and learning rate are functions of (seed, step), so the step is all they need.
            "next_step": step + 1,
            "learned": dict(learned),
            "optimizer_updates": {x.name: _num_updates(x) for x in optimizers},
            "versions": {"skylite": skylite.__version__, **{name: version(name) for name in LIBRARIES}},
            "config": config.model_dump(mode="json"),
        }
        (folder / "state.json").write_text(json.dumps(state, indent=1), encoding="utf-8")
        write_checkpoint_manifest(folder, step, hashes)


def checkpoint_bytes(
    optimizers: Sequence[FlatAdamW], average: Mapping[str, nn.Parameter] = NO_AVERAGE
) -> int:
    """Bytes of a checkpoint: the parameters and both moments of each optimizer, and an average."""
    parameters = [p for optimizer in optimizers for p in optimizer.params.values()] * (1 + len(MOMENTS))
    return sum(p.numel() * p.element_size() for p in (*parameters, *average.values()))


def load_checkpoint(
    folder: Path,
    optimizers: Sequence[FlatAdamW],
    learned: dict[str, float] | None = None,
    average: Mapping[str, nn.Parameter] = NO_AVERAGE,
) -> int:
    """Load a checkpoint into the optimizers, `learned`, and a teacher's `average`. Returns its step.

    Raises ModelError if the checkpoint is damaged or has other shapes.
    """
    verify_checkpoint(folder)
    try:
        state = parse_json(read_text(folder / "state.json"))
        step = int(state["step"])
        updates = {x.name: int(state["optimizer_updates"][x.name]) for x in optimizers}
        numbers = {str(name): float(value) for name, value in state["learned"].items()}
        moments = {x.name: _empty_moments(x) if updates[x.name] else {} for x in optimizers}
        tensors = {
            name: t
            for x in optimizers
            for part in _parts(x, moments[x.name]).values()
            for name, t in part.items()
        } | _prefixed(AVERAGE, average)
        if stored_shapes(folder) != {name: tuple(tensor.shape) for name, tensor in tensors.items()}:
            names = " and ".join(x.name for x in optimizers)
            raise ModelError(
                f"The checkpoint {folder} holds matrices of other shapes for the {names}.",
                "Use the config.json of the run that wrote it.",
            )
        load_tensors(folder, tensors)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        raise ModelError(
            f"The checkpoint {folder} cannot be read: {error}.",
            "Resume from an older checkpoint: --resume RUN --at STEP.",
        ) from None
    for optimizer in optimizers:
        _restore_optimizer(optimizer, moments[optimizer.name], updates[optimizer.name])
    if learned is not None:
        learned.update(numbers)
    return step


def share_checkpoint(
    dist: Dist,
    step: int,
    optimizers: Sequence[FlatAdamW],
    learned: dict[str, float],
    average: Mapping[str, nn.Parameter] = NO_AVERAGE,
) -> int:
    """Give all ranks what rank 0 has loaded. Returns its step. All ranks call it."""
    updates = [_num_updates(x) for x in optimizers]
    step, numbers, updates = dist.share((step, learned, updates) if dist.is_main else None)
    learned.update(numbers)
    for optimizer, num_updates in zip(optimizers, updates, strict=True):
        if not dist.is_main:
            _restore_optimizer(optimizer, _empty_moments(optimizer), num_updates)
        for tensors in _parts(optimizer, _moments(optimizer)).values():
            for tensor in tensors.values():
                dist.broadcast_(tensor)
    for parameter in average.values():
        dist.broadcast_(parameter.data)
    return step


def _parts(optimizer: FlatAdamW, moments: Mapping[str, Mapping[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
    """An optimizer's tensors, a dict per file: `policy/weights`: `policy/weights/PARAMETER`, and so on."""
    weights = {n: p.detach() for n, p in optimizer.params.items()}
    return {
        (prefix := f"{optimizer.name}/{part}"): _prefixed(prefix, tensors)
        for part, tensors in {"weights": weights, **moments}.items()
    }


def _moments(optimizer: FlatAdamW) -> dict[str, dict[str, Tensor]]:
    """AdamW's moments by kind and parameter; empty before the first update."""
    state = optimizer.adamw.state
    return (
        {m: {n: state[p][m] for n, p in optimizer.params.items()} for m in MOMENTS}
        if _num_updates(optimizer)
        else {}
    )


def _empty_moments(optimizer: FlatAdamW) -> dict[str, dict[str, Tensor]]:
    """Uninitialised CPU tensors to load the moments into. AdamW copies them to the parameters' device."""
    return {m: {n: torch.empty_like(p, device="cpu") for n, p in optimizer.params.items()} for m in MOMENTS}


def _prefixed(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"{prefix}/{name}": tensor for name, tensor in tensors.items()}


def _num_updates(optimizer: FlatAdamW) -> int:
    states = [optimizer.adamw.state[p] for p in optimizer.params.values() if p in optimizer.adamw.state]
    return int(states[0]["step"]) if states else 0


def _restore_optimizer(
    optimizer: FlatAdamW, moments: Mapping[str, Mapping[str, Tensor]], num_updates: int
) -> None:
    if num_updates == 0:
        return
    names = {id(p): n for n, p in optimizer.params.items()}
    in_order = [names[id(p)] for group in optimizer.adamw.param_groups for p in group["params"]]
    state: dict[int, dict[str, Any]] = {
        i: {"step": torch.tensor(float(num_updates)), **{m: moments[m][n] for m in MOMENTS}}
        for i, n in enumerate(in_order)
    }
    optimizer.adamw.load_state_dict({**optimizer.adamw.state_dict(), "state": state})


def save_tensors(folder: Path, files: Mapping[str, Mapping[str, Tensor]]) -> dict[str, str]:
    """Write NAME.safetensors for each dict of tensors of one dtype. Returns the sha256 of each file.

    One process writes everything, because nothing in a checkpoint is sharded. Raises OSError.
    """
    on_cpu = {name: {n: t.detach().cpu() for n, t in tensors.items()} for name, tensors in files.items()}
    return {
        f"{name}.safetensors": write_buffers(folder / f"{name}.safetensors", safetensors_buffers(tensors))
        for name, tensors in on_cpu.items()
    }


def load_tensors(folder: Path, into: Mapping[str, Tensor]) -> None:
    """Copy the tensors named in `into` to its tensors of the same shapes. Raises OSError or ValueError."""
    left = dict(into)
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in left.keys() & set(file.keys()):
                left.pop(name).data.copy_(file.get_tensor(name))
    if left:
        raise ValueError(f"{sorted(left)[0]} is missing")


def stored_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor in a folder that `save_tensors` wrote."""
    shapes: dict[str, tuple[int, ...]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    return shapes


@dataclass(slots=True)
class CheckpointInterval:
    """Measures steps and checkpoints, and says when one is due."""

    every: int | None
    """checkpoint.every. None: chosen by the measured cost."""
    steps_since: int = 0
    """Steps since the last checkpoint."""
    _step_s: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    _cost_s: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))

    def step_ended(self, seconds: float | None) -> None:
        """Note a step that took so long, without its checkpoint. None: do not measure by this step."""
        if seconds is not None:
            self._step_s.append(seconds)
        self.steps_since += 1

    def written(self, seconds: float) -> None:
        """Note a checkpoint that took so long."""
        self._cost_s.append(seconds)
        self.steps_since = 0

    @property
    def is_measured(self) -> bool:
        """Whether a step and a checkpoint have been measured."""
        return bool(self._cost_s and self._step_s)

    @property
    def steps(self) -> int:
        """Steps between checkpoints; 1 before anything was measured."""
        if self.every is not None:
            return self.every
        if not self.is_measured:
            return 1
        step_s = max(statistics.median(self._step_s), 1e-9)
        return max(1, math.ceil(statistics.median(self._cost_s) / (MOST_COST * step_s)))

    def is_due(self, step: int) -> bool:
        """Whether the step that has just ended gets a checkpoint."""
        return step % self.every == 0 if self.every is not None else self.steps_since >= self.steps

    def __str__(self) -> str:
        cost, step = statistics.median(self._cost_s), statistics.median(self._step_s)
        often = "after each step" if self.steps == 1 else f"every {self.steps} steps"
        lost = "" if self.steps == 1 else "; a kill -9 loses the training, not the completions, in between"
        return f"checkpoints {often}: one takes {cost:.2g} s, a step {step:.3g} s{lost} (checkpoint.every)"
