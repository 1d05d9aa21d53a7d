"""Two runs of the same requests, compared token by token. Shared with the tests of SGLang."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol


class Answer(Protocol):
    """What a rig's Output has at least."""

    @property
    def ids(self) -> list[int]: ...

    @property
    def end(self) -> tuple[Any, Any]:
        """Why it ended, and at which stop."""


def differences(expected: Sequence[Answer], got: Sequence[Answer]) -> list[str]:
    """Where two runs differ in tokens or in how they ended; empty when they are the same."""
    found = []
    for i, (want, have) in enumerate(zip(expected, got, strict=True)):
        if want.ids != have.ids:
            pairs = enumerate(zip(want.ids, have.ids, strict=False))
            at = next((k for k, (a, b) in pairs if a != b), min(len(want.ids), len(have.ids)))
            found.append(
                f"request {i}: token {at}: expected {want.ids[at : at + 3]}, got {have.ids[at : at + 3]}"
            )
        elif want.end != have.end:
            found.append(f"request {i}: expected end {want.end}, got {have.end}")
    return found
