"""Options from a file and a command line that must agree."""

import pytest

from specplug.options_file import merged, read_options

VARIABLE = "SPECPLUG_TEST_OPTIONS"


def test_no_file_is_no_options(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    assert read_options(VARIABLE) == {}


@pytest.mark.parametrize(
    ("content", "reason"), [("{", "not JSON"), ("[1]", "expected a JSON object, got list")]
)
def test_what_is_not_an_object_is_refused(content, reason, tmp_path, monkeypatch):
    file = tmp_path / "options.json"
    file.write_text(content)
    monkeypatch.setenv(VARIABLE, str(file))
    with pytest.raises(ValueError, match=f"{VARIABLE}: .*{reason}"):
        read_options(VARIABLE)


def test_a_file_that_cannot_be_read_is_named(monkeypatch):
    monkeypatch.setenv(VARIABLE, "/no/such/file.json")
    with pytest.raises(ValueError, match="cannot read /no/such/file"):
        read_options(VARIABLE)


def test_both_together_and_the_same_twice():
    flags = {"a": ("--a", 2), "b": ("--b", None), "c": ("--c", 3)}
    assert merged({"b": 5, "c": 3}, flags, variable=VARIABLE) == {"a": 2, "b": 5, "c": 3}


def test_what_differs_is_refused():
    with pytest.raises(ValueError, match=f"a: {VARIABLE} says 1 and --a says 2; keep one"):
        merged({"a": 1}, {"a": ("--a", 2)}, variable=VARIABLE)
