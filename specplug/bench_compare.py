"""Two runs held side by side, and whether they may be: all settings equal, and the same baseline.

What may differ is the arms, the loads, and how often each was repeated and judged.
"""

from __future__ import annotations

from specplug.bench_result import Arm, BenchResult, Settings

FREE = ("repeats", "quality_prompts", "samples", "near_tie_nats")  # they change how sure, not what


def differences(one: Settings, other: Settings, *, free: tuple[str, ...] = ()) -> list[str]:
    """One phrase a setting that differs: its name and both values."""
    return [
        f"{name}: {getattr(one, name)!r} and {getattr(other, name)!r}"
        for name in Settings.__struct_fields__
        if name not in free and getattr(one, name) != getattr(other, name)
    ]


def refuse_other_settings(
    one: BenchResult, other: BenchResult, *, what: str, free: tuple[str, ...] = ()
) -> None:
    """Raise ValueError naming every setting that differs, and an arm of both with two commands."""
    found = differences(one.settings, other.settings, free=free)
    known = {arm.name: arm for arm in other.arms}
    for arm in one.arms:
        if arm.name in known:
            found += [f"arm {arm.name}, {words}" for words in _arm_differences(arm, known[arm.name])]
    if found:
        raise ValueError(f"{what}: the runs differ in more than the arms: {'; '.join(found)}")


def _arm_differences(one: Arm, other: Arm) -> list[str]:
    return [
        f"{name}: {getattr(one, name)!r} and {getattr(other, name)!r}"
        for name in ("command", "environment")
        if getattr(one, name) != getattr(other, name)
    ]


def side_by_side(one: BenchResult, other: BenchResult) -> str:
    """Markdown: output tokens a second of every arm of both, each over its own run's baseline.

    Raises ValueError where the settings or the baselines differ, or no load is in both.
    """
    if one.baseline != other.baseline:
        raise ValueError(
            f"--compare: baseline: {one.baseline!r} and {other.baseline!r}; compare with one arm"
        )
    refuse_other_settings(one, other, what="--compare", free=FREE)
    loads = [load for load in one.loads() if load in other.loads()]
    if not loads:
        first, second = (", ".join(map(str, run.loads())) or "none" for run in (one, other))
        raise ValueError(f"--compare: expected a load in both runs, got {first} and {second}")
    names = list(dict.fromkeys(arm.name for arm in (*one.arms, *other.arms)))
    lines = ["| load | arm | first run | second run |", "| --- | --- | --- | --- |"]
    for load in loads:
        lines += [
            f"| {load} | {name} | {_figure(one, name, load)} | {_figure(other, name, load)} |"
            for name in names
        ]
    lines.append(f"\nOutput tokens a second, and times {one.baseline} of the same run.")
    return "\n".join(lines)


def _figure(result: BenchResult, arm: str, load: object) -> str:
    cell = next((cell for cell in result.cells if cell.arm == arm and cell.load == load), None)
    if cell is None:
        return "-"
    gain = result.gain(arm, cell.load)
    rate = cell.median("output_tokens_per_second")
    marked = "" if gain is None or gain >= 1 else " SLOWER"
    return f"{rate:.1f} ({'?' if gain is None else f'{gain:.2f}'}{marked})"
