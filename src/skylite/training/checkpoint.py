"""Checkpoints: each learner's parameters in fp32 and AdamW's moments, and the step, as one atomic folder of safetensors and JSON."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from skylite.errors import ModelError
from skylite.run.files import atomic_folder, temporary_sibling
from skylite.run.run_dir import RunDir
from skylite.training.learner import Learner

FORMAT = 2
MOMENTS = ("exp_avg", "exp_avg_sq")


def save_checkpoint(run: RunDir, step: int, seed: int, learners: Sequence[Learner], keep_last: int) -> None:
    """Write `checkpoints/step-000010/` unless it is there, then drop the oldest beyond `keep_last`. Rank 0 only: it holds everything."""
    path = run.checkpoint_path(step)
    if not path.exists():
        with atomic_folder(path) as folder:
            for learner in learners:
                save_file({n: p.detach().cpu().contiguous() for n, p in learner.params.items()}, folder / f"{learner.name}.safetensors")
                save_file(_moments(learner), folder / f"{learner.name}-optimizer.safetensors")
            # The random state is no tensor: dropout is seeded from (seed, step, rank) at every step.
            state = {"format": FORMAT, "step": step, "seed": seed, "optimizer_updates": _num_updates(learners[0])}
            (folder / "state.json").write_text(json.dumps(state, indent=1), encoding="utf-8")
    for old in checkpoint_folders(run)[:-keep_last]:
        doomed = temporary_sibling(old)
        old.rename(doomed)  # first out of sight, so that a kill halfway leaves no torn checkpoint under a good name
        shutil.rmtree(doomed)


def checkpoint_folders(run: RunDir) -> list[Path]:
    """Complete checkpoints, oldest first."""
    return sorted(run.checkpoints.glob("step-*"), key=lambda p: int(p.name.removeprefix("step-")))


def load_checkpoint(folder: Path, learners: Sequence[Learner]) -> int:
    """Put a checkpoint into the learners; returns its step. Raises ModelError when it does not fit or is damaged."""
    try:
        files = [(load_file(folder / f"{x.name}.safetensors"), load_file(folder / f"{x.name}-optimizer.safetensors")) for x in learners]
        state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, SafetensorError) as error:
        raise ModelError(f"The checkpoint {folder} cannot be read: {error}.", "Delete it; the one before it is used then.") from None
    for learner, (weights, _) in zip(learners, files, strict=True):
        if {n: t.shape for n, t in weights.items()} != {n: p.shape for n, p in learner.params.items()}:
            raise ModelError(
                f"The checkpoint {folder} holds matrices of other shapes for the {learner.name}.", "Use the run's own config.json."
            )
    for learner, (weights, moments) in zip(learners, files, strict=True):
        for name, param in learner.params.items():
            param.data.copy_(weights[name])
        _restore_optimizer(learner, moments, int(state["optimizer_updates"]))
    return int(state["step"])


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
