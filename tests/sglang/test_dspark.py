"""SGLang's DSPARK with our worker over it: plain decoding's tokens in all three modes, budgets that trim, and
sampling parameters that stock DSPARK serves as if they were not there."""

import json
import urllib.error
from pathlib import Path

import oracle
import pytest
from comparing import differences
from oracle import PENALTIES
from prompts import varied
from sglang_rig import accepted_length, counts, dspark, engine, serve

pytestmark = pytest.mark.sglang

HERE = Path(__file__).parent
GREEDY = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}
WINDOW = 8  # rows of the shipped draft's chain
# A batch of n rows takes 2 ms + 1 ms a row: dear enough that rows worth little are not verified.
STEPS = {
    "sample_batch_tokens": [8, 16, 32, 64],
    "sample_steps_per_sec": [100, 56, 29, 15],
    "max_batch_tokens": 64,
}


@pytest.fixture(scope="module")
def fault(tmp_path_factory):
    """A file that breaks the running engine while something is written in it."""
    path = tmp_path_factory.mktemp("fault") / "fault"
    path.write_text("")
    return path


@pytest.fixture(scope="module", params=["compact", "static"])
def running(request, fault, tmp_path_factory):
    """One engine after the other: compact, overlapped, with a table in SGLang's step format; and static."""
    mode = request.param
    table = tmp_path_factory.mktemp("sps") / "sps.json"
    table.write_text(json.dumps(STEPS))
    flags = dspark(**({} if mode == "static" else {"speculative_dspark_sps_table_path": str(table)}))
    env = {"SGLANG_RAGGED_VERIFY_MODE": mode, "SPECPLUG_TEST_FAULT": str(fault)}
    with engine(flags, overlap=mode == "compact", env=env, load=HERE / "faults.py") as engine_:
        engine_.mode = mode  # for the tests
        yield engine_


def test_greedy_is_plain_decoding(plain, running):
    prompts = varied()
    assert len(prompts) >= 40
    got = running.generate(prompts, GREEDY)
    assert differences(plain.generate(prompts, GREEDY), got) == []
    assert accepted_length(got) > 1.5
    assert all(counts(output)["tree"] == 0 < counts(output)["chain"] for output in got)
    if running.mode == "compact":
        rows = [output.meta["spec_cap_length"] for output in got]
        assert min(rows) < WINDOW / 2, "the table is dear, and nothing was trimmed"


def test_rows_that_answer_for_another_show(plain, running, fault):
    fault.write_text("rows")
    try:
        broken = running.generate(varied()[:8], GREEDY)
    finally:
        fault.write_text("")
    assert len(differences(plain.generate(varied()[:8], GREEDY), broken)) >= 6


@pytest.mark.parametrize("penalties", PENALTIES, ids=lambda one: "+".join(one))
def test_penalties_are_those_of_an_independent_oracle(penalties, running):
    prompts = varied()[:10]
    got = running.generate(prompts, GREEDY | penalties)
    assert [output.ids for output in got] == [oracle.greedy(prompt, 24, **penalties) for prompt in prompts]
    assert accepted_length(got) > 1.1, "penalised requests draft as well"


def test_an_empty_history_shows(running, fault):
    prompts, penalties = varied()[:10], {"frequency_penalty": 0.7}
    fault.write_text("history")
    try:
        broken = running.generate(prompts, GREEDY | penalties)
    finally:
        fault.write_text("")
    expected = [oracle.greedy(prompt, 24, **penalties) for prompt in prompts]
    assert sum(output.ids != want for output, want in zip(broken, expected, strict=True)) >= 5


def test_min_new_tokens_keeps_stop_tokens_out(plain, running):
    prompts = varied()[:10]
    free = plain.generate(prompts, GREEDY)
    for prompt, output in zip(prompts, free, strict=True):
        stops = sorted({output.ids[3], output.ids[6]})
        params = {"temperature": 0, "max_new_tokens": 24, "min_new_tokens": 9, "stop_token_ids": stops}
        (got,) = running.generate([prompt], params)
        expected = oracle.greedy(prompt, 24, min_new_tokens=9, stop_token_ids=stops)
        assert got.ids == expected
        assert not set(stops) & set(got.ids[:9])


