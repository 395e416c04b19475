"""What a pass that ran out of memory leaves behind, before the step is computed again."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from skylite.config.train import RunConfig
from skylite.model import lora_linear
from skylite.model.packing import pack_tokens
from skylite.model.policy import Policy, score
from skylite.model.process_group import Dist
from skylite.run.files import write_json
from skylite.run.run_dir import RunDir
from skylite.trainer.critic import make_critic, predict_values
from skylite.trainer.micro_batch_memory import halve_micro_batches, resolve_micro_batch_tokens
from tests.cases import policy_of
from tests.decisions import resolved
from tests.rows import completions_of
from tests.small_run import settings
from tests.tiny_models import make_tiny_model


@pytest.fixture
def graph_nodes(monkeypatch: pytest.MonkeyPatch) -> weakref.WeakSet[Any]:
    """The LoRA operations whose graph is alive: all hold activations."""
    nodes, forward = weakref.WeakSet[Any](), lora_linear._LoraLinears.forward

    def noted(ctx: Any, *args: Any) -> Any:
        nodes.add(ctx)
        return forward(ctx, *args)

    monkeypatch.setattr(lora_linear._LoraLinears, "forward", staticmethod(noted))
    return nodes


@pytest.mark.parametrize("network", ["policy", "critic"])
def test_no_graph_of_a_pass_that_failed_between_sibling_layers_stays_alive(
    network: str, tmp_path: Path, dist: Dist, graph_nodes: weakref.WeakSet[Any]
) -> None:
    config = settings(algorithm={"name": "ppo"}, trainer={"tokens_per_micro_batch": 60})
    model = make_tiny_model(tmp_path / "model", "qwen3")
    policy = policy_of(model, config, dist)
    critic = make_critic(policy, config, dist)
    tokens = pack_tokens(
        completions_of([[1] * 5] * 2, [[2] * 9, [3] * 9], [0, 0]), policy.packing, policy.device
    )
    norm = policy.model.get_base_model().model.layers[-1].self_attn.q_norm
    right = norm.forward

    def fail(x: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    norm.forward = fail
    with pytest.raises(torch.OutOfMemoryError):
        score(policy, tokens, 1.0) if network == "policy" else predict_values(policy, critic, tokens)
    gc.collect()
    assert len(graph_nodes) > 0, "k and v, which no layer has taken, hold it"
    run_config = RunConfig(skylite_version="test", config=config, resolved=resolved(model, tmp_path))
    halve_micro_batches(RunDir(tmp_path), run_config, 1, "no memory")
    assert len(graph_nodes) == 0
    norm.forward = right
    assert score(policy, tokens, 1.0)[0].isfinite().all()
    gc.collect()
    assert len(graph_nodes) == 0


def test_smaller_micro_batches_stay_after_a_new_setting(tmp_path: Path, dist: Dist) -> None:
    """micro_batch.json has the size of an earlier setting, such as "auto", when a resume brings a number."""
    run, policy = RunDir(tmp_path), cast("Policy", None)
    write_json(run.micro_batch_path, {"tokens": 100, "reason": "measured", "setting": "auto"})
    config = settings(trainer={"tokens_per_micro_batch": 64})
    start = RunConfig(skylite_version="test", config=config, resolved=resolved(tmp_path, tmp_path))

    def tokens_after_a_resume() -> int | str:
        return resolve_micro_batch_tokens(run, start, policy, dist).config.trainer.tokens_per_micro_batch

    assert tokens_after_a_resume() == 64, "not that of the earlier setting"
    halve_micro_batches(run, start, 1, "no memory")
    assert tokens_after_a_resume() == 32
