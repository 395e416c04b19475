"""Images for tests, and prompts with them."""

from __future__ import annotations

from io import BytesIO

import numpy as np
from PIL import Image

from skylite.types import Prompt


def picture(seed: int, width: int, height: int, form: str = "PNG", mode: str = "RGB") -> bytes:
    """An image of random soft blocks."""
    blocks = np.random.default_rng(seed).integers(0, 255, (4, 4, 3), dtype=np.uint8)
    stream = BytesIO()
    large = Image.fromarray(blocks).resize((width, height), Image.Resampling.BICUBIC)
    large.convert(mode).save(stream, form)
    return stream.getvalue()


def prompt(text: str, *images: bytes) -> Prompt:
    return Prompt(id=text, messages=[{"role": "user", "content": text}], answer="", source="", images=images)
