"""What is installed: one distribution, no folder that shadows another package, no engine imported by the
core.
"""

import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCE_ROOTS = ("kernels", "vllm_plugin", "sglang_plugin")
# what the distribution holds, and where each lies
SOURCES = {
    "specplug": ROOT,
    "specplug_kernels": ROOT / "kernels",
    "specplug_vllm": ROOT / "vllm_plugin",
    "specplug_sglang": ROOT / "sglang_plugin",
}


def python(code: str, *path: Path) -> str:
    """Output of a fresh Python started in the repository root, with `path` added at the end of sys.path."""
    extended = f"import sys; sys.path += {[str(one) for one in path]!r}\n{code}"
    done = subprocess.run([sys.executable, "-c", extended], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_source_roots_are_no_packages():
    assert [name for name in SOURCE_ROOTS if (ROOT / name / "__init__.py").exists()] == []


def test_kernels_of_another_distribution_is_found_from_the_repository_root(tmp_path):
    package = tmp_path / "kernels"
    package.mkdir()
    (package / "__init__.py").write_text("origin = 'another distribution'\n")
    # Even last on sys.path: `python -c` puts the repository root, with our folder kernels/, first.
    assert python("import kernels; print(kernels.origin)", tmp_path) == "another distribution"


def test_the_check_above_would_see_a_shadowing_package(tmp_path):
    package = tmp_path / "kernels"
    package.mkdir()
    (package / "__init__.py").write_text("origin = 'another distribution'\n")
    code = (
        f"sys.path.insert(0, {str(tmp_path / 'shadow')!r}); import kernels; print(hasattr(kernels, 'origin'))"
    )
    (tmp_path / "shadow" / "kernels").mkdir(parents=True)
    (tmp_path / "shadow" / "kernels" / "__init__.py").touch()
    assert python(code, tmp_path) == "False"


def test_importing_the_core_imports_no_engine_and_no_triton():
    loaded = python(
        "import specplug, specplug.cli; print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    )
    assert "specplug" in loaded.split()
    foreign = {"vllm", "sglang", "triton", *SOURCES} - {"specplug"}
    assert foreign.isdisjoint(loaded.split())


def test_entry_points_lead_to_what_is_installed():
    found = {(one.group, one.name): one.value for one in metadata.distribution("specplug").entry_points}
    assert found == {
        ("console_scripts", "specplug"): "specplug.cli:main",
        ("vllm.general_plugins", "specplug"): "specplug_vllm.plugin:register",
        ("sglang.srt.plugins", "specplug"): "specplug_sglang.plugin:register",
    }


def test_wheel_holds_the_four_packages_and_nothing_else(wheel):
    top = {name.partition("/")[0] for name in wheel.namelist()}
    version = metadata.version("specplug")
    assert top == {*SOURCES, f"specplug-{version}.dist-info"}


def test_wheel_holds_every_file_of_the_packages(wheel):
    expected = {
        path.relative_to(source).as_posix()
        for package, source in SOURCES.items()
        for path in (source / package).rglob("*")
        if path.suffix in {".py", ".txt", ".npz", ".json", ".jsonl", ".safetensors"}
    }
    assert any(name.endswith("deep-thin/target/model.safetensors") for name in expected)
    assert expected <= set(wheel.namelist())


def test_wheel_pins_no_engine_dependency(wheel):
    (name,) = [one for one in wheel.namelist() if one.endswith(".dist-info/METADATA")]
    lines = wheel.read(name).decode().splitlines()
    required = {line.removeprefix("Requires-Dist: ") for line in lines if line.startswith("Requires-Dist: ")}
    assert {one for one in required if "extra ==" not in one} == {
        "torch", "numpy", "msgspec", "packaging", "safetensors", "tqdm",
    }  # fmt: skip


def test_no_engine_is_named_by_the_runtime_dependencies_of_the_project():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert not [one for one in project["dependencies"] if one.startswith(("vllm", "sglang", "triton"))]
