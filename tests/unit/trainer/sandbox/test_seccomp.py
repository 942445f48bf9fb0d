"""The filters of system calls, run step by step as the kernel does."""

from __future__ import annotations

import struct

import pytest

from trimtab.trainer.sandbox import seccomp
from trimtab.trainer.sandbox.seccomp import (
    ALLOW,
    ARCHITECTURES,
    CONDITIONS,
    DENIED,
    ENOSYS,
    EOPNOTSUPP,
    EPERM,
    KILL,
    THREADS,
)

CLONE_NEWUSER, SIGCHLD = 0x10000000, 17
AF_UNIX = 1
MAP_SHARED, MAP_PRIVATE, MAP_SHARED_VALIDATE, MAP_ANONYMOUS, MAP_NORESERVE = 1, 2, 3, 0x20, 0x4000
MADV_COLD, MADV_PAGEOUT, RWF_NOWAIT = 20, 21, 8


def answer(program: bytes, number: int, *arguments: int, architecture: int) -> int:
    """Returns what the kernel does with a call: classic BPF over seccomp_data."""
    steps = [struct.unpack("HBBI", program[start : start + 8]) for start in range(0, len(program), 8)]
    data = {seccomp.NUMBER: number, seccomp.ARCHITECTURE: architecture}
    data |= {16 + 8 * index: argument for index, argument in enumerate((*arguments, *[0] * 6)[:6])}
    position = value = 0
    while True:
        code, if_true, if_false, operand = steps[position]
        position += 1
        if code == seccomp.RETURN:
            return operand
        if code == seccomp.LOAD:
            value = data[operand]
            continue
        if code == seccomp.AND:
            value &= operand
            continue
        tests = {
            seccomp.JUMP_EQUAL: value == operand,
            seccomp.JUMP_AT_LEAST: value >= operand,
        }
        position += if_true if tests[code] else if_false


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_the_filter_of_the_container(machine: str) -> None:
    column, architecture = ARCHITECTURES[machine]
    program = seccomp.container_filter(machine)
    results = [answer(program, number, architecture=architecture) for number in range(500)]
    pairs = CONDITIONS[0].numbers[column]  # of no family
    denied = {row[column] for row in DENIED.values()} - {seccomp.NONE} | {pairs}
    assert {number for number, result in enumerate(results) if result == EPERM} == denied
    assert {number for number, result in enumerate(results) if result == ENOSYS} == set(range(435, 500))
    assert set(results) == {ALLOW, EPERM, ENOSYS}
    assert answer(program, 1, architecture=architecture + 1) == KILL
    assert [answer(program, 0x40000000 + number, architecture=architecture) for number in (0, 41)] == [ENOSYS] * 2


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_what_the_container_may_ask_of_six_calls(machine: str) -> None:
    column, architecture = ARCHITECTURES[machine]
    program = seccomp.container_filter(machine)
    pairs, limits, files, memory, advice, reads = (condition.numbers[column] for condition in CONDITIONS)

    def allowed(number: int, position: int, values: list[int]) -> list[int]:
        arguments = [[0] * position + [value] for value in values]
        return [
            value
            for value, row in zip(values, arguments, strict=True)
            if answer(program, number, *row, architecture=architecture) == ALLOW
        ]

    assert allowed(pairs, 0, list(range(46))) == [AF_UNIX]
    assert allowed(limits, 0, [0, 1, 2]) == [0]
    assert set(range(2000)) - set(allowed(files, 1, list(range(2000)))) == {1024, 1026}  # F_SETLEASE, F_NOTIFY
    anonymous = [MAP_ANONYMOUS | kind for kind in (MAP_PRIVATE, MAP_PRIVATE | MAP_NORESERVE)]
    of_files = [MAP_SHARED, MAP_SHARED_VALIDATE, MAP_PRIVATE]
    shared = [MAP_ANONYMOUS | kind for kind in (MAP_SHARED, MAP_SHARED_VALIDATE, MAP_SHARED | MAP_NORESERVE)]
    assert allowed(memory, 3, [*anonymous, *of_files, *shared]) == anonymous + of_files
    assert set(range(30)) - set(allowed(advice, 2, list(range(30)))) == {MADV_COLD, MADV_PAGEOUT}
    assert allowed(reads, 5, list(range(64))) == [0]
    assert answer(program, reads, *[0] * 5, RWF_NOWAIT, architecture=architecture) == EOPNOTSUPP


def test_no_call_sets_the_times_of_a_file() -> None:
    """Numbers of <asm/unistd_64.h> of x86_64 and of <asm-generic/unistd.h>, which aarch64 uses."""
    calls = {"utime": (132, None), "utimes": (235, None), "futimesat": (261, None), "utimensat": (280, 88)}
    for machine, (column, architecture) in ARCHITECTURES.items():
        program = seccomp.container_filter(machine)
        numbers = [row[column] for row in calls.values() if row[column] is not None]
        assert [answer(program, number, architecture=architecture) for number in numbers] == [EPERM] * len(numbers)


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_the_filter_of_the_code(machine: str) -> None:
    column, architecture = ARCHITECTURES[machine]
    program = seccomp.code_filter(machine)

    def result(number: int, argument: int = 0) -> int:
        return answer(program, number, argument, architecture=architecture)

    clone, fork, vfork = (row[column] for row in (THREADS.numbers, *seccomp.PROCESSES))
    assert {number for number in range(500) if result(number) != ALLOW} == {clone, fork, vfork} - {seccomp.NONE}
    assert result(clone, 0x3D0F00) == ALLOW  # as pthread_create does
    without_files = 0x3D0F00 - seccomp.CLONE_FILES
    process = 0x3D0F00 - seccomp.CLONE_THREAD
    assert {result(clone, flags) for flags in (SIGCHLD, CLONE_NEWUSER | SIGCHLD, without_files, process)} == {EPERM}
