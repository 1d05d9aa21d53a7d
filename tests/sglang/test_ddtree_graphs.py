"""Test doubles where there is no GPU: what SGLang captures, and what its Triton backend is told."""

import inspect
from types import SimpleNamespace

import pytest
import torch

from specplug_sglang import config, install

pytestmark = pytest.mark.sglang


class TritonAttnBackend:
    """Stands for SGLang's: it is told apart by its name."""


@pytest.fixture
def captured(monkeypatch):
    """The verify input that SGLang's own runner captures for a target on Triton."""
    from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner
    from sglang.srt.speculative import dflash_utils

    stock = inspect.unwrap(dflash_utils.resolve_dflash_verify_mask_policy)
    monkeypatch.setattr(
        dflash_utils,
        "resolve_dflash_verify_mask_policy",
        lambda backend: install._mask_policy(stock, backend),
    )

    def capture(*, active, is_draft_worker=False):
        monkeypatch.setattr(config, "active", lambda: active)
        kind = SimpleNamespace(
            is_eagle=lambda: False, is_standalone=lambda: False, is_dflash_family=lambda: True
        )
        runner = SimpleNamespace(
            model_runner=SimpleNamespace(
                spec_algorithm=kind, attn_backend=TritonAttnBackend(), is_draft_worker=is_draft_worker
            ),
            captured_req_width=17,
            buffers=SimpleNamespace(custom_mask=torch.ones(3, dtype=torch.bool)),
            _capture_ragged_verify_layout=lambda num_tokens: None,
        )
        return DecodeCudaGraphRunner.get_spec_info(runner, 34).custom_mask

    return capture


def test_a_verify_is_captured_with_its_mask(captured):
    assert captured(active=True) is not None
    assert captured(active=True, is_draft_worker=True) is None  # the block has none


def test_without_ddtree_it_is_captured_as_ever(captured):
    assert captured(active=False) is None


@pytest.mark.parametrize(("draft", "active", "rows"), [(True, True, 8), (False, True, 17), (True, False, 17)])
def test_a_fill_in_block_is_as_wide_as_it_is(monkeypatch, draft, active, rows):
    monkeypatch.setattr(config, "active", lambda: active)
    monkeypatch.setattr(config, "settings", lambda: SimpleNamespace(query_rows=8))
    runner = SimpleNamespace(is_draft_worker=draft)
    assert install._decode_rows(lambda self, **_: 17, runner, num_draft_tokens=None) == rows


def test_the_algorithm_answers_for_window_and_block(monkeypatch):
    from specplug_sglang.algorithm import TreeAlgorithm

    algorithm = TreeAlgorithm("DDTREE", lambda server_args: None, supports_overlap=True)
    monkeypatch.setattr(config, "settings", lambda: SimpleNamespace(query_rows=7))
    assert algorithm.get_num_tokens_per_req_for_target_verify(17, is_draft_worker=False) == 17
    assert algorithm.get_num_tokens_per_req_for_target_verify(17, is_draft_worker=True) == 7
    assert [algorithm.is_dspark(), algorithm.is_dflash_family(), algorithm.supports_overlap] == [True] * 3
    assert not any([algorithm.need_topk(), algorithm.carries_draft_hidden_states(), algorithm.is_eagle()])


def test_triton_is_told_where_ragged_rows_and_bits_begin():
    from sglang.srt.speculative.ragged_verify import RaggedVerifyLayout

    from specplug_sglang.verify_input import point_at_rows

    lens, prefixes = [1, 5, 17, 3], [40, 0, 7, 129]
    layout = RaggedVerifyLayout.from_verify_lens(
        verify_lens_cpu=lens, device=torch.device("cpu"), grid=[sum(lens)]
    )
    whole = SimpleNamespace(qo_indptr=torch.arange(5) * 17, mask_indptr=None, max_extend_len=17)
    point_at_rows(whole, layout, torch.tensor(prefixes, dtype=torch.int32))
    rows, bits = [0], [0]
    for length, prefix in zip(lens, prefixes, strict=True):
        rows.append(rows[-1] + length)
        bits.append(bits[-1] + length * (prefix + length))
    assert whole.qo_indptr.tolist() == rows
    assert whole.mask_indptr.tolist() == bits
    assert (whole.qo_indptr.dtype, whole.mask_indptr.dtype) == (torch.int32, torch.int64)
