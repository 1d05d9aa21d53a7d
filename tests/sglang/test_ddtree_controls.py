"""What test_ddtree.py finds equal is not equal where the tree is verified, walked or committed wrongly."""

import json
from pathlib import Path

import pytest
from comparing import differences
from prompts import short
from sglang_rig import accepted_length, engine, tree

pytestmark = pytest.mark.sglang

GREEDY = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}
BREAKING = ["cache", "parent", "linear positions", "chain mask"]
FAULTS = Path(__file__).parent / "tree_faults.py"


def emptied(running):
    """Empty the radix cache; SGLang refuses while the last request's batch is being put away."""
    for _ in range(100):
        if running.sglang.flush_cache().success:
            return
    pytest.fail("SGLang does not empty its cache")


@pytest.mark.parametrize(("draft", "mode"), [("dspark", "static"), ("dflash", "compact")])
def test_controls(plain, tmp_path, draft, mode):
    fault = tmp_path / "fault"
    fault.write_text("")
    file = tmp_path / "specplug.json"
    ragged = {"explore": True, "record": str(tmp_path / "record")}
    file.write_text(json.dumps(ragged if mode == "compact" else {}))
    env = {
        "SPECPLUG_TEST_FAULT": str(fault),
        "SPECPLUG_CONFIG": str(file),
        "SGLANG_RAGGED_VERIFY_MODE": mode,
    }
    prompts = short(12)
    expected = plain.generate(prompts, GREEDY)
    with engine(tree(draft, 16), env=env, load=FAULTS) as running:

        def outputs(name):
            fault.write_text(name)
            emptied(running)
            return running.generate(prompts, GREEDY)

        right = outputs("")
        assert differences(expected, right) == []
        for name in BREAKING:
            assert len(differences(expected, outputs(name))) >= 3, name
        # Wrong features cost acceptance, not exactness: the target decides.
        features = outputs("features")
        assert differences(expected, features) == []
        if mode == "static":  # where node totals are drawn at random, so is the accepted length
            assert accepted_length(features) < accepted_length(right) - 0.15
        assert differences(expected, outputs("")) == []
