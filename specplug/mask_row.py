"""Is the mask token's embedding a real one? Read from one row of one tensor.

Drafts embed the mask token at every row but the anchor's. Where its row in the embedding was never trained it
is near zero, and the trained vector stands in a sidecar file, mask_embedding.pt: without it a draft of 6.3
accepted tokens a round was served at 1.4. The sidecar is a pickle, so specplug never opens it; vLLM does, for
DFlash drafts.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from safetensors import safe_open

from specplug.checkpoint import DraftCheckpoint
from specplug.weights import read_tensors

NEAR_ZERO = 1e-4
"""Root mean square below which a row counts as untrained. Origin: 1/200 of the 0.02 that these models are
initialised with (``initializer_range``)."""

SIDECAR = "mask_embedding.pt"
EMBEDDING = "embed_tokens.weight"


class MaskRow(NamedTuple):
    """What the draft embeds its mask token with."""

    source: str | None  # where the row was read; None = the draft borrows the target's, which was not given
    rms: float | None  # of the row's entries
    sidecar: bool  # mask_embedding.pt lies beside the draft

    @property
    def warning(self) -> str | None:
        """What is wrong, in one sentence; None where nothing is known to be."""
        if self.rms is None or self.rms > NEAR_ZERO:
            return None
        if self.sidecar:
            return f"the mask token's row is zero; what does not read {SIDECAR} accepts almost nothing"
        return f"the mask token's row is zero and there is no {SIDECAR}: expect almost no accepted drafts"


def read_mask_row(draft: DraftCheckpoint, target: Path | None = None) -> MaskRow:
    """Root mean square of the mask token's embedding row: the draft's own, else the one in ``target``.

    At most one row is read, after every header is checked. Raises ValueError for damaged files.
    """
    sidecar = (draft.path / SIDECAR).is_file()
    folder = draft.path if draft.own_embedding else target
    if folder is None or not any(folder.glob("*.safetensors")):
        return MaskRow(None, None, sidecar)
    found = {
        name: info
        for name, info in read_tensors(folder).items()
        if name == EMBEDDING or name.endswith(f".{EMBEDDING}")
    }
    if len(found) != 1:  # none, or a multimodal target with several
        return MaskRow(None, None, sidecar)
    name, info = next(iter(found.items()))
    if len(info.shape) != 2 or info.shape[0] <= draft.mask_token_id:
        raise ValueError(
            f"{folder}: {name}: expected a row for mask token {draft.mask_token_id}, got shape {info.shape}"
        )
    with safe_open(folder / info.file, framework="pt") as opened:
        row = opened.get_slice(name)[draft.mask_token_id : draft.mask_token_id + 1].float()
    return MaskRow(f"{folder / info.file}: {name}", float(row.square().mean().sqrt()), sidecar)
