"""How long the calling thread was kept off the processor by others: time that a step did not take.

Linux counts, per thread, the nanoseconds it was runnable and waited for a core. On a machine that others use
too, wall clock minus that wait is what the step would have taken alone (caches aside).
"""

from pathlib import Path

_SCHEDSTAT = Path("/proc/thread-self/schedstat")  # ns on a core, ns waiting for one, timeslices


def waited_seconds() -> float:
    """Seconds that this thread has waited for a core since it began; 0 where the system does not count."""
    try:
        return int(_SCHEDSTAT.read_text().split()[1]) * 1e-9
    except (OSError, ValueError, IndexError):
        return 0.0
