"""Names and contents of strangers' files cannot draw on the terminal."""

from __future__ import annotations

import ast
import io
from pathlib import Path

import pytest
from rich.console import Console

from skylite.processes.child import log_tail
from skylite.ui.live_panel import CompletionView, LivePanel, ScreenState
from skylite.untrusted_text import plain, plain_lines
from tests.unit.bad_inputs import call

SOURCE = Path(__file__).parents[2] / "src" / "skylite"
ODD = "a\x1b[2J\x1b]0;title\x07\x9b31m\x90x\x9c\u202eb\u2066\u200f\x08\r\x7f"
"""CSI and OSC, their one-byte C1 forms, bidirectional controls, backspace and carriage return."""


def is_plain(text: str) -> bool:
    return all(c.isprintable() or c == "\n" for c in text)


def test_plain_leaves_printable_characters_and_plain_lines_line_breaks() -> None:
    assert is_plain(plain(ODD))
    assert plain("é 漢 😀 #### 7") == "é 漢 😀 #### 7"
    assert plain("a\nb\tc") == "a b c"
    assert plain_lines("a\x1b\nb") == "a \nb"


@pytest.mark.parametrize(
    "command",
    [
        ["eval", "{}"],
        ["serve", "{}"],
        ["replay", "{}", "--step", "1"],
        ["adapters", "list", "{}"],
        ["adapters", "verify", "{}"],
        ["train", "--recipe", "{}.toml"],
        ["train", "--resume", "{}"],
        ["prepare", "{}.jsonl", "--question", "q", "--answer", "a", "--reward", "gsm8k"],
        ["prepare", "{}.py"],
    ],
    ids=lambda c: " ".join(c),
)
def test_a_name_in_an_error_is_plain(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / ODD
    folder.mkdir()
    (folder / "adapter_config.json").write_text('{"peft_type": "\\u001b[2J", "r": 1, "lora_alpha": 1}')
    (folder / "adapter_model.safetensors").write_bytes(b"x")
    (tmp_path / f"{ODD}.toml").write_text("[x\x1b]")
    (tmp_path / f"{ODD}.jsonl").write_text("{\x1b}")
    (tmp_path / f"{ODD}.py").write_text(f"raise ValueError({ODD!r})")
    reply = call([part.format(ODD) for part in command])
    assert reply.code == 2
    assert is_plain(reply.output), repr(reply.output)


def test_the_tail_of_a_log_is_plain(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    log.write_text(f"first {ODD.replace(chr(13), '')}end\n\x1b[31mred\x1b[0m\n", encoding="utf-8")
    tail = log_tail(log, 5)
    assert is_plain(tail), repr(tail)
    assert "red" in tail


def test_the_panel_is_plain() -> None:
    out = io.StringIO()
    console = Console(file=out, width=100, height=40)
    state = ScreenState(3, phase="training", detail=ODD, evaluations={ODD: ODD})
    state.sample = CompletionView(question=ODD, completion=ODD, reward=1.0, answer=ODD)
    console.print(LivePanel(state))
    assert is_plain(out.getvalue()), repr(out.getvalue())


@pytest.mark.parametrize("path", sorted((SOURCE / "cli").glob("*.py")), ids=lambda p: p.name)
def test_commands_print_plain_text_only(path: Path) -> None:
    """`ui.logs.show` makes text plain. `print` does not."""
    calls = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Call)]
    assert [n.lineno for n in calls if isinstance(n.func, ast.Name) and n.func.id == "print"] == []
