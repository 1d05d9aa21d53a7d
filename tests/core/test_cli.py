"""The command line: what it refuses, with which exit code, before anything is started."""

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from commands import run

from specplug import demo, doctor, models, server


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch):
    """These tests are about arguments: starting a server is a failure."""

    def refuse(*arguments, **options):
        raise AssertionError("a server was started")

    monkeypatch.setattr(server, "running", refuse)


def options(command, *argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return parser.parse_args(argv)


def test_the_installed_command_runs():
    command = Path(sys.executable).with_name("specplug")
    done = subprocess.run([command, "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "specplug 0.1.0\n")


@pytest.mark.parametrize("command", ["demo", "doctor", "evaluate", "inspect"])
def test_every_command_has_help(command, capsys):
    assert run(command, "--help") == 0
    assert "--json" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        ((), "COMMAND"),
        (("serve",), "invalid choice: 'serve'"),
        (("demo", "--method", "medusa"), "invalid choice: 'medusa'"),
        (("demo", "--prompts", "0"), "--prompts: expected 1..64, got 0"),
        (("demo", "--prompts", "65"), "--prompts: expected 1..64, got 65"),
        (("demo", "--max-tokens", "0"), "--max-tokens: expected at least 1, got 0"),
        (("demo", "--budget", "0"), "tree_budget: expected 1..256 nodes, got 0"),
        (("demo", "--budget", "257"), "tree_budget: expected 1..256 nodes, got 257"),
        (("demo", "--port", "70000"), "--port: expected 1..65535, got 70000"),
        (("doctor", "--engine", "tgi"), "invalid choice: 'tgi'"),
        (("doctor", "--model", "T"), "--model: checks a target against a draft"),
        (("inspect", "/no/such/draft"), "/no/such/draft"),
    ],
)
def test_arguments_that_cannot_work_end_with_2(argv, complaint, capsys):
    assert run(*argv) == 2
    assert complaint in capsys.readouterr().err


def test_an_occupied_port_ends_with_2(capsys):
    with socket.socket() as holder:
        holder.bind((server.HOST, 0))
        holder.listen()
        port = holder.getsockname()[1]
        assert run("demo", "--port", str(port)) == 2
    assert f"--port: 127.0.0.1:{port} cannot be used" in capsys.readouterr().err


def test_a_missing_engine_ends_with_1_and_one_sentence(monkeypatch, capsys):
    monkeypatch.setattr(server, "missing_engine", lambda *, on_gpu: "no engine here; install one")
    assert run("demo") == 1
    assert capsys.readouterr().err == "specplug demo: no engine here; install one\n"


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (RuntimeError("it broke"), 1, "specplug demo: it broke"),
        (ValueError("it cannot"), 2, "specplug demo: it cannot"),
    ],
)
def test_exit_codes(monkeypatch, capsys, error, code, said):
    def fail(arguments):
        raise error

    monkeypatch.setattr(demo, "run", fail)
    assert run("demo") == code
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["bench", "--out", "x.json", "--concurency", "4"], "--concurency 4; did you mean --concurrency?"),
        (["doctor", "--frobnicate"], "unrecognized arguments: --frobnicate\n"),
        (["doctor", "more"], "unrecognized arguments: more\n"),
    ],
)
def test_an_unknown_option_is_said_by_its_command(capsys, argv, said):
    assert run(*argv) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"usage: specplug {argv[0]} ")
    assert said in told


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_unwinds_like_an_exception(monkeypatch, capsys, number):
    unwound = []

    def wait_for_signal(arguments):
        try:
            os.kill(os.getpid(), number)
            signal.pause()
        finally:
            unwound.append(True)

    monkeypatch.setattr(demo, "run", wait_for_signal)
    assert run("demo") == 128 + number
    assert unwound == [True]
    assert f"{number.name}; ending what was started" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "methods", "draft"),
    [
        ((), ["none", "dspark", "ddtree"], "dspark"),
        (("--draft", "dflash"), ["none", "dflash", "ddtree"], "dflash"),
        (("--method", "none"), ["none"], "dspark"),
        (("--method", "ddtree"), ["none", "ddtree"], "dspark"),
        (("--method", "dflash", "ddtree"), ["none", "dflash", "ddtree"], "dflash"),
        (("--method", "ddtree", "dflash", "ddtree", "none"), ["none", "ddtree", "dflash"], "dflash"),
        (("--method", "dflash", "ddtree", "--draft", "dspark"), ["none", "dflash", "ddtree"], "dspark"),
    ],
)
def test_plain_decoding_is_always_the_first_method(argv, methods, draft):
    assert demo.chosen(options(demo, *argv)) == (methods, draft)


