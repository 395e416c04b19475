"""Lets vLLM import its multimodal model classes without torchvision: skylite serves their text only.

Their modules import functions for pictures, and Qwen3.5's text model imports such a module. PyPI's
torchvision is built for CUDA, and beside torch for CPUs it breaks transformers.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

NAME = "torchvision"


class _Finder:
    """Finds torchvision and its modules. Their names exist, and using one raises ImportError."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] == NAME else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Empty(spec.name)

    def exec_module(self, module: ModuleType) -> None: ...


class _Missing(type):
    """A class of torchvision, or one of its functions, that must not be used."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls

    def __call__(cls, *_: Any, **__: Any) -> Any:
        raise ImportError("torchvision is not installed, and skylite serves text only")


class _Empty(ModuleType):
    """A module that has every name. One in lower case is a module, any other a class."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return import_module(f"{self.__name__}.{name}") if name.islower() else _Missing(name, (), {})


def install() -> None:
    """Stand in for torchvision if it is not installed. transformers still takes it for missing."""
    if find_spec(NAME) is not None:
        return
    from transformers.utils.import_utils import is_torchvision_available, is_torchvision_v2_available

    for is_available in (is_torchvision_available, is_torchvision_v2_available):
        is_available()  # remembers that it is not
    sys.meta_path.append(_Finder())
    skip_videos()


def skip_videos() -> None:
    """Let processors of images and videos load: transformers has those of videos with torchvision alone."""
    from transformers import processing_utils
    from transformers.video_processing_utils import VideoProcessorMixin

    class NoVideos(VideoProcessorMixin):  # type: ignore[misc]  # transformers has no types here
        # vLLM computes how long a video could become, also where it serves none.
        size, patch_size, merge_size = {"shortest_edge": 4096, "longest_edge": 1 << 20}, 16, 2
        temporal_patch_size, fps, min_frames, max_frames = 2, 2, 4, 8

        @classmethod
        def from_pretrained(cls, *_: Any, **__: Any) -> Any:
            return cls()

    names, name = processing_utils.MODALITY_TO_AUTOPROCESSOR_MAPPING._MAPPING_NAMES, "video_processor"
    names[name] = (__name__, "NoVideos")
    globals()["NoVideos"] = NoVideos
    processing_utils.MODALITY_TO_BASE_CLASS_MAPPING[name] = "ImageProcessingMixin"
