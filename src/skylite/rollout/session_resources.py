"""The resources that the step loop uses, and how a run starts them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass
from pathlib import Path

from skylite.data.chat_tokenizer import ChatTokenizer, load_tokenizer, run_template
from skylite.engine.canary import canary_sequences
from skylite.engine.engine_pool import EnginePool
from skylite.environments.offline_source import Offline
from skylite.environments.source import GroupRequest, RolloutSource
from skylite.rollout.plan import RunPlan
from skylite.rollout.progress import Progress
from skylite.rollout.shutdown import TimeLimit
from skylite.run.files import write_json
from skylite.run.rollout_file import write_rollouts
from skylite.run.run_dir import AdapterVersion, adapter_name

logger = logging.getLogger(__name__)
LONGEST_PROMPTS = 16
"""Prompts to encode for the longest one. The longest text need not have the most tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """Plan, engines, rollout source and progress. run_session.py creates and closes them."""

    plan: RunPlan
    engines: EnginePool
    source: RolloutSource
    progress: Progress
    limit: TimeLimit | None = None

    @property
    def adapters(self) -> Path:
        """The folder into which the trainer publishes adapters."""
        return self.plan.resolved.identity.lora_sync_path

    def adapter(self, version: int) -> AdapterVersion:
        """An adapter version, published or not yet."""
        return AdapterVersion(version, self.adapters / adapter_name(version))


async def start_tokenizer(plan: RunPlan, stack: contextlib.AsyncExitStack) -> ChatTokenizer:
    """Load the tokenizer and write the canary sequences, for which the trainer waits. `stack` closes it.

    The trainer finds the rows that it scores itself when it finds the canary.
    """
    tokenizer = await asyncio.to_thread(
        load_tokenizer, plan.resolved.model.path, run_template(plan.run_config)
    )
    stack.callback(tokenizer.close)
    if tokenizer.note:
        logger.info(tokenizer.note)
    longest = await asyncio.to_thread(longest_prompt_tokens, tokenizer, plan)
    sequences = await asyncio.to_thread(
        canary_sequences, tokenizer, plan.train, plan.resolved.placement.dtype
    )
    if plan.config.source.name == "offline" and plan.held_out:
        rows = Offline(plan.config, tokenizer, plan.resolved.model.path)
        request = GroupRequest(model="", version=0, engines=[], temperature=1.0)
        write_rollouts(plan.run.held_out_path, await rows.sample(plan.held_out, request))
    write_json(plan.run.canary_path, {"sequences": sequences, "longest_prompt_tokens": longest})
    return tokenizer


def longest_prompt_tokens(tokenizer: ChatTokenizer, plan: RunPlan) -> int:
    """Tokens of the longest training prompt that is sampled, judged by the prompts with the longest text."""
    # In bytes: a Chinese character takes as many tokens as several English ones.
    by_text = sorted(plan.train, key=lambda p: -sum(len(m["content"].encode()) for m in p.messages))
    tokens = map(len, tokenizer.encode_chats([p.messages for p in by_text[:LONGEST_PROMPTS]]))
    limit = plan.config.rollout.max_prompt_tokens
    return max((count for count in tokens if count <= limit), default=limit)
