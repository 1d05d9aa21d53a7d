"""A checkpoint's folder from what a user wrote: a local folder, or a hub id that is fetched or found in the
cache.

huggingface_hub is imported only for a hub id, and it alone decides about the network (HF_HUB_OFFLINE,
HF_HOME).
"""

import os
import re
from collections.abc import Sequence
from pathlib import Path

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def checkpoint_folder(
    name: str,  # local folder or hub id, as the user wrote it
    *,
    files: Sequence[str],  # glob patterns of the files wanted; others are not fetched
    revision: str | None = None,  # branch, tag or commit of a hub id; None = the default branch
) -> Path:
    """The local folder that holds `files` of the checkpoint `name`.

    Raises ValueError when the folder is missing, when `name` is a file, and when the hub has no such
    repository or is out of reach.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise ValueError(f"{name}: expected a checkpoint folder, got a file; name the folder that holds it")
    if not _HUB_ID.fullmatch(name) or Path(name).parts[0] in (".", "..") or Path(name).parent.is_dir():
        raise ValueError(
            f"missing file: {name} does not exist; expected a checkpoint folder or a hub id org/name"
        )
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
    except ImportError:
        raise ValueError(
            f"missing file: {name} is no local folder, and reading a hub id needs huggingface_hub; install it"
        ) from None
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(files)))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        offline = " (HF_HUB_OFFLINE is set)" if os.environ.get("HF_HUB_OFFLINE") else ""
        raise ValueError(
            f"missing file: {name} is no local folder, and the hub did not give it{offline}: "
            f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no reason given'}"
        ) from None
