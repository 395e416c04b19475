"""The settings of a built-in reward that came with the data."""

from __future__ import annotations

from collections.abc import Collection

from pydantic import ValidationError

from skylite.config.rollout import RewardConfig, RewardParameters
from skylite.config.train import TrainConfig
from skylite.data.prompts import PromptFileInfo
from skylite.errors import DataError


def apply_reward_settings(
    config: TrainConfig, info: PromptFileInfo, keep: Collection[str]
) -> tuple[TrainConfig, str]:
    """Take over the settings that `skylite prepare` was given, if the data's own reward is used.

    `keep`: settings of the section reward that the user chose. Returns a note on what was taken over.
    Raises DataError for settings that do not exist.
    """
    update = {name: value for name, value in info.reward_settings.items() if name not in keep}
    if config.reward.functions or not update:
        return config, ""
    try:
        RewardParameters.model_validate(info.reward_settings)
        reward = RewardConfig.model_validate(config.reward.model_dump() | update)
    except ValidationError as error:
        problem = error.errors()[0]
        name = ".".join(map(str, problem["loc"]))
        raise DataError(
            f"The data was prepared with a reward setting that is refused: {name}: {problem['msg']}.",
            "Prepare it again with `skylite prepare`.",
        ) from None
    values = ", ".join(f"reward.{name}={value!r}" for name, value in update.items())
    return config.model_copy(update={"reward": reward}), f"from the data: {values}"
