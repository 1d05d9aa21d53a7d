"""300 combinations of parameters, every pair of values among them: each answer is plain decoding's.

The answers of a request that asks for two are compared with two requests of plain decoding.
"""

import math
from collections import Counter
from unittest import mock

import grid
import pytest
from engine_rig import engine, tree

pytestmark = pytest.mark.vllm

COUNT = 300


def labels(parameters):
    return {name: list(values) for name, values in parameters.items()}


def missing(parameters, rows):
    """Pairs that should stand in a row and do not, or the other way round: by looking at every row."""
    lost = []
    names = list(parameters)
    for i, a in enumerate(names):
        for b in names[i + 1 :]:
            for one in parameters[a]:
                for other in parameters[b]:
                    together = any(row[a] == one and row[b] == other for row in rows)
                    if grid.may_stand_together((a, one), (b, other)) != together:
                        lost.append((a, one, b, other))
    return lost


def whole(rows):
    """Rows with the parameters of their engine in place of its number."""
    engines = grid.engines()
    return [{**engines[int(row["engine"])], **row} for row in rows]


def test_every_pair_of_values_is_asked_for():
    rows = whole(grid.requests(COUNT))
    assert len(rows) >= COUNT
    assert len({tuple(row.items()) for row in rows}) == len(rows)
    parameters = labels(grid.ENGINES) | labels(grid.REQUESTS)
    assert missing(parameters, rows) == []
    assert len(grid.engines()) <= 6
    shares = Counter(row["engine"] for row in rows)
    assert min(shares.values()) > 0.8 * COUNT / len(shares)
    few = [row for row in rows if not (row["min_p"] == "0.1" and row["structured_outputs"] == "json")]
    assert missing(parameters, few) == [("min_p", "0.1", "structured_outputs", "json")]


def test_what_cannot_stand_together_does_not():
    together = grid.may_stand_together
    assert not together(("temperature", "0"), ("n", "2"))
    assert not together(("n", "2"), ("temperature", "0"))
    assert together(("temperature", "0.7"), ("n", "2"))
    assert math.prod(map(len, grid.REQUESTS.values())) > 100_000  # why pairs and not everything


def test_a_generator_by_hand():
    """Three parameters of two values: every pair in few rows, and the same rows again."""
    toy = {"a": ["0", "1"], "b": ["0", "1"], "c": ["0", "1"]}
    rows = grid.covering(toy)
    assert 4 <= len(rows) <= 6
    assert missing(toy, rows) == []
    assert grid.covering(toy) == rows
    assert len(grid.covering(toy, count=20)) == 20


def test_the_comparison_sees_a_token_an_end_and_a_logprob():
    from engine_rig import Output

    want = Output([5, 6], "length", None, 0, [{5: (-0.5, 1)}, {6: (-1.0, 1), 7: (-0.9, 2)}], None)
    assert grid.unlike(want, want._replace(cached=32)) == []
    near = want._replace(logprobs=[{5: (-0.50005, 1)}, want.logprobs[1]])
    assert grid.unlike(want, near) == []
    for other in (
        want._replace(ids=[5, 9]),
        want._replace(finish="stop"),
        want._replace(stop=6),
        want._replace(logprobs=None),
        want._replace(logprobs=[{5: (-0.501, 1)}, want.logprobs[1]]),
        want._replace(logprobs=[{5: (-0.5, 2)}, want.logprobs[1]]),
        want._replace(logprobs=[{6: (-0.5, 1)}, want.logprobs[1]]),
        want._replace(logprobs=want.logprobs[:1]),
        want._replace(prompt_logprobs=[None, {5: (-0.5, 1)}]),
    ):
        assert grid.unlike(want, other) != []


def compare(plain, number, rows):
    """Serve the rows in one engine; returns what differs, and the answers."""
    from vllm.v1.structured_output import backend_xgrammar

    setting = grid.engines()[number]
    settings = {}
    for name, values in grid.ENGINES.items():
        settings |= values[setting[name]]
    prompts = [grid.prompt_of(row, i) for i, row in rows]
    params = [grid.params_of(row, i) for i, row in rows]
    alone = [grid.one_by_one(one) for one in params]
    flat = [(prompt, one) for prompt, ones in zip(prompts, alone, strict=True) for one in ones]
    expected = iter(plain.generate([prompt for prompt, _ in flat], [one for _, one in flat]))
    with (
        mock.patch.object(backend_xgrammar.logger, "error") as complaint,
        engine(tree(setting["draft"], int(setting["budget"])), **settings) as running,
    ):
        asked = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        results = running.llm.generate(asked, params, use_tqdm=False)
        counters, chains = running.counters, running.state.chain_requests
        unused = running.free_blocks
    assert chains == {}  # every request had trees
    assert counters.accepted > 0
    assert unused == 191  # of 192; one is vLLM's null block
    # A grammar was advanced by a token it does not take.
    found, answers = [f"xgrammar: {call.args}" for call in complaint.call_args_list], []
    for (i, row), result in zip(rows, results, strict=True):
        for have in grid.outputs_of(result):
            answers.append(have)
            for line in grid.unlike(next(expected), have):
                found.append(f"{line}\n    request {i}: {row}\n    engine {number}: {setting}")
    assert next(expected, None) is None
    assert any(one.cached for one in answers) == (setting["prefix_caching"] == "on")
    return found, answers


def rows_of(number):
    rows = enumerate(grid.requests(COUNT))
    return [(i, row) for i, row in rows if int(row["engine"]) == number]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("number", range(len(grid.engines())))
def test_the_grid_equals_plain(plain, number):
    found, answers = compare(plain, number, rows_of(number))
    print(f"engine {number}: {len(answers)} answers, {sum(len(one.ids) for one in answers)} tokens")
    assert not found, "\n".join(found)
    ends = Counter((one.finish, type(one.stop).__name__) for one in answers)
    assert ends.keys() == {("length", "NoneType"), ("stop", "NoneType"), ("stop", "int"), ("stop", "str")}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_value_changes_an_answer(plain):
    """The control: an engine that took no notice of a value would be seen. Requests with each value are asked
    of plain decoding once more, with the value as it is when nothing is asked for, until one answer differs.
    """
    rows = list(enumerate(grid.requests(COUNT)))
    waiting = {}  # (parameter, value) -> requests with it, and the same without
    for name, (nothing, *values) in grid.REQUESTS.items():
        for value in values if name != "prompt" else ():
            # No sampled request of the grid may be greedy as it is: another temperature then.
            other = nothing if name != "temperature" else next(t for t in values if t != value)
            with_it = [(i, row) for i, row in rows if row[name] == value and grid.fits(row, name, other)]
            with_it.sort(key=lambda each: -int(each[1]["max_tokens"]))
            waiting[name, value] = [(i, row, {**row, name: other}) for i, row in with_it]

    def answers(chosen):
        prompts = [grid.prompt_of(row, i) for i, row in chosen]
        return plain.generate(prompts, [grid.one_by_one(grid.params_of(row, i))[-1] for i, row in chosen])

    count = 2  # requests of each value that is still waiting
    while any(waiting.values()):
        asked = [(cell, *each) for cell, requests in waiting.items() for each in requests[:count]]
        have = answers([(i, row) for _, i, row, _ in asked])
        want = answers([(i, row) for _, i, _, row in asked])
        changed = {one[0] for one, a, b in zip(asked, have, want, strict=True) if grid.unlike(a, b)}
        waiting = {cell: requests[count:] for cell, requests in waiting.items() if cell not in changed}
        count *= 2
    assert not waiting, "no request of the grid shows these values"
