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
from collections.abc import Iterable, Sequence

X86_64 = 0xC000003E
AARCH64 = 0xC00000B7
ARCHITECTURES = {"x86_64": X86_64, "aarch64": AARCH64}
"""platform.machine() -> AUDIT_ARCH_... as seccomp sees it."""


def _table(text: str) -> dict[str, tuple[str, str]]:
    return {name: (x86, arm) for name, x86, arm in (row.split() for row in text.split(","))}


# name, x86-64, AArch64; "-" where it does not exist. A test compares the numbers with the kernel's headers.
ALLOWED = _table("""
access 21 -, alarm 37 -, arch_prctl 158 -, brk 12 214, chdir 80 49, clock_getres 229 114, clock_gettime 228
113, clock_nanosleep 230 115, clone 56 220, close 3 57, close_range 436 436, copy_file_range 326 285, dup 32
23, dup2 33 -, dup3 292 24, epoll_create 213 -, epoll_create1 291 20, epoll_ctl 233 21, epoll_pwait 281 22,
epoll_wait 232 -, eventfd 284 -, eventfd2 290 19, exit 60 93, exit_group 231 94, faccessat 269 48, faccessat2
439 439, fadvise64 221 223, fallocate 285 47, fchdir 81 50, fcntl 72 25, fdatasync 75 83, fgetxattr 193 10,
flistxattr 196 13, flock 73 32, fork 57 -, fstat 5 80, fstatfs 138 44, fsync 74 82, ftruncate 77 46, futex 202
98, get_mempolicy 239 236, get_robust_list 274 100, getcpu 309 168, getcwd 79 17, getdents 78 -, getdents64
217 61, getegid 108 177, geteuid 107 175, getgid 104 176, getgroups 115 158, getitimer 36 102, getpgid 121
155, getpgrp 111 -, getpid 39 172, getppid 110 173, getpriority 140 141, getrandom 318 278, getresgid 120 150,
getresuid 118 148, getrlimit 97 163, getrusage 98 165, getsid 124 156, gettid 186 178, gettimeofday 96 169,
getuid 102 174, getxattr 191 8, ioctl 16 29, kill 62 129, lgetxattr 192 9, listxattr 194 11, llistxattr 195
12, lseek 8 62, lstat 6 -, madvise 28 233, membarrier 324 283, mincore 27 232, mmap 9 222, mprotect 10 226,
mremap 25 216, msync 26 227, munmap 11 215, nanosleep 35 101, newfstatat 262 79, open 2 -, openat 257 56,
pause 34 -, pipe 22 -, pipe2 293 59, poll 7 -, ppoll 271 73, prctl 157 167, pread64 17 67, preadv 295 69,
preadv2 327 286, prlimit64 302 261, pselect6 270 72, pwrite64 18 68, pwritev 296 70, pwritev2 328 287, read 0
63, readahead 187 213, readlink 89 -, readlinkat 267 78, readv 19 65, restart_syscall 219 128, rseq 334 293,
rt_sigaction 13 134, rt_sigpending 127 136, rt_sigprocmask 14 135, rt_sigreturn 15 139, rt_sigsuspend 130 133,
rt_sigtimedwait 128 137, sched_get_priority_max 146 125, sched_get_priority_min 147 126, sched_getaffinity 204
123, sched_getattr 315 275, sched_getparam 143 121, sched_getscheduler 145 120, sched_rr_get_interval 148 127,
sched_setaffinity 203 122, sched_yield 24 124, select 23 -, sendfile 40 71, set_robust_list 273 99,
set_tid_address 218 96, setitimer 38 103, setrlimit 160 164, sigaltstack 131 132, stat 4 -, statfs 137 43,
statx 332 291, sync_file_range 277 84, sysinfo 99 179, tgkill 234 131, time 201 -, timer_create 222 107,
timer_delete 226 111, timer_getoverrun 225 109, timer_gettime 224 108, timer_settime 223 110, timerfd_create
283 85, timerfd_gettime 287 87, timerfd_settime 286 86, times 100 153, umask 95 166, uname 63 160, vfork 58 -,
wait4 61 260, waitid 247 95, write 1 64, writev 20 66
""")
"""What Python, its packages and the C library need. No other system call exists in the sandbox: those
below are refused with EPERM, as programs expect where they ask for rights; all others with ENOSYS."""
REFUSED = _table("""
socket 41 198, socketpair 53 199, execve 59 221, execveat 322 281, chmod 90 -, fchmod 91 52, fchmodat 268 53,
chown 92 -, fchown 93 55, lchown 94 -, fchownat 260 54, utime 132 -, utimes 235 -, futimesat 261 -, utimensat
280 88, setxattr 188 5, lsetxattr 189 6, fsetxattr 190 7, removexattr 197 14, lremovexattr 198 15,
fremovexattr 199 16, mknod 133 -, mknodat 259 33, creat 85 -, mkdir 83 -, mkdirat 258 34, rmdir 84 -, unlink
87 -, unlinkat 263 35, rename 82 -, renameat 264 38, renameat2 316 276, link 86 -, linkat 265 37, symlink 88
-, symlinkat 266 36, truncate 76 45
""")
"""Sockets (other calls of the network need one), programs, and changes of files that need no open file."""
PROCESSES = ("clone", "fork", "vfork")
"""Allowed to the server, and not to the calls."""

