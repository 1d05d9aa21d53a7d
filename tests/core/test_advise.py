"""`specplug advise`: the setting, the gain, when not to speculate, and the command line."""

import functools
import json

import commands
import pytest

from specplug.advise import advise, command_line, over_all, sentences
from specplug.config import parse_options
from specplug.contest import Cell
from specplug.cost import from_probes, write_cost_table
from specplug.cost_models import model_table
from specplug.provenance import Provenance

run = functools.partial(commands.run, "advise")


def cells(concurrency: int = 8, **rates: float) -> dict[str, Cell]:
    """Rates by policy; a tree is written tree_8."""
    named = {name.replace("_", " "): rate for name, rate in rates.items()}
    return {name: Cell(name, concurrency, rate, 1.0, 0.0, {}) for name, rate in named.items()}


@pytest.mark.parametrize(
    ("rates", "setting", "next_best"),
    [
        ({"plain": 100, "chain": 200, "tree_8": 150, "ours": 250}, "ours", "chain"),
        ({"plain": 100, "chain": 200, "tree_8": 150, "ours": 201}, "chain", "ours"),  # as good, and simpler
        ({"plain": 100, "chain": 50, "tree_8": 50, "ours": 100.5}, "plain", "ours"),
        ({"plain": 100, "chain": 200, "tree_8": 300, "tree_16": 301, "ours": 250}, "tree 8", "tree 16"),
    ],
)
def test_the_simplest_of_the_best_is_advised(rates, setting, next_best):
    one = advise(cells(**rates))
    assert (one.setting, one.next_best) == (setting, next_best)
    rate = rates[setting.replace(" ", "_")]
    assert one.over_plain == rate / 100
    assert one.over_next == rate / rates[next_best.replace(" ", "_")]


def test_one_setting_for_all_loads():
    """The chain wins one load and loses the other; what is never best anywhere can still be best over all."""
    low = cells(1, plain=100, chain=300, tree_8=280, ours=290)
    high = cells(64, plain=1000, chain=500, tree_8=700, ours=1000)
    assert over_all([*low.values(), *high.values()]) == "ours"
    assert over_all(list(low.values())) == "chain"
    text = "\n".join(sentences([advise(low), advise(high)], "ours", [1, 64]))
    assert "Do not speculate at concurrency 64" in text


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("tree 16", {"method": "ddtree", "model": "D", "num_speculative_tokens": 7, "tree_budget": 16}),
        ("chain", {"method": "dspark", "model": "D", "num_speculative_tokens": 7}),
        (
            "ours",
            {
                "method": "ddtree", "model": "D", "num_speculative_tokens": 7, "tree_budget": 64,
                "cost_table": "t.json",
            },
        ),
    ],
)  # fmt: skip
def test_the_command_line_is_a_legal_configuration(setting, expected):
    line = command_line(setting, draft="D", kind="dspark", depth=7, budget=64, cost_table="t.json")
    config = json.loads(line.partition("'")[2].rstrip("'"))
    assert config == expected
    if config["method"] == "ddtree":
        parse_options(config)  # refuses an unknown key or a wrong value


def test_plain_needs_no_configuration():
    line = command_line("plain", draft="D", kind="dspark", depth=7, budget=64, cost_table="t.json")
    assert "without --speculative-config" in line


def test_a_run_says_where_not_to_speculate(capsys):
    argv = ("--cost", "compute-bound", "--concurrency", 1, 64, "--tokens", 4000)
    assert run(*argv) == 0
    text = capsys.readouterr().out
    assert "Do not speculate at concurrency 64: nothing beats plain decoding." in text
    assert "this advice is from a model" in text
    assert run(*argv, "--json") == 0
    advice = json.loads(capsys.readouterr().out)["advice"]
    assert [one["setting"] for one in advice] == ["ours", "plain"]
    assert advice[0]["over_plain"] > 1.2


@pytest.mark.parametrize(
    ("engine", "fits"), [("local", False), ("sglang", False), ("vllm", True), ("", True)]
)
def test_a_table_of_another_engine_is_not_for_the_command(tmp_path, capsys, engine, fits):
    file, model = tmp_path / "t.json", model_table("compute-bound")
    write_cost_table(file, from_probes(model.verify, model.draft, provenance=Provenance(engine=engine)))
    assert run("--cost", file, "--concurrency", 1, "--tokens", 4000) == 0
    said = capsys.readouterr().out
    assert "ours" in said
    assert (f'"cost_table": "{file}"' in said) == fits
    assert ("specplug profile --engine vllm makes the one to serve with" in said) == (not fits)


def test_a_memory_bound_machine_gets_trees(capsys):
    assert run("--cost", "memory-bound", "--concurrency", 4, "--tokens", 4000, "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["advice"][0]["setting"] in ("tree 64", "ours")
    assert result["advice"][0]["over_plain"] > 2.5
    assert '"method": "ddtree"' in result["command"]


def test_arguments_that_cannot_work_are_refused(tmp_path, capsys):
    assert run("--concurrency", 0) == 2
    assert "--concurrency: expected 1..4096" in capsys.readouterr().err
    assert run("--draft", tmp_path) == 2
    assert str(tmp_path) in capsys.readouterr().err
