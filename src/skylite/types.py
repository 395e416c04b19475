"""The data of a run: prompts, calls, trajectories and groups.

Parent and trainer import it, so it must not import torch.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import sha256
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from typing_extensions import TypedDict  # pydantic takes typing's own from Python 3.12 on

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]

End = Literal["stop", "turns", "tokens", "time"]
"""How a trajectory ended: by itself, or at env.max_turns, env.max_tokens or env.timeout_s."""
FLOAT32_MAX = 3.4028234663852886e38


def is_number(score: float) -> bool:
    """Whether the score is finite as a float32, the trainer's dtype."""
    return abs(score) <= FLOAT32_MAX


class Message(TypedDict):
    """One chat message."""

    role: Literal["system", "user", "assistant"]
    content: str
    """In a prompt with images, IMAGE in the text is the place of an image."""


IMAGE = "<image>"
"""As verl marks it. Plain text in a prompt without images."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One row of a prepared parquet file."""

    id: str
    """Unique in its data set, e.g. "gsm8k/train/17". Metrics and errors show it."""
    messages: list[Message]
    """System text, few-shot examples as user/assistant pairs, and the question as the last user message."""
    answer: str
    """Reference answer in the form that the reward expects. `skylite prepare` checks that it scores 1.0.

    Empty in data without reference answers.
    """
    source: str
    """Data set name, e.g. "gsm8k" or "gsm8k-synthetic"."""
    difficulty: int = 0
    """Number of reasoning steps; 0: unknown."""
    extra: dict[str, Any] = field(default_factory=dict)
    """The data's other columns, which a reward function can ask for by name. JSON in the file."""
    images: tuple[bytes, ...] = ()
    """PNG, JPEG or WebP files in RGB, in the order of IMAGE in the messages (data/images.py)."""


@dataclass(frozen=True, slots=True)
class ImageTokens:
    """An image among the tokens of a prompt."""

    start: int
    """Its first token. All of them have the same id, which the model replaces by the image's features."""
    length: int
    data: bytes
    """The file. The examples of a group share the object."""

    @property
    def key(self) -> int:
        """A negative number, equal for equal files only."""
        return _image_key(self.data)


