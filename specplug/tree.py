"""Draft trees of a whole batch, and the attention mask that verifies them.

Node j of a request is the draft token ``tokens[j]`` proposed after its parent ``parents[j]``; parent -1 is
the root, the last committed token. Nodes stand in score order, so a parent precedes its children and the
first n nodes are themselves a valid tree, the best one of n nodes. The verify window of a request has one row
for the root (row 0) and one a node (row j + 1). Nothing here reads a tensor on the host except ``validate``.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

PADDING = {"tokens": 0, "parents": -1, "depths": 0, "scores": float("-inf")}


@dataclass(frozen=True)
class DraftTree:
    """Trees of R requests, each padded to B nodes. Padding: token 0, parent -1, depth 0, score -inf.

    Token 0 is a real token: only ``counts`` says which nodes exist. All tensors live on one device.
    """

    tokens: torch.Tensor  # [R, B] int64, draft token of each node
    parents: torch.Tensor  # [R, B] int32, -1 = root, else parents[j] < j
    depths: torch.Tensor  # [R, B] int32, 1..gamma
    scores: torch.Tensor  # [R, B] fp32, log a(v) of the path, non-increasing along a row
    counts: torch.Tensor  # [R] int32, nodes of each request, root not counted

    def __post_init__(self) -> None:
        for name in PADDING:
            got = tuple(getattr(self, name).shape)
            if got != tuple(self.tokens.shape) or len(got) != 2:
                raise ValueError(
                    f"DraftTree.{name}: expected shape [R, B] = {tuple(self.tokens.shape)}, got {got}"
                )
        if tuple(self.counts.shape) != (self.tokens.shape[0],):
            raise ValueError(
                f"DraftTree.counts: expected [{self.tokens.shape[0]}], got {tuple(self.counts.shape)}"
            )

    @classmethod
    def empty(cls, requests: int, budget: int, device: torch.device | str | None = None) -> DraftTree:
        """Trees without a node: the root alone in every request."""
        shape = (requests, budget)
        return cls(
            tokens=torch.zeros(shape, dtype=torch.int64, device=device),
            parents=torch.full(shape, -1, dtype=torch.int32, device=device),
            depths=torch.zeros(shape, dtype=torch.int32, device=device),
            scores=torch.full(shape, float("-inf"), dtype=torch.float32, device=device),
            counts=torch.zeros(requests, dtype=torch.int32, device=device),
        )

    @classmethod
    def chain(
        cls,
        tokens: torch.Tensor,  # [R, gamma] int64
    ) -> DraftTree:
        """Chains as the trees they are, every score 0."""
        places = torch.arange(tokens.shape[1], dtype=torch.int32, device=tokens.device).expand_as(tokens)
        scores = torch.zeros(tokens.shape, device=tokens.device)
        return cls(
            tokens=tokens, parents=places - 1, depths=places + 1, scores=scores, counts=places[:, -1] + 1
        )

    @property
    def budget(self) -> int:
        """Width B: most nodes a request of this batch can hold."""
        return self.tokens.shape[1]

    def to(self, device: torch.device | str) -> DraftTree:
        """The same trees on a device."""
        return DraftTree(*(getattr(self, field.name).to(device) for field in fields(self)))

    def select(
        self,
        mask: torch.Tensor,  # [R] bool
        other: DraftTree,
    ) -> DraftTree:
        """Row by row: this tree where ``mask`` is true, ``other`` elsewhere; the narrower one is padded."""
        if other.tokens.shape[0] != self.tokens.shape[0] or tuple(mask.shape) != (self.tokens.shape[0],):
            raise ValueError(
                f"DraftTree.select: expected mask and other of {self.tokens.shape[0]} requests, "
                f"got mask {tuple(mask.shape)} and other of {other.tokens.shape[0]}"
            )
        width = max(self.budget, other.budget)
        chosen = {}
        for name, fill in PADDING.items():
            mine, theirs = (
                torch.nn.functional.pad(getattr(t, name), (0, width - t.budget), value=fill)
                for t in (self, other)
            )
            chosen[name] = torch.where(mask[:, None], mine, theirs)
        return DraftTree(**chosen, counts=torch.where(mask, self.counts, other.counts))

    def validate(self) -> None:
        """Check every invariant on the host, for tests. Raises ValueError naming request and node."""
        rows = {field.name: getattr(self, field.name).tolist() for field in fields(self)}
        for r, count in enumerate(rows["counts"]):
            if not 0 <= count <= self.budget:
                raise ValueError(f"request {r}: expected a count in 0..{self.budget}, got {count}")
            tokens, parents, depths, scores = (
                rows[name][r] for name in ("tokens", "parents", "depths", "scores")
            )
            children: set[tuple[int, int]] = set()
            for j in range(self.budget):
                where = f"request {r} node {j}"
                if j >= count:
                    got = {name: rows[name][r][j] for name in PADDING}
                    if got != PADDING:
                        raise ValueError(f"{where}: expected padding {PADDING}, got {got}")
                    continue
                parent = parents[j]
                if not -1 <= parent < j:
                    raise ValueError(f"{where}: expected a parent in -1..{j - 1}, got {parent}")
                if depths[j] != (1 if parent == -1 else depths[parent] + 1):
                    raise ValueError(f"{where}: depth {depths[j]} is not its parent's plus one")
                if not float("-inf") < scores[j] <= (scores[j - 1] if j else 0.0):
                    raise ValueError(f"{where}: score {scores[j]} is not finite and at most the one before")
                if (parent, tokens[j]) in children:
                    raise ValueError(f"{where}: token {tokens[j]} is already a child of node {parent}")
                children.add((parent, tokens[j]))


def ancestor_mask(
    parents: torch.Tensor,  # [R, B] int32, -1 = root
    counts: torch.Tensor,  # [R] int32
    *,
    max_depth: int,
) -> torch.Tensor:
    """Who sees whom inside the verify window: [R, B + 1, B + 1] bool, row = query, column = key.

    Row and column 0 are the root, j + 1 is node j. A row sees the root, its ancestors and itself; a padding
    row sees the root and itself. ``max_depth`` is the deepest node's depth (gamma); deeper nodes would miss
    ancestors.
    """
    requests, budget = parents.shape
    node = torch.arange(budget, device=parents.device)
    above = torch.where(node < counts[:, None], parents.long() + 1, 0)
    above = torch.nn.functional.pad(above, (1, 0))  # window rows; the root is its own parent
    row = torch.arange(budget + 1, device=parents.device).expand(requests, -1)
    seen = torch.zeros(requests, budget + 1, budget + 1, dtype=torch.bool, device=parents.device)
    for _ in range(max_depth + 1):
        seen.scatter_(2, row[:, :, None], True)
        row = above.gather(1, row)
    return seen


def sibling_links(
    parents: torch.Tensor,  # [R, B] int32, -1 = root
    counts: torch.Tensor,  # [R] int32
) -> tuple[torch.Tensor, torch.Tensor]:
    """First child and next sibling of every window row, -1 = none, both [R, B + 1] int64.

    Memory: R * (B + 1)^2 bytes.
    """
    rows = torch.arange(parents.shape[1] + 1, device=parents.device)
    above = torch.nn.functional.pad(parents.long() + 1, (1, 0), value=-1)  # [R, W] the parent's row
    above = torch.where(rows <= counts[:, None], above, -1)
    child = above[:, None, :] == rows[:, None]  # [R, W, W] row j is a child of row i
    sibling = (above[:, None, :] == above[:, :, None]) & (rows > rows[:, None]) & (above >= 0)[..., None]
    first, following = (torch.where(one.any(2), one.int().argmax(2), -1) for one in (child, sibling))
    return first, following
