"""The system calls that code in a bubblewrap container cannot make, as filters for the kernel.

Namespaces keep the code from the machine; a filter keeps it from parts of the kernel that no program here needs:
memory outside of the limits (memfd, System V shared memory), debugging, keys, new namespaces, modules, the log of the
kernel, and sockets of families that no namespace separates, such as those between a virtual machine and its host. A
second filter, for the code alone, allows threads and no processes: bubblewrap has no limit of processes.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

# Numbers on x86_64 and on aarch64.
DENIED: dict[str, tuple[int, int]] = {
    "acct": (163, 89),
    "add_key": (248, 217),
    "bpf": (321, 280),
    "delete_module": (176, 106),
    "fanotify_init": (300, 262),
    "finit_module": (313, 273),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fsopen": (430, 430),
    "fspick": (433, 433),
    "init_module": (175, 105),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "io_uring_setup": (425, 425),
    "kcmp": (312, 272),
    "kexec_load": (246, 104),
    "keyctl": (250, 219),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "mount": (165, 40),
    "mount_setattr": (442, 442),
    "move_mount": (429, 429),
    "mq_open": (240, 180),
    "msgget": (68, 186),
    "open_by_handle_at": (304, 265),
    "open_tree": (428, 428),
    "perf_event_open": (298, 241),
    "personality": (135, 92),
    "pidfd_getfd": (438, 438),
    "pivot_root": (155, 41),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "ptrace": (101, 117),
    "quotactl": (179, 60),
    "reboot": (169, 142),
    "request_key": (249, 218),
    "semget": (64, 190),
    "setns": (308, 268),
    "shmget": (29, 194),
    "swapon": (167, 224),
    "syslog": (103, 116),
    "umount2": (166, 39),
    "unshare": (272, 97),
    "userfaultfd": (323, 282),
}
NONE = 0xFFFFFFFF  # the number of no call
SOCKET = (41, 198)
FAMILIES = (1, 2, 10)  # AF_UNIX, AF_INET, AF_INET6: each network namespace has its own
STARTS = [(56, 220), (435, 435), (57, NONE), (58, NONE)]  # clone, clone3, fork, vfork
ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column above, AUDIT_ARCH of linux/audit.h
X32 = 0x40000000  # system calls of x86_64's second interface have this bit

# Calls that change how a process runs: process 1 of the container must go on watching.
SCHEDULING: dict[str, tuple[int, int]] = {
    "ioprio_set": (251, 30),
    "sched_setaffinity": (203, 122),
    "sched_setattr": (314, 274),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
    "setpriority": (141, 140),
}
PRLIMIT = (302, 261)  # of the calling process only, whose number here is 0

# linux/bpf_common.h and linux/seccomp.h
LOAD, JUMP_EQUAL, JUMP_AT_LEAST, JUMP_IF_SET, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
KILL, ALLOW, EPERM, ENOSYS, EAFNOSUPPORT = 0x80000000, 0x7FFF0000, 0x00050001, 0x00050026, 0x00050061
NUMBER, ARCHITECTURE, FIRST_ARGUMENT = 0, 4, 16  # offsets in seccomp_data
CLONE_THREAD = 0x10000


def supported(machine: str) -> bool:
    """Whether the calls of this processor architecture are known here."""
    return machine in ARCHITECTURES


def container_filter(machine: str) -> bytes:
    """Returns the filter for everything in a container."""
    column, architecture = ARCHITECTURES[machine]
    numbers = sorted(row[column] for row in DENIED.values())
    denied = len(numbers) + len(FAMILIES) + 4  # steps between the first comparison and the answer EPERM
    steps = [
        (LOAD, 0, 0, ARCHITECTURE),
        (JUMP_EQUAL, 1, 0, architecture),  # a program of another architecture would count its calls otherwise
        (RETURN, 0, 0, KILL),
        (LOAD, 0, 0, NUMBER),
        (JUMP_AT_LEAST, denied, 0, X32),
        *((JUMP_EQUAL, denied - index, 0, number) for index, number in enumerate(numbers, 1)),
        (JUMP_EQUAL, 0, len(FAMILIES) + 2, SOCKET[column]),
        (LOAD, 0, 0, FIRST_ARGUMENT),
        *((JUMP_EQUAL, len(FAMILIES) - index, 0, family) for index, family in enumerate(FAMILIES)),
        (RETURN, 0, 0, EAFNOSUPPORT),
        (RETURN, 0, 0, ALLOW),
        (RETURN, 0, 0, EPERM),
    ]
    return _assemble(steps)


def code_filter(machine: str) -> bytes:
    """Returns the filter for the code: it can start threads, not processes, and change no other process."""
    column, _ = ARCHITECTURES[machine]
    clone, clone3, fork, vfork = (row[column] for row in STARTS)
    denied = [fork, vfork, *(row[column] for row in SCHEDULING.values())]
    return _assemble(
        [
            (LOAD, 0, 0, NUMBER),
            *((JUMP_EQUAL, len(denied) - index + 8, 0, number) for index, number in enumerate(denied)),
            (JUMP_EQUAL, 3, 0, clone),
            (JUMP_EQUAL, 4, 0, PRLIMIT[column]),
            (JUMP_EQUAL, 7, 0, clone3),  # its flags are out of reach: the C library then uses `clone`
            (RETURN, 0, 0, ALLOW),
            (LOAD, 0, 0, FIRST_ARGUMENT),
            (JUMP_IF_SET, 2, 3, CLONE_THREAD),
            (LOAD, 0, 0, FIRST_ARGUMENT),
            (JUMP_EQUAL, 0, 1, 0),
            (RETURN, 0, 0, ALLOW),
            (RETURN, 0, 0, EPERM),
            (RETURN, 0, 0, ENOSYS),
        ]
    )


def _assemble(steps: Sequence[tuple[int, int, int, int]]) -> bytes:
    return b"".join(struct.pack("HBBI", *step) for step in steps)
