"""A table of an engine's names, checked against folders of source that are written here."""

import pytest

from specplug.hook_table import Hook, check, package_root, read_hooks

SOURCE = """
class Runner:
    def step(self, batch, *, width):
        return self.sampler(batch, name="seeds")

def load(path): ...
"""


@pytest.fixture
def root(tmp_path):
    (tmp_path / "engine.py").write_text(SOURCE)
    return tmp_path


def result(root, symbol, **expected):
    (status,) = check([Hook("engine.py", symbol, "use", "why it matters", **expected)], root)
    return status


@pytest.mark.parametrize(
    ("symbol", "expected"),
    [
        ("load", {"params": ("path",)}),
        ("Runner", {"mentions": ("width", "sampler")}),
        ("Runner.step", {"params": ("batch", "width"), "mentions": ("sampler", "name", "seeds")}),
    ],
)
def test_what_is_there_is_found(root, symbol, expected):
    status = result(root, symbol, **expected)
    assert status.ok
    assert status.name == f"engine.py:{symbol}"
    assert status.detail == "use: why it matters"


@pytest.mark.parametrize(
    ("symbol", "expected", "detail"),
    [
        ("save", {}, "not found"),
        ("Runner.load", {}, "not found"),
        ("Runner.step", {"params": ("batch", "depth")}, "takes no argument depth"),
        ("Runner.step", {"mentions": ("sampler", "walk")}, "no longer refers to walk"),
    ],
)
def test_what_moved_is_named(root, symbol, expected, detail):
    status = result(root, symbol, **expected)
    assert not status.ok
    assert status.detail == f"{detail}; why it matters"


def test_a_file_that_moved_is_named(root):
    (status,) = check([Hook("elsewhere.py", "load", "use", "why it matters")], root)
    assert (status.ok, status.detail) == (False, "no such file in this release; why it matters")


def test_the_folder_of_an_installed_package():
    assert (package_root("torch") / "__init__.py").is_file()
    with pytest.raises(ModuleNotFoundError, match="no_such_engine is not installed"):
        package_root("no_such_engine")


def test_a_table_in_a_file_has_a_hook_a_line(tmp_path):
    file = tmp_path / "hooks.txt"
    file.write_text(
        "# title\n\nengine.py | Runner.step | patch | why, in words | batch width | sampler\n"
        "engine.py | load | use | no more |  |\n"
    )
    assert read_hooks(file) == (
        Hook("engine.py", "Runner.step", "patch", "why, in words", ("batch", "width"), ("sampler",)),
        Hook("engine.py", "load", "use", "no more"),
    )


@pytest.mark.parametrize("line", ["engine.py | load | use | why", "engine.py | load | why | use | | "])
def test_a_line_of_other_fields_is_refused(tmp_path, line):
    file = tmp_path / "hooks.txt"
    file.write_text(f"# title\n{line}\n")
    with pytest.raises(ValueError, match=r"hooks.txt:2: expected path \| symbol"):
        read_hooks(file)
