"""Seccomp filters: the system calls that code in a bubblewrap container cannot make.

Namespaces separate the code from the machine. The filter also blocks parts of the kernel that no program here needs:
memory outside of the limits (memfd, System V and anonymous shared memory, sockets, events of files), debugging, keys,
new namespaces, modules, the kernel log, state that all containers share, and all calls newer than this list. A second
filter, for the code alone, allows threads but no processes, because bubblewrap cannot limit the number of processes.

Shared state includes the timestamps of the three devices (they are writable files of the machine), and which pages of
mounted files are in memory. A filter cannot see which file a call is about, so all calls that set timestamps fail. They
return an error: if they pretended success, code that sets and then reads timestamps would print a wrong answer.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

# Numbers of the system calls on x86_64 and on aarch64.
NONE = 0xFFFFFFFF  # the architecture does not have the call
DENIED: dict[str, tuple[int, int]] = {
    "acct": (163, 89),
    "add_key": (248, 217),
    "bpf": (321, 280),
    "delete_module": (176, 106),
    "fadvise64": (221, 223),
    "fanotify_init": (300, 262),
    "finit_module": (313, 273),
    "fsconfig": (431, 431),
    "fsetxattr": (190, 7),
    "fsmount": (432, 432),
    "fsopen": (430, 430),
    "fspick": (433, 433),
    "futimesat": (261, NONE),
    "init_module": (175, 105),
    "inotify_init": (253, NONE),
    "inotify_init1": (294, 26),
    "io_setup": (206, 0),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "io_uring_setup": (425, 425),
    "ioprio_set": (251, 30),
    "kcmp": (312, 272),
    "kexec_load": (246, 104),
    "keyctl": (250, 219),
    "lsetxattr": (189, 6),
    "memfd_create": (319, 279),
    "mincore": (27, 232),
    "mount": (165, 40),
    "move_mount": (429, 429),
    "move_pages": (279, 239),
    "mq_open": (240, 180),
    "msgget": (68, 186),
    "open_by_handle_at": (304, 265),
    "open_tree": (428, 428),
    "perf_event_open": (298, 241),
    "personality": (135, 92),
    "pivot_root": (155, 41),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "ptrace": (101, 117),
    "quotactl": (179, 60),
    "readahead": (187, 213),
    "reboot": (169, 142),
    "request_key": (249, 218),
    "sched_setaffinity": (203, 122),
    "sched_setattr": (314, 274),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
    "semget": (64, 190),
    "sendmmsg": (307, 269),
    "sendmsg": (46, 211),
    "setns": (308, 268),
    "setpriority": (141, 140),
    "setsockopt": (54, 208),
    "setxattr": (188, 5),
    "shmget": (29, 194),
    "socket": (41, 198),
    "swapon": (167, 224),
    "sync": (162, 81),
    "syncfs": (306, 267),
    "syslog": (103, 116),
    "timer_create": (222, 107),
    "umount2": (166, 39),
    "unshare": (272, 97),
    "userfaultfd": (323, 282),
    "utime": (132, NONE),
    "utimensat": (280, 88),
    "utimes": (235, NONE),
    "vmsplice": (278, 75),
}
NEWER = 435
"""The first call of Linux 5.3. Calls of later versions, and of x86_64's second interface, have higher numbers.

