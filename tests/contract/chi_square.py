"""How far counts are from a law."""

import numpy as np


def z_score(counts: dict[tuple[int, ...], int], law: dict[tuple[int, ...], float], total: int) -> float:
    """Chi-square over cells of at least 5 expected counts (the rest pooled), as a z-score."""
    assert set(counts) <= set(law), "a token that the target cannot emit"
    statistic, cells, rest_seen, rest_expected = 0.0, 0, 0, 0.0
    for tokens, probability in law.items():
        seen, expected = counts.get(tokens, 0), probability * total
        if expected < 5:
            rest_seen, rest_expected = rest_seen + seen, rest_expected + expected
            continue
        statistic += (seen - expected) ** 2 / expected
        cells += 1
    if rest_expected > 5:
        statistic += (rest_seen - rest_expected) ** 2 / rest_expected
        cells += 1
    return (statistic - (cells - 1)) / np.sqrt(2 * (cells - 1))
