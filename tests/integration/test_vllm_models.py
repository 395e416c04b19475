"""The table of what vLLM serves with LoRA, compared with the installed vLLM."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from skylite.engine.vllm.servable_models import TABLE

pytestmark = pytest.mark.vllm


def rows(table: dict[str, Any]) -> dict[str, Any]:
    """Architecture -> its entry."""
    return {
        name: {**entry, "architectures": []} for entry in table["entries"] for name in entry["architectures"]
    }


def test_the_table_is_what_the_installed_vllm_says() -> None:
    """A model class that either side could not import is left out. If this fails: `make vllm-models`."""
    command = [sys.executable, "-m", "tests.integration.vllm_models", "--print"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    installed = json.loads(printed[printed.index('{"vllm"') :])
    table = json.loads(TABLE.read_text(encoding="utf-8"))
    assert installed["vllm"] == table["vllm"]
    unknown = {*installed["unknown"], *table["unknown"]}
    now, then = rows(installed), rows(table)
    assert {n: now.get(n) for n in now.keys() - unknown} == {n: then.get(n) for n in then.keys() - unknown}
