"""Adapters that reach an engine over HTTP: whole and from their run, or not at all."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from skylite.config.engine import EngineConfig
from skylite.config.lora import LoraConfig
from skylite.engine import pushed_adapters
from skylite.engine.connections import Address
from skylite.engine.pushed_adapters import ReceiverClient
from skylite.engine.url_engines import check_url_engine
from skylite.engine.vllm.launcher import VllmLauncher
from skylite.errors import ConfigError, EngineFailed, ModelError
from skylite.rollout.resume import check_changes
from skylite.rollout.trusted_programs import allow_engines
from skylite.run.run_dir import AdapterVersion
from tests.fakes.receiver import Receiver, receivers
from tests.fakes.vllm_server import VllmStub, vllm_servers
from tests.logs import logged_messages
from tests.settings import typed
from tests.small_run import settings
from tests.unit.bad_inputs import call
from tests.unit.engine_cases import SPEC, publish
from tests.unit.test_server_check import own_ca
from tests.unit.test_url_engines import V0, V1, engines, own

Headers = dict[str, str]


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PUSH_KEY", "sesame")


def by_push(*made: Receiver) -> dict[str, Any]:
    return {"push_urls": [receiver.url for receiver in made], "push_key_env": "PUSH_KEY"}


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_an_engine_without_the_folder_loads_the_same_bytes_from_its_receiver(
    tmp_path: Path, tiny_llama: Path
) -> None:
    run = tmp_path / "run"
    run.mkdir()

    async def work(stubs: list[VllmStub], made: list[Receiver]) -> None:
        async with engines(run, tiny_llama, stubs, **by_push(*made)) as group:
            await group.take(publish(run, 0))
            for stub, there in zip(stubs, made, strict=True):
                assert stub.adapters == {V0: there.folder / V0}
                assert contents(there.folder / V0) == contents(run / V0)
            await group.take(publish(run, 1))
            assert [there.names for there in made] == [[V1], [V1]], "what is unloaded is deleted"
            assert len(await group.sample(1, V1)) == 1
            await group.every.unload_all()

    with vllm_servers(2, hidden=run) as stubs, receivers(tmp_path, 2) as made:
        asyncio.run(work(stubs, made))
        assert [there.names for there in made] == [[], []]


def test_a_lost_receiver_is_a_failure_of_its_engine_and_it_is_used_again(
    tmp_path: Path, tiny_llama: Path
) -> None:
    async def work(stubs: list[VllmStub], made: list[Receiver]) -> None:
        async with engines(tmp_path, tiny_llama, stubs, **by_push(*made)) as group:
            await group.take(publish(tmp_path, 0))
            made[1].stop()
            await group.take(publish(tmp_path, 1))
            assert group.changes == [(1, False)]
            assert len(await group.sample(1, V1)) == 1, "by the other"
            stubs[1].log.clear()
            made[1].start()
            await group.until((1, False), (1, True))
            assert stubs[1].adapters == {V1: made[1].folder / V1}
            assert made[1].names == [V1]

    with vllm_servers(2) as stubs, receivers(tmp_path / "there", 2) as made, logged_messages() as logged:
        asyncio.run(work(stubs, made))
    assert own(stubs[1].log)[-4:] == [f"unload {V1}", f"load {V1}", f"score {V1}", "score base"]
    (left_out,) = [text for text in logged if "left out until" in text]
    start = f"the receiver {made[1].url} of engine-1 at {stubs[1].url} sent no complete reply to /adapters/"
    assert left_out.startswith(start)
    assert left_out.endswith("It is left out until it is back; 1 of 2 engines do its work.")


def request_of(adapter: AdapterVersion) -> tuple[Headers, bytes]:
    """A right PUT."""
    parts = contents(adapter.path)
    files = [
        {"name": name, "size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        for name, data in parts.items()
    ]
    return {"Authorization": "Bearer sesame", "adapter-files": json.dumps(files)}, b"".join(parts.values())


def with_files(change: Callable[[list[dict[str, Any]]], Any]) -> Callable[[Headers, bytes], None]:
    def changed(headers: Headers, _: bytes) -> None:
        files = json.loads(headers["adapter-files"])
        change(files)
        headers["adapter-files"] = json.dumps(files)

    return changed


def put(there: Receiver, name: str, headers: Headers, body: bytes) -> httpx.Response:
    return httpx.put(f"{there.url}/adapters/{name}", headers=headers, content=body, trust_env=False)


def test_a_right_request_is_taken_twice_and_deleted(tmp_path: Path) -> None:
    """So that the next tests can fail."""
    adapter = publish(tmp_path, 1)
    with receivers(tmp_path / "there") as (there,):
        for _ in range(2):
            reply = put(there, "1a:policy-v000001", *request_of(adapter))
            assert (reply.status_code, reply.json()) == (200, {"path": f"{there.folder}/1a:policy-v000001"})
            assert there.names == ["1a:policy-v000001"]
        for _ in range(2):
            url = f"{there.url}/adapters/1a:policy-v000001"
            reply = httpx.delete(url, headers={"Authorization": "Bearer sesame"}, trust_env=False)
            assert (reply.status_code, there.names) == (200, [])


@pytest.mark.parametrize(
    ("change", "status", "words"),
    [
        (lambda h, _: h.pop("Authorization"), 401, "token is missing"),
        (lambda h, _: h.update(Authorization="Bearer sesam"), 401, "token is missing or wrong"),
        (lambda h, _: h.pop("adapter-files"), 400, "has the files adapter_config.json, adapter_model.safet"),
        (with_files(lambda files: files[0].update(name="adapter_model.bin")), 400, "has the files"),
        (with_files(lambda files: files[0].update(name="../evil")), 400, "has the files"),
        (with_files(lambda files: files.append(files[0])), 400, "has the files"),
        (with_files(lambda files: files.pop()), 400, "has the files"),
        (with_files(lambda files: [f.update(size=1 << 40) for f in files]), 413, "has more than"),
        (with_files(lambda files: [f.update(size=1 << 23) for f in files]), 422, " lacks "),
        (with_files(lambda files: files[2].update(size=1)), 422, "with other bytes than it was sent"),
        (with_files(lambda files: [f.update(sha256="0" * 64) for f in files]), 422, "with other bytes"),
    ],
)
def test_what_is_no_adapter_is_refused_and_leaves_nothing(
    tmp_path: Path, change: Callable[[Headers, bytes], None], status: int, words: str
) -> None:
    headers, body = request_of(publish(tmp_path, 1))
    change(headers, body)
    with receivers(tmp_path / "there") as (there,):
        reply = put(there, "policy-v000001", headers, body)
        assert reply.status_code == status
        assert words in reply.json()["detail"]
        assert there.names == []


def test_other_bytes_than_its_manifests_leave_nothing(tmp_path: Path) -> None:
    adapter = publish(tmp_path, 1)
    headers, body = request_of(adapter)
    spoilt = []
    for place in range(0, len(body), len(body) // 7):
        flipped = bytearray(body)
        flipped[place] ^= 1
        spoilt.append((headers, bytes(flipped)))
    spoilt.append((headers, body + b"x"))
    adapter.weights_path.write_bytes(b"weights 2")  # as long, and with a right hash of its own
    spoilt.append(request_of(adapter))
    adapter.manifest_path.write_text(json.dumps(json.loads(adapter.manifest_path.read_text()) | {"new": 1}))
    spoilt.append(request_of(adapter))
    with receivers(tmp_path / "there") as (there,):
        replies = [put(there, "policy-v000001", *request) for request in spoilt]
        assert [reply.status_code for reply in replies] == [422] * len(spoilt)
        assert [reply.json()["detail"].partition(":")[0] for reply in replies[-3:]] == [
            "The body is longer than its files.",
            "Its weights are not those of its manifest.",
            "Its manifest does not fit",
        ]
        assert there.names == []


@pytest.mark.parametrize(
    "name",
    ["..", "../policy-v000001", "%2e%2e%2fpolicy-v000001", "x", ".a:policy-v000001", "policy-v1", "%00"],
)
def test_a_name_that_is_no_adapters_reaches_no_file(tmp_path: Path, name: str) -> None:
    precious = tmp_path / "policy-v000001"
    precious.mkdir()
    headers, body = request_of(publish(tmp_path, 2))
    before = sorted(tmp_path.iterdir())
    with receivers(tmp_path / "policy-v000001") as (there,):
        for verb, more in (("DELETE", None), ("PUT", body)):
            connection = HTTPConnection("127.0.0.1", there.port)  # httpx would tidy the path up
            connection.request(verb, f"/adapters/{name}", more, headers)
            assert connection.getresponse().status in (400, 404)
            connection.close()
        assert there.names == []
    assert sorted(tmp_path.iterdir()) == before


def half_sent(port: int, headers: Headers, body: bytes) -> socket.socket:
    """A connection on which half of an adapter was sent."""
    raw = socket.create_connection(("127.0.0.1", port))
    head = f"PUT /adapters/policy-v000001 HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
    head += "".join(f"{key}: {value}\r\n" for key, value in headers.items())
    raw.sendall(head.encode() + b"\r\n" + body[: len(body) // 2])
    return raw


def until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_client_that_goes_away_in_the_middle_leaves_nothing(tmp_path: Path) -> None:
    with receivers(tmp_path / "there") as (there,):
        with half_sent(there.port, *request_of(publish(tmp_path, 1))):
            until(lambda: bool(there.names))
            assert not (there.folder / "policy-v000001").exists()
        until(lambda: not there.names)


def test_the_program_killed_in_the_middle_leaves_no_adapter_and_its_next_start_nothing(
    tmp_path: Path,
) -> None:
    folder, request = tmp_path / "there", request_of(publish(tmp_path, 1))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = ["from skylite.cli.main import main; main()", "receive", str(folder), "--port", str(port)]
    env = {**os.environ, "SKYLITE_API_KEY": "sesame"}
    for is_second in (False, True):
        with subprocess.Popen([sys.executable, "-c", *words], env=env, stderr=subprocess.PIPE) as process:
            assert process.stderr is not None
            while not (line := process.stderr.readline()).rstrip().endswith(b"Ctrl-C ends it."):
                assert line, "it ended"
            if not is_second:
                with half_sent(port, *request):
                    until(lambda: any(path.suffix != ".lock" for path in folder.iterdir()))
                    process.kill()
                assert not (folder / "policy-v000001").exists()
                continue
            assert [path.name for path in folder.iterdir()] == [".skylite.lock"]
            there = Receiver(folder, port=port)
            assert put(there, "policy-v000001", *request).status_code == 200
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 130
    assert there.names == ["policy-v000001"]


def check(stub: VllmStub, there: Receiver, model: Path, adapters: Path, **address: Any) -> Any:
    receiver_at = Address(there.url, **{"token": "sesame", **address})
    spec = replace(SPEC, model_path=model, address=Address(stub.url), receiver=receiver_at)
    return asyncio.run(check_url_engine(VllmLauncher(), spec, adapters, LoraConfig()))


def test_the_check_pushes_its_probe_and_says_what_is_wrong(
    tmp_path: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    pem, _ = own_ca(tmp_path)
    tls = {"ssl_certfile": str(pem), "ssl_keyfile": str(tmp_path / "key.pem")}
    with (
        vllm_servers(hidden=run) as (stub,),
        receivers(tmp_path / "a") as (there,),
        receivers(tmp_path / "b", 1, **tls) as (safe,),
    ):
        assert check(stub, there, tiny_llama, run).notes
        assert check(stub, safe, tiny_llama, run, ca_file=str(pem)).notes
        refused: list[tuple[Receiver, dict[str, Any], str]] = [
            (there, {"token": "wrong"}, r"refused GET /: The token is missing or wrong \(HTTP 401\). Start"),
            (there, {"token": None}, "The token is missing or wrong"),
            (safe, {}, "CERTIFICATE_VERIFY_FAILED"),
            (
                Receiver(run, port=int(stub.url.rpartition(":")[2])),
                {},
                r"refused GET /: Not Found \(HTTP 404",
            ),
        ]
        for where, address, words in refused:
            with pytest.raises(ConfigError, match=words) as no:
                check(stub, where, tiny_llama, run, **address)
            assert str(no.value).startswith(f"the receiver {where.url} of engine-0 ")
            assert "engine.push_key_env" in no.value.hint
        stub.hidden = there.folder
        with pytest.raises(ConfigError, match=f"does not see its receiver's folder, {there.folder} "):
            check(stub, there, tiny_llama, run)
        stub.hidden = None
        monkeypatch.setattr(pushed_adapters, "__version__", "9.9")
        with pytest.raises(ConfigError, match=r"is of skylite 0\.\d+\.\d+, and this is 9.9"):
            check(stub, there, tiny_llama, run)
        assert stub.adapters == {}
        assert there.names + safe.names == []
    assert list(run.iterdir()) == []


def test_a_receivers_full_disk_and_damage_of_the_run_are_told_apart(tmp_path: Path) -> None:
    """The first is a failure of the engine; the second ends the run, as without a receiver."""
    adapter = publish(tmp_path, 1)

    async def push(there: Receiver) -> None:
        client = ReceiverClient("engine-0", Address(there.url, "sesame"))
        try:
            await client.push(adapter)
        finally:
            await client.aclose()

    with receivers(tmp_path / "there") as (there,):
        asyncio.run(push(there))
        there.folder.rename(tmp_path / "moved")
        there.folder.write_text("in the way")
        with pytest.raises(EngineFailed, match=r"refused PUT /adapters/policy-v000001: .*\(HTTP 507\)\.$"):
            asyncio.run(push(there))
        adapter.weights_path.write_bytes(b"weights 2")
        with pytest.raises(ModelError, match="The weights were changed"):
            asyncio.run(push(there))


def test_settings_that_mean_nothing_are_refused() -> None:
    url, other = "http://10.0.0.1:8000", "http://10.0.0.1:8100"
    for wrong, words in (
        ({"push_urls": [other]}, "is for the engines of engine.urls, which is empty"),
        (
            {"urls": [url], "push_urls": ["10.0.0.1"]},
            "engine.push_urls names 10.0.0.1, which is not the addr",
        ),
        ({"urls": [url], "push_urls": [other, url]}, "names 2 receivers for the 1 engines of engine.urls"),
        ({"urls": [url, other], "push_urls": [url, url]}, f"engine.push_urls names {url} twice"),
        ({"urls": [url], "push_key_env": "KEY"}, "engine.push_key_env=KEY is for engine.push_urls, which"),
    ):
        with pytest.raises(ValidationError, match=words):
            EngineConfig.model_validate(wrong)


def test_a_key_goes_to_no_receiver_that_only_a_file_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    pushed: dict[str, Any] = {"push_urls": ["http://10.0.0.1:8100"], "push_key_env": "KEY"}
    config = settings(engine={"urls": ["http://10.0.0.1:8000"], **pushed})
    names: dict[str, Any] = {"engine.urls": config.engine.urls}
    recipe = Path("recipe.toml")
    with pytest.raises(ConfigError, match=r"recipe.toml sends adapters and the key in KEY to the receivers"):
        allow_engines(config, replace(typed(names), file=recipe))
    names |= {f"engine.{name}": value for name, value in pushed.items()}
    allow_engines(config, typed(names))
    allow_engines(config, replace(typed({}), file=recipe))
    check_changes(config, settings(engine={"urls": config.engine.urls}))
    sampled = config.as_sampled().engine
    assert (sampled.urls, sampled.push_urls, sampled.push_key_env) == ([], [], "")


def test_the_command_says_what_it_cannot_use(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.pem").write_text("no certificate")
    pem = str(tmp_path / "x.pem")
    for words, said in (
        (["--ssl-certfile", pem], "https takes a certificate and its key."),
        (["--ssl-certfile", pem, "--ssl-keyfile", pem], "are no certificate and its key"),
        (["--host", "here"], "--host here is not an IP address"),
        (["--host", "192.0.2.1"], "Nothing can listen on 192.0.2.1, port 8100"),
    ):
        reply = call(["receive", str(tmp_path / "there"), *words])
        assert (reply.code, said in reply.output) == (2, True), reply.output
    assert not (tmp_path / "there").exists()
