"""`skylite doctor`: limits on open files, processes and address space."""

from __future__ import annotations

import os
import re
import resource
from pathlib import Path

import pytest

from skylite.doctor import checks

UNLIMITED = resource.RLIM_INFINITY


def test_a_low_limit_on_open_files_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, 100))
    found = checks.check_open_files()
    assert found.level == "bad"
    assert re.match(r"ulimit -n is 100 at most, and a run needs \d+", found.text)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, UNLIMITED))
    assert checks.check_open_files().level == "ok"


@pytest.mark.parametrize(
    ("soft_and_hard", "fix"),
    [
        ((100, UNLIMITED), "ulimit -u 65536"),
        ((100, 100), "limits.conf: `* hard nproc 65536` and `* soft nproc 65536`, then log in again"),
    ],
)
def test_a_low_limit_on_processes_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, soft_and_hard: tuple[int, int], fix: str
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: soft_and_hard)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    found = checks.check_processes(tmp_path, tmp_path / "none")
    assert (found.level, found.fix) == ("bad", fix)
    assert re.match(r"ulimit -u is 100, of which \d+ are used; a run needs \d+", found.text)
    monkeypatch.setattr(os, "geteuid", lambda: 0)  # the kernel does not apply it to root
    assert checks.check_processes(tmp_path, tmp_path / "none").text == "unlimited"


@pytest.mark.parametrize(
    ("line", "folder", "fix"),
    [
        ("0::/", "", "containers: `docker run --pids-limit=-1`"),
        ("8:pids:/", "pids", "containers: `docker run --pids-limit=-1`"),
        (
            "0::/user.slice/user-7.slice/session-1.scope",
            "user.slice/user-7.slice",
            "sudo systemctl set-property user-7.slice TasksMax=infinity",
        ),
    ],
)
def test_a_low_limit_of_a_cgroup_is_found(tmp_path: Path, line: str, folder: str, fix: str) -> None:
    own, place = tmp_path / "cgroup", tmp_path / "groups" / folder
    own.write_text(f"3:cpuset:/elsewhere\n{line}\n")
    place.mkdir(parents=True)
    (place / "pids.current").write_text("40\n")
    (place / "pids.max").write_text("150\n")
    found = checks.check_processes(tmp_path / "groups", own)
    assert (found.level, found.fix) == ("bad", fix)
    assert found.text.startswith(f"{place}/pids.max is 150, of which 40 are used; a run needs ")
    for enough in ("100000", "max"):
        (place / "pids.max").write_text(enough)
        assert checks.check_processes(tmp_path / "groups", own).level == "ok"


def test_a_limited_address_space_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    for hard, fix in ((UNLIMITED, "ulimit -v unlimited"), (1 << 30, "limits.conf: `* hard as unlimited`")):
        monkeypatch.setattr(resource, "getrlimit", lambda _, hard=hard: (1 << 30, hard))
        found = checks.check_address_space()
        assert (found.level, found.text.startswith("ulimit -v is 1048576 KiB")) == ("bad", True)
        assert found.fix.startswith(fix)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (UNLIMITED, UNLIMITED))
    assert checks.check_address_space().level == "ok"
