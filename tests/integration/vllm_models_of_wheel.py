"""Write skylite/engine/vllm_models_VERSION.json: the table of `vllm_models.py` for a vLLM not installed here.

    pip download --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
        --platform manylinux_2_28_x86_64 vllm==0.26.0
    python -m tests.integration.vllm_models_of_wheel vllm-0.26.0-*.whl

It imports the wheel's model classes beside the installed torch and transformers, without compiled code. vLLM
must take the machine for a CPU, so its version ends in +cpu here.
"""

from __future__ import annotations

import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

from skylite.engine.vllm.servable_models import TABLE
from tests.integration.vllm_models import describe, render

USERS = ("vllm/compilation/passes/", "vllm/model_executor/")
"""Code that names compiled operations while it is imported. Other code asks first whether they exist."""


def main(wheel: Path) -> None:
    version = wheel.name.split("-")[1]
    with tempfile.TemporaryDirectory(prefix="skylite-") as folder:
        unpack(wheel, Path(folder), version)
        sys.path.insert(0, folder)
        invent_missing_operations()
        table = describe() | {"vllm": version}
    TABLE.with_name(f"vllm_models_{version}.json").write_text(render(table), encoding="utf-8")


def unpack(wheel: Path, folder: Path, version: str) -> None:
    with zipfile.ZipFile(wheel) as packed:
        kept = [n for n in packed.namelist() if n.endswith((".py", ".json")) or ".dist-info/" in n]
        packed.extractall(folder, kept)
    metadata = folder / f"vllm-{version}.dist-info" / "METADATA"
    text = metadata.read_text(encoding="utf-8")
    metadata.write_text(
        text.replace(f"\nVersion: {version}\n", f"\nVersion: {version}+cpu\n"), encoding="utf-8"
    )


def invent_missing_operations() -> None:
    """Give importing code an object for every operation of vLLM that is not compiled here."""
    import torch

    right = torch._ops._OpNamespace.__getattr__

    def found(self: Any, name: str) -> Any:
        caller = sys._getframe(1).f_code.co_filename
        try:
            return right(self, name)
        except AttributeError:
            if any(user in caller for user in USERS):
                return MagicMock()
            raise

    setattr(torch._ops._OpNamespace, "__getattr__", found)  # noqa: B010


if __name__ == "__main__":
    main(Path(sys.argv[1]))