def test_log_probabilities_are_those_of_plain_decoding(plain, running):
    wanted = {"return_logprob": True, "top_logprobs_num": 3}
    expected = plain.generate(varied()[:6], GREEDY, **wanted)
    got = running.generate(varied()[:6], GREEDY, **wanted)
    assert differences(expected, got) == []
    for want, have in zip(expected, got, strict=True):
        assert have.logprobs == pytest.approx(want.logprobs, abs=1e-4)
        assert [[token for _, token in place] for place in have.top_logprobs] == [
            [token for _, token in place] for place in want.top_logprobs
        ]


@pytest.mark.parametrize(
    "narrow",
    [{"min_p": 1.0}, {"top_p": 1e-6}, {"top_k": 1}, {"min_p": 1.0, "top_k": 50}],
    ids=lambda one: "+".join(one),
)
def test_a_distribution_of_one_token_is_greedy(plain, running, narrow):
    got = running.generate(varied()[:6], {**GREEDY, "temperature": 1.0, **narrow})
    expected = plain.generate(varied()[:6], GREEDY)
    assert [output.ids for output in got] == [output.ids for output in expected]


def test_min_p_keeps_unlikely_tokens_out(running):
    """At temperature 2 a free draw leaves the likely tokens at once; min_p 0.5 never does."""
    import local_models
    import torch

    prompt = varied()[0]
    params = {"temperature": 2.0, "max_new_tokens": 12, "ignore_eos": True}
    shares = {}
    for min_p in (0.0, 0.5):
        worst = 1.0
        for output in running.generate([prompt] * 8, params | {"min_p": min_p}):
            with torch.inference_mode():
                logits = local_models.target().model(torch.tensor([[*prompt, *output.ids]])).logits[0]
            rows = torch.softmax(logits[len(prompt) - 1 : -1] / 2.0, -1)
            taken = rows.gather(1, torch.tensor(output.ids)[:, None])[:, 0]
            worst = min(worst, float((taken / rows.amax(1)).min()))
        shares[min_p] = worst
    assert shares[0.5] >= 0.5 - 1e-4 > shares[0.0]


def test_min_p_with_top_p_is_refused_and_counted(running):
    with pytest.raises(ValueError, match="min_p together with top_p"):
        running.generate([varied()[0]], {"temperature": 1.0, "min_p": 0.1, "top_p": 0.9, "max_new_tokens": 4})
    assert sum(running.state["specplug"]["counted"].values()) == 1


def test_the_state_says_what_runs(running):
    block = running.state["specplug"]
    assert block["active"]
    (rank,) = block["ranks"]
    assert rank["mode"] == running.mode
    assert rank["policy"] == {"compact": "Planner", "static": "FullTrees"}[running.mode]
    assert block["steps_chain"] > 0
    assert 0 < block["nodes_accepted"] < block["nodes_verified"]


