"""--help: sections, defaults and start-up; --version; shell completion."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import skylite
from skylite.cli.help import ELSEWHERE
from skylite.cli.main import app
from skylite.config.train import TrainConfig
from skylite.data.data_prep_file import load_dataset

GROUP: Any = typer.main.get_command(app)
COMMAND = [sys.executable, "-c", "from skylite.cli.main import main; main()"]


def commands(group: Any = GROUP, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, command in group.commands.items():
        yield from (
            commands(command, (*path, name)) if hasattr(command, "commands") else [((*path, name), command)]
        )


def help_text(*path: str) -> str:
    printed = CliRunner().invoke(app, [*path, "--help"], terminal_width=200, max_content_width=200)
    assert printed.exit_code == 0
    return printed.output


@pytest.mark.parametrize(
    ("path", "command"), list(commands()), ids=lambda x: " ".join(x) if isinstance(x, tuple) else ""
)
def test_every_option_shows_its_default(path: tuple[str, ...], command: Any) -> None:
    text = help_text(*path)
    for param in command.params:
        if param.param_type_name == "option":
            [row] = re.findall(rf"^  (?:-\w, )?{param.opts[0]}\b(?!-).*(?:\n {{4,}}.*)*", text, re.M)
            assert "default: " in row.lower() or "required" in row, row
            assert "default: none" not in row.lower(), row


def test_a_flag_that_is_off_says_so() -> None:
    found = re.findall(r"^  (--[\w-]+) .*\[default: off\]$", help_text("prepare"), re.M)
    flags = {
        "--synthetic",
        "--first-source",
        "--no-answer",
        "--drop-failing",
        "--replace",
        "--json",
        "--sft",
        "--pairs",
    }
    assert set(found) == flags


def test_the_defaults_in_words_are_those_of_the_settings() -> None:
    text = " ".join(help_text("train").split())
    found = dict(re.findall(r"--([\w-]+) <[^>]*> [^\[]*\[default: \(the recipe's, else ([^)]*)\)", text))
    config = TrainConfig()
    expected = {
        "model": config.model.name,
        "data": config.data.path,
        "steps": str(config.num_steps),
        "rank": str(config.lora.rank),
        "alpha": f"{config.lora.alpha:g}",
        "lr": f"{config.optim.lr:g}",
        "group-size": str(config.rollout.group_size),
        "seed": str(config.seed),
        "max-restarts": str(config.trainer.max_restarts),
    }
    in_words = {
        "reward": "the data's", "env": "one turn", "from-adapter": "a new adapter",
        "epochs": "--steps counts", "chat-template": "the model's", "log": "no loggers",
    }  # fmt: skip
    assert found == expected | in_words


def test_the_defaults_of_difficulty_are_those_of_the_data_sets() -> None:
    said = "Default: all for gsm8k, 2,3 for countdown, 4 for guess."
    assert said in " ".join(help_text("prepare").split())
    notes = {name: synthetic_note(name) for name in ("gsm8k", "countdown", "guess")}
    assert notes["gsm8k"].endswith(f"difficulty {[1, 2, 3, 4]})")
    assert notes["countdown"].endswith("difficulty [2, 3])")
    assert notes["guess"].endswith("difficulty [4])")


def synthetic_note(name: str) -> str:
    """What a data set records about problems that it generated without --difficulty."""
    rows = load_dataset(name).synthetic_rows
    assert rows is not None
    return rows("test", 0, (), 6).source


def test_types_are_plain_words() -> None:
    types = {found for path, _ in commands() for found in re.findall(r"<[^>]*>", help_text(*path))}
    assert types == {"<str>", "<int>", "<float>", "<path>"}
    assert re.search(r"^  RUN\.\.\. <path> ", help_text("report"), re.M)


def test_flags_and_commands_are_in_sections() -> None:
    headings = re.findall(r"^(\S.*):$", help_text("train"), re.M)
    assert headings == [
        "Model, data and reward",
        "Length",
        "Update",
        "Run folder and resume",
        "Checks and limits",
        "More settings",
        "Options",
    ]
    headings = re.findall(r"^(\S.*):$", help_text("serve"), re.M)
    assert headings == ["Arguments", "Which adapter", "Server", "More settings", "Options"]
    headings = re.findall(r"^(\S.*):$", help_text("env", "check"), re.M)
    assert headings[1:] == ["Episodes and model", "Model, data and reward", "More settings", "Options"]
    headings = re.findall(r"^(\S.*):$", help_text(), re.M)
    assert headings[:4] == ["Options", "Train", "Look at runs", "Use an adapter"]


@pytest.mark.parametrize("group", [(), ("adapters",), ("env",)], ids=" ".join)
def test_no_line_of_a_list_of_commands_is_cut_off(group: tuple[str, ...]) -> None:
    assert "..." not in CliRunner().invoke(app, [*group, "--help"]).output.split("COMMAND [ARGS]...")[1]


def test_the_list_of_commands_is_plain_text_and_imports_none_of_them() -> None:
    code = "import sys, skylite.cli.main as c\ntry: c.app(['--help'])\nexcept SystemExit: pass\n"
    done = subprocess.run(
        [sys.executable, "-c", code + "print(*sys.modules)"], capture_output=True, text=True, check=True
    )
    imported = set(done.stdout.splitlines()[-1].split())
    assert not imported & {"rich", "numpy", "pydantic", "torch", "skylite.cli.train"}


def test_version_is_one_line() -> None:
    printed = CliRunner().invoke(app, ["--version"])
    assert (printed.exit_code, printed.output) == (0, f"skylite {skylite.__version__}\n")


@pytest.mark.parametrize("words", [["-v", "--version"], ["--version", "-v"]])
def test_version_with_v_has_the_libraries(words: list[str]) -> None:
    printed = CliRunner().invoke(app, words)
    lines = printed.output.splitlines()
    assert printed.exit_code == 0
    assert f"torch {version('torch')}" in lines
    assert f"transformers {version('transformers')}" in lines
    assert any(line.startswith("vllm") for line in lines)


def test_a_missing_command_is_an_error() -> None:
    printed = CliRunner().invoke(app, ["-v"])
    assert printed.exit_code == 2
    assert "Missing command" in printed.output


@pytest.mark.parametrize(
    ("words", "expected"),
    [("skylite tr", ["train"]), ("skylite train --ep", ["--epochs"]), ("skylite adapters v", ["verify"])],
)
def test_the_shell_completes_commands_and_flags(words: str, expected: list[str]) -> None:
    env = {**os.environ, "_SKYLITE_COMPLETE": "complete_bash", "COMP_WORDS": words}
    env["COMP_CWORD"] = str(len(words.split()) - 1)
    code = "import sys; sys.argv[0] = 'skylite'; from skylite.cli.main import main; main()"
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.stdout.split() == expected, done.stderr


def test_the_completion_script_can_be_installed(tmp_path: Path) -> None:
    code = "import sys; sys.argv[0] = 'skylite'; from skylite.cli.main import main; main()"
    env = {**os.environ, "HOME": str(tmp_path), "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code, "--install-completion", "bash"],
        env=env, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "_SKYLITE_COMPLETE=complete_bash" in (tmp_path / ".bash_completions" / "skylite.sh").read_text()
    assert "skylite.sh" in (tmp_path / ".bashrc").read_text()


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        (["merge", "runs/x"], "skylite export RUN --merge"),
        (["resume", "runs/x"], "skylite train --resume RUN"),
        (["trian"], "'train'"),
        (["train", "--rank", "16.5"], "'16.5' is not a whole number"),
        (["train", "--lr", "fast"], "'fast' is not a number"),
    ],
)
def test_what_people_type_leads_to_the_right_command_or_value(words: list[str], remedy: str) -> None:
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 2
    assert remedy in done.output


def test_every_command_of_elsewhere_exists() -> None:
    for name, remedy in ELSEWHERE.items():
        assert CliRunner().invoke(app, [remedy.split()[0], "--help"]).exit_code == 0
        assert name not in GROUP.commands
