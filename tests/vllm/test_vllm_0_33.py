"""vLLM 0.33, which cannot run here: what the adapter overrides and calls fits the signatures of its sources.

vllm_0_33_signatures.txt is written by signatures.py. The installed release goes through the same checks.
"""

import importlib.util
from collections import deque
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import signatures
import torch

pytestmark = pytest.mark.vllm

EXTRACT = Path(__file__).with_name("vllm_0_33_signatures.txt")


@pytest.fixture(scope="module")
def installed():
    return signatures.Sources(Path(importlib.util.find_spec("vllm").origin).parent)


@pytest.fixture(scope="module")
def uses(installed):
    return list(signatures.uses(installed))


@pytest.fixture(scope="module")
def new():
    return signatures.read(EXTRACT)


def test_the_extract_has_every_name(uses, new):
    """Run signatures.py again where this fails; its first lines say how."""
    assert sorted(new) == sorted({use.name for use in uses})
    assert len(uses) > 80


def test_the_hook_table_names_every_override(uses):
    """What `specplug doctor` and every start check; by the last name, as a row may stand for two classes."""
    from specplug_vllm.hooks import HOOKS

    named = {hook.symbol.rpartition(".")[2] for hook in HOOKS}
    overridden = {use.symbol[1].rpartition(".")[2] for use in uses if use.override is not None}
    assert overridden - named == {"__repr__"}  # of the config, for the log
    assert len(overridden) > 25


def test_the_installed_release_fits(uses, installed):
    """What is served is not called wrong: the check itself is right."""
    assert [said for use in uses if (said := signatures.wrong(use, installed.signature(use.symbol)))] == []


def test_vllm_0_33_fits(uses, new):
    assert [said for use in uses if (said := signatures.wrong(use, new[use.name]))] == []


@pytest.mark.parametrize(
    ("name", "old", "changed"),
    [
        ("DFlashSpeculator._generate_draft", "num_reqs,", "num_requests,"),
        ("DFlashSpeculator._generate_draft", "self, num_reqs,", "self, stream, num_reqs,"),
        ("DefaultModelState.prepare_inputs", "req_states", "req_states, step"),
        ("DefaultModelState.add_request", "req_index, new_req_data", "new_req_data, req_index"),
        ("StructuredOutputManager.grammar_bitmask", "requests,", "requests, device=0, *,"),
        ("compute_topk_scores", "max_per_req_token_ids", "most_token_ids"),
        ("Sampler.sample", "return_logprobs", "want_logprobs"),
        ("get_num_sampled_and_rejected", "prefill_len", "prefill_len, device"),
        ("AdaptiveVerificationManager.__init__", "max_total_logits", "max_total_logits, device"),
        ("PenaltiesState.apply", "self, logits, ctx", "absent"),
    ],
)
def test_a_change_is_noticed(uses, new, name, old, changed):
    """The control: each of the three kinds of uses, and a name that is gone."""
    full = next(one for one in new if one.endswith(f":{name}"))
    assert old in new[full]
    text = new[full].replace(old, changed, 1) if changed != signatures.ABSENT else changed
    said = [signatures.wrong(use, text) for use in uses if use.name == full]
    assert any(said)


class Grammar:
    """Allows one token: its number."""

    def __init__(self, number):
        self.number = number

    def is_terminated(self):
        return False

    def fill_bitmask(self, mask, row):
        mask[row] = 1 << self.number


@pytest.mark.parametrize(("fixed", "second"), [(False, 1), (True, 4)])
def test_rows_of_the_grammar_mask(monkeypatch, fixed, second):
    """Requests without drafts: one row each in 0.32; in 0.33 (`mask_stride`) as many as could be drafted."""
    from specplug_vllm import grammar

    monkeypatch.setattr(grammar, "FIXED_ROWS", fixed)
    manager = object.__new__(grammar.TreeStructuredOutput)
    manager.parents_of, manager._full_mask, manager._grammar_bitmask = {}, -1, None
    manager.vllm_config = SimpleNamespace(
        num_speculative_tokens=3, scheduler_config=SimpleNamespace(max_num_seqs=4)
    )
    manager.backend = SimpleNamespace(
        allocate_token_bitmask=lambda rows: torch.zeros((rows, 1), dtype=torch.int32)
    )
    requests = {
        name: SimpleNamespace(structured_output_request=SimpleNamespace(grammar=Grammar(number)))
        for number, name in enumerate("ab")
    }
    mask = manager.grammar_bitmask(requests, ["a", "b"], {})
    assert mask.shape == (2 * second, 1)
    assert mask[[0, second], 0].tolist() == [1, 2]
    assert isinstance(mask, np.ndarray)


def test_a_step_whose_drafts_nobody_can_use_does_not_shift_the_shapes():
    """0.33 tells such a step 0 rows though trees were decided for it; the next steps keep their own shape."""
    from specplug_vllm.manager import BudgetManager

    manager = object.__new__(BudgetManager)
    decided = iter(["tree", "plain", "chain"])
    manager.policy = SimpleNamespace(draft=lambda requests, context: next(decided))
    manager.budget, manager._context, manager._peaks = 8, 0.0, {}
    manager._in_flight, manager._shapes = deque(), deque()
    assert [manager.draft_rows(2) for _ in range(3)] == [8, 0, 8]
    assert [manager.coming_shape(2, rows) for rows in (0, 0, 8)] == ["plain", "plain", "chain"]
