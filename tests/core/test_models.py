"""specplug.models: what is shipped is what the manifest says, readable as drafts, and held out as claimed."""

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from specplug import models
from specplug.checkpoint import check_pair, read_draft
from specplug.draft_config import read_config
from specplug.weights import read_tensors

ROOT = Path(models.__file__).parent
SCRIPTS = Path(__file__).resolve().parents[2] / "scripts" / "models"
SETS = ("deep-thin", "quick")


def test_files_are_as_the_manifest_says() -> None:
    assert models.sets() == SETS
    assert models.verify() == []


def test_verify_sees_every_kind_of_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = tmp_path / "models"
    shutil.copytree(ROOT, copy)
    monkeypatch.setattr(models, "_root", lambda: copy)
    assert models.verify() == []
    weights = copy / "quick" / "dspark" / "model.safetensors"
    flipped = bytearray(weights.read_bytes())
    flipped[-1] ^= 1
    weights.write_bytes(flipped)
    (copy / "quick" / "target" / "config.json").unlink()
    (copy / "deep-thin" / "dflash" / "config.json").write_text("{}")
    (copy / "deep-thin" / "extra.bin").write_bytes(b"")
    assert {(d.file.relative_to(copy).as_posix(), d.reason) for d in models.verify()} == {
        ("quick/dspark/model.safetensors", "SHA-256 differs"),
        ("quick/target/config.json", "missing"),
        ("deep-thin/dflash/config.json", "expected 960 bytes, got 2"),
        ("deep-thin/extra.bin", "not in the manifest"),
    }


def test_everything_shipped_is_under_12_megabytes() -> None:
    files = [file for file in ROOT.rglob("*") if file.is_file() and "__pycache__" not in file.parts]
    assert sum(file.stat().st_size for file in files) < 12_000_000


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("part", models.PARTS)
def test_weights_are_bf16_and_counted(name: str, part: str) -> None:
    tensors = read_tensors(models.path(name, part))
    assert {info.dtype for info in tensors.values()} == {"BF16"}
    assert len(tensors) == models.manifest().sets[name].tensors[part]


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_drafts_read_and_fit_their_target(name: str, kind: str) -> None:
    draft = read_draft(models.path(name, kind))
    check_pair(draft, read_config(models.path(name, "target")))
    assert (draft.kind, draft.depth, draft.path) == (kind, 7, models.path(name, kind))
    assert draft.layout == {"dflash": "fill_in", "dspark": "anchor_first"}[kind]
    own = name == "deep-thin" and kind == "dspark"  # shipped with and without, as the format allows both
    assert (draft.own_embedding, draft.own_lm_head) == (own, own)


def test_drafts_do_not_fit_the_other_target() -> None:
    for kind in ("dflash", "dspark"):
        draft = read_draft(models.path("deep-thin", kind))
        with pytest.raises(ValueError, match="was not made for this target"):
            check_pair(draft, read_config(models.path("quick", "target")))


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match="model set: expected one of deep-thin, quick, got 'slow'"):
        models.path("slow", "target")
    with pytest.raises(ValueError, match="expected one of target, dflash, dspark, got 'eagle'"):
        models.path("quick", "eagle")


def test_prompts_are_distinct_and_in_the_chat_form() -> None:
    prompts = models.prompts()
    assert len({row.prompt for row in prompts}) == len(prompts) == 64
    assert {kind: sum(row.kind == kind for row in prompts) for kind in ("chat", "maths", "code")} == {
        "chat": 22,
        "maths": 21,
        "code": 21,
    }
    assert all(_question(row.prompt).strip() for row in prompts)


def test_prompts_are_held_out() -> None:
    """Held out means: the SHA-256 of the question is divisible by 50. No training question is."""
    for row in models.prompts():
        assert int(hashlib.sha256(_question(row.prompt).encode()).hexdigest(), 16) % 50 == 0


def test_prompts_are_what_the_script_writes_and_no_training_text_has_them(tmp_path: Path) -> None:
    program = """
import json, sys
from conversations import split
train, _ = split(45_000, 7)
json.dump([q for c in train for q, _ in c.turns], open(sys.argv[1], "w"))
"""
    asked = tmp_path / "asked.json"
    subprocess.run([sys.executable, "-c", program, str(asked)], check=True, cwd=SCRIPTS)
    trained = set(json.loads(asked.read_text()))
    assert len(trained) > 10_000
    assert trained.isdisjoint(_question(row.prompt) for row in models.prompts())
    again = tmp_path / "prompts.jsonl"
    subprocess.run([sys.executable, str(SCRIPTS / "prompts.py"), "--out", str(again)], check=True)
    assert again.read_bytes() == (ROOT / "prompts.jsonl").read_bytes()


def _question(prompt: str) -> str:
    head, tail = "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"
    assert prompt.startswith(head)
    assert prompt.endswith(tail)
    return prompt[len(head) : -len(tail)]
