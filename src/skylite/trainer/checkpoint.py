"""Checkpoints: float32 parameters, AdamW's moments, the random state of every rank, and the step.

The tensors are safetensors, hashed while they are written; the rest is JSON. The adapter is replicated on
every rank (model/policy.py), so rank 0 writes everything, and any number of ranks can resume.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

import skylite
from skylite.config.train import TrainConfig
from skylite.errors import ModelError
from skylite.model.process_group import Dist
from skylite.run.checkpoint_folder import verify_checkpoint, write_checkpoint_manifest
from skylite.run.files import atomic_folder
from skylite.run.run_dir import RunDir
from skylite.trainer.optimizer import FlatAdamW
from skylite.trainer.write_safetensors import safetensors_buffers, write_buffers
from skylite.untrusted_files import read_text
from skylite.untrusted_text import parse_json

MOMENTS = ("exp_avg", "exp_avg_sq")
LIBRARIES = ("torch", "transformers", "peft", "safetensors")


def save_checkpoint(
    run: RunDir,
    step: int,
    config: TrainConfig,
    optimizers: Sequence[FlatAdamW],
    random_state: Mapping[str, Tensor],
) -> None:
    """Write `checkpoints/step-000010/` unless it exists. Rank 0 only. The parent deletes old checkpoints."""
    path = run.checkpoint_path(step)
    if path.exists():
        return
    with atomic_folder(path, checkpoint_bytes(optimizers)) as folder:
        files = {k.replace("/", "-"): part for x in optimizers for k, part in _parts(x, _moments(x)).items()}
        hashes = save_tensors(folder, files | {"random": _prefixed("random", random_state)})
        state = {
            "step": step,
            "adapter_version": step,
            # Prompts and learning rate are functions of (seed, step), so the step is all they need.
            "next_step": step + 1,
            "optimizer_updates": {x.name: _num_updates(x) for x in optimizers},
            "num_ranks": len(random_state),
            "versions": {"skylite": skylite.__version__, **{name: version(name) for name in LIBRARIES}},
            "config": config.model_dump(mode="json"),
        }
        (folder / "state.json").write_text(json.dumps(state, indent=1), encoding="utf-8")
        write_checkpoint_manifest(folder, step, hashes)


def checkpoint_bytes(optimizers: Sequence[FlatAdamW]) -> int:
    """Bytes of a checkpoint: the parameters and both moments of each optimizer."""
    return sum(
        (1 + len(MOMENTS)) * p.numel() * p.element_size()
        for optimizer in optimizers
        for p in optimizer.params.values()
    )


def random_states(dist: Dist) -> dict[str, Tensor]:
    """The state of each rank's random generator, uint8 on the CPU: `rank-0`, `rank-1`, ... All ranks call it.

    No result depends on it today, because every step seeds the generator from (seed, step, rank). It is saved
    so that later code may rely on it.
    """
    states = dist.all_gather(_random_state(dist).to(dist.device)).view(dist.dp_size, -1).cpu()
    return {f"rank-{rank}": state.clone() for rank, state in enumerate(states)}


def load_checkpoint(folder: Path, optimizers: Sequence[FlatAdamW], dist: Dist) -> int:
    """Load a checkpoint into the optimizers. Returns its step.

    Raises ModelError if the checkpoint is damaged or has other shapes.
    """
    verify_checkpoint(folder)
    try:
        state = parse_json(read_text(folder / "state.json"))
        step, num_ranks = int(state["step"]), int(state["num_ranks"])
        updates = {x.name: int(state["optimizer_updates"][x.name]) for x in optimizers}
        moments = {x.name: _empty_moments(x) if updates[x.name] else {} for x in optimizers}
        tensors = {
            name: t
            for x in optimizers
            for part in _parts(x, moments[x.name]).values()
            for name, t in part.items()
        }
        own, stored = (
            _prefixed("random", {f"rank-{dist.dp_rank}": _random_state(dist)}),
            stored_shapes(folder),
        )
        if {n: shape for n, shape in stored.items() if not n.startswith("random/")} != _shapes(tensors):
            names = " and ".join(x.name for x in optimizers)
            raise ModelError(
                f"The checkpoint {folder} holds matrices of other shapes for the {names}.",
                "Use the config.json of the run that wrote it.",
            )
        # The random state only fits the same number of ranks on the same kind of device.
        restores_random = num_ranks == dist.dp_size and _shapes(own).items() <= stored.items()
        load_tensors(folder, tensors | own if restores_random else tensors)
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise ModelError(
            f"The checkpoint {folder} cannot be read: {error}.",
            "Resume from an older checkpoint: --resume RUN --at STEP.",
        ) from None
    for optimizer in optimizers:
        _restore_optimizer(optimizer, moments[optimizer.name], updates[optimizer.name])
    if restores_random:
        _set_random_state(dist, *own.values())
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


def _random_state(dist: Dist) -> Tensor:
    return torch.cuda.get_rng_state(dist.device) if dist.device.type == "cuda" else torch.get_rng_state()


def _set_random_state(dist: Dist, state: Tensor) -> None:
    if dist.device.type == "cuda":
        torch.cuda.set_rng_state(state, dist.device)
    else:
        torch.set_rng_state(state)


def _prefixed(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"{prefix}/{name}": tensor for name, tensor in tensors.items()}


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


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
    found: dict[str, tuple[int, ...]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            found |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    return found
