"""`command:PROGRAM ARGUMENTS`: an episode that is any program.

The program starts once for each trajectory, in the folder in which you started skylite. It gets
OPENAI_BASE_URL, OPENAI_API_KEY and OPENAI_MODEL, and the task as JSON in SKYLITE_TASK and on its standard
input. The last line that it prints is the reward as JSON.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from skylite.environments.chat import BlockingChat, Task
from skylite.environments.episode_spec import command_words
from skylite.untrusted_text import parse_json

USERS_FOLDER = "SKYLITE_USERS_FOLDER"
"""Variable of the host: where the user started skylite. You named the command as you type it there."""


class CommandFailed(Exception):
    """The program failed or printed no reward."""


class NonzeroExit(CommandFailed):
    """The program failed. Nobody can tell whether a limit was the reason."""


def command_episode(spec: str) -> Callable[[Task, BlockingChat], Any]:
    """The episode that runs this command line. Raises ConfigError."""
    words = command_words(spec)

    def episode(task: Task, chat: BlockingChat) -> Any:
        text = json.dumps(dataclasses.asdict(task))
        folder = os.environ.get(USERS_FOLDER)
        env = {k: v for k, v in os.environ.items() if k != USERS_FOLDER} | {
            "OPENAI_BASE_URL": chat.base_url,
            "OPENAI_API_KEY": chat.api_key,
            "OPENAI_MODEL": chat.model,
            "SKYLITE_TASK": text,
        }
        # In this process group, which is killed at the end of the episode.
        done = subprocess.run(
            words,
            env=env,
            cwd=folder,
            input=text,
            stdout=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
            check=False,
        )
        sys.stdout.write(done.stdout)
        if done.returncode != 0:
            raise NonzeroExit(f"{words[0]} ended with {done.returncode}; its output is in the log")
        lines = done.stdout.strip().splitlines()
        try:
            return parse_json(lines[-1] if lines else "")
        except ValueError:
            last = lines[-1][:200] if lines else ""
            raise CommandFailed(
                f"the last line that {words[0]} printed is {last!r}; it must be the reward as JSON"
            ) from None

    return episode