def test_questions_are_plain_text():
    assert len(demo.QUESTIONS) == 64
    assert not [question for question in demo.QUESTIONS if "<|" in question or not question.strip()]


def test_inspect_prints_what_the_draft_is(capsys):
    target = str(models.path("quick", "target"))
    assert run("inspect", str(models.path("quick", "dspark")), "--target", target, "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["kind"], facts["layout"], facts["depth"]) == ("dspark", "anchor_first", 7)
    assert facts["markov_head"]["kind"] == "vanilla"


def test_inspect_refuses_a_target_of_another_kind(capsys):
    deep_thin = str(models.path("deep-thin", "dflash"))
    assert run("inspect", deep_thin, "--target", str(models.path("quick", "target"))) == 2
    assert "was not made for this target" in capsys.readouterr().err


def test_inspect_prints_a_readable_list(capsys):
    assert run("inspect", str(models.path("quick", "dflash"))) == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert (lines["kind"], lines["depth"], lines["markov_head"]) == ("dflash", "7", "-")


@pytest.fixture
def healthy(monkeypatch):
    """A probe answer of a plugin that works; the real ones are in tests/vllm/test_doctor.py."""
    answer = {
        "active": True,
        "reason": "method ddtree is accepted",
        "hooks": [{"name": "a", "ok": True, "detail": ""}],
        "host_keys": ["quantization"],
    }
    monkeypatch.setattr(doctor, "probe_plugin", lambda engine: answer)
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: object())
    return answer


def report(capsys, *argv: str) -> tuple[int, dict[str, tuple[str, str]]]:
    code = run("doctor", "--no-start", "--json", *argv)
    answer = json.loads(capsys.readouterr().out)
    assert answer["ok"] == (code == 0)
    return code, {check["name"]: (check["state"], check["detail"]) for check in answer["checks"]}


def test_doctor_is_content_with_a_healthy_plugin(healthy, capsys):
    code, checks = report(capsys)
    assert code == 0
    assert {state for state, _ in checks.values()} == {"ok"}
    assert {"python", "torch", "specplug", "vllm", "entry point", "plugin", "hook table"} <= set(checks)


def test_doctor_reports_a_missing_engine(monkeypatch, capsys):
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None)
    code, checks = report(capsys)
    assert (code, checks["vllm"][0]) == (1, "failed")


def test_doctor_reports_a_broken_hook_by_name(healthy, capsys):
    healthy["hooks"].append({"name": "x.py:f", "ok": False, "detail": "not found"})
    code, checks = report(capsys)
    assert (code, checks["hook"]) == (1, ("failed", "x.py:f: not found"))
    assert "hook table" not in checks


@pytest.mark.parametrize(
    ("broken", "state"),
    [({"error": "ImportError: no torch"}, "failed"), ({"active": False, "reason": "switched off"}, "off")],
)
def test_doctor_reports_a_plugin_that_crashes_or_is_off(healthy, capsys, broken, state):
    healthy.update(broken)
    code, checks = report(capsys)
    assert (code, checks["plugin"]) == (1, (state, next(reversed(broken.values()))))


