"""GSM8K with a calculator tool: the model may compute expressions before it answers."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from typing import Any

from skylite.environments.chat import Chat, LimitReached, Task
from skylite.rewards.gsm8k import MARK, final_number

TURNS = 6
OPERATORS: dict[type[Any], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
LARGEST = 10**12


def calculate(expression: str) -> float:
    """Compute an expression of numbers with + - * / and parentheses, such as (3 + 4) * 2."""
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError):
        raise ValueError(f"{expression[:100]!r} is no expression") from None
    return int(value) if float(value).is_integer() else round(float(value), 6)


def _value(node: ast.AST) -> float:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            value: float = number
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            value = -_value(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            value = OPERATORS[type(op)](_value(left), _value(right))
        case _:
            raise ValueError("only numbers, + - * / and parentheses are allowed")
    if abs(value) > LARGEST:
        raise ValueError(f"a number is over {LARGEST}")
    return value


async def episode(task: Task, chat: Chat) -> dict[str, float]:
    """Components: right (1 or 0, by the rule of the reward gsm8k), and calls, the number of calculations."""
    messages, calls = list(task.messages), 0
    try:
        for _ in range(TURNS):
            reply = await chat(messages, tools=[calculate])
            if not reply.tool_calls:
                found = final_number(reply.text)
                right = found is not None and found == final_number(f"{MARK} {task.answer}")
                return {"right": float(right), "calls": float(calls)}
            calls += len(reply.tool_calls)
            messages += [reply.message, *reply.run_tools([calculate])]
    except LimitReached:
        pass
    return {"right": 0.0, "calls": float(calls)}
