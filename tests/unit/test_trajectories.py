"""Trajectories of several calls have the gradients of one padded row per call, for any packing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from skylite.errors import DataError
from skylite.model.packing import Packing
from skylite.model.process_group import Dist
from skylite.run.rollout_file import (
    examples_of,
    mean_reward,
    read_examples,
    read_rollouts,
    write_rollouts,
)
from skylite.trainer.critic import make_critic
from skylite.trainer.micro_batches import make_micro_batch, pack
from skylite.trainer.precompute import credit
from skylite.trainer.trainer import make_algorithm
from skylite.types import Call, Message, TrainingExample, Trajectory
from tests.cases import (
    ALGORITHMS,
    IMPORTANCE,
    gradients_after_step,
    optimizer_of,
    plain_model,
    policy_of,
    reference_gradient,
    relative_difference,
    table_of,
    train_rows,
)
from tests.rows import Row, groups_of, random_episodes
from tests.small_run import settings

EPISODES = random_episodes(0)


@pytest.fixture(scope="module")
def padded_gradient(tiny_llama: Path, dist: Dist) -> Callable[[str], torch.Tensor]:
    """An algorithm's gradient of EPISODES as padded rows. It does not depend on packing or micro-batches."""

    @cache
    def gradient(name: str) -> torch.Tensor:
        config = settings(algorithm=ALGORITHMS[name])
        policy = policy_of(tiny_llama, config, dist)
        return reference_gradient(plain_model(tiny_llama, policy, config), policy, config, EPISODES)

    return gradient


def episode(*calls: tuple[list[int], list[int]], reward: float, group: int = 0) -> Row:
    sampled = [token for _, completion in calls for token in completion]
    return Row(
        group=group,
        prompt_token_ids=calls[0][0],
        completion_token_ids=sampled,
        sampling_logprobs=[-1.0 - i for i in range(len(sampled))],
        reward=reward,
        calls=calls,
    )


def test_the_episodes_have_several_calls_and_some_branch() -> None:
    calls = [row.all_calls for row in EPISODES]
    assert {len(c) for c in calls} == {1, 2, 3, 4}
    extends = [b[0][: len(a[0] + a[1])] == a[0] + a[1] for c in calls for a, b in pairwise(c)]
    assert True in extends
    assert False in extends


def test_the_parts_of_a_cut_trajectory_keep_their_places(tiny_llama: Path, dist: Dist) -> None:
    """A micro-batch may get the first and the third call without the second."""
    config = settings()
    rows = [
        episode(([1], [2, 3]), ([5], [6]), ([7], [8, 9]), reward=1.0),
        episode(([1], [4]), reward=0.0),
    ]
    table, policy = table_of(rows, config), policy_of(tiny_llama, config, dist)
    first, _, third = table.trajectories[0]
    micro = make_micro_batch(table, [first, third], table.sizes[0], make_algorithm(config), policy)
    assert micro.keys.tolist() == [0, 1, 3, 4]


@pytest.mark.parametrize("packing", ["tree", "padded"])
@pytest.mark.parametrize("budget", [4096, 60], ids=["one pass", "many passes"])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_has_the_gradient_of_padded_rows(
    name: str,
    budget: int,
    packing: Packing,
    tiny_llama: Path,
    dist: Dist,
    padded_gradient: Callable[[str], torch.Tensor],
) -> None:
    config = settings(algorithm=ALGORITHMS[name], trainer={"tokens_per_micro_batch": budget})
    policy = policy_of(tiny_llama, config, dist, packing)
    got, _ = gradients_after_step(policy, config, dist, EPISODES)
    assert relative_difference(got, padded_gradient(name)) < 1e-5


@pytest.mark.parametrize(
    "correction", [*(c for c in IMPORTANCE.values() if "reject_kl" not in c), {"reject_kl": 2.0}], ids=str
)
def test_every_correction_has_the_gradient_of_padded_rows(
    correction: dict[str, Any], tiny_llama: Path, dist: Dist
) -> None:
    config = settings(importance=correction, trainer={"tokens_per_micro_batch": 60})
    policy = policy_of(tiny_llama, config, dist)
    got, _ = gradients_after_step(policy, config, dist, EPISODES)
    expected = reference_gradient(plain_model(tiny_llama, policy, config), policy, config, EPISODES)
    assert relative_difference(got, expected) < 1e-5


