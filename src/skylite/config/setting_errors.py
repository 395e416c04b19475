"""The sentence for a bad or unknown setting."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from skylite.config.train import TrainConfig, all_settings


def describe(error: Any, flags: Mapping[str, str], source: str) -> str:
    """One pydantic error in words: the setting, its value, who gave it, the reason."""
    where = ".".join(str(part) for part in error["loc"])
    near = [key for key in flags if f"{where}.".startswith(f"{key}.") or key.startswith(f"{where}.")]
    origin = flags[near[0]] if where and near else source
    by = f" ({origin})" if origin else ""
    if error["type"] == "extra_forbidden":
        return f"{where}{by}: there is no such setting{_suggestion(error['loc'])}"
    message = error["msg"].removeprefix("Value error, ")
    if error["type"] == "value_error":
        return f"{where}{by}: {message}" if where else message
    return f"{where}={error['input']!r}{by}: {message}"


def _suggestion(location: tuple[str, ...]) -> str:
    """ ", did you mean KEY?" for a misspelt key, or one without its section; else the keys of the section."""
    elsewhere = [key for key, _ in all_settings() if key.rpartition(".")[2] == location[-1]]
    elsewhere.sort(key=lambda key: key.startswith("critic."))  # only PPO has one
    if elsewhere:
        return f", did you mean {' or '.join(elsewhere)}?"
    section: Any = TrainConfig
    for part in location[:-1]:
        section = section.model_fields[part].annotation
    near = get_close_matches(str(location[-1]), list(section.model_fields), n=1)
    known = ", ".join(section.model_fields)
    return f", did you mean {near[0]}?" if near else f"; this section has {known}"
