"""Checkpoints: each optimizer's parameters in fp32, AdamW's moments, every rank's random state, and where the run is; safetensors and JSON.

torch.distributed.checkpoint keeps the tensors (trainer/checkpoint.py). The adapter is whole on every rank
(model/policy.py), so rank 0 writes it all and any number of ranks can go on from it.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

import skylite
from skylite.config.train import TrainConfig
from skylite.errors import ModelError
from skylite.model.distributed import Dist
from skylite.run.checkpoint_folder import verify_checkpoint, write_checkpoint_manifest
from skylite.run.files import atomic_folder
from skylite.run.run_dir import RunDir
from skylite.trainer.optimizer import FlatAdamW

MOMENTS = ("exp_avg", "exp_avg_sq")
LIBRARIES = ("torch", "transformers", "peft", "safetensors")


def save_checkpoint(
    run: RunDir,
    step: int,
    config: TrainConfig,
    optimizers: Sequence[FlatAdamW],
    random_state: Mapping[str, Tensor],
) -> None:
    """Write `checkpoints/step-000010/` unless it is there. Rank 0 only: it holds everything. The parent removes old ones."""
    path = run.checkpoint_path(step)
    if path.exists():
        return
    with atomic_folder(path, checkpoint_bytes(optimizers)) as folder:
        parts = [part for x in optimizers for part in _parts(x, _moments(x))]
        save_tensors(folder, [*parts, _under("random", random_state)])
        state = {
            "step": step,
            "adapter_version": step,
            # Prompts and learning rate are functions of (seed, step): the step is their cursor.
            "next_step": step + 1,
            "optimizer_updates": {x.name: _num_updates(x) for x in optimizers},
            "num_ranks": len(random_state),
            "versions": {"skylite": skylite.__version__, **{name: version(name) for name in LIBRARIES}},
            "config": config.model_dump(mode="json"),
        }
        (folder / "state.json").write_text(json.dumps(state, indent=1), encoding="utf-8")
        write_checkpoint_manifest(folder, step)


def checkpoint_bytes(optimizers: Sequence[FlatAdamW]) -> int:
    """What a checkpoint takes: parameters and both moments of each optimizer."""
    return sum(
        (1 + len(MOMENTS)) * p.numel() * p.element_size()
        for optimizer in optimizers
        for p in optimizer.params.values()
    )


def random_states(dist: Dist) -> dict[str, Tensor]:
    """Each rank's generator by `rank-0`, uint8 on the CPU. Every rank calls it.

    Every step seeds it anew from (seed, step, rank), so that nothing hangs on it today; it is kept so that this may change.
    """
    states = dist.all_gather(_random_state(dist).to(dist.device)).view(dist.dp_size, -1).cpu()
    return {f"rank-{rank}": state.clone() for rank, state in enumerate(states)}


def load_checkpoint(folder: Path, optimizers: Sequence[FlatAdamW], dist: Dist) -> int:
    """Put a checkpoint into the optimizers; returns its step. Raises ModelError when it is damaged or does not fit."""
    verify_checkpoint(folder)
    try:
        state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        step, num_ranks = int(state["step"]), int(state["num_ranks"])
        updates = {x.name: int(state["optimizer_updates"][x.name]) for x in optimizers}
        moments = {x.name: _new_moments(x) if updates[x.name] else {} for x in optimizers}
        tensors = {
            name: t for x in optimizers for part in _parts(x, moments[x.name]) for name, t in part.items()
        }
        own, stored = _under("random", {f"rank-{dist.dp_rank}": _random_state(dist)}), stored_shapes(folder)
        if {n: shape for n, shape in stored.items() if not n.startswith("random/")} != _shapes(tensors):
            names = " and ".join(x.name for x in optimizers)
            raise ModelError(
                f"The checkpoint {folder} holds matrices of other shapes for the {names}.",
                "Use the run's own config.json.",
            )
        # A generator goes on among as many ranks as there were, on the same kind of device.
        goes_on = num_ranks == dist.dp_size and _shapes(own).items() <= stored.items()
        load_tensors(folder, tensors | own if goes_on else tensors)
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise ModelError(
            f"The checkpoint {folder} cannot be read: {error}.",
            "Go on from an older one: --resume RUN --at STEP.",
        ) from None
    for optimizer in optimizers:
        _restore_optimizer(optimizer, moments[optimizer.name], updates[optimizer.name])
    if goes_on:
        (generator,) = own.values()
        torch.cuda.set_rng_state(
            generator, dist.device
        ) if dist.device.type == "cuda" else torch.set_rng_state(generator)
    return step


def _parts(optimizer: FlatAdamW, moments: Mapping[str, Mapping[str, Tensor]]) -> list[dict[str, Tensor]]:
    """What a checkpoint holds of a optimizer, a file each: `policy/weights/PARAMETER`, then `policy/exp_avg/PARAMETER` ..."""
    weights = {n: p.detach() for n, p in optimizer.params.items()}
    return [
        _under(f"{optimizer.name}/{part}", tensors)
        for part, tensors in {"weights": weights, **moments}.items()
    ]


def _moments(optimizer: FlatAdamW) -> dict[str, dict[str, Tensor]]:
    """AdamW's moments by kind and parameter; none before the first update."""
    state = optimizer.adamw.state
    return (
        {m: {n: state[p][m] for n, p in optimizer.params.items()} for m in MOMENTS}
        if _num_updates(optimizer)
        else {}
    )


def _new_moments(optimizer: FlatAdamW) -> dict[str, dict[str, Tensor]]:
    """Room for them, on the CPU: the optimizer's own are made when they are given to it."""
    return {m: {n: torch.empty_like(p, device="cpu") for n, p in optimizer.params.items()} for m in MOMENTS}


def _random_state(dist: Dist) -> Tensor:
    return torch.cuda.get_rng_state(dist.device) if dist.device.type == "cuda" else torch.get_rng_state()


def _under(folder: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"{folder}/{name}": tensor for name, tensor in tensors.items()}


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


def save_tensors(folder: Path, files: Sequence[Mapping[str, Tensor]]) -> None:
    """Write `model-0000i-of-0000N.safetensors` for each group of tensors, and `model.safetensors.index.json`.

    One process writes all of it: nothing in a checkpoint is sharded. A file is made in memory before it is written. Raises OSError.
    """
    numbers = {name: number for number, tensors in enumerate(files, start=1) for name in tensors}
    with _alone():
        save(
            {name: tensor for tensors in files for name, tensor in tensors.items()},
            storage_writer=HuggingFaceStorageWriter(str(folder), numbers),
            no_dist=True,
        )


def load_tensors(folder: Path, into: Mapping[str, Tensor]) -> None:
    """Copy the tensors of these names into the given ones, which have their shapes. Raises OSError or ValueError."""
    with _alone():
        load(dict(into), storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)


def stored_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor that was saved there."""
    stored = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    return {
        name: tuple(about.size) for name, about in stored.items() if isinstance(about, TensorStorageMetadata)
    }


@contextmanager
def _alone() -> Iterator[None]:
    """Without the warning that one process works alone, which is meant, and with the cause of a failure instead of its wrapping."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*in a single process")
        try:
            yield
        except (
            CheckpointException
        ) as error:  # a BaseException, which would pass every handler that says a reason
            raise next(cause for cause, _ in error.failures.values()) from None
