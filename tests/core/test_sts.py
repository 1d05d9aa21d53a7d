"""SGLang's STS files: exact form, refusals, and the left-to-right fit on survival."""

import json

import numpy as np
import pytest
import torch

from specplug.reliability import ece
from specplug.sts import GRID, StsTable, fit_sts, read_sts, survival

# A file as formats.md states it, written by hand.
FILE = (
    '{"temperatures":[1.5,0.75,2.0],"dataset":"chat","num_samples":12,'
    '"ece_before":[0.1,0.2,0.3],"ece_after":[0.0,0.1,0.1]}'
)


def test_a_file_reads_and_writes_byte_for_byte(tmp_path):
    path = tmp_path / "sts.json"
    path.write_text(FILE + "\n")
    table = read_sts(path, depth=3)
    assert table.temperatures == [1.5, 0.75, 2.0]
    assert (table.dataset, table.num_samples) == ("chat", 12)
    table.save(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == path.read_bytes()
    assert list(json.loads(FILE)) == ["temperatures", "dataset", "num_samples", "ece_before", "ece_after"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"temperature":[1.0]}', r"unknown field `temperature`; did you mean 'temperatures'\?"),
        ('{"temperatures":[1.0],"gamma":1}', r"unknown field `gamma`; known keys: dataset"),
        ('{"dataset":"x"}', r"missing required field `temperatures`"),
        ('{"temperatures":[]}', r"temperatures: expected one number a draft position"),
        ('{"temperatures":[1.0,0.0]}', r"temperatures\[1\]: expected a finite number above 0, got 0.0"),
        ('{"temperatures":[1.0,-2]}', r"temperatures\[1\]: expected a finite number above 0"),
        ('{"temperatures":["1.0"]}', r"Expected `float`, got `str`"),
        ('{"temperatures":[1.0,1.0]}', r"expected 3 temperatures, one a draft position, got 2"),
        ("", r"sts.json: "),
    ],
)
def test_a_wrong_file_is_refused_by_name(text, message, tmp_path):
    (tmp_path / "sts.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_sts(tmp_path / "sts.json", depth=3)


def test_a_huge_file_is_refused(tmp_path):
    with (tmp_path / "sts.json").open("wb") as file:
        file.truncate((1 << 24) + 1)
    with pytest.raises(ValueError, match=r"at most 16 MiB"):
        read_sts(tmp_path / "sts.json")


def chains(n: int, seed: int, temperatures: list[float]) -> tuple[np.ndarray, np.ndarray]:
    """Raw confidences whose true temperatures are known, and prefix outcomes."""
    random = np.random.RandomState(seed)
    raw = random.randn(n, len(temperatures)) * 2 + 2
    accepted = random.rand(*raw.shape) < 1 / (1 + np.exp(-raw / np.array(temperatures)))
    return raw, np.logical_and.accumulate(accepted, axis=1)


def test_the_fit_recovers_known_temperatures_and_halves_the_ece():
    truth = [2.0, 0.5, 4.0]
    table = fit_sts(*chains(20_000, 1, truth), dataset="synthetic")
    # one step of the grid is a factor 1.12
    assert table.temperatures == pytest.approx(truth, rel=0.3)
    assert table.num_samples == 20_000
    assert all(t in GRID for t in table.temperatures)
    raw, accepted = chains(20_000, 2, truth)
    before = 1 / (1 + np.exp(-raw))
    after = survival(torch.from_numpy(raw), torch.tensor(table.temperatures))
    assert after.dtype == torch.float32
    assert (after.diff(dim=1) <= 0).all()
    for j in range(3):
        plain = ece(np.cumprod(before, 1)[:, j], accepted[:, j])
        assert ece(after[:, j].numpy(), accepted[:, j]) < plain / 2


def test_the_fit_goes_left_to_right_on_survival():
    """By hand: each position's grid search with the earlier temperatures held."""
    raw, accepted = chains(600, 3, [2.0, 1.5])
    table = fit_sts(raw, accepted)
    above = np.ones(600)
    for j in range(2):
        errors = [ece(above / (1 + np.exp(-raw[:, j] / t)), accepted[:, j]) for t in GRID]
        assert table.ece_after[j] == pytest.approx(min(errors), abs=1e-12)
        assert table.ece_before[j] == pytest.approx(
            ece(np.cumprod(1 / (1 + np.exp(-raw)), 1)[:, j], accepted[:, j]), abs=1e-12
        )
        above = above / (1 + np.exp(-raw[:, j] / table.temperatures[j]))


def test_no_information_leaves_temperature_1():
    """All temperatures are equally good where raw is 0 throughout: sigmoid(0 / T) = 1/2."""
    accepted = np.arange(40)[:, None] % 2 == 0
    assert fit_sts(np.zeros((40, 1)), accepted).temperatures == pytest.approx([1.0])


def test_outcomes_must_be_prefixes():
    with pytest.raises(ValueError, match=r"expected prefix outcomes"):
        fit_sts(np.zeros((1, 2)), np.array([[False, True]]))
    with pytest.raises(ValueError, match=r"expected one shape \[N, gamma\]"):
        fit_sts(np.zeros((3, 2)), np.zeros((3, 1), dtype=bool))
    with pytest.raises(ValueError, match=r"not empty"):
        fit_sts(np.zeros((0, 2)), np.zeros((0, 2), dtype=bool))
    assert StsTable(temperatures=[1.0]).ece_after == []
