"""The service's front: order, turns, keys, sessions, saved things, and 1,000 malformed requests."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any, cast
from urllib.parse import quote

import httpx
import numpy as np
import pytest

from skylite.errors import ConfigError, WriteFailed
from skylite.processes.frames import encode_frame, read_frame
from skylite.run.run_dir import RunDir
from skylite.service import front as front_module
from skylite.service import futures
from skylite.service import saved as saved_module
from skylite.service.app import ROUTES
from skylite.service.run import read_keys
from skylite.service.trainer_link import TrainerLink, trainer_at
from skylite.service.wire import _CLASSES
from tests.unit.service_cases import ANN, BOB, MODEL, Service, forward_backward, service

Check = Callable[[Service], Awaitable[None]]


def run(folder: Path, check: Check, **options: Any) -> None:
    async def main() -> None:
        async with service(folder, **options) as s:
            await check(s)

    asyncio.run(main())


def verbs(s: Service) -> list[str]:
    return [command["verb"] for command in s.trainer.commands]


def test_requests_of_a_policy_are_carried_out_in_the_order_of_their_numbers(tmp_path: Path):
    async def check(s: Service) -> None:
        name = await s.policy(await s.session())
        adam = {"model_id": name, "seq_id": 3, "adam_params": {"learning_rate": 0.5}}
        last = await s.post("optim_step", adam)
        second = await s.post("forward_backward", forward_backward(name, 2))
        assert verbs(s) == ["add"]  # the first one has not come
        first = await s.post("forward_backward", forward_backward(name, 1, tokens=(9,)))
        assert (await s.answer(last)) == {"metrics": {"grad_norm": 2.5}}
        assert b"ArrayRecord" in await s.answer(first)
        assert b"ArrayRecord" in await s.answer(second)
        sent = s.trainer.commands[1:]
        assert [c["verb"] for c in sent] == ["forward_backward", "forward_backward", "optim_step"]
        assert [len(c["data"][0]["token_ids"]) for c in sent[:2]] == [1, 3]
        assert sent[2]["params"]["learning_rate"] == 0.5
        again = await s.post("optim_step", adam)  # as a client does that has lost the reply
        assert again.json() == last.json()
        assert len(s.trainer.commands) == 4

    run(tmp_path, check)


@asynccontextmanager
async def rank_0(folder: Path, *, opened: asyncio.Event) -> AsyncIterator[tuple[TrainerLink, list[str]]]:
    """A link whose other end answers once `opened`, and the policies of the commands in their order."""
    order: list[str] = []

    async def work(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            command = await read_frame(reader)
            order.append(command["policy"])
            await opened.wait()
            writer.write(encode_frame({"done": 1.5}))

    async with trainer_at(folder / "trainer.sock") as linked:
        reader, writer = await asyncio.open_unix_connection(folder / "trainer.sock")
        writer.write(encode_frame({"ready": True, "choices": []}))
        working = asyncio.create_task(work(reader, writer))
        yield await linked, order
        working.cancel()
        writer.close()


def test_a_client_with_a_long_queue_does_not_starve_another(tmp_path: Path):
    async def check(s: Service) -> None:
        opened = asyncio.Event()
        async with rank_0(tmp_path, opened=opened) as (link, order):
            busy, quick = await s.policy(await s.session()), await s.policy(await s.session(BOB), key=BOB)
            s.front.trainer = link

            async def update(name: str, number: int, key: str) -> httpx.Response:
                body = {"model_id": name, "seq_id": number, "adam_params": {}}
                return await s.post("optim_step", body, key)

            for number in range(1, 101):
                await update(busy, number, ANN)
            replies = [await update(quick, number, BOB) for number in (1, 2, 3)]
            opened.set()
            for reply in replies:
                await s.answer(reply, BOB)
            assert order[:6] == [busy, quick, busy, quick, busy, quick]
            s.front.trainer = cast(Any, s.trainer)

    run(tmp_path, check)


def test_a_refused_request_takes_its_turn(tmp_path: Path):
    async def check(s: Service) -> None:
        name = await s.policy(await s.session())
        bad = await s.post("forward_backward", forward_backward(name, 1, "gspo"))
        good = await s.post("forward_backward", forward_backward(name, 2))
        refused = await s.answer(bad)
        assert refused["category"] == "user"
        assert "'gspo' is not offered" in refused["error"]
        assert b"ArrayRecord" in await s.answer(good)

    run(tmp_path, check)


def test_policies_get_the_seed_rank_and_modules_that_were_asked_for(tmp_path: Path):
    async def check(s: Service) -> None:
        session = await s.session()
        await s.policy(session, 0, rank=3, seed=11, train_mlp=False)
        await s.policy(session, 1)
        first, second = s.trainer.commands
        assert first["lora"] == {"rank": 3, "alpha": 32.0, "target_modules": ["q_proj"]}
        assert first["seed"] == 11
        assert second["lora"]["target_modules"] == "all-linear"
        lora = {"rank": 9}
        body = {"session_id": session, "model_seq_id": 2, "base_model": MODEL, "lora_config": lora}
        reply = await s.post("create_model", body)
        assert reply.status_code == 400
        assert "rank 9 is not between 1 and 8" in reply.json()["detail"]
        other = await s.post("create_model", body | {"base_model": "other/model"})
        assert other.status_code == 404
        assert f"This service has '{MODEL}'" in other.json()["detail"]

    run(tmp_path, check)


def test_the_limit_of_policies_holds_and_a_session_that_ends_frees_them(tmp_path: Path):
    async def check(s: Service) -> None:
        session = await s.session()
        name = await s.policy(session)
        body = {"session_id": session, "model_seq_id": 1, "base_model": MODEL, "lora_config": {"rank": 1}}
        full = await s.post("create_model", body)
        assert "its limit (--policies)" in full.json()["detail"]
        assert (
            await s.post(f"sessions/{session}/finish", {"reason": {"type": "success"}})
        ).status_code == 204
        assert s.trainer.policies == set()
        assert (await s.post("get_info", {"model_id": name})).status_code == 404
        assert (await s.post("session_heartbeat", {"session_id": session})).status_code == 410
        await s.policy(await s.session())

    run(tmp_path, check, policies=1)


def test_a_silent_client_loses_what_it_has_not_saved(tmp_path: Path):
    async def check(s: Service) -> None:
        session = await s.session()
        name = await s.policy(session)
        saved = await s.answer(await s.post("save_weights", {"model_id": name, "seq_id": 1, "path": "kept"}))
        waiting = await s.post("optim_step", {"model_id": name, "seq_id": 9, "adam_params": {}})
        assert waiting.status_code == 200
        other = await s.session(BOB)
        for _ in range(8):  # Bob gives signs of life
            await asyncio.sleep(0.1)
            assert (await s.post("session_heartbeat", {"session_id": other}, BOB)).status_code == 200
        assert s.trainer.policies == set()
        assert (await s.post("session_heartbeat", {"session_id": session})).status_code == 410
        load = {"session_id": await s.session(), "model_seq_id": 0, "path": saved["path"], "optimizer": True}
        loaded = await s.answer(await s.post("load_weights", load))
        assert loaded["model_id"].endswith(":train:0")
        assert s.trainer.commands[-1]["path"].endswith("weights/kept/step-000000")

    run(tmp_path, check, timeout_s=0.4)


def test_what_was_saved_is_there_after_a_restart_for_its_owner(tmp_path: Path):
    async def save(s: Service) -> None:
        name = await s.policy(await s.session(), rank=2)
        for number, path in (
            (1, "save_weights"),
            (2, "save_weights_for_sampler"),
            (3, "save_weights_external"),
        ):
            reply = await s.post(path, {"model_id": name, "seq_id": number, "path": "x.1"})
            saved.append((await s.answer(reply))["path"])

    async def load(s: Service) -> None:
        info = (await s.post("weights_info", {"tinker_path": saved[0]})).json()
        assert info["lora_rank"] == 2
        assert (await s.post("weights_info", {"tinker_path": saved[0]}, BOB)).status_code == 404
        session = await s.session()
        body = {"session_id": session, "sampling_session_seq_id": 0, "model_path": saved[1]}
        sampler = (await s.post("create_sampling_session", body)).json()["sampling_session_id"]
        sample = {
            "sampling_session_id": sampler,
            "seq_id": 0,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1]}]},
            "sampling_params": {"max_tokens": 1},
        }
        assert await s.answer(await s.post("asample", sample)) == b"sampled 1"
        model = saved[0].split("/")[2]
        urls = (
            await s.get(f"training_runs/{model}/checkpoints/external_weights/x.1/external_weights_urls")
        ).json()
        file = await s.http.get(urls["urls"]["adapter_config.json"])  # without a key: the URL has a secret
        assert file.text == "adapter_config.json"
        assert (
            await s.http.get(urls["urls"]["adapter_config.json"].replace("adapter_c", "c"))
        ).status_code == 404
        listed = (await s.get(f"training_runs/{model}/checkpoints")).json()["checkpoints"]
        assert {c["checkpoint_type"] for c in listed} == {"training", "sampler", "external"}
        deleted = await s.http.request(
            "DELETE",
            f"/api/v1/training_runs/{model}/checkpoints/weights/x.1",
            headers={"X-API-Key": ANN},
        )
        assert deleted.status_code == 204
        assert (await s.post("weights_info", {"tinker_path": saved[0]})).status_code == 404
        assert not list(tmp_path.glob("policies/*/weights/*"))
        assert await s.policy(await s.session()) != model
        reply = await s.post(
            "save_weights_for_sampler",
            {"model_id": await s.policy(await s.session(), 1), "seq_id": 1, "path": "y"},
        )
        await s.answer(reply)
        assert s.trainer.commands[-1]["version"] == 3  # no version is written twice

    saved: list[str] = []
    run(tmp_path, save)
    run(tmp_path, load)


def test_only_the_newest_unnamed_adapters_of_a_policy_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    async def check(s: Service) -> None:
        name = await s.policy(await s.session())
        for number in range(1, 6):
            body = {"model_id": name, "seq_id": number, "sampling_session_seq_id": number}
            assert "sampling_session_id" in await s.answer(await s.post("save_weights_for_sampler", body))
        await asyncio.sleep(0.5)
        assert s.front.samplers.forgotten == [1, 2, 3]  # type: ignore[attr-defined]

    monkeypatch.setattr(front_module, "KEPT_UNNAMED", 2)
    run(tmp_path, check, timeout_s=1.0)


def test_what_has_expired_is_deleted_and_a_full_disk_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    async def check(s: Service) -> None:
        name = await s.policy(await s.session())
        for number, path in ((1, "short"), (2, "long")):
            body = {"model_id": name, "seq_id": number, "path": path, "ttl_seconds": 3600}
            await s.answer(await s.post("save_weights", body))
        url = f"/api/v1/training_runs/{name}/checkpoints/weights/long/ttl"
        reply = await s.http.put(url, json={"ttl_seconds": None}, headers={"X-API-Key": ANN})
        assert reply.status_code == 204
        now = time.time()
        monkeypatch.setattr(time, "time", lambda: now + 4000)
        with monkeypatch.context() as full:
            full.setattr(saved_module, "write_json", refuse)
            await asyncio.sleep(0.4)
        await asyncio.sleep(0.4)
        listed = (await s.get(f"training_runs/{name}/checkpoints")).json()["checkpoints"]
        assert [c["checkpoint_id"] for c in listed] == ["weights/long"]
        assert [p.name for p in tmp_path.glob("policies/*/weights/*")] == ["long"]

    def refuse(*_: Any) -> None:
        raise WriteFailed("the disk is full")

    run(tmp_path, check, timeout_s=0.8)


def test_another_key_never_works(tmp_path: Path):
    async def check(s: Service) -> None:
        session = await s.session()
        name = await s.policy(session)
        body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": MODEL}
        sampler = (await s.post("create_sampling_session", body)).json()["sampling_session_id"]
        path = (await s.answer(await s.post("save_weights", {"model_id": name, "seq_id": 1, "path": "a"})))[
            "path"
        ]
        future = (await s.post("optim_step", {"model_id": name, "seq_id": 2, "adam_params": {}})).json()[
            "request_id"
        ]
        prompt = {"chunks": [{"type": "encoded_text", "tokens": [1]}]}
        turn = {"model_id": name, "seq_id": 3}
        posts: list[tuple[str, Any]] = [
            ("session_heartbeat", {"session_id": session}),
            (f"sessions/{session}/finish", {}),
            (
                "create_model",
                {"session_id": session, "model_seq_id": 5, "base_model": MODEL, "lora_config": {"rank": 1}},
            ),
            ("get_info", {"model_id": name}),
            ("forward_backward", forward_backward(name, 3)),
            ("optim_step", {**turn, "adam_params": {}}),
            ("save_weights", {**turn, "path": "b"}),
            ("save_weights_for_sampler", {**turn, "path": "b"}),
            ("save_weights_external", {**turn, "path": "b"}),
            ("load_weights", {**turn, "path": path, "optimizer": True}),
            ("create_sampling_session", {**body, "sampling_session_seq_id": 1}),
            ("join_sampling_session", {"sampling_session_id": sampler}),
            (
                "asample",
                {"sampling_session_id": sampler, "seq_id": 0, "prompt": prompt, "sampling_params": {}},
            ),
            ("retrieve_future", {"request_id": future}),
            ("cancel_future", {"request_id": future}),
            ("weights_info", {"tinker_path": path}),
        ]
        gets = [
            f"sessions/{session}",
            f"samplers/{sampler}",
            f"training_runs/{name}",
            f"training_runs/{name}/checkpoints",
        ]
        before = len(s.trainer.commands)
        for key, statuses in ((BOB, {404}), ("tml-wrong", {401}), ("", {401})):
            for where, what in posts:
                reply = await s.post(where, what, key)
                assert reply.status_code in statuses, (where, key, reply.text)
                assert reply.json()["detail"]
            for where in gets:
                assert (await s.get(where, key)).status_code in statuses, where
        own = {"session_id": await s.session(BOB), "model_seq_id": 0, "path": path, "optimizer": False}
        assert (await s.post("load_weights", own, BOB)).status_code == 404
        assert (await s.get("training_runs", BOB)).json()["training_runs"] == []
        assert (await s.get("checkpoints", BOB)).json()["checkpoints"] == []
        await asyncio.sleep(0.01)
        assert len(s.trainer.commands) == before + 1  # Ann's optim_step
        assert (await s.post("session_heartbeat", {"session_id": session})).status_code == 200

    run(tmp_path, check)


def test_a_request_that_takes_long_is_asked_for_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    async def check(s: Service) -> None:
        name = await s.policy(await s.session())
        s.trainer.delay_s = 0.3
        reply = (await s.post("optim_step", {"model_id": name, "seq_id": 1, "adam_params": {}})).json()
        again = await s.post("retrieve_future", reply)
        assert again.status_code == 408
        assert again.json()["queue_state"] == "active"
        await asyncio.sleep(0.4)
        assert (await s.post("retrieve_future", reply)).json()["metrics"] == {"grad_norm": 2.5}

    monkeypatch.setattr(futures, "WAIT_S", 0.1)
    run(tmp_path, check)


SENTENCES: list[tuple[dict[str, Any], str]] = [
    ({"tokens": (1, 100)}, "the model does not know"),
    ({"tokens": tuple(range(33))}, "has 33 tokens"),
    ({"weights": np.ones(2, np.float32)}, "weights has 2 values, and target_tokens 3"),
    ({"weights": np.array([1, np.nan, 1], np.float32)}, "not finite"),
    ({"target_tokens": np.arange(4)}, "4 target_tokens for 3 tokens"),
    ({"target_tokens": None}, "has no target_tokens"),
    ({"loss": "ppo", "advantages": None}, "has no 'advantages'"),
    ({"mask": np.ones(3, np.float32)}, "reads no 'mask'"),
]


def test_bad_data_is_refused_with_its_place_and_reason(tmp_path: Path):
    async def check(s: Service) -> None:
        name = await s.policy(await s.session())
        for number, (changes, sentence) in enumerate(SENTENCES, start=1):
            reply = await s.answer(
                await s.post("forward_backward", forward_backward(name, number, **changes))
            )
            assert sentence in reply["error"], reply
            assert reply["error"].startswith("Datum 0")
        image = _CLASSES["ForwardBackwardRequest"](model_id=name, seq_id=len(SENTENCES) + 1, loss_fn="ppo")
        image.data.add().model_input.add().image.SetInParent()
        reply = await s.answer(await s.post("forward_backward", image.SerializeToString()))
        assert "This service trains on text alone" in reply["error"]

    run(tmp_path, check)


def damaged(rng: random.Random, body: Any) -> bytes:
    """A request with one or more of its parts replaced, lost or cut."""
    if isinstance(body, bytes):
        data = bytearray(body)
        for _ in range(rng.randint(1, 4)):
            place = rng.randrange(len(data))
            data[place : place + rng.randint(0, 2)] = rng.randbytes(rng.randint(0, 3))
        return bytes(data[: rng.choice([len(data), rng.randrange(len(data))])])
    odd: list[Any] = [
        None, True, -1, 2**70, 1e308, "", "x" * 5000, "../../etc/passwd", "tinker://a/weights/..",
        [], {}, [[]], "\ud800",
    ]  # fmt: skip
    tree = json.loads(json.dumps(body))
    for _ in range(rng.randint(1, 3)):
        at: Any = tree
        while isinstance(at, dict | list) and at:
            key = rng.choice(sorted(at)) if isinstance(at, dict) else rng.randrange(len(at))
            if rng.random() < 0.5 or not isinstance(at[key], dict | list):
                at[key] = deepcopy(rng.choice(odd))
                break
            at = at[key]
        if isinstance(tree, dict) and rng.random() < 0.2:
            tree[rng.choice(["extra", *tree])] = deepcopy(rng.choice(odd))
            tree.pop(rng.choice(sorted(tree)))
    text = json.dumps(tree).encode()
    return text if rng.random() < 0.9 else text[: rng.randrange(len(text))]


def bodies_of(session: str, name: str, sampler: str, path: str) -> dict[str, Any]:
    """A good body for each route that takes one."""
    turn, session_of = {"model_id": name, "seq_id": 1}, {"session_id": session}
    client = {"sdk_version": "0.38.0"}
    sample = {
        "sampling_session_id": sampler,
        "seq_id": 0,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]},
        "sampling_params": {"stop": ["a"], "top_k": 3},
    }
    lora = {"rank": 4, "seed": 1}
    return {
        "client/config": client,
        "client/dynamic_config": client,
        "telemetry": {"events": [{"event": "x"}]},
        "create_session": {"tags": ["a"], **client, "user_metadata": {"a": "b"}},
        "session_heartbeat": session_of,
        "sessions/{session}/finish": {"reason": {"type": "success"}},
        "create_model": {**session_of, "model_seq_id": 1, "base_model": MODEL, "lora_config": lora},
        "get_info": {"model_id": name},
        "forward_backward": forward_backward(name, 1),
        "optim_step": {**turn, "adam_params": {"learning_rate": 0.1, "beta1": 0.9}},
        "save_weights": {**turn, "path": "a", "ttl_seconds": 3600},
        "save_weights_for_sampler": {**turn, "path": "a"},
        "save_weights_external": {**turn, "path": "a"},
        "load_weights": {**turn, "path": path, "optimizer": True},
        "create_sampling_session": {**session_of, "sampling_session_seq_id": 0, "base_model": MODEL},
        "join_sampling_session": {"sampling_session_id": sampler},
        "asample": sample,
        "retrieve_future": {"request_id": "x"},
        "cancel_future": {"request_id": "x"},
        "weights_info": {"tinker_path": path},
        "training_runs/{model}/checkpoints/{kind}/{name}/ttl": {"ttl_seconds": 3600},
    }


EVERYBODYS = {
    "client/config", "client/dynamic_config", "telemetry", "create_session", "get_server_capabilities",
    "sessions", "training_runs", "checkpoints",
}  # fmt: skip
"""Routes that name nothing of a user, so that each key may use them."""
ODD_PARTS = ("x", "../x", "a:train:0", "weights", "\u00e4\u200b", "%00", "y" * 5000, "-1")


def test_a_thousand_malformed_requests_are_answered_in_the_apis_form_and_disturb_nobody(tmp_path: Path):
    async def check(s: Service) -> None:
        rng = random.Random(39)
        session, other = await s.session(), await s.session(BOB)
        name, others = await s.policy(session), await s.policy(other, key=BOB)
        body = {"session_id": session, "sampling_session_seq_id": 9, "base_model": MODEL}
        sampler = (await s.post("create_sampling_session", body)).json()["sampling_session_id"]
        bodies = bodies_of(session, name, sampler, f"tinker://{name}/weights/a")
        seen: dict[str, set[int]] = {ANN: set(), BOB: set(), "tml-wrong": set()}
        for index in range(1000):
            method, route, _ = ROUTES[index % len(ROUTES)]
            ending = await s.session() if route.endswith("finish") else session
            parts = {"session": ending, "sampler": sampler, "model": name, "kind": "weights", "name": "a"}
            odd = rng.choice([*parts, "nothing"])
            path = route.format(**parts | {odd: quote(rng.choice(ODD_PARTS), safe="")})
            key = rng.choice([ANN] * 8 + [BOB, "tml-wrong"])
            content = damaged(rng, bodies[route]) if method in ("POST", "PUT") else None
            headers = {"X-API-Key": key}
            reply = await s.http.request(method, f"/api/v1/{path}", content=content, headers=headers)
            seen[key].add(reply.status_code)
            good = set() if key == BOB and route not in EVERYBODYS else {200, 204}
            allowed = {401, 404} if key == "tml-wrong" else {400, 404, 410, 429} | good
            assert reply.status_code in allowed, (method, path, key, reply.status_code, reply.text)
            if reply.status_code != 204:
                assert isinstance(reply.json(), dict)
                assert reply.status_code == 200 or reply.json().keys() == {"detail"}
        assert {200, 204, 400, 404} <= seen[ANN]
        assert {200, 400, 404} <= seen[BOB]
        await asyncio.sleep(0.05)
        assert all(c["policy"] != others for c in s.trainer.commands[2:])
        adam = {"model_id": others, "seq_id": 1, "adam_params": {}}
        assert await s.answer(await s.post("optim_step", adam, BOB), BOB) == {"metrics": {"grad_norm": 2.5}}
        assert {p.name for p in tmp_path.iterdir()} <= {"adapters", "policies"}

    run(tmp_path, check, policies=1000)


def test_bodies_have_a_limit_and_other_encodings_and_paths_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    async def check(s: Service) -> None:
        big = await s.post("forward_backward", bytes(200))
        assert big.status_code == 413
        packed = await s.post("forward_backward", b"x", headers={"Content-Encoding": "zstd"})
        assert packed.status_code == 415
        assert (await s.post("create_custom_loss", {})).status_code == 404
        assert (await s.http.get("/api/v1/healthz")).json() == {"status": "ok"}

    monkeypatch.setattr("skylite.service.app.MOST_BODY_BYTES", 100)
    run(tmp_path, check)


def test_keys_come_from_the_variable_or_from_the_folder(tmp_path: Path):
    keys, note = read_keys(RunDir(tmp_path), None)
    path = tmp_path / "api-key"
    assert path.stat().st_mode & 0o777 == 0o600
    assert str(path) in note
    assert path.read_text() not in note
    assert read_keys(RunDir(tmp_path), None)[0] == keys
    assert len(read_keys(RunDir(tmp_path), f"{ANN}, {BOB}")[0]) == 2
    with pytest.raises(ConfigError, match="key 2 of 2 is not one that Tinker's client sends"):
        read_keys(RunDir(tmp_path), f"{ANN},short")
