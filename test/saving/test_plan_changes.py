"""Series of saves by ranks that remember, with anything changed in between: each is as if they did not."""

from __future__ import annotations

import dataclasses
import errno
import itertools
import math
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddle_dist_ckpt import read_metadata, rebuild_metadata, verify
from paddle_dist_ckpt.core.box import Box, whole
from paddle_dist_ckpt.core.dtypes import DTYPES
from paddle_dist_ckpt.core.tensors import Reduction
from paddle_dist_ckpt.errors import RankFailureError
from paddle_dist_ckpt.files import datafile
from paddle_dist_ckpt.options import SaveOptions
from paddle_dist_ckpt.reports import SaveReport
from paddle_dist_ckpt.saving import planned_save, save_coordinator, save_memory
from paddle_dist_ckpt.saving.save_memory import SaveMemory
from paddle_dist_ckpt.testing import FaultyStorage, ShardedArray, SimulatedRank, run_ranks
from test.hooks import raises
from test.jobs import (
    LAYOUTS,
    SMALL,
    alike,
    all_ok,
    errors_of,
    files_in,
    laid_out,
    load_whole,
    make_array,
    same_bits,
    sharded,
    without_times,
)
from test.strategies import examples, some


@dataclasses.dataclass
class Seen:
    """What the coordinators did."""

    plans: int = 0
    asked: int = 0

    def take(self) -> tuple[int, int]:
        """Plans made and structures asked for since the last time."""
        found = self.plans, self.asked
        self.plans = self.asked = 0
        return found


@pytest.fixture(scope="module", autouse=True)
def seen() -> Iterator[Seen]:
    """Counts plans, and rounds ``describe``."""
    counts = Seen()
    described = save_coordinator.SaveCoordinator.described

    def plan(*args: Any) -> planned_save.PlannedSave:
        counts.plans += 1
        return planned_save.make_plan(*args)

    def ask(self: Any, messages: Any) -> dict[int, bytes]:
        counts.asked += 1
        return described(self, messages)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(save_coordinator, "make_plan", plan)
        patch.setattr(save_coordinator.SaveCoordinator, "described", ask)
        yield counts


def save_with(
    memories: Sequence[SaveMemory],
    states: Sequence[dict[Any, Any]],
    paths: Any,
    options: SaveOptions = SMALL,
    coordinator: int | None = None,
) -> list[Any]:
    """Save by ranks that have these memories; returns what each returned or raised."""

    def work(rank: SimulatedRank) -> SaveReport:
        path = paths[rank.rank] if isinstance(paths, list) else paths
        return dataclasses.replace(rank, memory=memories[rank.rank]).save(states[rank.rank], path, None, options)

    return run_ranks(len(states), work, coordinator)


def fresh(count: int) -> list[SaveMemory]:
    return [SaveMemory() for _ in range(count)]


