"""An episode that asks once, does one bad thing, and asks once more. task.columns["fault"] names the thing.

It notes the status and the error of every bad request in the file that SKYLITE_FAULTS names. Each text that
it sends holds the row's id, so that a reply or a record of another trajectory would show.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx

from skylite.environments.chat import Chat, Reply, Task

HOURS_S = 3600.25
"""Longer than any run of these faults. The fraction marks the processes that `fork` leaves."""
HELD: list[Any] = []
"""Sockets that stay open until the process ends."""


async def episode(task: Task, chat: Chat) -> Any:
    messages = [{"role": "user", "content": f"I am {task.id}."}]
    reply = await chat(messages)
    check(task, reply)
    result = await FAULTS[task.columns["fault"]](task, chat)
    messages += [reply.message, {"role": "user", "content": f"I am still {task.id}."}]
    check(task, await chat(messages))
    return 1.0 if result is None else result


def check(task: Task, reply: Reply) -> None:
    if f"{task.id}." not in reply.text:
        raise AssertionError(f"{task.id} got the reply of another trajectory: {reply.text!r}")


def note(task: Task, status: int, error: Any) -> None:
    line = json.dumps({"id": task.id, "fault": task.columns["fault"], "status": status, "error": error})
    with open(os.environ["SKYLITE_FAULTS"], "a", encoding="utf-8") as file:
        file.write(line + "\n")


async def send(
    task: Task, chat: Chat, body: Any, key: str | None = None, path: str = "chat/completions"
) -> None:
    """Send a bad request and note its answer."""
    headers = {"Authorization": f"Bearer {chat.api_key if key is None else key}"}
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
        reply = await client.post(f"{chat.base_url}/{path}", content=content, headers=headers)
    try:
        error = reply.json().get("error")
    except ValueError:
        error = f"no JSON: {reply.text[:200]}"
    note(task, reply.status_code, error)


def request(task: Task, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": f"I am {task.id}."}], **more}


async def nothing(task: Task, chat: Chat) -> None:
    """Faultless."""


async def hang(task: Task, chat: Chat) -> None:
    await asyncio.sleep(HOURS_S)


async def hang_busy(task: Task, chat: Chat) -> None:
    time.sleep(HOURS_S)


async def raise_error(task: Task, chat: Chat) -> None:
    raise ValueError("bad move \x1b[31m" * 1000)


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


async def raise_unprintable(task: Task, chat: Chat) -> None:
    raise Unprintable


async def exit_now(task: Task, chat: Chat) -> None:
    os._exit(3)


async def kill_itself(task: Task, chat: Chat) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


async def flood(task: Task, chat: Chat) -> None:
    """Requests at once; most are over the limit of turns."""
    await asyncio.gather(*(send(task, chat, request(task)) for _ in range(12)))


async def flood_output(task: Task, chat: Chat) -> None:
    print("x" * (1 << 20))


async def fork(task: Task, chat: Chat) -> None:
    for own_session in (False, True) * 3:
        subprocess.Popen(["sleep", str(HOURS_S)], start_new_session=own_session)


async def open_sockets(task: Task, chat: Chat) -> None:
    """Connections that say nothing, or half a request, and stay open."""
    url = httpx.URL(chat.base_url)
    for number in range(40):
        client = socket.create_connection((str(url.host), int(url.port or 0)))
        client.sendall(
            b"" if number % 2 else b"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: 99\r\n\r\n{"
        )
        HELD.append(client)


async def garbage(task: Task, chat: Chat) -> None:
    """Bytes that are no HTTP."""
    url = httpx.URL(chat.base_url)
    with socket.create_connection((str(url.host), int(url.port or 0))) as client:
        client.sendall(b"\x00\xff no HTTP \r\n\r\n" * 50)


async def call_after_its_end(task: Task, chat: Chat) -> None:
    """A process in a session of its own, which calls when the trajectory has ended, if it still lives."""
    program = (
        "import os, sys, time, httpx, json\n"
        "url, key, out, name, parent = sys.argv[1:]\n"
        "while os.getppid() == int(parent): time.sleep(0.05)\n"
        "for _ in range(10):\n"
        "    time.sleep(0.2)\n"
        "    r = httpx.post(url, json={'messages': [{'role': 'user', 'content': 'late'}]},\n"
        "                   headers={'Authorization': 'Bearer ' + key}, trust_env=False, timeout=60)\n"
        "    if r.status_code == 401: break\n"
        "line = {'id': name, 'fault': 'call_after_its_end', 'status': r.status_code,\n"
        "        'error': r.json().get('error')}\n"
        "open(out, 'a').write(json.dumps(line) + '\\n')\n"
    )
    words = [f"{chat.base_url}/chat/completions", chat.api_key, os.environ["SKYLITE_FAULTS"], task.id]
    words.append(str(os.getpid()))
    subprocess.Popen([sys.executable, "-c", program, *words], start_new_session=True)


async def use_other_keys(task: Task, chat: Chat) -> None:
    """Keys of trajectories that have ended, and guesses."""
    ended = Path(os.environ["SKYLITE_FAULTS"]).with_suffix(".keys").read_text(encoding="utf-8").split()
    for key in [*ended, "sk-guess", "Bearer", chat.api_key[:-1], chat.api_key + "x"]:
        await send(task, chat, request(task), key=key)


async def malformed(task: Task, chat: Chat) -> None:
    deep = b'{"messages": ' + b"[" * 20_000 + b"]" * 20_000 + b"}"
    digits = b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": ' + b"9" * 5000 + b"}"
    for body in (
        b"",
        b"{",
        b"\xff\xfe",
        b"[]",
        b"null",
        deep,
        digits,
        b'{"messages": [{"role": "user"}',
        b'"x"',
    ):
        await send(task, chat, body)
    for content in ({"text": "x"}, 5):
        await send(task, chat, {"messages": [{"role": "user", "content": content}]})


async def image(task: Task, chat: Chat) -> None:
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    await send(task, chat, {"messages": [{"role": "user", "content": [part]}]})


async def several_choices(task: Task, chat: Chat) -> None:
    await send(task, chat, request(task, n=5))


async def huge_limit(task: Task, chat: Chat) -> None:
    await send(task, chat, request(task, max_tokens=10**18, temperature=0.0, top_p=0.1))


async def huge_body(task: Task, chat: Chat) -> None:
    await send(task, chat, b'{"messages": "' + b"x" * (17 << 20) + b'"}')


async def other_paths(task: Task, chat: Chat) -> None:
    for path in ("completions", "responses", "files/../../etc/passwd", "models"):
        await send(task, chat, request(task), path=path)


async def cancel_stream(task: Task, chat: Chat) -> None:
    """Go away before the reply, and in the middle of a stream."""
    headers = {"Authorization": f"Bearer {chat.api_key}"}
    url = f"{chat.base_url}/chat/completions"
    async with httpx.AsyncClient(trust_env=False) as client:
        with contextlib.suppress(httpx.TimeoutException):
            await client.post(url, json=request(task), headers=headers, timeout=0.01)
        async with client.stream(
            "POST", url, json=request(task, stream=True), headers=headers, timeout=60
        ) as reply:
            async for _ in reply.aiter_bytes():
                break


async def return_none(task: Task, chat: Chat) -> Any:
    return {}


async def return_nan(task: Task, chat: Chat) -> float:
    return float("nan")


async def return_too_much(task: Task, chat: Chat) -> Any:
    return {f"component {i} {'x' * 100}": 1.0 for i in range(20_000)}


async def write_everywhere(task: Task, chat: Chat) -> None:
    """Into every open file, the pipe for the result among them."""
    for descriptor in range(3, 40):
        with contextlib.suppress(OSError):
            os.write(descriptor, b'{"id": 0, "value": 99.0}\n')
    os._exit(0)


Fault = Callable[[Task, Chat], Awaitable[Any]]
FAULTS: dict[str, Fault] = {
    f.__name__: f
    for f in (
        nothing, hang, hang_busy, raise_error, raise_unprintable, exit_now, kill_itself, flood, flood_output,
        fork, open_sockets, garbage, call_after_its_end, use_other_keys, malformed, image, several_choices,
        huge_limit, huge_body, other_paths, cancel_stream, return_none, return_nan, return_too_much,
        write_everywhere,
    )
}  # fmt: skip
