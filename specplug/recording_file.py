"""Our own file of a recording, an .npz without pickled objects.

Parents stand as they are, path log-probabilities L as steps of 64 ln(1 - 1024 L) from node to node, survivals
as log-odds in steps of 1/16 from the sibling before (siblings mostly share theirs), the accepted path as
bits; what follows from these is not stored. Rounding moves L by less than 1 % or 1e-5, whichever is more, and
no outcome. A reader takes at most 64 MiB, 256 MiB unpacked, and the arrays it knows.
"""

from __future__ import annotations

import io
import math
import zipfile
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from specplug.recording import REQUEST_ARRAYS, About, Recording, Requests

FORMAT = 1
MAX_BYTES, MAX_UNPACKED = 1 << 26, 1 << 28
FINENESS, FOLD = (
    1024.0,
    64.0,
)  # a path's log-probability L is coded as round(FOLD ln(1 - FINENESS L)): fine near
# 0, where calibration reads ln(1 - e^L), and within 1 % of L elsewhere
ODDS = 16  # steps of a survival's log-odds to the nat; int8 holds +-7.9, survivals 0.0004 to 0.9996
NONE = 0xFFFF  # a step where there is no node


def write_file(path: Path | str, recording: Recording) -> None:
    """Write our own format."""
    r = recording
    arrays: dict[str, NDArray[Any]] = {
        "format": np.array([FORMAT], np.int32),
        "about": np.frombuffer(msgspec.json.encode(r.about), np.uint8),
        "parents": (r.parents + 1).astype(np.uint16 if r.budget > 255 else np.uint8),
        "steps": _steps(r.log_probs),
        "accepted": np.packbits(r.accepted, axis=1),
        "chain_steps": _steps(r.chain_log_probs),
        **{name: getattr(r, name) for name in ("request", "position", "counts", "chain_accepted")},
        **{f"requests_{name}": getattr(r.requests, name) for name in REQUEST_ARRAYS},
    }
    if r.survivals is not None:
        arrays["survivals"] = _odds_steps(r.survivals, r.parents)
    if r.chain_survivals is not None:
        arrays["chain_survivals"] = _odds_steps(r.chain_survivals, _chain_parents(r.chain_survivals.shape))
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as out:
        for name, array in arrays.items():
            member = io.BytesIO()  # column by column: neighbours in a column are alike
            np.lib.format.write_array(member, np.asfortranarray(array), allow_pickle=False)
            entry = zipfile.ZipInfo(f"{name}.npy")  # without a date: the same recording is the same file
            out.writestr(entry, member.getvalue(), compress_type=zipfile.ZIP_DEFLATED)


def read_file(path: Path | str) -> Recording:
    """Read what `write_file` wrote. Raises ValueError for anything else; OSError if it cannot be read."""
    path = Path(path)
    size = path.stat().st_size
    if size > MAX_BYTES:
        raise ValueError(f"{path}: expected a recording of at most {MAX_BYTES >> 20} MiB, got {size} bytes")
    try:
        arrays = _members(path)
        if "format" in arrays and arrays["format"].tolist() != [FORMAT]:
            raise ValueError(f"format: expected {FORMAT}, got {arrays['format'].tolist()}; record it again")
        return _recording(arrays)
    except (zipfile.BadZipFile, KeyError, EOFError, msgspec.DecodeError, NotImplementedError) as error:
        reason = f"lacks {error}" if isinstance(error, KeyError) else str(error)
        raise ValueError(f"{path}: not a recording of specplug: {reason}") from None
    except (ValueError, TypeError, IndexError) as error:
        raise ValueError(f"{path}: {error}") from None


def _members(path: Path) -> dict[str, NDArray[Any]]:
    """Arrays of the zip, their sizes checked before they are unpacked."""
    with zipfile.ZipFile(path) as file:
        entries = file.infolist()
        unpacked = sum(entry.file_size for entry in entries)
        if unpacked > MAX_UNPACKED or len(entries) > 32:
            raise ValueError(f"expected at most 32 arrays of {MAX_UNPACKED >> 20} MiB, got {unpacked} bytes")
        arrays = {}
        for entry in entries:
            with file.open(entry) as member:
                data = io.BytesIO(member.read(entry.file_size))
            arrays[entry.filename.removesuffix(".npy")] = np.lib.format.read_array(data, allow_pickle=False)
    return arrays


