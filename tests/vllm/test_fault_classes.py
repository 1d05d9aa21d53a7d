"""Kinds of mistakes seen in other speculative decoders, and the tests that keep each out of ours on vLLM.

fault_classes.txt has a line for every way in which a class of faults showed: the tests, in whatever folder,
or a sentence why there is none. What no other file tests is tested below, named after its class.
"""

import string
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from fault_table import Check, absent, checks, fault

from specplug import models

pytestmark = pytest.mark.vllm

TABLE = checks("vllm")


def test_no_class_is_missing() -> None:
    titles = list(dict.fromkeys(one.name for one in TABLE))
    assert [title.partition("-")[0] for title in titles] == list(string.ascii_uppercase[:23])  # A to W


@pytest.mark.parametrize("one", TABLE, ids=str)
def test_every_fault_has_tests_or_a_reason(one: Check) -> None:
    assert fault(one) == ""


def test_a_line_that_proves_nothing_would_be_noticed() -> None:
    there = "vllm/test_exactness::test_greedy_equals_plain"
    gone = (
        "vllm/test_exactness::test_is_gone",
        "vllm/test_gone::test_greedy_equals_plain",
        "vllm/test_hooks",
        "vllm/test_fault_classes::engine_config",  # no test
    )
    assert absent((there, *gone)) == list(gone)
    line = Check("A-class", "a fault", (there,), "")
    assert fault(line) == ""
    for wrong in ({"tests": (there, there)}, {"tests": ()}, {"tests": (), "reason": "None of ours."}):
        assert fault(line._replace(**wrong)) != ""


def asked_for(**parameters: Any) -> Any:
    from vllm import SamplingParams

    return SamplingParams(**parameters)


def engine_config(*, reasoning_parser: str = "", scheduler_cls: str | None = None) -> Any:
    from specplug_vllm.config import SCHEDULER

    return SimpleNamespace(
        scheduler_config=SimpleNamespace(scheduler_cls=scheduler_cls or SCHEDULER),
        structured_outputs_config=SimpleNamespace(reasoning_parser=reasoning_parser),
    )


def test_g_a_grammar_beside_a_reasoning_parser_gets_chains() -> None:
    """Where a grammar starts is looked for among rows in line; without a parser trees have their masks."""
    from vllm.sampling_params import StructuredOutputsParams

    from specplug_vllm.model_state import chain_reasons

    grammar = asked_for(structured_outputs=StructuredOutputsParams(regex="a+"))
    assert chain_reasons(grammar, engine_config()) == []
    assert chain_reasons(grammar, engine_config(reasoning_parser="qwen3")) == ["structured_outputs"]
    assert chain_reasons(grammar, engine_config(scheduler_cls="their.Scheduler")) == ["structured_outputs"]
    assert chain_reasons(asked_for(), engine_config(reasoning_parser="qwen3")) == []


def test_h_a_thinking_budget_gets_chains() -> None:
    from specplug_vllm.model_state import chain_reasons

    assert chain_reasons(asked_for(thinking_token_budget=5), engine_config()) == ["thinking_token_budget"]
    assert chain_reasons(asked_for(max_tokens=5), engine_config()) == []


@pytest.mark.parametrize(
    ("facts", "named"),
    [
        ({}, None),
        ({"is_hybrid": True}, "recurrent layers"),
        ({"is_attention_free": True}, "recurrent layers"),
        ({"use_mla": True}, "MLA"),
        ({"is_encoder_decoder": True}, "encoder-decoder"),
    ],
    ids=lambda value: next(iter(value), "none of them") if isinstance(value, dict) else "",
)
def test_i_targets_whose_state_cannot_follow_a_branch_are_refused(
    facts: dict[str, bool], named: str | None
) -> None:
    from vllm.config import ParallelConfig

    from specplug_vllm.refusals import check_engine

    ordinary = dict.fromkeys(("is_hybrid", "is_attention_free", "use_mla", "is_encoder_decoder"), False)
    model = SimpleNamespace(
        **{**ordinary, **facts},
        get_sliding_window=lambda: None,
        supports_multimodal_inputs=False,
        uses_mrope=False,
    )
    args = SimpleNamespace(kv_cache_dtype="auto")
    if named is None:
        check_engine(args, model, ParallelConfig())
    else:
        with pytest.raises(ValueError, match=f"method ddtree refuses: .*{named}"):
            check_engine(args, model, ParallelConfig())


def test_n_a_scheduler_of_the_user_is_kept_and_said(rig: None) -> None:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.plugins import load_general_plugins

    import specplug_vllm.config

    load_general_plugins()
    theirs = "vllm.v1.core.sched.scheduler.Scheduler"
    speculative = {"method": "ddtree", "model": str(models.path("quick", "dspark"))}
    settings = {"model": str(models.path("quick", "target")), "dtype": "float32", "max_model_len": 256}
    for wanted, times in ((theirs, 1), (None, 0)):
        with mock.patch.object(specplug_vllm.config, "logger") as logger:
            args = EngineArgs(**settings, scheduler_cls=wanted, speculative_config=speculative)
            config = args.create_engine_config()
        assert config.scheduler_config.scheduler_cls == (wanted or specplug_vllm.config.SCHEDULER)
        assert logger.warning.call_count == times
        assert not times or "--scheduler-cls is kept" in logger.warning.call_args.args[0]
