"""The tokenizer in the parent process, which must stay small and start quickly."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from transformers import AutoTokenizer

QUESTION = [{"role": "user", "content": "Natalia sold clips to 48 of her friends."}]
LOAD = """
import json, os, sys
from pathlib import Path
from skylite.data.tokenizer import load_tokenizer
{before}
tokenizer = load_tokenizer(Path(sys.argv[1]))
quiet = os.environ.get("TRANSFORMERS_NO_ADVISORY_WARNINGS")
chat = tokenizer.encode_chat(json.loads(sys.argv[2]))
found = {{"chat": chat, "torch": "torch" in sys.modules, "quiet": quiet}}
import torch
print(json.dumps(found | {{"torch_after": torch.tensor(3).item()}}))
"""


def load(model: Path, before: str = "") -> tuple[dict[str, object], str]:
    """The result of a process that loads the tokenizer, and its stderr."""
    command = [sys.executable, "-c", LOAD.format(before=before), str(model), json.dumps(QUESTION)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    found: dict[str, object] = json.loads(done.stdout)
    return found, done.stderr


def test_the_tokenizer_loads_without_torch_and_gives_the_same_tokens(tiny_llama: Path) -> None:
    expected = AutoTokenizer.from_pretrained(tiny_llama).apply_chat_template(
        QUESTION, add_generation_prompt=True, return_dict=False
    )
    found, output = load(tiny_llama)
    assert found == {"chat": expected, "torch": False, "quiet": None, "torch_after": 3}
    assert "PyTorch" not in output


def test_transformers_finds_torch_if_it_is_already_imported(tiny_llama: Path) -> None:
    found, _ = load(
        tiny_llama, before="import torch; os.environ['TRANSFORMERS_NO_ADVISORY_WARNINGS'] = 'mine'"
    )
    assert found["torch"]
    assert found["quiet"] == "mine"
