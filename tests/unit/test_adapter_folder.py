"""The adapter that eval and serve find: in a run, by its step, or in any PEFT folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from skylite.adapters.folder import available_steps, find_adapter, find_versions
from skylite.errors import ConfigError
from skylite.run.run_dir import RunDir
from tests.small_run import make_run, settings
from tests.unit.run_cases import make_adapter


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    made = make_run(tmp_path / "run", tmp_path / "model", settings(), {})
    for version in (0, 3, 7):
        make_adapter(made.default_adapters / f"policy-v{version:06d}", "recorded-base")
    return made


def test_the_newest_adapter_of_a_run_or_that_of_a_step(run: RunDir, tmp_path: Path) -> None:
    newest = find_adapter(run.root, None)
    assert (newest.adapter.version, newest.adapter.path) == (7, run.default_adapters / "policy-v000007")
    assert (newest.rank, newest.target_modules) == (4, None)
    assert newest.base_model == str(tmp_path / "model"), "the run's, not the one in the adapter"
    assert newest.run == run
    assert newest.run_config is not None
    assert find_adapter(run.root, 3).adapter.version == 3
    assert [v.adapter.version for v in find_versions(run.root, [7, 0])] == [0, 7]
    assert [v.adapter.version for v in find_versions(run.root, None)] == [7]
    assert available_steps(run.root) == [0, 3, 7]


def test_a_step_without_an_adapter_is_refused_with_those_that_have_one(run: RunDir) -> None:
    with pytest.raises(ConfigError, match=r"has no adapter of step 4 \(available steps: 0, 3, 7\)\. Choose"):
        find_adapter(run.root, 4)
    with pytest.raises(ConfigError, match=r"has no adapter of step 4, 5 \(available"):
        find_versions(run.root, [3, 5, 4])


def test_a_run_without_adapters_is_refused(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", tmp_path / "model", settings(), {})
    with pytest.raises(ConfigError, match=r"has no adapter \(available steps: none\)\. Train the run first"):
        find_adapter(run.root, None)


@pytest.mark.parametrize(("name", "version"), [("policy-v000012", 12), ("mine", 0), ("policy-v1x", 0)])
def test_an_adapter_folder_without_a_run(tmp_path: Path, name: str, version: int) -> None:
    found = find_adapter(make_adapter(tmp_path / name, "recorded-base"), None)
    assert (found.adapter.version, found.adapter.path) == (version, tmp_path / name)
    assert (found.base_model, found.run, found.run_config) == ("recorded-base", None, None)
    with pytest.raises(
        ConfigError, match=r"--step 1 chooses a version of a run, but .* is an adapter folder"
    ):
        find_adapter(tmp_path / name, 1)
