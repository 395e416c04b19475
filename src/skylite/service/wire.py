"""Tinker's protobuf messages: what its client sends to `forward_backward`, and how results are read.

The fields and their numbers are those of the client's package (tinker 0.38).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from skylite.errors import ConfigError
from skylite.service.errors import Rejected
from skylite.types import FloatArray, IntArray
from skylite.verbs import LOSS_FORMS, Datum, Scored, loss_settings

_MESSAGES: dict[str, list[str]] = {
    "TopkLogprobs": ["1 bytes token_ids", "2 bytes logprobs", "3 uint32 k", "4 uint32 length"],
    "SampledSequence": ["1 int32 stop_reason", "2 bytes tokens", "3 bytes logprobs"],
    "SampleResponse": [
        "1 *SampledSequence sequences", "2 bytes prompt_logprobs", "3 TopkLogprobs topk_prompt_logprobs",
    ],
    "SparseCsr": ["1 bytes values", "2 bytes crow_indices", "3 bytes col_indices"],
    "Tensor": ["1 bytes dense", "2 SparseCsr sparse_csr", "3 int32 dtype", "4 *int64 shape"],
    "BatchedTensor": ["1 bytes data", "2 bytes offsets", "3 int32 dtype", "4 *int64 trailing_shape"],
    "Field": ["1 string key", "2 BatchedTensor value"],
    "ArrayRecord": ["1 string type_tag", "2 *Field fields", "3 int64 num_datums"],
    "Metric": ["1 string key", "2 double value"],
    "ForwardBackwardOutput": [
        "1 string loss_fn_output_type", "2 *ArrayRecord loss_fn_outputs", "3 *Metric metrics",
    ],
    "EncodedTextChunk": ["1 bytes tokens"],
    "OtherChunk": [],
    "Chunk": ["1 EncodedTextChunk encoded_text", "2 OtherChunk image", "3 OtherChunk dmel"],
    "Input": ["1 string key", "2 Tensor value"],
    "Span": [],
    "Datum": [
        "1 *Chunk model_input", "2 *Input loss_fn_inputs", "3 *Span model_input_spans",
        "4 *Span loss_fn_input_spans",
    ],
    "Setting": ["1 string key", "2 double value"],
    "SettingValue": ["1 double number", "2 string text"],
    "SettingV2": ["1 string key", "2 SettingValue value"],
    "ForwardBackwardRequest": [
        "1 string model_id", "2 int32 seq_id", "3 *Datum data", "4 string loss_fn",
        "5 *Setting loss_fn_config", "6 bool forward_only", "7 *SettingV2 loss_fn_config_v2",
    ],
}  # fmt: skip
"""Message -> its fields: number, type (* repeated) and name. A map is a list of keys and values. Enums are
int32, which look the same. Unknown fields are skipped."""
PROTOBUF = "application/x-protobuf"
FLOAT32, INT64 = 1, 2
"""Numbers of Tinker's DType."""
STOP, LENGTH = 0, 1
"""Numbers of Tinker's StopReason."""
_DTYPES: dict[int, np.dtype[Any]] = {FLOAT32: np.dtype(np.float32), INT64: np.dtype(np.int64)}
MOST_VALUES = 1 << 26
"""Of a sparse matrix: its bytes say nothing about its size."""
MASK_LOGPROB = -99999.0
"""With token id 0: no token at this place of a top-k list."""


def _classes() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(name="skylite_service.proto", package="s", syntax="proto3")
    for name, lines in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for line in lines:
            number, kind, field_name = line.split()
            field = message.field.add(name=field_name, number=int(number))
            field.label = field.LABEL_REPEATED if kind.startswith("*") else field.LABEL_OPTIONAL
            kind = kind.removeprefix("*")
            if kind in _MESSAGES:
                field.type, field.type_name = field.TYPE_MESSAGE, f".s.{kind}"
            else:
                field.type = getattr(field, f"TYPE_{kind.upper()}")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"s.{name}")) for name in _MESSAGES
    }


_CLASSES = _classes()


