"""The chat template of a run: the model's own or that of data.chat_template, and its arguments."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from skylite.config.rollout import DataConfig, TemplateValue
from skylite.config.train import RunConfig
from skylite.errors import ConfigError
from skylite.untrusted_files import open_file

MAX_BYTES = 100_000
"""An engine's command line holds the template of `skylite serve`, and Linux limits an argument to 128 KiB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatTemplate:
    """How prompts are rendered."""

    text: str | None = None
    """None: the model's own template."""
    args: Mapping[str, TemplateValue] = field(default_factory=dict)
    now: datetime | None = None
    """The time that the template sees (strftime_now). None: the clock's."""


def read_template(config: DataConfig) -> ChatTemplate:
    """The template that the settings name. Raises ConfigError if its file cannot be used."""
    if config.chat_template is None:
        return ChatTemplate(args=config.template_args)
    path = Path(config.chat_template)
    try:
        if not path.is_file():
            raise ConfigError(
                f"The chat template {path} is not a file.", "Give a file with a Jinja template."
            )
        with open_file(path) as stream:
            content = stream.read(MAX_BYTES + 1)
        text = content.decode()
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path, or bytes that are not UTF-8
        raise ConfigError(
            f"The chat template {path} cannot be read: {error}.", "Give a UTF-8 file."
        ) from None
    if len(content) > MAX_BYTES:
        raise ConfigError(f"The chat template {path} is larger than {MAX_BYTES} bytes.", "Shorten it.")
    if "{" not in text:
        raise ConfigError(
            f"The chat template {path} has no Jinja expression, so every prompt would be the same.",
            "Give a file with a Jinja template, such as a model's chat_template.jinja.",
        )
    return ChatTemplate(text=text, args=config.template_args)


def run_template(recorded: RunConfig | None) -> ChatTemplate:
    """The template of a run, as it was when the run started. None: no run, and the model's own template."""
    if recorded is None:
        return ChatTemplate()
    return ChatTemplate(
        text=recorded.resolved.chat_template,
        args=recorded.config.data.template_args,
        now=recorded.resolved.template_time,
    )


def template_notes(config: DataConfig) -> list[str]:
    """Notes on a template and arguments that the user chose."""
    notes = []
    if config.chat_template is not None:
        notes.append(f"prompts are rendered with the chat template {config.chat_template}")
    if config.template_args:
        notes.append(f"arguments of the chat template: {json.dumps(config.template_args)}")
    return notes


def check_args(template: ChatTemplate, used: str, model: Path) -> None:
    """Raise ConfigError for an argument that does not occur in `used`, the text of the template."""
    unknown = [name for name in template.args if not re.search(rf"\b{re.escape(name)}\b", used)]
    if unknown:
        source = "data.chat_template" if template.text is not None else f"the chat template of {model}"
        raise ConfigError(
            f"data.template_args names {unknown[0]}, which {source} does not use: it would change nothing.",
            "Remove it, or correct its name.",
        )
