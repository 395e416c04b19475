"""Settings of a reward that asks a model."""

from __future__ import annotations

from typing import Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, StrictBool, StrictFloat, StrictInt, StrictStr, model_validator

from skylite.config.base_section import Section

JUDGE = "judge"
"""The judge among reward.functions, and the name of its component."""
EPISODE = "episode"
"""Component of an episode's own reward, if that is a number and a judge adds another one."""
BASE = "base"
"""reward.judge.url for the run's own base, on the run's own engine."""
OTHER_TOKENS = 1024
"""Tokens of the rubric, the reference answer and the judge's instructions; generous."""
DEFAULT_RUBRIC = "Is the completion right, complete and clear as a reply to the task?"


def is_server(url: str) -> bool:
    """Whether it is the address of a server, without a secret in it."""
    parts = urlsplit(url)
    return bool(
        parts.scheme in ("http", "https") and parts.hostname and not parts.username and not parts.query
    )


class JudgeConfig(Section):
    """The reward `judge`, which asks a model."""

    url: str = ""
    """Where the judge is: an OpenAI-compatible URL such as https://api.openai.com/v1, or base for the run's
    own base on the run's own engine. Empty: no judge."""
    model: str = ""
    """The judge's name in requests. Empty with url=base."""
    api_key_env: str = ""
    """Environment variable with the judge's API key. Empty: it asks for none."""
    rubric: str = Field(DEFAULT_RUBRIC, min_length=1)
    """What the judge looks for."""
    rubric_column: str = ""
    """Column of the data with the rubric of each row, instead of `rubric`. Empty: all rows have `rubric`."""
    compare: Literal["score", "group", "pairs"] = "score"
    """score: a question about each completion. group: one question about all completions of a prompt, which
    the judge compares. pairs: a question about each pair; a completion gets the share of pairs that it wins,
    a tie counts half."""
    max_points: int = Field(10, ge=1, le=100)
    """The judge gives 0 to this many points; the reward is their share, 0 to 1."""
    votes: int = Field(1, ge=1, le=16)
    """How often each question is asked; the reward is the mean. Comparisons get another order each time."""
    retries: int = Field(2, ge=0)
    """How often the judge is reminded of the form of its reply if that has no points."""
    on_unparsed: Literal["stop", "drop"] = "stop"
    """If its last reply has no points either: stop the run, or leave the prompt's group out of the step and
    count it."""
    temperature: float = Field(0.0, ge=0, le=2)
    """Sampling temperature of the judge."""
    max_tokens: int = Field(512, ge=16)
    """Longest reply of the judge, in tokens."""
    extra_body: dict[str, StrictBool | StrictInt | StrictFloat | StrictStr] = {}
    """More fields of each request, such as reasoning_effort="low". With max_completion_tokens among them,
    max_tokens is not sent."""
    max_concurrent: int = Field(16, ge=1, le=256)
    """Requests in flight at once."""
    requests_per_minute: float = Field(0.0, ge=0)
    """Most requests that begin in a minute, evenly spaced. 0: no limit."""
    timeout_s: float = Field(120.0, gt=0)
    """Seconds for one reply."""
    patience_s: float = Field(300.0, ge=0)
    """How many seconds a request is repeated after HTTP 429, 5xx or a lost connection. After that the run
    ends; --resume continues it."""

    @model_validator(mode="after")
    def check_judge(self) -> Self:
        if self.url in ("", BASE):
            if self.url and (self.model or self.api_key_env or self.extra_body):
                raise ValueError(
                    "reward.judge.url=base asks the run's own base, which has no other name, key or fields; "
                    "leave out reward.judge.model, api_key_env and extra_body."
                )
            return self._check_votes()
        if not is_server(self.url):
            raise ValueError(
                f"reward.judge.url={self.url} is not the address of a judge; write it like "
                "https://api.openai.com/v1 (a key belongs into the variable of reward.judge.api_key_env), or "
                "base for the run's own base."
            )
        if not self.model:
            raise ValueError(f"reward.judge.url={self.url} needs reward.judge.model, the judge's name there.")
        return self._check_votes()

    def _check_votes(self) -> Self:
        if self.votes > 1 and self.compare == "score" and not self.temperature:
            raise ValueError(
                f"reward.judge.votes={self.votes} with reward.judge.temperature=0 asks for the same reply "
                "again; set a temperature such as 0.7, or votes=1."
            )
        return self

    @property
    def api_root(self) -> str:
        """The URL below which the routes are, with /v1 if the user gave a host alone."""
        root = self.url.rstrip("/")
        return root if urlsplit(root).path else f"{root}/v1"

    @property
    def name(self) -> str:
        """The judge in messages."""
        return "the run's base" if self.url == BASE else f"{self.model} at {self.url}"

    def question_tokens(self, prompt_tokens: int, completion_tokens: int, group_size: int) -> int:
        """Longest sequence of a question to the run's own base, with a reminder and its reply, in tokens."""
        shown = {"score": 1, "pairs": 2, "group": group_size}[self.compare]
        return prompt_tokens + shown * completion_tokens + OTHER_TOKENS + 2 * self.max_tokens
