"""What a server under load holds: memory and files of its processes, cache blocks and queues in /metrics.

Memory is what the processes of the server's process group hold of their own (RssAnon and RssShmem), added up,
in MiB. Pages of files, mostly libraries, are left out: the system takes them back when memory is short on the
machine and reads them again later, which looks like a curve of the server's and is not.
"""

import contextlib
import re
import threading
import time
from pathlib import Path
from typing import NamedTuple

from specplug import server
from specplug.processes import members

KIB_IN_MIB = 1024
ENGINE = "VLLM::EngineCore"


class Process(NamedTuple):
    """A live process of the server's group."""

    pid: int
    command: str
    own_mib: float
    files: int  # open file descriptors


class Sample(NamedTuple):
    """The server at one moment. `idle`: nothing runs or waits, and nobody is about to ask."""

    seconds: float  # since the watch began
    own_mib: float
    files: int
    running: int
    waiting: int
    cache_used: float  # part of the cache's blocks that requests hold
    idle: bool


def processes(group: int) -> list[Process]:
    found = []
    for pid in members(group):
        folder = Path(f"/proc/{pid}")
        with contextlib.suppress(OSError):  # a process may end while it is looked at
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            kib = re.findall(
                r"^Rss(?:Anon|Shmem):\s+(\d+) kB$", (folder / "status").read_text(), re.MULTILINE
            )
            own = sum(map(int, kib)) / KIB_IN_MIB
            found.append(Process(pid, command, own, len(list((folder / "fd").iterdir()))))
    return found


def metrics(one: server.Server) -> dict[str, float]:
    """Sums over all labels of every number that the server tells, by name."""
    told: dict[str, float] = {}
    for line in one.get("/metrics", timeout_seconds=120).splitlines():
        found = re.match(r"([\w:]+)(?:{.*})? (\S+)$", line)
        if found:
            told[found[1]] = told.get(found[1], 0.0) + float(found[2])
    return told


class Watch:
    """Samples a server every `every_seconds` in a thread of its own, and whenever it is asked to."""

    def __init__(self, one: server.Server, *, every_seconds: float) -> None:
        self.samples: list[Sample] = []
        self.trouble: list[str] = []
        self._server, self._every = one, every_seconds
        self._began, self._ended = time.monotonic(), threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def look(self, *, idle: bool = False) -> Sample:
        seconds = time.monotonic() - self._began
        told, group = metrics(self._server), processes(self._server.process.pid)
        sample = Sample(
            seconds,
            sum(one.own_mib for one in group),
            sum(one.files for one in group),
            int(told["vllm:num_requests_running"]),
            int(told["vllm:num_requests_waiting"]),
            told["vllm:kv_cache_usage_perc"],
            idle,
        )
        self.samples.append(sample)
        return sample

    def wait_idle(self, *, limit_seconds: float) -> Sample:
        """Wait until no request is left, then look. The last look counts where requests do not end."""
        deadline = time.monotonic() + limit_seconds
        while time.monotonic() < deadline:
            told = metrics(self._server)
            if not told["vllm:num_requests_running"] and not told["vllm:num_requests_waiting"]:
                break
            time.sleep(0.1)
        else:
            self.trouble.append(f"requests are still there {limit_seconds:.0f} s after the last client left")
        return self.look(idle=True)

    def stop(self) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(self._every):
            try:
                self.look()
            except (OSError, KeyError) as error:
                self.trouble.append(f"no metrics: {type(error).__name__}: {error}")
                return
