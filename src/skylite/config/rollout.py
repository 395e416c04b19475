"""Settings of prompts, sampling and rewards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, Self

from pydantic import Field, StrictBool, StrictFloat, StrictInt, StrictStr, field_validator, model_validator

from skylite.config.base_section import MORE, UPDATE, WHAT, Flag, Section
from skylite.config.check_regex import check_regex
from skylite.config.judge import JUDGE, JudgeConfig

TemplateValue = StrictBool | StrictInt | StrictFloat | StrictStr
TEMPLATE_INPUTS = (
    "add_generation_prompt", "chat_template", "continue_final_message", "conversation", "documents",
    "max_length", "messages", "padding", "return_assistant_tokens_mask", "return_dict", "return_tensors",
    "tokenize", "tokenizer_kwargs", "tools", "truncation",
)  # fmt: skip
"""Arguments of transformers' apply_chat_template that skylite sets."""


class DataConfig(Section):
    """The prompts."""

    path: Annotated[str, Flag("--data", WHAT, is_path=True)] = "data/gsm8k"
    """Folder written by `skylite prepare`, with train.parquet, validation.parquet and test.parquet."""
    difficulty: list[int] = []
    """Train and evaluate only on prompts of these difficulties (reasoning steps). Empty: all. In a recipe it
    counts for the recipe's own data set only."""
    mix: dict[str, Annotated[float, Field(gt=0)]] = {}
    """More prepared folders, each with the weight of its prompts in a step; those of data.path have weight 1.
    Evaluations use data.path alone. A data set whose prompts are used up or retired leaves its share to the
    others."""
    sampling: Literal["shuffled", "pass_rate"] = "shuffled"
    """shuffled: each prompt once before any comes again. pass_rate: at random, by p (1 - p), where p is the
    share of a prompt's completions that solved it. Earlier completions count half at each visit, and one
    right and one wrong are added, so a new prompt has p = 0.5."""
    retire_after: int = Field(0, ge=0)
    """A prompt whose completions all solved it in this many visits in a row is not sampled again. The run
    ends when fewer prompts are left than a step takes. 0: none retires."""
    solved_at: float = 1.0
    """The first reward's score from which a completion counts as solved, for retire_after and pass_rate."""
    filter_overlong_prompts: bool = False
    """Leave out prompts over rollout.max_prompt_tokens, and print their number. false: refuse them."""
    chat_template: Annotated[
        str | None, Flag("--chat-template", MORE, default="the model's", is_path=True)
    ] = None
    """File with a chat template (Jinja) for the prompts. none: the model's own."""
    template_args: Annotated[
        dict[str, TemplateValue], Flag("--template-arg", MORE, default="no arguments")
    ] = {}
    """Arguments of the chat template, such as enable_thinking=false for Qwen3."""

    @property
    def uses_history(self) -> bool:
        """Whether the prompts of a step depend on earlier steps (data/prompt_history.py)."""
        return bool(self.mix or self.retire_after) or self.sampling != "shuffled"

    @model_validator(mode="after")
    def check_mix(self) -> Self:
        if self.path in self.mix:
            raise ValueError(
                f"data.mix names data.path={self.path}, whose weight is 1; weigh the others by it."
            )
        return self

    @field_validator("template_args")
    @classmethod
    def check_template_args(cls, value: dict[str, TemplateValue]) -> dict[str, TemplateValue]:
        for name in value:
            if not name.isidentifier() or name in TEMPLATE_INPUTS:
                reason = "skylite sets it" if name in TEMPLATE_INPUTS else "it is no name"
                raise ValueError(f"{name!r} cannot be an argument of the chat template: {reason}.")
        return value


