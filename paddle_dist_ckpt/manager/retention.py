"""Which steps a manager keeps: the rules, by numbers and metrics alone."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..arguments import as_integer
from ..folder.nothing import steps_text
from .arguments import checked_count

__all__ = ["Metrics", "Retention"]

_logger = logging.getLogger("paddle_dist_ckpt")
Metrics = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Retention:
    """Which steps are kept: see :class:`paddle_dist_ckpt.CheckpointManager`. What is made has a count in ``best``."""

    keep_last: int | None
    keep_every: int | None
    best: tuple[str, str] | tuple[str, str, int] | None

    def __post_init__(self) -> None:
        for name in ("keep_last", "keep_every"):
            object.__setattr__(self, name, checked_count(name, getattr(self, name)))
        best: Any = self.best
        if best is None:
            return
        name, mode, count = (*best, 1)[:3] if isinstance(best, tuple) and len(best) in (2, 3) else (None, None, None)
        if not isinstance(name, str) or mode not in ("min", "max") or (as_integer(count) or 0) < 1:
            allowed = "a tuple such as ('loss', 'min') or ('score', 'max', 3)"
            raise ValueError(f"best must be None or {allowed}, not {best!r}")
        plain = str.__str__(name)  # whatever str() makes of a member of an enum
        object.__setattr__(self, "best", (plain, "min" if mode == "min" else "max", as_integer(count)))

    @property
    def idle(self) -> str:
        """Which arguments keep nothing, for every step is kept, in words."""
        if self.keep_last is not None:
            return ""
        return " and ".join(name for name in ("keep_every", "best") if getattr(self, name) is not None)

    def warn(self, root: Path, metrics: Mapping[int, Metrics], newest: int, told: set[str]) -> None:
        """Say in the log what the user may not have meant of a step, each once.

        Args:
            root: The folder of steps.
            metrics: Of each committed step.
            newest: The step that was committed just now.
            told: What has been said before; what is said now is added.
        """
        given, higher = metrics.get(newest, {}), sorted(step for step in metrics if step > newest)
        if self.best is not None and self.best[0] not in given and "metric" not in told:
            told.add("metric")
            _logger.warning(
                "step %d was saved without the metric %r, by which best tells the best step; its metrics: %s",
                newest,
                self.best[0],
                ", ".join(map(repr, given)) or "none",
            )
        if higher and "higher" not in told:
            told.add("higher")
            _logger.warning(
                "step %d was saved, and %s has higher ones: %s. restore() takes the highest%s; a new run needs a root "
                "of its own",
                newest,
                root,
                steps_text(higher),
                "" if self.keep_last is None else f", and keep_last={self.keep_last} removes the lowest",
            )

    def best_of(self, metrics: Mapping[int, Metrics]) -> list[int]:
        """The best steps, the best one first and the later one of equals; none if there is no metric, or no step has
        it."""
        best: Any = self.best
        if best is None:
            return []
        name, mode, count = best
        sign = -1.0 if mode == "min" else 1.0
        values = {step: sign * found[name] for step, found in metrics.items() if name in found}
        known = {step: value for step, value in values.items() if not math.isnan(value)}
        return sorted(known, key=lambda step: (known[step], step), reverse=True)[:count]

    def doomed(self, metrics: Mapping[int, Metrics], newest: int, in_use: Collection[int | None]) -> list[int]:
        """The steps that are not kept, ascending.

        Args:
            metrics: Of each committed step.
            newest: The step that was committed just now.
            in_use: Steps that are being read.
        """
        if self.keep_last is None:
            return []
        steps = sorted(metrics)
        kept = {newest, *self.best_of(metrics), *in_use, *steps[-self.keep_last :]}
        return [step for step in steps if step not in kept and (self.keep_every is None or step % self.keep_every != 0)]
