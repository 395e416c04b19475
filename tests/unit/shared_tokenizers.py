"""One process for each tokenizer and template, for all tests of a process that ask for it.

Starting it imports transformers, which takes most of a dry run. Tests about the process itself, its limits or
its end do not take part.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from skylite.data import chat_tokenizer
from skylite.hub import bundled_smollm2
from skylite.sandbox.sandbox import Sandbox

NOT_READ = (".safetensors", ".bin", ".gguf")
"""Files of a model that its tokenizer does not read."""


class Kept:
    """A sandbox that stays open for the next one with the same arguments and the same files."""

    started: dict[str, Sandbox] = {}

    def __init__(self, factory: str, model: str, *arguments: Any, **options: Any) -> None:
        files = [p for p in sorted(Path(model).iterdir()) if p.is_file() and p.suffix not in NOT_READ]
        contents = b"".join(p.name.encode() + p.read_bytes() for p in files)
        self.key = hashlib.sha256(contents + json.dumps(arguments[:1]).encode()).hexdigest()
        if b"strftime_now" in contents or "strftime_now" in str(arguments):
            self.key += str(arguments)
        self.own = Sandbox(factory, model, *arguments, **options)

    def start(self) -> None:
        if self.key not in self.started:
            self.own.start()
            self.started[self.key] = self.own

    def call(self, *arguments: Any) -> Any:
        return self.started[self.key].call(*arguments)

    def close(self) -> None:
        """Only if it did not start."""
        if self.started.get(self.key) is not self.own:
            self.own.close()


@contextmanager
def shared_tokenizers() -> Iterator[None]:
    """Share tokenizers, and check the files of the bundled model once."""
    folders: list[Path] = []

    def converted_folder() -> Path:
        folders.append(folders[0] if folders else found())
        return folders[0]

    found = bundled_smollm2.converted_folder
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chat_tokenizer, "Sandbox", Kept)
        patch.setattr(bundled_smollm2, "converted_folder", converted_folder)
        yield
