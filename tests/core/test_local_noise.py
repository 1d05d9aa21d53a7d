"""Noise keyed by (seed, position): the generator's bits, and the law of the draws."""

import math

import torch

from specplug.local.noise import draw, gumbel

WORD = (1 << 64) - 1


def splitmix(state: int) -> int:
    """SplitMix64's output function, as published."""
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & WORD
    return state ^ (state >> 31)


def test_the_published_generator():
    """The first outputs of SplitMix64 seeded with 0 (reference values of its public implementation)."""
    golden = 0x9E3779B97F4A7C15
    outputs = [splitmix(golden * n & WORD) for n in (1, 2)]
    assert outputs == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4]


def test_noise_is_that_of_python_integers():
    golden = 0x9E3779B97F4A7C15
    seeds, positions = [0, 1, 2**62, 12345], [0, 1, 4095, 2**31]
    noise = gumbel(torch.tensor(seeds), torch.tensor([positions] * 4), 5)
    for r, seed in enumerate(seeds):
        for p, position in enumerate(positions):
            for token in range(5):
                key = splitmix((splitmix(seed) + position * golden) & WORD)
                bits = splitmix((key + (token + 1) * golden) & WORD) >> 12
                expected = -math.log(-math.log((bits + 0.5) / 2**52))
                assert math.isclose(float(noise[r, p, token]), expected, rel_tol=1e-6, abs_tol=1e-6)


def test_draws_follow_the_softmax():
    """Chi-square over 40,000 positions of one seed, at 1 in 1,000; temperature 1 taken for 2 fails."""
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, 0.5])
    count = 40_000

    def statistic(temperature: float, assumed: float) -> float:
        drawn = draw(
            logits.expand(1, count, 5),
            temperature=temperature,
            seeds=torch.tensor([7]),
            first=torch.tensor([3]),
            depths=torch.arange(count)[None],
            max_depth=count - 1,
        )
        expected = (logits / assumed).softmax(-1) * count
        return float(((drawn[0].bincount(minlength=5) - expected) ** 2 / expected).sum())

    limit = 18.47  # chi-square with 4 degrees of freedom, 0.999
    assert statistic(1.0, 1.0) < limit
    assert statistic(0.6, 0.6) < limit
    assert statistic(1.0, 2.0) > limit  # negative control


def test_neighbouring_positions_and_seeds_are_uncorrelated():
    noise = gumbel(torch.arange(40), torch.arange(50).expand(40, -1), 30)
    flat = (noise - noise.mean()) / noise.std()
    for dim in range(3):
        ahead = flat.roll(1, dim)
        assert abs(float((flat * ahead).mean())) < 4 / math.sqrt(flat.numel())


def test_rows_of_one_depth_share_their_noise_and_others_do_not():
    logits = torch.zeros(1, 4, 1000)
    depths = torch.tensor([[0, 1, 1, 2]])
    arguments = {"temperature": 1.0, "seeds": torch.tensor([9]), "max_depth": 2}
    drawn = draw(logits, first=torch.tensor([5]), depths=depths, **arguments)[0]
    assert drawn[1] == drawn[2]
    assert len(set(drawn.tolist())) == 3
    later = draw(logits, first=torch.tensor([6]), depths=depths, **arguments)[0]
    assert later[0] == drawn[1]  # the same position, reached at another depth


def test_temperature_zero_is_the_argmax():
    logits = torch.tensor([[[0.0, 3.0, 1.0]]])
    one = torch.zeros(1, dtype=torch.int64)
    assert draw(logits, temperature=0, seeds=one, first=one, depths=one[None], max_depth=0).tolist() == [[1]]
