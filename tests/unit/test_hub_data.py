"""`skylite prepare owner/name` against a local server that answers as the hub does, and against its cache."""

from __future__ import annotations

import hashlib
import io
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from skylite.data.prompts import read_prompts
from skylite.errors import DataError, SkyliteError
from tests.prepared import prepare
from tests.unit.work_cases import parts, recorded_work

COMMIT = "0123456789abcdef0123456789abcdef01234567"
CONVERTED = "refs/convert/parquet"


def parquet(start: int, count: int) -> bytes:
    rows = [{"problem": f"{i} + 1?", "answer": str(i + 1)} for i in range(start, start + count)]
    stream = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), stream)
    return stream.getvalue()


class Hub(BaseHTTPRequestHandler):
    """The hub's answers to dataset_info and hf_hub_download."""

    repositories: dict[tuple[str, str], dict[str, bytes]] = {}
    """(name, branch) -> file -> content."""
    gated: set[str] = set()

    def do_GET(self) -> None:
        self.answer(with_body=True)

    def do_HEAD(self) -> None:
        self.answer(with_body=False)

    def answer(self, *, with_body: bool) -> None:
        path = unquote(self.path.partition("?")[0])
        if path.startswith("/api/datasets/"):
            name, _, branch = path.removeprefix("/api/datasets/").partition("/revision/")
            return self.info(name, branch or "main")
        if "/resolve/" in path:
            name, _, rest = path.removeprefix("/datasets/").partition("/resolve/")
            for (owner, branch), files in self.repositories.items():
                for ref in (branch, COMMIT):
                    file = rest.removeprefix(f"{ref}/")
                    if owner == name and rest.startswith(f"{ref}/") and file in files:
                        return self.file(files[file], with_body)
        return self.reply(404 if "/resolve/" in path else 200, {}, b"")

    def info(self, name: str, branch: str) -> None:
        if name in self.gated:
            return self.reply(403, {"X-Error-Code": "GatedRepo"}, b"{}")
        if not any(owner == name for owner, _ in self.repositories):
            return self.reply(404, {"X-Error-Code": "RepoNotFound"}, b"{}")
        files = self.repositories.get((name, branch))
        if files is None:
            return self.reply(404, {"X-Error-Code": "RevisionNotFound"}, b"{}")
        body = {"id": name, "sha": COMMIT, "siblings": [{"rfilename": file} for file in files]}
        return self.reply(200, {"Content-Type": "application/json"}, json.dumps(body).encode())

    def file(self, content: bytes, with_body: bool) -> None:
        etag = hashlib.sha256(content).hexdigest()
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        self.reply(200, headers, content, with_body)

    def reply(self, code: int, headers: dict[str, str], body: bytes, with_body: bool = True) -> None:
        self.send_response(code)
        for name, value in (headers | {"Content-Length": str(len(body))}).items():
            self.send_header(name, value)
        self.end_headers()
        if with_body and self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[type[Hub]]:
    from huggingface_hub import constants

    class Fresh(Hub):
        repositories = {}
        gated = set()

    server = ThreadingHTTPServer(("127.0.0.1", 0), Fresh)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    address = f"http://127.0.0.1:{server.server_address[1]}"
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(
        constants,
        "HUGGINGFACE_CO_URL_TEMPLATE",
        address + "/{repo_id}/resolve/{revision}/{filename}",
    )
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    yield Fresh
    server.shutdown()
    server.server_close()
    thread.join()


def sizes(folder: Path) -> list[int]:
    return [len(read_prompts(folder / f"{s}.parquet")[0]) for s in ("train", "validation", "test")]


def test_the_converted_branch_with_config_and_splits(
    hub: type[Hub], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hub.repositories["me/sums", CONVERTED] = {
        "easy/train/0000.parquet": parquet(0, 30),
        "easy/train/0001.parquet": parquet(30, 10),
        "easy/test/0000.parquet": parquet(50, 7),
        "hard/train/0000.parquet": parquet(70, 9),
    }
    flags = {"reward": "math", "config": "easy", "test_split": "test"}
    assert sizes(prepare("me/sums", **flags)) == [38, 2, 7]
    prompts, info = read_prompts(Path("data/sums/train.parquet"))
    assert (info.dataset, info.source_kind) == ("sums", "hub")
    assert info.source == "me/sums: easy/train/0000.parquet and 1 more"
    assert f"the hub: me/sums, branch {CONVERTED}, commit {COMMIT[:12]}" in info.notes
    assert "question: column 'problem'; answer: column 'answer'" in info.notes

    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    again = prepare("me/sums", out=tmp_path / "again", **flags)
    assert read_prompts(again / "train.parquet")[0] == prompts
    assert "the hub's local cache" in read_prompts(again / "train.parquet")[1].notes


def test_a_data_set_without_the_converted_branch(hub: type[Hub]) -> None:
    hub.repositories["me/plain", "main"] = {
        "README.md": b"# plain",
        "data/train-00000-of-00001.parquet": parquet(0, 20),
    }
    assert sizes(prepare("me/plain", reward="math")) == [18, 1, 1]


def test_a_download_shows_its_bytes_and_no_bar_of_the_hub(
    hub: type[Hub], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TQDM_POSITION", "-1")  # else they show on a terminal only
    file = parquet(0, 20)
    hub.repositories["me/plain", "main"] = {"data/train-00000-of-00001.parquet": file}
    with recorded_work() as found:
        prepare("me/plain", reward="math")
    what = "downloading me/plain/data/train-00000-of-00001.parquet"
    assert [p for p in parts(found) if p[0].startswith("downloading")] == [(what, len(file), len(file))]
    assert "%|" not in capfd.readouterr().err


def test_a_bad_row_is_named(hub: type[Hub]) -> None:
    hub.repositories["me/bad", "main"] = {"train.jsonl": b'{"question": "1?", "answer": "1"}\n{oops\n'}
    with pytest.raises(DataError, match=r"train.jsonl line 2 is not JSON"):
        prepare("me/bad", reward="math")


@pytest.mark.parametrize(
    ("target", "flags", "reason"),
    [
        ("me/nothing", {}, "me/nothing is no file or folder here. .* the hub has no public data set of that"),
        (
            "me/gated",
            {},
            "it is gated, and you are not logged in. Accept .* http://.*/datasets/me/gated, then",
        ),
        ("me/sums", {"split": "dev"}, "me/sums has no split 'dev'; it has partial-big, train"),
        ("me/sums", {"config": "x"}, "me/sums has no config 'x'; it has easy"),
    ],
)
def test_what_the_hub_does_not_have_is_one_sentence(
    hub: type[Hub], target: str, flags: dict[str, str], reason: str
) -> None:
    files = {"easy/train/0000.parquet": parquet(0, 9), "easy/partial-big/0000.parquet": parquet(0, 9)}
    hub.repositories["me/sums", CONVERTED] = files
    hub.gated.add("me/gated")
    with pytest.raises(SkyliteError, match=reason) as error:
        prepare(target, reward="math", **flags)
    assert "\n" not in str(error.value)
    assert not Path("data").exists()


def test_without_the_hub_the_message_names_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=r"HF_HUB_OFFLINE is set, and the local cache has no complete copy"):
        prepare("me/sums", reward="math")
