"""Recordings made by hand or at random for the tests of recording, replay and simulate."""

import numpy as np

from specplug.recording import About, Recording, request_arrays


def by_hand(*, complete: bool = True) -> Recording:
    """One request of 4 answer tokens, trees of up to 3 nodes, chains of 2.

    Position 0: nodes 0, 1 below the root, 2 below 0; the target takes 0 and 2. Position 1: only node 1 is
    taken. Position 2: no node is. Position 3: an empty tree. The chains accept 1, 0, 0, 0 tokens.
    """
    minus = -np.inf
    return Recording(
        about=About(
            target="t", draft="d", datasets=["a"], max_tokens=6, candidates=1, seed=0, complete=complete
        ),
        requests=request_arrays([(0, 0.0, 0, 10, 4)]),
        request=np.zeros(4, np.int32),
        position=np.arange(4, dtype=np.int32),
        counts=np.array([3, 2, 3, 0], np.int32),
        parents=np.array([[-1, -1, 0], [-1, -1, -1], [-1, 0, 1], [-1, -1, -1]], np.int16),
        log_probs=np.log(
            [[0.5, 0.25, 0.25], [0.5, 0.25, 0.0], [0.5, 0.5, 0.125], [0.0, 0.0, 0.0]],
            out=np.full((4, 3), minus, np.float32),
            where=np.array([[1, 1, 1], [1, 1, 0], [1, 1, 1], [0, 0, 0]], bool),
        ),
        accepted=np.array([[1, 0, 1], [0, 1, 0], [0, 0, 0], [0, 0, 0]], bool),
        chain_log_probs=np.log(np.array([[0.5, 0.25], [0.5, 0.25], [0.5, 0.5], [0.5, 0.25]], np.float32)),
        chain_accepted=np.array([1, 0, 0, 0], np.int32),
    )


def at_random(
    seed: int,
    *,
    requests: int = 12,
    budget: int = 16,
    depth: int = 4,
    temperatures: tuple[float, ...] = (0.0, 0.8),
) -> Recording:
    """A complete recording of random trees whose nodes are accepted with their path probability."""
    random = np.random.default_rng(seed)
    rows = []
    for number in range(requests):
        rows.append(
            (number % 2, temperatures[number // 2 % len(temperatures)], number, 10 + number, 5 + number % 7)
        )
    lengths = [row[4] for row in rows]
    total = sum(lengths)
    parents = np.full((total, budget), -1, np.int16)
    log_probs = np.full((total, budget), -np.inf, np.float32)
    accepted = np.zeros((total, budget), bool)
    counts = random.integers(0, budget + 1, total).astype(np.int32)
    chain = np.log(random.uniform(0.3, 0.99, (total, depth))).cumsum(1).astype(np.float32)
    followed = np.zeros(total, np.int32)
    for n in range(total):
        depths: list[int] = []
        score, taken = 0.0, {-1}
        closed: set[int] = set()  # rows one of whose children is accepted
        for node in range(counts[n]):
            legal = [p for p in range(-1, node) if p < 0 or depths[p] < depth]
            parent = int(random.choice(legal))
            score -= float(random.exponential(0.3))
            parents[n, node], log_probs[n, node] = parent, score
            depths.append(1 if parent < 0 else depths[parent] + 1)
            if parent in taken and parent not in closed and random.random() < 0.4:
                accepted[n, node] = True
                taken.add(node)
                closed.add(parent)
        while followed[n] < depth and random.random() < 0.6:
            followed[n] += 1
    return Recording(
        about=About(
            target="t", draft="d", datasets=["a", "b"], max_tokens=11, candidates=8, seed=0, complete=True
        ),
        requests=request_arrays(rows),
        request=np.repeat(np.arange(requests), lengths).astype(np.int32),
        position=np.concatenate([np.arange(length) for length in lengths]).astype(np.int32),
        counts=counts,
        parents=parents,
        log_probs=log_probs,
        accepted=accepted,
        chain_log_probs=chain,
        chain_accepted=followed,
        survivals=np.where(
            np.arange(budget) < counts[:, None], random.uniform(0.1, 0.9, parents.shape), 0
        ).astype(np.float32),
        chain_survivals=random.uniform(0.1, 0.9, chain.shape).astype(np.float32),
    )
