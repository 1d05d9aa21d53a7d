"""Options in a JSON file that an environment variable names, for engines that take none of ours otherwise.

What file and command line both say must agree.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def read_options(variable: str) -> dict[str, Any]:
    """Content of the file, {} where the variable is not set or empty; keys are checked by who uses them.

    Raises ValueError for a file that cannot be read or is not a JSON object.
    """
    name = os.environ.get(variable)
    if not name:
        return {}
    try:
        content = json.loads(Path(name).expanduser().read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{variable}: cannot read {name}: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"{variable}: {name} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{variable}: {name}: expected a JSON object, got {type(content).__name__}")
    return content


def merged(
    content: Mapping[str, Any], flags: Mapping[str, tuple[str, Any]], *, variable: str
) -> dict[str, Any]:
    """The file's options and those of the command line: key -> (flag, value, None = not given).

    Raises ValueError where both say something and it differs.
    """
    together = dict(content)
    for key, (flag, value) in flags.items():
        if value is not None and together.setdefault(key, value) != value:
            raise ValueError(f"{key}: {variable} says {together[key]!r} and {flag} says {value!r}; keep one")
    return together