def test_cap_accept_over_http_with_a_table_of_one_point(plain, tmp_path):
    """Plain decoding's tokens; the log says that nothing is trimmed and what runs; metrics count steps."""
    table = tmp_path / "one.json"
    one = {"sample_batch_tokens": [8], "sample_steps_per_sec": [100.0], "max_batch_tokens": 64}
    table.write_text(json.dumps(one))
    env = {"SGLANG_RAGGED_VERIFY_MODE": "cap-accept"}
    flags = dspark(speculative_dspark_sps_table_path=str(table), enable_metrics=True, log_level="info")
    with serve(flags, log=tmp_path / "log", env=env) as server:
        body = {"input_ids": [list(prompt) for prompt in varied()], "sampling_params": GREEDY}
        answers = json.load(server.post("/generate", body))
        expected = [output.ids for output in plain.generate(varied(), GREEDY)]
        assert [answer["output_ids"] for answer in answers] == expected
        rows = [answer["meta_info"]["spec_cap_length"] for answer in answers]
        assert sum(rows) / len(rows) > WINDOW - 1, "only what the draft gives no chance at all is left out"
        refused = {"temperature": 1.0, "min_p": 0.1, "top_p": 0.9}
        with pytest.raises(urllib.error.HTTPError) as error:
            server.post("/generate", {"input_ids": [1, 2], "sampling_params": refused})
        assert error.value.code == 400
        assert "min_p together with top_p" in error.value.read().decode()
        metrics = server.get("/metrics")
        assert 'specplug:steps_total{shape="chain"}' in metrics
        assert "sglang:spec_accept_length" in metrics
        assert all(answer["meta_info"]["specplug"]["rounds_chain"] > 0 for answer in answers)
        state = json.loads(server.get("/server_info"))["internal_states"][0]["specplug"]
        assert "trimming off" in state["ranks"][0]["reason"]
    log = (tmp_path / "log").read_text()
    assert log.count("specplug: DSPARK, pid") == 1
    assert "trimming off" in next(line for line in log.splitlines() if "specplug: DSPARK, pid" in line)


def test_where_rows_are_dear_nothing_is_drafted(plain, tmp_path):
    """A row costs what a token is worth: but for the first rounds and a few probes no draft is made, and
    every kind of request is as in plain decoding."""
    rows = list(range(1, 128))  # every row a stair: between two a node would be free
    table = {
        "sample_batch_tokens": rows,
        "sample_steps_per_sec": [1000 / n for n in rows],
        "max_batch_tokens": rows[-1],
    }
    (tmp_path / "dear.json").write_text(json.dumps(table))
    config = tmp_path / "specplug.json"  # not online: on this machine rows are cheap
    config.write_text(json.dumps({"cost_table": str(tmp_path / "dear.json"), "online": False}))
    env = {"SGLANG_RAGGED_VERIFY_MODE": "compact", "SPECPLUG_CONFIG": str(config)}
    prompts = varied()
    with engine(dspark(), overlap=True, env=env, grammar_backend="xgrammar") as running:
        got = running.generate(prompts, GREEDY)
        assert differences(plain.generate(prompts, GREEDY), got) == []
        assert running.state["specplug"]["drafts_chain"] > 0, "who never drafts learns nothing"
        for narrow in ({"top_p": 1e-6}, {"min_p": 1.0}):
            again = running.generate(prompts[:6], {**GREEDY, "temperature": 1.0, **narrow})
            assert [output.ids for output in again] == [output.ids for output in got[:6]]
        for penalties in PENALTIES[:2]:
            penalised = running.generate(prompts[:6], GREEDY | penalties)
            assert [o.ids for o in penalised] == [oracle.greedy(p, 24, **penalties) for p in prompts[:6]]
        regex = GREEDY | {"regex": "[a-z]{3,6}( [a-z]{3,6})*\\.", "ignore_eos": False}
        assert differences(plain.generate(prompts[:6], regex), running.generate(prompts[:6], regex)) == []
        block = running.state["specplug"]
    assert block["drafts_plain"] > 4 * block["drafts_chain"]
    assert block["steps_plain"] >= block["drafts_plain"]
    assert sum(counts(output)["plain"] for output in got) > sum(counts(output)["chain"] for output in got)


def test_switched_off_dspark_is_sglangs_own(plain, tmp_path):
    """ "dspark": false leaves the stock worker, with its faults."""
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"dspark": False}))
    prompts, penalties = varied()[:8], {"frequency_penalty": 0.7}
    with engine(dspark(), env={"SPECPLUG_CONFIG": str(config)}) as running:
        assert not running.state["specplug"]["active"]
        assert differences(plain.generate(prompts, GREEDY), running.generate(prompts, GREEDY)) == []
        ignored = running.generate(prompts, GREEDY | penalties)
    assert differences(plain.generate(prompts, GREEDY), ignored) == []