class Job:
    """Ranks with their states, which can be changed, and their memories.

    Attributes:
        states: Each rank's state_dict. Its objects stay the same unless something changes them.
        arrays: What each tensor is as a whole.
        boxes: Of each distributed tensor, the boxes that each rank has.
    """

    def __init__(self, ranks: int, seed: int) -> None:
        self.rng = random.Random(seed)
        self.ranks = ranks
        self.states: list[dict[str, Any]] = [{} for _ in range(ranks)]
        self.arrays: dict[str, np.ndarray] = {}
        self.boxes: dict[str, list[list[Box]]] = {}
        self.memories = fresh(ranks)
        self.options = SMALL
        self.coordinator = 0
        self._count = 0

    @property
    def replicas_agree(self) -> bool:
        """Whether all ranks have the same in the plain tensor."""
        return len({state["plain"].tobytes() for state in self.states}) == 1

    def rank(self) -> int:
        return self.rng.randrange(self.ranks)

    def number(self) -> int:
        self._count += 1
        return self._count

    def tiles(self, shape: tuple[int, ...]) -> list[Box]:
        """Boxes that make up a tensor."""
        boxes = [whole(shape)]
        for _ in range(self.rng.randrange(4) if math.prod(shape) else 0):
            box = boxes.pop(self.rng.randrange(len(boxes)))
            d = self.rng.randrange(len(shape)) if shape else 0
            if not shape or box.shape[d] < 2:
                boxes.append(box)
                continue
            at = self.rng.randrange(1, box.shape[d])
            for low, size in ((box.offset[d], at), (box.offset[d] + at, box.shape[d] - at)):
                offset, extent = list(box.offset), list(box.shape)
                offset[d], extent[d] = low, size
                boxes.append(Box(tuple(offset), tuple(extent)))
        return boxes

    def deal(self, key: str) -> None:
        """Cut a distributed tensor anew and give it to the ranks, some boxes to several."""
        array = self.arrays[key]
        mine: list[list[Box]] = [[] for _ in range(self.ranks)]
        for box in self.tiles(array.shape):
            for r in self.rng.sample(range(self.ranks), self.rng.randint(1, min(2, self.ranks))):
                mine[r].append(box)
        self.boxes[key] = mine
        for r in range(self.ranks):
            self.refill(key, r)

    def refill(self, key: str, r: int) -> None:
        """A new object for a rank's part of a distributed tensor, if it has a part."""
        how = self.rng.choice(LAYOUTS)
        if self.boxes[key][r]:
            self.states[r][key] = sharded(self.arrays[key], self.boxes[key][r], how)
        else:
            self.states[r].pop(key, None)

    # -- what does not change the plan

    def contents(self) -> None:
        """Every element, where it is."""
        for key, array in self.arrays.items():
            array[...] = make_array(array.shape, array.dtype.name, self.number())
            for state in self.states:
                value = state.get(key)
                if isinstance(value, ShardedArray):
                    for box, piece in zip(value.boxes, value.pieces, strict=True):
                        piece[...] = array[box.slices]
                elif value is not None:
                    value[...] = array

    def small_values(self) -> None:
        for state in self.states:
            state["step"] = self._count
            state["word"] = self.rng.choice(["", "x", "y" * 4000, None, 2**70, b"b", [1, {}], float("nan")])
        self.number()

    def one_ranks_value(self) -> None:
        self.states[self.rank()]["step"] = -self.number()

    def text_of_the_same_length(self) -> None:
        for state in self.states:
            state["text"] = chr(ord("a") + self._count % 26) * len(state["text"])
        self.number()

    # -- what does

    def one_ranks_replica(self) -> None:
        """Any rank may write a plain tensor that all have alike; another one only who has what is to be saved."""
        array = self.states[self.rank()]["plain"]
        array.reshape(-1).view(np.uint8)[0] ^= 1

    def text(self) -> None:
        """From small to large, to another length, and back."""
        text = "t" * self.rng.choice([1, 10, 5000, 6000, 20_000])
        for state in self.states:
            state["text"] = text

    def one_ranks_text(self) -> None:
        self.states[self.rank()]["text"] = "u" * self.rng.choice([1, 5000, 7000])

    def container(self) -> None:
        """A value becomes an empty container, or something is in it, also a tensor; not on every rank."""
        r, array = self.rank(), make_array((3,), seed=self.number())
        self.states[r]["box"] = self.rng.choice([{}, {}, {"in": self._count}, {"other": {"deep": 1}}, {"now": array}])

    def other_container(self) -> None:
        for state in self.states:
            state["list"] = self.rng.choice([[], (), {}, 1, "[]"])

    def cut(self) -> None:
        self.deal(self.rng.choice(sorted(self.boxes)))

    def replica(self) -> None:
        """One rank takes a box that another has too, or gives one up."""
        key, r = self.rng.choice(sorted(self.boxes)), self.rank()
        everyone = [box for boxes in self.boxes[key] for box in boxes]
        doubled = [box for box in self.boxes[key][r] if everyone.count(box) > 1]
        if doubled:
            self.boxes[key][r] = [box for box in self.boxes[key][r] if box != doubled[0]]
        else:
            self.boxes[key][r] = [*self.boxes[key][r], *{*everyone} - {*self.boxes[key][r]}]
        self.refill(key, r)

    def other_memory(self) -> None:
        """A rank's part lies elsewhere, in the same object."""
        key, r = self.rng.choice(sorted(self.boxes)), self.rank()
        if key in self.states[r]:
            how = self.rng.choice(LAYOUTS)
            tensor = self.states[r][key]
            tensor.pieces[:] = [laid_out(piece, how) for piece in tensor.pieces]

    def reshaped_in_place(self) -> None:
        """The same array, of another shape, on all ranks."""
        shape = (3, 11) if self.arrays["plain"].ndim == 1 else (33,)
        for array in (self.arrays["plain"], *(state["plain"] for state in self.states)):
            array.shape = shape

    def one_more(self) -> None:
        n = self.number()
        shape = tuple(self.rng.randrange(1, 40) for _ in range(self.rng.randrange(4)))
        self.arrays[f"t{n}"] = make_array(shape, self.rng.choice(sorted(DTYPES)), n)
        if self.rng.random() < 0.5:
            self.deal(f"t{n}")
        else:
            self.states[self.rank()][f"t{n}"] = self.arrays[f"t{n}"].copy()

    def one_less(self) -> None:
        extra = [key for key in self.arrays if key[0] == "t"]
        if extra:
            key = self.rng.choice(extra)
            del self.arrays[key]
            self.boxes.pop(key, None)
            for state in self.states:
                state.pop(key, None)

    def other_shape(self) -> None:
        """Of all ranks, or only of the parts: the same key, another tensor."""
        n, key = self.number(), self.rng.choice(sorted(self.boxes))
        shape, dtype = (self.rng.randrange(1, 50), self.rng.randrange(1, 50)), self.rng.choice(["float32", "uint8"])
        self.arrays[key] = make_array(shape, dtype, n)
        self.deal(key)

    def other_order(self) -> None:
        state = self.states[self.rank()]
        items = list(state.items())
        self.rng.shuffle(items)
        state.clear()
        state.update(items)

    def partial(self) -> None:
        """A tensor of addends, or the same one with other reductions."""
        parts = [make_array((6, 5), "int32", self.number()) & 0xFFFF for _ in range(self.ranks)]
        operation = self.rng.choice(["sum", "max", "min"])
        function: Any = {"sum": np.add, "max": np.maximum, "min": np.minimum}[operation]
        self.arrays["addends"] = function.reduce(parts)
        for r, state in enumerate(self.states):
            state["addends"] = sharded(parts[r], [whole((6, 5))], self.rng.choice(LAYOUTS))
            state["addends"].reduction = Reduction(operation, r, self.ranks)

    def block_bytes(self) -> None:
        self.options = SaveOptions(block_bytes=self.rng.choice([4096, 8192, 1 << 20]), timeout=60)

    def forget(self) -> None:
        self.memories[self.rank()] = SaveMemory()

    def other_coordinator(self) -> None:
        self.coordinator = self.rank()

    def fail(self) -> None:
        """A save in which a rank fails somewhere."""
        victim, operation = self.rank(), self.rng.choice(["write", "create", "sync_file", "prepare"])

        with tempfile.TemporaryDirectory() as folder:
            paths: list[Any] = [folder] * self.ranks
            paths[victim] = FaultyStorage(folder, raises(operation, "*", errno.EIO))
            results = save_with(self.memories, self.states, paths, self.options, self.coordinator)
            failed = [isinstance(result, RankFailureError) for result in results]
            assert all(failed) or not any(failed), results
            if not any(failed):  # that rank had nothing to write
                all_ok(results)

    # -- saving

    def save(self, folder: Path) -> SaveReport:
        """Save twice, by ranks that remember and by new ones, and compare."""
        reports = all_ok(save_with(self.memories, self.states, folder / "a", self.options, self.coordinator))
        others = all_ok(save_with(fresh(self.ranks), self.states, folder / "b", self.options, self.coordinator))
        ours, theirs = (load_whole(folder / name) for name in "ab")
        assert alike(ours, theirs)
        for key, array in self.arrays.items():
            if key not in ("plain", "addends"):
                assert same_bits(ours[key], array), key
        if "addends" in self.arrays and all(s["addends"].reduction for s in self.states):
            assert ours["addends"].shape == (6, 5)
        a, b = (read_metadata(folder / name, reports[0].unique_id) for name in "ab")
        assert alike(a.values, b.values)
        assert a.state_dict_metadata == b.state_dict_metadata
        assert a.variable_names == b.variable_names
        for mine, other in zip(reports, others, strict=True):
            for name in ("unique_id", "total_bytes", "bytes_written", "files", "warnings"):
                assert getattr(mine, name) == getattr(other, name), name
        assert a.block_bytes == self.options.block_bytes
        return reports[0]


