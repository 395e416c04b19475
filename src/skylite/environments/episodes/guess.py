"""Guess a number in four turns. After each guess the model reads "higher" or "lower".

Columns of the data: low, high. The answer is the number.
"""

from __future__ import annotations

import re

from skylite.environments.chat import Chat, Task

GUESSES = 4


async def episode(task: Task, chat: Chat) -> dict[str, float]:
    """Components: found (1 or 0), and consistent, the share of guesses that the hints leave possible."""
    low, high, secret = int(task.columns["low"]), int(task.columns["high"]), int(task.answer)
    messages, consistent = list(task.messages), []
    for _ in range(GUESSES):
        reply = await chat(messages)
        guess = read_guess(reply.text)
        consistent.append(guess is not None and low <= guess <= high)
        if guess == secret:
            return {"found": 1.0, "consistent": sum(consistent) / len(consistent)}
        if guess is None:
            hint = f"Answer with a number from {task.columns['low']} to {task.columns['high']}."
        elif guess < secret:
            low, hint = max(low, guess + 1), "higher"
        else:
            high, hint = min(high, guess - 1), "lower"
        messages += [reply.message, {"role": "user", "content": hint}]
    return {"found": 0.0, "consistent": sum(consistent) / len(consistent)}


def read_guess(text: str) -> int | None:
    """The first number of the reply; None without one."""
    found = re.search(r"\d{1,9}", text)
    return None if found is None else int(found[0])
