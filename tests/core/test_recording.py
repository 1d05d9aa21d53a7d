"""specplug.recording and its files: what is written comes back, damage is named, rounds find their place."""

import dataclasses
import io
import zipfile

import msgspec
import numpy as np
import pytest
import small_recordings as small

from specplug.local.records import Record, RoundRecord, append
from specplug.recording import DATA, ROUND_ARRAYS, Recording, join
from specplug.recording_file import read_file, write_file
from specplug.recording_source import read_recording, shipped


def test_depths_and_ranks_follow_from_parents():
    r = small.at_random(0)
    for n in range(len(r.request)):
        for node in range(r.budget):
            if node >= r.counts[n]:
                assert (r.depths[n, node], r.ranks[n, node]) == (0, 0)
                continue
            depth, at = 1, int(r.parents[n, node])
            while at >= 0:
                depth, at = depth + 1, int(r.parents[n, at])
            siblings = [o for o in range(node) if r.parents[n, o] == r.parents[n, node]]
            assert (r.depths[n, node], r.ranks[n, node]) == (depth, len(siblings))


def test_what_is_written_comes_back(tmp_path):
    r = small.at_random(1)
    write_file(tmp_path / "r.npz", r)
    back = read_file(tmp_path / "r.npz")
    assert back.about == r.about
    for name in ("dataset", "temperature", "prompt", "prompt_tokens", "answer_tokens"):
        assert np.array_equal(getattr(back.requests, name), getattr(r.requests, name))
    for name in (*ROUND_ARRAYS[:4], "accepted", "chain_accepted"):
        assert np.array_equal(getattr(back, name), getattr(r, name)), name
    for name in ("log_probs", "chain_log_probs"):
        mine, theirs = getattr(r, name), getattr(back, name)
        live = mine > -np.inf
        assert np.array_equal(live, theirs > -np.inf)
        assert np.abs(theirs[live] - mine[live]).max() > 0  # it is rounded
        assert (np.abs(theirs[live] - mine[live]) <= np.maximum(0.01 * -mine[live], 1e-5)).all()
    odds = [np.log(s / (1 - s)) for s in (r.chain_survivals, back.chain_survivals)]
    assert np.abs(odds[0] - odds[1]).max() <= 0.5 / 16 + 1e-4
    live = np.arange(r.budget) < r.counts[:, None]
    odds = [np.log(s[live] / (1 - s[live])) for s in (r.survivals, back.survivals)]
    assert np.abs(odds[0] - odds[1]).max() <= 0.5 / 16 + 1e-4
    write_file(tmp_path / "again.npz", back)
    assert (tmp_path / "again.npz").read_bytes() == (tmp_path / "r.npz").read_bytes()


def test_a_recording_without_a_confidence_head_comes_back(tmp_path):
    write_file(tmp_path / "r.npz", small.by_hand())
    back = read_file(tmp_path / "r.npz")
    assert back.survivals is None
    assert back.chain_survivals is None
    assert back.counts.tolist() == [3, 2, 3, 0]


def test_shipped_recordings_are_whole_and_small():
    assert sum(file.stat().st_size for file in DATA.iterdir()) < 1_500_000
    r = read_recording("deep-thin")
    assert r.about.complete
    assert (r.budget, r.depth, r.about.datasets) == (64, 7, ["chat", "maths", "code", "library"])
    assert sorted(set(r.requests.temperature.tolist())) == [0.0, np.float32(0.8)]
    assert np.array_equal(r.rows, np.arange(len(r.request)))
    with pytest.raises(ValueError, match="recording: expected one of deep-thin, or a file, got 'nothing'"):
        shipped("nothing")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"counts": np.array([4, 2, 3, 0], np.int32)}, r"counts\[0\]"),
        ({"position": np.array([0, 1, 1, 3], np.int32)}, r"position\[2\]"),
        ({"position": np.array([0, 1, 2, 4], np.int32)}, r"position\[3\]"),
        ({"request": np.array([0, 0, 0, 1], np.int32)}, r"request\[3\]"),
        ({"chain_accepted": np.array([1, 0, 3, 0], np.int32)}, r"chain_accepted\[2\]"),
        ({"log_probs": np.array([[0.0, 0.0, np.nan]] * 4, np.float32)}, r"log_probs\[0\]"),
        ({"log_probs": np.zeros((4, 2), np.float32)}, r"log_probs: expected shape \[4, 3\], got \[4, 2\]"),
        ({"survivals": np.full((4, 3), 1.5, np.float32)}, r"survivals\[0\]"),
    ],
)
def test_arrays_that_disagree_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(small.by_hand(), **change)


