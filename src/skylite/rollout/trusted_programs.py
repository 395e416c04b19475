"""Which programs the user has named on this machine. No others run.

Prepared files, recipes and a run's config.json name programs: FILE.py:function, commands, environments, and
rewards that evaluate data as code. All can come from somebody else. skylite remembers what the user names on
the command line (`prepare --reward`, `--set`), with the sha256 of the file, in $XDG_STATE_HOME/skylite/
programs.json. Every other program is refused, and so is other content of the file.

The functions return spec -> sha256 for the allowed files, so that no other content of them runs.
"""

from __future__ import annotations

import json
import logging
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from skylite.config.judge import BASE
from skylite.config.provenance import NOTHING_TYPED, Provenance
from skylite.config.train import TrainConfig
from skylite.data.prompts import PromptFileInfo
from skylite.engine.interface import Launcher
from skylite.engine.launchers import load_launcher
from skylite.environments.episode_spec import check_episode
from skylite.errors import ConfigError, WriteFailed
from skylite.processes.private_folders import state_folder
from skylite.run.files import write_json
from skylite.untrusted_text import parse_json
from skylite.user_functions import (
    ADVANTAGE,
    CODE_IN_DATA,
    EPISODE,
    LAUNCHER,
    POLICY_LOSS,
    REWARD,
    FunctionKind,
    check_function,
    is_command,
    is_named_as_text,
    is_program,
    is_verifiers,
    program_sha256,
    resolve_spec,
)

logger = logging.getLogger(__name__)


def remember(*specs: str) -> dict[str, str]:
    """Note that the user has named these programs, as they are now.

    Leaves out files that cannot be read. Without a writable home the user names programs each time.
    """
    hashes = {spec: sha256 for spec in specs if is_program(spec) and (sha256 := program_sha256(spec))}
    new = {resolve_spec(spec): sha256 for spec, sha256 in hashes.items()}
    _remember(new | {spec: "" for spec in specs if spec in CODE_IN_DATA or is_named_as_text(spec)})
    return hashes


def _remember(new: Mapping[str, str]) -> None:
    named = _named()
    if (updated := {**named, **new}) != named:
        with suppress(WriteFailed):
            write_json(_state_file(), {"named": updated})


def require_named(specs: Sequence[str], kind: FunctionKind, where: Path) -> dict[str, str]:
    """Raise ConfigError if `where` names a program that the user has not named, or that has changed since.

    Logs which programs will run.
    """
    named, programs = _named(), {}
    for spec in specs:
        if not (what := _what(spec)):
            continue
        sha256 = named.get(resolve_spec(spec))
        if sha256 is None:
            problem, remedy = "that you have not named on this machine yourself", "If you trust it, name it"
        elif is_program(spec) and program_sha256(spec) not in (sha256, None):
            problem = "that has changed since you named it"
            remedy = "If you trust its new content, name it again"
        else:
            if is_program(spec):
                logger.info(f"{kind.name}: the program {spec} runs")
                programs[spec] = sha256
            continue
        setting = f"{kind.setting}={json.dumps(list(specs)) if kind is REWARD else specs[0]}"
        raise ConfigError(
            f"{where} names the {kind.name} {spec}, {what} {problem}; it was not run.",
            f"{remedy}: --set {shlex.quote(setting)}.",
        )
    return programs


def allow_rewards(
    functions: Sequence[str], info: PromptFileInfo, data: Path, provenance: Provenance = NOTHING_TYPED
) -> tuple[tuple[str, ...], dict[str, str]]:
    """The specs of the reward functions, and the hashes of the programs among them.

    The functions are `functions`, or the reward that `data` was prepared with.

    Raises ConfigError for a program that only a file names, and for data whose rewards an environment gives.
    """
    if not functions and is_verifiers(info.reward):
        raise ConfigError(
            f"{data} holds tasks of {info.reward}, whose episodes give the rewards.",
            f"Train on it with --env {shlex.quote(info.reward)}, or choose a --reward.",
        )
    if not functions:
        return (info.reward,), require_named([info.reward], REWARD, data)
    return tuple(functions), _allow(functions, REWARD, provenance)


def allow_algorithm(config: TrainConfig, provenance: Provenance = NOTHING_TYPED) -> dict[str, str]:
    """Check that advantage and policy loss may run, and check their files without importing torch.

    Raises ConfigError for one that only a file names.
    """
    algorithm, programs = config.algorithm, dict[str, str]()
    for spec, kind in ((algorithm.advantage, ADVANTAGE), (algorithm.policy_loss, POLICY_LOSS)):
        if is_program(spec):
            programs |= _allow([spec], kind, provenance)
            check_function(spec, kind)
    return programs


def allow_episode(spec: str, provenance: Provenance = NOTHING_TYPED) -> dict[str, str]:
    """Check that env.episode may run. Raises ConfigError if only a file names it."""
    check_episode(spec)
    return _allow([spec], EPISODE, provenance)


