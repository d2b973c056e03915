"""Copies of what others write: whether they are the same, by the digests that its blocks get as it is written."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from ..core.columns import IntArray, column_size, edges_of, places_within, unpack_column
from ..core.text import ranks_text
from ..errors import CheckpointError
from ..tree.paths import plain_key
from .describe import LocalState
from .file_plan import FilePlan, Items
from .messages import RankPlan, WriteRequest
from .planned_save import PlannedSave

__all__ = ["ALL", "PARTS", "CopyPlan", "copies_that_differ"]

ALL = -1
PARTS = 10
"""Blocks of copies are compared all, or every tenth: of the parts 0 to 9 another one in each save."""
_MOST_TENSORS = 20  # in a message
_TOGETHER = 16  # blocks that are read from a device before the next look whether to stop
Digests = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True, eq=False)
class CopyPlan:
    """What this rank has twice with others: what it writes of which they have copies, and copies of what they write.

    Attributes:
        copied: The former, as numbers of the items that it writes, ``[copied]``.
        counts: How many blocks each item has that it writes, ``[items]``.
        starts: By how much the parts are shifted in each, so that all are about equally large, ``[items]``.
        items: The copies.
        sizes: Their bytes, ``[copies]``.
        copy_starts: As ``starts``, ``[copies]``.
        block_bytes: Bytes of a block.
    """

    copied: IntArray
    counts: IntArray
    starts: IntArray
    items: Items
    sizes: IntArray
    copy_starts: IntArray
    block_bytes: int

    @classmethod
    def of_nothing(cls) -> CopyPlan:
        """That of a rank that has nothing."""
        none = np.zeros(0, np.int64)
        return cls(none, none, none, Items(none, none, []), none, none, 1)

    @classmethod
    def of(cls, state: LocalState, plan: RankPlan, files: Sequence[FilePlan], block_bytes: int) -> CopyPlan:
        """What a plan says, of which the files are known."""
        written, copies = Items.of(state, plan.items), Items.of(state, plan.copies)
        counts = [np.diff(file.table.first_block) for file in files]
        return cls(
            unpack_column(plan.copied, column_size(plan.copied, "copied"), max(1, len(written.rows)), "copied"),
            np.concatenate([np.zeros(0, np.int64), *counts]),
            _starts(state, written),
            copies,
            _sizes(state, copies),
            _starts(state, copies),
            block_bytes,
        )

    def of_own(self, state: LocalState, plan: RankPlan) -> CopyPlan:
        """One whose copies are what this rank itself would write of which others have copies, where nothing is."""
        written = Items.of(state, plan.items)
        own = Items(written.rows[self.copied], written.numbers[self.copied], written.boxes)
        return replace(self, items=own, sizes=_sizes(state, own), copy_starts=_starts(state, own))

    def of_written(self, blocks: Digests, compared: int) -> bytes:
        """A digest of each item that others have copies of; ``blocks`` are those of all blocks of the rank's files."""
        return _combined(blocks, self.counts, self.starts, compared)[self.copied].astype("<u8").tobytes()

    def of_copies(self, state: LocalState, compared: int, check: Callable[[], None]) -> bytes:
        """A digest of each copy.

        Args:
            state: Where they are.
            compared: The part of the blocks that is compared, or ``ALL``.
            check: Called now and then; may raise to stop.
        """
        counts = -(-self.sizes // self.block_bytes)
        blocks = np.zeros(int(counts.sum()), np.uint64)
        chosen = np.flatnonzero(_chosen(counts, self.copy_starts, compared))
        item, place = np.repeat(np.arange(len(counts)), counts)[chosen], places_within(counts)[chosen]
        low = place * self.block_bytes
        high = np.minimum(low + self.block_bytes, self.sizes[item])
        rows = list(zip(chosen.tolist(), item.tolist(), low.tolist(), high.tolist(), strict=True))
        sources = self.items.sources(state, {})
        for at in range(0, len(rows), _TOGETHER):
            check()
            others = []
            for block, i, start, stop in rows[at : at + _TOGETHER]:
                source = sources[i]
                if isinstance(source, int):
                    memory = (ctypes.c_char * (stop - start)).from_address(source + start)
                    blocks[block] = _digest(memory)
                else:
                    others.append((block, (source, start, stop)))
            found = state.contents(part for _, part in others)
            for (block, _), data in zip(others, found, strict=True):
                blocks[block] = _digest(data.data)
        return _combined(blocks, counts, self.copy_starts, compared).astype("<u8").tobytes()


def _digest(block: Any) -> int:
    """The digest of a block, as it gets it in a file."""
    return xxhash.xxh3_64_intdigest(block)


def _sizes(state: LocalState, items: Items) -> IntArray:
    """The bytes of each item."""
    elements = np.array([box.size for box in items.boxes], np.int64)[items.numbers]
    itemsize = np.array([geometry.dtype.itemsize for geometry, _ in state.shards.cells], np.int64)
    nbytes: IntArray = elements * itemsize[state.shards.cell[items.rows]]
    return nbytes


def _starts(state: LocalState, items: Items) -> IntArray:
    """By how much the parts of each item are shifted: the same on all ranks."""
    of_path = np.array([xxhash.xxh3_64_intdigest(path.encode()) % PARTS for path in state.tensors.paths], np.int64)
    of_box = np.array([sum(box.offset) % PARTS for box in items.boxes], np.int64)
    shifts: IntArray = of_path[state.shards.tensor[items.rows]] + of_box[items.numbers]
    return shifts


def _chosen(counts: IntArray, starts: IntArray, compared: int) -> npt.NDArray[np.bool_]:
    """Which blocks are compared, of items that have so many."""
    if compared == ALL:
        return np.ones(int(counts.sum()), bool)
    return (places_within(counts) + np.repeat(starts, counts)) % PARTS == compared


def _combined(blocks: Digests, counts: IntArray, starts: IntArray, compared: int) -> Digests:
    """A digest of each item from those of its blocks, another one for each order of them.

    Odd factors have inverses modulo 2**64, so it differs for sure if one block does.
    """
    factors = (2 * places_within(counts) + 1).astype(np.uint64)
    terms = np.where(_chosen(counts, starts, compared), blocks * factors, np.uint64(0))
    sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(terms, dtype=np.uint64)])
    edges = edges_of(counts)
    return sums[edges[1:]] - sums[edges[:-1]]