@pytest.mark.parametrize("where", ["orphan", "siblings", "padding", "parent"])
def test_impossible_trees_are_refused(where):
    r = small.by_hand()
    accepted, parents = r.accepted.copy(), r.parents.copy()
    if where == "orphan":  # node 2's parent is not accepted
        accepted[0] = [False, False, True]
    elif where == "siblings":
        accepted[0] = [True, True, False]
    elif where == "padding":
        accepted[3, 0] = True
    else:
        parents[2, 1] = 1
    with pytest.raises(ValueError, match="parents" if where == "parent" else r"accepted\["):
        dataclasses.replace(r, accepted=accepted, parents=parents)


def test_a_complete_recording_has_every_position():
    r = small.by_hand()
    arrays = {name: getattr(r, name)[[0, 2, 3]] for name in ROUND_ARRAYS if getattr(r, name) is not None}
    with pytest.raises(ValueError, match="expected a round at each of 4 positions, got 3"):
        dataclasses.replace(r, **arrays)
    part = dataclasses.replace(r, about=msgspec.structs.replace(r.about, complete=False), **arrays)
    assert part.rows.tolist() == [0, 0, 1, 2]  # position 1 takes the round before it


def test_the_first_round_serves_what_is_before_it():
    r = small.by_hand()
    arrays = {name: getattr(r, name)[[1, 3]] for name in ROUND_ARRAYS if getattr(r, name) is not None}
    part = dataclasses.replace(r, about=msgspec.structs.replace(r.about, complete=False), **arrays)
    assert part.rows.tolist() == [0, 0, 0, 1]


def test_taking_and_joining_keep_every_round():
    r = small.at_random(2)
    first = r.halves()
    assert 0 < first.sum() < len(first)
    for number in range(2):  # both temperatures of a prompt in one half, and prompts dealt in each data set
        mine = r.requests.dataset == number
        assert 0 < first[mine].sum() < mine.sum()
    whole = join([r.take(first), r.take(~first)])
    order = np.concatenate((np.flatnonzero(first), np.flatnonzero(~first)))
    assert whole.requests.prompt.tolist() == r.requests.prompt[order].tolist()
    back = np.concatenate([np.flatnonzero(r.request == q) for q in order])
    assert np.array_equal(whole.log_probs, r.log_probs[back])
    with pytest.raises(ValueError, match="data set: expected one of a, b, got 'c'"):
        r.matching(dataset="c")
    with pytest.raises(ValueError, match=r"no request of a at temperature 0\.5; the temperatures are 0, 0.8"):
        r.matching(dataset="a", temperature=0.5)


def damaged(folder, name: str, array: np.ndarray | None, *, compress: bool = True):
    """A file whose one array is another, or is missing."""
    write_file(folder / "good.npz", small.at_random(3))
    with zipfile.ZipFile(folder / "good.npz") as good:
        members = {entry: good.read(entry) for entry in good.namelist()}
    if array is None:
        del members[f"{name}.npy"]
    else:
        data = io.BytesIO()
        np.lib.format.write_array(data, array, allow_pickle=True)
        members[f"{name}.npy"] = data.getvalue()
    bad = folder / "bad.npz"
    with zipfile.ZipFile(bad, "w", zipfile.ZIP_DEFLATED) as out:
        for entry, data in members.items():
            out.writestr(entry, data)
    return bad


@pytest.mark.parametrize(
    ("name", "array", "message"),
    [
        ("parents", None, "lacks 'parents'"),
        ("about", None, "lacks 'about'"),
        ("about", np.frombuffer(b"{]", np.uint8), "not a recording of specplug"),
        ("about", np.frombuffer(b'{"target":"t"}', np.uint8), "missing required field"),
        ("format", np.array([2]), r"format: expected 1, got \[2\]; record it again"),
        ("counts", np.zeros(3, np.int32), r"counts: expected shape"),
        ("position", np.array([object()]), "Object arrays cannot be loaded"),
        ("steps", np.zeros((2, 2, 2), np.uint16), "steps: expected"),
        ("parents", np.full((96, 16), 77, np.uint8), "parents: expected"),
        ("survivals", np.zeros((2, 2), np.int8), "survivals: expected int8"),
        ("requests_answer_tokens", np.full(12, 99, np.int32), "requests.answer_tokens"),
    ],
)
def test_bad_files_are_clear_errors(tmp_path, name, array, message):
    bad = damaged(tmp_path, name, array)
    assert read_file(tmp_path / "good.npz")
    with pytest.raises(ValueError, match=message) as error:
        read_file(bad)
    assert str(bad) in str(error.value)