def new_job(ranks: int, seed: int) -> Job:
    job = Job(ranks, seed)
    for i, (shape, dtype) in enumerate([((30, 41), "float32"), ((8, 3, 5), "bfloat16"), ((0, 4), "int8")]):
        job.arrays[f"d{i}"] = make_array(shape, dtype, i)
        job.deal(f"d{i}")
    job.arrays["plain"] = make_array((33,), "int64", 9)
    for state in job.states:
        state |= {
            "plain": job.arrays["plain"].copy(),
            "step": 0,
            "word": "w",
            "text": "t" * 5000,
            "box": {},
            "list": [],
        }
    return job


SAME = ("contents", "small_values", "one_ranks_value", "text_of_the_same_length")
OTHER = (
    "one_ranks_replica",
    "text",
    "one_ranks_text",
    "container",
    "other_container",
    "cut",
    "replica",
    "other_memory",
    "reshaped_in_place",
    "one_more",
    "one_less",
    "other_shape",
    "other_order",
    "partial",
    "block_bytes",
    "forget",
    "other_coordinator",
    "fail",
)
series = st.lists(st.lists(st.sampled_from(SAME * 2 + OTHER), max_size=3), min_size=2, max_size=7)


@examples(4)
@given(st.integers(1, 4), st.integers(0, 2**32), series)
def test_any_series_of_saves(seen: Seen, ranks: int, seed: int, steps: list[list[str]]) -> None:
    job = new_job(ranks, seed)
    seen.take()
    for number, changes in enumerate([[], *steps]):
        agreed = job.replicas_agree
        for change in changes:
            getattr(job, change)()
        with tempfile.TemporaryDirectory() as folder:
            seen.take()
            all_ok(save_with(job.memories, job.states, folder, job.options, job.coordinator))
            made, asked = seen.take()
            assert asked <= made <= 1
            if number and set(changes) <= set(SAME) and job.replicas_agree == agreed:
                assert not made, changes
            job.save(Path(folder) / "compared")
            assert seen.take() == (1, 0), "the second time nothing has changed; the new ranks plan, and are not asked"


