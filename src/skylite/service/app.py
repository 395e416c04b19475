"""The HTTP routes of Tinker's API: who asks, and what for. front.py does it.

An error is JSON with a sentence in `detail`, and the status says what kind it is.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route

from skylite.errors import SkyliteError
from skylite.run.run_dir import adapter_name
from skylite.service import requests as r
from skylite.service.errors import Rejected
from skylite.service.front import Front, iso
from skylite.service.saved import SavedPolicy
from skylite.service.wire import PROTOBUF, read_forward_backward
from skylite.untrusted_text import plain

logger = logging.getLogger(__name__)
MOST_BODY_BYTES = 64 << 20
SESSION_NOTE = (
    "This service does not train the unembedding (train_unembed): engines could not serve it. "
    "skylite's docs, how-to/from-tinker, list what else differs."
)
CLIENT_CONFIG = {
    "pjwt_auth_enabled": False,
    "credential_default_source": "api_key",
    "parallel_fwdbwd_chunks": True,
    "proto_compress_fwdbwd": False,
    "sample_use_retrieve_futures": False,
    "custom_loss_server_side": False,
    "sample_join_sampling_session": True,
    # The server speaks plain HTTP/1.1, which httpx's own transport reaches everywhere.
    "use_pyqwest_transport": False,
}
"""Flags of the client. Those that are missing keep the client's defaults."""
Answering = Callable[["Call"], Awaitable[Any]]


@dataclass(frozen=True, slots=True)
class Call:
    """A request of a user."""

    front: Front
    request: Request
    owner: str
    body: bytes

    def parse(self, form: type[Any]) -> Any:
        return r.parse(form, self.body)

    def path(self, name: str) -> str:
        value: str = self.request.path_params[name]
        return value


def owner_of(key: str) -> str:
    """The user that has this key: a digest, which files may hold."""
    return hashlib.sha256(key.encode()).hexdigest()[:32]


def make_app(front: Front, keys: Mapping[str, str]) -> Starlette:
    """The app. `keys`: digest of a key -> its owner's name, see `owner_of`."""

    def route(method: str, path: str, answering: Answering) -> Route:
        async def endpoint(request: Request) -> Response:
            try:
                owner = owner_of(request.headers.get("x-api-key", ""))
                if owner not in keys:
                    raise Rejected("X-API-Key is missing or unknown to this service.", 401)
                call = Call(front, request, owner, await _body(request))
                return _response(await answering(call))
            except Rejected as refusal:
                return _error(refusal.status, refusal.reason)
            except SkyliteError as error:
                return _error(500, str(error))
            except Exception:
                logger.exception(f"{method} {path} failed")
                return _error(500, "The service failed on this request; its log has the reason.")

        return Route(f"/api/v1/{path}", endpoint, methods=[method])

    routes = [route(*words) for words in ROUTES]
    routes += [Route("/api/v1/healthz", _health), Route("/download/{secret}/{file}", _download(front))]
    return Starlette(routes=routes, exception_handlers={404: _no_such_path, 405: _no_such_path})


def _response(value: Any) -> Response:
    if isinstance(value, Response):
        return value
    if isinstance(value, bytes):
        return Response(value, media_type=PROTOBUF)
    return Response(status_code=204) if value is None else JSONResponse(value)


def _error(status: int, reason: str) -> JSONResponse:
    return JSONResponse({"detail": plain(reason)}, status_code=status)


async def _body(request: Request) -> bytes:
    if request.headers.get("content-encoding", "identity") != "identity":
        raise Rejected("The body is compressed, which this service does not read.", 415)
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MOST_BODY_BYTES:
            raise Rejected(f"The body has more than {MOST_BODY_BYTES:,} bytes.", 413)
    return bytes(body)


async def _health(_: Request) -> Response:
    return JSONResponse({"status": "ok"})


async def _no_such_path(request: Request, _: Exception) -> Response:
    return _error(404, f"This service does not offer {request.method} {request.url.path[:200]}.")


def _download(front: Front) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        version, _ = front.links.get(request.path_params["secret"], (None, 0.0))
        name = request.path_params["file"]
        if version is None or name not in ("adapter_config.json", "adapter_model.safetensors"):
            return _error(404, "This link is unknown, or its time is over.")
        return FileResponse(front.base.run.default_adapters / adapter_name(version) / name)

    return endpoint


async def client_config(call: Call) -> Any:
    call.parse(r.ClientConfig)
    return CLIENT_CONFIG


async def dynamic_config(call: Call) -> Any:
    call.parse(r.ClientConfig)
    return {"refresh_interval_sec": 300, "sample_cancel_enabled": True}


async def capabilities(call: Call) -> Any:
    base = call.front.base
    model = {"model_name": base.model, "max_context_length": base.max_tokens}
    return {"supported_models": [model | {"trainable": True, "sampleable": True}]}


