"""What `skylite sweep` makes of its flags, and what it says of the results."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from skylite.cli.sweep import name_of, plan_together, policies_of, split_values, state_of, varied
from skylite.config.engine import EngineConfig
from skylite.config.provenance import Provenance, Typed
from skylite.config.train import TrainConfig
from skylite.engine.interface import served_versions
from skylite.engine.start_engines import require_awake
from skylite.errors import ConfigError, DoesNotFit
from skylite.evaluation.confidence_interval import MeanScore
from skylite.report.sweep import PolicyResult, best_of
from skylite.rollout.plan import RunPlan
from skylite.run.sweep_dir import SweepDir
from tests.unit.simulated_run import plan_of


def test_a_grid_is_every_combination_of_its_values_and_seeds() -> None:
    found = policies_of(["lora.rank=8,32", "optim.lr=1e-5,3e-5"], "0,1")
    assert len(found) == 8
    assert [*found][:3] == ["rank-8_lr-1e-05_seed-0", "rank-8_lr-1e-05_seed-1", "rank-8_lr-3e-05_seed-0"]
    last = {key: typed.value for key, typed in found["rank-32_lr-3e-05_seed-1"].items()}
    assert last == {"lora.rank": 32, "optim.lr": 3e-5, "seed": 1}


def test_commas_in_brackets_and_quotes_belong_to_a_value() -> None:
    assert split_values('all-linear,["q_proj","v_proj"], "a,b"') == [
        "all-linear", '["q_proj","v_proj"]', '"a,b"',
    ]  # fmt: skip
    assert name_of({"data.path": Typed("/a/b/words", "--grid")}) == "path-words"


@pytest.mark.parametrize(
    ("grid", "seeds", "sentence"),
    [
        (["model.name=a,b"], None, r"--grid model.name cannot vary: all policies .* share the base"),
        (["engine.num_engines=1,2"], None, "cannot vary"),
        (["trainer.num_ranks=1,2"], None, "cannot vary"),
        (["lora.ranks=1,2"], None, r"lora.ranks is not a setting"),
        (["lora.rank"], None, "varies nothing"),
        (["lora.rank=8"], None, "trains several policies, and this one has 1"),
        ([], None, "several policies"),
        (["lora.rank=8,8"], None, r"same settings|has 1"),
        (["lora.rank=8,16", "lora.rank=4,2"], None, "names a setting twice"),
        ([], "0,x", "not a list of integers"),
    ],
)
def test_what_cannot_be_swept_is_refused_in_a_sentence(
    grid: list[str], seeds: str | None, sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        policies_of(grid, seeds)


def test_a_setting_is_chosen_once_and_memory_is_planned_for_all_at_once() -> None:
    typed = Provenance(typed={"lora.rank": Typed(8, "--rank")})
    with pytest.raises(ConfigError, match=r"--rank and the sweep both choose lora\.rank"):
        varied(typed, {"lora.rank": Typed(4, "--grid")}, 2)
    assert varied(typed, {}, 3).typed["engine.policies"].value == 3
    assert varied(typed, {}, 1).typed["engine.sleep"].value == "never", "one samples while another trains"
    asleep = Provenance(typed={"engine.sleep": Typed("kv_cache", "--set")})
    assert varied(asleep, {}, 1).typed["engine.sleep"].value == "kv_cache"
    for command in ("sweep", "service"):
        with pytest.raises(ConfigError, match="samples for one policy while it trains another"):
            require_awake(TrainConfig(engine=EngineConfig(sleep="kv_cache")), command)
    for policies, versions in ((1, 1), (3, 5)):
        config = TrainConfig().model_copy(update={"engine": EngineConfig(policies=policies)})
        assert served_versions(config) == versions, "each policy has one version, and loads the next"


def row(name: str, low: float, mean: float, high: float, step: int = 3, **settings: int) -> PolicyResult:
    score = MeanScore(mean, low, high, 100, is_binary=True)
    return PolicyResult(name=name, settings=settings, phase="done", step=3, held_out=score, version=step)


def test_the_best_is_named_only_where_its_interval_is_above_all_others() -> None:
    clear = [row("a", 0.6, 0.7, 0.8), row("b", 0.3, 0.4, 0.5)]
    assert best_of(clear).startswith("best: a;")
    assert "overlap" in best_of([*clear, row("c", 0.4, 0.5, 0.61)])
    assert "fewer than two" in best_of(clear[:1])


def test_scores_of_other_steps_or_problems_are_not_compared() -> None:
    """As after a halving: c left at step 2, where it was as good as b is after step 3."""
    clear, early = [row("a", 0.6, 0.7, 0.8), row("b", 0.3, 0.4, 0.5)], row("c", 0.5, 0.6, 0.7, step=2)
    assert best_of([*clear, early]) == (
        "best: a; its 95 % interval lies above those of the others (1 with a last score before step 3 are "
        "not compared)"
    )
    assert best_of([clear[0], early]).startswith("no policy is called the best: only a has a score of step 3")
    assert "different things (reward)" in best_of([row("a", 0.6, 0.7, 0.8, **{"reward.weights": 1}), *clear])


def test_a_sweep_trains_as_many_at_once_as_fit(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    """Each of small policies fits six times, the large one twice."""
    fits, asked = {"small": 6, "large": 2, "other": 6}, []

    def planned(name: str, together: int) -> RunPlan:
        asked.append((name, together))
        if together > fits[name]:
            raise DoesNotFit(f"{name} does not fit {together} times.")
        plan = plan_of(tmp_path / name, 0, 6, 0, 1, resumed=False)
        engine = plan.config.engine.model_copy(update={"policies": together})
        return replace(plan, config=plan.config.model_copy(update={"engine": engine}))

    plans, together = plan_together([*fits], planned, None, 3)
    assert together == 2
    assert {plan.config.engine.policies for plan in plans.values()} == {2}
    assert asked == [("small", 3), ("large", 3), ("small", 2), ("large", 2), ("other", 2)]
    assert "2 policies train at once, the others in turn: large does not fit 3 times." in caplog.text
    assert plan_together(["small", "other"], planned, None, 2)[1] == 2
    assert plan_together([*fits], planned, 2, 3)[1] == 2
    with pytest.raises(ConfigError, match=r"--together 3 does not fit: large .* --together 2 fits\."):
        plan_together([*fits], planned, 3, 3)
    fits["large"] = 0
    with pytest.raises(DoesNotFit, match="large does not fit 1 times"):
        plan_together([*fits], planned, None, 3)


def test_a_sweep_knows_which_policies_are_left(tmp_path: Path) -> None:
    folder = SweepDir(tmp_path)
    folder.manifest_path.write_text(json.dumps({"policies": {"a": {}, "b": {}}, "together": 2}))
    folder.leave("b", "stopped by the user")
    assert [state_of(folder, name) for name in folder.policies()] == ["not started", "stopped by the user"]
    folder.manifest_path.write_text(json.dumps({"policies": {"../up": {}}}))
    with pytest.raises(ConfigError, match="names no policies"):
        folder.policies()
