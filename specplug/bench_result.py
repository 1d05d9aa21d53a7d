"""What `specplug bench` measured: the file it writes after every cell, and goes on from.

A cell is one arm under one load, repeated. Figures are kept as each repeat gave them; medians are taken when
they are read. Times come from the engine's own load generator, in milliseconds where the name says so.
Accepted lengths count the bonus token: 1.0 is plain decoding.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any, Literal

import msgspec

from specplug.jsonfile import read_struct

BASELINE = "plain"  # name of the arm without speculation
_AGAIN = "; measure again, or mend the file"


class _Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What all parts share: no other keys, no changes."""


class Load(_Part, frozen=True, kw_only=True):
    """Closed loop: so many requests in flight. Open loop: Poisson arrivals. One of the two."""

    concurrency: int | None = None
    rate: float | None = None  # requests a second

    def __post_init__(self) -> None:
        if (self.concurrency is None) == (self.rate is None):
            raise ValueError("load: expected one of concurrency and rate, got both or none; give one")

    def __str__(self) -> str:
        return f"{self.rate:g} requests/s" if self.concurrency is None else f"{self.concurrency} in flight"


class Quantiles(_Part, frozen=True, kw_only=True):
    """Milliseconds over the requests (TTFT, TPOT, whole answers) or chunks (ITL) of one repeat."""

    mean_ms: float
    p50_ms: float
    p95_ms: float
    p99_ms: float


class Rounds(_Part, frozen=True, kw_only=True):
    """What the engine counted while a repeat ran; None = this engine does not say.

    A draft is one request's part of a round. Nodes are draft positions; the root, one more verified position
    a draft, is not counted among them.
    """

    drafts: int | None
    accepted: int | None  # nodes accepted; the bonus token of every draft is not among them
    accepted_length: float | None  # bonus counted: 1 + accepted / drafts
    nodes_verified: int | None
    plain: int | None  # engine steps by the shape that was verified
    chain: int | None
    tree: int | None

    @property
    def nodes_per_draft(self) -> float | None:
        """Verified nodes of a request in a round that drafted for it."""
        return self.nodes_verified / self.drafts if self.drafts and self.nodes_verified is not None else None


class Repeat(_Part, frozen=True, kw_only=True):
    """One run of the load generator."""

    seconds: float
    completed: int
    failed: int
    input_tokens: int
    output_tokens: int
    output_tokens_per_second: float
    requests_per_second: float
    ttft: Quantiles
    itl: Quantiles
    tpot: Quantiles
    answer: Quantiles  # from the request's start to its last token
    rounds: Rounds | None  # None: an arm without speculation


class Cell(_Part, frozen=True, kw_only=True):
    """One arm under one load."""

    arm: str
    load: Load
    repeats: list[Repeat]
    peak_host_bytes: int | None  # resident memory of the server's processes while this cell ran
    peak_device_bytes: int | None  # memory of the GPUs in use, all processes; None without one
    date: str  # ISO 8601, at its end

    def __post_init__(self) -> None:
        if not self.repeats:
            raise ValueError(f"repeats: expected one or more of {self.arm}, {self.load}, got none{_AGAIN}")

    def median(self, name: str, part: str | None = None) -> float | None:
        """Median over the repeats of ``Repeat.name``, or of ``Repeat.name.part``; None where nobody knows."""
        values = self.values(name, part)
        return statistics.median(values) if values else None

    def values(self, name: str, part: str | None = None) -> list[float]:
        """The figure of every repeat that has it."""
        found = [getattr(repeat, name) for repeat in self.repeats]
        if part is not None:
            found = [getattr(one, part) for one in found if one is not None]
        return [float(one) for one in found if one is not None]


class Arm(_Part, frozen=True, kw_only=True):
    """One way to serve; arms of a run differ in command and environment alone."""

    name: str
    command: list[str]  # of the server; {port} stands for its port
    environment: dict[str, str]  # what differs from the calling process's environment
    speculative: bool  # the engine was asked to speculate
    labels: list[str] = []  # what to know before reading its numbers: eager mode, synthetic acceptance, ...

    def __post_init__(self) -> None:
        if not self.command:
            raise ValueError(f"command: expected the server's of arm {self.name}, got nothing{_AGAIN}")


class Divergence(_Part, frozen=True, kw_only=True):
    """The first token in which an arm's greedy answer differs from the baseline's."""

    prompt: int  # index
    position: int  # in the answer, from 0
    baseline_token: int | None  # None: the baseline's answer ended there
    arm_token: int | None  # None: the arm's answer ended there
    gap_nats: float | None  # baseline's log-probability of its token over that of the arm's; None: not in top
    near_tie: bool


class Agreement(_Part, frozen=True, kw_only=True):
    """Greedy answers of an arm against the baseline's, one prompt each."""

    answers: int
    identical: int
    tokens: int  # of the baseline's answers
    agreeing: int  # tokens before each answer's first difference
    near_tie_nats: float  # a divergence with a gap up to this is a near tie, above it a fault
    divergences: list[Divergence]

    @property
    def faults(self) -> int:
        return sum(not one.near_tie for one in self.divergences)


