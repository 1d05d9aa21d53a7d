"""The rig itself: stock SGLang under it computes what SGLang computes, before any of our code is loaded.

Plain decoding is held against an implementation that shares nothing with SGLang, DSPARK against plain.
"""

import json
import os
import struct
import subprocess
import sys
from types import SimpleNamespace
from unittest import mock

import local_models
import pytest
import torch
from comparing import differences
from prompts import varied
from sglang_rig import MAX_RUNNING, Reference, accepted_length, dspark

from specplug.local.loop import generate
from specplug.local.method import Method

pytestmark = pytest.mark.sglang

TOKENS = 24
GREEDY = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}
WINDOW = 8  # rows of the shipped draft's chain, the root counted
# A batch of n rows takes 2 ms + 1 ms a row: dear enough that rows worth little are not verified.
STEPS = {
    "sample_batch_tokens": [8, 16, 32, 64],
    "sample_steps_per_sec": [100, 56, 29, 15],
    "max_batch_tokens": 64,
}


def local(prompts, limit=TOKENS):
    return [
        answer
        for start in range(0, len(prompts), MAX_RUNNING)
        for answer in generate(
            local_models.target(), prompts[start : start + MAX_RUNNING], method=Method("plain"), limit=limit
        ).tokens
    ]


def test_plain_decoding_is_that_of_transformers(plain):
    outputs = plain.generate(varied(), GREEDY)
    assert [output.ids for output in outputs] == local(varied())
    assert {output.finish for output in outputs} == {"length"}
    assert {output.verifies for output in outputs} == {0}


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    path = tmp_path_factory.mktemp("sps") / "sps.json"
    path.write_text(json.dumps(STEPS))
    return str(path)


@pytest.mark.parametrize("mode", ["static", "compact"])
def test_stock_dspark_is_plain_decoding(plain, table, mode):
    expected = plain.generate(varied(), GREEDY)
    flags = {} if mode == "static" else {"speculative_dspark_sps_table_path": table}
    drafted = Reference(dspark(**flags), env={"SGLANG_RAGGED_VERIFY_MODE": mode})
    try:
        outputs = drafted.generate(varied(), GREEDY)
    finally:
        drafted.close()
    assert differences(expected, outputs) == []
    assert accepted_length(outputs) > 1.5
    caps = {output.meta.get("spec_cap_length", WINDOW) for output in outputs}
    assert caps == {WINDOW} if mode == "static" else max(caps) < WINDOW  # rows a request verified, on average