class RolloutConfig(Section):
    """Sampling from the engine."""

    prompts_per_step: int = Field(8, ge=1)
    """Distinct prompts per step."""
    group_size: Annotated[int, Flag("--group-size", UPDATE)] = Field(8, ge=1)
    """Completions per prompt. Most algorithms compare completions within a group, which needs at least 2."""
    temperature: float = Field(1.0, gt=0, le=5)
    """Sampling temperature. The trainer divides its logits by the same value."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus sampling. 1: off. Below 1 the gradient is biased: no weight corrects for tokens that are never
    sampled."""
    top_k: int = Field(0, ge=0)
    """Sample from the k likeliest tokens only. 0: all tokens. Biased as top_p is."""
    max_prompt_tokens: int = Field(1024, ge=1)
    """Longest prompt in tokens. A run with longer ones does not start, unless data.filter_overlong_prompts
    leaves them out."""
    max_completion_tokens: int = Field(256, ge=1)
    """Longest completion in tokens. A completion that reaches it counts as truncated."""
    stop: list[Annotated[str, Field(min_length=1)]] = []
    """Texts that end a completion, such as ["</answer>"]. The text stays in the completion, which counts as
    finished, not as truncated."""
    max_staleness: int = Field(0, ge=0, le=8)
    """0: on-policy; sampling and training take turns. 1: sample step k + 1 while step k trains, from an
    adapter one version older. 2 to 8: engines never wait for the slowest group; a step trains on the groups
    that are finished first, at most this many versions old. Use it if trainer and engine do not share their
    cores or GPU."""


class RewardParameters(Section):
    """Settings of the built-in rewards. Prepared data may hold them, beside the name of its reward."""

    answer_pattern: str | None = None
    """Regex that finds the answer for exact_match and format: the last group of its last match. none:
    exact_match compares the full completion, and format wants a number after `####`."""
    compare: Literal["text", "number", "math"] = "text"
    """How exact_match compares. text: equal up to white space. number: equal as numbers (1,080.0 = 1080).
    math: equal as formulas (math-verify)."""
    ignore_case: bool = False
    """exact_match with compare=text ignores upper and lower case."""
    pattern: str | None = None
    """Regex for the reward regex, which gives 1.0 if it matches anywhere in the completion."""
    min_length: int = Field(0, ge=0)
    """For the reward length, in characters. A shorter completion gets its share of this length."""
    max_length: int | None = Field(None, ge=1)
    """For the reward length, in characters. Above it the reward falls to 0.0 at twice this length. none: no
    limit."""

    @field_validator("answer_pattern", "pattern")
    @classmethod
    def check_pattern(cls, value: str | None) -> str | None:
        if value is not None:
            check_regex(value)
        return value

    @model_validator(mode="after")
    def check_lengths(self) -> Self:
        if self.max_length is not None and self.max_length < self.min_length:
            raise ValueError(
                f"reward.max_length={self.max_length} is under reward.min_length={self.min_length}; "
                "no completion would get 1.0."
            )
        return self


METRIC = "metric/"
"""Prefix of components that are shown only."""
GREEDY = f"{METRIC}greedy"
"""The component with the reward of the prompt's greedy completion, for ReMax."""


def weight_of(component: str, weights: Mapping[str, float]) -> float:
    """The weight of a component in the reward; without one of its own, 1, or 0 if it is shown only."""
    return weights.get(component, 0.0 if component.startswith(METRIC) else 1.0)


