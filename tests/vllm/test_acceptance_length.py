"""On held-out prompts a tree of 16 nodes commits more tokens a target forward than the drafter's chain."""

import pytest
from comparing import differences
from engine_rig import engine, tree

from specplug import models

pytestmark = pytest.mark.vllm

PROMPTS = 16
TOKENS = 32
SET = "deep-thin"


@pytest.mark.parametrize("draft", ["dflash", "dspark"])
def test_tree_accepts_more_than_the_stock_chain(plain, draft):
    from prompts import tokenizer
    from vllm import SamplingParams

    encode = tokenizer(SET).encode
    prompts = [encode(entry.prompt, add_special_tokens=False).ids for entry in models.prompts()[:PROMPTS]]
    params = SamplingParams(
        temperature=0, max_tokens=TOKENS
    )  # answers end by themselves, in the middle of a run
    expected = plain.generate(prompts, params, name=SET)
    assert sum(output.finish == "stop" for output in expected) >= PROMPTS // 4

    chain = {"method": draft, "model": str(models.path(SET, draft)), "num_speculative_tokens": 7}
    accepted_length = {}
    for shape, config in (("chain", chain), ("tree", tree(draft, 16, name=SET))):
        with engine(config, name=SET) as running:
            assert differences(expected, running.generate(prompts, params)) == []
            accepted_length[shape] = running.counters.accepted_length
    print(f"{draft}: accepted length {accepted_length}")
    assert accepted_length["tree"] > accepted_length["chain"] > 1