@dataclass(frozen=True, slots=True)
class ForwardBackward:
    """A request, as it came: its parts are checked in the policy's turn."""

    policy: str
    number: int
    """Its place among the policy's requests."""
    backward: bool
    message: Any

    def checked(self, vocabulary: int, most_tokens: int) -> tuple[list[Datum], str, dict[str, float]]:
        """Data, loss and its settings. Raises Rejected."""
        loss, settings = self.message.loss_fn, _settings(self.message)
        try:
            settings = loss_settings(loss, settings)
        except ConfigError as error:
            raise Rejected(str(error)) from None
        if not self.message.data:
            raise Rejected("The request has no data. Send at least one datum.")
        data = [
            _datum(f"Datum {index}", datum, loss, vocabulary, most_tokens)
            for index, datum in enumerate(self.message.data)
        ]
        return data, loss, settings


def read_forward_backward(body: bytes) -> ForwardBackward:
    """The request in these bytes. Raises Rejected if they are none."""
    message = _CLASSES["ForwardBackwardRequest"]()
    try:
        message.ParseFromString(body)
    except DecodeError:
        raise Rejected("The body is not a ForwardBackwardRequest in protobuf.") from None
    return ForwardBackward(message.model_id, message.seq_id, not message.forward_only, message)


def write_scored(scored: Scored, widths: Sequence[int]) -> bytes:
    """A ForwardBackwardOutput. Data of one width stand together in a record, in order."""
    message = _CLASSES["ForwardBackwardOutput"](loss_fn_output_type="ArrayRecord")
    message.metrics.add(key="loss:sum", value=scored.loss)
    start = 0
    while start < len(widths):
        end = next((i for i in range(start, len(widths)) if widths[i] != widths[start]), len(widths))
        parts = scored.logprobs[start:end]
        record = message.loss_fn_outputs.add(num_datums=end - start)
        batch = record.fields.add(key="logprobs").value
        batch.data, batch.dtype = np.concatenate(parts).astype(np.float32).tobytes(), FLOAT32
        batch.offsets = np.cumsum([0, *(4 * len(part) for part in parts)]).astype(np.int64).tobytes()
        if widths[start] > 1:
            batch.trailing_shape.append(widths[start])
        start = end
    return bytes(message.SerializeToString())


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A sampled sequence."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    is_stopped: bool


def write_samples(
    samples: Sequence[Sample],
    prompt_logprobs: Sequence[float] | None = None,
    top: Sequence[Sequence[tuple[int, float]]] | None = None,
    width: int = 0,
) -> bytes:
    """A SampleResponse. `top`: the most likely tokens at each place of the prompt, at most `width`."""
    message = _CLASSES["SampleResponse"]()
    for sample in samples:
        message.sequences.add(
            stop_reason=STOP if sample.is_stopped else LENGTH,
            tokens=np.asarray(sample.token_ids, dtype=np.int32).tobytes(),
            logprobs=np.asarray(sample.logprobs, dtype=np.float32).tobytes(),
        )
    if prompt_logprobs is not None:
        message.prompt_logprobs = np.asarray(prompt_logprobs, dtype=np.float32).tobytes()
    if top is not None:
        ids = np.zeros((len(top), width), dtype=np.int32)
        logprobs = np.full((len(top), width), MASK_LOGPROB, dtype=np.float32)
        for place, tokens in enumerate(top):
            for rank, (token, logprob) in enumerate(tokens[:width]):
                ids[place, rank], logprobs[place, rank] = token, logprob
        message.topk_prompt_logprobs.token_ids, message.topk_prompt_logprobs.k = ids.tobytes(), width
        message.topk_prompt_logprobs.logprobs = logprobs.tobytes()
        message.topk_prompt_logprobs.length = len(top)
    return bytes(message.SerializeToString())


def _settings(message: Any) -> dict[str, float]:
    """The second form holds numbers or texts; older clients send the first alone."""
    settings = {entry.key: entry.value for entry in message.loss_fn_config}
    for entry in message.loss_fn_config_v2:
        if entry.value.text:
            raise Rejected(f"The loss has no setting {entry.key!r} that is a text.")
        settings[entry.key] = entry.value.number
    if bad := [name for name, value in settings.items() if not math.isfinite(value)]:
        raise Rejected(f"The setting {bad[0]!r} of the loss is not a finite number.")
    return settings


