"""What a starting vLLM server does, in words, from the lines of its log."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager

from skylite.engine.vllm.server_command import EngineSpec
from skylite.processes.child import Child, raw_log_tail
from skylite.progress_reporting import LongWork, duration, long_work

logger = logging.getLogger(__name__)

STAGES = (
    (r"Resolved architecture|Using max model len", "reading the model's settings"),
    (r"Initializing a V1 LLM engine", "starting its engine"),
    (r"world_size=\d+ rank=", "starting its workers"),
    (r"Starting to load model", "loading the model"),
    (r"checkpoint shards:.*?\| (?P<a>\d+)/(?P<b>\d+)", "loading weights, file {a} of {b}"),
    (r"Loading weights took", "preparing the weights"),
    (r"Model loading took", "preparing the first batch"),
    (r"Using \w*PunicaWrapper", "preparing LoRA"),
    (r"torch\.compile|Dynamo bytecode transform|Compiling a graph", "compiling (torch.compile)"),
    (r"load the compiled graph", "loading compiled code from its cache"),
    (r"Available KV cache memory|KV cache size", "allocating the KV cache"),
    (r"Capturing CUDA graphs.*?(?P<a>\d+)/(?P<b>\d+)", "capturing CUDA graphs, {a} of {b}"),
    (r"Graph capturing finished|init engine \(profile", "warming up"),
    (r"Starting vLLM server|Application startup complete", "opening its server"),
)
"""Pattern of a line -> what vLLM does after it."""
_PATTERNS = [(re.compile(pattern), words) for pattern, words in STAGES]


def start_stage(log: str) -> str:
    """What the server does now, judged by the last line that tells; empty before the first."""
    for line in reversed(re.split(r"[\r\n]", log)):
        for pattern, words in _PATTERNS:
            if (found := pattern.search(line)) is not None:
                return words.format(**found.groupdict())
    return ""


@contextmanager
def engine_starting(spec: EngineSpec, child: Child, *, is_logged: bool = True) -> Iterator[LongWork]:
    """Show what the server does until the block ends, which is when it serves. `is_logged`: log that then."""

    def stage() -> str:
        return start_stage(raw_log_tail(child.spec.log_path, child.log_start))

    with long_work(f"{spec.name} starts", detail=stage) as work:
        yield work
    if is_logged:
        logger.info(f"{spec.name} is ready after {duration(work.elapsed_s)}")