def test_what_is_no_zip_or_too_large_is_refused(tmp_path):
    bad = tmp_path / "bad.npz"
    for data in (b"", b"not a zip", b"PK\x05\x06"):
        bad.write_bytes(data)
        with pytest.raises(ValueError, match="not a recording of specplug"):
            read_file(bad)
    with bad.open("wb") as file:
        file.truncate((1 << 26) + 1)
    with pytest.raises(ValueError, match="at most 64 MiB"):
        read_file(bad)
    with zipfile.ZipFile(bad, "w", zipfile.ZIP_DEFLATED) as out:
        out.writestr("steps.npy", b"\0" * ((1 << 28) + 1))
    assert bad.stat().st_size < 1 << 20
    with pytest.raises(ValueError, match="at most 32 arrays of 256 MiB"):
        read_file(bad)


def run_folder(folder, *, evaluated: bool) -> None:
    """What an evaluation, or an engine, leaves: two visited rounds of an answer of 5 tokens."""
    common = {"dataset": "a", "temperature": 0.0, "prompt": 0, "survivals": None}
    append(
        folder / "rounds.jsonl",
        [
            RoundRecord(
                method=method,
                round=number,
                tokens=[1, 2, 3][:nodes],
                parents=[-1, 0, -1][:nodes],
                depths=[1, 2, 1][:nodes],
                ranks=[0, 0, 1][:nodes],
                log_probs=[-0.1, -0.3, -2.0][:nodes],
                accepted=accepted,
                **common,
            )
            for method, number, nodes, accepted in (
                ("chain", 0, 2, [True, False]),
                ("tree 3", 0, 3, [True, True, False]),
                ("tree 3", 1, 3, [False, False, True]),
            )
        ],
    )
    if not evaluated:
        return
    settings = {
        "target": "t", "draft": "d", "methods": ["chain", "tree 3"], "temperatures": [0.0],
        "datasets": {"a": ""}, "max_tokens": 8, "batch": 1, "candidates": 4, "depth": 2, "seed": 0,
        "repeats": 1, "dtype": "float32", "device": "cpu", "record": True,
    }  # fmt: skip
    (folder / "settings.json").write_bytes(msgspec.json.encode(settings))
    append(
        folder / "records.jsonl",
        [
            Record(
                dataset="a", temperature=0.0, method="tree 3", prompts=[0], tokens=[[1, 2, 3, 4, 5]],
                emitted=[[3, 2]], seconds={},
            )
        ],
    )  # fmt: skip


@pytest.mark.parametrize("evaluated", [True, False])
def test_rounds_of_a_run_are_read(tmp_path, evaluated):
    run_folder(tmp_path, evaluated=evaluated)
    r = read_recording(tmp_path)
    assert not r.about.complete
    assert r.about.source == ("specplug evaluate, tree 3" if evaluated else "engine, tree 3")
    assert (r.position.tolist(), r.requests.answer_tokens.tolist()) == ([0, 3], [5])
    assert r.rows.tolist() == [0, 0, 0, 1, 1]
    assert r.chain_accepted.tolist() == [2, 0]
    assert np.allclose(r.chain_log_probs, [[-0.1, -0.3]] * 2)
    if not evaluated:
        assert read_recording(tmp_path, method="chain").budget == 2


def test_a_run_without_rounds_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"expected rounds\.jsonl with rounds"):
        read_recording(tmp_path)
    run_folder(tmp_path, evaluated=True)
    with pytest.raises(ValueError, match=r"method: expected one of chain, tree 3, got 'tree 9'"):
        read_recording(tmp_path, method="tree 9")
    with pytest.raises(ValueError, match="expected rounds of chain with nodes, and their answers"):
        read_recording(tmp_path, method="chain")


def test_a_file_takes_no_method(tmp_path):
    write_file(tmp_path / "r.npz", small.by_hand())
    with pytest.raises(ValueError, match="one recording holds trees of every budget"):
        read_recording(tmp_path / "r.npz", method="tree 8")
    assert isinstance(read_recording(tmp_path / "r.npz"), Recording)
