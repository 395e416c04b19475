"""An engine that answers with given texts, to try an episode without a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from skylite.engine.interface import Sampling
from skylite.types import Call, EncodedPrompt


@dataclass(slots=True)
class ScriptedEngine:
    """Chooses a reply by the request's seed, so the same episode gets the same replies."""

    replies: Sequence[Sequence[int]]
    """Token ids of each reply, without the end-of-turn token."""
    stop_token_id: int
    tokens_in_flight: int = 0

    async def generate(
        self, model: str, prompt: EncodedPrompt, n: int, sampling: Sampling, version: int
    ) -> list[Call]:
        """`n` equal completions; a long reply is cut at the limit."""
        ids = [*self.replies[sampling.seed % len(self.replies)], self.stop_token_id]
        cut = len(ids) > sampling.max_tokens
        ids = ids[: sampling.max_tokens]
        call = Call(
            prompt_token_ids=list(prompt.token_ids),
            completion_token_ids=ids,
            sampling_logprobs=[0.0] * len(ids),
            finish_reason="length" if cut else "stop",
            adapter_version=version,
        )
        return [call] * n

    def lost_s(self) -> float:
        """It always answers."""
        return 0.0
