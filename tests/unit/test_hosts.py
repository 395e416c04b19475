"""Machines that train together: places, ranks, and what is refused before anything starts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from skylite.errors import ConfigError, RunFailed
from skylite.processes.hosts import (
    TrainerStart,
    check_interface,
    interface_env,
    number_ranks,
    require_one_host,
)
from skylite.processes.torchrun import trainer_command
from skylite.run.files import write_json
from skylite.run.host_places import announce, announced, take_place, wait_for_hosts
from tests.settings import load_config

START = TrainerStart("abc", resume=True)


def test_a_start_is_announced_whole_or_not_at_all(tmp_path: Path) -> None:
    assert announced(tmp_path) is None
    for text in ("", "[1]", '{"id": "abc"}', '{"id": "../a", "resume": true, "config": ""}', "{", "\udcff"):
        (tmp_path / "start.json").write_text(text, errors="surrogateescape")
        assert announced(tmp_path) is None
    announce(tmp_path, START)
    assert announced(tmp_path) == START


def test_each_machine_gets_one_place_of_each_start(tmp_path: Path) -> None:
    assert [take_place(tmp_path, START, 3) for _ in range(3)] == [1, 2, None]
    assert take_place(tmp_path, TrainerStart("def", resume=True), 3) == 1


def test_ranks_wait_for_all_machines_and_say_how_many_came(tmp_path: Path) -> None:
    take_place(tmp_path, START, 3)
    with pytest.raises(RunFailed, match=r"2 of 3 machines .* within 0\.3 s") as error:
        wait_for_hosts(tmp_path, "abc", 3, 0.3)
    assert f"skylite worker --join {tmp_path.parent}" in error.value.hint
    take_place(tmp_path, START, 3)
    wait_for_hosts(tmp_path, "abc", 3, 0.3)


def test_ranks_are_numbered_by_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    number_ranks(2, 3)
    assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == ("5", "6")


def test_machines_share_the_id_of_a_start_and_no_file_of_torchrun(tmp_path: Path) -> None:
    commands = [trainer_command(tmp_path, tmp_path / "r", 2, START, host=host) for host in (0, 1)]
    ids, files = (
        {command[command.index(flag) + 1] for command in commands}
        for flag in ("--rdzv-id", "--rdzv-endpoint")
    )
    assert ids == {"abc"}
    assert files == {str(tmp_path / "r" / "abc"), str(tmp_path / "r" / "abc-torchrun-1")}
    assert "--host" not in commands[0]
    assert commands[1][-2:] == ["--host", "1"]
    assert interface_env(None) == {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    assert interface_env("eth1") == {"GLOO_SOCKET_IFNAME": "eth1", "NCCL_SOCKET_IFNAME": "eth1"}


def test_hosts_and_interface_go_together() -> None:
    for settings in ({"trainer.hosts": 2}, {"trainer.interface": "eth1"}):
        with pytest.raises(ConfigError, match="do not go together"):
            load_config(None, settings)
    config = load_config(None, {"trainer.hosts": 2, "trainer.interface": "eth1"})
    with pytest.raises(ConfigError, match=r"trainer\.hosts=2 .* a replay uses one"):
        require_one_host(config, "a replay")
    check_interface("lo")
    with pytest.raises(ConfigError, match=r"eth77 .* is not on this machine, which has .*lo"):
        check_interface("eth77")


def test_the_first_of_several_reasons_stays_also_if_it_is_not_seen_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Why a rank failed: the ranks that its end takes down fail after it, on other machines, too."""
    monkeypatch.setattr(Path, "exists", lambda _: False)
    for reason in ("diverged", "connection closed"):
        write_json(tmp_path / "error.json", {"what": reason}, once=True)
    assert (tmp_path / "error.json").read_text() == '{\n "what": "diverged"\n}\n'
    assert os.listdir(tmp_path) == ["error.json"]
