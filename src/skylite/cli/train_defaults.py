"""The defaults of `skylite train` on this machine: recipe and data."""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Iterator
from pathlib import Path

from skylite.config.bundled import bundled_names, find_file
from skylite.config.loading import read_recipe
from skylite.config.train import TrainConfig
from skylite.errors import ConfigError
from skylite.processes.private_folders import temporary_folder

logger = logging.getLogger(__name__)
GPU_RECIPE = "gsm8k"
CPU_RECIPE = "gsm8k_cpu"
OWN_DATA = "own_data"
"""Recipe for data of the user's own on a GPU; without one it ends in _cpu."""


def find_recipe(name: str) -> Path:
    """The TOML file for a bare name, which is a bundled recipe, or for a path.

    Raises ConfigError that lists the bundled names.
    """
    known = f"The bundled recipes are {bundled_names('recipes')}."
    return find_file(name, "recipes", ("recipe", "recipe file"), known, ConfigError)


def default_recipe(data: Path | None) -> Path:
    """The recipe for this machine and, if it is not the recipe's own, the data. Logs the choice."""
    from skylite.processes.hardware import choose_device

    gpu = choose_device() == "cuda"
    if data is not None and not _is_data_of(GPU_RECIPE if gpu else CPU_RECIPE, data):
        name = OWN_DATA if gpu else f"{OWN_DATA}_cpu"
        logger.info(f"recipe {name}: lengths and steps follow the data, {data}; --recipe FILE chooses them")
        return find_recipe(name)
    if gpu:
        logger.info(f"recipe {GPU_RECIPE}: this run uses the GPU")
        return find_recipe(GPU_RECIPE)
    logger.info(
        f"recipe {CPU_RECIPE}: this run uses no GPU, so a 135M model trains on easy synthetic problems "
        "(GSM8K is too hard for it)"
    )
    return find_recipe(CPU_RECIPE)


def _is_data_of(recipe: str, data: Path) -> bool:
    """Whether the folder is the data set that the recipe was made for."""
    own = read_recipe(find_recipe(recipe))["data"]["path"]
    return bool(data.resolve() == Path(own).resolve() or data.resolve().name == Path(own).name)


def is_own_data_recipe(recipe: Path) -> bool:
    """Whether lengths and steps follow the data."""
    return recipe in (find_recipe(OWN_DATA), find_recipe(f"{OWN_DATA}_cpu"))


@contextlib.contextmanager
def default_data(config: TrainConfig, *, keep: bool) -> Iterator[TrainConfig]:
    """The settings with data to read: GSM8K with a GPU, else synthetic problems, prepared if missing.

    Without `keep` missing data is prepared in a temporary folder, which lasts as long as the block.
    """
    path = Path(config.data.path)
    if (path / "train.parquet").is_file():
        yield config
    elif keep:
        logger.info(f"preparing {path}, which does not exist yet")
        _prepare_default(path)
        yield config
    else:
        logger.info(f"{path} does not exist yet: the run prepares it, --dry-run checks a temporary copy")
        with temporary_folder("dry-run-") as folder:
            copy = folder / path.name
            with contextlib.redirect_stdout(io.StringIO()):  # stdout is for the settings
                _prepare_default(copy)
            yield config.model_copy(update={"data": config.data.model_copy(update={"path": str(copy)})})


def _prepare_default(path: Path) -> None:
    from skylite.cli.prepare import prepare_data
    from skylite.processes.hardware import choose_device

    gpu = choose_device() == "cuda"
    prepare_data("gsm8k", out=path, synthetic=not gpu, first_source=gpu)
