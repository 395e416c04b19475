"""Fixtures that several unit tests share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.unit.gpu_cases import Machine
from tests.unit.shared_tokenizers import shared_tokenizers

if TYPE_CHECKING:
    from skylite.model.process_group import Dist

SHARE_TOKENIZERS = {
    "test_after_training",
    "test_bad_inputs",
    "test_built_in_rewards",
    "test_chat_template",
    "test_context_length",
    "test_data_as_people_have_it",
    "test_plan",
    "test_doc_commands",
    "test_dry_run",
    "test_folder_owner",
    "test_guarded",
    "test_logs",
    "test_models_command",
    "test_own_data",
    "test_own_data_recipe",
    "test_own_teacher",
    "test_plugin_exits",
    "test_prepare",
    "test_recipe_names",
    "test_reference_answers",
    "test_resume",
    "test_resume_cleanup",
    "test_reward_components",
    "test_right_completion",
    "test_run_length",
    "test_run_order",
    "test_servable_models",
    "test_trusted_programs",
    "test_warm_start",
}
"""Files that plan many runs, and are not about the process of a tokenizer."""


@pytest.fixture(autouse=True, scope="module")
def tokenizers(request: pytest.FixtureRequest) -> Iterator[None]:
    """Shared by the files of SHARE_TOKENIZERS."""
    if request.path.stem not in SHARE_TOKENIZERS:
        yield
        return
    with shared_tokenizers():
        yield


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A machine without GPUs, until the test gives it some."""
    return Machine(tmp_path / "bin", monkeypatch)


@pytest.fixture(scope="module")
def dist() -> Iterator[Dist]:
    """The process group of a single rank."""
    from tests.small_run import lone_rank  # it imports torch

    with lone_rank() as dist:
        yield dist