def test_metrics_do_not_depend_on_packing_or_micro_batches(tiny_llama: Path, dist: Dist) -> None:
    found = []
    cuts: list[tuple[Packing, int]] = [("tree", 4096), ("tree", 60), ("padded", 60)]
    for packing, budget in cuts:
        config = settings(trainer={"tokens_per_micro_batch": budget})
        policy = policy_of(tiny_llama, config, dist, packing)
        found.append(gradients_after_step(policy, config, dist, EPISODES)[1])
    for name in found[0].keys() - {"tokens/unique", "mismatch/worst_token_id"}:
        assert [m[name] for m in found[1:]] == pytest.approx([found[0][name]] * 2, rel=1e-4, abs=1e-6), name
    assert found[0]["tokens/completion"] == sum(len(row.completion_token_ids) for row in EPISODES)


def test_a_tree_computes_the_history_once(tiny_llama: Path, dist: Dist) -> None:
    """Call 2's prompt contains call 1, whose 4 + 3 tokens add no nodes. A call's last token is no input."""
    first = ([1, 2, 3, 4], [5, 6, 7])
    second = ([1, 2, 3, 4, 5, 6, 7, 8], [9, 10])
    config = settings(rollout={"prompts_per_step": 1, "group_size": 2})
    rows = [episode(first, second, reward=1.0), episode(first, reward=0.0)]
    policy = policy_of(tiny_llama, config, dist, "tree")
    _, metrics = gradients_after_step(policy, config, dist, rows)
    assert metrics["tokens/unique"] == 9  # 1 .. 9
    assert metrics["tokens/total"] == (4 + 3) + (8 + 2) + (4 + 3)


def test_every_token_of_every_call_gets_the_trajectorys_advantage(tiny_llama: Path, dist: Dist) -> None:
    rows = [
        episode(([1, 2], [3]), ([1, 2, 3, 4], [5, 6]), reward=1.0),
        episode(([1, 2], [7, 8]), reward=0.0),
    ]
    config = settings(algorithm={"name": "dr_grpo"}, rollout={"prompts_per_step": 1, "group_size": 2})
    table, algorithm = table_of(rows, config), make_algorithm(config)
    assert table.lengths.tolist() == [[3.0, 2.0]]
    (micro_batches,) = pack(table, algorithm, policy_of(tiny_llama, config, dist), config, dist)
    (micro,) = credit(table, micro_batches, algorithm, dist)
    assert micro.advantages is not None
    by_token = dict(zip(micro.tokens.targets.tolist(), micro.advantages.tolist(), strict=True))
    assert by_token == {3: 0.5, 5: 0.5, 6: 0.5, 7: -0.5, 8: -0.5}


def test_ppo_returns_follow_the_sampled_tokens_of_a_trajectory(tiny_llama: Path, dist: Dist) -> None:
    """Gamma 0.5, values 0, reward 1 after three tokens in two calls: 0.25, 0.5 and 1 before whitening."""
    rows = [
        episode(([1, 2], [3]), ([1, 2, 3, 4], [5, 6]), reward=1.0),
        episode(([1, 2], [7, 8]), reward=0.0),
    ]
    config = settings(
        algorithm={"name": "ppo", "gamma": 0.5, "gae_lambda": 1.0},
        rollout={"prompts_per_step": 1, "group_size": 2},
    )
    policy = policy_of(tiny_llama, config, dist)
    table, algorithm = table_of(rows, config), make_algorithm(config)
    ((micro,),) = pack(table, algorithm, policy, config, dist)
    micro = replace(micro, values=torch.zeros(5))
    (micro,) = credit(table, [micro], algorithm, dist)
    assert micro.returns is not None
    assert dict(zip(micro.tokens.targets.tolist(), micro.returns.tolist(), strict=True)) == {
        3: 0.25,
        5: 0.5,
        6: 1.0,
        7: 0.0,
        8: 0.0,
    }
    optimizer, critic = optimizer_of(policy, config), make_critic(policy, config, dist)
    metrics = train_rows(policy, optimizer, rows, 1, config, dist, critic)
    assert metrics["critic/return_mean"] == pytest.approx(1.75 / 5)


def test_rollout_files_keep_every_call(tmp_path: Path) -> None:
    groups, path = groups_of(EPISODES), tmp_path / "step-000001.parquet"
    write_rollouts(path, groups)
    again = read_rollouts(path)
    assert [[t.calls for t in g.trajectories] for g in again] == [
        [
            tuple(replace(s, sampling_logprobs=_as_float32(s.sampling_logprobs)) for s in t.calls)
            for t in g.trajectories
        ]
        for g in groups
    ]
    assert [[t.reward for t in g.trajectories] for g in again] == [
        [t.reward for t in g.trajectories] for g in groups
    ]
    # A mean over trajectories: a trajectory with many calls counts once.
    assert mean_reward(path) == pytest.approx(sum(row.reward for row in EPISODES) / len(EPISODES))


