"""Stands in for the library `datasets`: SGLang's load generator imports it, for data sets of the hub alone.

The test environment does not have it, as it would bring pyarrow and pandas.
"""

from typing import NoReturn


def load_dataset(*arguments: object, **options: object) -> NoReturn:
    """Raises RuntimeError: no data set of the hub is read here."""
    raise RuntimeError("datasets: not installed in the test environment; give prompts in a file")
