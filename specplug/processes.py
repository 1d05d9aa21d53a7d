"""The live processes of a group or session and the memory they hold, from /proc; none without it."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def members(leader: int, *, whole_session: bool = False) -> list[int]:
    """Ids of the processes of its group, or of its session; a zombie holds nothing and is none of them."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError):  # ended meanwhile
            state, _, group, session = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
            if int(session if whole_session else group) == leader and state not in "ZX":
                found.append(int(folder.name))
    return found


def resident_bytes(session: int) -> int:
    """Resident memory of a session's processes."""
    pages = 0
    for pid in members(session, whole_session=True):
        with contextlib.suppress(OSError, IndexError, ValueError):
            pages += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
