"""An exchange in parts, so that what its plan takes is bounded however many shards there are. Mostly it is one part.

Each part has what all ranks need of some of the shards, in the order in which the coordinator counts them. Every rank
says what it needs next, as much as it may; the part ends where the rank ends that came least far. What the others have
said beyond that, they say again in the next part.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ..control.verified import agree_on_collectives
from .exchange_orders import ExchangeAnswer, ExchangeRequest, ExchangeRound
from .load_coordinator import LoadCoordinator
from .messages import DecideAnswer, DoneRequest, GoOnAnswer
from .needs import Needs
from .reading import DataFiles, LoadContext

__all__ = ["ExchangeParts", "Replaced"]

_MOST_NEEDS = 1 << 16  # of all ranks together, in one part,
_LEAST_NEEDS = 1 << 13  # but of one rank so many: of many ranks a part takes long, so that there had better be few


class Replaced(Exception):
    """The checkpoint was replaced meanwhile; raised on all ranks alike."""


@dataclass(slots=True)
class ExchangeParts:
    """One rank's way through the parts of an exchange: rounds ``exchange``, ``open`` and ``collectives``.

    Attributes:
        ask: A round of the load: its name, this rank's part, the type of the answer, and what answers.
    """

    context: LoadContext
    needs: Needs
    files: DataFiles
    decision: DecideAnswer
    ask: Callable[..., tuple[None, ExchangeAnswer | GoOnAnswer]]
    _begun: bool = field(default=False, init=False)

    def last(self, staged: bool, run: Callable[[Sequence[ExchangeRound]], None]) -> Sequence[ExchangeRound] | None:
        """This rank's rounds in the last part of a pass, after all others have been run.

        Args:
            staged: Whether it is the pass for staged targets.
            run: Runs the rounds of a part.

        Returns:
            The rounds; None if there is no exchange, and so no part.

        Raises:
            Replaced: files are gone, for the checkpoint was replaced.
            CheckpointReplacedError: so it is, and tensors have been written to.
        """
        if not self.decision.exchange:
            return None
        rounds, start = None, 0
        while rounds is None or start:
            part = functools.partial(self._run_and_want, run, rounds, staged, start)
            with self.files.tally.phase("open" if rounds is None else "read"):
                order = self._order(part)
            rounds, start = order.rounds, order.end
        return rounds

    def _run_and_want(
        self,
        run: Callable[[Sequence[ExchangeRound]], None],
        rounds: Sequence[ExchangeRound] | None,
        staged: bool,
        start: int,
    ) -> tuple[None, ExchangeRequest]:
        """Run the part before, if there is one; what is needed of the shards from ``start`` on."""
        unreachable: dict[str, str] = {}
        names: list[str] = []
        if rounds is not None:
            run(rounds)
        if not self._begun:
            unreachable = self.files.open(self.decision.files) if self.decision.probe else {}
            names = sorted(self.files.opened.keys() & {info.name for info, _ in self.decision.files})
        most = max(_LEAST_NEEDS, _MOST_NEEDS // len(self.context.session.ranks))
        needs, end = self.needs.shard_needs(staged, start, most)
        return None, ExchangeRequest(names, needs, unreachable, end, rounds is not None and not staged)

    def _order(self, part: Callable[[], tuple[None, ExchangeRequest]]) -> ExchangeAnswer:
        """What this rank is to do in a part, when it has its files and the ranks know what they exchange data by."""
        _, order = self.ask("exchange", part, ExchangeAnswer, LoadCoordinator.exchange)
        assert isinstance(order, ExchangeAnswer), "the answer of its round"

        def open_mine() -> tuple[None, DoneRequest]:
            asked = order.files
            return None, DoneRequest(self.files.open([file for file in self.decision.files if file[0].name in asked]))

        if order.restart or self.ask("open", open_mine, GoOnAnswer, LoadCoordinator.done)[1].restart:
            raise Replaced
        if not self._begun:
            agree_on_collectives(self.context.session, self.context.transport)
            self._begun = True
        return order