@lru_cache(maxsize=512)  # those of a step, because an entry holds the file
def _image_key(data: bytes) -> int:
    return -1 - int.from_bytes(sha256(data).digest()[:7], "big")


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """A prompt as an engine reads it."""

    token_ids: Sequence[int]
    images: tuple[ImageTokens, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of the engine. The token ids are the engine's; text is never tokenized again."""

    prompt_token_ids: list[int]
    """[P] the engine's input."""
    completion_token_ids: list[int]
    """[C] the sampled tokens, including the end-of-turn token if it was sampled."""
    sampling_logprobs: list[float]
    """[C] in nats, under the sampling policy at the sampling temperature. Empty: a file held the tokens."""
    finish_reason: Literal["stop", "length"] = "stop"
    adapter_version: int = 0
    text: str = ""
    """The completion as text. Empty in the trainer, which only reads token ids."""
    observed: str = ""
    """What an episode told the model since its last reply: each message as a line `role: text`."""
    images: tuple[ImageTokens, ...] = ()
    """Of the prompt."""
    teacher_prompt_token_ids: list[int] = field(default_factory=list)
    """What a teacher reads in place of the prompt. Empty: it has no prompt of its own."""
    teacher_logprobs: list[float] = field(default_factory=list)
    """[C] in nats, of a teacher on a server. Empty: none scored the tokens."""
    teacher_top_ids: array[int] = field(default_factory=lambda: array("i"))
    """[C * K] the tokens that it finds most likely in place of each one, the best first. Empty: not asked."""
    teacher_top_logprobs: array[float] = field(default_factory=lambda: array("f"))
    """[C * K] in nats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """The calls of one episode, in the order of its turns, and their reward. One turn is one call."""

    calls: tuple[Call, ...]
    """At least one. The prompt of a later call may contain tokens of an earlier call."""
    reward: float
    """The weighted sum of `components`. May be NaN or infinite: trainer/anomaly.py handles that."""
    components: Mapping[str, float] = field(default_factory=dict)
    """Reward function name -> unweighted score, in the order of reward.functions."""
    penalty: float = 0.0
    """At most 0. Part of the training reward, but not of any reported score."""
    turn_rewards: tuple[float, ...] = ()
    """One for each call; their sum is `reward`. Empty if the episode gave a single reward."""
    feedback: str = ""
    """What the reward functions or the environment said about it."""
    end: End = "stop"

    @property
    def first_score(self) -> float:
        """The first reward function's own score, 1.0 for a right answer. Accuracies are means of it."""
        return next(iter(self.components.values()), self.reward)

    @property
    def train_reward(self) -> float:
        """The reward that the trainer uses."""
        return self.reward + self.penalty

    @property
    def call_rewards(self) -> tuple[float, ...]:
        """What the last token of each call earned, with the penalty in the last one."""
        turns = self.turn_rewards or (*[0.0] * (len(self.calls) - 1), self.reward)
        return (*turns[:-1], turns[-1] + self.penalty)

    @property
    def num_tokens(self) -> int:
        """Sampled tokens of all calls."""
        return sum(len(s.completion_token_ids) for s in self.calls)

    @property
    def text(self) -> str:
        """All that was said, see `transcript`."""
        return self._transcript(self.turn_rewards)

    @property
    def text_without_rewards(self) -> str:
        """The same without the rewards of turns."""
        return self._transcript(())

    def _transcript(self, turn_rewards: Sequence[float]) -> str:
        return transcript([s.text for s in self.calls], [s.observed for s in self.calls], turn_rewards)

    @property
    def is_truncated(self) -> bool:
        """Whether a limit ended the last call or the episode."""
        return self.end != "stop" or self.calls[-1].finish_reason == "length"


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The `group_size` trajectories of one prompt. Advantages compare them with each other."""

    prompt: Prompt
    trajectories: tuple[Trajectory, ...]
    """[G]"""

    @property
    def is_zero_std(self) -> bool:
        """Whether all rewards are equal as float32, the trainer's dtype. Such a group has no gradient.

        False if a reward is not finite: the group must reach the anomaly rules instead of being resampled.
        """
        rewards = [t.train_reward for t in self.trajectories]
        return all(map(is_number, rewards)) and len(set(array("f", rewards))) == 1


TEACHER_LOGPROBS = "teacher_logprobs"
"""Among the extras of an example: float32 logprobs of a teacher on a server, 0 for context."""
TEACHER_TOP_IDS, TEACHER_TOP_LOGPROBS = "teacher_top_ids", "teacher_top_logprobs"
"""The same: [C, K] the K tokens that it finds most likely in place of each scored one, int32 and float32."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainingExample:
    """What the trainer learns from: the tokens of one call, or of a prepared chat or reply.

    Calls of one trajectory and trajectories of one group stand together; of a pair, the chosen reply is
    trajectory 0 and the rejected one trajectory 1.
    """

    token_ids: IntArray
    """[L] what the model reads, and what it is trained to write."""
    weights: FloatArray
    """[L] factor on the token's loss. 0: context. The first token has no context, so its weight is 0."""
    sampling_logprobs: FloatArray | None = None
    """[L] of the sampling policy; 0 for context. None: not sampled."""
    advantages: FloatArray | None = None
    """[L] if the source knows them; None: the algorithm computes them from the rewards."""
    group: int
    trajectory: int = 0
    turn: int = 0
    reward: float = 0.0
    """What the call's last token earned. The sum over a trajectory's calls is its reward."""
    components: Mapping[str, float] = field(default_factory=dict)
    """Of the trajectory's reward: name -> unweighted score. Equal in all of its calls."""
    is_truncated: bool = False
    """Whether a limit ended the trajectory."""
    version: int = 0
    """The policy's version that sampled it."""
    prompt_id: str = ""
    """Shown in errors and metrics."""
    teacher_prompt: IntArray | None = None
    """What a teacher reads before the completion, in place of the context. None: nothing of its own."""
    extras: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)
    """Other values of the tokens [L], such as TEACHER_LOGPROBS, or of the scored ones [C]."""
    images: tuple[ImageTokens, ...] = ()
    """Of the context."""

    @property
    def keys(self) -> IntArray:
        """[L] equal where the model reads the same: the token ids, and for tokens of an image its key."""
        if not self.images:
            return self.token_ids
        keys = self.token_ids.copy()
        for image in self.images:
            keys[image.start : image.start + image.length] = image.key
        return keys

    @property
    def scored(self) -> IntArray:
        """[C] places of the tokens with a weight."""
        return np.flatnonzero(self.weights)


def completion_example(
    prompt: Sequence[int],
    completion: Sequence[int],
    group: int = 0,
    trajectory: int = 0,
    images: tuple[ImageTokens, ...] = (),
) -> TrainingExample:
    """A completion that the trainer scores, such as one of the canary's."""
    return TrainingExample(
        token_ids=np.array([*prompt, *completion], dtype=np.int64),
        weights=np.repeat(np.array([0, 1], dtype=np.float32), [len(prompt), len(completion)]),
        group=group,
        trajectory=trajectory,
        images=images,
    )


@dataclass(frozen=True, slots=True)
class Score:
    """What a completion or an episode earned."""

    reward: float
    """The weighted sum of `components`; may be NaN or infinite."""
    components: Mapping[str, float] = field(default_factory=dict)
    """Reward function name -> unweighted score, in the order of reward.functions."""
    turns: tuple[float, ...] = ()
    """What each turn of an episode earned, if it said so."""
    feedback: str = ""
    """What the reward functions or the environment said about it."""


def transcript(turns: Sequence[str], observed: Sequence[str] = (), turn_rewards: Sequence[float] = ()) -> str:
    """The replies of a trajectory in order, with what the environment told the model between them.

    One reply stays as it is. `observed`, `turn_rewards`: one for each turn, or none.
    """
    if len(turns) == 1:
        return turns[0]
    lines = []
    for k, reply in enumerate(turns):
        if k and k < len(observed) and observed[k]:
            lines.append(observed[k])
        reward = f", reward {turn_rewards[k]:g}" if turn_rewards else ""
        lines.append(f"[turn {k + 1}{reward}] {reply}")
    return "\n".join(lines)