class RewardConfig(RewardParameters):
    """Scoring completions."""

    functions: Annotated[list[str], Flag("--reward", WHAT, default="the data's")] = []
    """gsm8k, math, countdown, exact_match, regex, format, length, reasoning-gym, judge, none, or your own as
    FILE.py:function. The reward is their weighted sum. The first one decides what counts as right. Empty: the
    reward chosen at `skylite prepare`, with the settings given there."""
    weights: list[float] | dict[str, float] = []
    """Weight of each function, or weights by name of the components: those that a function returns as a dict,
    or functions. A name that is not here counts 1, and one that begins with metric/ counts 0. A weight may be
    negative."""
    prefill: str = ""
    """Text put before each completion that the rewards get, such as "<think>\\n" where the chat template
    opens this tag at the end of the prompt. Without it the rewards see only what the model sampled."""
    num_workers: int = Field(1, ge=1)
    """Processes that compute rewards. Raise it if the reward is slow."""
    timeout_s: float = Field(600.0, gt=0)
    """Seconds to score the group of a prompt, waiting for a free worker included. A reward that takes longer
    ends the run. The judge has limits of its own."""
    judge: JudgeConfig = JudgeConfig()

    @property
    def code(self) -> RewardConfig:
        """The settings of the functions that are code: without the judge."""
        if JUDGE not in self.functions:
            return self
        place = self.functions.index(JUDGE)
        functions = [*self.functions[:place], *self.functions[place + 1 :]]
        weights = self.weights
        if isinstance(weights, list):
            weights = [*weights[:place], *weights[place + 1 :]]
        return self.model_copy(update={"functions": functions, "weights": weights})

    @model_validator(mode="after")
    def check_judge(self) -> Self:
        if JUDGE in self.functions[1:-1]:
            raise ValueError(
                "reward.functions has the judge between others; name it last, or first, where it decides "
                "what is right."
            )
        if JUDGE in self.functions and not self.judge.url:
            raise ValueError(
                "reward.functions names the judge, and reward.judge.url does not say where it is; give an "
                "OpenAI-compatible URL, or base for the run's own base."
            )
        return self

    @model_validator(mode="after")
    def check_weights(self) -> Self:
        twice = sorted({spec for spec in self.functions if self.functions.count(spec) > 1})
        if twice:
            raise ValueError(
                f"reward.functions names {twice[0]} twice; name it once, with the sum of its weights."
            )
        if isinstance(self.weights, list) and self.weights and len(self.weights) != len(self.functions):
            raise ValueError(
                f"reward.weights has {len(self.weights)} numbers for the {len(self.functions)} names in "
                "reward.functions; give one for each, or none at all."
            )
        return self


class EnvConfig(Section):
    """Episodes of several turns. Without `episode`, a trajectory is one completion."""

    episode: Annotated[str, Flag("--env", WHAT, default="one turn")] = ""
    """Episodes of several turns: guess, calculator, reasoning-gym, FILE.py:function,
    `command:PROGRAM ARGUMENTS` or `verifiers:NAME`. Empty: one turn, scored by reward.functions."""
    max_turns: int = Field(16, ge=1)
    """Calls of the model in one trajectory. A further call ends it."""
    max_tokens: int = Field(4096, ge=2)
    """Longest sequence of a call: prompt and reply. A longer prompt ends the trajectory."""
    timeout_s: float = Field(600.0, gt=0)
    """Seconds for an episode. Then its processes are killed, and the trajectory ends."""
    limit_reward: float | dict[str, float] = 0.0
    """Reward of a trajectory that a limit ended before its episode returned one: a number, or named
    components as the episode returns them."""
    on_error: Literal["stop", "drop"] = "stop"
    """If an episode raises: stop the run, or leave its group out of the step and count it."""
    max_concurrent: int = Field(64, ge=1)
    """Episodes that run at the same time, each in its own process."""
    history: Literal["sampled", "template"] = "sampled"
    """sampled: a later call's prompt keeps the tokens that were sampled. template: the chat template writes
    the history again, as a plain server would, which may drop reasoning; such calls share fewer tokens."""
    tool_format: Literal["auto", "hermes", "qwen-xml", "glm", "mistral", "llama", "gemma", "harmony"] = "auto"
    """How the model writes tool calls. auto: what its chat template shows."""
    weights: dict[str, float] = {}
    """Weight of each named component that an episode returns. Names that are not here count 1, and those that
    begin with metric/ count 0."""

    def check_fits(self, max_prompt_tokens: int, overlong_buffer_frac: float) -> None:
        """Raise ValueError if other settings do not go with an environment."""
        if not self.episode:
            return
        if overlong_buffer_frac > 0:
            raise ValueError(
                f"algorithm.overlong_buffer_frac={overlong_buffer_frac:g} punishes a long completion, and an "
                "episode has several (env.episode); set algorithm.overlong_buffer_frac=0 and let the "
                "episode's reward punish length."
            )
        if self.max_tokens <= max_prompt_tokens:
            raise ValueError(
                f"env.max_tokens={self.max_tokens} leaves no room for a reply to a prompt of "
                f"rollout.max_prompt_tokens={max_prompt_tokens} tokens; raise env.max_tokens."
            )