async def telemetry(call: Call) -> Any:
    """Accepted, and dropped: nothing about users is kept."""
    return {"status": "accepted"}


async def create_session(call: Call) -> Any:
    call.parse(r.CreateSession)
    name = call.front.create_session(call.owner)
    return {"type": "create_session", "session_id": name, "info_message": SESSION_NOTE}


async def heartbeat(call: Call) -> Any:
    call.front.session(call.parse(r.SessionOnly).session_id, call.owner)
    return {"type": "session_heartbeat"}


async def finish_session(call: Call) -> Any:
    call.parse(r.FinishSession)
    call.front.session(call.path("session"), call.owner)
    await call.front.end_session(call.path("session"))


async def create_model(call: Call) -> Any:
    return {"request_id": call.front.create_policy(call.parse(r.CreateModel), call.owner)}


async def get_info(call: Call) -> Any:
    name = call.parse(r.ModelOnly).model_id
    record, model = call.front.policy(name, call.owner).record, call.front.base.model
    data = {"model_name": model, "tokenizer_id": model}
    info = {"type": "get_info", "model_data": data, "model_id": name, "model_name": model}
    return info | {"is_lora": True, "lora_rank": record.lora.rank, "optimizer_config": {"type": "adamw"}}


async def forward_backward(call: Call) -> Any:
    request = read_forward_backward(call.body)
    return {"request_id": call.front.forward_backward(request, call.owner, len(call.body))}


async def optim_step(call: Call) -> Any:
    return {"request_id": call.front.optim_step(call.parse(r.OptimStep), call.owner)}


async def save_weights(call: Call) -> Any:
    return {"request_id": call.front.save_state(call.parse(r.SaveWeights), call.owner)}


async def save_for_sampler(call: Call) -> Any:
    return {"request_id": call.front.save_for_sampler(call.parse(r.SaveForSampler), call.owner)}


async def save_external(call: Call) -> Any:
    return {"request_id": call.front.save_external(call.parse(r.SaveExternal), call.owner)}


async def load_weights(call: Call) -> Any:
    request: r.LoadWeights = call.parse(r.LoadWeights)
    if request.model_id is not None and request.seq_id is not None:
        return {"request_id": call.front.load_state(request, call.owner)}
    if request.session_id is not None and request.model_seq_id is not None:
        return {"request_id": call.front.create_from_state(request, call.owner)}
    raise Rejected("Either model_id and seq_id, or session_id and model_seq_id are needed.")


async def create_sampling_session(call: Call) -> Any:
    name = call.front.create_sampler(call.parse(r.CreateSamplingSession), call.owner)
    return {"type": "create_sampling_session", "sampling_session_id": name}


async def join_sampling_session(call: Call) -> Any:
    sampler = call.front.sampler(call.parse(r.SamplingSessionOnly).sampling_session_id, call.owner)
    sampler.clones += 1
    return {"type": "join_sampling_session", "client_counter": sampler.clones}


async def get_sampler(call: Call) -> Any:
    sampler = call.front.sampler(call.path("sampler"), call.owner)
    base = call.front.base.model
    return {"sampler_id": call.path("sampler"), "base_model": base, "model_path": sampler.path}


async def sample(call: Call) -> Any:
    return call.front.sample(call.parse(r.SampleRequest), call.owner)


async def retrieve_future(call: Call) -> Any:
    name = call.parse(r.RetrieveFuture).request_id
    answer = await call.front.futures.wait(name, call.owner)
    if answer is None:  # the client asks again at once
        body = {"type": "try_again", "request_id": name, "queue_state": "active"}
        return JSONResponse(body, status_code=408)
    return answer


async def cancel_future(call: Call) -> Any:
    """Only samples can be cancelled: other requests of a policy rely on those before them."""
    future = call.front.futures.get(call.parse(r.CancelFuture).request_id, call.owner)
    if future.is_sample and future.task is not None:
        future.task.cancel()


async def weights_info(call: Call) -> Any:
    path = call.parse(r.WeightsPath).tinker_path
    found = call.front.saved.find(path, call.owner, "weights", "sampler_weights", "external_weights")
    return _info(call.front, found[1])


async def training_run(call: Call) -> Any:
    return _run(call.front, call.path("model"), call.front.record(call.path("model"), call.owner))


async def training_runs(call: Call) -> Any:
    front, owner = call.front, call.owner
    records = front.saved.by_id | {name: p.record for name, p in front.policies.items()}
    own = [_run(front, name, record) for name, record in records.items() if record.owner == owner]
    first, last = _page(call)
    cursor = {"offset": first, "limit": last - first, "total_count": len(own)}
    return {"training_runs": own[first:last], "cursor": cursor}


async def checkpoints(call: Call) -> Any:
    return {"checkpoints": call.front.checkpoints(call.path("model"), call.owner)}


