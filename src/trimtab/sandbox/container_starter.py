"""The process that starts and ends bubblewrap containers for a `BubblewrapSandbox`.

The kernel ends a container when the thread that started it ends, which here is the main thread of a process that does
nothing else. A bubblewrap that loses its parent in the middle of its start would wait forever: it is still in the
process group of this process, which ends as a whole.
"""

from __future__ import annotations

import os
import queue
import select
import socket
import subprocess
import tempfile
import threading

from trimtab.processes import Message, Parent
from trimtab.sandbox.container import Request, Setup, Started
from trimtab.sandbox.container_init import HEADER

START_TIMEOUT = 60.0  # seconds in which a container must be ready, its packages imported
END_TIMEOUT = 5.0  # seconds in which its process 1 ends by itself


def main() -> None:
    messages: queue.SimpleQueue[Message] = queue.SimpleQueue()
    parent = Parent(messages.put)
    with open("/proc/self/oom_score_adj", "w") as score:
        score.write("1000")  # inherited: if the machine runs out of memory, the containers end, not the trainer
    setup: Setup = messages.get().content
    containers: dict[int, tuple[subprocess.Popen[bytes], int]] = {}  # with the pipe whose end ends the container
    while True:
        request: Request = messages.get().content
        if not request.start:
            if (container := containers.pop(request.number, None)) is not None:
                threading.Thread(target=end, args=container, daemon=True).start()
            continue
        try:
            process, pipe, connection, output = start(setup)
        except OSError as error:  # the machine has no process or file left to give
            parent.send(Started(request.number, str(error)))
            continue
        containers[request.number] = process, pipe
        arguments = (parent, request.number, process.pid, connection, output)
        threading.Thread(target=hand_over, args=arguments, daemon=True).start()


def start(setup: Setup) -> tuple[subprocess.Popen[bytes], int, socket.socket, int]:
    """Returns the process, the pipe whose end ends it, its connection, and the file where it says why it failed."""
    program, *arguments = setup.command
    connection, inside = socket.socketpair()
    ended, pipe = os.pipe()
    socket.send_fds(connection, [b"\0"], [ended])
    os.close(ended)
    reading, writing = os.pipe()
    os.write(writing, setup.seccomp)
    os.close(writing)
    with inside, tempfile.TemporaryFile() as file:
        try:
            process = subprocess.Popen(
                [program, "--seccomp", str(reading), *arguments],
                stdin=inside.fileno(),
                stdout=file,
                stderr=file,
                pass_fds=[reading],
                env={},
            )
        finally:
            os.close(reading)
        return process, pipe, connection, os.dup(file.fileno())


def end(process: subprocess.Popen[bytes], pipe: int) -> None:
    """Ends a container. Bubblewrap waits for its child, which would otherwise be left to process 1 of the machine."""
    os.close(pipe)
    try:
        process.wait(END_TIMEOUT)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def hand_over(parent: Parent, number: int, pid: int, connection: socket.socket, output: int) -> None:
    """Waits until the container is ready and passes its connection on."""
    ended = os.pidfd_open(pid)
    with connection:
        ready, _, _ = select.select([connection, ended], [], [], START_TIMEOUT)
        try:
            started = connection in ready and connection.recv(HEADER.size, socket.MSG_WAITALL)
        except ConnectionResetError:  # it ended before it read what was sent to it
            started = False
        if started:
            parent.send(Started(number), connection.fileno())
        else:
            lines = os.pread(output, 4096, 0).decode(errors="replace").strip().splitlines()
            parent.send(Started(number, lines[-1].strip()[:200] if lines else "it was killed, or took too long"))
    os.close(ended)
    os.close(output)


if __name__ == "__main__":
    main()
