"""A small Ray cluster on this machine for tests: one node, loopback only, everything gone when the block ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
from tests.support.ports import free_port

STORE = 128 << 20  # bytes; Ray's smallest is 75 MiB
# No process before it is needed, no reports home, no metrics: two cores are few.
QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",  # whether or not a cluster of this user left a token in ~/.ray
    "RAY_prestart_worker_first_driver": "0",
    "RAY_enable_metrics_collection": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # on loopback only, as it is there by default
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
os.environ |= QUIET  # Ray reads some of them when it is imported, in this process too


@dataclass(frozen=True)
class Cluster:
    address: str
    head: int

    def actors(self, kind: str) -> list[psutil.Process]:
        """Processes that are actors of class `kind`: Ray puts it into their titles."""
        result = []
        for process in psutil.Process(self.head).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                if " ".join(process.cmdline()).startswith(f"ray::{kind}"):
                    result.append(process)
        return result


@contextmanager
def local_cluster(cpus: int = 8) -> Iterator[Cluster]:
    """A cluster of one node. `cpus` is what Ray counts, whatever the machine has."""
    address = f"127.0.0.1:{free_port()}"
    # Sockets need a short path; a process that is killed last may write a last line into it.
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        log = Path(folder) / "start.log"
        command = [
            *(str(Path(sys.executable).with_name("ray")), "start", "--head", "--block", "--node-ip-address=127.0.0.1"),
            *(f"--port={address.rpartition(':')[2]}", f"--num-cpus={cpus}", "--num-gpus=0"),
            *(f"--object-store-memory={STORE}", "--include-dashboard=false", "--disable-usage-stats"),
            *(f"--temp-dir={folder}/s", "--include-log-monitor=false"),
        ]
        with log.open("wb") as out:
            head = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            wait_until_up(head, log)
            yield Cluster(address, head.pid)
        finally:
            end(head)


def wait_until_up(head: subprocess.Popen[bytes], log: Path) -> None:
    """`ray start --block` says so once the node is up, or ends."""
    while b"Ray runtime started" not in log.read_bytes():
        try:
            head.wait(0.05)
        except subprocess.TimeoutExpired:
            continue
        raise RuntimeError(f"no cluster:\n{log.read_text()}")


def end(head: subprocess.Popen[bytes]) -> None:
    """Kill the node with everything it started; workers are in no group of their own, but are its descendants."""
    with suppress(psutil.NoSuchProcess):
        family = [psutil.Process(head.pid), *psutil.Process(head.pid).children(recursive=True)]
        for process in family:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)
        psutil.wait_procs(family[1:], timeout=10)
    head.wait()
