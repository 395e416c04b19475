"""Chat messages to token ids, once, with the chat template of the model. Completions are never re-tokenised.

Template and tokenizer are the model's: they run in a sandbox with limits
(data/chat_tokenizer_in_sandbox.py).
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from skylite.config.rollout import DataConfig, TemplateValue
from skylite.config.train import RunConfig
from skylite.data.chat_tokenizer_in_sandbox import PLAIN_TEMPLATE, Job
from skylite.data.images import image_size, with_parts
from skylite.errors import ConfigError, DataError, ModelError
from skylite.hub.resolve import model_files
from skylite.progress_reporting import long_work
from skylite.sandbox.sandbox import CallFailed, Limits, Sandbox
from skylite.types import EncodedPrompt, ImageTokens, Message, Prompt
from skylite.untrusted_files import open_file, read_text
from skylite.untrusted_text import parse_json

MAX_BYTES = 100_000
"""An engine's command line holds the template of `skylite serve`, and Linux limits an argument to 128 KiB."""
LIMITS = Limits(memory_bytes=2 << 30, cpu_s=60, wall_s=120.0, output_bytes=256 << 20)
"""For the prompts of one call; memory for all together."""
PROMPTS_PER_CALL = 256
CLOCK = "strftime_now"
"""The function with which a chat template reads the time; transformers has no other."""
TEMPLATE, TOKENIZER = "chat_template.jinja", "tokenizer_config.json"
Chat = Sequence[Message] | Prompt
"""The turns of a conversation; a prompt brings its images."""
NO_TEMPLATE = "the model has no chat template, so prompts are plain 'Question: ... Answer:' text"


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
        text=recorded.resolved.model.chat_template,
        args=recorded.config.data.template_args,
        now=recorded.resolved.model.template_time,
    )


def own_template(folder: Path) -> str | None:
    """The chat template of a model folder: the default one, if it has several. None: it has none."""
    if (folder / TEMPLATE).is_file():
        return read_text(folder / TEMPLATE)
    tokenizer = parse_json(read_text(folder / TOKENIZER)) if (folder / TOKENIZER).is_file() else {}
    text = tokenizer.get("chat_template")
    if isinstance(text, list):  # named ones
        text = {entry["name"]: entry["template"] for entry in text}.get("default")
    return text if isinstance(text, str) else None


def text_for_others(template: ChatTemplate, folder: Path) -> str | None:
    """The template for a program that renders it by itself: it writes the time of the run there, too.

    `folder`: of the model. None: the model's own template, as it is.
    """
    text = template.text if template.text is not None else own_template(folder)
    if template.now is None or text is None or CLOCK not in text:
        return template.text
    return _fixed_clock(text, template.now) + text


def _fixed_clock(text: str, now: datetime) -> str:
    """A Jinja macro in place of strftime_now: it knows each directive that occurs in `text`.

    The line ends after a block, so that Jinja drops the newline (trim_blocks) and `text` renders as before.
    """
    directives = sorted({*re.findall(r"%[-_^#0]?[A-Za-z]", text)})
    values = [("%%", "\0"), *((d, now.strftime(d)) for d in directives), ("\0", "%")]
    filters = "".join(f"|replace({json.dumps(old)}, {json.dumps(new)})" for old, new in values if old != new)
    return f"{{%- macro {CLOCK}(format) %}}{{{{ format{filters} }}}}{{% endmacro %}}\n"


def template_notes(config: DataConfig) -> list[str]:
    """Notes on a template and arguments that the user chose."""
    notes = []
    if config.chat_template is not None:
        notes.append(f"prompts are rendered with the chat template {config.chat_template}")
    if config.template_args:
        notes.append(f"arguments of the chat template: {json.dumps(config.template_args)}")
    return notes


def keep_clock(template: ChatTemplate, tokenizer: ChatTokenizer) -> ChatTemplate:
    """The template with a time only if it writes one."""
    return template if CLOCK in tokenizer.template else replace(template, now=None)


def clock_note(template: ChatTemplate) -> str:
    """What a chat template that writes the time writes in this run; empty for others."""
    if template.now is None:
        return ""
    return (
        f"the chat template writes the time: it stays {template.now:%Y-%m-%d %H:%M:%S}, the start of the "
        "run, on a resume, in eval, serve, chat and export, too"
    )


