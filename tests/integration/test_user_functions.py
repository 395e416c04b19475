"""FILE.py:function as advantage and policy loss in real ranks: the same adapter, and one sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from skylite.run.run_dir import RunDir
from tests.integration.torchrun import ended, finish, largest_difference, weights
from tests.rows import random_samples
from tests.small_run import make_run, settings
from tests.unit.test_user_functions import OWN

pytestmark = pytest.mark.dist


def make(root: Path, model: Path, **algorithm: str) -> RunDir:
    config = settings(algorithm=algorithm).model_copy(update={"num_steps": 1})
    return make_run(root, model, config, {1: random_samples(1)})


def test_user_functions_publish_the_same_adapter_as_the_built_ins(tmp_path: Path, tiny_llama: Path) -> None:
    own = tmp_path / "mine.py"
    own.write_text(OWN, encoding="utf-8")
    built_in = make(tmp_path / "built-in", tiny_llama, advantage="dr_grpo", policy_loss="clip")
    run = make(tmp_path / "own", tiny_llama, advantage=f"{own}:centred", policy_loss=f"{own}:clipped")
    for each in (built_in, run):
        finish(each, 1)
    assert largest_difference(weights(run, 1), weights(built_in, 1)) == 0.0
    assert largest_difference(weights(run, 1), weights(run, 0)) > 0.0


@pytest.mark.parametrize(
    ("text", "version", "what"),
    [
        ("def mine(a, b): return {}['x']", 0, "The advantage mine in {file} raised KeyError: 'x'."),
        ("import nowhere", None, "The advantage file {file} cannot be imported: ModuleNotFoundError:"),
    ],
)
def test_a_broken_file_ends_both_ranks_with_one_sentence(
    text: str, version: int | None, what: str, tmp_path: Path, tiny_llama: Path
) -> None:
    own = tmp_path / "mine.py"
    own.write_text(text, encoding="utf-8")
    run = make(tmp_path / "run", tiny_llama, advantage=f"{own}:mine")
    assert ended(run, 2) == 1
    reason = run.read_json(run.trainer_error_path)
    assert reason["what"].startswith(what.format(file=own))
    assert reason["final"], "it is not started again"
    assert run.trainer_step_path(0).exists() == (version == 0)
    assert not run.trainer_step_path(1).exists()
