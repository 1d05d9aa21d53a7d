"""Cost table files: SGLang's two formats to the digit, our own, and everything that is refused."""

import json
import math
import os

import msgspec
import numpy as np
import pytest

from specplug.cost import (
    Provenance,
    from_additive_table,
    from_probes,
    from_step_table,
    read_cost_table,
    to_additive_table,
    to_step_table,
    write_cost_table,
)
from specplug.cost_curves import Probe
from specplug.cost_formats import AdditiveTable, StepTable, write_file

STEP = {
    "sample_batch_tokens": [8, 64, 256], "sample_steps_per_sec": [100.0, 80.0, 20.0], "max_batch_tokens": 512,
}  # fmt: skip
ADDITIVE = {
    "bias_seconds": 0.010, "bs_probes": [1, 4, 16], "alpha_seconds": [0.0, 0.003, 0.006],
    "m_probes": [8, 64], "theta_seconds": [0.0, 0.020],
}  # fmt: skip


def measured():
    """A table with everything in it; whole numbers where floats are expected, as a caller may write them."""
    verify = [
        Probe(
            shape=shape, requests=r, tokens=r * w, context=c, median_seconds=0.01 + 0.001 * r * w,
            spread_seconds=1e-5, repeats=7,
        )
        for shape in ("chain", "tree") for r in (1, 4) for w in (1, 8, 17) for c in (64, 512)
    ]  # fmt: skip
    draft = [Probe(shape="tree", requests=r, tokens=0, context=64, median_seconds=0.002 * r) for r in (1, 4)]
    facts = Provenance(engine="vllm", engine_version="0.32.0", device="CPU", context=512, date="2026-11-29")
    return from_probes(verify, draft, provenance=facts, graph_sizes=[1, 2, 4, 8])


def write(tmp_path, content) -> str:
    file = tmp_path / "table.json"
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(file)


def sglang_step_seconds(table: dict, rows: int) -> float:
    """SGLang's own rule, written again: bisect_right - 1, clamped."""
    below = [i for i, tokens in enumerate(table["sample_batch_tokens"]) if tokens <= rows]
    return 1 / table["sample_steps_per_sec"][below[-1] if below else 0]


def test_step_table_is_a_floor_lookup(tmp_path):
    table = read_cost_table(write(tmp_path, STEP))
    rows = [1, 7, 8, 9, 63, 64, 65, 255, 256, 257, 512, 100_000]
    expected = [0.01] * 5 + [0.0125] * 3 + [0.05] * 4  # by hand
    for requests, context in ((1, 0), (100, 9000)):
        assert table.verify_seconds(requests, np.array(rows), context=context).tolist() == expected
    assert table.draft_seconds(4) == 0


def test_step_table_with_a_rate_that_rises_is_taken_at_its_word(tmp_path):
    """No pooling: the foreign format means what its lookup says."""
    raw = STEP | {"sample_steps_per_sec": [100.0, 400.0, 20.0]}
    table = read_cost_table(write(tmp_path, raw))
    rows = np.arange(1, 600)
    assert table.verify_seconds(3, rows).tolist() == [sglang_step_seconds(raw, row) for row in rows]


def test_additive_table_is_the_formula(tmp_path):
    table = read_cost_table(write(tmp_path, ADDITIVE))
    by_hand = {
        (1, 8): 0.010, (1, 64): 0.030, (1, 36): 0.020, (4, 8): 0.013, (4, 1): 0.013, (2, 8): 0.011,
        (10, 22): 0.010 + 0.0045 + 0.005, (16, 64): 0.036, (99, 999): 0.036,
    }  # fmt: skip
    for (requests, rows), seconds in by_hand.items():
        assert table.verify_seconds(requests, np.array([rows])) == pytest.approx([seconds], rel=1e-14)
    for requests in range(1, 20):
        for rows in range(1, 80, 3):
            alpha = np.interp(requests, ADDITIVE["bs_probes"], ADDITIVE["alpha_seconds"])
            theta = np.interp(rows, ADDITIVE["m_probes"], ADDITIVE["theta_seconds"])
            expected = ADDITIVE["bias_seconds"] + alpha + theta
            assert table.verify_seconds(requests, np.array([rows])) == pytest.approx([expected], rel=1e-14)


def test_both_formats_come_back_as_they_were():
    step = msgspec.convert(STEP | {"max_batch_tokens": 256}, StepTable)
    back = to_step_table(from_step_table(step))
    assert back.sample_batch_tokens == step.sample_batch_tokens
    assert back.sample_steps_per_sec == pytest.approx(step.sample_steps_per_sec, rel=1e-15)
    additive = msgspec.convert(ADDITIVE, AdditiveTable)
    again = to_additive_table(from_additive_table(additive))
    assert (again.bs_probes, again.m_probes) == (additive.bs_probes, additive.m_probes)
    for name in ("bias_seconds", "alpha_seconds", "theta_seconds"):
        assert getattr(again, name) == pytest.approx(getattr(additive, name), abs=1e-15)


