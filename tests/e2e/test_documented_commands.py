"""Commands of the documents that need a finished run, on one that sampled from the fake engine.

test_finished_run.py runs `eval` and `serve` with vLLM, and other tests of this folder resume runs: here
training goes as far as --dry-run. Commands run in this process.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from skylite.processes.child import ProcessSpec
from tests.e2e.project import Project, make_project
from tests.e2e.running import DEADLINE_S
from tests.unit.bad_inputs import call
from tests.unit.doc_blocks import ON_A_RUN, PAGES, ROOT, blocks

pytestmark = [pytest.mark.e2e, pytest.mark.dist, pytest.mark.usefixtures("fake_engine")]
KEEP = (
    "sync.keep_every=1",
    "checkpoint.every=2",
    "checkpoint.keep_last=9",
    "trainer.deterministic=true",
    "eval.limit=0",
)
STEPS = 4
SMALLER = {"12": "2", "20": "4", "512": "4"}
"""Steps and limits of the documents, and of this run."""


def lines_of_pages() -> Iterator[tuple[Path, list[str]]]:
    """Each page's commands that no page before it has."""
    seen = set[str]()
    for page in PAGES:
        lines = [line for block in blocks(page) if block.note == ON_A_RUN for line in block.commands]
        new = {line.partition("#")[0].strip(): line for line in lines}
        if fresh := [line for command, line in new.items() if command not in seen]:
            yield page, fresh
        seen |= new.keys()


@pytest.fixture(scope="module")
def finished_once(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> Project:
    return make_project(tmp_path_factory.mktemp("documented"), tiny_llama)


@pytest.fixture
def reader(
    finished_once: Project, tmp_path: Path, fake_engine: None, monkeypatch: pytest.MonkeyPatch
) -> Project:
    """A copy of a project with a finished run, runs/NAME; the working folder."""
    if not (finished_once.root / "runs").exists():
        keep = [word for setting in KEEP for word in ("--set", setting)]
        done = finished_once.run(*finished_once.train_args("runs/NAME", STEPS, *keep), timeout_s=DEADLINE_S)
        assert done.returncode == 0, done.stderr
    shutil.copytree(finished_once.root, tmp_path / "project")
    monkeypatch.chdir(tmp_path / "project")
    return Project(tmp_path / "project", finished_once.model)


def words_of(line: str, project: Project) -> list[str]:
    """The command's words, with this run's sizes in place of the documents'."""
    words = [SMALLER.get(w, w).replace("000020", "000004") for w in shlex.split(line, comments=True)]
    folders = {"path/to/adapter": "runs/NAME/adapters/policy-v000004", "path/to/base": str(project.model)}
    words = [folders.get(word, word) for word in words]
    if "--epochs" not in words and "--resume" in words and "--steps" not in words:
        words += ["--steps", "60"]  # a reader's run has steps left
    if "--from-adapter" in words:  # a new run: the documents' default model is another one
        words += project.train_args("runs/next", 1)[1:]
    return [*words, "--dry-run"] if words[1:2] == ["train"] else words


def run_line(line: str, project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    words = words_of(line, project)
    if words[:2] == ["skylite", "serve"]:
        assert_serves(words[1:], monkeypatch)
    elif words[0] == "skylite":
        done = call(words[1:])
        assert done.code == 0, f"{line}\n{done.output}"
    elif words[0] != ".":  # . .venv/bin/activate
        subprocess.run(words, check=True, capture_output=True)


def assert_serves(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything up to the start of vLLM."""
    started: list[list[str]] = []

    def start(spec: ProcessSpec) -> None:
        started.append(list(spec.argv))
        raise SystemExit(0)

    with monkeypatch.context() as patch:
        patch.setattr("skylite.cli.serve.start", start)
        done = call(words)
    assert done.code == 0, done.output
    (argv,) = started
    version = int(words[words.index("--step") + 1]) if "--step" in words else STEPS
    assert any(f"policy-v{version:06d}" in word for word in argv), argv


@pytest.mark.parametrize(
    ("page", "lines"), [pytest.param(*p, id=str(p[0].relative_to(ROOT))) for p in lines_of_pages()]
)
def test_commands_on_a_finished_run(
    page: Path, lines: list[str], reader: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    for line in lines:
        run_line(line, reader, monkeypatch)
