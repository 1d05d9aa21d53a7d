"""List, show, check and run recipes: pinned settings with the result they should give.

Exit codes: 0 the recipe is right (check) or reproduced (run), 1 it is not, or it cannot run here.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

import msgspec

from specplug import recipe_engine, recipe_facts, recipe_run
from specplug.arguments import check_new_file
from specplug.recipe import STATUSES
from specplug.recipe_facts import Finding
from specplug.recipe_shelf import Shelved, doubles, find, folders
from specplug.recipe_text import lines
from specplug.recipe_verdict import judge, reproduced


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    shelf = argparse.ArgumentParser(add_help=False)
    shelf.add_argument(
        "--dir",
        type=Path,
        action="append",
        default=[],
        help="a folder with recipes of your own; may be repeated",
    )
    listing = actions.add_parser("list", parents=[shelf], help="the recipes there are, with their status")
    named = argparse.ArgumentParser(add_help=False, parents=[shelf])
    named.add_argument("recipe", metavar="NAME", help="a recipe's name, or the path of its folder or file")
    show = actions.add_parser(
        "show", parents=[named], help="one recipe: its commands, ready to paste, and facts"
    )
    for one in (listing, show):
        one.add_argument("--json", action="store_true", help="print JSON")
    check = actions.add_parser(
        "check", parents=[named], help="whether a recipe's facts hold and its engine accepts its commands"
    )
    check.add_argument(
        "--no-engine", action="store_true", help="do not ask the engine (seconds instead of a minute an arm)"
    )
    check.add_argument(
        "--here", action="store_true", help="exit code 1 also where it cannot run on this machine"
    )
    run = actions.add_parser("run", parents=[named], help="measure a recipe and compare with its expectation")
    for one in (check, run):
        one.add_argument(
            "--env", type=Path, help="the engine's Python environment; default: the clone's, or this"
        )
    run.add_argument(
        "--fresh",
        action="store_true",
        help="make the pinned environment anew, in --env or for this run alone",
    )
    run.add_argument(
        "--arm", action="append", default=[], help="this arm only; may be repeated; default: all"
    )
    run.add_argument("--out", type=Path, help="folder for the results; default: a new one")


def run(arguments: argparse.Namespace) -> int:
    """Raises ValueError, in one sentence, for a recipe that cannot be read."""
    if arguments.action == "list":
        return _list(arguments)
    shelved = find(arguments.recipe, arguments.dir)
    match arguments.action:
        case "show":
            return _show(shelved, as_json=arguments.json)
        case "check":
            return _check(shelved, arguments)
        case _:
            return _run(shelved, arguments)


def _list(arguments: argparse.Namespace) -> int:
    every = folders(arguments.dir)
    rows, faults = [], doubles(every)
    for folder in every:
        try:
            rows.append(find(str(folder)).recipe)
        except ValueError as error:
            faults.append(str(error))
    if arguments.json:
        keys = ("name", "status", "summary", "date")
        print(json.dumps([{key: getattr(one, key) for key in keys} for one in rows], indent=2))
    else:
        width = max((len(one.name) for one in rows), default=0)
        for one in rows:
            print(f"{one.name:{width}}  {one.status:11}  {one.summary}")
        for status, meaning in STATUSES.items():
            print(f"  {status}: {meaning}")
    for fault in faults:
        print(f"specplug recipe: {fault}", file=sys.stderr)
    return 1 if faults else 0


def _show(shelved: Shelved, *, as_json: bool) -> int:
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(shelved.recipe), indent=1).decode())
    else:
        print("\n".join(lines(shelved)))
    return 0


def _check(shelved: Shelved, arguments: argparse.Namespace) -> int:
    recipe = shelved.recipe
    findings = [Finding("recipe", "ok", f"{recipe.name}, {recipe.status}")]
    _print(findings[0])

    def add(one: Finding) -> None:
        findings.append(one)
        _print(one)

    for one in recipe_facts.facts(recipe, shelved.folder):
        add(one)
    folder = arguments.env or recipe_engine.default_folder(recipe.engine.name)
    found = recipe_engine.environment(recipe, folder)
    for one in recipe_engine.here(recipe, found):
        add(one)
    # A list of pins that cannot be looked at keeps nothing from running.
    lacking = [one for one in findings if one.state == "absent" and one.what != "requirements"]
    if not arguments.no_engine:
        for one in recipe_engine.asked_arms(recipe, shelved.folder, found):
            add(one)
    failed = [one for one in findings if one.state == "failed"]
    if failed:
        first = f"{failed[0].what}: {failed[0].detail}"
        print(f"recipe {recipe.name}: wrong in {len(failed)} place(s), the first: {first}")
        return 1
    reached = sorted({one.detail.partition(";")[0] for one in findings if one.what.startswith("arm ")})
    asked = "its engine was not asked" if not reached else f"its commands: {', '.join(reached)}"
    able = f"it cannot run here: {lacking[0].what}: {lacking[0].detail}" if lacking else "it can run here"
    print(f"recipe {recipe.name}: no fault found; {asked}; {able}")
    return 1 if arguments.here and lacking else 0


def _print(one: Finding) -> None:
    mark = {"ok": "ok", "failed": "WRONG", "absent": "not here"}[one.state]
    print(f"{mark:8}  {one.what}: {one.detail}", flush=True)


def _run(shelved: Shelved, arguments: argparse.Namespace) -> int:
    recipe = shelved.recipe
    arms = [recipe.arm(name).name for name in arguments.arm]
    if arguments.out is not None:
        check_new_file("--out", arguments.out)
    with recipe_run.environment_folder(recipe, arguments.env, fresh=arguments.fresh) as folder:
        in_the_way = recipe_run.obstacles(shelved, folder)
        if in_the_way:
            first = in_the_way[0]
            raise RuntimeError(f"{recipe.name} cannot run here: {first.what}: {first.detail}")
        out = arguments.out or Path(tempfile.mkdtemp(prefix=f"specplug-{recipe.name}-")) / "bench"
        result = recipe_run.measure(shelved, folder, arms, out)
    verdicts = judge(recipe, result, arms or None)
    for one in verdicts:
        print(one)
    if not verdicts:
        print(f"recipe {recipe.name}: measured, nothing to compare with ({recipe.status}); results in {out}")
        return 0 if not recipe.expectations else 1
    word = "reproduced" if reproduced(verdicts) else "not reproduced"
    print(f"recipe {recipe.name}: {word}; results in {out}")
    return 0 if reproduced(verdicts) else 1
