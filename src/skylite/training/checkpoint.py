"""Checkpoints: the LoRA matrices in fp32, AdamW's moments and the step, as one atomic folder of safetensors and JSON."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from skylite.errors import ModelError
from skylite.run.files import atomic_folder, temporary_sibling
from skylite.run.run_dir import RunDir
from skylite.training.policy import Policy

FORMAT = 1
MOMENTS = ("exp_avg", "exp_avg_sq")


def save_checkpoint(run: RunDir, step: int, seed: int, policy: Policy, optimizer: torch.optim.AdamW, keep_last: int) -> None:
    """Write `checkpoints/step-000010/` unless it is there, then drop the oldest beyond `keep_last`. Rank 0 only: it holds everything."""
    path = run.checkpoint_path(step)
    if not path.exists():
        with atomic_folder(path) as folder:
            save_file({n: p.detach().cpu().contiguous() for n, p in policy.lora.items()}, folder / "lora.safetensors")
            save_file(_moments(policy, optimizer), folder / "optimizer.safetensors")
            # The random state is no tensor: dropout is seeded from (seed, step, rank) at every step.
            state = {"format": FORMAT, "step": step, "seed": seed, "optimizer_updates": _num_updates(policy, optimizer)}
            (folder / "state.json").write_text(json.dumps(state, indent=1), encoding="utf-8")
    for old in checkpoint_folders(run)[:-keep_last]:
        doomed = temporary_sibling(old)
        old.rename(doomed)  # first out of sight, so that a kill halfway leaves no torn checkpoint under a good name
        shutil.rmtree(doomed)


def checkpoint_folders(run: RunDir) -> list[Path]:
    """Complete checkpoints, oldest first."""
    return sorted(run.checkpoints.glob("step-*"), key=lambda p: int(p.name.removeprefix("step-")))


def load_checkpoint(folder: Path, policy: Policy, optimizer: torch.optim.AdamW) -> int:
    """Put a checkpoint into the policy and the optimizer; returns its step. Raises ModelError when it does not fit or is damaged."""
    try:
        lora, moments = load_file(folder / "lora.safetensors"), load_file(folder / "optimizer.safetensors")
        state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, SafetensorError) as error:
        raise ModelError(f"The checkpoint {folder} cannot be read: {error}.", "Delete it; the one before it is used then.") from None
    if {n: t.shape for n, t in lora.items()} != {n: p.shape for n, p in policy.lora.items()}:
        raise ModelError(f"The checkpoint {folder} holds LoRA matrices of other shapes.", "Use the run's own config.json.")
    for name, param in policy.lora.items():
        param.data.copy_(lora[name])
    _restore_optimizer(optimizer, list(policy.lora), moments, int(state["optimizer_updates"]))
    return int(state["step"])


def _moments(policy: Policy, optimizer: torch.optim.AdamW) -> dict[str, Tensor]:
    """AdamW's moments by `moment/parameter`; empty before the first update."""
    used = [(n, optimizer.state[p]) for n, p in policy.lora.items() if p in optimizer.state]
    return {f"{moment}/{n}": state[moment].cpu() for n, state in used for moment in MOMENTS}


def _num_updates(policy: Policy, optimizer: torch.optim.AdamW) -> int:
    states = [optimizer.state[p] for p in policy.lora.values() if p in optimizer.state]
    return int(states[0]["step"]) if states else 0


def _restore_optimizer(optimizer: torch.optim.AdamW, names: list[str], moments: dict[str, Tensor], num_updates: int) -> None:
    if num_updates == 0:
        return
    state: dict[int, dict[str, Any]] = {
        i: {"step": torch.tensor(float(num_updates)), **{m: moments[f"{m}/{n}"] for m in MOMENTS}} for i, n in enumerate(names)
    }
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
