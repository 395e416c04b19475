"""What a running orchestrator works with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from skylite.data.tokenizer import ChatTokenizer
from skylite.engine.collect import Scorer
from skylite.engine.pool import EnginePool
from skylite.orchestrator.plan import RunPlan
from skylite.orchestrator.progress import Progress
from skylite.orchestrator.shutdown import TimeLimit
from skylite.run.run_dir import AdapterVersion, adapter_name


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """The resources are owned by `services.run_session`."""

    plan: RunPlan
    engines: EnginePool
    scorer: Scorer
    tokenizer: ChatTokenizer
    progress: Progress
    limit: TimeLimit | None = None

    @property
    def adapters(self) -> Path:
        """Where the trainer publishes."""
        return Path(self.plan.resolved.lora_sync_path)

    def adapter(self, version: int) -> AdapterVersion:
        """A version as it is, or will be, published."""
        return AdapterVersion(version, self.adapters / adapter_name(version))
