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


def main() -> None:
    messages: queue.SimpleQueue[Message] = queue.SimpleQueue()
    parent = Parent(messages.put)
    setup: Setup = messages.get().content
    containers: dict[int, subprocess.Popen[bytes]] = {}
    while True:
        request: Request = messages.get().content
        if not request.start:
            if (container := containers.pop(request.number, None)) is not None:
                container.kill()
                container.wait()
            continue
        try:
            containers[request.number], connection, output = start(setup)
        except OSError as error:  # the machine has no process or file left to give
            parent.send(Started(request.number, str(error)))
            continue
        pid = containers[request.number].pid
        threading.Thread(target=hand_over, args=(parent, request.number, pid, connection, output), daemon=True).start()


def start(setup: Setup) -> tuple[subprocess.Popen[bytes], socket.socket, int]:
    """Returns the process, its connection, and the file where bubblewrap and process 1 say why they fail."""
    program, *arguments = setup.command
    connection, inside = socket.socketpair()
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
        return process, connection, os.dup(file.fileno())


def hand_over(parent: Parent, number: int, pid: int, connection: socket.socket, output: int) -> None:
    """Waits until the container is ready and passes its connection on."""
    ended = os.pidfd_open(pid)
    with connection:
        ready, _, _ = select.select([connection, ended], [], [], START_TIMEOUT)
        if connection in ready and connection.recv(HEADER.size, socket.MSG_WAITALL):
            parent.send(Started(number), connection.fileno())
        else:
            lines = os.pread(output, 4096, 0).decode(errors="replace").strip().splitlines()
            parent.send(Started(number, lines[-1].strip()[:200] if lines else "it was killed, or took too long"))
    os.close(ended)
    os.close(output)


if __name__ == "__main__":
    main()
