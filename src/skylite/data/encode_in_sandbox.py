"""The tokenizer of a model, as the sandbox runs it (data/tokenizer.py), which alone imports transformers."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

PLAIN_TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'user' %}Question: {{ m['content'] }}\nAnswer:"
    "{% elif m['role'] == 'assistant' %} {{ m['content'] }}\n\n"
    "{% else %}{{ m['content'] }}\n\n{% endif %}{% endfor %}"
)
"""For base models without a chat template."""


def make_encoder(model_path: str, template: str | None, arguments: dict[str, Any]) -> Callable[..., Any]:
    """Load the tokenizer. Returns a function of ("facts"), ("chats", list of turns) or ("texts", texts).

    `template`: instead of the model's own. `arguments`: of the template.
    """
    # Without torch: buys 330 MB while the run lasts, and 0.5 s of start. It stays because of the memory, more
    # than 5 % of a trainer's (2.2 GiB for a 135M model). transformers then offers no models.
    sys.modules["torch"] = None  # type: ignore[assignment]  # None makes the import fail
    os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"
    from transformers import AutoTokenizer

    # Beside tekken.json transformers would take mistral-common, which knows no chat template.
    tokenizer = AutoTokenizer.from_pretrained(model_path, trust_remote_code=False, mistral_format=False)
    has_template = bool(tokenizer.chat_template)
    tokenizer.chat_template = template or tokenizer.chat_template or PLAIN_TEMPLATE

    def encode(what: str, items: list[Any] | None = None) -> Any:
        if what == "facts":
            used = tokenizer.chat_template
            return {
                "has_template": has_template,
                "eos_token_id": tokenizer.eos_token_id,
                "template": used if isinstance(used, str) else "\n".join(map(str, used.values())),
            }
        if what == "texts":
            return [tokenizer.encode(text, add_special_tokens=False) for text in items or []]
        return [
            tokenizer.apply_chat_template(
                turns, add_generation_prompt=True, tokenize=True, return_dict=False, **arguments
            )
            for turns in items or []
        ]

    return encode