Programs can handle kernels without these calls: the C library then starts threads with `clone`, whose flags a filter
can check (unlike those of `clone3`).
"""
ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column above, AUDIT_ARCH of linux/audit.h
PROCESSES = [(57, NONE), (58, NONE)]  # fork, vfork

# linux/bpf_common.h and linux/seccomp.h
LOAD, JUMP_EQUAL, JUMP_AT_LEAST, AND, RETURN = 0x20, 0x15, 0x35, 0x54, 0x06
KILL, ALLOW, EPERM, ENOSYS, EOPNOTSUPP = 0x80000000, 0x7FFF0000, 0x00050001, 0x00050026, 0x0005005F
NUMBER, ARCHITECTURE, FIRST_ARGUMENT, ARGUMENT_SIZE = 0, 4, 16, 8  # offsets in seccomp_data


class Condition(NamedTuple):
    """Allows a call only if `argument & bits == value`; with `unless`, only if that is false."""

    numbers: tuple[int, int]  # of the call, by architecture
    argument: int  # index of the argument
    bits: int
    value: int
    unless: bool = False
    refusal: int = EPERM


ALL = 0xFFFFFFFF
CLONE_FILES, CLONE_THREAD = 0x400, 0x10000
MAP_SHARED, MAP_ANONYMOUS = 0x1, 0x20
CONDITIONS = [
    Condition((53, 199), 0, ALL, 1),  # socketpair only of AF_UNIX; for other families the kernel loads modules
    Condition((302, 261), 0, ALL, 0),  # prlimit only of the calling process (pid 0)
    # fcntl without F_SETLEASE and F_NOTIFY, with which a container could block or watch the use of files by the machine
    Condition((72, 25), 1, ALL - 2, 1024, unless=True),
    # mmap without anonymous shared memory: it stays allocated while one page is mapped, and only that page is counted
    Condition((9, 222), 3, MAP_SHARED | MAP_ANONYMOUS, MAP_SHARED | MAP_ANONYMOUS, unless=True),
    # madvise without MADV_COLD and MADV_PAGEOUT, which evict pages of mounted files from the memory of the machine
    Condition((28, 233), 2, ALL - 1, 20, unless=True),
    # preadv2 without flags: RWF_NOWAIT reveals which pages are in memory. Programs can handle files without flags.
    Condition((327, 286), 5, ALL, 0, refusal=EOPNOTSUPP),
]
# clone only for threads that share the table of open files: each separate table would have its own limit of open files
THREADS = Condition((56, 220), 0, CLONE_THREAD | CLONE_FILES, CLONE_THREAD | CLONE_FILES)  # clone


def container_filter(machine: str) -> bytes:
    """Returns the filter for all processes in a container."""
    column, architecture = ARCHITECTURES[machine]
    return _assemble(
        (LOAD, 0, 0, ARCHITECTURE),
        (JUMP_EQUAL, 1, 0, architecture),  # programs of another architecture use other numbers for the calls
        (RETURN, 0, 0, KILL),
        (LOAD, 0, 0, NUMBER),
        (JUMP_AT_LEAST, 0, 1, NEWER),
        (RETURN, 0, 0, ENOSYS),
        *_rules(column, list(DENIED.values()), CONDITIONS),
    )


def code_filter(machine: str) -> bytes:
    """Returns the filter for the code, which may start threads but not processes."""
    column, _ = ARCHITECTURES[machine]
    return _assemble((LOAD, 0, 0, NUMBER), *_rules(column, PROCESSES, [THREADS]))


def _rules(
    column: int, denied: Sequence[tuple[int, int]], conditions: Sequence[Condition]
) -> Iterator[tuple[int, int, int, int]]:
    """Yields the filter steps that decide on a call, after the number of the call was loaded."""
    for numbers in denied:
        yield from ((JUMP_EQUAL, 0, 1, numbers[column]), (RETURN, 0, 0, EPERM))
    for condition in conditions:
        yes, no = (condition.refusal, ALLOW) if condition.unless else (ALLOW, condition.refusal)
        yield from (
            (JUMP_EQUAL, 0, 5, condition.numbers[column]),
            (LOAD, 0, 0, FIRST_ARGUMENT + ARGUMENT_SIZE * condition.argument),
            (AND, 0, 0, condition.bits),
            (JUMP_EQUAL, 0, 1, condition.value),
            (RETURN, 0, 0, yes),
            (RETURN, 0, 0, no),
        )
    yield (RETURN, 0, 0, ALLOW)


def _assemble(*steps: tuple[int, int, int, int]) -> bytes:
    return b"".join(struct.pack("HBBI", *step) for step in steps)
