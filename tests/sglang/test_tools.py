"""`specplug doctor`, `profile` and `demo` with the real SGLang."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from specplug.cost import read_cost_table

pytestmark = pytest.mark.sglang
SPECPLUG = Path(sys.executable).with_name("specplug")


def specplug(*arguments, folder, code=0):
    done = subprocess.run([SPECPLUG, *arguments], cwd=folder, capture_output=True, text=True)
    assert done.returncode == code, done.stdout + done.stderr[-3000:]
    return done.stdout


def test_doctor_finds_the_plugin_in_a_running_server(tmp_path):
    report = json.loads(specplug("doctor", "--engine", "sglang", "--json", folder=tmp_path))
    checks = {check["name"]: check for check in report["checks"]}
    assert report["ok"]
    assert "DDTREE is registered" in checks["plugin"]["detail"]
    assert "as expected" in checks["hook table"]["detail"]
    assert "TreeWorker" in checks["rank 0"]["detail"]
    assert "draft trees" in checks["one request"]["detail"]


def test_doctor_sees_the_off_switch(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECPLUG_DISABLE", "1")
    text = specplug("doctor", "--no-start", "--json", folder=tmp_path, code=1)
    checks = {check["name"]: check["state"] for check in json.loads(text)["checks"]}
    assert (checks["plugin"], checks["SPECPLUG_DISABLE"]) == ("off", "off")


def test_profile_measures_a_table_that_both_read(tmp_path):
    from sglang.srt.speculative.dspark_components.dspark_sps import load_sps_table_from_path

    short = [
        "--requests",
        "1",
        "2",
        "--contexts",
        "64",
        "--budget",
        "8",
        "--max-minutes",
        "0.4",
        "--spread",
        "0.1",
        "--json",
    ]
    made = specplug("profile", "--engine", "sglang", "--target", "quick", *short, folder=tmp_path)
    assert json.loads(made)["steps"] > 50
    table = read_cost_table(tmp_path / "cost.json")
    assert table.provenance.engine == "sglang"
    assert {probe.shape for probe in table.verify} >= {"plain", "tree"}
    assert {probe.requests for probe in table.verify} == {1, 2}
    assert table.draft
    assert len(load_sps_table_from_path(str(tmp_path / "cost.json")).sample_batch_tokens) > 1


def test_demo_gives_plain_decodings_answers_in_fewer_forwards(tmp_path):
    text = specplug(
        "demo", "--engine", "sglang", "--method", "ddtree", "--prompts", "4", "--max-tokens", "24", "--json",
        folder=tmp_path,
    )  # fmt: skip
    plain, tree = json.loads(text)["runs"]
    assert tree["same_output"]
    assert tree["target_forwards"] < 0.7 * plain["target_forwards"]
    assert tree["accepted_length"] > 1.5


def test_demo_refuses_a_chain_that_sglang_draws_in_bfloat16(tmp_path):
    specplug("demo", "--engine", "sglang", "--method", "dflash", folder=tmp_path, code=2)