def test_rollout_files_keep_turn_rewards_and_the_question(tmp_path: Path) -> None:
    (group,) = groups_of([episode(([1], [2]), ([1, 2, 3], [4]), reward=1.0)])
    asked = [Message(role="system", content="Play."), Message(role="user", content="Which?")]
    prompt = replace(group.prompt, messages=asked)
    each_turn = replace(group.trajectories[0], turn_rewards=(0.25, 0.75))
    path = tmp_path / "step-000001.parquet"
    write_rollouts(path, [replace(group, prompt=prompt, trajectories=(each_turn, group.trajectories[0]))])
    (again,) = read_rollouts(path)
    assert [t.turn_rewards for t in again.trajectories] == [(0.25, 0.75), ()]
    assert again.prompt.messages[-1]["content"] == "Which?"
    assert pq.read_table(path)["turn_reward"].to_pylist() == [0.25, 0.75, 0.0, 0.0]


def test_the_order_of_the_rows_in_a_file_does_not_matter(tmp_path: Path) -> None:
    rows = [episode(([1, 2], [3]), ([1, 2, 3, 4], [5, 6]), reward=1.0), episode(([1], [7]), reward=0.0)]
    path = tmp_path / "step-000001.parquet"
    write_rollouts(path, groups_of(rows))
    groups, table = read_rollouts(path), pq.read_table(path)
    pq.write_table(table.take(list(range(table.num_rows))[::-1]), path)
    assert read_rollouts(path) == groups


@pytest.mark.parametrize(
    ("column", "row", "value", "words"),
    [
        ("reward", 1, 0.25, "different rewards"),
        ("turn", 1, 5, "turns [0, 5]"),
        ("group", 3, 2, "must have the same number"),
        ("token_ids", 1, [], "0 tokens"),
        ("weights", 1, [1.0] * 6, "of which the first must be 0"),
        ("weights", 1, [0.0] * 6, "another not"),
        ("sampling_logprobs", 1, [-1.0], "1 logprobs"),
        ("reward", 2, None, "without a value"),
    ],
)
def test_an_inconsistent_rollout_file_is_refused_with_a_reason(
    column: str, row: int, value: object, words: str, tmp_path: Path
) -> None:
    rows = [
        episode(([1, 2], [3]), ([1, 2, 3, 4], [5, 6]), reward=1.0),
        episode(([1, 2], [7, 8]), reward=0.0),
        episode(([1], [7, 8]), reward=0.0, group=1),
        episode(([1], [7, 8]), reward=0.0, group=1),
    ]
    path = tmp_path / "step-000001.parquet"
    write_rollouts(path, groups_of(rows))
    table = pq.read_table(path)
    values = table.column(column).to_pylist()
    values[row] = value
    index = table.schema.get_field_index(column)
    pq.write_table(
        table.set_column(index, table.schema.field(index), pa.array(values, table.schema.field(index).type)),
        path,
    )
    with pytest.raises(DataError) as caught:
        read_rollouts(path)
    assert words in str(caught.value)


def test_the_trainer_reads_the_examples_of_the_calls(tmp_path: Path) -> None:
    groups, path = groups_of(EPISODES), tmp_path / "step-000001.parquet"
    write_rollouts(path, groups)
    for read, made in zip(read_examples(path), examples_of(groups), strict=True):
        for name in TrainingExample.__dataclass_fields__:
            assert np.array_equal(getattr(read, name), getattr(made, name)), name


def test_prepared_examples_have_no_logprobs(tmp_path: Path) -> None:
    path, call = (
        tmp_path / "step-000001.parquet",
        Call(prompt_token_ids=[1, 2], completion_token_ids=[3], sampling_logprobs=[], text="3"),
    )
    (group,) = groups_of([episode(([1, 2], [3]), reward=1.0)])
    write_rollouts(path, [replace(group, trajectories=(Trajectory(calls=(call,), reward=1.0),))])
    (example,) = read_examples(path)
    assert example.sampling_logprobs is None
    assert (example.token_ids.tolist(), example.weights.tolist()) == ([1, 2, 3], [0.0, 0.0, 1.0])
    ((again,),) = [t.calls for g in read_rollouts(path) for t in g.trajectories]
    assert again == call


def test_groups_of_different_sizes_are_refused() -> None:
    rows = [episode(([1], [2]), reward=0.0, group=g) for g in (0, 0, 1)]
    with pytest.raises(DataError, match="same number"):
        table_of(rows, settings())


def _as_float32(values: list[float]) -> list[float]:
    return torch.tensor(values, dtype=torch.float32).tolist()
