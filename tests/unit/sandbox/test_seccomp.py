"""The filters of system calls, run step by step as the kernel does."""

from __future__ import annotations

import struct

import pytest

from trimtab.sandbox import seccomp
from trimtab.sandbox.seccomp import ALLOW, ARCHITECTURES, DENIED, EAFNOSUPPORT, ENOSYS, EPERM, KILL, SCHEDULING

CLONE_NEWUSER, SIGCHLD = 0x10000000, 17


def answer(program: bytes, number: int, argument: int = 0, *, architecture: int) -> int:
    """Returns what the kernel does with a call: classic BPF over seccomp_data."""
    steps = [struct.unpack("HBBI", program[start : start + 8]) for start in range(0, len(program), 8)]
    data = {seccomp.NUMBER: number, seccomp.ARCHITECTURE: architecture, seccomp.FIRST_ARGUMENT: argument}
    position = value = 0
    while True:
        code, if_true, if_false, operand = steps[position]
        position += 1
        if code == seccomp.RETURN:
            return operand
        if code == seccomp.LOAD:
            value = data[operand]
            continue
        tests = {
            seccomp.JUMP_EQUAL: value == operand,
            seccomp.JUMP_AT_LEAST: value >= operand,
            seccomp.JUMP_IF_SET: bool(value & operand),
        }
        position += if_true if tests[code] else if_false


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_the_filter_of_the_container(machine: str) -> None:
    column, architecture = ARCHITECTURES[machine]
    program = seccomp.container_filter(machine)
    denied = {row[column] for row in DENIED.values()} | {seccomp.SOCKET[column]}  # of no family
    results = [answer(program, number, architecture=architecture) for number in range(500)]
    assert {number for number, result in enumerate(results) if result != ALLOW} == denied
    assert {results[row[column]] for row in DENIED.values()} == {EPERM}
    assert answer(program, 1, architecture=architecture + 1) == KILL
    assert answer(program, seccomp.X32 + 1, architecture=architecture) == EPERM
    families = [answer(program, seccomp.SOCKET[column], family, architecture=architecture) for family in range(46)]
    assert [family for family, result in enumerate(families) if result == ALLOW] == [1, 2, 10]
    assert set(families) == {ALLOW, EAFNOSUPPORT}


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_the_filter_of_the_code(machine: str) -> None:
    column, architecture = ARCHITECTURES[machine]
    program = seccomp.code_filter(machine)

    def result(number: int, argument: int = 0) -> int:
        return answer(program, number, argument, architecture=architecture)

    clone, clone3, fork, vfork = (row[column] for row in seccomp.STARTS)
    denied = {row[column]: EPERM for row in SCHEDULING.values()}
    denied |= {clone: EPERM, fork: EPERM, vfork: EPERM, clone3: ENOSYS}
    assert [result(number) for number in range(500)] == [denied.get(number, ALLOW) for number in range(500)]
    assert result(clone, seccomp.CLONE_THREAD | 0x3D0F00) == ALLOW  # as pthread_create does
    assert [result(clone, SIGCHLD), result(clone, CLONE_NEWUSER | SIGCHLD)] == [EPERM, EPERM]
    limits = seccomp.PRLIMIT[column]
    assert [result(limits, 0), result(limits, 1)] == [ALLOW, EPERM]
