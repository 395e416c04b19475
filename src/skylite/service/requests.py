"""The JSON requests of Tinker's client (0.38), as it sends them. An unknown field is refused, not ignored."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from skylite.service.errors import Rejected

LONGEST_ID = 200
Id = Annotated[str, Field(max_length=LONGEST_ID)]
Number = Annotated[int, Field(ge=0, lt=2**62)]
Metadata = Annotated[dict[str, Any] | None, Field(max_length=64)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$"
"""Of a saved state: a file name that leads nowhere else."""
Name = Annotated[str, Field(pattern=NAME)]
Ttl = Annotated[int | None, Field(ge=1, le=10 * 366 * 86400)]


class Strict(BaseModel):
    """Refuses unknown fields. Texts are not taken for numbers."""

    model_config = ConfigDict(extra="forbid", strict=True)
    type: str = ""


class ClientConfig(Strict):
    sdk_version: str


class CreateSession(Strict):
    tags: list[str] = []
    user_metadata: Metadata = None
    sdk_version: str = ""
    project_id: str | None = None
    display_name: str | None = None


class SessionOnly(Strict):
    session_id: Id


class FinishSession(Strict):
    reason: Any = None
    detail: Any = None


class Lora(Strict):
    rank: int
    seed: Annotated[int | None, Field(ge=0, lt=2**63)] = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class Optimizer(BaseModel):
    """Other optimizers have other fields; only this one is offered."""

    model_config = ConfigDict(extra="ignore", strict=True)
    type: str = "adamw"


class CreateModel(Strict):
    session_id: Id
    model_seq_id: Number
    base_model: str
    user_metadata: Metadata = None
    lora_config: Lora | None = None
    optimizer_config: Optimizer = Optimizer()


class ModelOnly(Strict):
    model_id: Id


class InTurn(Strict):
    """A request of a policy, in its order."""

    model_id: Id
    seq_id: Number


class Adam(Strict):
    learning_rate: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1e-4
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    eps: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1e-12
    weight_decay: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    grad_clip_norm: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0


class OptimStep(InTurn):
    adam_params: Adam


class SaveWeights(InTurn):
    path: Name | None = None
    ttl_seconds: Ttl = None
    overwrite: bool = False
    user_metadata: Metadata = None


class SaveForSampler(InTurn):
    path: Name | None = None
    sampling_session_seq_id: Number | None = None
    kind: Literal["snapshot"] = "snapshot"
    ttl_seconds: Ttl = None
    user_metadata: Metadata = None


class SaveExternal(InTurn):
    path: Name
    ttl_seconds: Ttl = None


class LoadWeights(Strict):
    """Into a policy, or as a new one."""

    model_id: Id | None = None
    seq_id: Number | None = None
    session_id: Id | None = None
    model_seq_id: Number | None = None
    base_model: str | None = None
    user_metadata: Metadata = None
    path: str
    optimizer: bool
    optimizer_config: Optimizer | None = None
    weights_access_token: None = None


class CreateSamplingSession(Strict):
    session_id: Id
    sampling_session_seq_id: Number
    base_model: str | None = None
    model_path: str | None = None


class SamplingSessionOnly(Strict):
    sampling_session_id: Id


class Chunk(BaseModel):
    """Of text, or of something else, which is refused with its reason."""

    model_config = ConfigDict(extra="ignore", strict=True)
    type: str = "encoded_text"
    tokens: list[Annotated[int, Field(ge=0, lt=2**31)]] = []


class Prompt(Strict):
    chunks: list[Chunk]


class SamplingParams(Strict):
    max_tokens: Annotated[int | None, Field(ge=1)] = None
    seed: int | None = None
    stop: str | list[str] | list[int] | None = None
    temperature: Annotated[Finite, Field(ge=0, le=100)] = 1.0
    top_k: Annotated[int, Field(ge=-1)] = -1
    top_p: Annotated[Finite, Field(gt=0, le=1)] = 1.0


class SampleRequest(Strict):
    num_samples: Annotated[int, Field(ge=1, le=1024)] = 1
    prompt: Prompt
    sampling_params: SamplingParams
    base_model: str | None = None
    model_path: str | None = None
    sampling_session_id: Id | None = None
    seq_id: Number | None = None
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: Annotated[int, Field(ge=0, le=20)] = 0
    topk_sample_logprobs: Literal[0] = 0
    target_prompt_logprobs: None = None
    prompt_alt_tokens_k: Literal[0] = 0
    prompt_logprobs_last_n: Annotated[int | None, Field(ge=1)] = None
    record_stability_info: Literal[False] | None = None


class RetrieveFuture(Strict):
    request_id: Id
    allow_metadata_only: bool = False


class CancelFuture(Strict):
    request_id: Id


class WeightsPath(Strict):
    tinker_path: str


class TtlRequest(Strict):
    ttl_seconds: Ttl = None


def parse(form: type[BaseModel], body: bytes) -> Any:
    """The request in these bytes. Raises Rejected with the first problem."""
    try:
        return form.model_validate_json(body or b"{}")
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])[:LONGEST_ID]
        raise Rejected(f"{where or 'The body'}: {first['msg'][:300]}.") from None
