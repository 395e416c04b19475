"""Recipes, flags and `--set` to a TrainConfig, every problem named at once; and the resolved run/config.json."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from skylite import __version__
from skylite.config.train import RunConfig, TrainConfig
from skylite.errors import ConfigError


def load_config(
    recipe: Path | None, overrides: Mapping[str, Any], settings: Sequence[str] = ()
) -> TrainConfig:
    """Recipe TOML, then flags (`overrides`, dotted key -> value), then `--set a.b=value` (TOML syntax; bare words are strings).

    Raises ConfigError that names every unknown key and bad value at once.
    """
    where = f" (recipe {recipe})" if recipe is not None else ""
    return _validated(read_recipe(recipe) if recipe is not None else {}, overrides, settings, where)


def change_config(config: TrainConfig, overrides: Mapping[str, Any], settings: Sequence[str]) -> TrainConfig:
    """The same with some fields changed, given as for `load_config`, which says what is raised."""
    return _validated(config.model_dump(mode="json"), overrides, settings, "")


def _validated(
    tree: dict[str, Any], overrides: Mapping[str, Any], settings: Sequence[str], where: str
) -> TrainConfig:
    problems: list[str] = []
    for key, value in overrides.items():
        _put(tree, key, value, problems)
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals or not key.strip():
            problems.append(f"--set {setting}: expected a.b=value, e.g. --set rollout.group_size=16")
            continue
        _put(tree, key.strip(), parse_value(text.strip()), problems)
    try:
        config = TrainConfig.model_validate(tree)
    except ValidationError as error:
        problems += [_plain(e) for e in error.errors()]
    if problems:
        raise ConfigError(
            f"The configuration{where} has {len(problems)} problem(s):\n"
            + "\n".join(f"  - {p}" for p in problems)
        )
    return config


def read_recipe(path: Path) -> dict[str, Any]:
    """A recipe file as a nested dict. Raises ConfigError when it is missing or not TOML."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            f"The recipe {path} does not exist.", "Give a TOML file, or a name from recipes/."
        ) from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"The recipe {path} is not valid TOML: {error}.", "Correct that line.") from None


def parse_value(text: str) -> Any:
    """A `--set` value: TOML syntax; `none` is None and what is no TOML value is taken as a string."""
    if text == "none":
        return None
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def read_run_config(path: Path) -> RunConfig:
    """run/config.json. Raises ConfigError when it is missing, damaged, or of a skylite with other settings."""
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
        return RunConfig.model_validate(tree)
    except FileNotFoundError:
        raise ConfigError(
            f"{path.parent} is not a skylite run: config.json is missing.",
            "Give a folder made by `skylite train`.",
        ) from None
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()[:3])
        raise ConfigError(
            f"{path} does not fit this skylite ({__version__}): {problems}.",
            "It was made by another version, or changed by hand; use that version for it, or start a new run.",
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path} is not a run configuration: {error}.", "The run is damaged; start a new one."
        ) from None


def _put(tree: dict[str, Any], key: str, value: Any, problems: list[str]) -> None:
    *parents, leaf = key.split(".")
    node: Any = tree
    for part in parents:
        node = node.setdefault(part, {})
        if not isinstance(node, dict):
            problems.append(f"{key}: {part} is a value, not a section")
            return
    node[leaf] = value


def _plain(error: Any) -> str:
    """One pydantic error in plain words: where, what was given, why."""
    where = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        return f"{where}: there is no such setting{_closest(error['loc'])}"
    message = error["msg"].removeprefix("Value error, ")
    if error["type"] == "value_error":
        return f"{where}: {message}" if where else message
    return f"{where}={error['input']!r}: {message}"


def _closest(location: tuple[str, ...]) -> str:
    """ ", did you mean ...?" for a misspelt key."""
    section: Any = TrainConfig
    for part in location[:-1]:
        section = section.model_fields[part].annotation
    near = get_close_matches(str(location[-1]), list(section.model_fields), n=1)
    known = ", ".join(section.model_fields)
    return f", did you mean {near[0]}?" if near else f"; this section has {known}"
