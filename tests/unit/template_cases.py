"""Chat templates of model families, each with replies as its model writes them, and a tokenizer with merges.

The tokenizer is trained on the templates' own text, so a text has many tokenizations. The engine samples
another one than the tokenizer's. So code that tokenizes a reply again gets other ids, and the test fails.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from skylite.config.train import TrainConfig
from skylite.data.chat_tokenizer_in_sandbox import run_jobs
from skylite.engine.interface import Sampling
from skylite.environments.openai_server import OpenAIServer
from skylite.environments.parse_reply import tool_format
from skylite.environments.renderer import Renderer
from skylite.types import Call, EncodedPrompt

OWN = Path(__file__).parents[1] / "chat_templates"
TRL = Path(str(metadata.distribution("trl").locate_file("trl"))) / "chat_templates"
THINK, TOOL_CALL = ("<think>", "</think>"), ("<tool_call>", "</tool_call>")
HERMES = '<tool_call>\n{"name": "add", "arguments": {"a": 40, "b": 2}}\n</tool_call>'
GLM = (
    "\n<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>40</arg_value>\n"
    "<arg_key>b</arg_key>\n<arg_value>2</arg_value>\n</tool_call>"
)
QWEN_XML = (
    "<tool_call>\n<function=add>\n<parameter=a>\n40\n</parameter>\n"
    "<parameter=b>\n2\n</parameter>\n</function>\n</tool_call>"
)


@dataclass(frozen=True)
class Family:
    """One chat template, and how its model writes. `{}` is the reply's text."""

    name: str
    path: Path
    stop: str = "<|im_end|>"
    call_stop: str = ""
    """Ends a reply that calls a tool; empty: `stop`."""
    answer: str = "{}"
    thought: str = "<think>\nI think.\n</think>\n\n{}"
    call: str = HERMES
    arguments: dict[str, Any] = field(default_factory=dict)
    tokens: tuple[str, ...] = ()
    """Notation for which the model's vocabulary has a token each. Other notation is text."""

    @property
    def stops(self) -> list[str]:
        return [s for s in (self.stop, self.call_stop) if s]

    @property
    def template(self) -> str:
        return self.path.read_text(encoding="utf-8")


