"""What a model reads of images: features of its tower, and positions on three axes (mRoPE).

Both come from transformers' own processor and model, of the Qwen-VL families. The features are computed in
the model's forward pass, once for each different image of the call, however many completions share it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from transformers import AutoImageProcessor, PreTrainedModel

from skylite.hub.text_model import reads_images
from skylite.types import IntArray, TrainingExample


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageCall:
    """The images of one model call; on the CPU until it."""

    reader: ImageReader
    pixel_values: Tensor
    """Of the different images, one after the other."""
    grids: Tensor
    """[N, 3] their patches: times, rows, columns."""
    rows: Tensor
    """[K] for each token with the image token's id, in the order of the input: its row among the features of
    all images. -1: a completion sampled it, and it means no image."""

    def for_one_pass(self) -> ImageFeatures:
        """The model's argument `mm_encoder_outputs`."""
        return ImageFeatures(self)


class ImageFeatures(dict[str, Any]):
    """Features that are computed when the model asks for them: inside its pass, where FSDP has gathered the
    tower."""

    def __init__(self, call: ImageCall) -> None:
        super().__init__()
        self._call = call

    def get(self, key: str, default: Any = None) -> Any:
        """transformers looks here before it calls a tower."""
        if key == "image" and key not in self:
            self[key] = self._compute()
        return super().get(key, default)

    def _compute(self) -> Any:
        call, model = self._call, self._call.reader.model
        token = torch.tensor([call.reader.token_id], device=model.device)
        stray = model.get_input_embeddings()(token)
        with nullcontext() if call.reader.has_lora else torch.no_grad():
            found = model.get_image_features(
                call.pixel_values.to(model.device), call.grids.to(model.device), return_dict=True
            )
        rows = call.rows.to(model.device)
        found.pooler_output = [torch.cat([*found.pooler_output, stray.to(model.dtype)])[rows]]
        if deep := getattr(found, "deepstack_features", None):
            none = torch.zeros_like(stray, dtype=model.dtype)
            found.deepstack_features = [[torch.cat([*layer, none])[rows]] for layer in deep]
        return found


@dataclass(frozen=True, kw_only=True)
class ImageReader:
    """Reads the images of examples for a model. `image_reader` makes it."""

    model: Any
    """The module with the tower and the text model."""
    token_id: int
    """Of the token that stands for a piece of an image."""
    path: Path
    has_lora: bool = False
    """Whether the tower is trained: its features have a gradient."""

    @cached_property
    def _processor(self) -> Any:
        return AutoImageProcessor.from_pretrained(self.path, local_files_only=True, trust_remote_code=False)

    def read(self, examples: Sequence[TrainingExample]) -> ReadImages | None:
        """The different images of the examples; None without any."""
        files = {image.key: image.data for e in examples for image in e.images}
        return ReadImages(self, {key: self._read(data) for key, data in files.items()}) if files else None

    def _read(self, data: bytes) -> tuple[Tensor, Tensor]:
        made = self._processor(images=[Image.open(BytesIO(data))], return_tensors="pt")
        return made["pixel_values"], made["image_grid_thw"]


@dataclass(frozen=True, slots=True)
class ReadImages:
    """Images as the processor makes them."""

    reader: ImageReader
    by_key: dict[int, tuple[Tensor, Tensor]]
    """ImageTokens.key -> pixel values, grid [1, 3]."""

    def positions(self, example: TrainingExample) -> IntArray:
        """[3, L] time, row and column of its tokens, as the model computes them."""
        grids = [self.by_key[image.key][1] for image in example.images]
        positions, _ = self.reader.model.get_rope_index(
            torch.from_numpy(example.token_ids)[None],
            mm_token_type_ids=torch.from_numpy(example.keys < 0).int()[None],
            image_grid_thw=torch.cat(grids) if grids else None,
        )
        found: IntArray = positions[:, 0].numpy()
        return found

    def call(self, token_ids: IntArray, keys: IntArray) -> ImageCall:
        """The images of a call that computes these tokens, in the order of its input."""
        merged = self.reader.model.config.vision_config.spatial_merge_size**2
        counts = {key: int(grid.prod()) // merged for key, (_, grid) in self.by_key.items()}
        firsts = dict(zip(counts, np.cumsum([0, *counts.values()]).tolist(), strict=False))
        rows, seen = [], dict.fromkeys(counts, 0)
        for key in keys[token_ids == self.reader.token_id].tolist():
            if key >= 0:
                rows.append(-1)
                continue
            # The tokens of an image follow each other. At its next place the count begins again.
            rows.append(firsts[key] + seen[key] % counts[key])
            seen[key] += 1
        return ImageCall(
            reader=self.reader,
            pixel_values=torch.cat([pixels for pixels, _ in self.by_key.values()]),
            grids=torch.cat([grid for _, grid in self.by_key.values()]),
            rows=torch.tensor(rows),
        )


def image_reader(base: PreTrainedModel, path: Path) -> ImageReader | None:
    """What reads images for this model; None if skylite trains it on text alone."""
    if not reads_images({"model_type": base.config.model_type}):
        return None
    return ImageReader(model=base.model, token_id=base.config.image_token_id, path=path)


def set_attention(base: PreTrainedModel, implementation: str) -> None:
    """Set transformers' `attn_implementation` of the text model. A tower keeps sdpa: it has no tree."""
    base.set_attn_implementation(implementation)
    tower: nn.Module | None = getattr(getattr(base, "model", None), "visual", None)  # GPT-2 has no `model`
    if isinstance(tower, PreTrainedModel):
        tower.set_attn_implementation("sdpa")
