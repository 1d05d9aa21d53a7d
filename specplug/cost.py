"""What a step costs: seconds of a target step and of a draft, from probes measured on this machine.

verify(requests, rows, context) is the time of one target forward over ``rows`` rows in all (roots, nodes,
prefill) of ``requests`` requests with ``context`` committed tokens each; draft(requests, context) the time of
drafting and building for that many. Both by shape: what a step verifies, what a round drafts. See
`specplug.cost_curves` for the curves through the probes and `specplug.cost_formats` for the files.

A table does not know about the load of other processes, clocks that change, or rows whose context differs
much within a batch; the budget corrects it online.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from specplug.cost_curves import Lookup, Probe, Shape, Surface, isotonic, surface
from specplug.cost_formats import VERSION, AdditiveTable, CostFile, StepTable, read_file, write_file
from specplug.provenance import Provenance, mismatches

Floats = NDArray[np.float64]

NEAREST: dict[Shape, tuple[Shape, ...]] = {
    "plain": ("plain", "chain", "tree"),
    "chain": ("chain", "tree", "plain"),
    "tree": ("tree", "chain", "plain"),
}
"""Which measured shape stands for one that was not, and lends its slope to one that does not rise: a chain's
step is a tree's of the same rows."""


@dataclass(frozen=True)
class CostTable:
    """Probes, and the surfaces through them. Make one with `from_probes` or `read_cost_table`."""

    verify: tuple[Probe, ...]  # in order of Probe.key, each key once
    draft: tuple[Probe, ...] = ()  # the same; tokens is 0
    provenance: Provenance | None = None
    graph_sizes: tuple[int, ...] = ()  # rows of the captured graphs, rising
    lookup: Lookup = "measured"
    informative: bool = field(init=False)  # whether more rows are known to cost more
    reason: str = field(init=False)  # "" or one sentence ending "trimming off"
    _verify: dict[Shape, Surface] = field(init=False, repr=False, compare=False)
    _draft: dict[Shape, Surface] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Raises ValueError for no probes, unsorted or repeated ones, or graph sizes that do not rise."""
        if not self.verify:
            raise ValueError("verify: expected one probe or more, got none; measure again")
        for name, probes in (("verify", self.verify), ("draft", self.draft)):
            for before, after in pairwise(probes):
                if after.key <= before.key:
                    raise ValueError(
                        f"{name}: expected probes sorted by shape, context, requests and tokens, each once; "
                        f"got {after.key} after {before.key}"
                    )
        if self.lookup == "measured" and any(not probe.tokens for probe in self.verify):
            raise ValueError("verify: expected probes of 1 token or more, got 0")
        if any(probe.tokens for probe in self.draft):
            raise ValueError("draft: expected tokens 0, a draft verifies nothing")
        if any(probe.shape == "plain" for probe in self.draft):
            raise ValueError("draft: expected the shapes chain and tree, got plain, which drafts nothing")
        if any(size < 1 for size in self.graph_sizes) or any(b <= a for a, b in pairwise(self.graph_sizes)):
            raise ValueError(f"graph_sizes: expected rising numbers above 0, got {list(self.graph_sizes)}")
        over_requests = [msgspec.structs.replace(probe, tokens=probe.requests) for probe in self.draft]
        surfaces = _surfaces(self.verify, self.graph_sizes, self.lookup)
        reason = _reason(self.verify, surfaces)
        for name, value in (
            ("_verify", surfaces),
            ("_draft", _surfaces(over_requests, (), "measured")),
            ("reason", reason),
            ("informative", not reason),
        ):
            object.__setattr__(self, name, value)

    @property
    def max_tokens(self) -> int:
        """Rows of the largest probe."""
        return max(probe.tokens for probe in self.verify)

    @property
    def max_requests(self) -> int:
        """Requests of the largest probe."""
        return max(probe.requests for probe in self.verify)

    def verify_seconds(
        self,
        requests: int,
        tokens: NDArray[np.int64],  # any shape
        *,
        context: float = 0.0,
        shape: Shape = "tree",
    ) -> Floats:
        """Seconds of one target step over ``tokens`` rows in all; float64 of the same shape."""
        return self._verify[_nearest(self._verify, shape)].seconds(requests, tokens, context)

    def draft_seconds(self, requests: int, *, context: float = 0.0, shape: Shape = "tree") -> float:
        """Seconds of drafting and building for ``requests``; 0 for "plain", and where no draft was measured
        (SGLang's tables hold the whole step).
        """
        if shape == "plain" or not self._draft:
            return 0.0
        at = self._draft[_nearest(self._draft, shape)]
        return float(at.seconds(requests, np.asarray(requests), context))


def from_probes(
    verify: Iterable[Probe],
    draft: Iterable[Probe] = (),
    *,
    provenance: Provenance | None = None,
    graph_sizes: Iterable[int] = (),
    lookup: Lookup = "measured",
) -> CostTable:
    """A table of probes in any order. Raises ValueError for what `CostTable` refuses."""
    ordered = [tuple(sorted(probes, key=lambda probe: probe.key)) for probes in (verify, draft)]
    return CostTable(
        ordered[0], ordered[1], provenance=provenance, graph_sizes=tuple(graph_sizes), lookup=lookup
    )


def read_cost_table(path: Path | str) -> CostTable:
    """Read our own file or either of SGLang's. Raises ValueError as `cost_formats.read_file` and `CostTable`
    do, naming the file.
    """
    file = read_file(path)
    try:
        if isinstance(file, StepTable):
            return from_step_table(file)
        if isinstance(file, AdditiveTable):
            return from_additive_table(file)
        return CostTable(
            tuple(file.verify),
            tuple(file.draft),
            provenance=file.provenance,
            graph_sizes=tuple(file.graph_sizes),
            lookup=file.lookup,
        )
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def write_cost_table(path: Path | str, table: CostTable) -> None:
    """Write our own file, which SGLang reads as a step table."""
    steps = to_step_table(table)
    write_file(
        path,
        CostFile(
            format_version=VERSION,
            lookup=table.lookup,
            provenance=table.provenance,
            graph_sizes=list(table.graph_sizes),
            verify=list(table.verify),
            draft=list(table.draft),
            sample_batch_tokens=steps.sample_batch_tokens,
            sample_steps_per_sec=steps.sample_steps_per_sec,
            max_batch_tokens=steps.max_batch_tokens,
        ),
    )


def check_provenance(table: CostTable, expected: Provenance) -> list[str]:
    """One sentence for each fact that differs from ``expected``; what is unknown matches anything."""
    return [] if table.provenance is None else mismatches(table.provenance, expected)


def from_step_table(table: StepTable) -> CostTable:
    """SGLang's step table: the rate of the last probe at or below, whatever the requests and the context."""
    probes = [
        Probe(shape="tree", requests=1, tokens=tokens, context=0, median_seconds=1 / rate)
        for tokens, rate in zip(table.sample_batch_tokens, table.sample_steps_per_sec, strict=True)
    ]
    return from_probes(probes, lookup="floor")


def from_additive_table(table: AdditiveTable) -> CostTable:
    """SGLang's additive table, as a grid of probes: linear between, constant outside."""
    probes = [
        Probe(
            shape="tree",
            requests=requests,
            tokens=rows,
            context=0,
            median_seconds=table.bias_seconds + alpha + theta,
        )
        for requests, alpha in zip(table.bs_probes, table.alpha_seconds, strict=True)
        for rows, theta in zip(table.m_probes, table.theta_seconds, strict=True)
    ]
    return from_probes(probes, lookup="clamped")


def to_step_table(table: CostTable) -> StepTable:
    """Steps a second at the measured row counts, draft included, at the shortest context.

    Probes of one row count but of different requests are averaged: the format has no requests.
    """
    rows, seconds = [], []
    probes = _exported(table)
    for tokens in sorted({probe.tokens for probe in probes}):
        same = [probe for probe in probes if probe.tokens == tokens]
        rows.append(tokens)
        seconds.append(np.mean([probe.median_seconds + _draft_of(table, probe.requests) for probe in same]))
    level = np.asarray(seconds)
    if table.lookup == "measured":
        level = isotonic(level, np.ones(len(level)))
    return StepTable(
        sample_batch_tokens=rows, sample_steps_per_sec=(1 / level).tolist(), max_batch_tokens=rows[-1]
    )


def to_additive_table(table: CostTable) -> AdditiveTable:
    """The least-squares fit of bias + alpha(requests) + theta(rows), draft included, at the shortest context.

    The fit is over the table's own values on the grid of measured requests and rows, where a request has a
    row at least. Exact where the table is additive.
    """
    probes = _exported(table)
    context, shape = probes[0].context, probes[0].shape
    requests = sorted({probe.requests for probe in probes})
    rows = np.asarray(sorted({probe.tokens for probe in probes}))
    grid = np.stack(
        [table.verify_seconds(r, rows, context=context, shape=shape) + _draft_of(table, r) for r in requests]
    )
    last = len(rows) - 1
    cells = [(i, j) for i, r in enumerate(requests) for j in range(len(rows)) if rows[j] >= r or j == last]
    matrix = np.zeros((len(cells), len(requests) + len(rows)))
    for cell, (i, j) in enumerate(cells):
        matrix[cell, 0] = 1.0
        if i:
            matrix[cell, i] = 1.0
        matrix[cell, len(requests) + j] = float(j > 0)
    solved = np.linalg.lstsq(matrix, np.asarray([grid[cell] for cell in cells]), rcond=None)[0]
    return AdditiveTable(
        bias_seconds=float(solved[0]),
        bs_probes=requests,
        alpha_seconds=[0.0, *solved[1 : len(requests)].tolist()],
        m_probes=rows.tolist(),
        theta_seconds=[0.0, *solved[len(requests) + 1 :].tolist()],
    )


def _surfaces(probes: Iterable[Probe], graph_sizes: tuple[int, ...], lookup: Lookup) -> dict[Shape, Surface]:
    groups: dict[Shape, list[Probe]] = {}
    for probe in probes:
        groups.setdefault(probe.shape, []).append(probe)
    own = {shape: surface(group, graph_sizes=graph_sizes, lookup=lookup) for shape, group in groups.items()}
    if lookup != "measured":
        return own

    def slope(shape: Shape) -> Callable[[int, float], float]:
        others = [own[one] for one in NEAREST[shape] if one in own]
        return lambda requests, context: next(
            filter(None, (other.last_slope(requests, context) for other in others)), 0.0
        )

    return {
        shape: surface(group, graph_sizes=graph_sizes, lookup=lookup, slope=slope(shape))
        for shape, group in groups.items()
    }


def _nearest(surfaces: dict[Shape, Surface], shape: Shape) -> Shape:
    return next(one for one in NEAREST[shape] if one in surfaces)


def _reason(probes: tuple[Probe, ...], surfaces: dict[Shape, Surface]) -> str:
    if any(surface.rises for surface in surfaces.values()):
        return ""
    if not any(surface.curves for surface in surfaces.values()):
        return (
            f"no information: {len(probes)} probe(s), none with the same requests and context as another, do "
            "not say what one more row costs; trimming off"
        )
    return (
        f"no information: {len(probes)} probes, and more rows never cost more than the spread of the "
        "measurement; trimming off"
    )


def _exported(table: CostTable) -> list[Probe]:
    """The probes that stand for the table in a format without shapes and contexts."""
    shape = _nearest(table._verify, "tree")
    probes = [probe for probe in table.verify if probe.shape == shape]
    return [probe for probe in probes if probe.context == probes[0].context]


def _draft_of(table: CostTable, requests: int) -> float:
    return table.draft_seconds(requests, context=_exported(table)[0].context)
