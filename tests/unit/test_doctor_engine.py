"""`skylite doctor --engine`: what it sees of a server, and the command that would serve."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from skylite.doctor import engine_probe
from skylite.doctor.checks import Finding
from skylite.doctor.engine_probe import LocalServer, flag_value, probe_engine
from skylite.errors import ConfigError
from tests.unit.http_cases import serving

BASE = {"id": "m", "root": "/models/my model", "parent": None}
ROUTES: dict[str, tuple[int, Any]] = {
    "/v1/models": (200, {"data": [BASE, {"id": "policy-v000001", "parent": "m"}]}),
    "/version": (200, {"version": "0.32.0"}),
    "/metrics": (200, 'vllm:lora_requests_info{max_lora="2"} 1.0\n'),
    "/v1/load_lora_adapter": (422, {}),
}


def probe(monkeypatch: pytest.MonkeyPatch, routes: dict[str, tuple[int, Any]], *argv: str) -> list[Finding]:
    local = LocalServer(argv=argv, env={}) if argv else None
    monkeypatch.setattr(engine_probe, "local_server", lambda *_: local)
    with serving(routes) as url:
        return probe_engine(f"{url}/v1")


def test_an_engine_that_fits_is_ok(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_probe, "vllm_version", lambda: "0.32.0")
    found = probe(monkeypatch, ROUTES, "vllm", "serve", "--max-lora-rank=64")
    assert [f.level for f in found] == ["ok"] * 4 + ["note"]
    assert [f.text for f in found[:4]] == [
        "vLLM 0.32.0",
        "LoRA is on; 1 adapter(s) loaded",
        "adapters can be loaded at run time (VLLM_ALLOW_RUNTIME_LORA_UPDATING=1)",
        "LoRA rank up to 64",
    ]
    assert "`skylite train` cannot use this server" in found[4].text


def test_each_fault_of_an_engine_is_found_with_the_command_that_serves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    routes = {k: v for k, v in ROUTES.items() if k in ("/version", "/v1/models")}
    routes["/v1/models"] = (200, {"data": [BASE]})
    found = probe(monkeypatch, routes, "vllm", "serve", "--max-lora-rank", "8")
    assert [f.level for f in found][1:4] == ["bad", "bad", "bad"]
    assert {f.fix.partition(" --host")[0] for f in found[1:4]} == {
        "start it with: VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 vllm serve '/models/my model'"
    }
    assert "--enable-lora --max-lora-rank " in found[1].fix


@pytest.mark.parametrize("flag", [["--tensor-parallel-size=4"], ["-tp", "4"]])
def test_the_command_keeps_the_gpus_of_a_server_on_this_machine(
    monkeypatch: pytest.MonkeyPatch, flag: list[str]
) -> None:
    routes = {k: v for k, v in ROUTES.items() if k in ("/version", "/v1/models")}
    found = probe(monkeypatch, routes, "vllm", "serve", *flag)
    assert " --tensor-parallel-size 4 " in f"{found[-2].fix} "
    assert "--tensor-parallel-size" not in probe(monkeypatch, routes, "vllm", "serve")[-2].fix


def test_a_rank_that_cannot_be_seen_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = probe(monkeypatch, ROUTES)[3]
    assert rank.level == "note"
    assert rank.fix == "start the server with --max-lora-rank 32"


def test_another_version_is_a_note_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_probe, "vllm_version", lambda: "0.31.0")
    assert probe(monkeypatch, ROUTES)[0].fix == "there: `pip install vllm==0.31.0`"
    silent = {path: answer for path, answer in ROUTES.items() if path != "/version"}
    assert probe(monkeypatch, silent)[0].fix == "there: `pip list | grep -i vllm`"


def test_the_process_that_serves_a_port_is_found() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        found = engine_probe.local_server("127.0.0.1", server.getsockname()[1])
    assert found is not None
    assert "pytest" in " ".join(found.argv)
    assert engine_probe.local_server("elsewhere.example", 80) is None
    assert flag_value(("a", "--x=1", "--y", "2"), "--y") == "2"
    assert flag_value(("a", "--x=1", "--y"), "--x") == "1"
    assert flag_value(("a", "--y"), "--y") is None


def test_another_server_and_a_wrong_url_are_refused() -> None:
    with serving({"/v1/models": (200, {"data": []})}) as url:
        (found,) = probe_engine(url)
    assert (found.level, "it lists no models" in found.text) == ("bad", True)
    with pytest.raises(ConfigError, match="'localhost:8000' is not the URL of a server"):
        probe_engine("localhost:8000")
