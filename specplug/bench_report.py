"""A benchmark in Markdown: what was compared, how fast each arm was under each load, what its text is.

Medians over the repeats, the lowest and the highest in brackets. Cells in which an arm is slower than the
baseline stand there like the others, and are marked.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence

from specplug.bench_result import Arm, BenchResult, Cell, Quality, Settings

LOSS = "SLOWER"
_GIB = 1 << 30


def markdown(result: BenchResult) -> str:
    """The whole report."""
    parts = [
        f"# {result.settings.engine} {result.settings.engine_version}: "
        + ", ".join(arm.name for arm in result.arms),
        *[f"> **{label}**" for label in result.labels],
        _setting(result.settings, result),
        "## Arms",
        _arms(result.arms),
        "## Speed",
        speed(result),
        losses(result),
        "## Latency in milliseconds: p50 / p95 / p99, medians over the repeats",
        latency(result),
        "## Rounds and memory",
        rounds(result),
        *(["## Text", quality(result)] if result.quality else []),
        _footing(result),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def speed(result: BenchResult) -> str:
    """Output tokens a second by load and arm."""
    rows = []
    for load in result.loads():
        for arm in result.arms:
            cell = result.cell(arm.name, load)
            if cell is None:
                rows.append([str(load), arm.name, "not measured", *[""] * 4])
                continue
            gain = "1.00" if arm.name == result.baseline else _gain(result.gain(arm.name, load))
            length = _number(cell.median("rounds", "accepted_length"), 2) if arm.speculative else "1.00"
            rows.append(
                [
                    str(load),
                    arm.name,
                    _spread(cell, "output_tokens_per_second"),
                    gain,
                    length,
                    f"{cell.repeats[0].completed} x {len(cell.repeats)}",
                    _number(cell.median("output_tokens"), 0),
                ]
            )
    head = ["load", "arm", "output tokens/s", f"times {result.baseline}", "accepted length", "requests"]
    return _table([*head, "output tokens"], rows)


def losses(result: BenchResult) -> str:
    """One sentence for each arm with a cell below the baseline."""
    lines = []
    for arm in result.arms:
        gains = {str(load): result.gain(arm.name, load) for load in result.loads()}
        known = {load: gain for load, gain in gains.items() if gain is not None}
        lost = [load for load, gain in known.items() if gain < 1]
        if lost and arm.name != result.baseline:
            lines.append(
                f"{arm.name} is slower than {result.baseline} in {len(lost)} of {len(known)} cells: "
                f"{', '.join(lost)}."
            )
    return "\n".join(lines)


def latency(result: BenchResult) -> str:
    """TTFT, ITL, TPOT and whole answers."""
    names = {"ttft": "TTFT", "itl": "ITL", "tpot": "TPOT", "answer": "whole answer"}
    rows = []
    for load, arm, cell in _cells(result):
        values = [
            " / ".join(_number(cell.median(name, f"p{share}_ms"), 1) for share in (50, 95, 99))
            for name in names
        ]
        rows.append([load, arm.name, *values])
    return _table(["load", "arm", *names.values()], rows)


def rounds(result: BenchResult) -> str:
    """What was verified, in which shape, and what it took in memory."""
    rows = []
    for load, arm, cell in _cells(result):
        nodes = cell.median("rounds", "nodes_per_draft") if arm.speculative else 0.0
        shapes = [cell.median("rounds", shape) for shape in ("plain", "chain", "tree")]
        steps = (
            " / ".join(_number(count, 0) for count in shapes)
            if any(s is not None for s in shapes)
            else "as configured"
        )
        rows.append(
            [
                load,
                arm.name,
                _number(nodes, 1),
                _number(None if nodes is None else nodes + 1, 1),
                steps if arm.speculative else "all plain",
                _number(cell.peak_host_bytes and cell.peak_host_bytes / _GIB, 2),
                _number(cell.peak_device_bytes and cell.peak_device_bytes / _GIB, 2),
            ]
        )
    head = ["load", "arm", "nodes a draft", "positions verified", "steps plain / chain / tree"]
    return _table([*head, "host GiB", "GPU GiB"], rows)


def quality(result: BenchResult) -> str:
    """Agreement and law of every arm, and each divergence that is no near tie."""
    rows, faults = [], []
    for one in result.quality:
        row = [one.arm, "not asked", "", "", "not asked"]
        if (greedy := one.agreement) is not None:
            share = greedy.agreeing / greedy.tokens if greedy.tokens else 1.0
            ties = len(greedy.divergences) - greedy.faults
            row[1:4] = [
                f"{greedy.identical} of {greedy.answers}",
                f"{share:.4f}",
                f"{ties} / {greedy.faults}",
            ]
            faults += [
                f"{one.arm}, prompt {d.prompt}, position {d.position}: token {d.arm_token} for "
                f"{d.baseline_token}, gap {_gap(d.gap_nats)}"
                for d in greedy.divergences
                if not d.near_tie
            ]
        if (law := one.distribution) is not None:
            verdict = ("one law" if law.same else "ANOTHER LAW") if law.tested else "NOT TESTED, no variety"
            row[4] = (
                f"{verdict}: p = {law.p_value:.3g} ({law.chi_square:.0f} at {law.degrees_of_freedom} d.f.)"
            )
        rows.append(row)
    head = ["arm", "answers identical", "tokens before the first difference", "near ties / FAULTS", "sampled"]
    table = _table(head, rows) + _lengths(result)
    return table + "".join(f"\n\nFAULT: {fault}" for fault in faults)


def _lengths(result: BenchResult) -> str:
    """Accepted lengths by data set; "" where none was counted."""
    sets = list(dict.fromkeys(length.data_set for one in result.quality for length in one.lengths))
    rows = []
    for one in result.quality:
        known = {length.data_set: length for length in one.lengths}
        cells = [
            f"{_number(known[name].accepted_length, 2)} ({known[name].answers})" if name in known else "?"
            for name in sets
        ]
        rows.append([one.arm, *cells])
    head = ["accepted length (greedy answers)", *sets]
    return "\n\n" + _table(head, rows) if sets else ""


def faulty(quality: Iterable[Quality]) -> bool:
    """Whether an arm's text is not the baseline's."""
    return any(
        (one.agreement is not None and one.agreement.faults > 0)
        or (one.distribution is not None and not one.distribution.same)
        for one in quality
    )


def _setting(s: Settings, result: BenchResult) -> str:
    rows = [
        ["target", f"{s.target} (config.json {s.target_hash[:12] or 'not read'}), dtype {s.dtype}"],
        ["device", s.device],
        ["versions", f"specplug {s.specplug_version}, torch {s.torch}, Python {s.python}"],
        ["prompts", f"{s.prompt_count} of {s.prompts} (SHA-256 {s.prompts_hash[:12]})"],
        ["answers", f"up to {s.max_tokens} tokens, {'always' if s.ignore_eos else 'not'} to that length"],
        ["sampling", f"temperature {s.temperature:g}, top-p {s.top_p:g}"],
        ["prefix cache", "on" if s.prefix_cache else "off"],
        ["repeats", str(s.repeats)],
        ["date", result.date],
        ["command", f"`{result.command}`"],
    ]
    return _table(["setting", ""], rows)


def _arms(arms: Sequence[Arm]) -> str:
    blocks = []
    for arm in arms:
        variables = [f"{name}={shlex.quote(value)}" for name, value in arm.environment.items()]
        line = " ".join([*variables, shlex.join(arm.command)])
        blocks.append("\n".join([f"**{arm.name}**: `{line}`", *(f"- **{label}**" for label in arm.labels)]))
    return "\n\n".join(blocks)


def _footing(result: BenchResult) -> str:
    chunk = (
        "between two chunks of a stream" if result.settings.engine == "vllm" else "shared out over its tokens"
    )
    return (
        "Accepted length: tokens a round and request, bonus counted. Positions verified: nodes and the root. "
        "TTFT: time to the first token. TPOT: the rest of an answer's time over its tokens. "
        f"ITL: the time {chunk}. Prompts are sent again where a load has more requests than prompts. "
        "docs/bench.md says what each figure is and who counts it."
    )


def _cells(result: BenchResult) -> Iterable[tuple[str, Arm, Cell]]:
    for load in result.loads():
        for arm in result.arms:
            cell = result.cell(arm.name, load)
            if cell is not None:
                yield str(load), arm, cell


def _gain(gain: float | None) -> str:
    if gain is None:
        return "?"
    return f"{gain:.2f}" if gain >= 1 else f"**{gain:.2f} {LOSS}**"


def _spread(cell: Cell, name: str) -> str:
    values = cell.values(name)
    middle = _number(cell.median(name), 1)
    return middle if len(values) < 2 else f"{middle} ({min(values):.1f} to {max(values):.1f})"


def _gap(nats: float | None) -> str:
    return "unknown: not among the baseline's top tokens" if nats is None else f"{nats:.4f} nats"


def _number(value: float | None, digits: int) -> str:
    return "?" if value is None else f"{value:.{digits}f}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
