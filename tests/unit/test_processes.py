"""The last lines of a process's log, cleaned up for a reader."""

from __future__ import annotations

from pathlib import Path

import pytest

from skylite.processes.child import TAIL_BYTES, log_tail, root_cause
from skylite.processes.torchrun import killed_rank

TORCHRUN = """\
W1121 05:50:01.1 100 torch/distributed/run.py:851] Setting OMP_NUM_THREADS
loading
[rank0]: Traceback (most recent call last):
[rank0]: ValueError: the reason
W1121 05:50:02.1 100 torch/distributed/elastic/multiprocessing/api.py:1010] Sending process 102 closing signal SIGTERM
E1121 05:50:02.2 100 torch/distributed/elastic/multiprocessing/api.py:984] failed (exitcode: 1) local_rank: 0 (pid: 101)
Traceback (most recent call last):
  File "torch/distributed/run.py", line 1, in main
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
"""  # noqa: E501 -- as torchrun prints them

WORKER = "(Worker_TP0 pid=3) ERROR 11-25 15:07:28 [multiproc_executor.py:900] "
CORE = "(EngineCore pid=2) ERROR 11-25 15:07:29 [core.py:1510] "
LOST = "WorkerProc initialization failed. See stack trace for root cause."


def traceback_of(last: str, prefix: str = "", frames: int = 30) -> str:
    calls = [f'  File "vllm/x.py", line {n}, in f' for n in range(frames)]
    return "".join(f"{prefix}{line}\n" for line in ["Traceback (most recent call last):", *calls, last])


VLLM = "".join(
    [
        "loading\n",
        f"{WORKER}WorkerProc failed to start.\n",
        traceback_of("ValueError: the reason", WORKER),
        f"{CORE}EngineCore failed to start.\n",
        traceback_of(f"Exception: {LOST}", CORE),
        "(Worker_TP1 pid=4) INFO 11-25 15:07:29 [multiproc_executor.py:950] Parent process exited\n",
        "Process EngineCore:\n",
        traceback_of(f"Exception: {LOST}"),
        traceback_of(
            "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}"
        ),
        "  warnings.warn('resource_tracker: There appear to be %d '\n",
    ]
)
"""How vLLM 0.32 ends when a worker of tensor parallelism fails."""


def tail(folder: Path, text: str, lines: int = 15, start: int = 0) -> list[str]:
    path = folder / "x.log"
    path.write_bytes(text.encode())
    return log_tail(path, lines, start).splitlines()


def test_the_last_lines_without_blank_lines(tmp_path: Path) -> None:
    assert tail(tmp_path, "a\n\nb\n \nc\n", 2) == ["b", "c"]
    assert tail(tmp_path, "") == []
    assert log_tail(tmp_path / "none.log", 5) == ""


def test_colours_and_progress_bars_are_flattened(tmp_path: Path) -> None:
    assert tail(tmp_path, "\x1b[31mred\x1b[0m\n10%\r50%\r100%\nend\r\n\x07") == ["red", "100%", "end"]


def test_torchruns_summary_does_not_hide_the_traceback(tmp_path: Path) -> None:
    assert tail(tmp_path, TORCHRUN)[-1] == "[rank0]: ValueError: the reason"
    assert tail(tmp_path, TORCHRUN)[0] == "loading"


def test_tracebacks_of_vllm_that_point_to_an_earlier_one_do_not_hide_it(tmp_path: Path) -> None:
    found = tail(tmp_path, VLLM)
    assert found[-5:] == [
        f"{WORKER}ValueError: the reason",
        f"{CORE}EngineCore failed to start.",
        "(Worker_TP1 pid=4) INFO 11-25 15:07:29 [multiproc_executor.py:950] Parent process exited",
        "Process EngineCore:",
        "  warnings.warn('resource_tracker: There appear to be %d '",
    ]


