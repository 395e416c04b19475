"""GSM8K for the environment `calculator`: the rows of gsm8k, with a system text that teaches the tool.

The system text names the tool, because some chat templates (SmolLM2's) show no tools. Worked examples have
user and assistant turns only, so a result of the tool is a user turn there.
"""

from __future__ import annotations

from dataclasses import replace

from skylite.data.data_prep_file import load_dataset
from skylite.data.raw_rows import Row
from skylite.types import Message, Prompt

GSM8K = load_dataset("gsm8k")
NAME = "gsm8k-calculator"
REWARD = GSM8K.reward
CALL = '<tool_call>\n{"name": "calculate", "arguments": {"expression": "3 * 6 + 2"}}\n</tool_call>'
SYSTEM = (
    "Solve the problem. The tool calculate computes an expression. Call it like this:\n"
    f"{CALL}\n"
    "At the end write #### and the answer."
)
FEW_SHOT: list[Message] = [
    {"role": "user", "content": "Ella has 3 bags of 6 limes and 2 more limes. How many limes is that?"},
    {"role": "assistant", "content": CALL},
    {"role": "user", "content": "20"},
    {"role": "assistant", "content": "#### 20"},
]
load_rows = GSM8K.load_rows
synthetic_rows = GSM8K.synthetic_rows


def to_prompt(row: Row, prompt_id: str) -> Prompt:
    """The prompt of gsm8k with this file's system text and example."""
    prompt = GSM8K.to_prompt(row, prompt_id)
    messages: list[Message] = [{"role": "system", "content": SYSTEM}, *FEW_SHOT, prompt.messages[-1]]
    return replace(prompt, messages=messages, source=NAME)


def reference(row: Row) -> str:
    """The worked answer of the data set."""
    return row.text("answer")
