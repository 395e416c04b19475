"""The defaults of `skylite train` on this machine: recipe and data."""

from __future__ import annotations

import logging
from pathlib import Path

from skylite.errors import ConfigError

logger = logging.getLogger(__name__)
GPU_RECIPE = "gsm8k"
CPU_RECIPE = "gsm8k_cpu"


def recipe_folders() -> list[Path]:
    """Folders searched for a recipe: ./recipes, then the checkout, then the installed package."""
    package = Path(__file__).resolve().parent.parent
    return [
        p
        for p in (Path("recipes"), package.parent.parent / "recipes", package / "_bundled" / "recipes")
        if p.is_dir()
    ]


def find_recipe(name: str) -> Path:
    """The TOML file for a path or a recipe name. Raises ConfigError that lists the known names."""
    if name.endswith(".toml"):
        return Path(name)
    for folder in recipe_folders():
        if (folder / f"{name}.toml").is_file():
            return folder / f"{name}.toml"
    known = sorted({p.stem for folder in recipe_folders() for p in folder.glob("*.toml")})
    raise ConfigError(f"There is no recipe {name!r}.", f"Give a .toml file or one of: {', '.join(known)}.")


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
