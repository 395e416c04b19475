"""Which FILE.py:function programs the user has named on this machine. No others run.

Prepared files, recipes and a run's config.json name programs, and all can come from somebody else. skylite
remembers the programs that the user names on the command line (`prepare --reward`, `--set`). It keeps each
with the sha256 of its file in $XDG_STATE_HOME/skylite/programs.json. Every other program is refused, and so
is other content of the file. A built-in reward that evaluates data as code is named in the same way.
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
from skylite.run.files import write_json
from skylite.untrusted_text import parse_json
from skylite.user_functions import (
    CODE_IN_DATA,
    REWARD,
    FunctionKind,
    is_command,
    is_named_as_text,
    is_program,
    program_sha256,
    resolve_spec,
)

logger = logging.getLogger(__name__)


def remember(*specs: str) -> dict[str, str]:
    """Note that the user has named these programs, as they are now. Returns spec -> sha256 of the file.

    Leaves out files that cannot be read. Without a writable home the user names programs each time.
    """
    known = _known()
    hashes = {spec: program_sha256(spec) for spec in specs if is_program(spec)}
    named = {spec: sha256 for spec, sha256 in hashes.items() if sha256 is not None}
    updated = known | {resolve_spec(spec): sha256 for spec, sha256 in named.items()}
    updated |= {spec: "" for spec in specs if spec in CODE_IN_DATA or is_named_as_text(spec)}
    if updated != known:
        with suppress(WriteFailed):
            write_json(_state_file(), {"named": updated})
    return named


def require_named(specs: Sequence[str], kind: FunctionKind, where: Path) -> dict[str, str]:
    """Log which programs will run. Returns spec -> sha256 of the content that the user has named.

    Raises ConfigError if `where` names a program that the user has not named, or one that has changed since,
    or a reward of CODE_IN_DATA, a command or an environment of verifiers that the user has not named.
    """
    programs, known = [spec for spec in specs if is_program(spec)], _known()
    for spec in specs:
        if spec in CODE_IN_DATA and spec not in known:
            raise ConfigError(
                f"{where} names the {kind.name} {spec}, which evaluates parts of data and completions as "
                "code (in a sandbox) and which you have not named on this machine yourself; it was not run.",
                f"If you trust the data, name it: --set {_setting(specs, kind)}.",
            )
        if is_named_as_text(spec) and spec not in known:
            what = "a command" if is_command(spec) else "installed code"
            raise ConfigError(
                f"{where} names the {kind.name} {spec}, {what} that you have not named on this machine "
                "yourself; it was not run.",
                f"If you trust it, name it: --set {_setting(specs, kind)}.",
            )
    for spec in programs:
        sha256 = known.get(resolve_spec(spec))
        if sha256 is None:
            raise ConfigError(
                f"{where} names the {kind.name} {spec}, "
                "a Python program that you have not named on this machine yourself; it was not run.",
                f"If you trust it, name it: --set {_setting(specs, kind)}.",
            )
        if program_sha256(spec) not in (sha256, None):
            raise ConfigError(
                f"{where} names the {kind.name} {spec}, "
                "a Python program that has changed since you named it; it was not run.",
                f"If you trust its new content, name it again: --set {_setting(specs, kind)}.",
            )
    for spec in programs:
        logger.info(f"{kind.name}: the program {spec} runs")
    return {spec: known[resolve_spec(spec)] for spec in programs}


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


def _known() -> dict[str, str]:
    """Program, with its absolute path -> sha256 of its file."""
    try:
        value = parse_json(_state_file().read_text(encoding="utf-8"))
        return {str(spec): str(sha256) for spec, sha256 in value["named"].items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        # Damaged. Nothing counts as named, so that every program is asked for again.
        return {}
