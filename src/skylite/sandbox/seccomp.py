"""seccomp filters: system calls that sandboxed code may not make (seccomp(2), Linux 3.17).

A filter is a small BPF program. The kernel runs it before each system call of the process and of everything
that the process starts. No filter can be removed. All need no privileges.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
from collections.abc import Iterable, Sequence

from skylite.sandbox.syscalls import (
    ARCHITECTURES,
    ATTRIBUTES,
    MACHINE,
    MEMORY,
    NETWORK,
    NEWEST,
    OTHER_PROCESSES,
    PROCESSES,
    SIGNALS,
    WRITING,
    numbers,
)

_LOAD, _AND, _RETURN = 0x20, 0x54, 0x06
_EQUAL, _GREATER_EQUAL = 0x15, 0x35
_NUMBER, _ARCHITECTURE = 0, 4  # offsets in struct seccomp_data
_ALLOW, _KILL, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000
_REFUSE = _ERROR | errno.EPERM
_ABSENT = _ERROR | errno.ENOSYS

OPEN_FOR_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_CLONE_THREAD = 0x00010000
_CLONE_NAMESPACES = 0x7E020080
_HARMLESS_IOCTLS = (0x5401, 0x802C542A, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
"""TCGETS, TCGETS2, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX."""
_SIGNAL_FCNTLS = (8, 10, 15)
"""F_SETOWN, F_SETSIG, F_SETOWN_EX: a file can then send any signal to any process of the user."""
_PR_SET_NO_NEW_PRIVS, _PR_SET_PDEATHSIG, _PR_SET_SECCOMP = 38, 1, 22
_SECCOMP_MODE_FILTER = 2

Instruction = tuple[int, int, int, int]
"""code, jump if true, jump if false, k."""


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]


def architecture() -> int | None:
    """AUDIT_ARCH_... of this process; None where the sandbox knows no system call numbers."""
    return ARCHITECTURES.get(platform.machine()) if struct.calcsize("P") == 8 else None


def isolation_filter(arch: int, *, may_write: bool) -> list[Instruction]:
    """No network, no other processes' memory, no change of the machine; no writing unless `may_write`.

    With `may_write`, Landlock must limit the folders.
    """
    program = _refuse(numbers(NETWORK + OTHER_PROCESSES + MACHINE + MEMORY + ATTRIBUTES, arch))
    program += _only_arguments("ioctl", arch, 1, _HARMLESS_IOCTLS)
    program += _not_arguments("fcntl", arch, 1, _SIGNAL_FCNTLS)
    program += _only_arguments("prlimit64", arch, 0, [0])
    program += _only_arguments("sched_setaffinity", arch, 0, [0])
    program += _without_bits("clone", arch, 0, _CLONE_NAMESPACES)
    # Their arguments are in memory, where a filter cannot read them. C libraries then use clone and openat.
    program += _refuse(numbers("clone3 openat2", arch), _ABSENT)
    if not may_write:
        program += _refuse(numbers(WRITING, arch))
        program += _without_bits("open", arch, 1, OPEN_FOR_WRITING)
        program += _without_bits("openat", arch, 2, OPEN_FOR_WRITING)
    return _complete(arch, program)


def single_process_filter(arch: int, pid: int) -> list[Instruction]:
    """No new processes (threads are allowed), and signals to `pid`, the process itself, only."""
    program = _refuse(numbers(f"{PROCESSES} {SIGNALS}", arch))
    program += _needs_bits("clone", arch, 0, _CLONE_THREAD)
    for name in ("kill", "tgkill"):
        program += _only_arguments(name, arch, 0, [pid])
    program += _not_arguments("prctl", arch, 0, [_PR_SET_PDEATHSIG])
    return _complete(arch, program)


def install(program: Sequence[Instruction]) -> None:
    """Apply a filter to this process. It cannot be removed. Raises OSError if the kernel refuses."""
    code = b"".join(struct.pack("=HBBI", *instruction) for instruction in program)
    buffer = ctypes.create_string_buffer(code, len(code))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_NO_NEW_PRIVS) failed")
    handle = _Program(len(program), ctypes.addressof(buffer))
    if libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(handle), 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_SECCOMP) failed")


def _complete(arch: int, rules: Sequence[Instruction]) -> list[Instruction]:
    """The program around the rules. A call by another architecture's table (32 bit) kills the process."""
    return [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, arch),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
        (_GREATER_EQUAL, 0, 1, NEWEST + 1),
        (_RETURN, 0, 0, _ABSENT),
        *rules,
        (_RETURN, 0, 0, _ALLOW),
    ]


def _refuse(calls: Iterable[int], answer: int = _REFUSE) -> list[Instruction]:
    return [step for number in calls for step in ((_EQUAL, 0, 1, number), (_RETURN, 0, 0, answer))]


def _rule(name: str, arch: int, argument: int, body: list[Instruction]) -> list[Instruction]:
    """`body` for calls of `name`, with the low 32 bits of the argument loaded.

    The kernel itself only reads those 32 bits of these arguments.
    """
    load = (_LOAD, 0, 0, 16 + 8 * argument)
    return [
        step for number in numbers(name, arch) for step in ((_EQUAL, 0, len(body) + 1, number), load, *body)
    ]


def _only_arguments(name: str, arch: int, argument: int, values: Sequence[int]) -> list[Instruction]:
    tests = [step for value in values for step in ((_EQUAL, 0, 1, value), (_RETURN, 0, 0, _ALLOW))]
    return _rule(name, arch, argument, [*tests, (_RETURN, 0, 0, _REFUSE)])


def _not_arguments(name: str, arch: int, argument: int, values: Sequence[int]) -> list[Instruction]:
    tests = [step for value in values for step in ((_EQUAL, 0, 1, value), (_RETURN, 0, 0, _REFUSE))]
    return _rule(name, arch, argument, [*tests, (_RETURN, 0, 0, _ALLOW)])


def _without_bits(name: str, arch: int, argument: int, bits: int) -> list[Instruction]:
    return _rule(
        name,
        arch,
        argument,
        [(_AND, 0, 0, bits), (_EQUAL, 0, 1, 0), (_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _REFUSE)],
    )


def _needs_bits(name: str, arch: int, argument: int, bits: int) -> list[Instruction]:
    return _rule(
        name,
        arch,
        argument,
        [(_AND, 0, 0, bits), (_EQUAL, 0, 1, bits), (_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _REFUSE)],
    )
