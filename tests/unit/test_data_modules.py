from __future__ import annotations

from pathlib import Path

import pytest

from skylite.data.data_prep_file import load_dataset
from skylite.errors import DataError
from skylite.rewards import load_reward
from skylite.rewards.call_rewards import score

FILES = sorted((Path(__file__).parents[2] / "data_prep").glob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.name)
def test_every_data_prep_file_loads_and_makes_prompts(path: Path) -> None:
    module = load_dataset(str(path))
    load_reward(module.reward)
    assert load_dataset(path.stem).name == module.name
    if module.synthetic_rows is not None:
        row = module.synthetic_rows("test", 0, (), None).rows[0]
        made = module.to_prompt(row, "x/test/0")
        assert made.id == "x/test/0"
        assert made.messages[-1]["role"] == "user"
        assert made.messages[1:-1] == module.few_shot
        assert module.reference is not None
        assert score(module.reward, load_reward(module.reward), [(made, module.reference(row))]) == [1.0]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("x = (", "cannot be imported: SyntaxError"),
        ("NAME = 'x'", "SYSTEM: Field required"),
        (
            "NAME = SYSTEM = 'x'; REWARD = 3; FEW_SHOT = []; load_rows = to_prompt = reference = print",
            "REWARD: Input should be a valid string",
        ),
        (
            "NAME = SYSTEM = REWARD = 'x'; FEW_SHOT = []; load_rows = to_prompt = 1; reference = print",
            "to_prompt: Input should be callable",
        ),
        (
            "NAME = SYSTEM = REWARD = 'x'; FEW_SHOT = [1, 2]; load_rows = to_prompt = reference = print",
            r"FEW_SHOT\[0\]: Input should be a valid dictionary",
        ),
    ],
)
def test_a_broken_file_is_refused_with_the_reason(tmp_path: Path, text: str, reason: str) -> None:
    (tmp_path / "mine.py").write_text(text, encoding="utf-8")
    with pytest.raises(DataError, match=reason):
        load_dataset(str(tmp_path / "mine.py"))


def test_unknown_names_list_the_known_ones() -> None:
    with pytest.raises(DataError, match=r"no bundled data set 'gsm9k'.*gsm8k"):
        load_dataset("gsm9k")


@pytest.mark.parametrize("name", ["nowhere.py", "./gsm8k", "data_prep/gsm8k", "gsm8k.txt", "../gsm8k", ""])
def test_a_name_with_a_slash_or_a_suffix_is_a_path(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=r"does not exist|no bundled data set ''"):
        load_dataset(name)


def test_a_bare_name_is_the_bundled_file_in_every_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data_prep").mkdir()
    for path in ("data_prep/gsm8k.py", "gsm8k.py", "gsm8k"):
        (tmp_path / path).write_text(
            (FILES[0].parent / "gsm8k.py")
            .read_text(encoding="utf-8")
            .replace('NAME = "gsm8k"', 'NAME = "mine"')
        )
    monkeypatch.chdir(tmp_path)
    assert load_dataset("gsm8k").name == "gsm8k"
    for path in ("data_prep/gsm8k.py", "./gsm8k.py", str(tmp_path / "gsm8k.py")):
        assert load_dataset(path).name == "mine"