class Distribution(_Part, frozen=True, kw_only=True):
    """Sampled answers of an arm against the baseline's: do their tokens follow one law?

    A chi-square test of homogeneity at each of the first positions, summed over the prompts, rare tokens
    pooled; ``p_value`` is the least over the positions times their number (Bonferroni).
    """

    temperature: float
    prompts: int
    samples: int  # answers a prompt and side
    positions: int
    chi_square: float  # at the position of the least p
    degrees_of_freedom: int
    p_value: float
    level: float  # refused below

    @property
    def tested(self) -> bool:
        """Whether the answers vary at all; without it there was nothing to compare."""
        return self.degrees_of_freedom > 0

    @property
    def same(self) -> bool:
        return self.p_value >= self.level


class SetLength(_Part, frozen=True, kw_only=True):
    """Accepted length over one data set's greedy answers."""

    data_set: str
    answers: int
    accepted_length: float | None  # bonus counted


class Quality(_Part, frozen=True, kw_only=True):
    """What one arm's text is, apart from its speed."""

    arm: str
    agreement: Agreement | None
    distribution: Distribution | None
    lengths: list[SetLength]  # of the greedy answers, by data set


class Settings(_Part, frozen=True, kw_only=True):
    """What all arms of a run share; two runs with different settings are not compared."""

    engine: Literal["vllm", "sglang"]
    engine_version: str
    specplug_version: str
    python: str
    torch: str
    device: str  # see provenance.device_name
    on_gpu: bool
    target: str  # as the user named it
    target_hash: str  # SHA-256 of config.json, empty = it has none
    dtype: str  # as asked for; "auto" = the engine's choice
    prompts: str  # where they come from
    prompts_hash: str  # SHA-256 of the texts sent, in order
    prompt_count: int
    max_tokens: int  # longest answer
    ignore_eos: bool  # every answer has max_tokens tokens
    temperature: float
    top_p: float
    seed: int  # of the order of arrival; requests have none
    prefix_cache: bool
    repeats: int
    server_args: list[str]  # of every arm
    bench_args: list[str]  # of the load generator
    quality_prompts: int  # answers an arm is judged by; 0 = none
    samples: int  # sampled answers a prompt and arm; 0 = none
    near_tie_nats: float  # see Agreement


class BenchResult(_Part, frozen=True, kw_only=True):
    """The file."""

    format_version: Literal[1] = 1
    settings: Settings
    baseline: str  # name of the arm the others are compared with
    arms: list[Arm]
    cells: list[Cell]
    quality: list[Quality]
    labels: list[str]  # of the whole run: a CPU rig, ...
    date: str  # ISO 8601, when it began
    command: str

    def __post_init__(self) -> None:
        names = [arm.name for arm in self.arms]
        cells = [(cell.arm, str(cell.load)) for cell in self.cells]
        judged = [one.arm for one in self.quality]
        for what, given in (
            ("arms", names),
            ("cells", [", ".join(one) for one in cells]),
            ("quality", judged),
        ):
            if twice := [one for one in given if given.count(one) > 1]:
                raise ValueError(f"{what}: expected each once, got {twice[0]} twice{_AGAIN}")
        for arm in (self.baseline, *(arm for arm, _ in cells), *judged):
            if arm not in names:
                known = ", ".join(names) or "none"
                raise ValueError(f"arms: expected one named {arm!r}, which is measured, got {known}{_AGAIN}")

    def cell(self, arm: str, load: Load) -> Cell | None:
        """The cell of an arm under a load, None while it is not measured."""
        return next((cell for cell in self.cells if cell.arm == arm and cell.load == load), None)

    def loads(self) -> list[Load]:
        """Loads in the order they were measured."""
        return list({str(cell.load): cell.load for cell in self.cells}.values())

    def gain(self, arm: str, load: Load) -> float | None:
        """Output tokens a second over the baseline's under the same load; None while one is missing."""
        mine, theirs = self.cell(arm, load), self.cell(self.baseline, load)
        if mine is None or theirs is None:
            return None
        ours, base = mine.median("output_tokens_per_second"), theirs.median("output_tokens_per_second")
        return ours / base if ours is not None and base else None


def read_result(path: Path | str) -> BenchResult:
    """A file of `specplug bench`. Raises ValueError in one sentence for anything else."""
    what, fix = "a result of specplug bench", "give the JSON of --out"
    try:
        return read_struct(path, BenchResult, what=what, fix=fix)
    except OSError as error:
        raise ValueError(f"{path}: expected {what}, got none: {error.strerror}; {fix}") from None


def write_result(result: BenchResult, path: Path) -> None:
    """Replace the file in one step, so that an interruption leaves the last whole one."""
    encoded: Any = msgspec.json.format(msgspec.json.encode(result), indent=1)
    new = path.with_name(path.name + ".new")
    new.write_bytes(encoded + b"\n")
    new.replace(path)
