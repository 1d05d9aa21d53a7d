"""Cost tables that are computed, not measured: what a step would cost on machines of three kinds.

Roofline (Williams, Waterman, Patterson 2009): a forward takes the longer of reading the weights and computing
the rows, and besides reads every request's cache and pays fixed overheads:

    verify(R, rows, context) = overhead + shape's overhead + max(weights, rows * row) + R * context * cache
    draft(R, context)        = draft + R * draft_request, and the building of a tree

With ``graph_sizes`` a step of rows below the largest costs what the next larger graph size costs. The numbers
are round figures of a kind of machine, derived below, not measurements of one. They serve to judge a policy
where no table is at hand; to configure an engine, measure its own (`specplug profile`).
"""

from __future__ import annotations

from dataclasses import dataclass

from specplug.cost import CostTable, from_probes
from specplug.cost_curves import Probe, Shape
from specplug.provenance import Provenance

GRAPH_SIZES = (1, 2, 4, *range(8, 257, 8), *range(272, 513, 16))
"""Rows of captured graphs as vLLM chooses them by default: 1, 2, 4, steps of 8 to 256, of 16 to 512."""
REQUESTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
CONTEXTS = (0.0, 4096.0)  # two suffice: the model is linear in the context
WIDEST = 65  # rows a request, root and 64 nodes


@dataclass(frozen=True)
class Roofline:
    """A machine with one target and one draft. Seconds."""

    overhead: float  # of a step: launches, sampling, host
    weights: float  # reading the weights once
    row: float  # computing one row
    cache: float  # reading one committed token's keys and values
    draft: float  # drafting for one request
    draft_request: float  # for each further request
    build: float  # building a tree
    tree: float  # more overhead of a tree's step than of a chain's: masks, piecewise graphs, moving the cache
    chain: float  # more overhead of a chain's step than of plain decoding
    graph_sizes: tuple[int, ...] = ()

    def forward(self, rows: int) -> float:
        """Reading or computing, whichever is longer."""
        computed = next((size for size in self.graph_sizes if size >= rows), rows)
        return max(self.weights, computed * self.row)


MODELS = {
    # 8B parameters in bf16 on a datacentre GPU: 16 GB at 3.35 TB/s, 16 GFLOP a row at 600 TFLOP/s, 128 KiB of
    # cache a token; a draft of 5 layers of 36.
    "staircase": Roofline(
        overhead=0.6e-3, weights=4.8e-3, row=27e-6, cache=39e-9, draft=1.0e-3, draft_request=25e-6,
        build=0.2e-3, tree=0.4e-3, chain=0.1e-3, graph_sizes=GRAPH_SIZES,
    ),
    # Weights dominate: 70B parameters in bf16 over four such GPUs, rows ten times cheaper than their share.
    "memory-bound": Roofline(
        overhead=1e-3, weights=12e-3, row=6e-6, cache=20e-9, draft=1.2e-3, draft_request=10e-6,
        build=0.2e-3, tree=0.4e-3, chain=0.1e-3,
    ),
    # Rows dominate: a processor whose arithmetic is saturated by three rows.
    "compute-bound": Roofline(
        overhead=1e-3, weights=3e-3, row=1e-3, cache=50e-9, draft=1.5e-3, draft_request=0.3e-3,
        build=0.2e-3, tree=0.2e-3, chain=0.1e-3,
    ),
}  # fmt: skip


def model_table(name: str) -> CostTable:
    """The table of a model of `MODELS`. Raises ValueError for a name that is not one."""
    if name not in MODELS:
        raise ValueError(f"cost model: expected one of {', '.join(MODELS)}, got {name!r}")
    return roofline_table(MODELS[name], name=name)


def roofline_table(machine: Roofline, *, name: str = "") -> CostTable:
    """Probes of a machine at every corner of its curves."""
    extra: dict[Shape, float] = {"plain": 0.0, "chain": machine.chain, "tree": machine.tree}
    verify, draft = [], []
    for context in CONTEXTS:
        for requests in REQUESTS:
            cache = requests * context * machine.cache
            for shape, more in extra.items():
                rows = [requests] if shape == "plain" else _corners(machine, requests)
                verify += [
                    _probe(
                        shape, requests, n, context,
                        machine.overhead + more + machine.forward(n) + cache,
                    )
                    for n in rows
                ]  # fmt: skip
            drafting = machine.draft + (requests - 1) * machine.draft_request
            draft.append(_probe("chain", requests, 0, context, drafting))
            draft.append(_probe("tree", requests, 0, context, drafting + machine.build))
    return from_probes(
        verify,
        draft,
        graph_sizes=machine.graph_sizes,
        provenance=Provenance(engine="model", device=name, command="specplug.cost_models"),
    )


def _corners(machine: Roofline, requests: int) -> list[int]:
    """Row counts between which the model is linear: ends, graph sizes, where computing overtakes reading."""
    bend = int(machine.weights / machine.row)
    largest = max(machine.graph_sizes, default=0)
    smooth = {n for n in (largest + 1, bend, bend + 1) if n > largest}
    inner = {n for n in smooth | {*machine.graph_sizes} if requests < n < requests * WIDEST}
    return sorted(inner | {requests, requests * WIDEST})


def _probe(shape: Shape, requests: int, tokens: int, context: float, seconds: float) -> Probe:
    return Probe(shape=shape, requests=requests, tokens=tokens, context=context, median_seconds=seconds)
