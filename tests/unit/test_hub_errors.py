"""What the command line says about models that the hub does not give. A server answers like the hub."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.unit.run_cases import write_data

WITHOUT_HUB = ("a local folder", "HF_HUB_OFFLINE=1", "smollm2-135m")


@contextmanager
def hub(status: int, **headers: str) -> Iterator[str]:
    """The address of a server that answers every request with this status."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name.replace("_", "-"), value)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def do_HEAD(self) -> None:
            self.do_GET()

        def log_message(self, format: str, *arguments: object) -> None:
            """Print nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def home(tmp_path: Path) -> Path:
    write_data(tmp_path / "data", 8)
    (tmp_path / "recipe.toml").write_text('[data]\npath = "data"\n[model]\nname = "owner/name"\n')
    return tmp_path


def refused(home: Path, endpoint: str, **env: str) -> str:
    """What `skylite train --dry-run` prints on stderr. It must be one sentence and exit code 2."""
    command = [sys.executable, "-c", "from skylite.cli.main import main; main()"]
    kept = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
    done = subprocess.run(
        [*command, "train", "--recipe", "recipe.toml", "--dry-run"],
        cwd=home,
        env={
            **kept,
            "HF_ENDPOINT": endpoint,
            "HF_HOME": str(home / "hf"),
            "CUDA_VISIBLE_DEVICES": "-1",
            **env,
        },
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    sentence = done.stderr.splitlines()[-1]
    assert sentence.startswith("skylite: The model 'owner/name' cannot be downloaded: ")
    return sentence


@pytest.mark.parametrize("status", [401, 403])
def test_a_gated_model_says_where_to_accept_its_licence_and_how_to_log_in(home: Path, status: int) -> None:
    with hub(status, X_Error_Code="GatedRepo") as url:
        said = refused(home, url)
        for part in ("gated, and you are not logged in", f"{url}/owner/name", "hf auth login", "HF_TOKEN"):
            assert part in said
        said = refused(home, url, HF_TOKEN="hf_secret")
    assert "your token has no access" in said
    assert f"{url}/owner/name" in said
    assert "hf_secret" not in said


def test_a_name_that_the_hub_does_not_know_may_be_private(home: Path) -> None:
    with hub(401, X_Error_Code="RepoNotFound") as url:
        said = refused(home, url)
    for part in ("no public model of that name", "Check the name", "hf auth login"):
        assert part in said


def test_a_token_that_the_hub_refuses_is_named(home: Path) -> None:
    with hub(401, X_Error_Message="Invalid credentials in Authorization header") as url:
        said = refused(home, url, HF_TOKEN="hf_secret")
    assert "does not accept your token" in said
    assert "hf_secret" not in said


def test_an_unreachable_hub_says_what_works_without(home: Path) -> None:
    with hub(200) as url:
        pass  # nothing listens there any more
    said = refused(home, url)
    assert f"{url} cannot be reached" in said
    assert all(part in said for part in WITHOUT_HUB)


def test_an_offline_cache_without_the_model_says_so(home: Path) -> None:
    said = refused(home, "http://127.0.0.1:9", HF_HUB_OFFLINE="1")
    assert "HF_HUB_OFFLINE is set" in said
    assert all(part in said for part in WITHOUT_HUB)


def test_a_hub_that_fails_is_named_with_its_answer(home: Path) -> None:
    with hub(418) as url:
        said = refused(home, url)
    assert f"{url} answered 418" in said
    assert all(part in said for part in WITHOUT_HUB)
