"""FILE.py:function as advantage or policy loss: bit-equal gradients to the built-ins, and errors."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from skylite.algorithms.losses import LossInputs
from skylite.algorithms.user_functions import group_advantage, policy_loss
from skylite.config.algorithm import AlgorithmConfig
from skylite.errors import ConfigError, RunFailed
from skylite.model.process_group import Dist
from skylite.user_functions import ADVANTAGE, POLICY_LOSS, check_function
from tests.cases import gradients_after_step, policy_of, table_of
from tests.rows import random_samples
from tests.settings import load_config
from tests.small_run import settings

OWN = """
import torch

def centred(rewards, lengths):
    found = rewards - rewards.mean(dim=1, keepdim=True)
    equal = (rewards == rewards[:, :1]).all(dim=1)
    return torch.where(equal[:, None], torch.zeros_like(found), found)

def clipped(inputs, config):
    ratio = torch.exp(inputs.policy_logprobs - inputs.old_logprobs)
    low, high = 1 - config.clip_eps_low, 1 + config.clip_eps_high
    return -torch.minimum(ratio * inputs.advantages, ratio.clamp(low, high) * inputs.advantages)
"""


def own_file(folder: Path, text: str) -> str:
    """The spec of the only function of a file with this text."""
    (folder / "mine.py").write_text(text, encoding="utf-8")
    return f"{folder / 'mine.py'}:mine"


@pytest.mark.parametrize(
    "more",
    [{}, {"zero_std_groups": "drop"}, {"kl_coef": 0.2, "kl_in": "reward"}],
    ids=["plain", "drop", "kl in the reward"],
)
def test_a_users_advantage_gives_the_built_ins_gradient(
    more: dict[str, Any], tmp_path: Path, tiny_llama: Path, dist: Dist
) -> None:
    (tmp_path / "mine.py").write_text(OWN, encoding="utf-8")
    built_in = settings(algorithm={"advantage": "dr_grpo", **more})
    own = settings(algorithm={"advantage": f"{tmp_path / 'mine.py'}:centred", **more})
    policy = policy_of(tiny_llama, built_in, dist)
    expected, metrics = gradients_after_step(policy, built_in, dist)
    found, own_metrics = gradients_after_step(policy, own, dist)
    assert expected.norm() > 0
    assert torch.equal(found, expected)
    # tokens/unique too: passes leave out groups without a gradient.
    assert own_metrics == metrics


def test_a_users_loss_gives_the_built_ins_gradient(tmp_path: Path, tiny_llama: Path, dist: Dist) -> None:
    (tmp_path / "mine.py").write_text(OWN, encoding="utf-8")
    more = {"updates_per_step": 2, "clip_eps_low": 0.001, "clip_eps_high": 0.001}
    built_in = settings(algorithm=more)
    own = settings(algorithm={"policy_loss": f"{tmp_path / 'mine.py'}:clipped", **more})
    policy = policy_of(tiny_llama, built_in, dist)
    expected, metrics = gradients_after_step(policy, built_in, dist)
    found, own_metrics = gradients_after_step(policy, own, dist)
    assert metrics["policy/clipped_frac"] > 0, "the ratio has left the bounds in the second update"
    assert torch.equal(found, expected)
    assert own_metrics == metrics


def test_groups_are_skipped_by_their_advantages_and_not_by_equal_rewards(tmp_path: Path) -> None:
    """The advantage is not 0 for equal rewards."""
    spec = own_file(tmp_path, "def mine(rewards, lengths): return rewards - 0.5")
    table = table_of(random_samples(0), settings(algorithm={"advantage": spec}))
    assert table.advantages is not None
    assert table.advantages[1].tolist() == [0.5] * 4
    assert table.updates == [list(range(16))]


def test_a_function_gets_copies_of_its_inputs(tmp_path: Path) -> None:
    spec = own_file(tmp_path, "def mine(rewards, lengths): return rewards.sub_(1) * lengths.zero_()")
    table = table_of(random_samples(0), settings(algorithm={"advantage": spec}))
    assert table.rewards.max() == 1.0
    assert table.lengths.min() > 0


PER_COMPONENT = """
def mine(rewards, lengths, components):
    assert components.names == ("right", "long", "metric/greedy")
    assert components.scores.shape == (*rewards.shape, 3)
    components.scores[..., 0] *= components.weights[0]
    found = components["right"] - components["long"] * components.weights[1]
    return found - found.mean(dim=1, keepdim=True)
