from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from skylite.cli.main import app
from skylite.data.prompts import PromptFileInfo, read_prompts
from skylite.data.reasoning_gym import reasoning_gym_examples
from skylite.errors import ConfigError, DataError, SkyliteError
from skylite.types import Prompt
from tests.prepared import prepare
from tests.unit.data_cases import RELEASED, gsm8k_folder

SPLITS = ("train", "validation", "test")


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Set the hub client's offline switch (read at import) and an empty cache: no test uses the network."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)


def read(folder: Path) -> dict[str, tuple[list[Prompt], PromptFileInfo]]:
    assert sorted(p.name for p in folder.iterdir()) == sorted(f"{s}.parquet" for s in SPLITS)
    return {split: read_prompts(folder / f"{split}.parquet") for split in SPLITS}


def own_file(path: Path, rows: list[dict[str, str]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def sums(count: int) -> list[dict[str, str]]:
    return [{"q": f"What is {i} + 1?", "a": str(i + 1)} for i in range(count)]


def test_gsm8k_from_a_folder(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = prepare("gsm8k", source=gsm8k_folder(tmp_path / "raw"))
    assert folder == Path("data/gsm8k")
    splits = read(folder)
    assert [len(splits[s][0]) for s in SPLITS] == [54, 6, 10]
    everything = [p for s in SPLITS for p in splits[s][0]]
    assert len({p.id for p in everything}) == 70
    assert all(p.source == "gsm8k" and "####" not in p.answer for p in everything)
    assert sum(p.difficulty >= 1 for p in everything) > 60  # a few released answers have no annotations
    info = splits["validation"][1]
    assert (info.source_kind, info.reward, info.count, info.split) == ("folder", "gsm8k", 6, "validation")
    assert info.notes in caplog.messages
    assert info.made_by == f"skylite prepare gsm8k --source {tmp_path / 'raw'} --seed 0"


def test_validation_does_not_depend_on_the_seed(tmp_path: Path) -> None:
    raw = gsm8k_folder(tmp_path / "raw")
    one = read(prepare("gsm8k", source=raw, seed=1, limit=20, out=tmp_path / "one"))
    two = read(prepare("gsm8k", source=raw, seed=2, limit=20, out=tmp_path / "two"))
    assert one["validation"][0] == two["validation"][0]
    assert one["train"][0] != two["train"][0]
    assert len(one["train"][0]) == one["train"][1].limit == 20
    assert not {p.id for p in one["train"][0]} & {p.id for p in one["validation"][0]}


@pytest.mark.skipif(not RELEASED.is_dir(), reason="the released GSM8K files are not next to this checkout")
def test_all_of_gsm8k(tmp_path: Path) -> None:
    splits = read(prepare("gsm8k", source=RELEASED))
    assert [len(splits[s][0]) for s in SPLITS] == [6961, 512, 1319]


def test_an_unavailable_source_falls_back_to_the_next_and_logs_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    raw = gsm8k_folder(tmp_path / "raw")
    info = read(prepare("gsm8k", first_source=True, source=raw))["train"][1]
    assert info.source_kind == "folder"
    assert "hub not available" in info.notes
    info = read(prepare("gsm8k", first_source=True, source=tmp_path / "nowhere", limit=8))["train"][1]
    assert (info.source_kind, info.dataset) == ("synthetic", "gsm8k-synthetic")
    assert "hub not available" in info.notes
    assert "nowhere is not a folder" in info.notes
    assert "source: synthetic, the only one available" in caplog.text


def test_synthetic_has_its_own_name_and_no_overlap() -> None:
    folder = prepare("gsm8k", synthetic=True, difficulty="1,2", limit=40)
    assert folder == Path("data/gsm8k-synthetic")
    splits = read(folder)
    assert [len(splits[s][0]) for s in SPLITS] == [40, 512, 1024]
    questions = [p.messages[-1]["content"] for s in SPLITS for p in splits[s][0]]
    assert len(set(questions)) == len(questions)
    assert {p.difficulty for p in splits["train"][0]} == {1, 2}
    assert {p.source for p in splits["train"][0]} == {"gsm8k-synthetic"}


def test_without_the_hub_the_error_names_the_alternatives() -> None:
    with pytest.raises(DataError, match="Give --source FOLDER with the released files, or --synthetic"):
        prepare("gsm8k")
    assert not Path("data").exists()


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (
            '{"question": "1 + 1?", "answer": "two\\n#### two"}',
            r"line 2: the reference answer .* scores 0 under the reward gsm8k; it must score 1.0",
        ),
        ('{"question": "1 + 1?", "answer": "2"}', r"line 2: the answer has no '####'"),
        ('{"question": "1 + 1?"}', r"line 2 has no column 'answer'; it has 'question'"),
        ('{"question": "", "answer": "#### 2"}', r"line 2 has an empty 'question'"),
        ("{oops", r"line 2 is not JSON"),
    ],
)
def test_a_bad_row_is_named_and_nothing_is_written(tmp_path: Path, line: str, reason: str) -> None:
    raw = gsm8k_folder(tmp_path / "raw")
    first, _, *rest = (raw / "test.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (raw / "test.jsonl").write_text("".join([first, line + "\n", *rest]), encoding="utf-8")
    with pytest.raises(DataError, match=reason) as error:
        prepare("gsm8k", source=raw, out=tmp_path / "out")
    assert str(raw / "test.jsonl") in str(error.value)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["raw"]


def test_a_users_file_is_split_by_question(tmp_path: Path) -> None:
    path = own_file(tmp_path / "mine.jsonl", [*sums(100), *sums(100)])
    splits = read(prepare(str(path), question="q", answer="a", reward="gsm8k"))
    assert [len(splits[s][0]) for s in SPLITS] == [180, 10, 10]
    questions = [{p.messages[-1]["content"] for p in splits[s][0]} for s in SPLITS]
    assert len(set.union(*questions)) == 100 == sum(map(len, questions))
    again = read(prepare(str(path), question="q", answer="a", reward="gsm8k", seed=1, out=tmp_path / "again"))
    assert again["test"][0] != splits["test"][0]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"target": "mine.jsonl"}, "needs --question and --answer and --reward.*--no-answer instead"),
        ({"target": "mine.jsonl", "question": "q"}, r"mine.jsonl needs --answer and --reward\."),
        ({"target": "mine.jsonl", "question": "q", "no_answer": True}, r"mine.jsonl needs --reward\."),
        (
            {"target": "mine.jsonl", "question": "q", "answer": "a"},
            r"needs --reward\. Example: --reward gsm8k\.$",
        ),
        ({"target": "none.jsonl"}, "none.jsonl does not exist"),
        ({"target": "somebody/data"}, r"somebody/data needs --reward\."),
        (
            {"target": "mine.jsonl", "question": "x", "answer": "a", "reward": "math"},
            "no column 'x'; it has 'q', 'a'",
        ),
        ({"target": "mine.jsonl", "question": "q", "answer": "a", "reward": "maths"}, "no reward 'maths'"),
        (
            {"target": "mine.jsonl", "question": "q", "answer": "a", "reward": "reasoning-gym"},
            "only scores the entries of reasoning-gym",
        ),
        ({"target": "mine.jsonl", "synthetic": True}, "--synthetic cannot be used with your own data"),
        (
            {"target": "none.jsonl", "question": "q", "answer": "a", "reward": "math"},
            "none.jsonl does not exist",
        ),
        ({"target": "gsm8k", "reward": "math"}, "--reward cannot be used with a data_prep file"),
        ({"target": "gsm8k", "synthetic": True, "first_source": True}, "cannot be combined"),
        ({"target": "gsm8k", "synthetic": True, "difficulty": "7"}, "no synthetic difficulty"),
        ({"target": "gsm8k", "source": Path("nowhere")}, "nowhere is not a folder"),
        ({"target": "gsm8k", "synthetic": True, "out": Path("mine.jsonl")}, "is a file, not a folder"),
        ({"target": "gsm8k", "synthetic": True, "out": Path(".")}, "contains other files"),
        ({"target": "reasoning-gym:nothing"}, "no task 'nothing'"),
        ({"target": "nothing"}, "no bundled data set 'nothing'"),
    ],
)
def test_a_bad_combination_is_refused_in_one_sentence(
    tmp_path: Path, arguments: dict[str, Any], reason: str
) -> None:
    own_file(tmp_path / "mine.jsonl", sums(10))
    with pytest.raises(SkyliteError, match=reason) as error:
        prepare(**arguments)
    assert error.value.exit_code == 2
    assert "\n" not in str(error.value)
    assert [p.name for p in tmp_path.iterdir()] == ["mine.jsonl"]


