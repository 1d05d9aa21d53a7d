"""ECE of a(v) before and after calibration, on held-out prompts, from recorded rounds.

    specplug evaluate ... --record --out RUN
    python benchmarks/calibration.py RUN [--method tree-16] [--save calibration.json] [--plot reliability.png]

Per method and temperature the prompts are dealt into folds; each fold is predicted by a calibration fitted on
the others, so no prompt is judged by its own rounds. "draft" is the path's probability e^L, "fitted" the
calibration, "+ head" the same with the confidence head's survival as a further input. "chance" is the ECE
that independent nodes would show were the fitted probabilities true: nothing can be measured below it.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from specplug.calibration_fit import Records, fit, predict
from specplug.local.records import RoundRecord, read_rounds
from specplug.reliability import ece, ece_by_depth, plot, reliability


def as_records(rounds: Iterable[RoundRecord]) -> tuple[Records, NDArray[np.int64]]:
    """Every node of some rounds, and the number of its prompt, dense from 0."""
    rounds = list(rounds)
    names = {key: i for i, key in enumerate(sorted({(r.dataset, r.prompt) for r in rounds}))}
    head = None
    if all(r.survivals is not None for r in rounds):
        head = np.array([s for r in rounds for s in r.survivals or []])
    records = Records(
        log_probs=np.minimum([x for r in rounds for x in r.log_probs], 0.0),
        depths=np.array([x for r in rounds for x in r.depths], dtype=np.int64),
        ranks=np.array([x for r in rounds for x in r.ranks], dtype=np.int64),
        accepted=np.array([x for r in rounds for x in r.accepted], dtype=bool),
        confidence=head,
    )
    prompts = np.array([names[r.dataset, r.prompt] for r in rounds for _ in r.depths], dtype=np.int64)
    return records, prompts


def held_out(
    records: Records, prompts: NDArray[np.int64], *, folds: int, temperature: float
) -> NDArray[np.float64]:
    """a of every node, [N], by a calibration that has not seen its prompt."""
    order = np.random.RandomState(0).permutation(prompts.max() + 1)
    fold = order[prompts] % folds
    result = np.zeros(len(prompts))
    for k in range(folds):
        seen, judged = (_take(records, rows) for rows in (fold != k, fold == k))
        result[fold == k] = predict(fit({None: seen}), judged, temperature=temperature)
    return result


def _take(records: Records, rows: NDArray[np.bool_]) -> Records:
    return Records(*(None if x is None else x[rows] for x in records))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="folder of specplug evaluate --record")
    parser.add_argument(
        "--method", help="one method only, which --save and --plot need where there are several"
    )
    parser.add_argument("--folds", type=int, default=4)
    parser.add_argument("--save", type=Path, help="write a calibration fitted on all rounds")
    parser.add_argument("--plot", type=Path, help="reliability curves (needs matplotlib)")
    args = parser.parse_args()
    rounds = [r for r in read_rounds(args.run) if args.method in (None, r.method) and r.depths]
    methods = sorted({r.method for r in rounds})
    if not rounds:
        parser.error(f"{args.run}: no recorded rounds{f' of method {args.method}' if args.method else ''}")
    if (args.save or args.plot) and len(methods) > 1:
        parser.error(f"--method: expected one of {', '.join(methods)} for --save and --plot, got none")

    rounds.sort(key=lambda r: (r.method, r.temperature))
    regimes: dict[float | None, Records] = {}
    curves = {}
    print("method | T | rounds | nodes | ECE draft | fitted | + head | chance | by depth, draft > fitted")
    for (method, temperature), group in groupby(rounds, key=lambda r: (r.method, r.temperature)):
        mine = list(group)
        records, prompts = as_records(mine)
        if not 2 <= args.folds <= prompts.max() + 1:
            parser.error(f"--folds: expected 2..{prompts.max() + 1} (prompts), got {args.folds}")
        blind = records._replace(confidence=None)
        draft = np.exp(records.log_probs)
        fitted = held_out(blind, prompts, folds=args.folds, temperature=temperature)
        head = "-"
        if records.confidence is not None:
            with_head = held_out(records, prompts, folds=args.folds, temperature=temperature)
            head = f"{ece(with_head, records.accepted):.4f}"
        chance = ece(fitted, np.random.RandomState(1).rand(len(fitted)) < fitted)
        depth = int(records.depths.max())
        by_depth = (
            ece_by_depth(p, records.accepted, records.depths, max_depth=depth) for p in (draft, fitted)
        )
        print(
            f"{method} | {temperature:g} | {len(mine)} | {len(draft)} | {ece(draft, records.accepted):.4f} | "
            f"{ece(fitted, records.accepted):.4f} | {head} | {chance:.4f} | "
            + " ".join(f"{b:.3f}>{a:.3f}" for b, a in zip(*by_depth, strict=True))
        )
        regimes[temperature] = records
        curves[f"draft, T {temperature:g}"] = reliability(draft, records.accepted)
        curves[f"fitted, T {temperature:g}"] = reliability(fitted, records.accepted)
    if args.save:
        # The hottest regime measured also serves what is hotter, unless only greedy was measured.
        hottest = max(t for t in regimes if t is not None)
        if hottest > 0:
            regimes[None] = regimes.pop(hottest)
        fit(regimes).save(args.save)
    if args.plot:
        plot(curves, args.plot, title=methods[0])


if __name__ == "__main__":
    main()
