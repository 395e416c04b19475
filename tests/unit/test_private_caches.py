"""Temporary files and compiled code: no process takes them from a folder that another user can fill."""

from __future__ import annotations

import getpass
import json
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from skylite.errors import ConfigError
from skylite.processes.child import ProcessSpec, kill, poll, start
from skylite.processes.private_folders import (
    LIBRARY_CACHES,
    OTHER_FOLDERS,
    OWN_CACHES,
    cache_env,
    clear_unused,
)
from tests.other_user import OTHER, as_other_user, as_root, folder_of_all

COMPILE = """
import json, os, tempfile
from torch._inductor.runtime.cache_dir_utils import cache_dir
found = [cache_dir(), os.environ["TRITON_CACHE_DIR"], tempfile.gettempdir()]
print(json.dumps(found))
"""
PROBE = """
import json, os, sys, tempfile
names = [*sys.argv[1].split(","), "TMPDIR"]
print(json.dumps({"tempfile": tempfile.gettempdir(), **{n: os.environ.get(n) for n in names}}))
"""
ENTRY = """
import sys
from skylite.entry_point import main
from skylite.cli import main as cli
cli.app = lambda: exec(compile(sys.argv.pop(1), "command", "exec"), {})
main()
"""
NAMES = ",".join((*OWN_CACHES, *LIBRARY_CACHES, *OTHER_FOLDERS))


@pytest.fixture
def shared() -> Iterator[Path]:
    """Stands for /tmp: sticky, and every user may write to it."""
    with folder_of_all() as folder:
        yield folder


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "home").mkdir(mode=0o700)
    return tmp_path / "home"


def entry(code: str, env: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    """The real entry point with a command that runs `code`."""
    clean = {n: v for n, v in os.environ.items() if n not in NAMES.split(",")}
    return subprocess.run(
        [sys.executable, "-c", ENTRY, code, *words],
        env={**clean, **env},
        capture_output=True,
        text=True,
        check=False,
    )


def probe(home: Path, shared: Path, **env: str) -> dict[str, str | None]:
    reply = entry(PROBE, {"HOME": str(home), "TMPDIR": str(shared), **env}, NAMES)
    assert reply.returncode == 0, reply.stderr
    found: dict[str, str | None] = json.loads(reply.stdout)
    return found


def test_a_command_has_folders_of_its_own_and_leaves_none(home: Path, shared: Path) -> None:
    found = probe(home, shared)
    assert found["TMPDIR"] == found["tempfile"] != str(shared)
    assert Path(str(found["TMPDIR"])).parent == shared
    assert found["TORCHINDUCTOR_CACHE_DIR"] == str(home / ".cache/skylite/torchinductor")
    assert found["TRITON_CACHE_DIR"] == str(home / ".cache/skylite/triton")
    assert stat.S_IMODE((home / ".cache/skylite/triton").stat().st_mode) == 0o700
    assert found["VLLM_CACHE_ROOT"] is None, "vLLM's own cache in the home folder is safe"
    assert list(shared.iterdir()) == []


@as_root
def test_torch_takes_no_code_that_another_user_planted(home: Path, shared: Path) -> None:
    """The folder that torch would take, filled first by another user."""
    theirs = shared / f"torchinductor_{getpass.getuser()}"
    assert as_other_user(theirs.mkdir) == 0
    reply = entry(COMPILE, {"HOME": str(home), "TMPDIR": str(shared)})
    assert reply.returncode == 0, reply.stderr
    found = json.loads(reply.stdout)
    for path in found:
        assert not path.startswith(str(theirs)), found
        assert path != str(shared)


@pytest.mark.parametrize("name", [*OWN_CACHES, *LIBRARY_CACHES, *OTHER_FOLDERS])
def test_a_users_own_folder_stays_only_where_it_is_safe(
    home: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for other in NAMES.split(","):
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv(name, str(home / "mine"))
    assert name not in cache_env(home)
    for mode in (0o777, 0o1777, 0o702):
        (home / "mine").chmod(mode)
        with pytest.raises(ConfigError, match=f"^{name}=.*can be written to by other users"):
            cache_env(home)


def test_a_refusal_is_one_sentence(home: Path, shared: Path) -> None:
    reply = entry("pass", {"HOME": str(home), "TMPDIR": str(shared), "TRITON_CACHE_DIR": str(shared)})
    assert reply.returncode == 2
    assert reply.stderr.startswith(f"skylite: TRITON_CACHE_DIR={shared} is not safe")
    assert "Traceback" not in reply.stderr


@as_root
@pytest.mark.parametrize("place", ["itself", "above", "link"])
def test_a_folder_of_another_user_is_refused(
    home: Path, shared: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert as_other_user((shared / "a").mkdir) == 0
    assert as_other_user(lambda: (shared / "l").symlink_to(home)) == 0
    value = {"itself": shared / "a", "above": shared / "a" / "below", "link": shared / "l" / "cache"}[place]
    monkeypatch.setenv("TRITON_CACHE_DIR", str(value))
    with pytest.raises(ConfigError, match=f"belongs to the user with id {OTHER}"):
        cache_env(home)


@as_root
def test_a_home_that_another_user_made_gives_no_cache(
    shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """HOME=/tmp/home, which somebody else made first."""
    assert as_other_user((shared / "home").mkdir) == 0
    for name in NAMES.split(","):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(shared / "home"))
    found = cache_env(tmp_path)
    for name in (*OWN_CACHES, *LIBRARY_CACHES):
        assert Path(found[name]).parent == tmp_path, name


@as_root
def test_a_temporary_folder_of_another_user_is_refused(home: Path, shared: Path) -> None:
    assert as_other_user((shared / "tmp").mkdir) == 0
    reply = entry("pass", {"HOME": str(home), "TMPDIR": str(shared / "tmp")})
    assert reply.returncode == 2
    assert f"belongs to the user with id {OTHER}" in reply.stderr


def test_a_private_temporary_folder_of_the_user_stays(home: Path) -> None:
    (home / "tmp").mkdir(mode=0o700)
    assert probe(home, home / "tmp")["TMPDIR"] == str(home / "tmp")


def test_a_program_that_replaces_the_command_keeps_the_folder(home: Path, shared: Path) -> None:
    """As vLLM replaces `skylite serve`: the next start of skylite must not remove its folder."""
    code = (
        "import os, sys; os.execv(sys.executable, [sys.executable, '-c', "
        "'import os; print(os.environ[\"TMPDIR\"], flush=True); input()'])"
    )
    with subprocess.Popen(
        [sys.executable, "-c", ENTRY, code],
        env={**os.environ, "HOME": str(home), "TMPDIR": str(shared)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as server:
        assert server.stdout is not None
        folder = Path(server.stdout.readline().strip())
        clear_unused(shared)
        assert folder.is_dir()
        server.communicate("\n")
    clear_unused(shared)
    assert not folder.exists()


def test_a_child_gets_the_caches_too(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where no entry point ran before, as in a test or a notebook."""
    for name in NAMES.split(","):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(home))
    argv = [sys.executable, "-c", PROBE, NAMES]
    child = start(ProcessSpec(name="child", argv=argv, env={}, log_path=tmp_path / "log"))
    while poll(child) is None:
        pass
    kill(child)
    found = json.loads((tmp_path / "log").read_text())
    assert found["TORCHINDUCTOR_CACHE_DIR"] == str(home / ".cache/skylite/torchinductor")
