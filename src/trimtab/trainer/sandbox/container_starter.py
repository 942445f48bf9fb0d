"""The process that starts and ends bubblewrap containers for a `BubblewrapSandbox`.

The kernel ends a container when the thread that started it ends, which here is the main thread of a process that does
nothing else. A bubblewrap that loses its parent in the middle of its start would wait forever: it is still in the
process group of this process, which ends as a whole.
"""

from __future__ import annotations

import contextlib
import os
import queue
import select
import signal
import socket
import subprocess
import tempfile
import threading
from typing import IO

from trimtab.trainer.processes import Message, Parent
from trimtab.trainer.sandbox.bubblewrap import ContainerRequest, Setup, Started
from trimtab.trainer.sandbox.container_init import HEADER

START_TIMEOUT = 60.0  # seconds in which a container must be ready, its packages imported
END_TIMEOUT = 5.0  # seconds in which its process 1 ends by itself


def main() -> None:
    messages: queue.SimpleQueue[Message] = queue.SimpleQueue()
    parent = Parent(messages.put)
    with open("/proc/self/oom_score_adj", "w") as score:
        score.write("1000")  # inherited: if the machine runs out of memory, the containers end, not the trainer
    setup: Setup = messages.get().content
    containers: dict[int, tuple[subprocess.Popen[bytes], socket.socket]] = {}  # the socket keeps the container running
    while True:
        request: ContainerRequest = messages.get().content
        if not request.start:
            if (container := containers.pop(request.number, None)) is not None:
                threading.Thread(target=end, args=container, daemon=True).start()
            continue
        try:
            process, running, connection, output = start(setup)
        except OSError as error:  # the machine has no process or file left to give
            parent.send(Started(request.number, str(error)))
            continue
        containers[request.number] = process, running
        arguments = (parent, request.number, process.pid, connection, output)
        threading.Thread(target=hand_over, args=arguments, daemon=True).start()


def start(setup: Setup) -> tuple[subprocess.Popen[bytes], socket.socket, socket.socket, IO[bytes]]:
    """Returns the process, a socket at whose end it ends, its connection, and the file where it says why it failed."""
    program, *arguments = setup.command
    with contextlib.ExitStack() as closing, contextlib.ExitStack() as failed:
        connection, inside = socket.socketpair()
        closing.enter_context(inside)
        failed.enter_context(connection)
        ended, running = socket.socketpair()
        closing.enter_context(ended)
        failed.enter_context(running)
        socket.send_fds(connection, [b"\0"], [ended.fileno()])
        seccomp = closing.enter_context(tempfile.TemporaryFile(buffering=0))
        seccomp.write(setup.seccomp)
        seccomp.seek(0)
        output = failed.enter_context(tempfile.TemporaryFile())
        process = subprocess.Popen(
            [program, "--seccomp", str(seccomp.fileno()), *arguments],
            stdin=inside.fileno(),
            stdout=output,
            stderr=output,
            pass_fds=[seccomp.fileno()],
            env={},
        )
        failed.pop_all()
    return process, running, connection, output


def end(process: subprocess.Popen[bytes], running: socket.socket) -> None:
    """Ends a container. Bubblewrap waits for its child, which would otherwise be left to process 1 of the machine."""
    running.close()
    try:
        process.wait(END_TIMEOUT)
    except subprocess.TimeoutExpired:  # process 1 of the container, stopped by hand: bubblewrap's end would not end it
        with open(f"/proc/{process.pid}/task/{process.pid}/children") as children:
            for child in children.read().split():
                os.kill(int(child), signal.SIGKILL)
        process.kill()
        process.wait()


def hand_over(parent: Parent, number: int, pid: int, connection: socket.socket, output: IO[bytes]) -> None:
    """Waits until the container is ready and passes its connection on."""
    ended = os.pidfd_open(pid)
    poll = select.poll()  # `select.select` takes no number above 1023
    for descriptor in (connection.fileno(), ended):
        poll.register(descriptor, select.POLLIN)
    with connection, output:
        ready = dict(poll.poll(START_TIMEOUT * 1000))
        try:
            started = connection.fileno() in ready and connection.recv(HEADER.size, socket.MSG_WAITALL)
        except ConnectionResetError:  # it ended before it read what was sent to it
            started = False
        if started:
            parent.send(Started(number), connection.fileno())
        else:
            lines = os.pread(output.fileno(), 4096, 0).decode(errors="replace").strip().splitlines()
            parent.send(Started(number, lines[-1].strip()[:200] if lines else "it was killed, or took too long"))
    os.close(ended)


if __name__ == "__main__":
    main()