def test_a_dead_engine_is_shown_by_its_own_traceback(tmp_path: Path) -> None:
    dead = (
        "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. See stack trace (above) "
    )
    log = traceback_of("torch.AcceleratorError: CUDA error", CORE) + traceback_of(
        f"{dead}for the root cause."
    )
    assert tail(tmp_path, log)[-1] == f"{CORE}torch.AcceleratorError: CUDA error"


def test_a_traceback_between_the_lines_of_another_process_stays(tmp_path: Path) -> None:
    lines = traceback_of(f"Exception: {LOST}", CORE).splitlines(keepends=True)
    between = traceback_of("ValueError: the reason", WORKER)
    assert tail(tmp_path, "".join([*lines[:9], between, *lines[9:]]))[-1] == f"{WORKER}ValueError: the reason"
    assert len(tail(tmp_path, between + lines[-1], 100)) == 33, "without its beginning nothing is dropped"


def test_lines_of_an_earlier_run_are_left_out(tmp_path: Path) -> None:
    assert tail(tmp_path, TORCHRUN + "killed later\n", start=len(TORCHRUN)) == ["killed later"]


def test_only_the_end_of_a_long_log_is_read(tmp_path: Path) -> None:
    assert tail(tmp_path, "x" * (2 * TAIL_BYTES) + "\nend\n")[-1] == "end"
    assert all(len(line) < 600 for line in tail(tmp_path, "x" * (2 * TAIL_BYTES) + "\nend\n"))


def test_bytes_that_are_not_text_are_harmless(tmp_path: Path) -> None:
    (tmp_path / "b.log").write_bytes(b"\xff\xfe ok\n")
    assert log_tail(tmp_path / "b.log", 1).endswith("ok")


FAILURE = """[{rank}]:
  time      : 2026-11-21_15:28:55
  host      : localhost
  rank      : {rank} (local_rank: {rank})
  exitcode  : {code} (pid: {pid}) {signal}
  error_file: <N/A>
"""
"""torchrun's summary line for a failed rank."""


@pytest.mark.parametrize(
    ("first", "second", "found"),
    [
        ((1, ""), (-9, " (SIGKILL)"), "rank 1 (process 9481) was killed by SIGKILL"),
        ((-15, " (SIGTERM)"), (-11, " (SIGSEGV)"), "rank 1 (process 9481) was killed by SIGSEGV"),
        ((-15, " (SIGTERM)"), (1, ""), None),
    ],
)
def test_a_killed_rank_is_named_by_torchruns_summary(
    first: tuple[int, str], second: tuple[int, str], found: str | None
) -> None:
    ranks = enumerate((first, second))
    log = "Failures:\n" + "".join(
        FAILURE.format(rank=rank, pid=9480 + rank, code=code, signal=name) for rank, (code, name) in ranks
    )
    assert killed_rank(log) == found
    assert killed_rank("nothing of the kind") is None


@pytest.mark.parametrize(
    ("log", "cause"),
    [
        ("fp8", "torch.float32 is not supported for quantization method fp8"),
        ("lfm2", "Chunked prefill is required for mamba cache mode 'align'"),
        ("kv", "ValueError: To serve at least one request with the model's max seq len (412)"),
    ],
)
def test_a_real_engine_that_dies_shows_its_cause_and_no_leaks(log: str, cause: str) -> None:
    """Logs of vLLM 0.32 on a CPU, whose last lines are what Triton's bindings leak at the exit."""
    path = Path(__file__).parent / "engine_logs" / f"{log}.log"
    assert "nanobind: leaked" in "\n".join(path.read_text(encoding="utf-8").splitlines()[-40:])
    tail = log_tail(path, 15)
    assert cause in tail.splitlines()[-1] or cause in "\n".join(tail.splitlines()[-2:])
    assert "leaked" not in tail
    assert cause in root_cause(tail)


def test_a_log_without_an_error_has_no_cause() -> None:
    assert root_cause("starting\nall done") == ""
    assert root_cause("ValueError\nlater line") == "ValueError"
