"""What `skylite sweep` makes of its flags, and what it says of the results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from skylite.cli.sweep import name_of, policies_of, split_values, state_of, varied
from skylite.config.engine import EngineConfig
from skylite.config.provenance import Provenance, Typed
from skylite.config.train import TrainConfig
from skylite.engine.interface import served_versions
from skylite.errors import ConfigError
from skylite.evaluation.confidence_interval import MeanScore
from skylite.report.sweep import PolicyResult, best_of
from skylite.run.sweep_dir import SweepDir


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
    for policies, versions in ((1, 1), (3, 5)):
        config = TrainConfig().model_copy(update={"engine": EngineConfig(policies=policies)})
        assert served_versions(config) == versions, "each policy has one version, and loads the next"


def row(name: str, low: float, mean: float, high: float) -> PolicyResult:
    score = MeanScore(mean, low, high, 100, is_binary=True)
    return PolicyResult(name=name, settings={}, phase="done", step=3, held_out=score)


def test_the_best_is_named_only_where_its_interval_is_above_all_others() -> None:
    clear = [row("a", 0.6, 0.7, 0.8), row("b", 0.3, 0.4, 0.5)]
    assert best_of(clear).startswith("best: a;")
    assert "overlap" in best_of([*clear, row("c", 0.4, 0.5, 0.61)])
    assert "fewer than two" in best_of(clear[:1])


def test_a_sweep_knows_which_policies_are_left(tmp_path: Path) -> None:
    folder = SweepDir(tmp_path)
    folder.manifest_path.write_text(json.dumps({"policies": {"a": {}, "b": {}}, "together": 2}))
    folder.stops.mkdir()
    (folder.stops / "b").touch()
    assert [state_of(folder, name) for name in folder.policies()] == [
        "not started", "stopped by `skylite sweep --stop`",
    ]  # fmt: skip
    folder.manifest_path.write_text(json.dumps({"policies": {"../up": {}}}))
    with pytest.raises(ConfigError, match="names no policies"):
        folder.policies()