@pytest.mark.parametrize(
    ("change", "ranks"),
    [(change, ranks) for ranks, most in ((3, 12), (1, 3)) for change in some([*SAME, *OTHER], most)],
)
def test_one_change_at_a_time(tmp_path: Path, seen: Seen, change: str, ranks: int) -> None:
    """Each change twice, so that it also goes back to what was."""
    job, times = new_job(ranks, ranks), 2
    for _ in range(times):
        job.save(tmp_path)
        getattr(job, change)()
    job.save(tmp_path)
    folder = tmp_path / "a"
    file = folder / f"{times}.metadata"
    save_id, lost = read_metadata(folder, times).save_id, without_times(file)
    file.unlink()
    rebuild_metadata(folder, save_id)
    assert file.read_bytes() == lost, "the data files say what .metadata said"
    assert verify(folder, times).ok


# -- who is asked, and who plans


def dealt(count: int, rows: int = 12) -> list[dict[str, Any]]:
    array = make_array((rows, 4))
    step = rows // count
    return [{"w": sharded(array, [Box((r * step, 0), (step, 4))]), "n": 1} for r in range(count)]


@pytest.mark.parametrize("victim", range(3))
def test_one_rank_alone_changes_and_the_others_are_asked(tmp_path: Path, seen: Seen, victim: int) -> None:
    """The others send fingerprints alone; only when one rank says something new must they say more."""
    states, memories = dealt(3), fresh(3)
    seen.take()
    all_ok(save_with(memories, states, tmp_path))
    assert seen.take() == (1, 0), "at first all ranks say it all"
    all_ok(save_with(memories, states, tmp_path))
    assert seen.take() == (0, 0)
    states[victim]["mine"] = make_array((3,), seed=victim)
    all_ok(save_with(memories, states, tmp_path))
    assert seen.take() == (1, 1)
    assert same_bits(load_whole(tmp_path)["mine"], make_array((3,), seed=victim))
    all_ok(save_with(memories, states, tmp_path))
    assert seen.take() == (0, 0)
    del states[victim]["mine"]
    all_ok(save_with(memories, states, tmp_path))
    assert seen.take() == (0, 0), "the first plan is still there"
    assert set(load_whole(tmp_path)) == {"w", "n"}


