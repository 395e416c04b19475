"""Fixtures that several test files share."""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling

from skylite.ui.logs import set_terminal_level
from tests.engines import EngineServer, running_server
from tests.tiny_models import make_tiny_model

# Ignored under `nohup` and in a shell's background. Tests send them to processes that inherit that.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)

SHARE_VLLM = (
    "test_vllm_bad_adapters",
    "test_vllm_batched",
    "test_vllm_logprobs",
    "test_vllm_many_adapters",
    "test_vllm_plugin",
)
"""Files that use one vLLM server. One test process runs them all."""

LONGEST = (
    "test_finished_run",
    "test_doc_commands",
    "test_write_faults",
    "test_deaths",
    *SHARE_VLLM,
    "test_benchmarks",
    "test_torture",
    "test_trainer",
    "test_resume",
    "test_environment",
    "test_environment_deaths",
    "test_environment_ahead",
    "test_bf16",
    "test_ranks",
    "test_a_day",
    "test_documented_commands",
    "test_load_the_adapter",
    "test_hostile_bundle",
    "test_verifiers_episodes",
    "test_fake_gpu",
    "test_template_families",
    "test_vllm_tampered",
    "test_bad_inputs",
    "test_hub_errors",
    "test_after_training",
)
"""These files run first, so that all test processes end at about the same time."""

SLOW_UNITS = (
    "test_alarms",
    "test_allocator",
    "test_api",
    "test_built_in_episodes",
    "test_built_in_rewards",
    "test_call_tree_fuzz",
    "test_chat_template",
    "test_child_leftovers",
    "test_continued_calls",
    "test_dry_run",
    "test_env_check",
    "test_env_faults",
    "test_episode_ends",
    "test_episodes",
    "test_experts",
    "test_export",
    "test_folder_owner",
    "test_fuzz",
    "test_guarded",
    "test_hostile_bundle",
    "test_hostile_templates",
    "test_images",
    "test_logger_faults",
    "test_logs",
    "test_odd_files",
    "test_openai_server",
    "test_own_data_recipe",
    "test_plugin_exits",
    "test_prepare",
    "test_private_folders",
    "test_reasoning_gym_sandbox",
    "test_recipe_names",
    "test_reference_answers",
    "test_report_page",
    "test_run_commands",
    "test_run_length",
    "test_run_order",
    "test_sampling_ahead",
    "test_sandbox",
    "test_server_check",
    "test_shared_base",
    "test_tokenizer",
    "test_trainer_verbs",
    "test_trajectories",
    "test_trusted_programs",
    "test_unforeseen_errors",
    "test_url_engines",
    "test_working_folder",
)
"""Files of tests/unit whose tests take over 13 s in sum: most start skylite, a sandbox or a reward worker."""

SLOW_FOLDERS = ("e2e", "integration")
REAL_RUN = "test_a_run_stopped_by_ctrl_c_and_resumed_equals_one_that_never_stopped"
"""The one test of SLOW_FOLDERS in `make test`: a real run with vLLM and torchrun."""
REAL_RUN_FILE = "test_finished_run"


class FileScheduling(LoadFileScheduling):  # type: ignore[misc]  # xdist has no types
    """`--dist loadfile` that treats SHARE_VLLM as one file.

    `loadgroup` does not work: with pytest 9.2, xdist 3.8 ignores the groups.
    """

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return "vLLM's server" if Path(file).stem in SHARE_VLLM else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> FileScheduling | None:
    """Use FileScheduling for `--dist loadfile`."""
    return FileScheduling(config, log) if config.getvalue("dist") == "loadfile" else None


def is_slow(path: Path) -> bool:
    """Whether the file belongs to `make test-all`."""
    return path.parent.name in SLOW_FOLDERS or path.stem in (*LONGEST, *SLOW_UNITS)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import no file of the other tier: importing all takes each process 15 s."""
    if collection_path.suffix != ".py" or not collection_path.stem.startswith("test_"):
        return None
    if config.option.markexpr == "slow":
        return not is_slow(collection_path) or None
    if config.option.markexpr == "not slow":
        return (is_slow(collection_path) and collection_path.stem != REAL_RUN_FILE) or None
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """LONGEST first. Mark slow tests. Refuse a file that would start another server."""
    places = {stem: place for place, stem in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(places)))
    for item in items:
        if is_slow(item.path) and item.name != REAL_RUN:
            item.add_marker("slow")
        if "vllm_server" in getattr(item, "fixturenames", ()) and item.path.stem not in SHARE_VLLM:
            raise pytest.UsageError(f"Add {item.path.stem} to SHARE_VLLM in tests/conftest.py.")


@pytest.fixture(scope="session", autouse=True)
def own_state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What skylite remembers about its user goes to a temporary folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(autouse=True)
def own_logging() -> Iterator[None]:
    """Info is logged, and the handlers of a command that a test runs in this process go with the test."""
    set_terminal_level(logging.INFO)
    yield
    logger = logging.getLogger("skylite")
    logger.handlers.clear()
    logger.propagate = True


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny random Llama with a tokenizer. Read only."""
    return make_tiny_model(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="session")
def vllm_server(tiny_llama: Path) -> Iterator[EngineServer]:
    """One vLLM CPU server of the tiny Llama for the session.

    Give your adapters unique names: a name cannot be reused.
    """
    with running_server(tiny_llama) as server:
        yield server
