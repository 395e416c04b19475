"""The resources that the step loop uses."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from skylite.data.tokenizer import ChatTokenizer
from skylite.engine.collect_groups import Scorer
from skylite.engine.engine_pool import EnginePool
from skylite.environments.sample_episodes import Environment
from skylite.orchestrator.plan import RunPlan
from skylite.orchestrator.progress import Progress
from skylite.orchestrator.shutdown import TimeLimit
from skylite.run.run_dir import AdapterVersion, adapter_name


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """Plan, engines, reward workers, tokenizer and progress. run_session.py creates and closes them."""

    plan: RunPlan
    engines: EnginePool
    scorer: Scorer | None
    """None with an environment, whose episodes give the rewards."""
    tokenizer: ChatTokenizer
    progress: Progress
    limit: TimeLimit | None = None
    environment: Environment | None = None

    @property
    def adapters(self) -> Path:
        """The folder into which the trainer publishes adapters."""
        return Path(self.plan.resolved.lora_sync_path)

    def adapter(self, version: int) -> AdapterVersion:
        """An adapter version, published or not yet."""
        return AdapterVersion(version, self.adapters / adapter_name(version))