def _recording(arrays: dict[str, NDArray[Any]]) -> Recording:
    """Decode. Raises KeyError for an array that is not there, ValueError for one that makes no sense."""
    about = msgspec.json.decode(arrays["about"].astype(np.uint8).tobytes(), type=About)
    steps = arrays["steps"]
    if steps.ndim != 2 or arrays["accepted"].shape != (len(steps), math.ceil(steps.shape[1] / 8)):
        raise ValueError(f"steps: expected [N, B] with accepted bits [N, B/8], got {list(steps.shape)}")
    parents = arrays["parents"].astype(np.int16) - 1
    if parents.shape != steps.shape or not (parents < np.arange(steps.shape[1])).all():
        raise ValueError(f"parents: expected [N, B] = {list(steps.shape)}, each before its child")
    survivals = {}
    if "survivals" in arrays:
        survivals["survivals"] = _survivals(arrays["survivals"], parents)
    if "chain_survivals" in arrays:
        chain = arrays["chain_survivals"]
        survivals["chain_survivals"] = _survivals(chain, _chain_parents(chain.shape))
    return Recording(
        about=about,
        requests=Requests(*(arrays[f"requests_{name}"] for name in REQUEST_ARRAYS)),
        request=arrays["request"],
        position=arrays["position"],
        counts=arrays["counts"],
        parents=parents,
        log_probs=_log_probs(steps),
        accepted=np.unpackbits(arrays["accepted"], axis=1, count=steps.shape[1]).astype(bool),
        chain_log_probs=_log_probs(arrays["chain_steps"]),
        chain_accepted=arrays["chain_accepted"],
        **survivals,
    )


def _steps(log_probs: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Codes of path log-probabilities, as differences along a row; NONE where there is no node; [N, B]."""
    live = log_probs > -np.inf
    code = np.round(FOLD * np.log1p(FINENESS * np.where(live, -log_probs, 0.0).astype(np.float64)))
    return np.where(live, np.maximum(np.diff(code.astype(np.int64), axis=1, prepend=0), 0), NONE).astype(
        np.uint16
    )


def _log_probs(steps: NDArray[Any]) -> NDArray[np.float32]:
    live = steps != NONE
    code = np.cumsum(np.where(live, steps, 0).astype(np.int64), axis=1)
    return np.where(live, -np.expm1(np.minimum(code / FOLD, 60.0)) / FINENESS, -np.inf).astype(np.float32)


def _odds_steps(survivals: NDArray[np.float32], parents: NDArray[np.int16]) -> NDArray[np.int8]:
    """Log-odds in 1/16, less those of the sibling before, or of the parent where there is none; [N, B]."""
    p = np.clip(survivals.astype(np.float64), 1e-9, 1 - 1e-9)
    odds = np.clip(np.round(np.log(p / (1 - p)) * ODDS), -127, 127).astype(np.int8)
    return odds - _before(parents, odds, steps=False)  # wraps, and back


def _survivals(steps: NDArray[np.int8], parents: NDArray[np.int16]) -> NDArray[np.float32]:
    if steps.shape != parents.shape or steps.dtype != np.int8:
        raise ValueError(
            f"survivals: expected int8 {list(parents.shape)}, got {steps.dtype} {list(steps.shape)}"
        )
    odds = steps + _before(parents, steps, steps=True)
    return (1 / (1 + np.exp(-odds / ODDS))).astype(np.float32)


def _before(parents: NDArray[np.int16], values: NDArray[np.int8], *, steps: bool) -> NDArray[np.int8]:
    """Log-odds that each node's are counted from, [N, B]; ``values`` are log-odds or steps of them."""
    rounds, budget = parents.shape
    row, latest = np.arange(rounds), np.zeros((rounds, budget + 1), np.int8)  # of the children, root first
    before = np.zeros((rounds, budget), np.int8)
    for node in range(budget):
        parent = parents[:, node] + 1
        before[:, node] = latest[row, parent]
        now = before[:, node] + values[:, node] if steps else values[:, node]
        latest[row, parent] = now
        latest[:, node + 1] = now
    return before


def _chain_parents(shape: tuple[int, ...]) -> NDArray[np.int16]:
    """[N, G]: node j hangs below node j - 1."""
    return np.broadcast_to(np.arange(-1, shape[1] - 1, dtype=np.int16), shape)
