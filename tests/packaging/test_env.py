"""ci/env: refuses what it cannot do in one sentence, never leaves half an environment, does nothing twice."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RIGS = {"vllm": "rig/specplug_rig", "sglang": "rig_sglang/specplug_rig_sglang"}


@pytest.fixture
def clone(tmp_path) -> Path:
    """What ci/env reads, in a folder of its own, with two pinned packages instead of all."""
    shutil.copytree(ROOT / "ci", tmp_path / "ci")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for engine in RIGS:
        pins = tmp_path / "ci" / f"requirements-{engine}.txt"
        pins.write_text("torch==2.13.0+cpu\ntqdm==4.70.1\n")
    return tmp_path


def env(
    clone: Path, *arguments: str, python: str = sys.executable, **environ: str
) -> subprocess.CompletedProcess[str]:
    command = [python, str(clone / "ci" / "env"), *arguments]
    return subprocess.run(command, env={**os.environ, **environ}, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ((), "required: engine"),
        (("vllm", "sglang"), "unrecognized arguments: sglang"),
        (("tgi",), "invalid choice: 'tgi'"),
    ],
)
def test_arguments_it_cannot_serve(clone, arguments, complaint):
    done = env(clone, *arguments)
    assert done.returncode != 0
    assert complaint in done.stderr
    assert not (clone / ".venvs").exists()


@pytest.mark.parametrize("engine", RIGS)
def test_a_machine_without_the_cpu_build_of_torch_is_told_what_to_do_and_nothing_counts_as_installed(
    clone, tmp_path, engine
):
    empty = tmp_path / "no wheels"
    empty.mkdir()
    done = env(clone, engine, PIP_NO_INDEX="1", PIP_FIND_LINKS="", PIP_CONFIG_FILE=os.devnull)
    assert done.returncode == 1
    sentence = done.stderr.strip().splitlines()[-1]
    assert sentence.startswith("ci/env: pip cannot find torch==2.13.0+cpu, PyTorch's CPU build")
    assert "PIP_EXTRA_INDEX_URL" in sentence
    assert not list((clone / ".venvs" / engine).glob("*.stamp"))
    assert not list((clone / ".venvs" / engine / "lib").rglob("tqdm"))


@pytest.mark.parametrize("engine", RIGS)
def test_an_interrupted_install_starts_over_and_a_finished_one_is_left_alone(clone, engine):
    """With a stand-in for pip and venv that records what it was asked for."""
    script = clone / "ci" / "env"
    log = clone / "calls"
    stand_in = f"""
def create(env, python):
    env.mkdir(parents=True)
    with open({str(log)!r}, "a") as calls: print("create", file=calls)
def pip(env, *arguments, failed, count=0):
    with open({str(log)!r}, "a") as calls: print("packages" if count else "project", file=calls)
    if count and os.environ.get("INTERRUPT"): raise KeyboardInterrupt
"""
    text = script.read_text().replace(
        'if __name__ == "__main__":', "import os" + stand_in + 'if __name__ == "__main__":'
    )
    script.write_text(text)

    def calls(**kwargs: str) -> list[str]:
        log.write_text("")
        env(clone, engine, **kwargs)
        return log.read_text().split()

    assert calls(INTERRUPT="1") == ["create", "packages"]
    leftover = clone / ".venvs" / engine / "half installed"
    leftover.touch()
    assert calls() == ["create", "packages", "project"]
    assert not leftover.exists()
    assert calls() == []
    names = [name for name in Path(sys.base_prefix, "bin").glob("python3*") if name.name[7:] in ("", ".11")]
    assert [calls(python=str(name)) for name in names] == [[]] * len(names)  # one Python under its names
    other = next(rig for name, rig in RIGS.items() if name != engine)
    (clone / "ci" / other / "activate.py").write_text("# changed\n")
    assert calls() == []
    (clone / "ci" / RIGS[engine] / "activate.py").write_text("# changed\n")
    assert calls() == ["project"]
    with (clone / "ci" / f"requirements-{engine}.txt").open("a") as pins:
        pins.write("click==8.5.1\n")
    assert calls() == ["create", "packages", "project"]


def test_a_folder_that_holds_something_else_is_left_alone(clone, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    (other / "letters").touch()
    done = env(clone, "vllm", "--into", str(other))
    assert done.returncode == 1
    assert done.stderr.strip().endswith("holds something else than an environment; name a new folder")
    assert list(other.iterdir()) == [other / "letters"]
