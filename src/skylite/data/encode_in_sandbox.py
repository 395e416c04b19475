"""The tokenizer of a model, as the sandbox runs it (data/tokenizer.py), which alone imports transformers."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from skylite.data.decode_reply import special_tokens
from skylite.data.render_chats import JobRunner

PLAIN_TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'user' %}Question: {{ m['content'] }}\nAnswer:"
    "{% elif m['role'] == 'assistant' %} {{ m['content'] }}\n\n"
    "{% else %}{{ m['content'] }}\n\n{% endif %}{% endfor %}"
)
"""For base models without a chat template."""

END_CHARACTERS = 80
"""Of a rendered prompt, to see what stands before a completion."""


def make_encoder(
    model_path: str, template: str | None, arguments: dict[str, Any], now: str | None = None
) -> Encoder:
    """Load the tokenizer.

    `template`: text of a chat template instead of the model's own. `arguments`: of the template. `now`: the
    time that the template sees, in ISO 8601; None: the clock's.
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
    # An argument hides transformers' own function of this name.
    clock = {} if now is None else {"strftime_now": datetime.fromisoformat(now).strftime}
    return Encoder(tokenizer, clock | arguments, clock, has_template)


@dataclass(frozen=True, slots=True)
class Encoder:
    """The function of the sandbox, for a loaded tokenizer."""

    tokenizer: Any
    arguments: dict[str, Any]
    """Of the chat template."""
    clock: dict[str, Any]
    """Arguments for jobs, which bring the others."""
    has_template: bool
    """Whether the model has a chat template of its own."""

    def __call__(self, what: str, items: Sequence[Any] = (), stop_token_ids: Sequence[int] = ()) -> Any:
        """("facts"), ("chats" or "ends", lists of turns), ("texts", texts), ("jobs", jobs, stops)."""
        tokenizer = self.tokenizer
        if what == "facts":
            used = tokenizer.chat_template
            return {
                "has_template": self.has_template,
                "eos_token_id": tokenizer.eos_token_id,
                "hides_thinking": bool({"<think>", "</think>"} & {*tokenizer.all_special_tokens}),
                "template": used if isinstance(used, str) else "\n".join(map(str, used.values())),
            }
        if what == "jobs":
            stops = [tokenizer.convert_ids_to_tokens(i) for i in stop_token_ids]
            return JobRunner(tokenizer, stops, self.clock)(items)
        if what == "texts":
            return [tokenizer.encode(text, add_special_tokens=False) for text in items]
        if what == "ends":
            texts = [
                tokenizer.apply_chat_template(
                    turns, add_generation_prompt=True, tokenize=False, **self.arguments
                )
                for turns in items
            ]
            return [text[-END_CHARACTERS:] for text in texts]
        return [
            tokenizer.apply_chat_template(
                turns, add_generation_prompt=True, tokenize=True, return_dict=False, **self.arguments
            )
            for turns in items
        ]

    def prepare(self) -> None:
        """Compile the template and collect the special tokens once, before processes fork from this one.

        A vocabulary with thousands of special tokens, such as Gemma's, takes a tenth of a second.
        """
        from transformers.utils.chat_template_utils import _compile_jinja_template

        special_tokens(self.tokenizer)
        if isinstance(self.tokenizer.chat_template, str):
            _compile_jinja_template(self.tokenizer.chat_template)