@pytest.mark.parametrize(
    ("variable", "value", "state"),
    [
        ("SPECPLUG_DISABLE", "1", "off"),
        ("SPECPLUG_DISABLE", "0", None),
        ("SPECPLUG_STRICT", "1", "ok"),
        ("VLLM_PLUGINS", "other", "off"),
        ("VLLM_PLUGINS", "other,specplug", None),
    ],
)
def test_doctor_sees_the_switches(healthy, monkeypatch, capsys, variable, value, state):
    monkeypatch.setenv(variable, value)
    code, checks = report(capsys)
    assert checks.get(variable, (None,))[0] == state
    assert code == (1 if state == "off" else 0)


@pytest.mark.parametrize(
    ("config", "state", "said"),
    [
        ({"method": "ddtree", "model": "DFLASH"}, "ok", "ddtree over a dflash draft, 7 deep, 16 nodes"),
        ({"method": "ddtree", "model": "DFLASH", "quantization": None}, "ok", "16 nodes"),
        ({"method": "ddtree", "model": "DFLASH", "tree_budgett": 4}, "failed", "did you mean 'tree_budget'"),
        ({"method": "ddtree", "model": "DFLASH", "num_speculative_tokens": 8}, "failed", "expected 1..7"),
        ({"method": "ddtree"}, "failed", "model: expected"),
        ({"method": "dspark", "model": "DFLASH"}, "failed", "use 'ddtree' for draft trees or 'dflash'"),
        ({"method": "dflash", "model": "DFLASH"}, "ok", "vLLM's own chain"),
        ({"method": "ngram"}, "skipped", "nothing to do with specplug"),
        ([1], "failed", "expected a JSON object, got list"),
    ],
)
def test_doctor_checks_a_config_as_the_adapter_would(healthy, capsys, config, state, said):
    text = json.dumps(config).replace("DFLASH", str(models.path("quick", "dflash")))
    code, checks = report(capsys, "--speculative-config", text)
    assert checks["speculative config"][0] == state
    assert said in checks["speculative config"][1]
    assert code == (1 if state == "failed" else 0)


def test_doctor_refuses_what_is_no_json(healthy, capsys):
    code, checks = report(capsys, "--speculative-config", "{method: ddtree}")
    assert (code, checks["speculative config"][0]) == (1, "failed")


def test_doctor_checks_the_pair(healthy, capsys):
    text = json.dumps({"method": "ddtree", "model": str(models.path("quick", "dflash"))})
    code, checks = report(
        capsys, "--speculative-config", text, "--model", str(models.path("quick", "target"))
    )
    assert (code, checks["speculative config"][0]) == (0, "ok")
    code, checks = report(
        capsys, "--speculative-config", text, "--model", str(models.path("deep-thin", "target"))
    )
    assert (code, checks["speculative config"][0]) == (1, "failed")
    assert "was not made for this target" in checks["speculative config"][1]


LOG = """(APIServer pid=10) INFO hello
(APIServer pid=10) INFO [plugin.py:69] specplug 0.1.0 loaded in MainProcess (pid 10)
(EngineCore pid=11) INFO [plugin.py:69] specplug 0.1.0 loaded in EngineCore (pid 11)
(VllmWorker-0 pid=12) INFO [plugin.py:69] specplug 0.1.0 loaded in VllmWorker-0 (pid 12)
(Worker pid=12) INFO Using V2 Model Runner
"""


def test_doctor_finds_the_plugin_in_each_process():
    checks = list(doctor.process_checks(LOG))
    assert [(check.name, check.state) for check in checks] == [
        ("APIServer", "ok"), ("EngineCore", "ok"), ("Worker", "ok"),
    ]  # fmt: skip


def test_doctor_finds_a_process_without_the_plugin():
    log = LOG + "(Worker_TP1 pid=13) INFO Using V2 Model Runner\n"
    (failed,) = [check for check in doctor.process_checks(log) if check.state != "ok"]
    assert failed == ("Worker_TP1", "failed", "specplug is not loaded (pid 13)")
