"""Ratios of what was measured side by side."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

__all__ = ["median_of", "paired_ratio"]

_RESAMPLES = 4000


def median_of(samples: Mapping[int, float]) -> float:
    """The median over all rounds."""
    return float(np.median(list(samples.values())))


def paired_ratio(samples: Mapping[int, float], base: Mapping[int, float]) -> tuple[float, float, float] | None:
    """The median over the common rounds of the ratio within a round, and its 95 % percentile bootstrap interval."""
    rounds = sorted(samples.keys() & base.keys())
    if not rounds:
        return None
    ratios = np.array([samples[i] / base[i] for i in rounds])
    drawn = np.random.default_rng(0).choice(ratios, (_RESAMPLES, len(ratios)))
    low, high = np.percentile(np.median(drawn, axis=1), [2.5, 97.5])
    return float(np.median(ratios)), float(low), float(high)
