"""The key of a running trajectory is a secret: nothing that another episode can ask for holds it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.environment_cases import ScriptedEngine, sample

TWO_EPISODES = """
    import asyncio, json, os, subprocess
    from pathlib import Path
    import httpx

    FOLDER = Path(r"{folder}")

    async def until(path):
        while not path.exists():
            await asyncio.sleep(0.05)

    def keep(name, text):
        (FOLDER / "part").write_text(text)
        (FOLDER / "part").rename(FOLDER / name)

    async def episode(task, chat):
        reply = await chat(task.messages)
        if task.id == "p0":
            await owner(task, chat)
        else:
            await until(FOLDER / "key")
            keep("loot", "\\n".join([repr(task), repr(chat), repr(reply), *await loot(chat)]))
        return 1.0

    async def owner(task, chat):
        "Make requests and errors of all kinds, and stay."
        async with httpx.AsyncClient(trust_env=False, timeout=30) as client:
            for body in ("{{", json.dumps({{"messages": task.messages, "n": 2}})):
                headers = {{"Authorization": f"Bearer {{chat.api_key}}"}}
                await client.post(f"{{chat.base_url}}/chat/completions", content=body, headers=headers)
        print("the owner is here", flush=True)
        keep("key", chat.api_key)
        await until(FOLDER / "loot")

    async def loot(chat):
        "What the environment, processes, the endpoint and the logs tell."
        found = [str(dict(os.environ)), subprocess.run(["env"], capture_output=True, text=True).stdout]
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                found.append(path.read_text(errors="replace"))
            except OSError:
                pass
        async with httpx.AsyncClient(trust_env=False, timeout=30) as client:
            for key in (chat.api_key, chat.api_key[:-1], "sk-", "x"):
                headers = {{"Authorization": f"Bearer {{key}}"}}
                for method, path in (("GET", "models"), ("POST", "chat/completions"), ("GET", "keys")):
                    url = f"{{chat.base_url}}/{{path}}"
                    r = await client.request(method, url, content="{{", headers=headers)
                    found.append(f"{{r.status_code}} {{dict(r.headers)}} {{r.text}}")
        found += [p.read_text() for p in (FOLDER / "logs").rglob("*") if p.is_file()]
        return found
"""


def test_an_episode_cannot_get_the_key_of_a_running_trajectory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = TWO_EPISODES.format(folder=tmp_path)
    groups = sample(tmp_path, source, ScriptedEngine(), num_prompts=2, timeout_s=60.0)
    assert [g.trajectories[0].end for g in groups] == ["stop", "stop"]
    key, loot = (tmp_path / "key").read_text(), (tmp_path / "loot").read_text()
    assert len(key) > 32
    for found in ("invalid_api_key", "policy-v000003", "PATH=", "the owner is here", "sk-", "Invalid JSON"):
        assert found in loot, f"nobody looked for {found}"
    assert key not in loot + caplog.text
