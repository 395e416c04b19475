"""What `skylite train` alone means on this machine: which recipe, which data."""

from __future__ import annotations

import logging
from pathlib import Path

from skylite.errors import ConfigError

logger = logging.getLogger(__name__)
GPU_RECIPE = "gsm8k"
CPU_RECIPE = "gsm8k_cpu"


def recipe_folders() -> list[Path]:
    """Where recipe names are looked up: ./recipes, this checkout's, the copy in the wheel."""
    package = Path(__file__).resolve().parent.parent
    return [
        p
        for p in (Path("recipes"), package.parent.parent / "recipes", package / "_bundled" / "recipes")
        if p.is_dir()
    ]


def find_recipe(name: str) -> Path:
    """A path to a TOML file, or a name in recipes/. Raises ConfigError that lists the names there are."""
    if name.endswith(".toml"):
        return Path(name)
    for folder in recipe_folders():
        if (folder / f"{name}.toml").is_file():
            return folder / f"{name}.toml"
    known = sorted({p.stem for folder in recipe_folders() for p in folder.glob("*.toml")})
    raise ConfigError(f"There is no recipe {name!r}.", f"Give a .toml file or one of: {', '.join(known)}.")


def default_recipe() -> Path:
    """The recipe for this machine. Logs the choice."""
    from skylite.processes.machine import choose_device

    if choose_device() == "cuda":
        logger.info(f"recipe {GPU_RECIPE}: this machine has a GPU")
        return find_recipe(GPU_RECIPE)
    logger.info(
        f"recipe {CPU_RECIPE}: no GPU here; it trains a 135M model on easy generated problems, because GSM8K is beyond so small a model"
    )
    return find_recipe(CPU_RECIPE)


def prepare_default_data(path: Path) -> None:
    """Prepare the default recipe's data where it is missing: GSM8K on a GPU machine, the synthetic without one."""
    if (path / "train.parquet").is_file():
        return
    from skylite.commands.prepare import prepare
    from skylite.processes.machine import choose_device

    logger.info(f"{path} does not exist yet: preparing it")
    gpu = choose_device() == "cuda"
    prepare("gsm8k", out=path, source=None, synthetic=not gpu, first_source=gpu, difficulty=(), question=None, answer=None, reward=None,
            limit=None, seed=0)  # fmt: skip
