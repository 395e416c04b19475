"""What a dead attempt left beyond the checkpoint is gone before the run goes on; the rest stays."""

from __future__ import annotations

import json
from pathlib import Path

from skylite.orchestrator.resume import forget_after
from skylite.run.run_dir import RunDir


def test_only_what_lies_beyond_the_checkpoint_is_forgotten(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    for folder in (run.rollouts, run.updates, run.checkpoints, run.default_adapters):
        folder.mkdir()
    for step in range(6):
        run.update_path(step).write_text("{}")
        run.rollout_path(step).write_bytes(b"")
        (run.default_adapters / f"policy-v{step:06d}").mkdir()
    (run.default_adapters / ".policy-v000006.tmp-77").mkdir()
    run.metrics_path.write_text("".join(json.dumps({"step": s}) + "\n" for s in range(1, 6)) + '{"step": 6, "torn')

    assert forget_after(run, run.default_adapters, 3) == 2

    assert sorted(p.name for p in run.default_adapters.iterdir()) == [f"policy-v{v:06d}" for v in range(4)]
    assert sorted(run.rollouts.iterdir()) == [run.rollout_path(s) for s in range(4)]
    assert sorted(run.updates.iterdir()) == [run.update_path(s) for s in range(3)]
    assert [json.loads(line)["step"] for line in run.metrics_path.read_text().splitlines()] == [1, 2, 3]