def copies_that_differ(planned: PlannedSave, written: Mapping[int, WriteRequest]) -> str:
    """What is to be said of copies that differ from what is written; on the coordinator. Empty if none do.

    Raises:
        CheckpointError: ranks have sent other digests than those of the plan.
    """
    ranks = planned.state.ranks
    saved = np.frombuffer(b"".join(written[rank].copied for rank in ranks), "<u8")
    copies = np.frombuffer(b"".join(written[rank].copies for rank in ranks), "<u8")
    if (len(saved), len(copies)) != (len(planned.shared), len(planned.copied)):
        raise CheckpointError(
            f"ranks sent digests of {len(saved)} boxes and {len(copies)} copies; {len(planned.shared)} and "
            f"{len(planned.copied)} were planned"
        )
    wrong = np.unique(planned.copied[copies != saved[planned.copied]])
    said: dict[str, dict[str, None]] = {}  # by tensor, in order
    for number in wrong.tolist():
        item = int(planned.shared[number])
        by_digest = {int(saved[number]): [writer := ranks[planned.plan.rank[item]]]}
        for i in np.flatnonzero(planned.copied == number).tolist():
            by_digest.setdefault(int(copies[i]), []).append(ranks[planned.copy_rank[i]])
        path = planned.state.paths[planned.plan.tensor[item]]
        said.setdefault(path, {})[_described(list(by_digest.values()), writer)] = None
        if len(said) > _MOST_TENSORS:
            break
    lines = [f"{plain_key(path)}: {'; '.join(texts)}" for path, texts in list(said.items())[:_MOST_TENSORS]]
    if len(said) > _MOST_TENSORS:
        lines.append("... and more")
    return "copies of distributed tensors differ among ranks:\n" + "\n".join(lines) if lines else ""


def _described(groups: Sequence[Sequence[int]], writer: int) -> str:
    """Who has what, the most first; ``writer`` is the rank whose copy is saved."""
    sizes = sorted((len(group) for group in groups), reverse=True)
    ordered = sorted((sorted(group) for group in groups), key=lambda group: (-len(group), group))
    saved = f"rank {writer}'s is the one written"
    if 2 * sizes[0] <= sum(sizes):
        most = "the most" if sizes[0] == sizes[1] else "more than half"
        return f"{' and '.join(map(ranks_text, ordered))} have different ones, none of them {most}; {saved}"
    minority = sorted(rank for group in ordered[1:] for rank in group)
    differ = "differs" if len(minority) == 1 else "differ"
    more = ", of the minority" if writer in minority else ""
    return f"{ranks_text(minority)}, the minority, {differ} from {ranks_text(ordered[0])}; {saved}{more}"
