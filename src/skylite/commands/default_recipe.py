"""The defaults of `skylite train` on this machine: recipe and data."""

from __future__ import annotations

import logging
from pathlib import Path

from skylite.config.bundled import bundled_names, find_file
from skylite.errors import ConfigError

logger = logging.getLogger(__name__)
GPU_RECIPE = "gsm8k"
CPU_RECIPE = "gsm8k_cpu"


def find_recipe(name: str) -> Path:
    """The TOML file for a bare name, which is a bundled recipe, or for a path.

    Raises ConfigError that lists the bundled names.
    """
    known = f"The bundled recipes are {bundled_names('recipes')}."
    return find_file(name, "recipes", ("recipe", "recipe file"), known, ConfigError)


def default_recipe() -> Path:
    """The recipe for this machine. Logs the choice."""
    from skylite.processes.hardware import choose_device

    if choose_device() == "cuda":
        logger.info(f"recipe {GPU_RECIPE}: this run uses the GPU")
        return find_recipe(GPU_RECIPE)
    logger.info(
        f"recipe {CPU_RECIPE}: this run uses no GPU, so a 135M model trains on easy synthetic problems "
        "(GSM8K is too hard for it)"
    )
    return find_recipe(CPU_RECIPE)


def prepare_default_data(path: Path) -> None:
    """Prepare the data of the default recipe if missing: GSM8K with a GPU, else synthetic problems."""
    if (path / "train.parquet").is_file():
        return
    from skylite.commands.prepare import prepare
    from skylite.processes.hardware import choose_device

    logger.info(f"preparing {path}, which does not exist yet")
    gpu = choose_device() == "cuda"
    prepare("gsm8k", out=path, synthetic=not gpu, first_source=gpu)
