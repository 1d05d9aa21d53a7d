"""Tests of kernels share this process: what they need must not reach any other test."""

import os
from pathlib import Path

import pytest


@pytest.mark.skipif(
    not Path("/proc/self/environ").exists(), reason="needs the environment the process began with"
)
def test_the_interpreter_of_kernel_tests_is_not_in_the_environment_of_others():
    began_with = Path("/proc/self/environ").read_bytes().split(b"\0")
    assert (b"TRITON_INTERPRET=1" in began_with) == (os.environ.get("TRITON_INTERPRET") == "1")