FAMILIES = [
    Family("Qwen3, thinking", TRL / "qwen3.jinja", tokens=THINK + TOOL_CALL),
    Family(
        "Qwen3, not thinking", TRL / "qwen3.jinja", arguments={"enable_thinking": False},
        tokens=THINK + TOOL_CALL,
    ),
    Family(
        "Qwen3.5", TRL / "qwen3_5_think.jinja", thought="I think.\n</think>\n\n{}",
        answer="\n</think>\n\n{}", call=f"I think.\n</think>\n\n{QWEN_XML}",
        tokens=THINK + TOOL_CALL,
    ),
    Family("Qwen2.5", TRL / "qwen2_5.jinja", tokens=TOOL_CALL),
    Family(
        "Llama 3.1", TRL / "llama3_1.jinja", stop="<|eot_id|>",
        call='{"name": "add", "parameters": {"a": 40, "b": 2}}', tokens=("<|python_tag|>",),
    ),
    Family("Gemma 2", TRL / "gemma.jinja", stop="<end_of_turn>"),
    Family("Gemma 3", TRL / "gemma3.jinja", stop="<end_of_turn>"),
    Family(
        "Gemma 4", TRL / "gemma4_v5.jinja", stop="<turn|>", call_stop="<|tool_response>",
        thought="<|channel>thought\nI think.\n<channel|>{}",
        call="<|tool_call>call:add{a:40,b:2}<tool_call|>",
        tokens=("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>'),
    ),
    Family(
        "Mistral 7B v0.3", OWN / "mistral_v3.jinja", stop="</s>", answer=" {}", thought="[THINK]hm[/THINK]{}",
        call='[TOOL_CALLS] [{"name": "add", "arguments": {"a": 40, "b": 2}, "id": "c00001000"}]',
        tokens=("[TOOL_CALLS]",),
    ),
    Family("SmolLM2", OWN / "smollm2.jinja"),
    Family(
        "GPT-OSS", TRL / "gptoss.jinja", stop="<|return|>", call_stop="<|call|>",
        answer="<|channel|>final<|message|>{}",
        thought="<|channel|>analysis<|message|>I think.<|end|>"
                "<|start|>assistant<|channel|>final<|message|>{}",
        call='<|channel|>analysis<|message|>I add.<|end|><|start|>assistant<|channel|>commentary '
             'to=functions.add <|constrain|>json<|message|>{"a": 40, "b": 2}',
        tokens=("<|channel|>", "<|message|>", "<|constrain|>", "<|start|>", "<|end|>"),
    ),
    Family(
        "GLM-4.5", TRL / "glm4moe.jinja", stop="<|user|>", call_stop="<|observation|>",
        answer="\n<think></think>\n{}", thought="\n<think>I think.</think>\n{}",
        call=f"\n<think></think>{GLM}",
        tokens=(*THINK, *TOOL_CALL, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    ),
    Family("Phi-3.5", TRL / "phi3_5.jinja", stop="<|end|>"),
    Family(
        "DeepSeek-R1 distilled", TRL / "deepseek_r1_distill.jinja", stop="<\uff5cend▁of▁sentence\uff5c>",
        answer="Hm.\n</think>\n\n{}", thought="I think.\n</think>\n\n{}", call=f"Hm.\n</think>\n\n{HERMES}",
        tokens=THINK,
    ),
    Family("ChatML with tools", OWN / "chatml_tools.jinja"),
]  # fmt: skip


@functools.cache
def tokenizer_of(number: int) -> Any:
    """A byte-level BPE tokenizer with the family's template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    family = FAMILIES[number]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<s>", "<pad>", *family.stops]
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    texts = [family.template, family.call, family.thought, "a question and an answer, once more " * 9]
    tokenizer.train_from_iterator(texts, trainer)
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", pad_token="<pad>", eos_token=family.stop,
        additional_special_tokens=family.stops, chat_template=family.template,
        clean_up_tokenization_spaces=False,
    )  # fmt: skip
    made.add_tokens([AddedToken(token, normalized=False, special=False) for token in family.tokens])
    return made


class TemplateEngine:
    """Gives these replies one after the other, in tokens that the tokenizer would not choose."""

    tokens_in_flight = 0

    def __init__(self, number: int, replies: Sequence[str]) -> None:
        self.tokenizer = tokenizer_of(number)
        self.tokens = [*self.tokenizer.all_special_tokens, *FAMILIES[number].tokens]
        self.replies: Iterator[str] = iter(replies)
        self.calls: list[tuple[list[int], list[int]]] = []
        """(prompt, completion) of every call."""

    async def generate(
        self, model: str, prompt: EncodedPrompt, n: int, sampling: Sampling, version: int
    ) -> list[Call]:
        ids = self.unusual_ids(next(self.replies))
        context = list(prompt.token_ids)
        self.calls.append((context, ids))
        logprobs = [-1.0] * len(ids)
        return [Call(prompt_token_ids=context, completion_token_ids=ids, sampling_logprobs=logprobs)]

    def unusual_ids(self, text: str) -> list[int]:
        """One token a byte, without the tokenizer's merges; special tokens as they are."""
        special = "|".join(map(re.escape, self.tokens))
        parts = re.split(f"({special})", text)  # each second one is a special token
        pieces = [piece for i, part in enumerate(parts) for piece in ([part] if i % 2 else part)]
        return [i for piece in pieces for i in self.tokenizer.encode(piece, add_special_tokens=False)]


def server_of(number: int, config: TrainConfig, folder: Path) -> OpenAIServer:
    """An OpenAI server whose templates run in this process."""
    family, tokenizer = FAMILIES[number], tokenizer_of(number)
    stop_ids = [tokenizer.convert_tokens_to_ids(s) for s in family.stops]
    return OpenAIServer(
        config=config,
        renderer=Renderer(functools.partial(run_jobs, tokenizer, family.stops), folder),
        stop_token_ids=tuple(stop_ids),
        stops=family.stops,
        tool_format=tool_format(family.template),
        socket_path=folder / "openai.sock",
    )
