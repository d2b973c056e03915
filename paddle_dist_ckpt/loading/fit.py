"""How this rank's targets and a checkpoint fit together: what does not, and which part of which shard goes where."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from itertools import chain
from types import MappingProxyType

import numpy as np

from ..core.box import Box, whole
from ..core.boxes import Boxes
from ..core.columns import IntArray, Mask, any_in_row, edges_of, narrow, pack_column
from ..core.device_memory import DeviceAccess
from ..core.dtypes import DTYPES
from ..core.grouping import group_rows
from ..core.memory import Bytes1D
from ..files.batches import Batch, ItemKind, Kinds, hand_out
from ..files.reader import Consumer, StoredEntry
from ..files.runs import OpenFile
from ..planning.blocks import touched_blocks
from ..planning.load_plan import WantedBoxes, plan_load
from ..tree.paths import plain_key
from .lacking import lacking_entries
from .messages import LoadAnswer, Mismatch, ShardNeeds
from .recipes import expand
from .repeated import differing
from .resize import Rules
from .small_items import SmallItems, batches_of
from .stored import StoredShards
from .targets import Targets
from .wanted import WantedState
from .wording import A_TENSOR, DICTS, LEFT_BY_AOA, MEANT, NEEDED, NO_ENTRY, OF_TENSORS, value_text

__all__ = ["Fit"]

_TOGETHER = 1 << 14  # kinds that are looked at together
_MANY = 1 << 17  # needs from which on they are read some after others
_READ_TOGETHER = 1 << 14  # of which there is all that it takes to read them; threads work on several such parts
_CODES = {dtype: i for i, dtype in enumerate(DTYPES.values())}
_Boxes = tuple[int, Box, Box, tuple[int, ...]]
"""See :meth:`Fit._boxes`."""


class Fit:
    """A load's plan on one rank.

    Its needs are the overlaps of targets with stored shards, numbered from 0. Its columns have a row for each need
    (``[needs]``), or for needs that are alike in all their boxes (``[kinds]``).

    ``answer`` may be without what ``stored`` has of it. ``left_out`` are stored values that this rank does not take,
    ``devices`` reaches the memory of devices, if tensors are there, ``resize`` is ``LoadOptions.resize``.

    Attributes:
        targets: What is filled.
        problems: What does not fit.
        skipped: What is left as it is, if the load does not fail.
        refused: The paths of values that are not taken, as :meth:`look_at_staged` has found.
        stored: What is stored of it.
    """

    def __init__(
        self,
        stored: StoredShards,
        answer: LoadAnswer,
        wanted: WantedState,
        cast: bool,
        left_out: Collection[str],
        devices: DeviceAccess | None,
        resize: Rules = MappingProxyType({}),
    ) -> None:
        self.stored, self.answer, self.wanted = stored, answer, wanted
        self._table = self.stored.table
        self.refused: set[str] = set()
        self._incomplete: set[str] = set()  # paths of objects that are left as they are
        self.problems = wanted.problems + _unfit(answer, wanted) + self._refuse_differing(answer.values)
        self._incomplete = self._incomplete_objects()
        self.problems += [Mismatch(key, f"{key}: a recipe, and no rank has such a tensor") for key in answer.unmatched]
        parts = expand(wanted.tensors, wanted.made.recipes, answer, self._table, cast)
        self.targets = Targets(parts, self._table, {*left_out, *answer.unread}, devices, resize)
        self.problems += parts.problems + list(dict.fromkeys(self.targets.problems))
        self._plan()
        left = [Mismatch.at(path, reason) for path, reason in answer.skipped.items()]
        self.skipped = self.problems + wanted.left + left + self.targets.resized

    def _incomplete_objects(self) -> set[str]:
        """The paths of objects that would refuse what is stored for them, which is a problem unless it may be missing.

        They would do so when all tensors are filled.
        """
        wanted, renamed = self.wanted, chain.from_iterable(self.answer.renamed.values())
        found = lacking_entries(wanted.needed, {*self.answer.values, *self._table.paths, *renamed}, self.untouched)
        for path, lacking in found.items():
            key = plain_key(path)
            problem = Mismatch(key, f"{key}: what is stored lacks {', '.join(lacking)}, {NEEDED}")
            is_left = wanted.may_be_missing(key) or all(wanted.may_be_missing(f"{key}.{entry}") for entry in lacking)
            (wanted.left if is_left else self.problems).append(problem)
        return set(found)

    def _plan(self) -> None:
        """Fill the columns: ``_target``, ``_shard``, ``_like``, ``_nbytes`` and ``_entry_bytes`` are ``[needs]``;
        ``_alike`` makes the boxes of ``[kinds]``."""
        targets, table = self.targets, self._table
        boxes = [piece.box for _, piece in targets.cells]
        dimensions = max([1, *(len(box.shape) for box in boxes), *(len(x.shape) for x in table.layouts)])
        cells = Boxes.of(boxes, dimensions)
        wanted, self._cell_shape = WantedBoxes(targets.tensor, cells.take(targets.cell)), cells.shape
        plan = plan_load(table, wanted)
        self.problems += list(map(self._uncovered, plan.uncovered.tolist()))
        targets.filled[plan.uncovered] = False
        targets.leave(set(map(targets.path, plan.uncovered.tolist())))
        targets.stage_shared()
        kept = targets.filled[plan.wanted]
        self._target, self._shard, self._like = plan.wanted[kept], plan.shard[kept], plan.like[kept]
        self._alike = plan.alike
        self._latest_boxes: tuple[int, _Boxes] | None = None
        volumes = np.zeros((2, len(plan.alike)), np.int64)
        for piece in _pieces(len(plan.alike)):
            common, stored, _ = plan.alike.take(piece)
            volumes[:, piece] = common.volumes, stored.volumes
        itemsize = table.itemsizes[table.shard_tensor[self._shard]]
        self._nbytes, self._entry_bytes = (narrow(volume[self._like] * itemsize) for volume in volumes)

    def _uncovered(self, row: int) -> Mismatch:
        """The problem with a target of which not everything is stored, or something repeatedly."""
        path, source = self.targets.path(row), self._table.paths[self.targets.tensor[row]]
        of_what = "" if path == source else f" of {plain_key(source)}"
        region = f"the region {self.targets.box(row)}{of_what}"
        return Mismatch.at(path, f"the checkpoint does not hold {region} exactly once")

    def look_at_staged(self) -> list[Mismatch]:
        """The problems with targets that share memory and with values, by what was read for them."""
        found = self.targets.compare_shared() + self._refuse_values()
        self.problems += found
        return found

    def _refuse_values(self) -> list[Mismatch]:
        """Refuse values that were read from entries, as far as they are dicts where the state_dict has another value,
        or the reverse; returns the problems with them. Of values in `.metadata` the coordinator has said it."""
        problems = []
        for stored, is_dict in self.targets.are_dicts():
            for path in self.answer.renamed.get(stored, [stored]):
                kind = self.wanted.values.get(path)
                if kind in (*DICTS, "other", "optional") and is_dict != (kind in DICTS):
                    self.refused.add(path)
                    found = value_text(is_dict)
                    text = f"the state_dict has {_PRESENT[kind]}, in the checkpoint it is {found}"
                    problems.append(Mismatch.at(path, text))
        if not self.wanted.repeated:
            return problems
        entries = {
            path: content
            for stored, content in self.targets.contents()
            for path in self.answer.renamed.get(stored, [stored])
        }
        return problems + (self._refuse_differing({**self.answer.values, **entries}) if entries else [])

    def _refuse_differing(self, values: Mapping[str, object]) -> list[Mismatch]:
        """Refuse values that differ and are of one thing in the state_dict; see :func:`.repeated.differing`."""
        wanted, problems = self.wanted, list[Mismatch]()
        objects = {path for path in wanted.repeated if wanted.values.get(path) == "object"}
        for path, other in differing(wanted.repeated, objects, values):
            if path not in self.refused:
                self.refused.add(path)
                text = f"is the same as {plain_key(other)} in the state_dict, but the stored values differ"
                problems.append(Mismatch.at(path, text))
        return problems

    @property
    def untouched(self) -> set[str]:
        """The paths of which nothing is loaded."""
        found = {*self.answer.unfit, *self.answer.skipped, *self.wanted.skipped, *self._unfit_tensors}
        return found | self._incomplete

    @property
    def lacking(self) -> set[str]:
        """The paths of which nothing is loaded, but for those that the caller wants to be left."""
        left = {path for path, reason in self.answer.skipped.items() if reason == LEFT_BY_AOA}
        return {*self.answer.unfit, *self.answer.skipped, *self._unfit_tensors} - left

    @property
    def _unfit_tensors(self) -> set[str]:
        unfit = {problem.key for problem in self.problems}
        return {path for path in self.wanted.tensors.paths if plain_key(path) in unfit} if unfit else set()

    def torn(self, problems: Sequence[Mismatch]) -> list[str]:
        """The flat keys of distributed tensors that this rank leaves because of these problems, while others may load
        their parts. What the coordinator has found of a tensor is known to all."""
        keys = {problem.key for problem in problems}.difference(map(plain_key, self.answer.unfit))
        return [plain_key(path) for path in self._distributed(keys)]

    def leave(self, problems: Sequence[Mismatch]) -> list[Mismatch]:
        """Leave distributed tensors as they are with which other ranks have these problems; returns those of them that
        are new to this rank."""
        known = {problem.key for problem in self.problems} if problems else set()
        others = {problem.key: problem for problem in problems if problem.key not in known}
        paths = self._distributed(others.keys())
        self.targets.leave(set(paths))
        found = [others[plain_key(path)] for path in paths]
        self.problems += found
        return found

    def _distributed(self, keys: Set[str]) -> list[str]:
        """The paths of distributed tensors at these flat keys."""
        tensors = self.wanted.tensors
        columns = zip(tensors.paths, tensors.geometry, strict=True) if keys else ()
        return [p for p, number in columns if plain_key(p) in keys and not tensors.geometries[number].plain]

    def needs(self, staged: bool) -> IntArray:
        """The needs whose targets are looked at before they are used, or all the others; of targets that are filled."""
        targets = self.targets
        return narrow(np.flatnonzero((targets.filled & (targets.staged == staged))[self._target]))

    def device_groups(self, needs: IntArray, most: int) -> tuple[IntArray, list[tuple[IntArray, IntArray]]]:
        """Divide some needs: those of targets on the host, or staged; and targets on a device in groups of at most
        ``most`` bytes each (or one), each group with its needs, in the order in which the files have them."""
        rows = self.rows_on_device(needs)
        if not len(rows):
            return needs, []
        needs = self._as_stored(needs)
        wanted, first = np.unique(self._target[needs], return_index=True)
        rows = rows[np.argsort(first[np.searchsorted(wanted, rows)])]
        starts: list[int] = []
        room = 0
        for i, nbytes in enumerate(self.targets.nbytes[rows].tolist()):
            if not starts or nbytes > room:
                starts.append(i)
                room = most
            room -= nbytes
        group = np.zeros(len(self.targets), np.int64)  # of each target, from 1; 0 for all others
        group[rows] = np.searchsorted(starts, np.arange(len(rows)), side="right")
        order = np.argsort(group[self._target[needs]], kind="stable")
        firsts = np.searchsorted(group[self._target[needs[order]]], np.arange(1, len(starts) + 1))
        on_host, *parts = np.split(needs[order], firsts)
        return on_host, list(zip(np.split(rows, starts)[1:], parts, strict=True))

    def rows_on_device(self, needs: IntArray) -> IntArray:
        """The targets of some needs, as far as they are on a device and not staged."""
        rows = np.unique(self._target[needs])
        return rows[self.targets.on_device[rows] & ~self.targets.staged[rows]]

    def wanted_key(self, need: int) -> str:
        """The flat key of what a need is for."""
        return plain_key(self.targets.path(int(self._target[need])))

    def nbytes(self, needs: IntArray) -> int:
        """Bytes of these needs."""
        return int(self._nbytes[needs].sum())

    def file_bytes(self) -> dict[str, int]:
        """How many bytes this rank would read of each file that holds some need.

        An estimate: all of an entry for a need that is not contiguous in it.
        """
        contiguous = np.zeros(len(self._alike), bool)
        for piece in _pieces(len(self._alike)):
            common, stored, _ = self._alike.take(piece)
            # A box is in one piece unless it is cut in some dimension and longer than 1 in one before that.
            inner_cut = np.logical_or.accumulate((common.shape != stored.shape)[:, :0:-1], axis=1)[:, ::-1]
            contiguous[piece] = ~any_in_row(inner_cut & (common.shape[:, :-1] != 1))
        file = self._table.shard_file[self._shard]
        nbytes = np.zeros(int(file.max(initial=-1)) + 1, np.int64)
        np.add.at(nbytes, file, np.where(contiguous[self._like], self._nbytes, self._entry_bytes))
        return {self.stored.file_name(i): int(nbytes[i]) for i in np.unique(file).tolist()}

    def bytes_to_read(self) -> tuple[dict[str, int], int]:
        """How many bytes the blocks have that hold what each wanted path needs; and all paths together, which may share
        some."""
        by_path: dict[str, dict[int, list[int]]] = {}
        by_shard: dict[int, list[int]] = {}
        for need, shard in enumerate(self._shard.tolist()):
            path = self.targets.path(int(self._target[need]))
            for shards in (by_path.setdefault(path, {}), by_shard):
                shards.setdefault(shard, []).append(need)
        return {path: self._touched_bytes(shards) for path, shards in by_path.items()}, self._touched_bytes(by_shard)

    def _touched_bytes(self, shards: Mapping[int, list[int]]) -> int:
        """How many bytes the blocks of some shards have that hold some needs."""
        size, total = self.answer.block_bytes, 0
        for shard, needs in shards.items():
            entry_bytes = int(self._entry_bytes[needs[0]])
            itemsize = int(self._table.itemsizes[self._table.shard_tensor[shard]])
            boxes = [self._boxes(need)[2] for need in needs]
            for start, stop in touched_blocks(self._boxes(needs[0])[3], itemsize, boxes, size):
                total += min(stop * size, entry_bytes) - start * size
        return total

    def _are_batched(self, needs: IntArray) -> Mask:
        """Which of some needs are read in batches: those of small entries, ``[n]``."""
        are: Mask = self._entry_bytes[needs] <= self.answer.block_bytes
        return are

    def items(self, needs: IntArray) -> SmallItems:
        """Needs that are read in batches, with where they go. Needs that are alike share a kind."""
        kinds, kind = self._kinds(needs)
        shard, rows = self._shard[needs], self._target[needs]
        files, file = np.unique(self._table.shard_file[shard], return_inverse=True)
        return SmallItems(
            files=[self.stored.file_name(i) for i in files.tolist()],
            file=file.reshape(-1),
            starts=self.stored.starts[shard].astype(np.int64),
            blocks=self.stored.blocks[shard].astype(np.int64),
            addresses=self.targets.address[rows],
            kind=kind,
            kinds=kinds,
            key=lambda i: self.stored.key(int(shard[i])),
            name=lambda i: self.wanted_key(int(needs[i])),
        )

    def batches(self, needs: IntArray, opened: Mapping[str, OpenFile]) -> Iterator[Batch]:
        """Those of these needs that are read in batches, file by file, in the order in which they stand there."""
        small = narrow(needs[self._are_batched(needs)])
        together = max(1, len(small))
        if len(small) > _MANY:
            small, together = self._as_stored(small), _READ_TOGETHER
        for start in range(0, len(small), together):
            items = self.items(small[start : start + together])
            yield from batches_of([items], opened, self.answer.block_bytes)

    def _as_stored(self, needs: IntArray) -> IntArray:
        """Needs in the order in which what they need stands in the files."""
        shard = self._shard[needs]
        starts, file = self.stored.starts[shard], self._table.shard_file[shard]
        if ((file[1:] > file[:-1]) | ((file[1:] == file[:-1]) & (starts[1:] >= starts[:-1]))).all():
            return needs
        return needs[np.lexsort((starts, file))]

    def unpack(self, needs: IntArray, data: Bytes1D) -> None:
        """Hand out what was sent for needs, the boxes one behind the other.

        Raises:
            CheckpointError: a finite value would become infinite.
        """
        kinds, kind = self._kinds(needs, packed=True)
        starts, addresses = edges_of(self._nbytes[needs])[:-1], self.targets.address[self._target[needs]]
        hand_out(kinds, kind, starts, addresses, data, lambda i: self.wanted_key(int(needs[i])))

    def _kinds(self, needs: IntArray, packed: bool = False) -> tuple[Kinds, IntArray]:
        """The different kinds of needs, and which kind each is; of ``packed`` ones the entries are what is needed."""
        row, stored = self._target[needs], self._table.shard_tensor[self._shard[needs]]
        columns = [self.targets.cell[row], self.targets.staged[row], self._like[needs], self._table.dtype_of[stored]]
        first, kind = group_rows(np.column_stack(columns))
        needs, row, stored = needs[first], row[first], stored[first]
        cell, like = self.targets.cell[row], self._like[needs]
        wanted = np.array([_CODES[geometry.dtype] for geometry, _ in self.targets.cells], np.int64)[cell]
        of_pair, pair = group_rows(np.column_stack([self._table.dtype_of[stored], wanted]))
        pairs = [
            (self._table.dtypes[t], self.targets.cells[c][0].dtype)
            for t, c in zip(stored[of_pair].tolist(), cell[of_pair].tolist(), strict=True)
        ]
        places = np.empty((len(needs), 4), np.int64)
        for start in range(0, len(needs), _TOGETHER):
            some = slice(start, start + _TOGETHER)
            places[some] = self._places(like[some], cell[some], packed)
        places[~self.targets.are_in_one_piece(row), 1] = -1
        places[:, 3] *= np.array([stored.itemsize for stored, _ in pairs], np.int64)[pair]

        def one(number: int) -> ItemKind:
            need, tensor = int(needs[number]), int(stored[number])
            target, box, entry_box, entry_shape = self._boxes(need)
            geometry, piece = self.targets.cells[self.targets.cell[target]]
            dtypes, strides = (self._table.dtypes[tensor], geometry.dtype), self.targets.strides(target)
            if packed:
                entry_box, entry_shape = whole(box.shape), box.shape
            return ItemKind(*dtypes, entry_shape, entry_box, piece.box.shape, box, strides)

        return Kinds.of_columns(one, pairs, pair, *places.T), kind

    def _places(self, like: IntArray, cell: IntArray, packed: bool) -> IntArray:
        """Of needs that are alike: with which element of its entry and of its target each starts, -1 if it is not in
        one piece there; how many elements it has, and its entry, ``[n, 4]``."""
        common, stored, asked = self._alike.take(like)
        entry_shape = common.shape if packed else stored.shape
        needed = Boxes(np.zeros_like(common.offset) if packed else common.offset - stored.offset, common.shape)
        target = Boxes(common.offset - asked.offset, common.shape).flat_starts(self._cell_shape[cell])
        return np.column_stack(
            [needed.flat_starts(entry_shape), target, needed.volumes, Boxes(needed.offset, entry_shape).volumes]
        )

    def _boxes(self, need: int) -> _Boxes:
        """A need's target, its box as counted from the target's corner and from the shard's, the shard's shape.

        Of a large need one part is asked for after the other, so what was found last is kept: in one tuple, as several
        threads ask.
        """
        latest = self._latest_boxes
        if latest is None or latest[0] != need:
            row, like = int(self._target[need]), int(self._like[need])
            ndim = len(self.targets.box(row).shape)
            common, stored, asked = (boxes.box(0, ndim) for boxes in self._alike.take(slice(like, like + 1)))
            found = row, common.relative_to(asked.offset), common.relative_to(stored.offset), stored.shape
            latest = self._latest_boxes = need, found
        return latest[1]

    def entries(self, needs: IntArray, opened: Mapping[str, OpenFile]) -> list[tuple[StoredEntry, list[Consumer]]]:
        """The shards of the others of these needs, each with who consumes it."""
        found: dict[int, tuple[StoredEntry, list[Consumer]]] = {}
        for need in needs[~self._are_batched(needs)].tolist():
            row, box, entry_box, entry_shape = self._boxes(need)
            shard = int(self._shard[need])
            if shard not in found:
                found[shard] = (self.stored.entry(shard, entry_shape, opened), [])
            found[shard][1].append(self.targets.consumer(row, box, entry_box))
        return list(found.values())

    def shard_needs(self, staged: bool, start: int, most: int) -> tuple[ShardNeeds, int]:
        """What other ranks may read for this one.

        Args:
            staged: Whether it is for targets that are looked at before they are used, or for all others.
            start: The first shard whose turn it is, as the coordinator counts them.
            most: How many needs there should be at most; there are more if so many are of the first of these shards.

        Returns:
            The needs; and before which shard they end, 0 if there are no more.
        """
        needs = self.needs(staged)
        shard = narrow(self.stored.everywhere(self._shard[needs]))
        chosen, end = shard >= start, 0
        if int(chosen.sum()) > most:
            end = max(int(np.partition(shard[chosen], most)[most]), int(shard[chosen].min()) + 1)
            chosen &= shard < end
            end = end if end <= int(shard.max()) else 0
        needs, shard = needs[chosen], shard[chosen]
        alike, like = np.unique(self._like[needs], return_inverse=True)
        boxes, box = self._boxes_in_shards(alike)
        found = ShardNeeds(
            row=pack_column(needs),
            shard=pack_column(shard),
            box=pack_column(box[like.reshape(-1)]),
            dimensions=self._alike.asked.dimensions,
            boxes=pack_column(boxes.reshape(-1)),
        )
        return found, end

    def _boxes_in_shards(self, alike: IntArray) -> tuple[IntArray, IntArray]:
        """The different boxes of needs that are alike, in their shards' coordinates, as offsets and lengths, ``[boxes,
        2 * d]``; and which of them each has, ``[kinds]``."""
        found, number, count = [np.zeros((0, 2 * self._alike.asked.dimensions), np.int64)], [], 0
        for common, stored, _ in (self._alike.take(alike[piece]) for piece in _pieces(len(alike))):
            rows = np.hstack([common.offset - stored.offset, common.shape])
            first, group = group_rows(rows)
            found.append(rows[first])
            number.append(narrow(group + count))
            count += len(first)
        rows = np.concatenate(found)
        first, group = group_rows(rows)
        return rows[first], group[np.concatenate([np.zeros(0, np.int64), *number])]

    def consumer(self, need: int, entry_part: Box) -> Consumer:
        """The consumer of a part of a need; the part is counted from the shard's corner."""
        row, box, entry_box, _ = self._boxes(need)
        shift = entry_part.relative_to(entry_box.offset).offset
        part = Box(tuple(a + b for a, b in zip(shift, box.offset, strict=True)), entry_part.shape)
        return self.targets.consumer(row, part, entry_part)


