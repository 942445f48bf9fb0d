"""The process that starts and ends bubblewrap containers for a `BubblewrapSandbox`.

The kernel ends a container when the thread that started it ends. Here that is the main thread of a separate process,
which does nothing else. If a `bwrap` process loses its parent during startup, it waits forever; it is then still in the
process group of this process, which is killed as a whole.
"""

from __future__ import annotations

import os
import queue
import signal
import socket
import subprocess
import tempfile
import threading

from trimtab.trainer.processes import Message, Parent
from trimtab.trainer.sandbox.bubblewrap import ContainerRequest, Setup

END_TIMEOUT = 5.0  # seconds in which process 1 of a container must exit before it is killed


def main() -> None:
    messages: queue.SimpleQueue[Message] = queue.SimpleQueue()
    parent = Parent(messages.put)
    with open("/proc/self/oom_score_adj", "w") as score:
        score.write("1000")  # inherited: if memory runs out, the kernel kills the containers, not the trainer
    setup: Setup = messages.get().content
    containers: dict[int, tuple[subprocess.Popen[bytes], socket.socket]] = {}  # closing the socket ends the container
    while True:
        request: ContainerRequest = messages.get().content
        if not request.start:
            if (container := containers.pop(request.number, None)) is not None:
                threading.Thread(target=end, args=container, daemon=True).start()
            continue
        try:
            process, running, connection = start(setup)
        except OSError as error:  # a limit of processes or open files was reached
            parent.send(str(error))
            continue
        containers[request.number] = process, running
        with connection:
            parent.send(None, connection.fileno())


def start(setup: Setup) -> tuple[subprocess.Popen[bytes], socket.socket, socket.socket]:
    """Returns (process, socket, connection): closing the socket ends the container.

    Until process 1 is ready, what it and `bwrap` print is sent over the connection.
    """
    program, *arguments = setup.command
    connection, inside = socket.socketpair()
    ended, running = socket.socketpair()
    try:
        with inside, ended, tempfile.TemporaryFile(buffering=0) as seccomp:
            socket.send_fds(connection, [b"\0"], [ended.fileno()])
            seccomp.write(setup.seccomp)
            seccomp.seek(0)
            process = subprocess.Popen(
                [program, "--seccomp", str(seccomp.fileno()), *arguments],
                stdin=inside.fileno(),
                stdout=inside.fileno(),
                stderr=inside.fileno(),
                pass_fds=[seccomp.fileno()],
                env={},
            )
    except OSError:
        connection.close()
        running.close()
        raise
    return process, running, connection


def end(process: subprocess.Popen[bytes], running: socket.socket) -> None:
    """Ends a container. The child ends first: `bwrap` waits for it, so process 1 of the machine need not reap it."""
    running.close()
    try:
        process.wait(END_TIMEOUT)
    except subprocess.TimeoutExpired:  # process 1 was stopped by hand: killing `bwrap` alone would not end it
        with open(f"/proc/{process.pid}/task/{process.pid}/children") as children:
            for child in children.read().split():
                os.kill(int(child), signal.SIGKILL)
        process.kill()
        process.wait()


if __name__ == "__main__":
    main()
