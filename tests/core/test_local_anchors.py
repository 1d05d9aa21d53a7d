"""specplug.local.anchors: a recording says, for every policy, exactly the rounds that the loop runs."""

import functools

import numpy as np
import pytest

pytest.importorskip("transformers", reason="specplug.local needs the extra `local`")

import commands
import local_models

from specplug.cost_models import model_table
from specplug.local.anchors import record
from specplug.local.loop import generate
from specplug.local.method import Method
from specplug.local.pair import Pair
from specplug.outcomes import outcomes
from specplug.policies import Fixed
from specplug.recording import Recording
from specplug.recording_file import read_file
from specplug.replay import Batch

LIMIT = 24


def pair(kind: str, stop: frozenset[int] = frozenset()) -> Pair:
    return Pair(local_models.target(), local_models.draft(kind), stop)


def recorded(
    kind: str = "dspark", *, temperature: float = 0.0, stop: frozenset[int] = frozenset()
) -> Recording:
    return record(
        pair(kind, stop),
        {"a": local_models.prompts()},
        temperatures=[temperature],
        method=Method("tree", 24),
        max_tokens=LIMIT,
        show_progress=False,
    )


def real_rounds(method: Method, kind: str, temperature: float, stop: frozenset[int]) -> list[list[int]]:
    """Tokens of each round, each prompt by itself."""
    return [
        generate(
            local_models.target(),
            [prompt],
            method=method,
            draft=local_models.draft(kind),
            limit=LIMIT,
            stop=stop,
            temperature=temperature,
            seeds=[number],
        ).emitted[0]
        for number, prompt in enumerate(local_models.prompts())
    ]


def replayed(recording: Recording, policy: Fixed) -> list[list[int]]:
    """The same from the replay: how far each round moved each request."""
    found = []
    for request in range(len(recording.requests.dataset)):
        batch = Batch(outcomes(recording), model_table("staircase"), policy)
        batch.admit(np.array([request]), np.zeros(1))
        moves = []
        while len(batch.request):
            before = batch.totals.tokens
            batch.round()
            moves.append(batch.totals.tokens - before)
        found.append(moves)
    return found


@pytest.mark.parametrize(
    ("method", "policy"),
    [
        (Method("plain"), Fixed("plain")),
        (Method("chain"), Fixed("chain")),
        (Method("tree", 16), Fixed("tree", 16)),
        (Method("tree", 3), Fixed("tree", 3)),
    ],
    ids=lambda x: getattr(x, "label", ""),
)
@pytest.mark.parametrize(("kind", "temperature"), [("dspark", 0.0), ("dspark", 0.8), ("dflash", 0.0)])
def test_replay_is_the_loops_own_rounds(method, policy, kind, temperature):
    # A round that the token limit cuts counts in full in the loop, up to the limit in a replay.
    real = [
        [min(tokens, LIMIT - sum(rounds[:i])) for i, tokens in enumerate(rounds)]
        for rounds in real_rounds(method, kind, temperature, frozenset())
    ]
    assert replayed(recorded(kind, temperature=temperature), policy) == real


def test_a_stop_token_ends_the_recorded_answer():
    answers = generate(
        local_models.target(), local_models.prompts(), method=Method("plain"), limit=LIMIT
    ).tokens
    stop = frozenset([answers[0][LIMIT // 2]])
    recording = recorded(stop=stop)
    lengths = recording.requests.answer_tokens.tolist()
    assert lengths[0] < LIMIT
    real = real_rounds(Method("tree", 16), "dspark", 0.0, stop)
    assert sum(real[0]) == lengths[0]
    assert [len(rounds) for rounds in replayed(recording, Fixed("tree", 16))] == [len(r) for r in real]


def test_a_wrong_outcome_would_be_noticed():
    """The negative control: a recording of other noise does not replay this noise's rounds."""
    real = [len(r) for r in real_rounds(Method("tree", 16), "dspark", 0.8, frozenset())]
    other = [len(r) for r in replayed(recorded(temperature=1.5), Fixed("tree", 16))]
    assert other != real


def test_the_recorded_trees_are_those_of_the_rounds():
    """Path probabilities, parents and survivals of the first round of each prompt."""
    recording = recorded()
    for number, prompt in enumerate(local_models.prompts()):
        rounds = []
        generate(
            local_models.target(), [prompt], method=Method("tree", 24), draft=local_models.draft("dspark"),
            limit=1, on_round=rounds.append,
        )  # fmt: skip
        row = recording.rows[recording.first[number]]
        tree = rounds[0].tree
        assert tree.parents[0].tolist() == recording.parents[row].tolist()
        assert np.allclose(tree.scores[0].numpy(), recording.log_probs[row], atol=1e-3)
        survivals = local_models.draft("dspark").survivals(rounds[0].proposal, tree)
        assert np.allclose(survivals[0].numpy(), recording.survivals[row], atol=1e-3)


command = functools.partial(commands.run, "record")


def test_the_command_writes_a_recording_and_a_calibration(tmp_path, capsys):
    out, fit = tmp_path / "r.npz", tmp_path / "c.json"
    small = (
        "--target",
        "quick",
        "--dataset",
        "library",
        "--count",
        "3",
        "--max-tokens",
        "12",
        "--budget",
        "8",
    )
    assert command(*small, "--temperature", "0", "0.8", "--out", out, "--calibration", fit) == 0
    said = capsys.readouterr().out
    assert "72 positions of 6 answers" in said
    assert f"--recording {out}" in said
    assert f'"calibration": "{fit}"' in said
    assert command(*small, "--out", out) == 2
    assert "exists already" in capsys.readouterr().err
    recording = read_file(out)
    assert (recording.budget, recording.about.complete, recording.about.target) == (8, True, "quick")
    assert fit.is_file()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--budget", "0"), "--budget: expected 1.."),
        (("--max-tokens", "0"), "--max-tokens: expected at least 1, got 0"),
        (("--max-tokens", "100000"), "--max-tokens 100000 exceed the target's"),
        (("--temperature", "-1"), "--temperature: expected 0 or more, got -1"),
        (("--target", "somewhere"), "--draft: expected a folder or hub id for target somewhere"),
        (("--dataset", "poems"), "--dataset: expected NAME=FILE"),
    ],
)
def test_arguments_that_cannot_work_are_refused(tmp_path, capsys, argv, message):
    assert command(*argv, "--out", tmp_path / "r.npz") == 2
    assert message in capsys.readouterr().err
    assert command("--out", tmp_path / "none" / "r.npz") == 2