def murmur3(data: bytes, seed: int = 0) -> int:
    """MurmurHash3_x86_32 of any bytes, on Python's integers."""

    def rotated(word, bits):
        return (word << bits | word >> 32 - bits) & 0xFFFFFFFF

    state, whole = seed, len(data) // 4 * 4
    for (word,) in struct.iter_unpack("<I", data[:whole]):
        state ^= rotated(word * 0xCC9E2D51 & 0xFFFFFFFF, 15) * 0x1B873593 & 0xFFFFFFFF
        state = (rotated(state, 13) * 5 + 0xE6546B64) & 0xFFFFFFFF
    if tail := int.from_bytes(data[whole:], "little"):
        state ^= rotated(tail * 0xCC9E2D51 & 0xFFFFFFFF, 15) * 0x1B873593 & 0xFFFFFFFF
    state ^= len(data)
    state = (state ^ state >> 16) * 0x85EBCA6B & 0xFFFFFFFF
    state = (state ^ state >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
    return state ^ state >> 16


def test_seeded_noise_is_murmur_hash():
    import sgl_kernel

    assert murmur3(b"Hello, world!") == 0xC0363E43  # published test vectors
    assert murmur3(b"aaaa", 0x9747B28C) == 0x5A97808A
    seeds, positions, columns = [0, 7, 2**33 + 5, -3], [0, 1, 40, 2**31], list(range(9))
    got = sgl_kernel.murmur_hash32(torch.tensor(seeds), torch.tensor(positions), torch.tensor(columns))
    assert got.tolist() == [
        [murmur3(struct.pack("<QII", seed % 2**64, position, column)) for column in columns]
        for seed, position in zip(seeds, positions, strict=True)
    ]


@pytest.mark.parametrize(("asked", "kernels"), [("1", 0), ("triton", 1)])
def test_the_attention_that_is_asked_for_is_the_one_that_runs(monkeypatch, asked, kernels):
    """Two ragged windows behind prefixes, each row seeing its prefix and some of its window: torch's answer
    from either, SGLang's own kernel called where it is asked for and only there."""
    from sglang.kernels.ops.attention import extend_attention
    from sglang.srt.layers.radix_attention import AttentionType

    from specplug_rig_sglang import attention

    lens, prefixes, heads, size = [3, 1], [5, 2], 2, 16
    g = torch.Generator().manual_seed(0)
    q, keys, values = (torch.randn(rows, heads, size, generator=g) for rows in (sum(lens), 11, 11))
    sees = [torch.eye(n, prefix + n).roll(prefix, 1).bool() for n, prefix in zip(lens, prefixes, strict=True)]
    for mask, prefix in zip(sees, prefixes, strict=True):
        mask[:, :prefix] = True
    tables = torch.zeros(2, 8, dtype=torch.int64)
    tables[0], tables[1, :3] = torch.randperm(8, generator=g), torch.tensor([8, 9, 10])
    layer = SimpleNamespace(
        tp_q_head_num=heads, tp_k_head_num=heads, qk_head_dim=size, v_head_dim=size, scaling=0.25,
        layer_id=0, attn_type=AttentionType.DECODER,
    )  # fmt: skip
    batch = SimpleNamespace(
        forward_mode=SimpleNamespace(is_target_verify=lambda: True), batch_size=2,
        seq_lens=torch.tensor(prefixes), req_pool_indices=torch.tensor([0, 1]),
        spec_info=SimpleNamespace(
            draft_token_num=3, custom_mask=torch.cat([mask.flatten() for mask in sees]),
            ragged_verify_layout=SimpleNamespace(verify_lens=torch.tensor(lens)),
        ),
    )  # fmt: skip
    backend = SimpleNamespace(
        req_to_token_pool=SimpleNamespace(req_to_token=tables),
        token_to_kv_pool=SimpleNamespace(get_key_buffer=lambda i: keys, get_value_buffer=lambda i: values),
    )
    monkeypatch.setenv("SPECPLUG_RIG_SGLANG", asked)
    with mock.patch.object(
        extend_attention, "extend_attention_fwd", wraps=extend_attention.extend_attention_fwd
    ) as kernel:
        got = attention.ReferenceAttention.forward_extend(backend, q, None, None, layer, batch)
    assert kernel.call_count == kernels
    expected = []
    for start, mask, table, length in zip([0, 3], sees, tables, [8, 3], strict=True):
        own = q[start : start + len(mask)].transpose(0, 1)
        k, v = (one[table[:length]].transpose(0, 1) for one in (keys, values))
        scores = (own @ k.transpose(1, 2) * 0.25).masked_fill(~mask, float("-inf"))
        expected.append((scores.softmax(-1) @ v).transpose(0, 1).flatten(1))
    torch.testing.assert_close(got, torch.cat(expected), atol=1e-5, rtol=1e-4)


PROBE = "import importlib.util; print(importlib.util.find_spec('sgl_kernel') is not None)"


@pytest.mark.parametrize(("asked", "visible"), [(None, "False"), ("1", "True"), ("triton", "True")])
def test_the_rig_is_there_only_where_it_is_asked_for(asked, visible):
    environment = {key: value for key, value in os.environ.items() if key != "SPECPLUG_RIG_SGLANG"}
    environment |= {} if asked is None else {"SPECPLUG_RIG_SGLANG": asked}
    done = subprocess.run(
        [sys.executable, "-c", PROBE], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == visible
