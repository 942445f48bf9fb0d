"""Process 1 of a bubblewrap container: forks a child that runs the code, watches it and reports. Needs no package.

    host --(length, code)--> process 1 --(fork)--> child
    host <--(header, output, error)-- process 1 <--(output)-- child
                                               <--(report)--- child

Process 1 of a process space cannot be signaled from inside, and as it is not dumpable, its memory and its open files
cannot be reached either. So the code can lie about its own output and its own exception, which it may choose anyway,
but not about limits, and it can send nothing to the host. A report says that a run has ended, and with which exception.

Usage: python container_init.py TIMEOUT MEMORY_MB MAX_OUTPUT STATEFUL MODULE...
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

LENGTH = struct.Struct("!I")
HEADER = struct.Struct("!BBII")  # timed out, unusable from now on, bytes of output, bytes of error
TICK = 0.02  # seconds between two looks at processes and memory
MAX_PROCESSES, MAX_THREADS = 32, 128
MAX_FILES = 4096  # in the temporary directory
MAX_OPEN_FILES = 256
MAX_REPORT = 1 << 16  # bytes
BYTES_PER_CHARACTER = 4  # at most, in UTF-8
DUMPABLE = 4  # PR_SET_DUMPABLE of prctl(2)
HOME = "/tmp"
PAGE = resource.getpagesize()


def main(timeout: float, memory_mb: int, max_output: int, stateful: bool, modules: list[str]) -> None:
    host = socket.socket(fileno=os.dup(0))
    null = os.open("/dev/null", os.O_RDWR)
    os.dup2(null, 0)
    os.close(null)
    with open("/proc/self/oom_score_adj", "w") as score:
        score.write("1000")  # if the machine runs out of memory, this container goes, not the trainer
    ctypes.CDLL(None).prctl(DUMPABLE, 0, 0, 0, 0)
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGPIPE", "SIGCHLD"):
        signal.signal(getattr(signal, name), signal.SIG_DFL)
    for name in modules:
        importlib.import_module(name)
    gc.freeze()
    supervisor = Supervisor(timeout, memory_mb, max_output, stateful)
    host.sendall(HEADER.pack(0, 0, 0, 0))  # ready
    while (header := receive(host, LENGTH.size)) is not None:
        code = receive(host, LENGTH.unpack(header)[0])
        if code is None:
            return
        timed_out, unusable, output, error = supervisor.run(code)
        host.sendall(HEADER.pack(timed_out, unusable, len(output), len(error)) + output + error)


def receive(connection: socket.socket, size: int) -> bytes | None:
    data = b""
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            return None
        data += part
    return data


class Supervisor:
    """Runs code in a child, and ends it with everything it started when it exceeds a limit."""

    def __init__(self, timeout: float, memory_mb: int, max_output: int, stateful: bool) -> None:
        self.timeout = timeout
        self.memory_mb = memory_mb
        self.max_output = max_output
        self.stateful = stateful
        self.child: Child | None = None
        self.resident = resident_pages()  # what every forked process begins with

    def run(self, code: bytes) -> tuple[bool, bool, bytes, bytes]:
        """Returns whether it timed out, whether this container must not be used again, the output and the error."""
        if self.child is None:
            self.child = Child(self.memory_mb)
        else:
            self.child.discard()
            signal_all(signal.SIGCONT)
        run = Run(self, self.child, code)
        ended = run.watch()
        output = run.drained()
        if self.stateful and not ended:
            signal_all(signal.SIGSTOP)  # threads and processes left behind do not go on between two runs
            return False, False, output, run.error()
        self.end_all()
        return run.timed_out, self.stateful or not is_clean(HOME), output, (ended or run.error())

    def end_all(self) -> None:
        signal_all(signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while True:
                os.waitpid(-1, 0)
        assert self.child is not None
        self.child.close()
        self.child = None

    def excess(self) -> bytes:
        """Returns which limit the container exceeds; empty if none."""
        processes = threads = pages = 0
        for name in os.listdir("/proc"):
            if name.isdigit() and name != "1":
                with contextlib.suppress(OSError):  # it has ended
                    with open(f"/proc/{name}/stat", "rb") as file:
                        fields = file.read().rpartition(b")")[2].split()
                    processes += 1
                    threads += int(fields[17])
                    pages += max(0, int(fields[21]) - self.resident)
        if processes > MAX_PROCESSES or threads > MAX_THREADS:
            return b"started more than %d processes or %d threads" % (MAX_PROCESSES, MAX_THREADS)
        disk = os.statvfs(HOME)
        if disk.f_files - disk.f_ffree > MAX_FILES:
            return b"made more than %d files" % MAX_FILES
        used = pages * PAGE + (disk.f_blocks - disk.f_bfree) * disk.f_frsize
        return b"used more than %d MB of memory" % self.memory_mb if used > self.memory_mb << 20 else b""


class Run:
    """One run: passes the code to the child and collects what comes back, until it ends or exceeds a limit."""

    def __init__(self, supervisor: Supervisor, child: "Child", code: bytes) -> None:
        self.supervisor = supervisor
        self.child = child
        self.sending = memoryview(LENGTH.pack(len(code)) + code)
        self.output = bytearray()
        self.report = bytearray()
        self.timed_out = False

    def watch(self) -> bytes:
        """Waits for the end of the run. Returns why it was ended; empty if the code ran to its end or raised."""
        now = time.monotonic()
        deadline, check = now + self.supervisor.timeout, now + TICK
        child, poll = self.child, select.poll()
        steps = {child.requests: self.send, child.output: self.read_output, child.reports: self.read_report}
        for descriptor in (*steps, child.descriptor):
            poll.register(descriptor, select.POLLOUT if descriptor == child.requests else select.POLLIN)
        while True:
            for descriptor, _ in poll.poll(TICK * 1000):
                if descriptor == child.descriptor:
                    return self.exit_reason()
                if not steps[descriptor]():
                    poll.unregister(descriptor)
            if self.finished():
                return b""
            if len(self.output) > self.supervisor.max_output * BYTES_PER_CHARACTER:
                return b"printed more than %d characters" % self.supervisor.max_output
            now = time.monotonic()
            if now > deadline:
                self.timed_out = True
                return b"took longer than %g s" % self.supervisor.timeout
            if now > check:
                check = now + TICK
                reap_orphans(child.pid)
                if excess := self.supervisor.excess():
                    return excess

    def send(self) -> bool:
        """Sends a part of the code; returns whether there is more to send."""
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
        """Returns how the child ended; empty if it had sent its report and is not needed any more."""
        while self.read_report() and not self.finished():
            if not select.select([self.child.reports], [], [], 0)[0]:
                break
        if self.finished() and not self.supervisor.stateful:
            return b""
        _, status = os.waitpid(self.child.pid, 0)
        code = os.waitstatus_to_exitcode(status)
        if code < 0:
            return b"ended its process (signal %s)" % signal.Signals(-code).name.encode()
        return b"ended its process (exit code %d)" % code

    def drained(self) -> bytes:
        """Returns the output, with all that was written before the report."""
        limit = self.supervisor.max_output * BYTES_PER_CHARACTER
        while len(self.output) <= limit and self.read_output():
            if not select.select([self.child.output], [], [], 0)[0]:
                break
        return bytes(self.output[:limit])

    def error(self) -> bytes:
        return bytes(self.report[LENGTH.size : self.report_size()])


class Child:
    """A forked process that runs the code it is sent."""

    def __init__(self, memory_mb: int) -> None:
        receive_requests, self.requests = os.pipe()
        self.output, write_output = os.pipe()
        self.reports, write_reports = os.pipe()
        for descriptor in (self.requests, self.output, self.reports):
            os.set_blocking(descriptor, False)
        self.pid = os.fork()
        if self.pid == 0:
            try:
                serve(receive_requests, write_output, write_reports, memory_mb)
            finally:
                os._exit(1)
        for descriptor in (receive_requests, write_output, write_reports):
            os.close(descriptor)
        self.descriptor = os.pidfd_open(self.pid)

    def discard(self) -> None:
        """Drops what threads of a stopped child wrote after the end of a run."""
        for descriptor in (self.output, self.reports):
            while read(descriptor):
                pass

    def close(self) -> None:
        for descriptor in (self.requests, self.output, self.reports, self.descriptor):
            os.close(descriptor)


def read(descriptor: int) -> bytes | None:
    """Returns what can be read now: None if nothing, empty at the end."""
    try:
        return os.read(descriptor, 1 << 16)
    except BlockingIOError:
        return None


def signal_all(number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1, number)  # every process but this one, at once: none can fork in between


def reap_orphans(child: int) -> None:
    """Removes ended processes whose parent has ended, except the child itself."""
    while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) and ended.si_pid != child:
        os.waitpid(ended.si_pid, 0)


def is_clean(folder: str) -> bool:
    notes = [name for name in os.listxattr(folder) if name.startswith("user.")]
    return not notes and os.stat(folder).st_mode & 0o7777 == 0o755 and not os.listdir(folder)


def resident_pages() -> int:
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1])


def serve(requests: int, output: int, reports: int, memory_mb: int) -> None:
    """Runs in the child: the code of each request in the same variables, until process 1 ends it."""
    os.dup2(output, 1)
    os.dup2(output, 2)
    # Numbers the code is unlikely to close by accident; it could, and loses its own run.
    requests, reports = os.dup2(requests, 1001), os.dup2(reports, 1000)
    limit_resources(memory_mb)
    os.closerange(3, 1000)
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
            with contextlib.suppress(Exception):  # the code may have closed or replaced it
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


def limit_resources(memory_mb: int) -> None:
    with open("/proc/self/statm", "rb") as file:
        inherited = int(file.read().split()[0]) * PAGE
    for limit, value in (
        (resource.RLIMIT_AS, inherited + (memory_mb << 20)),
        (resource.RLIMIT_FSIZE, memory_mb << 20),
        (resource.RLIMIT_NPROC, MAX_THREADS),  # not for root, hence `Supervisor.excess`
        (resource.RLIMIT_NOFILE, MAX_OPEN_FILES),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
    ):
        resource.setrlimit(limit, (value, value))


def execute(code: str, variables: dict[str, object]) -> str:
    """Runs the code, prints the value of a last expression, returns the traceback of an exception or nothing."""
    linecache.cache["<python>"] = (len(code), None, code.splitlines(keepends=True), "<python>")
    try:
        tree = ast.parse(code, "<python>")
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, "<python>", "exec"), variables)  # noqa: S102
        if isinstance(last, ast.Expr):
            value = compile(ast.Expression(last.value), "<python>", "eval")
            sys.displayhook(eval(value, variables))  # noqa: S307
    except BaseException as error:
        # Frames of this file and of the parser are no part of the traceback.
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename != "<python>":
            trace = trace.tb_next
        try:
            return "".join(traceback.format_exception(type(error), error, trace)).rstrip()
        except BaseException:
            return f"{type(error).__name__}: its message cannot be shown"
    return ""


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "stateful", sys.argv[5:])
