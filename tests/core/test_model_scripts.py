"""scripts/models: the parts that must agree with each other, and the whole pipeline in small (slow)."""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch

from specplug.checkpoint import check_pair, read_draft
from specplug.draft_config import read_config

pytest.importorskip("tokenizers", reason="the model scripts train a tokenizer")

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "scripts" / "models"
STEPS = (
    "presets",
    "decoder",
    "muon",
    "conversations",
    "corpus",
    "train_target",
    "generate",
    "train_drafts",
)


class Scripts(NamedTuple):
    """The scripts as modules, for the duration of one test."""

    presets: ModuleType
    decoder: ModuleType
    muon: ModuleType
    train_target: ModuleType
    generate: ModuleType


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Scripts]:
    monkeypatch.syspath_prepend(SCRIPTS)
    before = set(sys.modules)
    yield Scripts(*(__import__(name) for name in Scripts._fields))
    for name in set(sys.modules) - before:
        if name in STEPS or name.split(".")[0] == "templates":
            del sys.modules[name]


@torch.inference_mode()
def test_growing_keeps_the_function(scripts: Scripts) -> None:
    torch.manual_seed(0)
    small = scripts.decoder.Target(2)
    ids = torch.randint(0, 1024, (2, 9))
    big = scripts.train_target.grown(small, 5)
    assert len(big.model.layers) == 5
    torch.testing.assert_close(big(ids)[0], small(ids)[0])
    big.model.layers[1].mlp.down_proj.weight.add_(0.1)  # the control: a filled gap matters once it is trained
    assert not torch.allclose(big(ids)[0], small(ids)[0])


@torch.inference_mode()
def test_cached_steps_equal_one_forward(scripts: Scripts) -> None:
    torch.manual_seed(1)
    target = scripts.decoder.Target(3)
    ids = torch.randint(0, 1024, (2, 12))
    whole, features = target(ids, taps=(0, 2))
    cache: list[Any] = []
    parts = [target(ids[:, :5], cache=cache, taps=(0, 2))]
    parts.append(target(ids[:, 5:11], positions=torch.arange(5, 11), cache=cache, taps=(0, 2)))
    parts.append(target(ids[:, 11:], positions=torch.arange(11, 12), cache=cache, taps=(0, 2)))
    torch.testing.assert_close(torch.cat([hidden for hidden, _ in parts], 1), whole)
    torch.testing.assert_close(torch.cat([tapped for _, tapped in parts], 1), features)


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
@torch.inference_mode()
def test_training_blocks_are_the_blocks_of_inference(scripts: Scripts, kind: str) -> None:
    """A block trained among others must be the block that is proposed later: same context, same positions."""
    torch.manual_seed(2)
    preset = scripts.presets.PRESETS["smoke"]
    draft = scripts.decoder.Draft(kind, preset)
    embedding, ids = torch.randn(1024, 128), torch.randint(4, 1024, (2, 30))
    features = torch.randn(2, 30, len(preset.taps) * 128)
    anchors = torch.tensor([[9, 12, 20], [8, 15, 21]])
    trained = draft.train_blocks(embedding, ids, features, anchors) @ embedding.T
    assert trained.shape == (2, 3, 7, 1024)
    for row in range(2):
        for n, anchor in enumerate(anchors[row].tolist()):
            cache: list[Any] = []
            draft.extend(features[row : row + 1, :anchor], torch.arange(anchor), cache)
            proposed = draft.propose(embedding, int(ids[row, anchor]), anchor, cache)
            torch.testing.assert_close(proposed, trained[row, n], rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("shape", [(8, 8), (5, 9), (9, 5)])
def test_muon_update_is_nearly_orthogonal(scripts: Scripts, shape: tuple[int, int]) -> None:
    torch.manual_seed(3)
    singular = torch.linalg.svdvals(scripts.muon.orthogonalised(torch.randn(shape)))
    assert 0.3 < singular.min() <= singular.max() < 1.3  # the quintic's own range, Jordan et al. 2024


def test_questions_get_no_weight_and_answers_do(scripts: Scripts) -> None:
    assistant, user = 50, 51
    turn = [
        1,
        user,
        9,
        7,
        7,
        2,
        9,
        1,
        assistant,
        9,
        8,
        8,
        2,
        9,
    ]  # <start> user \n q q <end> \n <start> assistant \n a a ...
    asked = scripts.train_target.asked(torch.tensor([turn]), assistant)[0].tolist()
    assert asked == [True] * 8 + [True, False, False, False, False][: len(asked) - 8]


def test_openings_end_where_the_answer_begins(scripts: Scripts) -> None:
    system, asked, answer = [1, 60, 9, 5, 2, 9], [1, 51, 9, 7, 2, 9, 1, 50, 9], [8, 2, 9]
    stream = [*asked, *answer, 0, *system, *asked, *answer, 0, *asked, *answer, *asked, *answer, 0]
    assert scripts.generate.openings(stream) == [asked, [*system, *asked], asked]


def run(script: str, *arguments: str) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, str(SCRIPTS / script), *arguments], check=True, env=environment)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    work = tmp_path_factory.mktemp("models")
    run("run.py", "--preset", "smoke", "--work", str(work))
    return work


@pytest.mark.slow
def test_pipeline_makes_a_readable_set(made: Path, tmp_path: Path) -> None:
    for kind in ("dflash", "dspark"):
        draft = read_draft(made / "set" / kind)
        check_pair(draft, read_config(made / "set" / "target"))
        assert (draft.kind, draft.depth) == (kind, 7)
        assert (draft.target_layer_ids, draft.num_target_layers) == ((0, 2), 4)
    run(
        "evaluate.py", "--set", str(made / "set"), "--out", str(tmp_path), "--texts", "library",
        "--temperature", "0", "--budget", "4", "--count", "2",
    )  # fmt: skip
    for kind in ("dflash", "dspark"):
        rows = json.loads((tmp_path / f"{kind}-library" / "report.json").read_text())["rows"]
        assert [(row["method"], row["identical"]) for row in rows] == [
            ("plain", 2),
            ("chain", 2),
            ("tree 4", 2),
        ]
        assert all(row["accepted_length"][0] >= 1 for row in rows)


@pytest.mark.slow
def test_pipeline_repeats_with_the_same_seed(made: Path, tmp_path: Path) -> None:
    run("run.py", "--preset", "smoke", "--work", str(tmp_path))
    assert digests(tmp_path / "set") == digests(made / "set")
    other = [
        "--preset",
        "smoke",
        "--corpus",
        str(made / "corpus"),
        "--seed",
        "1",
        "--out",
        str(tmp_path / "other"),
    ]
    run("train_target.py", *other)  # the control: another seed is another model
    assert digests(tmp_path / "other")["target.pt"] != digests(made / "target")["target.pt"]


def digests(folder: Path) -> dict[str, str]:
    files = [file for file in folder.rglob("*") if file.is_file()]
    return {f.relative_to(folder).as_posix(): hashlib.sha256(f.read_bytes()).hexdigest() for f in files}