@pytest.mark.parametrize("raw", [STEP, ADDITIVE])
def test_a_foreign_table_keeps_its_values_in_our_file(tmp_path, raw):
    foreign = read_cost_table(write(tmp_path, raw))
    write_cost_table(tmp_path / "ours.json", foreign)
    ours = read_cost_table(tmp_path / "ours.json")
    rows = np.arange(1, 700)
    for requests in (1, 3, 40):
        assert (ours.verify_seconds(requests, rows) == foreign.verify_seconds(requests, rows)).all()


def test_foreign_tables_may_have_more_keys(tmp_path):
    read_cost_table(write(tmp_path, STEP | {"model": "m", "probes": [1]}))
    read_cost_table(write(tmp_path, ADDITIVE | {"fit": {"r2": 0.9}}))


def test_our_file_comes_back_as_it_was(tmp_path):
    table = measured()
    write_cost_table(tmp_path / "t.json", table)
    back = read_cost_table(tmp_path / "t.json")
    assert back == table
    assert back != from_probes(table.verify, table.draft, provenance=table.provenance)  # no graph sizes
    rows = np.arange(1, 100)
    assert (back.verify_seconds(3, rows, context=99) == table.verify_seconds(3, rows, context=99)).all()


def test_sglang_reads_our_file_as_its_step_table(tmp_path):
    write_cost_table(tmp_path / "t.json", measured())
    text = (tmp_path / "t.json").read_text()
    assert "bias_seconds" not in text
    raw = msgspec.json.decode(text, type=StepTable)  # tolerant of the other keys, as SGLang's struct is
    assert raw.sample_batch_tokens == [1, 4, 8, 17, 32, 68]
    one = sglang_step_seconds(msgspec.to_builtins(raw), 17)
    assert one == pytest.approx(0.01 + 0.017 + 0.002)  # the whole step: the draft is in it


def test_additive_export_of_a_measured_table(tmp_path):
    """Costs that are additive in requests and rows are found exactly, the draft with them."""
    probes = [
        Probe(shape="tree", requests=r, tokens=t, context=0.0, median_seconds=0.01 + 0.002 * r + 0.0003 * t)
        for r in (1, 2, 8) for t in (8, 16, 64)
    ]  # fmt: skip
    draft = [
        Probe(shape="tree", requests=r, tokens=0, context=0.0, median_seconds=0.001 * r) for r in (1, 2, 8)
    ]
    table = to_additive_table(from_probes(probes, draft))
    write_file(tmp_path / "a.json", table)
    back = read_cost_table(tmp_path / "a.json")
    for r, t in [(1, 8), (2, 40), (5, 64), (8, 16)]:
        expected = 0.01 + 0.003 * r + 0.0003 * t
        assert back.verify_seconds(r, np.array([t])) == pytest.approx([expected])


def test_one_probe_is_no_information(tmp_path):
    one = {"sample_batch_tokens": [64], "sample_steps_per_sec": [50.0], "max_batch_tokens": 64}
    table = read_cost_table(write(tmp_path, one))
    assert not table.informative
    assert table.reason.endswith("trimming off")


