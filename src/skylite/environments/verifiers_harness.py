"""The chat loop for agents of verifiers environments, in the episode's own process.

verifiers' own loop (its harness `null`) is a script that uv starts, with packages that uv fetches. This one
makes the same calls: the task's messages, its tools over MCP, until a reply calls no tool. It is imported
only where verifiers is installed.
"""

from __future__ import annotations

import json
import sys
from contextlib import AsyncExitStack
from typing import Any

import httpx
import verifiers.v1 as vf
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp

from skylite.environments.chat import LIMIT_CODES
from skylite.untrusted_text import encodable, parse_json

ID = "skylite_chat"


def register() -> None:
    """Let verifiers find this harness by its id, which it imports as a module of its own package."""
    sys.modules[f"verifiers.v1.harnesses.{ID}"] = sys.modules[__name__]


class ChatHarnessConfig(vf.HarnessConfig):  # type: ignore[misc]
    """No settings of its own."""


class ChatHarness(vf.Harness[ChatHarnessConfig]):  # type: ignore[misc]
    """Talks to the model until a reply calls no tool."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message_to_wire(message) for message in prompt or ()]
        servers = {n: {"url": url, "timeout": self.config.tool_timeout} for n, url in mcp_urls.items()}
        async with AsyncExitStack() as stack:
            client = await stack.enter_async_context(httpx.AsyncClient(timeout=None, trust_env=False))
            tools, dispatch, connections = await connect_mcp({"mcpServers": servers}, stack)
            body = {"model": ctx.model, "messages": messages, **({"tools": tools} if tools else {})}
            while (reply := await _ask(client, endpoint, secret, body)) is not None:
                messages.append(reply)
                if not reply.get("tool_calls"):
                    break
                for call in reply["tool_calls"]:
                    content = await _run_tool(call["function"], dispatch, connections)
                    messages.append({"role": "tool", "tool_call_id": call["id"], "content": content})
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


async def _ask(
    client: httpx.AsyncClient, endpoint: str, secret: str, body: dict[str, Any]
) -> dict[str, Any] | None:
    """The model's message; None at a limit of the trajectory, where the environment scores what there is."""
    reply = await client.post(
        f"{endpoint}/chat/completions",
        headers={"Authorization": f"Bearer {secret}", "Content-Type": "application/json"},
        content=encodable(json.dumps(body, ensure_ascii=False)).encode(),
    )
    if reply.status_code == httpx.codes.OK:
        message = reply.json()["choices"][0]["message"]
        return {name: value for name, value in message.items() if value is not None}
    if any(f'"{code}"' in reply.json()["error"]["message"] for code in LIMIT_CODES):
        return None
    raise RuntimeError(f"the model's endpoint answered {reply.status_code}: {reply.text[:500]}")


async def _run_tool(call: dict[str, Any], dispatch: dict[str, Any], connections: dict[str, Any]) -> Any:
    """The tool's result as the content of a message. A wrong call is an answer to the model."""
    try:
        arguments = parse_json(call["arguments"] or "{}")
    except ValueError as error:
        return f"error: the tool's arguments are no JSON ({error})"
    if not isinstance(arguments, dict):
        return f"error: the tool's arguments are {json.dumps(arguments)[:100]}, not a JSON object"
    if call["name"] not in dispatch:
        return f"error: there is no tool {call['name']!r}; there are {', '.join(dispatch)}"
    return await call_mcp(connections, dispatch, call["name"], arguments)


__all__ = ["ChatHarness"]