def _pieces(count: int) -> Iterator[slice]:
    """Kinds that are looked at together."""
    return (slice(start, start + _TOGETHER) for start in range(0, count, _TOGETHER))


_PRESENT = {
    "none": "None",
    "empty": "a dict",
    "nothing": "a dict",
    "dict": "a dict",
    "own": "a PerRank",
    "object": "an object",
    "other": "a value",
    "optional": "a value",
}


def _unfit(answer: LoadAnswer, wanted: WantedState) -> list[Mismatch]:
    """The problems with wanted paths at which something of another kind is stored, or nothing."""
    tensors = set(wanted.tensors.paths) if answer.unfit else set()
    shapes: dict[str, tuple[int, ...]] = {}
    if answer.hints:
        columns = zip(wanted.tensors.paths, wanted.tensors.geometry, strict=True)
        shapes = {path: wanted.tensors.geometries[number].shape for path, number in columns}
    problems = []
    for path, found in answer.unfit.items():
        present = _PRESENT.get(wanted.values.get(path, ""), NO_ENTRY)
        has = "a tensor" if path in tensors else present
        fitting = [key for key, shape in answer.hints.get(path, ()) if shape is None or shape == shapes.get(path)]
        moved = wanted.moved.get(path)
        looked = "" if moved is None else f" (looked up as {moved!r}, as key_map says)"
        hint = f"; is {fitting[0]!r} {MEANT}" if len(fitting) == 1 else ""
        if present == _PRESENT["none"] and found.startswith((A_TENSOR, OF_TENSORS)):
            key = moved or plain_key(path)
            which = f"prefix={key!r}" if found.startswith(OF_TENSORS) else f"keys={key!r}"
            hint = (
                "; None takes values only: pass tensors or numpy arrays to be filled, or call "
                f"load_merged_state_dict(path, {which})"
            )
        text = f"the state_dict has {has}, in the checkpoint it is {found}{looked}{hint}"
        problems.append(Mismatch.at(path, text))
    return problems
