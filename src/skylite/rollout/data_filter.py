"""data.difficulty of a recipe or of a run: it counts for their own data set, not for other data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from skylite.config.loading import read_recipe
from skylite.config.provenance import Provenance
from skylite.config.train import TrainConfig
from skylite.data.prompts import PromptFileInfo, read_info


def without_foreign_filter(config: TrainConfig, provenance: Provenance) -> tuple[TrainConfig, str]:
    """Leave out the recipe's data.difficulty if a flag names other data. Returns settings and note."""
    recipe = provenance.file_of("data.difficulty")
    if recipe is None:
        return config, ""
    info = read_info(Path(config.data.path) / "train.parquet")
    return fit_difficulty(config, read_recipe(recipe).get("data", {}), info, f"the recipe {recipe.stem}")


def fit_difficulty(
    config: TrainConfig, own: dict[str, Any], info: PromptFileInfo, owner: str
) -> tuple[TrainConfig, str]:
    """Remove data.difficulty from `config` if it was chosen for another data set than that of data.path.

    Args:
        own: the section `data` of `owner`, which data.difficulty comes from.
        info: footer of the data in data.path.
        owner: a recipe or a run, for the note.

    Returns the settings and a note; the note is empty if nothing changed.
    """
    wanted, own_path, path = own.get("difficulty"), own.get("path"), Path(config.data.path)
    if not wanted or own_path is None:
        return config, ""
    if Path(own_path).resolve() == path.resolve() or Path(own_path).name == info.dataset:
        return config, ""
    data = config.data.model_copy(update={"difficulty": []})
    note = (
        f"data.difficulty={wanted} in {owner} is for its own data, {own_path}; all problems of {path} are "
        "used (--set data.difficulty=... chooses some)"
    )
    return config.model_copy(update={"data": data}), note