def test_states_that_are_saved_in_turns_keep_their_plans(tmp_path: Path, seen: Seen) -> None:
    """A model, its averages under the same keys, and an optimizer. So many are remembered, and no more."""
    kept, memories = save_memory._MOST_KEPT, fresh(2)
    kinds = [dealt(2), dealt(2), *(dealt(2, 4 + 2 * i) for i in range(kept))]
    for number, states in enumerate(kinds):
        for state in states:
            state["n"] = number  # no part of the structure: the first two have one plan
    seen.take()

    def save_all(chosen: Sequence[int]) -> None:
        for number in chosen:
            all_ok(save_with(memories, kinds[number], tmp_path / str(number)))
            found = load_whole(tmp_path / str(number))
            assert found["n"] == number
            assert same_bits(found["w"], make_array((12 if number < 2 else 4 + 2 * (number - 2), 4)))

    save_all(range(kept))
    assert seen.take() == (kept - 1, 0)
    known = [[one.identity for one in memory.known] for memory in memories]
    save_all([*range(kept), *reversed(range(kept))])
    assert seen.take() == (0, 0)
    for memory, before in zip(memories, known, strict=True):
        assert {*map(id, before)} == {id(one.identity) for one in memory.known}
    save_all(range(kept, kept + 2))
    assert seen.take()[0] == 2
    assert all(len(kinds) > kept == len(memory.known) == len(memory.plans) for memory in memories)
    assert len(memories[0].planned) == kept


