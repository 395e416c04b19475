"""Checkpoints: each learner's parameters in fp32, AdamW's moments, every rank's random state, and where the run is; safetensors and JSON.

The adapter is whole on every rank (training/policy.py), so rank 0 writes it all and any number of ranks can go on from it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

import skylite
from skylite.config import TrainConfig
from skylite.errors import ModelError
from skylite.run.checkpoint_folder import seal_checkpoint, verify_checkpoint
from skylite.run.files import atomic_folder
from skylite.run.run_dir import RunDir
from skylite.training.dist import Dist
from skylite.training.learner import Learner
from skylite.training.tensor_file import save_tensors

MOMENTS = ("exp_avg", "exp_avg_sq")
LIBRARIES = ("torch", "transformers", "peft", "safetensors")
RANDOM_STATE = "random-state.safetensors"


def save_checkpoint(run: RunDir, step: int, config: TrainConfig, learners: Sequence[Learner], random_state: Mapping[str, Tensor]) -> None:
    """Write `checkpoints/step-000010/` unless it is there. Rank 0 only: it holds everything. The parent removes old ones."""
    path = run.checkpoint_path(step)
    if path.exists():
        return
    with atomic_folder(path, checkpoint_bytes(learners)) as folder:
        for learner in learners:
            save_tensors(folder / f"{learner.name}.safetensors", {n: p.detach() for n, p in learner.params.items()})
            save_tensors(folder / f"{learner.name}-optimizer.safetensors", _moments(learner))
        save_tensors(folder / RANDOM_STATE, random_state)
        state = {
            "step": step,
            "adapter_version": step,
            # Prompts and learning rate are functions of (seed, step): the step is their cursor.
            "next_step": step + 1,
            "optimizer_updates": {x.name: _num_updates(x) for x in learners},
            "num_ranks": len(random_state),
            "versions": {"skylite": skylite.__version__, **{name: version(name) for name in LIBRARIES}},
            "config": config.model_dump(mode="json"),
        }
        (folder / "state.json").write_text(json.dumps(state, indent=1), encoding="utf-8")
        seal_checkpoint(folder, step)


def checkpoint_bytes(learners: Sequence[Learner]) -> int:
    """What a checkpoint takes: parameters and both moments of each learner."""
    return sum((1 + len(MOMENTS)) * p.numel() * p.element_size() for learner in learners for p in learner.params.values())


def random_states(dist: Dist) -> dict[str, Tensor]:
    """Each rank's generator by `rank-0`, uint8 on the CPU. Every rank calls it.

    Every step seeds it anew from (seed, step, rank), so that nothing hangs on it today; it is kept so that this may change.
    """
    own = torch.cuda.get_rng_state(dist.device) if dist.device.type == "cuda" else torch.get_rng_state()
    states = dist.gather(own.to(dist.device)).view(dist.dp_size, -1).cpu()
    return {f"rank-{rank}": state.clone() for rank, state in enumerate(states)}


def load_checkpoint(folder: Path, learners: Sequence[Learner], dist: Dist) -> int:
    """Put a checkpoint into the learners; returns its step. Raises ModelError when it is damaged or does not fit."""
    verify_checkpoint(folder)
    try:
        files = [(load_file(folder / f"{x.name}.safetensors"), load_file(folder / f"{x.name}-optimizer.safetensors")) for x in learners]
        random_state = load_file(folder / RANDOM_STATE)
        state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        step, updates = int(state["step"]), {x.name: int(state["optimizer_updates"][x.name]) for x in learners}
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise ModelError(f"The checkpoint {folder} cannot be read: {error}.", "Go on from an older one: --resume RUN --at STEP.") from None
    for learner, (weights, _) in zip(learners, files, strict=True):
        if {n: t.shape for n, t in weights.items()} != {n: p.shape for n, p in learner.params.items()}:
            raise ModelError(
                f"The checkpoint {folder} holds matrices of other shapes for the {learner.name}.", "Use the run's own config.json."
            )
    for learner, (weights, moments) in zip(learners, files, strict=True):
        for name, param in learner.params.items():
            param.data.copy_(weights[name])
        _restore_optimizer(learner, moments, updates[learner.name])
    own = random_state.get(f"rank-{dist.dp_rank}")
    if own is not None and len(random_state) == dist.dp_size:
        torch.cuda.set_rng_state(own, dist.device) if dist.device.type == "cuda" else torch.set_rng_state(own)
    return step


def _moments(learner: Learner) -> dict[str, Tensor]:
    """AdamW's moments by `moment/parameter`; empty before the first update."""
    state = learner.optimizer.state
    return {f"{moment}/{n}": state[p][moment].cpu() for n, p in learner.params.items() if p in state for moment in MOMENTS}


def _num_updates(learner: Learner) -> int:
    states = [learner.optimizer.state[p] for p in learner.params.values() if p in learner.optimizer.state]
    return int(states[0]["step"]) if states else 0


def _restore_optimizer(learner: Learner, moments: dict[str, Tensor], num_updates: int) -> None:
    if num_updates == 0:
        return
    names = {id(p): n for n, p in learner.params.items()}
    in_order = [names[id(p)] for group in learner.optimizer.param_groups for p in group["params"]]
    state: dict[int, dict[str, Any]] = {
        i: {"step": torch.tensor(float(num_updates)), **{m: moments[f"{m}/{n}"] for m in MOMENTS}} for i, n in enumerate(in_order)
    }
    learner.optimizer.load_state_dict({**learner.optimizer.state_dict(), "state": state})
