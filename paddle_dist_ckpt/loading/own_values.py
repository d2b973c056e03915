"""Which rank's value a rank takes, of those of which every rank keeps its own."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from ..tree.paths import RankIndex, own_among, parent_of, parse_path, plain_key

__all__ = ["OwnValues"]


@dataclass(slots=True)
class OwnValues:
    """A rank's choice.

    Attributes:
        others: Stored paths that this rank does not take.
        problems: What does not fit, a line each.
        skipped: What is left as it is, by choice, a line each.
    """

    others: set[str] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)

    @classmethod
    def choose(cls, paths: Iterable[str], saved_by: int, rank: int, ranks: tuple[int, ...], choice: str) -> OwnValues:
        """Choose among stored values.

        Args:
            paths: Stored paths, of own values and others.
            saved_by: How many ranks have saved.
            rank: This rank.
            ranks: All ranks that load.
            choice: What ``LoadOptions.per_rank`` says.
        """
        stored: dict[str, dict[int, str]] = {}
        for path in own_among(paths):
            part = parse_path(path)[-1]
            assert isinstance(part, RankIndex)
            stored.setdefault(parent_of(path), {})[part.at] = path
        found = cls()
        for parent, by_rank in stored.items():
            taken = found._choose(parent, by_rank, saved_by, rank, ranks, choice)
            found.others |= {path for path in by_rank.values() if path != taken}
        return found

    def _choose(
        self, parent: str, stored: dict[int, str], saved_by: int, rank: int, ranks: tuple[int, ...], choice: str
    ) -> str | None:
        key = plain_key(parent)
        if saved_by == len(ranks) and rank in stored:
            return stored[rank]
        if saved_by == len(ranks) and not stored.keys() - set(ranks):
            self.problems.append(f"{key}: rank {rank} has saved no value of its own, only {_listed(stored)} have")
            return None
        if choice == "coordinator":
            return stored[min(stored)]
        if choice == "by_rank" and rank not in stored:
            self.skipped.append(f"{key}: left as it is, for no rank {rank} has saved its own")
            return None
        if choice == "by_rank":
            return stored[rank]
        self.problems.append(
            f"{key}: every rank has saved its own, on {saved_by} ranks ({_listed(stored)}), and now there are "
            f"{len(ranks)}; LoadOptions(per_rank='by_rank') or 'coordinator' says which to take"
        )
        return None


def _listed(stored: dict[int, str]) -> str:
    ranks = sorted(stored)
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"
