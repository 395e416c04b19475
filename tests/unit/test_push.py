"""Pushes to a local server that speaks the hub's API (tests/fakes/hub.py)."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from skylite.errors import ConfigError, RunFailed
from skylite.export.push import check_push, push
from tests.fakes.hub import TOKEN, Hub, fake_hub


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with fake_hub() as server:
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        yield server


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "README.md").write_text("---\nlibrary_name: peft\n---\n# card\n")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"w" * 1000)
    (tmp_path / "adapter_config.json").write_text("{}")
    return tmp_path


@pytest.mark.parametrize("public", [False, True])
def test_a_folder_becomes_one_commit(hub: Hub, folder: Path, public: bool) -> None:
    address = push(folder, "me/mine", check_push("me/mine"), public=public, message="policy-v000002")
    assert address == f"{hub.url}/me/mine"
    assert hub.repos == {"me/mine": not public}
    assert hub.commits == ["policy-v000002"]
    assert hub.files == {p.name: p.read_bytes() for p in folder.iterdir()}
    assert len(hub.uploads) == 1, "the weights went through LFS"


def test_the_hubs_own_bars_stay_hidden(
    hub: Hub, folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    bars = importlib.import_module("huggingface_hub.utils.tqdm")  # the package has a class of this name
    monkeypatch.setattr(bars, "progress_bar_states", {})  # another test may have hidden them
    monkeypatch.setenv("TQDM_POSITION", "-1")  # else they show on a terminal only
    push(folder, "me/mine", TOKEN, public=False, message="m")
    assert capfd.readouterr() == ("", "")
    assert not bars.are_progress_bars_disabled()


@pytest.mark.parametrize(
    ("path", "status", "said", "message"),
    [
        ("/repos/create", 403, "no rights", r"the token may not write there \(no rights\)"),
        ("/preupload/", 404, "gone", "there is no such repository"),
        ("/commit/", 500, "boom", r"the hub answered 500 \(boom\)"),
        ("/repos/create", 401, "who?", "does not accept the token"),
    ],
)
def test_a_refusal_is_a_sentence_and_says_how_to_push_again(
    hub: Hub, folder: Path, path: str, status: int, said: str, message: str
) -> None:
    hub.refuse[path] = (status, said)
    with pytest.raises(RunFailed, match=message) as caught:
        push(folder, "me/mine", TOKEN, public=False, message="m")
    assert f"`hf upload me/mine {folder}`" in str(caught.value)
    assert TOKEN not in str(caught.value)
    assert hub.files == {}


def test_a_wrong_token_is_a_sentence(hub: Hub, folder: Path) -> None:
    with pytest.raises(RunFailed, match="does not accept the token"):
        push(folder, "me/mine", "hf_wrong", public=False, message="m")


def test_a_hub_that_is_down_is_a_sentence(hub: Hub, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(RunFailed, match="cannot be reached"):
        push(folder, "me/mine", TOKEN, public=False, message="m")


@pytest.mark.parametrize(("name", "message"), [("mine", "no owner"), ("a/b/c", "not a repository name")])
def test_a_bad_name_is_refused_before_any_work(hub: Hub, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_push(name)


def test_a_missing_token_is_refused_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="HF_TOKEN is not set"):
        check_push("me/mine")
