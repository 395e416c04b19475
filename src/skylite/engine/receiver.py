"""Takes adapters over HTTP for an engine beside it, which does not see the run's folder.

    GET    /                the version of skylite
    PUT    /adapters/NAME   an adapter: its files one after the other, listed by the header `adapter-files`
    DELETE /adapters/NAME   delete it

Every request has the token as a bearer. An adapter appears under its name only when each file has its size
and sha256, and its weights are those of its manifest. Files are written and hashed, and nothing of them is
executed. pushed_adapters.py is the client.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import re
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from skylite import __version__
from skylite.adapters.manifest import read_manifest
from skylite.adapters.retention import remove_folder
from skylite.engine.connections import HEADER_BYTES
from skylite.errors import SkyliteError, WriteFailed
from skylite.processes.file_tree import remove_tree
from skylite.processes.http_server import serving
from skylite.run.files import TEMPORARY_MARK, atomic_folder
from skylite.untrusted_text import plain

logger = logging.getLogger(__name__)
NAME = re.compile(r"(?:[0-9a-z][0-9a-z.-]{0,63}:)?policy-v[0-9]{6,12}")
"""AdapterVersion.name: also the folder's name here."""
UNFINISHED = re.compile(rf"\.{NAME.pattern}{re.escape(TEMPORARY_MARK)}[0-9a-f]{{16}}")
FILES_HEADER = "adapter-files"
RECEIVE_TIMEOUT_S = 600.0
"""For one adapter."""
WEIGHTS = "adapter_model.safetensors"
MOST_BYTES = {WEIGHTS: 64 << 30, "adapter_config.json": 16 << 20, "manifest.json": 64 << 20}
"""The files of an adapter. A manifest may hold an image."""


class AdapterFile(BaseModel):
    """A file of an adapter that is sent."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    name: str
    size: int = Field(ge=0)
    """Bytes."""
    sha256: str


AdapterFiles = TypeAdapter(list[AdapterFile])
"""The header of a PUT, as JSON: all files of the adapter in the order of the body."""
Work = Callable[[Request, AsyncIterator[bytes]], Awaitable[Any]]


async def run_receiver(folder: Path, token: str, listener: socket.socket, **options: Any) -> None:
    """Serve until SIGINT or SIGTERM, in a folder that the caller has locked. `options`: more of uvicorn's."""
    for path in (p for p in folder.iterdir() if UNFINISHED.fullmatch(p.name)):
        remove_tree(path)
    if left := sum(NAME.fullmatch(path.name) is not None for path in folder.iterdir()):
        logger.warning(f"{folder} has {left} adapter(s) of earlier runs; remove those of ended ones")
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    more = {"http": "h11", "h11_max_incomplete_event_size": HEADER_BYTES, **options}
    async with serving(make_app(folder, token), [listener], **more):
        logger.info(f"ready: adapters go to {folder}. Ctrl-C ends it.")
        await stop.wait()


def make_app(folder: Path, token: str) -> Starlette:
    """The app. `folder`: with an absolute path, for the engine too."""
    receiver = _Receiver(folder, f"Bearer {token}".encode())
    return Starlette(
        routes=[
            Route("/", receiver.answering(receiver.version), methods=["GET"]),
            Route("/adapters/{name}", receiver.answering(receiver.put), methods=["PUT"]),
            Route("/adapters/{name}", receiver.answering(receiver.delete), methods=["DELETE"]),
        ],
        exception_handlers={
            HTTPException: lambda _, error: _error(error.status_code, error.detail),
            SkyliteError: lambda _, error: _error(507, str(error)),
            ClientDisconnect: lambda *_: Response(status_code=408),  # nobody reads it
            TimeoutError: lambda *_: _error(408, f"It did not come within {RECEIVE_TIMEOUT_S:g} s."),
        },
    )


@dataclass(frozen=True, slots=True)
class _Receiver:
    folder: Path
    bearer: bytes

    def answering(self, work: Work) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            body = request.stream()
            if not hmac.compare_digest(request.headers.get("authorization", "").encode(), self.bearer):
                raise HTTPException(401, "The token is missing or wrong.")
            try:
                async with asyncio.timeout(RECEIVE_TIMEOUT_S):
                    return JSONResponse(await work(request, body))
            except (HTTPException, WriteFailed):
                async for _ in body:  # so that the client reads the reason, and not a closed connection
                    pass
                raise

        return endpoint

    async def version(self, _request: Request, _body: AsyncIterator[bytes]) -> Any:
        return {"skylite": __version__}

    async def put(self, request: Request, body: AsyncIterator[bytes]) -> Any:
        path, files = self._path(request), _files(request)
        with atomic_folder(path, sum(file.size for file in files)) as temporary:
            await _write(temporary, files, body)
            _check_manifest(temporary, files)
            if path.exists():  # a client sends it again that has lost our answer
                remove_folder(path)
        logger.debug(f"{path.name} has come")
        return {"path": str(path)}

    async def delete(self, request: Request, _body: AsyncIterator[bytes]) -> Any:
        path = self._path(request)
        if path.exists():
            remove_folder(path)
        return {"path": str(path)}

    def _path(self, request: Request) -> Path:
        name: str = request.path_params["name"]
        if NAME.fullmatch(name) is None:
            raise HTTPException(400, f"{plain(name)[:100]!r} is not the name of an adapter.")
        return self.folder / name


def _error(status: int, reason: str) -> Response:
    return JSONResponse({"detail": plain(reason)}, status_code=status)


def _files(request: Request) -> Sequence[AdapterFile]:
    try:
        files = AdapterFiles.validate_json(request.headers.get(FILES_HEADER, ""))
    except ValidationError:
        files = []
    if len(files) != len(MOST_BYTES) or {file.name for file in files} != MOST_BYTES.keys():
        raise HTTPException(400, f"An adapter has the files {', '.join(sorted(MOST_BYTES))}.")
    for file in files:
        if file.size > MOST_BYTES[file.name]:
            raise HTTPException(413, f"{file.name} has more than {MOST_BYTES[file.name]:,} bytes.")
    return files


async def _write(folder: Path, files: Sequence[AdapterFile], body: AsyncIterator[bytes]) -> None:
    """Write the body as these files. Raises HTTPException if it is not these."""
    left = b""
    for file in files:
        digest, missing = hashlib.sha256(), file.size
        with (folder / file.name).open("xb") as stream:
            while missing:
                left = left or await anext(body, b"")
                if not left:
                    raise HTTPException(422, f"{file.name} lacks {missing:,} bytes.")
                part, left = left[:missing], left[missing:]
                stream.write(part)
                digest.update(part)
                missing -= len(part)
        if digest.hexdigest() != file.sha256:
            raise HTTPException(422, f"{file.name} came with other bytes than it was sent.")
    if left or await anext(body, b""):
        raise HTTPException(422, "The body is longer than its files.")


def _check_manifest(folder: Path, files: Sequence[AdapterFile]) -> None:
    """Raise HTTPException unless the manifest is one of this version of skylite, and of these weights."""
    sent = next(file.sha256 for file in files if file.name == WEIGHTS)
    try:
        named = read_manifest(folder, verify_hash=False).weights_sha256
    except SkyliteError as error:
        raise HTTPException(422, f"Its manifest does not fit: {error.what}") from None
    if named != sent:
        raise HTTPException(422, "Its weights are not those of its manifest.")
