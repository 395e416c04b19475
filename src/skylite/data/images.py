"""Images of prompts: read where the data has them, brought to one form, and their places in messages.

Every image becomes a PNG, JPEG or WebP file in RGB without an orientation of its own. So the trainer's
processor and the engine's see the same pixels: they would treat alpha, palettes and EXIF in different ways.
"""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from PIL import Image as Pillow
from PIL import ImageOps

from skylite.errors import DataError
from skylite.types import IMAGE, Message
from skylite.untrusted_files import open_file

FORMATS = {"PNG": "image/png", "JPEG": "image/jpeg", "WEBP": "image/webp"}
"""Of Pillow -> the media type."""
COLUMNS = ("images", "image")
"""Columns with the images of a row: verl's and TRL's."""
MAX_BYTES = 64 << 20
_DATA_URI = re.compile(r"data:image/[\w.+-]+;base64,")


def find_source(part: dict[str, Any]) -> Any:
    """The image that a content part holds, in any of the usual forms; None: a column has it.

    {"type": "image", "image": X}, with "url", "path" or "base64" for "image", or
    {"type": "image_url", "image_url": X or {"url": X}}.
    """
    found = next((part[n] for n in ("image", "image_url", "url", "path", "base64") if part.get(n)), None)
    return found.get("url") if isinstance(found, dict) and "url" in found else found


def in_column(value: Any) -> list[Any]:
    """The images of a row's column: a list, one image, or none."""
    if value is None or value == "":
        return []
    return [image for image in value if image is not None] if isinstance(value, list) else [value]


def read_image(source: Any, folder: Path, where: str) -> bytes:
    """The image as skylite keeps it. Raises DataError.

    Args:
        source: bytes, a path, a data URI, or {"bytes", "path"} as the library datasets writes it.
        folder: of the data, for relative paths.
        where: the row, for messages.
    """
    if isinstance(source, dict):
        source = source.get("bytes") or source.get("path")
    try:
        if isinstance(source, str) and (match := _DATA_URI.match(source)):
            source = base64.b64decode(source[match.end() :], validate=True)
        elif isinstance(source, str) and "://" not in source:
            with open_file(folder / source) as stream:
                source = stream.read(MAX_BYTES + 1)
        if isinstance(source, bytes):
            return _plain_rgb(source)
    except (OSError, ValueError, Pillow.DecompressionBombError) as error:
        raise DataError(f"{where}: an image cannot be read: {error}.", "Correct or delete the row.") from None
    shown = source[:60] if isinstance(source, str) else type(source).__name__
    raise DataError(
        f"{where}: {shown} is not an image in the data.",
        "Give bytes, a path relative to the data file, or a data URI; skylite downloads no images.",
    )


def _plain_rgb(data: bytes) -> bytes:
    if len(data) > MAX_BYTES:
        raise ValueError(f"it has more than {MAX_BYTES >> 20} MiB")
    image = _open(data)
    image.load()
    upright = ImageOps.exif_transpose(image)
    if image.format in FORMATS and image.mode == "RGB" and not image.getexif() and not _is_animated(image):
        return data
    if upright.has_transparency_data:
        white = Pillow.new("RGBA", upright.size, "white")
        upright = Pillow.alpha_composite(white, upright.convert("RGBA"))
    stream = io.BytesIO()
    upright.convert("RGB").save(stream, "PNG")
    return stream.getvalue()


def _is_animated(image: Any) -> bool:
    return getattr(image, "n_frames", 1) > 1


def _open(data: bytes, formats: tuple[str, ...] = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")) -> Any:
    return Pillow.open(io.BytesIO(data), formats=formats)


def image_size(data: bytes) -> tuple[int, int]:
    """Width and height in pixels. Raises DataError for a file that is not one of FORMATS."""
    try:
        width, height = _open(data, tuple(FORMATS)).size
    except (OSError, ValueError, Pillow.DecompressionBombError) as error:
        raise DataError(f"An image of the data cannot be read: {error}.", "Prepare the data again.") from None
    return width, height


def picture() -> bytes:
    """A PNG of 64 x 64 pixels in 64 colours, for checks of what reads images."""
    image = Pillow.new("RGB", (8, 8))
    image.putdata([(37 * i % 256, 91 * i % 256, 151 * i % 256) for i in range(64)])
    stream = io.BytesIO()
    image.resize((64, 64), Pillow.Resampling.NEAREST).save(stream, "PNG")
    return stream.getvalue()


def data_uri(data: bytes) -> str:
    """The file as a URL that an engine reads."""
    return f"data:{FORMATS[_open(data, tuple(FORMATS)).format]};base64,{base64.b64encode(data).decode()}"


def with_parts(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The messages of a prompt with images, as chat templates of vision models read them."""
    return [
        {"role": m["role"], "content": list(_parts(m["content"])) if IMAGE in m["content"] else m["content"]}
        for m in messages
    ]


def _parts(content: str) -> Iterator[dict[str, str]]:
    for number, text in enumerate(content.split(IMAGE)):
        if number:
            yield {"type": "image"}
        if text:
            yield {"type": "text", "text": text}


def count_marks(messages: Sequence[Message]) -> int:
    """Places of images in the messages."""
    return sum(m["content"].count(IMAGE) for m in messages)
