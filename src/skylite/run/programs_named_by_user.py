"""Which FILE.py:function programs the user has named on this machine. No others run.

Prepared files, recipes and a run's config.json name programs, and all can come from somebody else. skylite remembers
the paths that the user names on the command line (`prepare --reward`, `--set`) in
$XDG_STATE_HOME/skylite/programs.json. Every other program is refused.
"""

from __future__ import annotations

import json
import logging
import os
import shlex
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from skylite.errors import ConfigError, WriteFailed
from skylite.plugin_file import REWARD, FunctionKind, is_program, resolve_spec
from skylite.run.files import write_json

logger = logging.getLogger(__name__)


def remember(*specs: str) -> None:
    """Note that the user has named these programs. Without a writable home the user names them each time."""
    known = _known()
    named = {resolve_spec(spec) for spec in specs if is_program(spec)}
    if named - known:
        with suppress(WriteFailed):
            write_json(_state_file(), {"named": sorted(known | named)})


def require_named(specs: Sequence[str], kind: FunctionKind, where: Path) -> None:
    """Log which programs will run. Raises ConfigError if `where` names one that the user has not named."""
    programs, known = [spec for spec in specs if is_program(spec)], _known()
    for spec in programs:
        if resolve_spec(spec) not in known:
            raise ConfigError(
                f"{where} names the {kind.name} {spec}, "
                "a Python program that you have not named on this machine yourself; it was not run.",
                f"If you trust it, name it: --set {_setting(specs, kind)}.",
            )
    for spec in programs:
        logger.info(f"{kind.name}: the program {spec} runs")


def is_set(settings: Sequence[str], name: str) -> bool:
    """Whether `--set` gives this setting a value."""
    return any(text.partition("=")[0].strip() == name for text in settings)


def _setting(specs: Sequence[str], kind: FunctionKind) -> str:
    """`setting=value` as one would type it in a shell."""
    return shlex.quote(f"{kind.setting}={json.dumps(list(specs)) if kind is REWARD else specs[0]}")


def state_folder() -> Path:
    """Where skylite keeps what it remembers about its user."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "skylite"


def _state_file() -> Path:
    return state_folder() / "programs.json"


def _known() -> set[str]:
    try:
        value = json.loads(_state_file().read_text(encoding="utf-8"))
        return {str(spec) for spec in value["named"]}
    except FileNotFoundError:
        return set()
    except (OSError, ValueError, KeyError, TypeError):
        # Damaged. Nothing counts as named, so that every program is asked for again.
        return set()