_LOAD, _AND, _RETURN = 0x20, 0x54, 0x06
_EQUAL = 0x15
_NUMBER, _ARCHITECTURE = 0, 4  # offsets in struct seccomp_data
_ALLOW, _KILL, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000
_REFUSE = _ERROR | errno.EPERM
_ABSENT = _ERROR | errno.ENOSYS

OPEN_FOR_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
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


def isolation_filter(arch: int) -> list[Instruction]:
    """Only ALLOWED calls: no network, no programs, no other processes' memory, no file to write, no change of
    the machine.
    """
    rules = {
        "ioctl": _only_arguments("ioctl", arch, 1, _HARMLESS_IOCTLS),
        "fcntl": _not_arguments("fcntl", arch, 1, _SIGNAL_FCNTLS),
        "prlimit64": _only_arguments("prlimit64", arch, 0, [0]),
        "sched_setaffinity": _only_arguments("sched_setaffinity", arch, 0, [0]),
        "clone": _without_bits("clone", arch, 0, _CLONE_NAMESPACES),
        "open": _without_bits("open", arch, 1, OPEN_FOR_WRITING),
        "openat": _without_bits("openat", arch, 2, OPEN_FOR_WRITING),
    }
    # The arguments of clone3 and openat2 are in memory, where a filter cannot read them. They are absent, as
    # all calls that are not listed; C libraries then use clone and openat.
    program = _answer(numbers([name for name in ALLOWED if name not in rules], arch), _ALLOW)
    program += [step for rule in rules.values() for step in rule]
    return _complete(arch, program + _answer(numbers(REFUSED, arch), _REFUSE), _ABSENT)


def single_process_filter(arch: int, pid: int) -> list[Instruction]:
    """No new processes and threads, and signals to `pid`, the process itself, only."""
    program = _answer(numbers(PROCESSES, arch), _REFUSE)
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
    handle = ctypes.byref(_Program(len(program), ctypes.addressof(buffer)))
    if libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, handle, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_SECCOMP) failed")


def numbers(names: Iterable[str], arch: int) -> list[int]:
    """The numbers of those of the system calls that the architecture has."""
    both = ((ALLOWED.get(name) or REFUSED[name])[0 if arch == X86_64 else 1] for name in names)
    return [int(number) for number in both if number != "-"]


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


def _rule(name: str, arch: int, argument: int, body: list[Instruction]) -> list[Instruction]:
    """`body` for calls of `name`, with the low 32 bits of the argument loaded.

    The kernel itself only reads those 32 bits of these arguments.
    """
    load = (_LOAD, 0, 0, 16 + 8 * argument)
    return [
        step for number in numbers([name], arch) for step in ((_EQUAL, 0, len(body) + 1, number), load, *body)
    ]


def _only_arguments(name: str, arch: int, argument: int, values: Sequence[int]) -> list[Instruction]:
    return _rule(name, arch, argument, [*_answer(values, _ALLOW), (_RETURN, 0, 0, _REFUSE)])


def _not_arguments(name: str, arch: int, argument: int, values: Sequence[int]) -> list[Instruction]:
    return _rule(name, arch, argument, [*_answer(values, _REFUSE), (_RETURN, 0, 0, _ALLOW)])


def _without_bits(name: str, arch: int, argument: int, bits: int) -> list[Instruction]:
    return _rule(name, arch, argument, [(_AND, 0, 0, bits), *_answer([0], _ALLOW), (_RETURN, 0, 0, _REFUSE)])