def _datum(name: str, message: Any, loss: str, vocabulary: int, most_tokens: int) -> Datum:
    """Raises Rejected."""
    if any(chunk.HasField("image") or chunk.HasField("dmel") for chunk in message.model_input):
        raise Rejected(f"{name} has an image or audio chunk. This service trains on text alone.")
    token_ids = np.concatenate(
        [
            np.zeros(0, np.int64),
            *(_array(name, c.encoded_text.tokens, np.dtype(np.int32)) for c in message.model_input),
        ]
    ).astype(np.int64)
    if not 0 < len(token_ids) <= most_tokens:
        raise Rejected(f"{name} has {len(token_ids):,} tokens. Between 1 and {most_tokens:,} are allowed.")
    tensors = {entry.key: entry.value for entry in message.loss_fn_inputs}
    if "target_tokens" not in tensors:
        raise Rejected(f"{name} has no target_tokens.")
    targets, width = _targets(name, tensors["target_tokens"], len(token_ids))
    for ids, what in ((token_ids, "token"), (targets, "target")):
        if ids.min() < 0 or ids.max() >= vocabulary:
            raise Rejected(
                f"{name} has a {what} that the model does not know: its ids are below {vocabulary}."
            )
    form = LOSS_FORMS[loss]
    if unread := sorted(tensors.keys() - {"target_tokens", *form.inputs}):
        raise Rejected(f"{name}: the loss {loss} reads no {unread[0]!r}. It reads {', '.join(form.inputs)}.")
    inputs: dict[str, FloatArray] = {}
    for key in form.inputs:
        if key not in tensors and key != "weights":
            raise Rejected(f"{name} has no {key!r}, which the loss {loss} reads.")
        values = _floats(name, key, tensors[key]) if key in tensors else np.ones(len(targets), np.float32)
        if len(values) != len(targets):
            raise Rejected(f"{name}: {key} has {len(values)} values, and target_tokens {len(targets)}.")
        if not np.isfinite(values).all():
            raise Rejected(f"{name}: {key} has a value that is not finite.")
        inputs[key] = values
    return Datum(token_ids=token_ids, targets=targets, width=width, inputs=inputs)


def _targets(name: str, message: Any, length: int) -> tuple[IntArray, int]:
    """The targets, and how many each token has."""
    values = _dense(f"{name}: target_tokens", message)
    if values.dtype != np.int64:
        raise Rejected(f"{name}: target_tokens are not int64.")
    if not values.size or values.size % length:
        raise Rejected(f"{name} has {values.size} target_tokens for {length} tokens.")
    return values, values.size // length


def _floats(name: str, key: str, message: Any) -> FloatArray:
    return _dense(f"{name}: {key}", message).astype(np.float32)


def _dense(name: str, message: Any) -> npt.NDArray[Any]:
    """The values of a tensor in one dimension; those that a sparse one leaves out are 0. Raises Rejected."""
    dtype = _DTYPES.get(message.dtype)
    if dtype is None:
        raise Rejected(f"{name} has a dtype that is not float32 or int64.")
    if not message.HasField("sparse_csr"):
        return _array(name, message.dense, dtype)
    csr, shape = message.sparse_csr, list(message.shape)
    values, columns = _array(name, csr.values, dtype), _array(name, csr.col_indices, np.dtype(np.int64))
    starts = _array(name, csr.crow_indices, np.dtype(np.int64))
    is_valid = len(shape) == 2 and 0 < shape[0] * shape[1] <= MOST_VALUES and min(shape) > 0
    is_valid = is_valid and len(starts) == shape[0] + 1 and starts[0] == 0 and starts[-1] == len(values)
    if not is_valid or (np.diff(starts) < 0).any() or len(columns) != len(values):
        raise Rejected(f"{name} is not a sparse matrix (CSR) of its shape.")
    if len(columns) and (columns.min() < 0 or columns.max() >= shape[1]):
        raise Rejected(f"{name} has a column outside of its shape.")
    dense = np.zeros((shape[0], shape[1]), dtype=dtype)
    dense[np.repeat(np.arange(shape[0]), np.diff(starts)), columns] = values
    return dense.reshape(-1)


def _array(name: str, data: bytes, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    if len(data) % dtype.itemsize:
        raise Rejected(f"{name} has {len(data)} bytes, which is no number of {dtype.name} values.")
    return np.frombuffer(data, dtype=dtype)
