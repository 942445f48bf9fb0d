"""Process 1 of a bubblewrap container: forks a child that runs the code, enforces its limits, and reports the result.

    host --(length, code)--> process 1 --(code)--> forked child
    host <--(header, output, error)-- process 1 <--(output, report)-- child

Process 1 sends `READY` first. Before that, its standard output and error go to the host.

The code cannot signal process 1 of its process namespace, and because process 1 is not dumpable, the code cannot access
its memory and open files either. The code can fake its output and its exception, which it could choose anyway, but not
the limits, and it cannot send data to the host. A report says that a run has ended, and with which exception.

There is one child, and process 1 ends with it: no change made by the code outlives the container. This file imports
only the standard library.

Usage: python container_init.py TIMEOUT MEMORY_MB MAX_OUTPUT FILTER MODULE...
"""

import ast
import contextlib
import ctypes
import gc
import importlib
import linecache
import os
import resource
import select
import signal
import socket
import struct
import sys
import time
import traceback
from typing import NamedTuple

LENGTH = struct.Struct("!I")
HEADER = struct.Struct("!BBII")  # timed out, container ends, bytes of output, bytes of error
READY = bytes(HEADER.size)
TICK = 0.02  # seconds between two checks of threads and memory
MAX_THREADS = 128
MAX_FILES = 4096  # in the temporary directory
MAX_OPEN_FILES = 256
MAX_REPORT = 1 << 16  # bytes
MAX_PIPE = 1 << 20  # bytes, the largest pipe of an unprivileged user: the default of fs.pipe-max-size
BYTES_PER_CHARACTER = 4  # at most, in UTF-8
DUMPABLE, SECCOMP, SECCOMP_FILTER = 4, 22, 2  # PR_SET_DUMPABLE, PR_SET_SECCOMP, SECCOMP_MODE_FILTER of prctl(2)
CAPABILITY_HEADER = struct.pack("Ii", 0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3, this process, of capset(2)
NO_CAPABILITIES = bytes(24)  # effective, permitted and inheritable capabilities, 2 x 32 bits each
FILTER_STEP = 8  # bytes
SIGNALS = {int(member): member.name for member in signal.Signals}  # without most real-time signals
HOME = "/tmp"
NOBODY = 65534  # user and group of all processes in the container
HIDDEN = "/hidden"  # a directory without permissions that contains the mount of /proc


class ContainerLimits(NamedTuple):
    """The limits of each run."""

    timeout: float  # seconds
    memory_mb: int
    max_output: int  # characters
    code_filter: bytes  # the filter of system calls for the code


def main(limits: ContainerLimits, modules: list[str]) -> None:
    host = socket.socket(fileno=os.dup(0))
    # The starter holds the other end of this socket. The container ends when that end is closed, or the starter exits.
    # A parent-death signal would not work: bubblewrap may not signal a process of another user.
    _, [starter], _, _ = socket.recv_fds(host, 1, 1)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    proc = os.open(f"{HIDDEN}/proc", os.O_PATH | os.O_DIRECTORY)
    give_up_privileges()
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGPIPE", "SIGCHLD"):
        signal.signal(getattr(signal, name), signal.SIG_DFL)
    for name in modules:
        importlib.import_module(name)
    gc.freeze()
    for standard in (1, 2):
        os.dup2(null, standard)
    os.close(null)
    child = Child(proc, starter, limits)
    host.sendall(READY)
    while not child.ended and (header := receive(host, starter, LENGTH.size)) is not None:
        if (code := receive(host, starter, *LENGTH.unpack(header))) is not None:
            timed_out, output, error = child.run(code)
            host.sendall(HEADER.pack(timed_out, child.ended, len(output), len(error)) + output + error)


def give_up_privileges() -> None:
    """Makes this process unprivileged: user nobody, no capabilities, and not accessible to other processes.

    If the trainer is root, bubblewrap starts this process as root, because only root can read all mounted files. Access
    to files such as /proc/sys depends on the user, not on capabilities, so root must not run the code.
    """
    if os.getuid() != NOBODY:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.capset(CAPABILITY_HEADER, NO_CAPABILITIES) != 0 or libc.prctl(DUMPABLE, 0, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "privileges could not be given up")


def receive(connection: socket.socket, starter: int, size: int) -> bytes | None:
    """Returns `size` bytes from the host, or None if the host or the starter closed its connection."""
    data = b""
    while len(data) < size:
        if starter in select.select([connection, starter], [], [])[0]:
            return None
        part = connection.recv(size - len(data))
        if not part:
            return None
        data += part
    return data


class Child:
    """A forked process that runs code, but cannot start processes. A run that exceeds a limit is its last run."""

    def __init__(self, proc: int, starter: int, limits: ContainerLimits) -> None:
        self.proc, self.starter, self.limits = proc, starter, limits
        self.ended = False
        fields = self.read_status("self")
        self.memory_at_start = count_memory(fields)
        address_space = (int(fields[b"VmSize"]) << 10) + (limits.memory_mb << 20)
        receive_requests, self.requests = os.pipe()
        self.output, write_output = os.pipe()
        self.reports, write_reports = os.pipe()
        for descriptor in (self.requests, self.output, self.reports):
            os.set_blocking(descriptor, False)
        self.pid = os.fork()
        if self.pid == 0:
            try:
                serve(receive_requests, write_output, write_reports, address_space, limits.code_filter)
            finally:
                os._exit(1)
        for descriptor in (receive_requests, write_output, write_reports):
            os.close(descriptor)
        self.descriptor = os.pidfd_open(self.pid)

    def run(self, code: bytes) -> tuple[bool, bytes, bytes]:
        """Returns (timed out, output, error). The child stays alive unless a limit ended the run."""
        # Discards what threads of the child wrote after the end of a run, before the child was stopped. Reads only
        # once: if a child could write continuously, a loop would not end.
        for descriptor in (self.output, self.reports):
            read(descriptor, MAX_PIPE)
        os.kill(self.pid, signal.SIGCONT)
        run = Run(self, code)
        reason = run.watch()
        output = run.drain_output()
        self.ended = bool(reason)
        if not self.ended:
            os.kill(self.pid, signal.SIGSTOP)  # threads that the code left running pause between two runs
        return run.timed_out, output, reason or run.error()

    def read_status(self, process: str) -> dict[bytes, bytes]:
        """Returns the fields of /proc/PID/status, reduced to the first word of each value."""
        with open(os.open(f"{process}/status", os.O_RDONLY, dir_fd=self.proc), "rb") as file:
            lines = [line.split(maxsplit=2) for line in file]
        return {name.rstrip(b":"): words[0] for name, *words in lines if words}

    def find_excess(self) -> bytes:
        """Returns which limit the child exceeds, or an empty text."""
        fields = self.read_status(str(self.pid))
        if b"VmRSS" not in fields:  # the main thread has ended, and the kernel reports no memory
            os.kill(self.pid, signal.SIGKILL)
            return b""
        threads = int(fields[b"Threads"])
        if threads > MAX_THREADS:
            return b"started more than %d threads" % MAX_THREADS
        disk = os.statvfs(HOME)
        if disk.f_files - disk.f_ffree > MAX_FILES:
            return b"made more than %d files" % MAX_FILES
        used = count_memory(fields) - self.memory_at_start + (disk.f_blocks - disk.f_bfree) * disk.f_frsize
        limit = self.limits.memory_mb
        return b"used more than %d MB of memory" % limit if used > limit << 20 else b""


def count_memory(fields: dict[bytes, bytes]) -> int:
    """Returns the bytes that a process uses: its pages (in memory or swapped out) and its page tables."""
    return sum(int(fields[name]) << 10 for name in (b"VmRSS", b"VmSwap", b"VmPTE"))


class Run:
    """One run: sends the code to the child and collects output and report, until it ends or exceeds a limit."""

    def __init__(self, child: Child, code: bytes) -> None:
        self.child, self.limits = child, child.limits
        self.sending = memoryview(LENGTH.pack(len(code)) + code)
        self.output, self.report = bytearray(), bytearray()
        self.timed_out = False

    def watch(self) -> bytes:
        """Waits for the end of the run. Returns why the run was ended; empty if the code ended or raised by itself."""
        now = time.monotonic()
        deadline, check = now + self.limits.timeout, now + TICK
        child, poll = self.child, select.poll()
        steps = {child.requests: self.send, child.output: self.read_output, child.reports: self.read_report}
        for descriptor in (*steps, child.descriptor, child.starter):
            poll.register(descriptor, select.POLLOUT if descriptor == child.requests else select.POLLIN)
        while True:
            for descriptor, _ in poll.poll(TICK * 1000):
                if descriptor == child.starter:
                    os._exit(0)
                if descriptor == child.descriptor:
                    return self.exit_reason()
                if not steps[descriptor]():
                    poll.unregister(descriptor)
            if self.finished():
                return b""
            if len(self.output) > self.limits.max_output * BYTES_PER_CHARACTER:
                return b"printed more than %d characters" % self.limits.max_output
            now = time.monotonic()
            if now > deadline:
                self.timed_out = True
                return b"took longer than %g s" % self.limits.timeout
            if now > check:
                check = now + TICK
                if excess := child.find_excess():
                    return excess

    def send(self) -> bool:
        """Sends a part of the code and returns whether more is left to send."""
        try:
            self.sending = self.sending[os.write(self.child.requests, self.sending) :]
        except BlockingIOError:
            return True
        except OSError:
            return False  # the child closed its end
        return len(self.sending) > 0

    def read_output(self) -> bool:
        data = read(self.child.output)
        self.output += data or b""
        return data != b""

    def read_report(self) -> bool:
        data = read(self.child.reports)
        self.report += (data or b"")[: LENGTH.size + 1 + MAX_REPORT - len(self.report)]
        return data != b""

    def finished(self) -> bool:
        return len(self.report) >= LENGTH.size and len(self.report) >= self.report_size()

    def report_size(self) -> int:
        return LENGTH.size + min(MAX_REPORT, LENGTH.unpack_from(self.report)[0])

    def exit_reason(self) -> bytes:
        """Returns how the child ended."""
        _, status = os.waitpid(self.child.pid, 0)
        code = os.waitstatus_to_exitcode(status)
        if code >= 0:
            return b"ended its process (exit code %d)" % code
        return b"ended its process (signal %s)" % SIGNALS.get(-code, f"SIGRTMIN{-code - signal.SIGRTMIN:+}").encode()

    def drain_output(self) -> bytes:
        """Returns the output, including all that was written before the report."""
        limit = self.limits.max_output * BYTES_PER_CHARACTER
        while len(self.output) <= limit and self.read_output():
            if not select.select([self.child.output], [], [], 0)[0]:
                break
        return bytes(self.output[:limit])

    def error(self) -> bytes:
        return bytes(self.report[LENGTH.size : self.report_size()])


def read(descriptor: int, size: int = 1 << 16) -> bytes | None:
    """Returns the data that can be read without waiting: None if there is none, empty at the end of the file."""
    try:
        return os.read(descriptor, size)
    except BlockingIOError:
        return None


def serve(requests: int, output: int, reports: int, address_space: int, code_filter: bytes) -> None:
    """Runs in the child: executes the code of each request with the same variables, until process 1 ends."""
    os.dup2(output, 1)
    os.dup2(output, 2)
    for limit, value in (
        (resource.RLIMIT_AS, address_space),
        (resource.RLIMIT_NOFILE, MAX_OPEN_FILES),  # each socket may hold about 200 KB, which no limit counts
        (resource.RLIMIT_CORE, 1),  # byte: with 0, the kernel would still pipe core dumps to a program of the machine
    ):
        resource.setrlimit(limit, (value, value))
    # Descriptors that the code is unlikely to close by accident. If it does, it only loses its run.
    requests, reports = os.dup2(requests, MAX_OPEN_FILES - 1, False), os.dup2(reports, MAX_OPEN_FILES - 2, False)
    os.closerange(3, reports)
    forbid_processes(code_filter)
    sys.stdout, sys.stderr = (
        open(number, "w", buffering=1, encoding="utf-8", errors="backslashreplace")  # noqa: SIM115
        for number in (1, 2)
    )
    variables = {"__name__": "__main__", "__builtins__": __builtins__}
    sys.argv = [""]
    while True:
        (size,) = LENGTH.unpack(read_exactly(requests, LENGTH.size))
        error = execute(read_exactly(requests, size).decode(), variables)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):  # the code may have closed or replaced the stream
                stream.flush()
        text = error.encode(errors="backslashreplace")
        if len(text) > MAX_REPORT:
            text = text[: MAX_REPORT // 2] + b"\n[...]\n" + text[-MAX_REPORT // 2 + 7 :]
        report = LENGTH.pack(len(text)) + text
        while report:
            report = report[os.write(reports, report) :]


def read_exactly(descriptor: int, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = os.read(descriptor, size - len(data))
        if not part:
            os._exit(0)
        data += part
    return data


class FilterProgram(ctypes.Structure):
    """The struct `sock_fprog` of linux/filter.h."""

    _fields_ = (("length", ctypes.c_ushort), ("steps", ctypes.c_char_p))


def forbid_processes(code_filter: bytes) -> None:
    program = FilterProgram(len(code_filter) // FILTER_STEP, code_filter)
    if ctypes.CDLL(None, use_errno=True).prctl(SECCOMP, SECCOMP_FILTER, ctypes.byref(program)) != 0:
        raise OSError(ctypes.get_errno(), "the filter of system calls was refused")


def execute(code: str, variables: dict[str, object]) -> str:
    """Runs the code and prints the value of its last expression. Returns the traceback of an exception, or ""."""
    linecache.cache["<python>"] = (len(code), None, code.splitlines(keepends=True), "<python>")
    try:
        tree = ast.parse(code, "<python>")
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, "<python>", "exec"), variables)  # noqa: S102
        if isinstance(last, ast.Expr):
            value = compile(ast.Expression(last.value), "<python>", "eval")
            sys.displayhook(eval(value, variables))  # noqa: S307
    except BaseException as error:
        # Leave out the frames of this file and of the parser.
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename != "<python>":
            trace = trace.tb_next
        try:
            return "".join(traceback.format_exception(type(error), error, trace)).rstrip()
        except BaseException:
            return f"{type(error).__name__}: its message cannot be shown"
    return ""


if __name__ == "__main__":
    seconds, megabytes, characters, steps, *names = sys.argv[1:]
    main(ContainerLimits(float(seconds), int(megabytes), int(characters), bytes.fromhex(steps)), names)
