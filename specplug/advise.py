"""Say which speculative setting to use at a load: plain, chain, a fixed tree, or ours with a cost table.

Replays a recording of the draft through a cost table (`specplug simulate`) and reads the answer off. Tells
also what it should gain, and when not to speculate at all. It is as good as its two files: measure the table
on the machine (`specplug profile`) and record the draft on the traffic (`specplug record`).
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from specplug import contest as contests
from specplug.checkpoint import read_draft
from specplug.contest import OURS, Cell
from specplug.cost import CostTable
from specplug.cost_models import MODELS
from specplug.simulate import add_source_arguments, check_numbers, columns, open_contest

CLOSE = 0.01  # settings this close are called equal, the simpler one is advised: the noise of a replay


class Advice(NamedTuple):
    """What to use at one concurrency."""

    concurrency: int
    setting: str
    tokens_per_second: float
    over_plain: float  # ratio of tokens a second
    next_best: str  # of the other settings
    over_next: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_source_arguments(parser)
    parser.add_argument(
        "--concurrency", type=int, nargs="+", default=[1, 8, 64], help="requests at a time; default 1 8 64"
    )
    parser.add_argument("--draft", help="folder or hub id of the draft, for the command line that is printed")


def run(arguments: argparse.Namespace) -> int:
    """Exit code 0. Raises ValueError for arguments that cannot work."""
    a = arguments
    check_numbers(a)
    kind = read_draft(a.draft).kind if a.draft else None
    contest, facts = open_contest(a)
    loads = sorted(set(a.concurrency))
    cells = [
        contests.closed(contest, name, load, tokens=a.tokens)
        for load in loads
        for name in contests.names(contest.drafted.recording)
    ]
    advices = [advise({c.policy: c for c in cells if c.concurrency == load}) for load in loads]
    setting = over_all(cells)
    unfit = unfit_table(contest.table, a.cost) if setting == OURS and a.cost not in MODELS else ""
    command = command_line(
        setting,
        draft=a.draft or "DRAFT",
        kind=kind or "KIND",
        depth=contest.depth,
        budget=contest.budget,
        cost_table=None if unfit else "TABLE" if a.cost in MODELS else a.cost,
    )
    if a.json:
        result = {"facts": facts, "advice": [one._asdict() for one in advices], "setting": setting}
        print(json.dumps(result | {"command": command, "note": unfit}, indent=1))
        return 0
    print("\n".join([*facts, "", table(advices), "", *sentences(advices, setting, loads), "", command]))
    notes = {
        "DRAFT": "DRAFT: folder or hub id of the draft; name it with --draft",
        "KIND": "KIND: dspark or dflash, what the draft is; name it with --draft",
        "TABLE": "TABLE: file of `specplug profile`, measured on your machine; this advice is from a model",
    }
    print("\n".join([*(note for name, note in notes.items() if f'"{name}"' in command), unfit]).strip())
    return 0


def unfit_table(cost: CostTable, file: str) -> str:
    """Why the command of vLLM has to leave a table out, in one line; "" where it need not."""
    engine = cost.provenance.engine if cost.provenance else ""
    if engine in ("", "vllm"):
        return ""
    return (
        f"cost_table is left out: {file} is of engine {engine}, here it serves simulate and advise only; "
        "specplug profile --engine vllm makes the one to serve with, until then every node is verified"
    )


def advise(cells: Mapping[str, Cell]) -> Advice:
    """The setting for one concurrency, from every policy's cell: the simplest of those that are best."""
    rates = {name: cell.tokens_per_second for name, cell in cells.items()}
    setting = _simplest(rates)
    other = max((name for name in rates if name != setting), key=lambda name: rates[name])
    return Advice(
        concurrency=cells[setting].concurrency,
        setting=setting,
        tokens_per_second=rates[setting],
        over_plain=rates[setting] / rates["plain"],
        next_best=other,
        over_next=rates[setting] / rates[other],
    )


def over_all(cells: Sequence[Cell]) -> str:
    """The one setting for all loads together: the geometric mean over them decides."""
    return _simplest(contests.mixed(cells) | {OURS: 1.0})


def command_line(
    setting: str, *, draft: str, kind: str, depth: int, budget: int, cost_table: str | None
) -> str:
    """The option of ``vllm serve`` for a setting; None leaves the table out."""
    config: dict[str, Any] = {"method": "ddtree", "model": draft, "num_speculative_tokens": depth}
    if setting == "plain":
        return "vllm serve TARGET    # without --speculative-config"
    if setting == "chain":
        config["method"] = kind
    elif setting == OURS:
        config |= {"tree_budget": budget} | ({"cost_table": cost_table} if cost_table else {})
    else:
        config["tree_budget"] = int(setting.split()[1])
    return f"vllm serve TARGET --speculative-config '{json.dumps(config)}'"


def table(advices: Sequence[Advice]) -> str:
    """A row a concurrency."""
    lines = [["concurrency", "setting", "tokens/s", "over plain", "next best", "over it"]]
    for one in advices:
        rate = f"{one.tokens_per_second:,.0f}"
        gains = f"{one.over_plain:.2f}", f"{one.over_next:.2f}"
        lines.append([str(one.concurrency), one.setting, rate, gains[0], one.next_best, gains[1]])
    return columns(lines)


def sentences(advices: Sequence[Advice], setting: str, loads: Sequence[int]) -> list[str]:
    """When not to speculate, and what to use over all."""
    plain = [one.concurrency for one in advices if one.setting == "plain"]
    lines = []
    if plain:
        lines.append(
            f"Do not speculate at concurrency {', '.join(map(str, plain))}: nothing beats plain decoding."
        )
    if setting == OURS:
        lines.append(
            "Over these loads: ours, the budget from the cost table; it drafts nothing where that pays."
        )
    elif setting == "plain":
        lines.append("Over these loads: do not speculate.")
    else:
        lines.append(f"Over these loads: {setting}.")
    return lines


def _simplest(rates: Mapping[str, float]) -> str:
    """The first of plain, chain, trees by size and ours whose rate is within `CLOSE` of the best."""
    best = max(rates.values())
    trees = sorted(
        (name for name in rates if name.startswith("tree ")), key=lambda name: int(name.split()[1])
    )
    order = ["plain", "chain", *trees, OURS]
    return next(name for name in order if name in rates and rates[name] >= best * (1 - CLOSE))
