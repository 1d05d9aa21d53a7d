"""A release: built as CONTRIBUTING.md says, complete, of one version, and installed where people install it.

The environments are folders of their own with a Python, the wheel, and a path to packages that are installed
already: those of an engine's pinned environment, or those the wheel itself asks for and no engine. pip never
looks at an index. Commands run in a folder outside the clone.
"""

import json
import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import specplug
from specplug import models
from specplug.cli import COMMANDS

ROOT = Path(__file__).resolve().parents[2]
RIGS = {"vllm": "specplug_rig", "sglang": "specplug_rig_sglang"}  # how an engine runs on a CPU
TARGET, DRAFT = "target", "dspark"


def test_the_source_distribution_holds_the_project(sdist):
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if tracked.returncode:
        pytest.skip("no git here to ask what belongs to the project")
    names = [name for name in tracked.stdout.splitlines() if not name.startswith(".ci/")]
    files = {name for name in names if (ROOT / name).is_file()}
    assert files - sdist == set()
    stray = {name for name in sdist if re.search(r"__pycache__|\.pyc$|^\.venvs|^dist/|^build/", name)}
    assert stray == set()


def test_the_wheel_is_that_of_the_working_tree(wheel):
    """Built from the source distribution, so what is missing there is missing here."""
    for name in wheel.namelist():
        package, _, rest = name.partition("/")
        folder = {
            "specplug_kernels": "kernels",
            "specplug_vllm": "vllm_plugin",
            "specplug_sglang": "sglang_plugin",
        }
        if package.endswith(".dist-info") or rest.startswith("_recipes/"):
            continue
        source = ROOT / folder.get(package, "") / package / rest
        assert wheel.read(name) == source.read_bytes(), name


def test_the_version_stands_in_one_place(release, wheel):
    version = specplug.__version__
    (name,) = [one for one in wheel.namelist() if one.endswith(".dist-info/METADATA")]
    assert f"\nVersion: {version}\n" in wheel.read(name).decode()
    assert release.sdist.name == f"specplug-{version}.tar.gz"
    # A dependency's version may be the same text, but not as ours.
    spelled = re.compile(rf"specplug\W+{re.escape(version)}|version\w*\W+{re.escape(version)}")
    sources = [*ROOT.glob("*.toml"), *(ROOT / "specplug").glob("*.py"), *(ROOT / "vllm_plugin").rglob("*.py"),
               *(ROOT / "sglang_plugin").rglob("*.py"), *(ROOT / "kernels").rglob("*.py")]  # fmt: skip
    found = [file.relative_to(ROOT).as_posix() for file in sources if spelled.search(file.read_text())]
    assert found == ["specplug/__init__.py"]


def test_the_changelog_begins_with_this_version():
    headings = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert headings[0] == specplug.__version__


