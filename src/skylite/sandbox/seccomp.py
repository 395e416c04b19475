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

ALLOWED = """
read write readv writev pread64 pwrite64 preadv pwritev preadv2 pwritev2 open openat close close_range lseek
stat fstat lstat newfstatat statx access faccessat faccessat2 getdents getdents64 readlink readlinkat getcwd
chdir fchdir statfs fstatfs getxattr lgetxattr fgetxattr listxattr llistxattr flistxattr dup dup2 dup3 fcntl
ioctl flock fsync fdatasync sync_file_range ftruncate fallocate fadvise64 readahead sendfile copy_file_range
pipe pipe2 eventfd eventfd2 poll ppoll select pselect6 epoll_create epoll_create1 epoll_ctl epoll_wait
epoll_pwait timerfd_create timerfd_settime timerfd_gettime umask mmap munmap mprotect mremap madvise brk msync
mincore membarrier get_mempolicy rt_sigaction rt_sigprocmask rt_sigreturn rt_sigpending rt_sigtimedwait
rt_sigsuspend sigaltstack kill tgkill pause alarm getitimer setitimer timer_create timer_settime timer_gettime
timer_getoverrun timer_delete restart_syscall clone fork vfork exit exit_group wait4 waitid futex
set_robust_list get_robust_list rseq set_tid_address arch_prctl prctl getpid getppid gettid getuid geteuid
getgid getegid getresuid getresgid getgroups getpgid getpgrp getsid getpriority getrlimit setrlimit prlimit64
getrusage times sysinfo uname getcpu getrandom clock_gettime clock_getres clock_nanosleep nanosleep
gettimeofday time sched_yield sched_getaffinity sched_setaffinity sched_getparam sched_getscheduler
sched_getattr sched_get_priority_max sched_get_priority_min sched_rr_get_interval
"""
"""What Python, its packages and the C library need. No other system call exists in the sandbox: those of the
lists below are refused with EPERM, as programs expect where they ask for rights; all others with ENOSYS."""
ATTRIBUTES = """
chmod fchmod fchmodat chown fchown lchown fchownat utime utimes futimesat utimensat setxattr lsetxattr
fsetxattr removexattr lremovexattr fremovexattr mknod mknodat
"""
"""Change files without opening them for writing; Landlock does not cover these."""
WRITING = """
creat mkdir mkdirat rmdir unlink unlinkat rename renameat renameat2 link linkat symlink symlinkat truncate
"""
NETWORK = "socket socketpair"
"""The other calls of the network need what these return."""
DELETING = "unlink unlinkat rename renameat renameat2"
"""Can take a file that stays open or mapped out of its folder."""
PROGRAMS, PROCESSES = "execve execveat", "clone fork vfork"