def test_prepared_files_are_replaced_atomically(tmp_path: Path) -> None:
    out = tmp_path / "out"
    prepare("gsm8k", source=gsm8k_folder(tmp_path / "raw"), out=out)
    prepare("gsm8k", synthetic=True, difficulty="1", limit=16, out=out)
    assert {info.dataset for _, info in read(out).values()} == {"gsm8k-synthetic"}
    before = {p.name: p.read_bytes() for p in out.iterdir()}
    (tmp_path / "raw" / "test.jsonl").write_text("{oops", encoding="utf-8")
    with pytest.raises(DataError):
        prepare("gsm8k", source=tmp_path / "raw", out=out)
    assert {p.name: p.read_bytes() for p in out.iterdir()} == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "raw"]


@pytest.mark.parametrize("task", ["chain_sum", "graph_color", "arc_agi"])
def test_reasoning_gym_task(task: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("reasoning_gym")
    monkeypatch.setattr("skylite.data.reasoning_gym.ROWS", {"test": 4, "validation": 2, "train": 8})
    splits = read(prepare(f"reasoning-gym:{task}", limit=6))
    assert [len(splits[s][0]) for s in SPLITS] == [6, 2, 4]
    assert splits["train"][1].reward == "reasoning-gym"
    assert "<answer>" in splits["train"][0][0].messages[0]["content"]


@pytest.mark.parametrize("task", ["rush_hour", "composite"])
def test_a_task_that_cannot_be_checked_is_refused(task: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("reasoning_gym")
    monkeypatch.setattr("skylite.data.reasoning_gym.ROWS", {"test": 1, "validation": 1, "train": 1})
    with pytest.raises((ConfigError, DataError), match=f"reasoning-gym task {task}"):
        reasoning_gym_examples(
            f"reasoning-gym:{task}", limit=None, seed=0, show_progress=lambda items, _: items
        )


def test_a_task_takes_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("reasoning_gym")
    monkeypatch.setattr("skylite.data.reasoning_gym.ROWS", {"test": 4, "validation": 2, "train": 8})
    splits = read(prepare("reasoning-gym:chain_sum min_terms=2 max_terms=2 max_digits=1"))
    questions = [prompt.messages[-1]["content"] for name in SPLITS for prompt in splits[name][0]]
    assert all(re.search(r"[^\d]\d [+-] \d =", question) for question in questions), questions


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("max_trems=2", "has no setting max_trems"),
        ("max_terms", "'max_terms' is not a setting"),
        ("seed=3", "'seed=3' is not a setting"),
        ("max_terms=2 max_terms=3", "gives max_terms twice"),
        ("min_terms=5 max_terms=2", "does not work with"),
        ("max_terms=many", "does not work with"),
        ("'max_terms=2", "cannot be read as words"),
    ],
)
def test_bad_settings_of_a_task_are_named(words: str, said: str) -> None:
    pytest.importorskip("reasoning_gym")
    with pytest.raises((ConfigError, DataError), match=re.escape(said)):
        prepare(f"reasoning-gym:chain_sum {words}")


def test_json_has_the_rows_of_each_split_and_is_alone_on_stdout(tmp_path: Path) -> None:
    path = own_file(tmp_path / "sums.jsonl", sums(20))
    words = ["prepare", str(path), "--question", "q", "--answer", "a", "--reward", "exact_match", "--json"]
    facts = json.loads(CliRunner().invoke(app, words).stdout)
    rows = {split: len(prompts) for split, (prompts, _) in read(Path(facts["folder"])).items()}
    assert (facts["rows"], sum(rows.values()), facts["reward"]) == (rows, 20, "exact_match")
