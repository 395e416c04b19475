"""Which FILE.py rewards the user has named on this machine: no others run.

A prepared file's footer and a run's config.json name their reward, and both can come from somebody else. What the user names (prepare
--reward, --set reward.function, a recipe) is remembered by its path in $XDG_STATE_HOME/skylite/rewards.json; what a file names must be in
there.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from skylite.errors import ConfigError, WriteFailed
from skylite.rewards import BUILT_IN, resolve_spec
from skylite.run.files import write_json

logger = logging.getLogger(__name__)


def remember(spec: str) -> None:
    """Take note that the user has named this reward. A home that cannot be written means that it has to be named again next time."""
    if (
        spec in BUILT_IN
        or not spec.partition(":")[0].endswith(".py")
        or (resolved := resolve_spec(spec)) in (known := _known())
    ):
        return
    with suppress(WriteFailed):
        write_json(_state_file(), {"named": sorted({*known, resolved})})


def require_named(spec: str, where: Path) -> None:
    """Log which program will run, or raise ConfigError: `where` names a FILE.py:function that the user has not named on this machine."""
    if spec in BUILT_IN:
        return
    if resolve_spec(spec) not in _known():
        raise ConfigError(
            f"{where} names the reward {spec}, a Python program that you have not named on this machine yourself; it was not run.",
            f"If you trust it, name it: --set reward.function={spec}.",
        )
    logger.info(f"reward: the program {spec} runs")


def names_reward(settings: Sequence[str]) -> bool:
    """Whether `--set` says which reward runs."""
    return any(text.partition("=")[0].strip() == "reward.function" for text in settings)


def _state_file() -> Path:
    return (
        Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
        / "skylite"
        / "rewards.json"
    )


def _known() -> set[str]:
    try:
        value = json.loads(_state_file().read_text(encoding="utf-8"))
        return {str(spec) for spec in value["named"]}
    except FileNotFoundError:
        return set()
    except (OSError, ValueError, KeyError, TypeError):
        # Damaged: nothing was named as far as we know, so that everything is asked for again.
        return set()
