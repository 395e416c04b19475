"""The sweep finds again what hub/families.json says, for families with odd layers."""

from __future__ import annotations

import pytest

from skylite.hub.families import read_sweep
from tests.model_sweep import GRADIENT, LOGPROBS, all_families, in_a_process

pytestmark = pytest.mark.slow
ODD = {
    "gpt2": "tree",  # transposed weights
    "falcon_h1": "padded",  # Mamba's out_proj gets no LoRA
    "bert": None,  # its tokens see later ones
}


@pytest.mark.parametrize("name", ODD)
def test_a_family_is_as_the_table_says(name: str) -> None:
    found, listed = in_a_process(name), read_sweep().families[name]
    assert found.packing == listed.packing == ODD[name]
    assert found.refused == listed.refused
    assert (found.on_gpu, found.on_cpu, found.experts, found.parts) == (
        listed.on_gpu, listed.on_cpu, listed.experts, listed.parts
    )  # fmt: skip
    assert found.logprobs <= LOGPROBS
    assert found.gradient <= GRADIENT


def test_the_table_has_every_family_of_transformers() -> None:
    assert sorted(read_sweep().families) == all_families()
