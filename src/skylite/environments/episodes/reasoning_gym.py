"""A reasoning-gym task with three tries. After a wrong answer the model hears so and answers again.

Columns of the data, as `skylite prepare reasoning-gym:TASK` writes them: task, entry.
"""

from __future__ import annotations

from skylite.environments.chat import Chat, LimitReached, Task
from skylite.rewards.reasoning_gym import close_sandboxes, reasoning_gym

TRIES = 3
WRONG = "That is wrong. Try again. Give the final answer between <answer> and </answer>."


async def episode(task: Task, chat: Chat) -> dict[str, float]:
    """Components: score of the last answer by the task's scorer, and first (1 or 0)."""
    messages, score = list(task.messages), 0.0
    try:
        for number in range(TRIES):
            reply = await chat(messages)
            columns = task.columns
            score = reasoning_gym(
                reply.text, task=columns["task"], entry=columns["entry"], answer=task.answer
            )
            if score == 1.0:
                return {"score": score, "first": float(number == 0)}
            messages += [reply.message, {"role": "user", "content": WRONG}]
    except LimitReached:
        pass
    finally:
        close_sandboxes()
    return {"score": score, "first": 0.0}