def _check_args(template: ChatTemplate, used: str, model: Path) -> None:
    """Raise ConfigError for an argument that does not occur in `used`, the text of the template."""
    unknown = [name for name in template.args if not re.search(rf"\b{re.escape(name)}\b", used)]
    if unknown:
        source = "data.chat_template" if template.text is not None else f"the chat template of {model}"
        raise ConfigError(
            f"data.template_args names {unknown[0]}, which {source} does not use: it would change nothing.",
            "Remove it, or correct its name.",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatTokenizer:
    """A tokenizer, its chat template and the tokens that end a turn."""

    run_jobs: Callable[[Sequence[Job]], Any]
    """Jobs of chat_tokenizer_in_sandbox.py -> their results, as the sandbox gives them. Raises CallFailed."""
    stop_token_ids: tuple[int, ...]
    model_path: Path = Path("model")
    note: str = ""
    """A note when the model has no chat template."""
    close: Callable[[], None] = lambda: None
    """End its process, also during a call, which then raises ChildDied."""
    arguments: Mapping[str, TemplateValue] = field(default_factory=dict)
    """Of the chat template."""
    template: str = ""
    """Text of the chat template."""
    hides_thinking: bool = False
    """<think> or </think> is a special token, which the text of a completion leaves out."""

    def encode_chats(self, chats: Sequence[Chat]) -> list[list[int]]:
        """Token ids of the turns of each chat, followed by the generation prompt. Raises ModelError."""
        return [list(encoded.token_ids) for encoded in self.encode(chats)]

    def encode(self, chats: Sequence[Chat]) -> list[EncodedPrompt]:
        """The same with the places of their images."""
        results = list(self.run([self._job(chat) for chat in chats]))
        found = self._token_ids(results)
        return [
            EncodedPrompt(ids, _places(chat, result.get("images", [])))
            for chat, ids, result in zip(chats, found, results, strict=True)
        ]

    def encode_texts(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of plain texts, without special tokens. Raises ModelError."""
        return self._token_ids(list(self.run([{"text": text} for text in texts])))

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of token ids, with special tokens. Raises ModelError."""
        return str(self._values(list(self.run([{"text_of": list(token_ids)}])), "text")[0])

    def vocabulary(self) -> tuple[int, list[str]]:
        """The number of token ids, and the texts of special and other added tokens. Raises ModelError."""
        result = list(self.run([{"vocabulary": None}]))
        return int(self._values(result, "size")[0]), list(map(str, self._values(result, "special")[0]))

    def prompt_end(self, chat: Chat) -> str:
        """The last characters of a rendered prompt, before which a completion begins. Raises ModelError."""
        return str(self._values(list(self.run([self._job(chat) | {"end": True}])), "end")[0])

    def _job(self, chat: Chat) -> Job:
        job: Job = {"tools": None, "arguments": dict(self.arguments)}
        if not isinstance(chat, Prompt):
            return job | {"messages": list(chat)}
        if not chat.images:
            return job | {"messages": list(chat.messages)}
        return job | {"messages": with_parts(chat.messages), "images": list(map(image_size, chat.images))}

    def _token_ids(self, results: Sequence[Job]) -> list[list[int]]:
        found = self._values(results, "ids")
        if not all(isinstance(ids, list) and all(type(i) is int and i >= 0 for i in ids) for ids in found):
            what = f"The tokenizer of {self.model_path} returned no token ids."
            raise ModelError(what, "Use another model.")
        return found

    def _values(self, results: Sequence[Job], name: str) -> list[Any]:
        """What the results call `name`. Raises ModelError for one without it."""
        if failed := next((r for r in results if name not in r), None):
            raise self._failed(f"raised {failed.get('error')}", len(results))
        return [result[name] for result in results]

    def run(self, jobs: Sequence[Job]) -> Iterator[Job]:
        """The results of jobs. Raises ModelError if the tokenizer gives none."""
        for start in range(0, len(jobs), PROMPTS_PER_CALL):
            part = jobs[start : start + PROMPTS_PER_CALL]
            try:
                results = self.run_jobs(part)
            except CallFailed as error:
                raise self._failed(str(error), len(part)) from None
            if not isinstance(results, list) or len(results) != len(part):
                raise self._failed("gave no result", len(part))
            yield from (result if isinstance(result, dict) else {} for result in results)

    def _failed(self, reason: str, num_prompts: int) -> ModelError:
        return ModelError(
            f"The chat template or tokenizer of {self.model_path} {reason} for {num_prompts} prompts.",
            "Correct its chat_template or data.chat_template, or use another model.",
        )


def load_tokenizer(model_path: Path, template: ChatTemplate | None = None) -> ChatTokenizer:
    """The tokenizer of a model folder. Close it at the end.

    `template`: None for the model's own without arguments. Raises ModelError without a tokenizer or an
    end-of-turn token, ConfigError without a sandbox or for an argument that the template does not use.
    """
    template = template or ChatTemplate()
    # A folder of the hub's cache links to its blobs.
    readable = [model_path, *(path.resolve() for path in model_files(model_path))]
    sandbox = Sandbox(
        "skylite.data.chat_tokenizer_in_sandbox:make_encoder",
        str(model_path.resolve()),
        template.text,
        None if template.now is None else template.now.isoformat(),
        what=f"the chat template of {model_path}",
        limits=LIMITS,
        readable=readable,
        # One template decides what each conversation becomes, in one process or in many. If it broke out of
        # Jinja's sandbox, it could mix conversations, but neither send nor write anything.
        lasting=True,
    )
    try:
        sandbox.start()
        (facts,) = sandbox.call([{"facts": None}], [])
        _check_args(template, str(facts["template"]), model_path)
        stops = _stop_token_ids(model_path, facts["eos_token_id"])
    except CallFailed as error:
        sandbox.close()
        raise ModelError(
            f"The tokenizer in {model_path} cannot be loaded: it {error}.",
            "Give a model folder that contains its tokenizer files.",
        ) from None
    except BaseException:
        sandbox.close()
        raise
    if not stops:
        sandbox.close()
        raise ModelError(
            f"{model_path} defines no end-of-turn token.", "Set eos_token_id in its generation_config.json."
        )
    return ChatTokenizer(
        run_jobs=lambda jobs: sandbox.call(jobs, stops),
        stop_token_ids=stops,
        model_path=model_path,
        note=NO_TEMPLATE if facts["template"] == PLAIN_TEMPLATE else "",
        close=sandbox.close,
        arguments=template.args,
        template=str(facts["template"]),
        hides_thinking=facts["hides_thinking"] is True,
    )


def too_long(tokenizer: ChatTokenizer, prompts: Sequence[Prompt], limit: int) -> dict[str, int]:
    """Id -> tokens of each prompt with more than `limit`, found without encoding short texts."""
    if not prompts:
        return {}
    # A token takes a byte at least; the tokens of any prompt are more than what the template adds to one.
    added = len(tokenizer.encode_chats(prompts[:1])[0])
    doubtful = [p for p in prompts if p.images or prompt_size(p) + added > limit]
    with long_work("counting the tokens of prompts", total=len(doubtful)) as work:
        found: dict[str, int] = {}
        for start in range(0, len(doubtful), PROMPTS_PER_CALL):
            part = doubtful[start : start + PROMPTS_PER_CALL]
            counts = map(len, tokenizer.encode_chats(part))
            found |= {p.id: count for p, count in zip(part, counts, strict=True) if count > limit}
            work.advance(len(part))
    return found


async def encode_in_thread(
    tokenizer: ChatTokenizer, prompts: Sequence[Prompt], max_prompt_tokens: int
) -> dict[str, EncodedPrompt]:
    """`encode_prompts` for an event loop, which runs meanwhile and hears Ctrl-C."""
    return await asyncio.to_thread(encode_prompts, tokenizer, prompts, max_prompt_tokens)


def encode_prompts(
    tokenizer: ChatTokenizer, prompts: Sequence[Prompt], max_prompt_tokens: int
) -> dict[str, EncodedPrompt]:
    """By prompt id. Raises DataError for a prompt over `max_prompt_tokens`."""
    encoded = {}
    for prompt, found in zip(prompts, tokenizer.encode(prompts), strict=True):
        if len(found.token_ids) > max_prompt_tokens:
            raise DataError(
                f"Prompt {prompt.id} has {len(found.token_ids)} tokens, "
                f"over rollout.max_prompt_tokens={max_prompt_tokens}.",
                "Raise the limit, or prepare the data set without that row.",
            )
        encoded[prompt.id] = found
    return encoded


def prompt_size(prompt: Prompt) -> int:
    """Bytes of the text, to find the longest prompts, and for an image about the tokens of its pixels."""
    # In bytes: a Chinese character takes as many tokens as several English ones.
    sizes = map(image_size, prompt.images)
    return sum(len(m["content"].encode()) for m in prompt.messages) + sum(w * h for w, h in sizes) // 256


def _places(chat: Chat, places: Sequence[Sequence[int]]) -> tuple[ImageTokens, ...]:
    images = chat.images if isinstance(chat, Prompt) else ()
    return tuple(ImageTokens(start, n, data) for (start, n), data in zip(places, images, strict=True))


def _stop_token_ids(model_path: Path, eos_token_id: int | None) -> tuple[int, ...]:
    """The EOS token of the tokenizer and those of generation_config.json, which the engine does not read."""
    stops: list[Any] = [] if eos_token_id is None else [eos_token_id]
    path = model_path / "generation_config.json"
    if path.exists():
        try:
            named = parse_json(read_text(path)).get("eos_token_id")
        except (OSError, ValueError, AttributeError) as error:
            raise ModelError(
                f"{path} is not a generation configuration: {error}.", "Download or save the model again."
            ) from None
        stops += named if isinstance(named, list) else [] if named is None else [named]
    if odd := [stop for stop in stops if type(stop) is not int or stop < 0]:
        raise ModelError(f"{path} names the end-of-turn token {odd[0]!r}.", "Give token ids.")
    return tuple(sorted(set(stops)))
