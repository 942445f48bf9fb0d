"""The system calls that code in a bubblewrap container cannot make, as filters for the kernel.

Bubblewrap's own options hold what needs a privilege: mounts, new namespaces, modules. A filter denies what the kernel
allows to everyone: memory that no limit counts (memfd, System V, io_uring, bpf), and keys, which all containers of a
user share. A second one, for the code alone, allows threads and no processes: the kernel's own limit of processes does
not hold for root.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

# Numbers on x86_64 and on aarch64. `bpf`, `perf_event_open` and `userfaultfd` are open to everyone on some machines.
DENIED: dict[str, tuple[int, int]] = {
    "add_key": (248, 217),
    "bpf": (321, 280),
    "io_uring_setup": (425, 425),
    "keyctl": (250, 219),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "mq_open": (240, 180),
    "msgget": (68, 186),
    "perf_event_open": (298, 241),
    "request_key": (249, 218),
    "semget": (64, 190),
    "shmget": (29, 194),
    "userfaultfd": (323, 282),
}
NONE = 0xFFFFFFFF  # the number of no call
STARTS = [(56, 220), (435, 435), (57, NONE), (58, NONE)]  # clone, clone3, fork, vfork
ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column above, AUDIT_ARCH of linux/audit.h
X32 = 0x40000000  # system calls of x86_64's second interface have this bit

# linux/bpf_common.h and linux/seccomp.h
LOAD, JUMP_EQUAL, JUMP_AT_LEAST, JUMP_IF_SET, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
KILL, ALLOW, EPERM, ENOSYS = 0x80000000, 0x7FFF0000, 0x00050001, 0x00050026
NUMBER, ARCHITECTURE, FIRST_ARGUMENT = 0, 4, 16  # offsets in seccomp_data
CLONE_THREAD = 0x10000


def supported(machine: str) -> bool:
    """Whether the calls of this processor architecture are known here."""
    return machine in ARCHITECTURES


def container_filter(machine: str) -> bytes:
    """Returns the filter for everything in a container."""
    column, architecture = ARCHITECTURES[machine]
    numbers = sorted(row[column] for row in DENIED.values())
    steps = [
        (LOAD, 0, 0, ARCHITECTURE),
        (JUMP_EQUAL, 1, 0, architecture),  # a program of another architecture would count its calls otherwise
        (RETURN, 0, 0, KILL),
        (LOAD, 0, 0, NUMBER),
        (JUMP_AT_LEAST, len(numbers) + 1, 0, X32),
        *((JUMP_EQUAL, len(numbers) - index, 0, number) for index, number in enumerate(numbers)),
        (RETURN, 0, 0, ALLOW),
        (RETURN, 0, 0, EPERM),
    ]
    return _assemble(steps)


def code_filter(machine: str) -> bytes:
    """Returns the filter for the code: it can start threads, not processes."""
    column, _ = ARCHITECTURES[machine]
    clone, clone3, fork, vfork = (row[column] for row in STARTS)
    return _assemble(
        [
            (LOAD, 0, 0, NUMBER),
            (JUMP_EQUAL, 4, 0, clone),
            (JUMP_EQUAL, 7, 0, clone3),  # its flags are out of reach: the C library then uses `clone`
            (JUMP_EQUAL, 5, 0, fork),
            (JUMP_EQUAL, 4, 0, vfork),
            (RETURN, 0, 0, ALLOW),
            (LOAD, 0, 0, FIRST_ARGUMENT),
            (JUMP_IF_SET, 0, 1, CLONE_THREAD),
            (RETURN, 0, 0, ALLOW),
            (RETURN, 0, 0, EPERM),
            (RETURN, 0, 0, ENOSYS),
        ]
    )


def _assemble(steps: Sequence[tuple[int, int, int, int]]) -> bytes:
    return b"".join(struct.pack("HBBI", *step) for step in steps)
