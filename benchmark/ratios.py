"""Medians with their intervals, and ratios of what was measured side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

__all__ = ["by_work", "median_interval", "median_of", "paired_ratio"]

_RESAMPLES = 4000


def median_of(samples: Mapping[int, float]) -> float:
    """The median over all rounds."""
    return float(np.median(list(samples.values())))


def paired_ratio(samples: Mapping[int, float], base: Mapping[int, float]) -> tuple[float, float, float] | None:
    """The median over the common rounds of the ratio within a round, and its 95 % percentile bootstrap interval."""
    rounds = sorted(samples.keys() & base.keys())
    return median_interval([samples[i] / base[i] for i in rounds]) if rounds else None


def median_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """The median, and its 95 % percentile bootstrap interval."""
    drawn = np.random.default_rng(0).choice(np.array(values), (_RESAMPLES, len(values)))
    low, high = np.percentile(np.median(drawn, axis=1), [2.5, 97.5])
    return float(np.median(values)), float(low), float(high)


def by_work(rows: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str, str], Any]:
    """The samples of ``benchmark.run``, by state, work and peer's name."""
    return {(row["state"], row["work"], row["peer"]): row["samples"] for row in rows}