def test_one_changed_figure_is_noticed(tmp_path):
    write_cost_table(tmp_path / "t.json", measured())
    text = (tmp_path / "t.json").read_text()
    spaced = json.dumps(json.loads(text))
    assert read_cost_table(write(tmp_path, spaced)) == measured()  # layout is not content
    raw = json.loads(text)
    raw["verify"][0]["median_seconds"] *= 1.0000001
    with pytest.raises(ValueError, match=r"content_hash: expected [0-9a-f]{64}, got"):
        read_cost_table(write(tmp_path, raw))
    del raw["content_hash"]
    with pytest.raises(ValueError, match="content_hash"):
        read_cost_table(write(tmp_path, raw))


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"format_version": 2}, "format_version: expected 1, got 2"),
        ({"format_version": "1"}, "Expected `int`, got `str`"),
        ({"verify": []}, "content_hash"),
        ({"verify": {}}, "Expected `array`, got `object`"),
        ({"graph_size": [1]}, "did you mean 'graph_sizes'"),
        ({"lookup": "cubic"}, "lookup"),
        ({"provenance": {"engin": "vllm"}}, "did you mean 'engine'"),
    ],
)
def test_our_file_with_a_fault_is_refused(tmp_path, change, complaint):
    write_cost_table(tmp_path / "t.json", measured())
    raw = json.loads((tmp_path / "t.json").read_text()) | change
    with pytest.raises(ValueError, match=complaint) as caught:
        read_cost_table(write(tmp_path, raw))
    assert "table.json" in str(caught.value)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (
            {"sample_batch_tokens": [8, 256, 64]},
            "sample_batch_tokens: expected strictly rising.*64 after 256",
        ),
        ({"sample_batch_tokens": [8, 8, 64]}, "8 after 8"),
        ({"sample_batch_tokens": [0, 64, 256]}, "at least 1, got 0"),
        ({"sample_batch_tokens": []}, "expected one probe or more, got none"),
        ({"sample_batch_tokens": [8.5, 64, 256]}, "Expected `int`, got `float`"),
        ({"sample_batch_tokens": "8"}, "Expected `array`, got `str`"),
        (
            {"sample_steps_per_sec": [1.0, 2.0]},
            "expected 3 values, one for each of sample_batch_tokens, got 2",
        ),
        (
            {"sample_steps_per_sec": [1.0, -2.0, 1.0]},
            "sample_steps_per_sec: expected a finite number above 0",
        ),
        ({"sample_steps_per_sec": [1.0, 0.0, 1.0]}, "got 0.0"),
        ({"sample_steps_per_sec": [1.0, None, 1.0]}, "Expected `float`, got `null`"),
        ({"sample_steps_per_sec": [1.0, True, 1.0]}, "Expected `float`, got `bool`"),
        (
            {"max_batch_tokens": 255},
            "max_batch_tokens: expected at least the last of sample_batch_tokens, 256",
        ),
    ],
)
def test_bad_step_tables_are_refused(tmp_path, change, complaint):
    with pytest.raises(ValueError, match=complaint) as caught:
        read_cost_table(write(tmp_path, STEP | change))
    assert "table.json" in str(caught.value)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"bias_seconds": 0.0}, "bias_seconds: expected a finite number above 0, got 0.0"),
        ({"bias_seconds": -0.1}, "got -0.1"),
        ({"bs_probes": [1, 16, 4]}, "bs_probes: expected strictly rising"),
        ({"m_probes": [64, 8]}, "m_probes: expected strictly rising"),
        ({"alpha_seconds": [0.0]}, "alpha_seconds: expected 3 values"),
        ({"theta_seconds": []}, "theta_seconds: expected 2 values"),
        ({"alpha_seconds": [0.0, -0.02, 0.1]}, "more than 0 s everywhere"),
    ],
)
def test_bad_additive_tables_are_refused(tmp_path, change, complaint):
    with pytest.raises(ValueError, match=complaint):
        read_cost_table(write(tmp_path, ADDITIVE | change))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nan_and_inf(tmp_path, value):
    """JSON has neither; a writer that puts them there, and a caller with a struct, are refused."""
    with pytest.raises(ValueError, match=r"malformed|invalid"):
        read_cost_table(write(tmp_path, json.dumps(STEP | {"sample_steps_per_sec": [1.0, value, 1.0]})))
    with pytest.raises(ValueError, match="out of range"):
        read_cost_table(write(tmp_path, json.dumps(STEP).replace("80.0", "1e999")))
    with pytest.raises(ValueError, match="expected a finite number"):
        StepTable(sample_batch_tokens=[1], sample_steps_per_sec=[value], max_batch_tokens=1)
    with pytest.raises(ValueError, match="expected finite numbers"):
        AdditiveTable(
            bias_seconds=1.0, bs_probes=[1], alpha_seconds=[value], m_probes=[1], theta_seconds=[0.0]
        )


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "truncated"),
        (json.dumps(STEP)[:-20], "truncated"),
        ("null", "Expected `object`, got `null`"),
        ('{"sample_batch_tokens": NaN}', "malformed|invalid"),
        ('{"bias_seconds": ' + "[" * 100_000, "recursion"),
        ("[]", "Expected `object`, got `array`"),
        ("{}", "expected a cost table, with the key"),
        ('{"tokens": 3}', "expected a cost table, with the key"),
        ("\x00\xff", "malformed|invalid"),
    ],
)
def test_what_is_no_table_is_refused(tmp_path, text, complaint):
    with pytest.raises(ValueError, match=complaint) as caught:
        read_cost_table(write(tmp_path, text))
    said = str(caught.value)
    assert "table.json" in said
    assert "cost table" in said
    assert said.endswith("with specplug profile")


def test_a_table_is_a_file(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(ValueError, match="expected a file, a cost table, got"):
            read_cost_table(path)


def test_a_large_file_is_not_read_to_its_end(tmp_path):
    file = tmp_path / "large.json"
    with file.open("wb") as out:
        out.truncate(100 << 20)  # sparse: 100 MB that nobody stores
    with pytest.raises(ValueError, match="expected a cost table of at most 16 MiB"):
        read_cost_table(file)


def test_a_missing_file_is_an_os_error(tmp_path):
    with pytest.raises(OSError, match=r"none\.json"):
        read_cost_table(tmp_path / "none.json")


def test_the_mark_of_the_additive_format_never_reaches_our_file(tmp_path):
    facts = Provenance(command="specplug profile --out bias_seconds.json")
    with pytest.raises(ValueError, match="must not contain 'bias_seconds'"):
        write_cost_table(tmp_path / "t.json", from_probes(measured().verify, provenance=facts))
