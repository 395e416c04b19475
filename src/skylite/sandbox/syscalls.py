"""Numbers of the system calls that the sandbox refuses, for x86-64 and AArch64."""

from __future__ import annotations

X86_64 = 0xC000003E
AARCH64 = 0xC00000B7
ARCHITECTURES = {"x86_64": X86_64, "aarch64": AARCH64}
"""platform.machine() -> AUDIT_ARCH_... as seccomp sees it."""

NEWEST = 450
"""Larger numbers do not exist for sandboxed code: nobody has judged those system calls."""

_NUMBERS = """
accept 43 202, accept4 288 242, acct 163 89, add_key 248 217, adjtimex 159 171, bind 49 200, bpf 321 280,
chmod 90 -, chown 92 -, chroot 161 51, clock_adjtime 305 266, clock_settime 227 112, clone 56 220,
clone3 435 435, connect 42 203, creat 85 -, delete_module 176 106, fanotify_init 300 262, fchmod 91 52,
fchmodat 268 53, fchown 93 55, fchownat 260 54, fcntl 72 25, finit_module 313 273, fork 57 -,
fremovexattr 199 16, fsconfig 431 431, fsetxattr 190 7, fsmount 432 432, fsopen 430 430, fspick 433 433,
futimesat 261 -, init_module 175 105, io_uring_enter 426 426, io_uring_register 427 427,
io_uring_setup 425 425, ioctl 16 29, ioperm 173 -, iopl 172 -, ioprio_set 251 30, kcmp 312 272,
kexec_file_load 320 294, kexec_load 246 104, keyctl 250 219, kill 62 129, lchown 94 -, link 86 -,
linkat 265 37, listen 50 201, lremovexattr 198 15, lsetxattr 189 6, memfd_create 319 279,
memfd_secret 447 447, migrate_pages 256 238, mkdir 83 -, mkdirat 258 34, mknod 133 -, mknodat 259 33,
modify_ldt 154 -,
mount 165 40, mount_setattr 442 442, move_mount 429 429, move_pages 279 239, mq_open 240 180,
mq_unlink 241 181, msgctl 71 187, msgget 68 186, msgrcv 70 188, msgsnd 69 189, name_to_handle_at 303 264,
open 2 -, open_by_handle_at 304 265, open_tree 428 428, openat 257 56, openat2 437 437,
perf_event_open 298 241, pidfd_getfd 438 438, pidfd_open 434 434, pidfd_send_signal 424 424,
pivot_root 155 41, prctl 157 167, prlimit64 302 261, process_madvise 440 440, process_mrelease 448 448,
process_vm_readv 310 270, process_vm_writev 311 271, ptrace 101 117, quotactl 179 60, quotactl_fd 443 443,
reboot 169 142, removexattr 197 14, rename 82 -, renameat 264 38, renameat2 316 276, request_key 249 218,
rmdir 84 -, rt_sigqueueinfo 129 138, rt_tgsigqueueinfo 297 240, sched_setaffinity 203 122,
sched_setattr 314 274, sched_setparam 142 118, sched_setscheduler 144 119, semctl 66 191, semget 64 190,
semop 65 193, semtimedop 220 192, sendmmsg 307 269, sendmsg 46 211, sendto 44 206, setdomainname 171 162,
sethostname 170 161, setns 308 268, setpriority 141 140, settimeofday 164 170, setxattr 188 5, shmat 30 196,
shmctl 31 195, shmget 29 194, socket 41 198, socketpair 53 199, swapoff 168 225, swapon 167 224,
symlink 88 -, symlinkat 266 36, syslog 103 116, tgkill 234 131, tkill 200 130, truncate 76 45, umount2 166 39,
unlink 87 -, unlinkat 263 35, unshare 272 97, userfaultfd 323 282, utime 132 -, utimensat 280 88,
utimes 235 -, vfork 58 -, vhangup 153 58, vmsplice 278 75
"""
"""name, x86-64, AArch64; "-" where it does not exist. A test compares them with the kernel's headers."""

NETWORK = """
socket socketpair connect bind listen accept accept4 sendto sendmsg sendmmsg io_uring_setup io_uring_enter
io_uring_register
"""
OTHER_PROCESSES = """
ptrace process_vm_readv process_vm_writev process_madvise process_mrelease kcmp pidfd_open pidfd_getfd
pidfd_send_signal setpriority ioprio_set sched_setscheduler sched_setparam sched_setattr migrate_pages
move_pages shmget shmat shmctl msgget msgsnd msgrcv msgctl semget semop semtimedop semctl mq_open mq_unlink
keyctl add_key request_key
"""
MACHINE = """
mount umount2 pivot_root chroot open_tree move_mount fsopen fsconfig fsmount fspick mount_setattr unshare
setns bpf perf_event_open userfaultfd kexec_load kexec_file_load init_module finit_module delete_module
swapon swapoff reboot sethostname setdomainname settimeofday clock_settime adjtimex clock_adjtime acct
quotactl quotactl_fd name_to_handle_at open_by_handle_at syslog ioperm iopl modify_ldt vhangup
fanotify_init
"""
MEMORY = "memfd_create memfd_secret vmsplice"
"""Keep memory that no process maps, so that RLIMIT_AS does not count it."""
ATTRIBUTES = """
chmod fchmod fchmodat chown fchown lchown fchownat utime utimes futimesat utimensat setxattr lsetxattr
fsetxattr removexattr lremovexattr fremovexattr mknod mknodat
"""
"""Change files without opening them for writing; Landlock does not cover these."""
WRITING = """
creat mkdir mkdirat rmdir unlink unlinkat rename renameat renameat2 link linkat symlink symlinkat truncate
"""
SIGNALS = "tkill rt_sigqueueinfo rt_tgsigqueueinfo"
PROCESSES = "fork vfork"


def numbers(names: str, architecture: int) -> list[int]:
    """The numbers of those of the system calls that the architecture has. `names`: with spaces between."""
    found = (_TABLE[name][0 if architecture == X86_64 else 1] for name in names.split())
    return [number for number in found if number is not None]


def _parse(text: str) -> dict[str, tuple[int | None, int | None]]:
    rows = (row.split() for row in text.replace("\n", " ").split(","))
    return {name: tuple(None if n == "-" else int(n) for n in both) for name, *both in rows}  # type: ignore[misc]


_TABLE = _parse(_NUMBERS)
