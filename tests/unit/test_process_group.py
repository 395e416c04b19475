"""Threads of a rank while vLLM starts; what rank 0 sends the others: JSON with the bits of every array."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch

from skylite.model.process_group import _Decoder, _Encoder, half_the_threads
from skylite.types import ImageTokens, TrainingExample


@pytest.mark.parametrize(("own", "during_start"), [(4, 2), (1, 1)])
def test_half_the_threads_until_vllm_started_or_failed(own: int, during_start: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(own)
    try:
        with suppress(ValueError), half_the_threads():
            assert torch.get_num_threads() == during_start
            int("a start that fails")
        assert torch.get_num_threads() == own
    finally:
        torch.set_num_threads(before)


def sent(value: Any) -> Any:
    return json.loads(json.dumps(value, default=_Encoder()), object_hook=_Decoder())


def test_examples_arrive_bit_for_bit() -> None:
    logprobs = np.array([0.0, -1.1, np.nan, -np.inf], np.float32)
    example = TrainingExample(
        token_ids=np.array([1, 2, 3, 4], np.int32),
        weights=np.array([0, 1, 1, 1], np.float32),
        sampling_logprobs=logprobs,
        group=3,
        reward=0.1,
        prompt_id="p-1",
        extras={"teacher": np.array([1.5, 2.5, 3.5, 4.5])},
        images=(ImageTokens(1, 2, b"\x00\xffpng"),),
    )
    (found,) = sent([example])
    for field in fields(TrainingExample):
        before, after = getattr(example, field.name), getattr(found, field.name)
        if isinstance(before, np.ndarray):
            assert (after.dtype, after.tobytes()) == (before.dtype, before.tobytes())
        elif field.name != "extras":
            assert after == before
    assert found.extras["teacher"].tolist() == [1.5, 2.5, 3.5, 4.5]
    assert sent([[1, 2], None, "text", 0.1]) == [[1, 2], None, "text", 0.1]


def test_equal_images_are_sent_once_and_arrive_as_one_object() -> None:
    def image(data: bytes) -> ImageTokens:
        return ImageTokens(0, 1, bytes(bytearray(data)))  # an object of its own

    images = [image(b"a" * 3000), image(b"b" * 3000), image(b"a" * 3000), image(b"a" * 3000)]
    assert len(json.dumps(images, default=_Encoder())) < 2 * 3000 * 4 / 3 + 300
    found = sent(images)
    assert found == images
    assert found[0].data is found[2].data is found[3].data


def test_no_object_is_sent_or_made() -> None:
    with pytest.raises(TypeError, match="ranks do not share a set"):
        sent({1})
    with pytest.raises(ValueError, match="OBJECT"):
        json.loads('{"array of a rank": ["|O", "AAAAAAAAAAA="]}', object_hook=_Decoder())
