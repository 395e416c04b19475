"""Builds a TrainConfig from a recipe and what the user typed, and reads run/config.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from skylite import __version__
from skylite.config.provenance import NOTHING_TYPED, Provenance, from_command_line
from skylite.config.rollout import RewardParameters
from skylite.config.setting_errors import describe
from skylite.config.train import RunConfig, TrainConfig
from skylite.errors import ConfigError
from skylite.untrusted_files import read_text
from skylite.untrusted_text import parse_json, parse_toml
from skylite.user_functions import resolve_spec

YAML_SUFFIXES = (".yaml", ".yml")
LENGTHS = frozenset({"num_steps", "num_epochs"})
"""The two settings for the length of a run. One of them replaces the other."""


def load_config(recipe: Path | None, provenance: Provenance = NOTHING_TYPED) -> TrainConfig:
    """The recipe's settings (TOML or YAML; None: the defaults), with what the user typed instead.

    Raises ConfigError that lists every unknown setting and every bad value.
    """
    if recipe is None:
        return _validated({}, provenance, "")
    tree = read_recipe(recipe)
    if len(LENGTHS & tree.keys()) == 2:
        raise ConfigError(
            f"The recipe {recipe} has num_steps and num_epochs, and both set the length of the run.",
            "Remove one of them.",
        )
    return _validated(tree, provenance, f"recipe {recipe}")


def change_config(config: TrainConfig, provenance: Provenance) -> TrainConfig:
    """`config` with what the user typed instead. Raises ConfigError as `load_config` does."""
    return _validated(config.model_dump(mode="json", exclude_unset=True), provenance, "")


def _validated(tree: dict[str, Any], provenance: Provenance, source: str) -> TrainConfig:
    """`source`: where the tree comes from, for messages about what the user did not type."""
    problems: list[str] = []
    values = {setting: typed.value for setting, typed in provenance.typed.items()}
    _replace_length(tree, values, problems)
    for key, value in values.items():
        _set_key(tree, key, value, problems)
    _resolve_programs(tree)
    try:
        config = TrainConfig.model_validate(tree)
    except ValidationError as error:
        flags = {setting: typed.flag for setting, typed in provenance.typed.items()}
        problems += [describe(e, flags, source) for e in error.errors()]
    if problems:
        raise ConfigError(
            f"The configuration has {len(problems)} problem(s):\n" + "\n".join(f"  - {p}" for p in problems)
        )
    return config


def _replace_length(tree: dict[str, Any], values: Mapping[str, Any], problems: list[str]) -> None:
    """Remove the tree's num_steps if num_epochs is set, and the other way round."""
    lengths = LENGTHS & {name for name, value in values.items() if value is not None}
    if len(lengths) == 2:
        problems.append("num_steps (--steps) and num_epochs (--epochs) both set the length; give one of them")
    elif lengths:
        tree.pop(next(iter(LENGTHS - lengths)), None)


def _resolve_programs(tree: dict[str, Any]) -> None:
    """Give every FILE.py:function an absolute path, so that the trainer finds it from any folder."""
    reward, algorithm = tree.get("reward"), tree.get("algorithm")
    if isinstance(reward, dict) and isinstance(functions := reward.get("functions"), list):
        reward["functions"] = [resolve_spec(f) if isinstance(f, str) else f for f in functions]
    env = tree.get("env")
    if isinstance(env, dict) and isinstance(spec := env.get("episode"), str):
        env["episode"] = resolve_spec(spec)
    engine = tree.get("engine")
    if isinstance(engine, dict) and isinstance(spec := engine.get("launcher"), str):
        engine["launcher"] = resolve_spec(spec)
    for name in ("advantage", "policy_loss"):
        if isinstance(algorithm, dict) and isinstance(spec := algorithm.get(name), str):
            algorithm[name] = resolve_spec(spec)


def read_parameters(settings: Sequence[str]) -> RewardParameters:
    """The settings of a built-in reward from `--set reward.NAME=VALUE`. Raises ConfigError for others."""
    provenance = from_command_line(settings)
    names = [f"reward.{field}" for field in RewardParameters.model_fields]
    for name in provenance.typed:
        if name not in names:
            raise ConfigError(f"`skylite prepare` has no setting {name}.", f"It has {', '.join(names)}.")
    reward = load_config(None, provenance).reward
    return RewardParameters(**{name: getattr(reward, name) for name in reward.model_fields_set})


def read_recipe(path: Path) -> dict[str, Any]:
    """A recipe file as a nested dict. Raises ConfigError if it is missing, or not TOML (YAML for .yaml)."""
    from skylite.config.yaml_recipe import parse_yaml  # yaml is slow to import, and --help reads no recipe

    is_yaml = path.suffix in YAML_SUFFIXES
    try:
        text = read_text(path)
        return parse_yaml(text) if is_yaml else parse_toml(text)
    except FileNotFoundError:
        raise ConfigError(
            f"The recipe {path} does not exist.", "Give a TOML or YAML file, or the name of a bundled recipe."
        ) from None
    except (OSError, ValueError) as error:  # TOMLDecodeError, RecipeError and UnicodeDecodeError too
        language = "YAML" if is_yaml else "TOML"
        raise ConfigError(
            f"The recipe {path} is not valid {language}: {error}.", "Correct that line."
        ) from None


def read_run_config(path: Path) -> RunConfig:
    """run/config.json. Raises ConfigError if it is missing, damaged or of a version with other settings."""
    try:
        tree = parse_json(read_text(path))
        return RunConfig.model_validate(tree)
    except FileNotFoundError:
        raise ConfigError(
            f"{path.parent} is not a skylite run: config.json is missing.",
            "Give a run folder that `skylite train` made.",
        ) from None
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()[:3])
        raise ConfigError(
            f"{path} does not fit this skylite ({__version__}): {problems}.",
            "It was made by another version or edited by hand; use that version, or start a new run.",
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path} is not a valid run configuration: {error}.", "The run is damaged; start a new run."
        ) from None


def _set_key(tree: dict[str, Any], key: str, value: Any, problems: list[str]) -> None:
    *parents, leaf = key.split(".")
    node: Any = tree
    for part in parents:
        node = node.setdefault(part, {})
        if not isinstance(node, dict):
            problems.append(f"{key}: {part} is a value, not a section")
            return
    node[leaf] = value
