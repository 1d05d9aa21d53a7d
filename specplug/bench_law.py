"""Do two sides' sampled answers follow one law? A chi-square test of homogeneity over the first tokens.

At position t of one prompt's answers the tokens of n samples are n independent draws, whatever came before
them. For each prompt the table (side x token) gives a chi-square with (tokens - 1) degrees of freedom;
prompts are independent, so statistics and degrees add up over them. Positions are not, so the least of their
p-values times their number is taken (Bonferroni). Tokens seen fewer than LEAST times on both sides together
are pooled with their neighbours by id, as the statistic follows its law only where 5 or more are expected a
cell (Cochran 1954).

What it does not see: a dependence between positions that leaves every position's law alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from specplug.bench_result import Distribution

LEAST = 10  # two sides of equal size: 5 expected in each
LEVEL = 1e-3  # one arm of a thousand is refused though its law is right
_ENDED = -1  # token of an answer that had ended; no vocabulary has it

Answers = Sequence[Sequence[int]]  # token ids


class Test(NamedTuple):
    """One position."""

    chi_square: float
    degrees_of_freedom: int

    @property
    def p_value(self) -> float:
        """Probability of a chi-square at least as large under one law; 1 without a degree of freedom."""
        import torch  # not with the command line, which reads no tensor

        if self.degrees_of_freedom == 0:
            return 1.0
        half = torch.tensor([self.degrees_of_freedom, self.chi_square], dtype=torch.float64) / 2
        return float(torch.special.gammaincc(half[0], half[1]))


def compare(
    baseline: Sequence[Answers],  # by prompt, then by sample
    arm: Sequence[Answers],
    *,
    positions: int,
    temperature: float,
) -> Distribution:
    """The test at the position where it is most against one law.

    Raises ValueError where the two sides have not equally many samples of the same prompts.
    """
    sizes = [[len(answers) for answers in side] for side in (baseline, arm)]
    if sizes[0] != sizes[1] or len(set(sizes[0])) != 1:
        raise ValueError(f"samples: expected equally many of each prompt on both sides, got {sizes}")
    tests = [at(baseline, arm, position) for position in range(positions)]
    worst = min(tests, key=lambda test: (test.p_value, -test.degrees_of_freedom))
    return Distribution(
        temperature=temperature,
        prompts=len(baseline),
        samples=sizes[0][0],
        positions=positions,
        chi_square=worst.chi_square,
        degrees_of_freedom=worst.degrees_of_freedom,
        p_value=min(1.0, worst.p_value * positions),
        level=LEVEL,
    )


def at(baseline: Sequence[Answers], arm: Sequence[Answers], position: int) -> Test:
    """The test of one position, summed over the prompts."""
    statistic, degrees = 0.0, 0
    for mine, other in zip(baseline, arm, strict=True):
        sides = [Counter(_token(answer, position) for answer in answers) for answers in (mine, other)]
        cells = [[0], [0]]
        # Rare tokens share a cell with their neighbours by id: that choice knows nothing of the sides.
        for token in sorted(sides[0] | sides[1]):
            if cells[0][-1] + cells[1][-1] >= LEAST:
                for counts in cells:
                    counts.append(0)
            for counts, side in zip(cells, sides, strict=True):
                counts[-1] += side[token]
        if len(cells[0]) > 1 and cells[0][-1] + cells[1][-1] < LEAST:
            for counts in cells:
                last = counts.pop()
                counts[-1] += last
        # Equal sides: (a - e)^2 / e + (b - e)^2 / e with e = (a + b) / 2 is (a - b)^2 / (a + b).
        statistic += sum((a - b) ** 2 / (a + b) for a, b in zip(*cells, strict=True))
        degrees += len(cells[0]) - 1
    return Test(statistic, degrees)


def _token(answer: Sequence[int], position: int) -> int:
    return answer[position] if position < len(answer) else _ENDED
