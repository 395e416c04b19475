"""Images in data, as verl, TRL and OpenAI write them, from rows to a prepared file."""

from __future__ import annotations

import base64
import json
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from skylite.data.images import image_size, read_image, with_parts
from skylite.data.prompts import read_prompts
from skylite.engine.model_limits import check_images
from skylite.errors import ConfigError, DataError, ModelError
from skylite.types import Prompt
from tests.pictures import picture, prompt
from tests.prepared import prepare

PICTURES = [picture(i, 16 + i, 12) for i in range(8)]


@pytest.fixture(autouse=True)
def in_tmp(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for i, data in enumerate(PICTURES):
        Path(f"{i}.png").write_bytes(data)


def prepared(rows: list[dict[str, Any]], question: str = "prompt", **flags: Any) -> list[Prompt]:
    """All prompts of the rows by their answer."""
    pq.write_table(pa.Table.from_pylist(rows), "rows.parquet")
    folder = prepare("rows.parquet", reward="exact_match", question=question, answer="answer", **flags)
    found = [p for s in ("train", "validation", "test") for p in read_prompts(folder / f"{s}.parquet")[0]]
    return sorted(found, key=lambda p: int(p.answer))


def asks(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def uri(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


FORMS: dict[str, Any] = {
    "verl": lambda i, data: {"prompt": asks("<image>What?"), "images": [{"bytes": data, "path": None}]},
    "TRL, a list": lambda i, data: {"prompt": asks("What?"), "images": [data]},
    "TRL, one image": lambda i, data: {"prompt": asks([{"type": "image"}, text("What?")]), "image": data},
    "a path": lambda i, data: {"prompt": asks("What?"), "image": f"{i}.png"},
    "a part with a path": lambda i, data: {
        "prompt": asks([{"type": "image", "image": f"{i}.png"}, text("What?")])
    },
    "OpenAI": lambda i, data: {
        "prompt": asks([{"type": "image_url", "image_url": {"url": uri(data)}}, text("What?")])
    },
    "a plain question": lambda i, data: {"prompt": "What?", "images": [{"bytes": None, "path": f"{i}.png"}]},
}


@pytest.mark.parametrize("form", FORMS)
def test_each_usual_form_gives_the_same_prompts(form: str) -> None:
    rows = [FORMS[form](i, data) | {"answer": str(i)} for i, data in enumerate(PICTURES)]
    prompts = prepared(rows)
    assert [p.images for p in prompts] == [(data,) for data in PICTURES]
    assert {p.messages[-1]["content"] for p in prompts} == {"<image>What?"}
    assert with_parts(prompts[0].messages)[-1]["content"] == [{"type": "image"}, text("What?")]


def test_rows_without_images_keep_the_marker_as_text() -> None:
    rows = [{"prompt": f"The tag <image> of HTML {i}", "images": [], "answer": str(i)} for i in range(8)]
    prompts = prepared(rows)
    assert not any(p.images for p in prompts)
    assert "<image>" in prompts[0].messages[-1]["content"]


def test_places_and_images_must_be_equal_in_number() -> None:
    rows = [{"prompt": "<image><image>?", "images": [PICTURES[i]], "answer": str(i)} for i in range(8)]
    with pytest.raises(DataError, match=r"2 places of images .* has 1 images"):
        prepared(rows)


def test_images_are_for_prompts_of_rl_and_not_for_worked_examples() -> None:
    rows = [{"prompt": "<image>?", "images": [data], "answer": str(i)} for i, data in enumerate(PICTURES)]
    with pytest.raises(ConfigError, match="has images, which worked examples cannot show"):
        prepared(rows, few_shot=1)
    with pytest.raises(DataError, match="only prompts for RL may"):
        prepare("rows.parquet", sft=True, question="prompt", answer="answer")


def loaded(source: Any) -> Any:
    return Image.open(BytesIO(read_image(source, Path(), "row 1")))


def test_pixels_become_plain_rgb_as_a_person_sees_them() -> None:
    jpeg = picture(1, 20, 10, "JPEG")
    assert read_image(jpeg, Path(), "row 1") == jpeg, "what is plain stays to the bit"
    turned = BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees
    Image.open(BytesIO(jpeg)).save(turned, "JPEG", exif=exif)
    assert loaded(turned.getvalue()).size == (10, 20)
    clear = BytesIO()
    Image.new("RGBA", (4, 4), (0, 0, 0, 0)).save(clear, "PNG")
    assert np.asarray(loaded(clear.getvalue())).tolist() == [[[255, 255, 255]] * 4] * 4
    assert loaded(picture(1, 8, 8, mode="L")).mode == "RGB"
    gif = BytesIO()
    Image.new("P", (5, 7)).save(gif, "GIF")
    assert loaded(gif.getvalue()).format == "PNG"
    assert image_size(read_image("1.png", Path(), "row 1")) == (17, 12)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("https://a.b/c.png", "downloads no images"),
        ("none.png", "cannot be read"),
        (b"no image", "cannot be read"),
        (PICTURES[0][:60], "cannot be read"),
        ({"bytes": None, "path": None}, "NoneType is not an image"),
        (7, "int is not an image"),
        ("data:image/png;base64,????", "cannot be read"),
    ],
)
def test_what_is_no_image_is_refused_in_one_sentence(source: Any, reason: str) -> None:
    with pytest.raises(DataError, match=reason) as refused:
        read_image(source, Path(), "row 1")
    assert refused.value.what.startswith("row 1: ")


def test_a_model_of_text_alone_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3"}), encoding="utf-8")
    check_images(tmp_path, [prompt("Nothing")])
    with pytest.raises(ModelError, match=r"trains Qwen2.5-VL and Qwen3-VL on images, not .* \(gemma3\)"):
        check_images(tmp_path, [prompt("<image>", PICTURES[0])])
