"""seccomp filters: the system calls that sandboxed code may make (seccomp(2), Linux 3.17).

A filter is a small BPF program. The kernel runs it before each system call of the process and of everything
that the process starts. No filter can be removed. All need no privileges.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from skylite.sandbox.syscalls import (
    ALLOWED,
    ARCHITECTURES,
    ATTRIBUTES,
    DELETING,
    MACHINE,
    MEMORY,
    NETWORK,
    OTHER_PROCESSES,
    PROCESSES,
    PROGRAMS,
    SIGNALS,
    WRITING,
    numbers,
)

_LOAD, _AND, _RETURN = 0x20, 0x54, 0x06
_EQUAL, _GREATER_EQUAL = 0x15, 0x35
_NUMBER, _ARCHITECTURE = 0, 4  # offsets in struct seccomp_data
_ALLOW, _KILL, _ERROR, _ASK = 0x7FFF0000, 0x80000000, 0x00050000, 0x7FC00000
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
_SET_MODE_FILTER, _NEW_LISTENER = 1, 8
_O_TMPFILE = 0o20000000
"""Without O_DIRECTORY, which os.O_TMPFILE includes."""

Instruction = tuple[int, int, int, int]
"""code, jump if true, jump if false, k."""


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]


def architecture() -> int | None:
    """AUDIT_ARCH_... of this process; None where the sandbox knows no system call numbers."""
    return ARCHITECTURES.get(platform.machine()) if struct.calcsize("P") == 8 else None


def isolation_filter(arch: int, *, may_write: bool) -> list[Instruction]:
    """Only ALLOWED calls: no network, no programs, no other processes' memory, no change of the machine.

    No writing unless `may_write`; Landlock must limit the folders then.
    """
    rules = _only_arguments("ioctl", arch, 1, _HARMLESS_IOCTLS)
    rules += _not_arguments("fcntl", arch, 1, _SIGNAL_FCNTLS)
    rules += _only_arguments("prlimit64", arch, 0, [0])
    rules += _only_arguments("sched_setaffinity", arch, 0, [0])
    rules += _without_bits("clone", arch, 0, _CLONE_NAMESPACES)
    ruled = {"ioctl", "fcntl", "prlimit64", "sched_setaffinity", "clone"}
    if not may_write:
        rules += _without_bits("open", arch, 1, OPEN_FOR_WRITING)
        rules += _without_bits("openat", arch, 2, OPEN_FOR_WRITING)
        ruled |= {"open", "openat"}
    allowed = [name for name in f"{ALLOWED} {WRITING if may_write else ''}".split() if name not in ruled]
    refused = f"{NETWORK} {PROGRAMS} {OTHER_PROCESSES} {MACHINE} {MEMORY} {ATTRIBUTES} {WRITING} {SIGNALS}"
    # The arguments of clone3 and openat2 are in memory, where a filter cannot read them. They are absent, as
    # all calls that are not listed; C libraries then use clone and openat.
    program = _answer(numbers(" ".join(allowed), arch), _ALLOW) + rules + _refuse(numbers(refused, arch))
    return _complete(arch, program, _ABSENT)


def single_process_filter(
    arch: int, pid: int, *, may_start_threads: bool, may_delete: bool
) -> list[Instruction]:
    """No new processes, and signals to `pid`, the process itself, only.

    Without `may_delete` every file stays in the folder, where the server counts its size.
    """
    program = _refuse(numbers(PROCESSES, arch))
    if may_start_threads:
        program += _needs_bits("clone", arch, 0, _CLONE_THREAD)
    else:
        program += _refuse(numbers("clone", arch))
    if not may_delete:
        program += _refuse(numbers(DELETING, arch))
        program += _without_bits("open", arch, 1, _O_TMPFILE)
        program += _without_bits("openat", arch, 2, _O_TMPFILE)
    for name in ("kill", "tgkill"):
        program += _only_arguments(name, arch, 0, [pid])
    program += _not_arguments("prctl", arch, 0, [_PR_SET_PDEATHSIG])
    return _complete(arch, program)


def thread_filter(arch: int) -> list[Instruction]:
    """Ask the listener (`install`) before each new thread."""
    test = [(_AND, 0, 0, _CLONE_THREAD), (_EQUAL, 0, 1, 0), (_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _ASK)]
    return [(_LOAD, 0, 0, _NUMBER), *_rule("clone", arch, 0, test), (_RETURN, 0, 0, _ALLOW)]


def install(program: Sequence[Instruction]) -> None:
    """Apply a filter to this process. It cannot be removed. Raises OSError if the kernel refuses."""
    _install(program, lambda libc, handle: libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, handle, 0, 0))


def install_with_listener(program: Sequence[Instruction], arch: int) -> int:
    """As `install`. Returns a descriptor for the questions of the filter (seccomp_unotify(2), Linux 5.5)."""
    (number,) = numbers("seccomp", arch)
    return _install(
        program, lambda libc, handle: libc.syscall(number, _SET_MODE_FILTER, _NEW_LISTENER, handle)
    )


def _install(program: Sequence[Instruction], call: Callable[[ctypes.CDLL, Any], int]) -> int:
    code = b"".join(struct.pack("=HBBI", *instruction) for instruction in program)
    buffer = ctypes.create_string_buffer(code, len(code))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_NO_NEW_PRIVS) failed")
    handle = _Program(len(program), ctypes.addressof(buffer))
    if (result := call(libc, ctypes.byref(handle))) < 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_SECCOMP) failed")
    return result


def _complete(arch: int, rules: Sequence[Instruction], others: int = _ALLOW) -> list[Instruction]:
    """The program around the rules. A call by another architecture's table (32 bit) kills the process.

    `others`: the answer to calls without a rule.
    """
    return [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, arch),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
        *rules,
        (_RETURN, 0, 0, others),
    ]


def _answer(calls: Iterable[int], answer: int) -> list[Instruction]:
    return [step for number in calls for step in ((_EQUAL, 0, 1, number), (_RETURN, 0, 0, answer))]


def _refuse(calls: Iterable[int]) -> list[Instruction]:
    return _answer(calls, _REFUSE)


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
