"""What is released: the source distribution, and the wheel built from it, as `python -m build` makes them."""

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]


class Release(NamedTuple):
    """The two files of a release."""

    sdist: Path
    wheel: Path


@pytest.fixture(scope="session")
def release(tmp_path_factory) -> Release:
    """Built from the working tree, with the installed build backend."""
    out = tmp_path_factory.mktemp("release")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (sdist,), (wheel,) = out.glob("*.tar.gz"), out.glob("*.whl")
    return Release(sdist, wheel)


@pytest.fixture(scope="session")
def wheel(release) -> zipfile.ZipFile:
    """The wheel pip would install."""
    return zipfile.ZipFile(release.wheel)


@pytest.fixture(scope="session")
def sdist(release) -> set[str]:
    """Files of the source distribution, from its root folder on."""
    with tarfile.open(release.sdist) as archive:
        return {member.name.partition("/")[2] for member in archive if member.isfile()}