"""


def test_a_function_asks_for_the_components_of_the_rewards_and_gets_copies(tmp_path: Path) -> None:
    config = settings(
        algorithm={"advantage": own_file(tmp_path, PER_COMPONENT)},
        reward={"functions": ["gsm8k", "length"], "weights": [2.0, 0.5]},
    )
    rows = random_samples(0)
    table = table_of(rows, config)
    assert table.components is not None
    assert table.advantages is not None
    scores = [row.components for row in rows]
    assert table.components["right"].flatten().tolist() == [x["right"] for x in scores]
    wanted = torch.tensor([2.0 * x["right"] - 0.5 * x["long"] for x in scores]).view(4, 4)
    assert torch.allclose(table.advantages, wanted - wanted.mean(dim=1, keepdim=True))


def test_a_completion_without_a_component_is_named(tmp_path: Path) -> None:
    config = settings(algorithm={"advantage": own_file(tmp_path, PER_COMPONENT)})
    rows = random_samples(0)
    rows[5] = replace(rows[5], components={"right": 1.0})
    with pytest.raises(RunFailed, match=r"one of prompt test/1 has no long\."):
        table_of(rows, config)
    with pytest.raises(RunFailed, match=r"algorithm.advantage=gdpo .* prompt test/0 has no components\."):
        table_of([replace(row, components={}) for row in rows], settings(algorithm={"name": "gdpo"}))


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("rewards.mean(dim=1)", r"returned the shape \[2\], not \[2, 3\]"),
        ("rewards.tolist()", "returned list, not a tensor"),
        ("None", "returned NoneType, not a tensor"),
        ("rewards / 0", "returned 6 of 6 numbers that are NaN or infinite"),
        ("rewards[7]", "raised IndexError: index 7"),
    ],
)
def test_a_bad_advantage_gives_one_sentence(body: str, reason: str, tmp_path: Path) -> None:
    spec = own_file(tmp_path, f"def mine(rewards, lengths): return {body}")
    advantage = group_advantage(AlgorithmConfig(advantage=spec))
    with pytest.raises(RunFailed, match=rf"^The advantage mine in {tmp_path}/mine\.py {reason}"):
        advantage(torch.ones(2, 3), torch.ones(2, 3), None)


def loss_inputs(count: int = 3) -> LossInputs:
    return LossInputs(
        policy_logprobs=torch.full((count,), -1.0, requires_grad=True),
        old_logprobs=torch.full((count,), -1.0),
        advantages=torch.ones(count),
        segments=torch.zeros(count, dtype=torch.int64),
        num_segments=1,
    )


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("inputs.policy_logprobs.mean()", r"returned the shape \[\], not \[3\]"),
        ("-inputs.advantages", "returned a loss without a gradient"),
        ("inputs.policy_logprobs.log()", "returned 3 of 3 numbers that are NaN or infinite"),
        ("inputs.ratios", "raised AttributeError"),
    ],
)
def test_a_bad_loss_gives_one_sentence(body: str, reason: str, tmp_path: Path) -> None:
    spec = own_file(tmp_path, f"def mine(inputs, config): return {body}")
    with pytest.raises(RunFailed, match=rf"^The policy loss mine in {tmp_path}/mine\.py {reason}"):
        policy_loss(spec)(loss_inputs(), AlgorithmConfig())


def test_an_empty_micro_batch_does_not_call_the_function(tmp_path: Path) -> None:
    spec = own_file(tmp_path, "def mine(inputs, config): return -inputs.ratio * inputs.advantages.max()")
    loss = policy_loss(spec)(loss_inputs(0), AlgorithmConfig())
    assert loss.shape == (0,)
    assert loss.requires_grad, "backward runs on every rank"


def test_nan_rewards_pass_through_to_the_anomaly_rules(tmp_path: Path) -> None:
    spec = own_file(tmp_path, "def mine(rewards, lengths): return rewards * 2")
    advantage = group_advantage(AlgorithmConfig(advantage=spec))
    found = advantage(torch.tensor([[1.0, float("nan")]]), torch.ones(1, 2), None)
    assert torch.isnan(found).tolist() == [[False, True]]


def test_a_file_runs_once(tmp_path: Path) -> None:
    count = tmp_path / "count"
    spec = own_file(
        tmp_path, f"open({str(count)!r}, 'a').write('x')\ndef mine(rewards, lengths): return rewards"
    )
    for _ in range(3):
        group_advantage(AlgorithmConfig(advantage=spec))
    assert count.read_text() == "x"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, "The advantage file .* does not exist"),
        ("def mine(rewards, lengths", "cannot be imported: SyntaxError"),
        ("\0", "cannot be imported"),
        ("def other(rewards, lengths): ...", "has no function 'mine'"),
    ],
)
def test_faults_visible_without_running_the_file_are_refused(
    text: str | None, reason: str, tmp_path: Path
) -> None:
    spec = f"{tmp_path / 'mine.py'}:mine" if text is None else own_file(tmp_path, text)
    with pytest.raises(ConfigError, match=reason) as error:
        check_function(spec, ADVANTAGE)
    if "function" in reason:
        assert error.value.hint == "Define it: def mine(rewards, lengths) -> Tensor."


@pytest.mark.parametrize(
    "text",
    [
        "def mine(rewards, lengths): ...",
        "def mine(*rewards): ...",
        "def mine(rewards, lengths, scale=1, *, more=2): ...",
        "mine = lambda rewards, lengths: rewards",
        "from elsewhere import other as mine",
        "from elsewhere import *",
        "if True:\n    def mine(rewards, lengths): ...",
        "import functools\n@functools.cache\ndef mine(): ...",
        "raise SystemExit('the file ran')\ndef mine(a, b): ...",
    ],
)
def test_possibly_valid_files_are_left_to_the_trainer(text: str, tmp_path: Path) -> None:
    check_function(own_file(tmp_path, text), POLICY_LOSS)


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        (
            "algorithm.advantage=drgrpo",
            "'drgrpo' is no advantage; choose one of grpo, .*, or FILE.py:function",
        ),
        ("algorithm.policy_loss=mine.txt:f", "'mine.txt:f' is no policy loss; choose one of clip, "),
        ("algorithm.policy_loss=3", "3 is no policy loss"),
    ],
)
def test_unknown_names_are_refused(setting: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        load_config(None, {}, [setting])


def test_settings_store_an_absolute_path_and_a_users_advantage_compares_groups() -> None:
    algorithm = load_config(None, {}, ["algorithm.advantage=sub/mine.py:f"]).algorithm
    assert algorithm.advantage == f"{Path.cwd()}/sub/mine.py:f"
    assert algorithm.compares_groups
    assert not algorithm.uses_critic
