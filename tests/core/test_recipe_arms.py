"""In what two arms of a recipe differ, as the engines read their commands."""

import shlex

import msgspec
import pytest

from specplug.recipe import Arm
from specplug.recipe_arms import differences


@pytest.mark.parametrize(
    ("one", "other", "found"),
    [
        ("--a 1 --b", "--a 2 --b", ["--a"]),
        ("--a=1", "--a 1", []),
        ("m --a 1", "n --a 1 --c", ["--c", "program"]),
        ("--speculative-algorithm DDTREE --speculative-num-draft-tokens 17", "", ["method"]),
        (
            "--speculative-algorithm DDTREE --speculative-num-draft-tokens 17",
            "--speculative-algorithm DSPARK --speculative-num-draft-tokens 8",
            ["method", "num-draft-tokens"],
        ),
        (
            """--speculative-config '{"method": "ddtree", "model": "D", "tree_budget": 16}'""",
            """--speculative-config '{"method": "ddtree", "model": "D", "tree_budget": 32}'""",
            ["tree_budget"],
        ),
        (
            """--speculative-config '{"method": "ddtree", "model": "D", "tree_budget": 16}'""",
            """--speculative-config '{"method": "ddtree", "model": "D"}'""",
            ["tree_budget"],
        ),
        (
            """--speculative-config '{"method": "ddtree", "model": "D", "tree_budget": 16}'""",
            """--speculative-config '{"method": "dflash", "model": "E", "num_speculative_tokens": 7}'""",
            ["method", "model"],
        ),
        ("m -tp 2", "m", ["--tensor-parallel-size"]),
        ("m -tp 2 --tp 3", "m --tensor_parallel_size=3", []),
        ("m --seed 1 -q fp8", "m --seed 1 -qint4", ["--quantization"]),
        ("m --a -1", "m --a -0.5", ["--a"]),
        ("m --seed 1 x", "m --seed 2 y", ["--seed", "program"]),
        ("m --sizes 1 2 --lora-paths a b", "m --sizes 1 4 --lora-paths a b", ["--sizes"]),
        ("m --speculative_config.method=mtp", "m", ["method"]),
        ("m --specul {}", "m", ["method"]),
        ("m --spec-model D", "m", ["method"]),
        ("m --speculative-algo DFLASH", "m --speculative-algorithm DFLASH", []),
        (
            """--speculative_config '{"method": "ddtree", "model": "D", "tree_budget": 16}'""",
            "-sc.method ddtree --speculative-config.model D --speculative-config.tree_budget=16",
            [],
        ),
        ('--c \'{"a": {"b": ["1", "2"]}}\'', "--c.a.b+ 1 --c.a.b+=2", []),
    ],
)
def test_a_setting_is_a_flag_a_variable_or_a_key_and_a_method_brings_its_own(one, other, found):
    first, second = (Arm(name="x", command=shlex.split(text)) for text in (one, other))
    assert differences(first, second) == found
    assert differences(second, first) == found


def test_environment_variables_are_settings_too():
    plain = Arm(name="plain", command=["serve"], environment={"A": "1"})
    drafted = Arm(
        name="drafted",
        command=["serve", "--speculative-algorithm", "DSPARK"],
        environment={"A": "1", "SGLANG_RAGGED_VERIFY_MODE": "compact"},
    )
    static = msgspec.structs.replace(drafted, environment={"A": "1", "SGLANG_RAGGED_VERIFY_MODE": "static"})
    assert differences(plain, drafted) == ["method"]
    assert differences(drafted, static) == ["SGLANG_RAGGED_VERIFY_MODE"]
    assert differences(plain, msgspec.structs.replace(plain, environment={"A": "2"})) == ["A"]