def test_large_states_are_not_kept_beside_the_latest(
    tmp_path: Path, seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(save_memory, "_MOST_ENTRIES", 0)
    memories, kinds = fresh(2), [dealt(2), dealt(2, 4)]
    seen.take()
    for states in (*kinds, *kinds):
        all_ok(save_with(memories, states, tmp_path))
    assert seen.take()[0] == 4
    assert [len(kept) for kept in (memories[0].known, memories[0].plans, memories[0].planned)] == [1, 1, 1]


@pytest.mark.parametrize("who", [[0], [1], [0, 1]])
def test_a_rank_that_has_forgotten_one_of_several_plans_is_told_it(tmp_path: Path, seen: Seen, who: list[int]) -> None:
    memories, kinds = fresh(2), [dealt(2), dealt(2, 4)]
    for states in kinds:
        all_ok(save_with(memories, states, tmp_path))
    for r in who:
        memories[r] = SaveMemory()
    seen.take()
    all_ok(save_with(memories, kinds[0], tmp_path))
    assert seen.take() == (int(0 in who), int(who == [0]))
    assert same_bits(load_whole(tmp_path)["w"], make_array((12, 4)))


def test_a_structure_that_comes_back_is_not_taken_for_the_last_one(tmp_path: Path) -> None:
    """A, B, A: what rank 1 believes to be known is not, for the coordinator has planned for B meanwhile."""
    states, memories = dealt(3), fresh(3)
    more = make_array((5, 5), seed=3)
    for i in range(6):
        if i % 2:
            states[1]["more"] = more
        else:
            states[1].pop("more", None)
        more += 1
        all_ok(save_with(memories, states, tmp_path))
        found = load_whole(tmp_path)
        assert ("more" in found) == bool(i % 2)
        assert not i % 2 or same_bits(found["more"], more)


@pytest.mark.parametrize("who", [[0], [1], [2], [1, 2], [0, 1, 2]])
def test_ranks_that_have_lost_their_memory(tmp_path: Path, seen: Seen, who: list[int]) -> None:
    states, memories = dealt(3), fresh(3)
    all_ok(save_with(memories, states, tmp_path))
    seen.take()
    for r in who:
        memories[r] = SaveMemory()
    all_ok(save_with(memories, states, tmp_path))
    assert seen.take() == (int(0 in who), int(who == [0]))
    assert same_bits(load_whole(tmp_path)["w"], make_array((12, 4)))


def test_a_refused_state_is_forgotten(tmp_path: Path, seen: Seen) -> None:
    """A save that cannot be planned leaves nothing behind by which the next one would be."""
    states, memories = dealt(3), fresh(3)
    all_ok(save_with(memories, states, tmp_path))
    good = states[1].pop("w")
    for _ in range(2):
        for error in save_with(memories, states, tmp_path):
            assert isinstance(error, Exception)
            assert "no rank has the region" in str(error)
    states[1]["w"] = good
    good.pieces[0][...] = 7
    all_ok(save_with(memories, states, tmp_path))
    assert (load_whole(tmp_path)["w"][4:8] == 7).all()
    assert set(files_in(tmp_path)) == {p.name for p in tmp_path.iterdir()}


@pytest.mark.parametrize(
    ("operation", "victim"),
    some(itertools.product(["prepare", "create", "write", "sync_file", "publish", "sync"], range(3)), 8),
)
def test_a_rank_that_fails_anywhere_and_changes_after_that(tmp_path: Path, operation: str, victim: int) -> None:
    states, memories = dealt(3), fresh(3)
    all_ok(save_with(memories, states, tmp_path))
    broken = [True]

    paths: list[Any] = [tmp_path] * 3
    paths[victim] = FaultyStorage(tmp_path, raises(operation, "*", errno.EIO, lambda: broken[0]))
    for r, state in enumerate(states):
        state["added"] = make_array((r + 2, 3), seed=1)[:2].copy()
    results = save_with(memories, states, paths)
    if any(isinstance(result, BaseException) for result in results):
        errors_of(results, RankFailureError)
        assert "added" not in load_whole(tmp_path)
    else:
        assert victim
        assert operation in ("publish", "sync")
    broken[0] = False
    for i in range(3):
        for state in states:
            state["w"].pieces[0][...] = i
        if i == 2:
            del states[victim]["added"]
        all_ok(save_with(memories, states, paths))
        found = load_whole(tmp_path)
        assert (found["w"] == i).all()
        assert "added" in found
        assert verify(tmp_path).ok


def test_addends_are_reduced_anew_by_the_same_plan(tmp_path: Path, seen: Seen) -> None:
    states = [{"g": sharded(np.full((8, 8), float(r + 1), np.float32), [whole((8, 8))])} for r in range(3)]
    for r, state in enumerate(states):
        state["g"].reduction = Reduction("sum", r, 3)
    memories = fresh(3)
    seen.take()
    for expected, plans in ((6, 1), (60, 0)):
        all_ok(save_with(memories, states, tmp_path))
        assert seen.take() == (plans, 0)
        assert (load_whole(tmp_path)["g"] == expected).all()
        for state in states:
            state["g"].pieces[0][...] *= 10


def test_replicas_are_compared_each_time_with_what_was_remembered(tmp_path: Path) -> None:
    """Another coordinator, other contents, other ranks that differ; and nobody looks while they need not."""
    states, memories = [{"p": np.arange(6.0), "n": 1, "text": "x" * 5000} for _ in range(3)], fresh(3)
    check: Callable[..., list[Any]] = lambda **more: [  # noqa: E731
        warning.partition(":")[0].lstrip("/")
        for warning in all_ok(save_with(memories, states, tmp_path, **more))[0].warnings
    ]
    assert check() == []
    states[2]["p"][3] = 9
    assert check() == ["p"]
    states[1]["n"] = 2
    states[1]["text"] = "y" * 5000
    assert check() == ["n", "p", "text"]
    assert check(options=SaveOptions(check_replicas="off", block_bytes=4096, timeout=60)) == []
    assert check() == ["n", "p", "text"]
    assert load_whole(tmp_path)["p"][3] == 3
    states[2]["p"][3] = 3
    states[1] |= {"n": 1, "text": "x" * 5000}
    assert check() == []


def test_user_metadata_is_that_of_each_save(tmp_path: Path) -> None:
    states, memories = dealt(2), fresh(2)
    for i in range(3):
        options = SaveOptions(block_bytes=4096, timeout=60, user_metadata={"i": i} if i != 1 else None)
        all_ok(save_with(memories, states, tmp_path, options))
        assert read_metadata(tmp_path, i).user_metadata == ({"i": i} if i != 1 else {})


@pytest.mark.parametrize("change", some(["contents", "text", "cut", "block_bytes"], 2))
def test_files_in_several_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    split = datafile.split_in_parts
    name = "paddle_dist_ckpt.saving.file_plan.split_in_parts"
    monkeypatch.setattr(name, lambda table: split(table, 1500))
    job = new_job(3, 5)
    for n in range(12):
        job.arrays[f"m{n}"] = make_array((n + 2, 7), "float32", n)
        job.deal(f"m{n}")
    for _ in range(4):
        assert job.save(tmp_path).files > 6
        getattr(job, change)()


def test_a_value_of_ever_new_length_does_not_make_the_memory_grow(tmp_path: Path) -> None:
    """A log that is longer in each save, say."""
    states, memories = dealt(2), fresh(2)
    sizes = []
    for i in range(12):
        states[1]["log"] = "line" * (2000 + i)
        all_ok(save_with(memories, states, tmp_path))
        assert len(memories[1].known) == 1
        sizes.append(len(memories[1].known[0].tensors.geometries))
    assert load_whole(tmp_path)["log"] == states[1]["log"]
    assert len(set(sizes[2:])) == 1, sizes