_NUMBERS = """
access 21 -, alarm 37 -, arch_prctl 158 -, brk 12 214, chdir 80 49, chmod 90 -, chown 92 -, clock_getres 229
114, clock_gettime 228 113, clock_nanosleep 230 115, clone 56 220, close 3 57, close_range 436 436,
copy_file_range 326 285, creat 85 -, dup 32 23, dup2 33 -, dup3 292 24, epoll_create 213 -, epoll_create1 291
20, epoll_ctl 233 21, epoll_pwait 281 22, epoll_wait 232 -, eventfd 284 -, eventfd2 290 19, execve 59 221,
execveat 322 281, exit 60 93, exit_group 231 94, faccessat 269 48, faccessat2 439 439, fadvise64 221 223,
fallocate 285 47, fchdir 81 50, fchmod 91 52, fchmodat 268 53, fchown 93 55, fchownat 260 54, fcntl 72 25,
fdatasync 75 83, fgetxattr 193 10, flistxattr 196 13, flock 73 32, fork 57 -, fremovexattr 199 16, fsetxattr
190 7, fstat 5 80, fstatfs 138 44, fsync 74 82, ftruncate 77 46, futex 202 98, futimesat 261 -, get_mempolicy
239 236, get_robust_list 274 100, getcpu 309 168, getcwd 79 17, getdents 78 -, getdents64 217 61, getegid 108
177, geteuid 107 175, getgid 104 176, getgroups 115 158, getitimer 36 102, getpgid 121 155, getpgrp 111 -,
getpid 39 172, getppid 110 173, getpriority 140 141, getrandom 318 278, getresgid 120 150, getresuid 118 148,
getrlimit 97 163, getrusage 98 165, getsid 124 156, gettid 186 178, gettimeofday 96 169, getuid 102 174,
getxattr 191 8, ioctl 16 29, kill 62 129, lchown 94 -, lgetxattr 192 9, link 86 -, linkat 265 37, listxattr
194 11, llistxattr 195 12, lremovexattr 198 15, lseek 8 62, lsetxattr 189 6, lstat 6 -, madvise 28 233,
membarrier 324 283, mincore 27 232, mkdir 83 -, mkdirat 258 34, mknod 133 -, mknodat 259 33, mmap 9 222,
mprotect 10 226, mremap 25 216, msync 26 227, munmap 11 215, nanosleep 35 101, newfstatat 262 79, open 2 -,
openat 257 56, pause 34 -, pipe 22 -, pipe2 293 59, poll 7 -, ppoll 271 73, prctl 157 167, pread64 17 67,
preadv 295 69, preadv2 327 286, prlimit64 302 261, pselect6 270 72, pwrite64 18 68, pwritev 296 70, pwritev2
328 287, read 0 63, readahead 187 213, readlink 89 -, readlinkat 267 78, readv 19 65, removexattr 197 14,
rename 82 -, renameat 264 38, renameat2 316 276, restart_syscall 219 128, rmdir 84 -, rseq 334 293,
rt_sigaction 13 134, rt_sigpending 127 136, rt_sigprocmask 14 135, rt_sigreturn 15 139, rt_sigsuspend 130 133,
rt_sigtimedwait 128 137, sched_get_priority_max 146 125, sched_get_priority_min 147 126, sched_getaffinity 204
123, sched_getattr 315 275, sched_getparam 143 121, sched_getscheduler 145 120, sched_rr_get_interval 148 127,
sched_setaffinity 203 122, sched_yield 24 124, select 23 -, sendfile 40 71, set_robust_list 273 99,
set_tid_address 218 96, setitimer 38 103, setrlimit 160 164, setxattr 188 5, sigaltstack 131 132, socket 41
198, socketpair 53 199, stat 4 -, statfs 137 43, statx 332 291, symlink 88 -, symlinkat 266 36,
sync_file_range 277 84, sysinfo 99 179, tgkill 234 131, time 201 -, timer_create 222 107, timer_delete 226
111, timer_getoverrun 225 109, timer_gettime 224 108, timer_settime 223 110, timerfd_create 283 85,
timerfd_gettime 287 87, timerfd_settime 286 86, times 100 153, truncate 76 45, umask 95 166, uname 63 160,
unlink 87 -, unlinkat 263 35, utime 132 -, utimensat 280 88, utimes 235 -, vfork 58 -, wait4 61 260, waitid
247 95, write 1 64, writev 20 66
"""
"""name, x86-64, AArch64; "-" where it does not exist. A test compares them with the kernel's headers."""

_LOAD, _AND, _RETURN = 0x20, 0x54, 0x06
_EQUAL, _GREATER_EQUAL = 0x15, 0x35
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
    refused = f"{NETWORK} {PROGRAMS} {ATTRIBUTES} {WRITING}"
    # The arguments of clone3 and openat2 are in memory, where a filter cannot read them. They are absent, as
    # all calls that are not listed; C libraries then use clone and openat.
    program = _answer(numbers(" ".join(allowed), arch), _ALLOW) + rules + _refuse(numbers(refused, arch))
    return _complete(arch, program, _ABSENT)


def single_process_filter(arch: int, pid: int, *, may_delete: bool) -> list[Instruction]:
    """No new processes and threads, and signals to `pid`, the process itself, only.

    Without `may_delete` every file stays in the folder, where the server counts its size.
    """
    program = _refuse(numbers(PROCESSES, arch))
    if not may_delete:
        program += _refuse(numbers(DELETING, arch))
        program += _without_bits("open", arch, 1, _O_TMPFILE)
        program += _without_bits("openat", arch, 2, _O_TMPFILE)
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


def numbers(names: str, arch: int) -> list[int]:
    """The numbers of those of the system calls that the architecture has. `names`: with spaces between."""
    both = (_TABLE[name][0 if arch == X86_64 else 1] for name in names.split())
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


_TABLE: dict[str, tuple[str, str]] = {
    name: (x86, arm) for name, x86, arm in (row.split() for row in _NUMBERS.replace("\n", " ").split(","))
}