async def all_checkpoints(call: Call) -> Any:
    records = call.front.saved.by_id.items()
    names = [name for name, record in records if record.owner == call.owner]
    every = [c for name in names for c in call.front.checkpoints(name, call.owner)]
    first, last = _page(call)
    cursor = {"offset": first, "limit": last - first, "total_count": len(every)}
    return {"checkpoints": every[first:last], "cursor": cursor}


async def delete_checkpoint(call: Call) -> Any:
    model, key = call.path("model"), f"{call.path('kind')}/{call.path('name')}"
    call.front.own_key(model, key, call.owner)
    call.front.delete(model, key)


async def set_ttl(call: Call) -> Any:
    model, key = call.path("model"), f"{call.path('kind')}/{call.path('name')}"
    saved, ttl = call.front.own_key(model, key, call.owner), call.parse(r.TtlRequest).ttl_seconds
    expires = None if ttl is None else time.time() + ttl
    call.front.saved.add(
        model, call.front.saved.by_id[model], key, saved.model_copy(update={"expires": expires})
    )


async def external_weights_urls(call: Call) -> Any:
    model, key = call.path("model"), f"external_weights/{call.path('name')}"
    files, expires = call.front.download_links(model, key, call.owner)
    start = str(call.request.base_url)
    return {
        "urls": {name: f"{start}download/{end}" for name, end in files.items()},
        "expires": expires.isoformat(),
    }


async def get_session(call: Call) -> Any:
    name = call.path("session")
    call.front.session(name, call.owner)
    models = [key for key, policy in call.front.policies.items() if policy.session == name]
    samplers = [key for key, sampler in call.front.sampling.items() if sampler.session == name]
    return {"training_run_ids": models, "sampler_ids": samplers}


async def list_sessions(call: Call) -> Any:
    own = [name for name, session in call.front.sessions.items() if session.owner == call.owner]
    first, last = _page(call)
    return {"sessions": own[first:last]}


def _page(call: Call) -> tuple[int, int]:
    query = call.request.query_params
    try:
        offset, limit = int(query.get("offset", "0")), int(query.get("limit", "100"))
    except ValueError:
        raise Rejected("offset and limit are numbers.") from None
    first = max(0, offset)
    return first, first + min(1000, max(0, limit))


def _info(front: Front, record: SavedPolicy) -> dict[str, Any]:
    info = {"base_model": front.base.model, "is_lora": True, "lora_rank": record.lora.rank}
    trained = {"train_unembed": False, "train_mlp": record.train_mlp, "train_attn": record.train_attn}
    return info | trained | {"optimizer_config": {"type": "adamw"}}


def _run(front: Front, name: str, record: SavedPolicy) -> dict[str, Any]:
    newest = max((saved.time for saved in record.saved.values()), default=time.time())
    run = {"training_run_id": name, "base_model": front.base.model, "model_owner": record.owner}
    return run | {"is_lora": True, "lora_rank": record.lora.rank, "last_request_time": iso(newest)}


ROUTES: list[tuple[str, str, Answering]] = [
    ("POST", "client/config", client_config),
    ("POST", "client/dynamic_config", dynamic_config),
    ("GET", "get_server_capabilities", capabilities),
    ("POST", "telemetry", telemetry),
    ("POST", "create_session", create_session),
    ("POST", "session_heartbeat", heartbeat),
    ("POST", "sessions/{session}/finish", finish_session),
    ("GET", "sessions/{session}", get_session),
    ("GET", "sessions", list_sessions),
    ("POST", "create_model", create_model),
    ("POST", "get_info", get_info),
    ("POST", "forward_backward", forward_backward),
    ("POST", "optim_step", optim_step),
    ("POST", "save_weights", save_weights),
    ("POST", "save_weights_for_sampler", save_for_sampler),
    ("POST", "save_weights_external", save_external),
    ("POST", "load_weights", load_weights),
    ("POST", "create_sampling_session", create_sampling_session),
    ("POST", "join_sampling_session", join_sampling_session),
    ("GET", "samplers/{sampler}", get_sampler),
    ("POST", "asample", sample),
    ("POST", "retrieve_future", retrieve_future),
    ("POST", "cancel_future", cancel_future),
    ("POST", "weights_info", weights_info),
    ("GET", "training_runs/{model}", training_run),
    ("GET", "training_runs", training_runs),
    ("GET", "training_runs/{model}/checkpoints", checkpoints),
    ("GET", "checkpoints", all_checkpoints),
    ("DELETE", "training_runs/{model}/checkpoints/{kind}/{name}", delete_checkpoint),
    ("PUT", "training_runs/{model}/checkpoints/{kind}/{name}/ttl", set_ttl),
    (
        "GET",
        "training_runs/{model}/checkpoints/external_weights/{name}/external_weights_urls",
        external_weights_urls,
    ),
]
