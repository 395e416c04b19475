"""The chat template of an export: that of the run, with the run's arguments as defaults.

No file of a model holds arguments of its template, so they become the template's first lines.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from skylite.data.chat_tokenizer import ChatTemplate
from skylite.errors import ModelError
from skylite.run.files import write_json
from skylite.untrusted_files import read_text
from skylite.untrusted_text import parse_json

TEMPLATE, OLD_TEMPLATE, TOKENIZER = "chat_template.jinja", "chat_template.json", "tokenizer_config.json"


def write_template(template: ChatTemplate, folder: Path) -> None:
    """Replace the base's template in `folder` if the run used another, or arguments. Raises ModelError."""
    if template.text is None and not template.args:
        return
    tokenizer = parse_json(read_text(folder / TOKENIZER)) if (folder / TOKENIZER).is_file() else {}
    text = template.text if template.text is not None else _own_template(folder, tokenizer)
    if text is None:
        raise ModelError(
            f"The run set arguments of the chat template ({', '.join(template.args)}); the base has none.",
            "Restore the base model's chat template.",
        )
    defaults = "".join(_default(name, value) for name, value in template.args.items())
    (folder / TEMPLATE).write_text(defaults + text, encoding="utf-8")
    (folder / OLD_TEMPLATE).unlink(missing_ok=True)
    if tokenizer.pop("chat_template", None) is not None:
        write_json(folder / TOKENIZER, tokenizer)


def _own_template(folder: Path, tokenizer: dict[str, Any]) -> str | None:
    if (folder / TEMPLATE).is_file():
        return read_text(folder / TEMPLATE)
    found = tokenizer.get("chat_template")
    if isinstance(found, list):  # named ones
        found = {entry["name"]: entry["template"] for entry in found}.get("default")
    return found if isinstance(found, str) else None


def _default(name: str, value: object) -> str:
    """A line that sets an argument unless the caller gives it."""
    literal = "none" if value is None else json.dumps(value)
    return f"{{%- if {name} is not defined %}}{{%- set {name} = {literal} %}}{{%- endif %}}"
