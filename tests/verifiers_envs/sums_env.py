"""A small environment of verifiers, as its documentation writes one: sums, with a tool on request."""

# mypy: disable-error-code="misc, untyped-decorator"

from __future__ import annotations

import itertools
from collections.abc import Iterator

import verifiers.v1 as vf


class SumData(vf.TaskData):
    """A sum."""

    answer: str


class SumTaskConfig(vf.TaskConfig):
    """Its settings."""

    fails: bool = False
    """Scoring raises."""
    tool: bool = False
    """Offer the tool `add`."""
    tools: vf.ToolsetConfig = vf.ToolsetConfig()


class SumTools(vf.Toolset[vf.ToolsetConfig]):
    """A server of one tool."""

    TOOL_PREFIX = "sums"

    @vf.tool
    def add(self, a: int, b: int) -> str:
        """Add two numbers."""
        return f"the sum is {a + b}"


class SumTask(vf.Task[SumData, vf.State, SumTaskConfig]):
    """Right answers, and short ones."""

    @classmethod
    def toolsets(cls, config: SumTaskConfig) -> list[vf.Toolset]:
        return [SumTools(config.tools)] if config.tool else []

    @vf.reward(weight=1.0)
    async def right(self, trace: vf.Trace) -> float:
        if self.config.fails:
            raise KeyError("no such answer")
        return float(self.data.answer in _last_reply(trace))

    @vf.reward(weight=0.25)
    async def short(self, trace: vf.Trace) -> float:
        return float(len(_last_reply(trace)) < 20)

    @vf.metric
    async def letters(self, trace: vf.Trace) -> float:
        return float(len(_last_reply(trace)))


class SumConfig(vf.TasksetConfig):
    """How many tasks."""

    tasks: int | None = 12
    """None: without end."""
    chat: bool = False
    """Prompts begin with a worked example."""
    task: SumTaskConfig = SumTaskConfig()


class SumTaskset(vf.Taskset[SumTask, SumConfig]):
    """0 + 1, 1 + 2, ..."""

    @property
    def bounded(self) -> bool:
        return self.config.tasks is not None

    def load(self) -> Iterator[SumTask]:
        for a in itertools.islice(itertools.count(), self.config.tasks):
            question = f"What is {a} + {a + 1}?"
            example = [vf.UserMessage(content="What is 1 + 1?"), vf.AssistantMessage(content="2")]
            data = SumData(
                name=f"sum-{a}",
                prompt=[*example, vf.UserMessage(content=question)] if self.config.chat else question,
                system_prompt="Add.",
                answer=str(2 * a + 1),
            )
            yield SumTask(data, self.config.task)


def _last_reply(trace: vf.Trace) -> str:
    replies = [m.content for m in trace.branches[-1].messages if m.role == "assistant"]
    return replies[-1] or ""


__all__ = ["SumTaskset"]

if __name__ == "__main__":
    SumTools.run()