class Installed:
    """An environment with the wheel in it."""

    def __init__(self, folder: Path, wheel: Path, *, packages: list[str]) -> None:
        """``packages``: lines of a path file, which Python reads at its start."""
        self.folder = folder
        self.outside = folder.with_name("outside")
        self.outside.mkdir()
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
        (self.site / "packages.pth").write_text("\n".join(packages) + "\n")
        pip = [
            sys.executable,
            "-m",
            "pip",
            "--python",
            str(self.python),
            "install",
            "--no-deps",
            "--no-index",
        ]
        done = subprocess.run([*pip, str(wheel)], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def site(self) -> Path:
        (site,) = self.folder.glob("lib/python*/site-packages")
        return site

    def run(self, program: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """A program of the environment, run outside the clone, without what this process was told."""
        dropped = ("PYTHONPATH", "SPECPLUG_", "TRITON_")
        kept = {key: value for key, value in os.environ.items() if not key.startswith(dropped)}
        environ = {**kept, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **variables}
        command = [str(self.folder / "bin" / program), *arguments]
        return subprocess.run(command, cwd=self.outside, env=environ, capture_output=True, text=True)


def closure(roots: list[str]) -> list[metadata.Distribution]:
    """Installed distributions that the requirements need, and what those need, extras left out."""
    found: dict[str, metadata.Distribution] = {}
    waiting = [Requirement(one) for one in roots]
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        if name in found or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        found[name] = metadata.distribution(name)
        waiting += [Requirement(one) for one in found[name].requires or []]
    return list(found.values())


@pytest.fixture(scope="module")
def bare(release, wheel, tmp_path_factory) -> Installed:
    """The wheel, what it requires, and transformers (its extra `local`); no engine, no Triton."""
    (name,) = [one for one in wheel.namelist() if one.endswith(".dist-info/METADATA")]
    required = re.findall(r"^Requires-Dist: (.*)$", wheel.read(name).decode(), re.M)
    wanted = [one for one in required if "extra ==" not in one] + ["transformers"]
    farm = tmp_path_factory.mktemp("packages")
    for distribution in closure(wanted):
        for top in {file.parts[0] for file in distribution.files or () if file.parts[0] != ".."}:
            link = farm / top
            if not link.exists() and top != "__pycache__":
                link.symlink_to(distribution.locate_file(top).resolve())
    return Installed(tmp_path_factory.mktemp("bare") / "env", release.wheel, packages=[str(farm)])


def test_without_an_engine_the_package_is_the_wheels_and_no_engine_is_there(bare):
    code = (
        "import importlib.util as u, specplug; print(specplug.__file__);"
        "print(*(u.find_spec(name) for name in ('vllm', 'sglang', 'triton')))"
    )
    done = bare.run("python", "-c", code)
    where, engines = done.stdout.splitlines()
    assert Path(where).is_relative_to(bare.folder)
    assert engines == "None None None"


PAIR = ["--target", str(models.path("quick", TARGET)), "--draft", str(models.path("quick", DRAFT))]
ONE = ["--dataset", "chat", "--count", "1", "--max-tokens", "8", "--budget", "4"]
NO_ENGINE = {
    "inspect": ([str(models.path("quick", DRAFT)), *PAIR[:2]], "made for"),
    "evaluate": ([*PAIR, *ONE], "1/1"),
    "simulate": (["--concurrency", "1", "--tokens", "400"], "ours / best fixed"),
    "advise": (["--concurrency", "1", "--tokens", "400"], "Over these loads"),
    "recipe": (["list"], "vllm-ddtree-dspark-cpu"),
}


@pytest.mark.parametrize("command", NO_ENGINE)
def test_without_an_engine_it_still_works(bare, command):
    arguments, said = NO_ENGINE[command]
    done = bare.run("specplug", command, *arguments)
    assert done.returncode == 0, done.stderr
    assert said in done.stdout


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_without_an_engine_doctor_says_which_is_missing(bare, engine):
    done = bare.run("specplug", "doctor", "--engine", engine)
    assert done.returncode == 1
    assert f"not installed; pip install 'specplug[{engine}]'" in done.stdout
    assert "Traceback" not in done.stderr


def test_without_an_engine_every_command_has_its_help(bare):
    code = (
        "import sys; from specplug import cli\n"
        "for name in sys.argv[1:]:\n"
        "    try: cli.main([name, '--help'])\n"
        "    except SystemExit as end: assert end.code == 0, name\n"
    )
    done = bare.run("python", "-c", code, *COMMANDS)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("usage: specplug ") == len(COMMANDS)


JUDGE = """
import json, sys
from importlib.metadata import entry_points
import specplug
(point,) = entry_points(group=sys.argv[1], name="specplug")
if sys.argv[1].startswith("vllm"):
    from vllm.plugins import load_general_plugins as load
    from specplug_vllm import argument_check
else:
    from sglang.srt.plugins import load_plugins as load
    from specplug_sglang import argument_check
load()
stages = []
try:
    argument_check.accept(json.loads(sys.argv[2]), stages.append)
except Exception as error:
    stages.append(str(error))
print(json.dumps([specplug.__file__, argument_check.__file__, point.value, stages]))
"""
COMMAND = {
    "vllm": [
        "vllm", "serve", str(models.path("quick", TARGET)), "--dtype", "float32", "--enforce-eager",
        "--max-model-len", "256", "--speculative-config",
        json.dumps({"method": "ddtree", "model": str(models.path("quick", DRAFT)), "tree_budget": 8}),
    ],
    "sglang": [
        "python", "-m", "sglang.launch_server", "--model-path", str(models.path("quick", TARGET)),
        "--device", "cpu", "--dtype", "float32", "--attention-backend", "torch_native",
        "--disable-cuda-graph",
        "--speculative-algorithm", "DDTREE", "--speculative-num-draft-tokens", "9",
        "--speculative-draft-model-path", str(models.path("quick", DRAFT)),
    ],
}  # fmt: skip
VARIABLES = {
    "vllm": {"TRITON_INTERPRET": "1"},
    "sglang": {"TRITON_INTERPRET": "1", "SPECPLUG_RIG_SGLANG": "1", "SGLANG_USE_CPU_ENGINE": "1"},
}
POINTS = {
    "vllm": ("vllm.general_plugins", "specplug_vllm.plugin:register"),
    "sglang": ("sglang.srt.plugins", "specplug_sglang.plugin:register"),
}


# Of both engines in the environment of vLLM's tests: the engine under test is a folder of packages.
@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(900)  # six starts of Python beside an engine; 60 s of them on a quiet machine
@pytest.mark.parametrize("engine", RIGS)
def test_beside_an_engine_the_wheel_is_its_plugin(release, tmp_path, engine):
    (packages,) = (ROOT / ".venvs" / engine).glob("lib/python*/site-packages")
    activate = f"import {RIGS[engine]}.activate; {RIGS[engine]}.activate.activate()"
    env = Installed(tmp_path / "env", release.wheel, packages=[str(packages), activate])
    group, point = POINTS[engine]

    def judged(**variables: str) -> list:
        arguments = ["-c", JUDGE, group, json.dumps(COMMAND[engine])]
        done = env.run("python", *arguments, **VARIABLES[engine], **variables)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    *files, found, stages = judged()
    assert all(Path(file).is_relative_to(env.folder) for file in files)
    assert (found, stages) == (point, ["parsed", "config accepted"])
    assert judged(SPECPLUG_DISABLE="1")[-1] != stages  # the control: without the plugin it is refused

    done = env.run("specplug", "doctor", "--engine", engine, "--no-start", "--json", **VARIABLES[engine])
    assert done.returncode == 0, done.stdout + done.stderr
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert str(env.folder) in checks["specplug"]["detail"]
    assert (checks["plugin"]["state"], checks["hook table"]["state"]) == ("ok", "ok")