def allow_launcher(config: TrainConfig, provenance: Provenance = NOTHING_TYPED) -> dict[str, str]:
    """Check that engine.launcher may run. Raises ConfigError if only a file names it."""
    spec = config.engine.launcher
    if not is_program(spec):
        return {}
    check_function(spec, LAUNCHER)
    return _allow([spec], LAUNCHER, provenance)


def allow_servers(config: TrainConfig, provenance: Provenance = NOTHING_TYPED) -> None:
    """Check that texts and keys may go to the servers of a run. Raises ConfigError as `allow_judge`."""
    allow_judge(config, provenance)
    allow_teacher(config, provenance)
    allow_engines(config, provenance)


def allow_judge(config: TrainConfig, provenance: Provenance = NOTHING_TYPED) -> None:
    """Check that texts, and the key of a variable, may go to reward.judge.url.

    Raises ConfigError if only a file names the pair.
    """
    judge = config.reward.judge
    if config.has_judge and judge.url != BASE:
        named = {"reward.judge.url": judge.url, "reward.judge.api_key_env": judge.api_key_env}
        _allow_server("judge", named, provenance)


def allow_teacher(config: TrainConfig, provenance: Provenance = NOTHING_TYPED) -> None:
    """The same for the server of algorithm.teacher."""
    algorithm = config.algorithm
    if algorithm.teacher_url is not None:
        key = {"algorithm.teacher_key_env": algorithm.teacher_key_env}
        _allow_server("teacher", {"algorithm.teacher": algorithm.teacher_url, **key}, provenance)


def allow_engines(config: TrainConfig, provenance: Provenance = NOTHING_TYPED) -> None:
    """The same for the engines of engine.urls, and the receivers of engine.push_urls."""
    engine = config.engine
    if engine.urls:
        key = {"engine.key_env": engine.key_env}
        _allow_server("engines", {"engine.urls": json.dumps(engine.urls), **key}, provenance)
    if engine.push_urls:
        named = {"engine.push_urls": json.dumps(engine.push_urls), "engine.push_key_env": engine.push_key_env}
        _allow_server("receivers", named, provenance, sent="adapters")


def _allow_server(
    kind: str, settings: Mapping[str, str], provenance: Provenance, sent: str = "prompts, completions"
) -> None:
    """`settings`: the one with the URL, and the one with the name of the key's variable, or ""."""
    url, key_env = settings.values()
    spec = f"{kind} {url} {key_env}"
    file = next(filter(None, (provenance.file_of(name) for name, value in settings.items() if value)), None)
    if file is None:
        _remember({spec: ""})
    elif spec not in _named():
        key = f" and the key in {key_env}" if key_env else ""
        typed = " ".join(f"--set {shlex.quote(f'{name}={value}')}" for name, value in settings.items())
        raise ConfigError(
            f"{file} sends {sent}{key} to the {kind} {url}, a server that you have not named on this "
            "machine yourself; nothing was sent.",
            f"If you trust it, name it: {typed}.",
        )


def allowed_launcher(config: TrainConfig, provenance: Provenance = NOTHING_TYPED) -> Launcher:
    """The launcher, for a command that starts one engine. Raises ConfigError if only a file names it."""
    return load_launcher(config, allow_launcher(config, provenance))


def accept_same_rewards(
    recorded: TrainConfig, config: TrainConfig, info: PromptFileInfo, provenance: Provenance
) -> TrainConfig:
    """If the user names the rewards that the run uses already, allow them and undo that change."""
    functions = recorded.reward.functions
    if not provenance.is_typed(REWARD.setting) or config.reward.functions != (functions or [info.reward]):
        return config
    remember(*config.reward.functions)
    return config.model_copy(update={"reward": config.reward.model_copy(update={"functions": functions})})


def _allow(specs: Sequence[str], kind: FunctionKind, provenance: Provenance) -> dict[str, str]:
    """Remember what the user names; require that the user has named what a file names."""
    file = provenance.file_of(kind.setting)
    return remember(*specs) if file is None else require_named(specs, kind, file)


def _what(spec: str) -> str:
    """What would run, for a message; empty for what is skylite's own."""
    if is_program(spec):
        return "a Python program"
    if spec in CODE_IN_DATA:
        return "which evaluates parts of data and completions as code (in a sandbox) and"
    return ("a command" if is_command(spec) else "installed code") if is_named_as_text(spec) else ""


def _state_file() -> Path:
    return state_folder() / "programs.json"


def _named() -> dict[str, str]:
    """Program, with its absolute path -> sha256 of its file."""
    try:
        value = parse_json(_state_file().read_text(encoding="utf-8"))
        return {str(spec): str(sha256) for spec, sha256 in value["named"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        # Missing or damaged. Nothing counts as named, so that every program is asked for again.
        return {}
