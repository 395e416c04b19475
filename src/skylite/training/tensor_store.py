"""The tensors of a checkpoint: torch.distributed.checkpoint with its safetensors storage, whose index is JSON and not a pickle."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save


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
    return {name: tuple(about.size) for name, about in stored.items() if isinstance(about, TensorStorageMetadata)}


@contextmanager
def _alone() -> Iterator[None]:
    """Without the warning that one process works alone, which is meant, and with the cause of a failure instead of its wrapping."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*in a single process")
        try:
            yield
        except CheckpointException as error:  # a BaseException, which would pass every handler that says a reason
            raise next(cause for cause, _ in error.failures.values()) from None
