"""Objects with a state_dict of their own, and values of which every rank keeps its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paddle_dist_ckpt import (
    CheckpointError,
    LoadOptions,
    PerRank,
    StateDictMismatchError,
    UnsupportedValueError,
    read_metadata,
    rebuild_metadata,
    verify,
)
from paddle_dist_ckpt.core.box import Box
from paddle_dist_ckpt.core.messages import decode
from paddle_dist_ckpt.loading import answering
from paddle_dist_ckpt.loading.load_coordinator import LoadCoordinator
from paddle_dist_ckpt.loading.messages import LoadAnswer
from paddle_dist_ckpt.testing import SimulatedRank, run_ranks, shard_array
from test.jobs import all_ok


class Loader:
    """A data loader with a position, an order and statistics, as a user may write one."""

    def __init__(self, position: int = 0, order: Any = (), seen: Any = None) -> None:
        self.position, self.order = position, list(order)
        self.mean = np.zeros(3) if seen is None else np.array(seen, float)
        self.loaded = 0

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "order": {f"{i}": n for i, n in enumerate(self.order)}, "mean": self.mean}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position, self.mean = state["position"], state["mean"]
        self.order = [state["order"][f"{i}"] for i in range(len(state["order"]))]
        self.loaded += 1


class Outer:
    """An object with another one in its state."""

    def __init__(self, loader: Loader, name: str) -> None:
        self.loader, self.name = loader, name

    def state_dict(self) -> dict[str, Any]:
        return {"loader": self.loader, "name": self.name}

    def set_state_dict(self, state: dict[str, Any]) -> None:
        assert state["loader"] is self.loader
        self.name = state["name"] + f" after {self.loader.loaded}"


def options(**more: Any) -> LoadOptions:
    return LoadOptions(timeout=60, **more)


def saved(ranks: int, state: Any, path: Path) -> None:
    all_ok(run_ranks(ranks, lambda rank: rank.save(state(rank.rank), path)))


def loaded(ranks: int, state: Any, path: Path, **more: Any) -> list[Any]:
    def work(rank: SimulatedRank) -> Any:
        target = state(rank.rank)
        report = rank.load(target, path, options=options(**more))
        return target, report

    return run_ranks(ranks, work)


def test_an_object_comes_back_whatever_it_was_before(tmp_path: Path) -> None:
    saved(2, lambda rank: {"loader": Loader(7, "cab", [1, 2, 3]), "epoch": 3}, tmp_path)
    targets = [{"loader": Loader(1, "xy"), "epoch": 0} for _ in range(2)]
    before = [target["loader"] for target in targets]
    all_ok(loaded(2, lambda rank: targets[rank], tmp_path))
    for target, loader in zip(targets, before, strict=True):
        assert target["loader"] is loader
        assert (loader.position, loader.order, loader.loaded) == (7, ["c", "a", "b"], 1)
        assert loader.mean.tolist() == [1, 2, 3]
        assert target["epoch"] == 3


def test_an_object_and_its_state_dict_are_the_same_on_disk(tmp_path: Path) -> None:
    saved(1, lambda rank: {"loader": Loader(7, "cab", [1, 2, 3]).state_dict()}, tmp_path)
    loader = Loader()
    all_ok(loaded(1, lambda rank: {"loader": loader}, tmp_path))
    assert (loader.position, loader.order, loader.mean.tolist()) == (7, ["c", "a", "b"], [1, 2, 3])
    state = Loader(0, "xyz").state_dict()
    saved(1, lambda rank: {"loader": Loader(8, "abc", [4, 5, 6])}, tmp_path)
    all_ok(loaded(1, lambda rank: {"loader": state}, tmp_path))
    assert state["position"] == 8
    assert state["order"] == {"0": "a", "1": "b", "2": "c"}


def test_arrays_of_an_object_are_as_they_were_stored(tmp_path: Path) -> None:
    saved(2, lambda rank: {"loader": Loader(7, "cab", np.arange(1000))}, tmp_path)
    for target, _ in all_ok(loaded(2, lambda rank: {"loader": Loader(1, "x", [5])}, tmp_path)):
        assert target["loader"].mean.tolist() == list(range(1000)), "whatever its size was"
        assert target["loader"].mean.dtype == np.float64
    arrays = {"half": np.ones(2, np.float16), "none": np.zeros((0, 3), np.int8), "flags": np.array(True)}

    class Holder(Loader):
        state: Any = None

        def state_dict(self) -> dict[str, Any]:
            return dict(arrays) if self.state is None else {}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.state = state

    saved(1, lambda rank: {"holder": Holder()}, tmp_path)
    holder = Holder()
    all_ok(loaded(1, lambda rank: {"holder": holder}, tmp_path))
    for name, array in arrays.items():
        assert holder.state[name].tolist() == array.tolist()
        assert (holder.state[name].dtype, holder.state[name].shape) == (array.dtype, array.shape)


def test_objects_in_lists_and_in_objects(tmp_path: Path) -> None:
    def state(name: str, *positions: int) -> dict[str, Any]:
        first, second = (Loader(position) for position in positions)
        return {"all": [Outer(first, name), (second, 1)]}

    saved(2, lambda rank: state("a", 5, 6), tmp_path)
    ((target, _), _) = all_ok(loaded(2, lambda rank: state("b", 0, 0), tmp_path))
    outer, (second, number) = target["all"]
    assert (outer.name, outer.loader.position, second.position, number) == ("a after 1", 5, 6, 1)


def test_an_object_without_anything(tmp_path: Path) -> None:
    class Empty:
        state: Any = None

        def state_dict(self) -> dict[str, Any]:
            return {}

        def set_state_dict(self, state: dict[str, Any]) -> None:
            self.state = state

    saved(1, lambda rank: {"empty": Empty(), "loader": Loader(4)}, tmp_path)
    empty = Empty()
    all_ok(loaded(1, lambda rank: {"empty": empty}, tmp_path))
    assert empty.state == {}
    all_ok(loaded(1, lambda rank: {"loader": empty}, tmp_path, strict=False))


def test_a_missing_object_is_a_mismatch_and_nothing_is_set(tmp_path: Path) -> None:
    saved(1, lambda rank: {"loader": Loader(4), "x": np.ones(2)}, tmp_path)
    loader, other = Loader(1), Loader(2)
    (error,) = loaded(1, lambda rank: {"loader": loader, "other": other}, tmp_path)
    assert isinstance(error, StateDictMismatchError)
    assert "other" in str(error)
    assert "missing" in str(error)
    assert (loader.position, loader.loaded) == (1, 0)
    ((_, report),) = loaded(1, lambda rank: {"loader": loader, "other": other}, tmp_path, strict=False)
    assert loader.position == 4
    assert other.loaded == 0
    assert "other" in report.skipped[0]


def test_a_stored_tensor_that_the_object_lacks_is_a_mismatch(tmp_path: Path) -> None:
    more = shard_array(np.ones(2), [Box((0,), (2,))])
    saved(1, lambda rank: {"loader": {"position": 1, "order": {}, "mean": np.ones(3), "more": more}}, tmp_path)
    (error,) = loaded(1, lambda rank: {"loader": Loader()}, tmp_path)
    assert isinstance(error, StateDictMismatchError)
    assert "loader.more: the state_dict has no such entry in its object" in str(error)


def test_a_state_that_is_no_dict_is_refused(tmp_path: Path) -> None:
    class Odd(Loader):
        def state_dict(self) -> Any:
            return [1]

    (error,) = run_ranks(1, lambda rank: rank.save({"odd": Odd()}, tmp_path))
    assert isinstance(error, UnsupportedValueError)
    assert "odd: state_dict() of this Odd returned a list" in str(error)


def test_an_object_that_does_not_give_its_state_is_named(tmp_path: Path) -> None:
    class Odd(Loader):
        def state_dict(self) -> Any:
            raise KeyError("inner")

    saved(1, lambda rank: {"deep": {"odd": Loader()}}, tmp_path)
    for results in (
        run_ranks(1, lambda rank: rank.save({"deep": {"odd": Odd()}}, tmp_path)),
        loaded(1, lambda rank: {"deep": {"odd": Odd()}}, tmp_path),
    ):
        (error,) = results
        assert isinstance(error, CheckpointError)
        assert str(error).endswith("deep.odd: state_dict() of this Odd failed: KeyError: 'inner'")


class Silent(Exception):
    def __str__(self) -> str:
        raise ValueError


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (Silent(), "odd: state_dict() of this Odd failed: Silent"),
        (KeyError("x" * 9999), "odd: state_dict() of this Odd failed: KeyError: 'xxx"),
        (CheckpointError("ours"), "ours"),
        (MemoryError("full"), "MemoryError: full"),
    ],
)
def test_what_an_object_raises_in_place_of_its_state(tmp_path: Path, error: Exception, said: str) -> None:
    class Odd(Loader):
        def state_dict(self) -> Any:
            raise error

    (found,) = run_ranks(1, lambda rank: rank.save({"odd": Odd()}, tmp_path))
    assert isinstance(found, CheckpointError)
    assert f"rank 0: {said}" in str(found)
    assert len(str(found)) < 2000


@pytest.mark.parametrize("more", [0, 10_000])
def test_a_state_dict_with_other_keys_is_a_value_or_refused(tmp_path: Path, more: int) -> None:
    class Table:
        def __init__(self, state: dict[Any, Any]) -> None:
            self.state = state

        def state_dict(self) -> dict[Any, Any]:
            return self.state

        def load_state_dict(self, state: dict[Any, Any]) -> None:
            self.state = state

    table, found = (
        Table({None: 1, (2, 3): [4], 1.5: {"x": "y"}, b"k": None, **{(i,): i for i in range(more)}}),
        Table({}),
    )
    all_ok(run_ranks(1, lambda rank: rank.save({"a": {"table": table}}, tmp_path)))
    all_ok(run_ranks(1, lambda rank: rank.load({"a": {"table": found}}, tmp_path, options=options())))
    assert found.state == table.state
    (error,) = run_ranks(1, lambda rank: rank.save({"a": {"table": Table({None: np.ones(2)})}}, tmp_path / "b"))
    assert isinstance(error, UnsupportedValueError)
    assert "a.table: holds tensors, and has the key None" in str(error)


def test_a_setter_that_raises_is_an_error_on_every_rank(tmp_path: Path) -> None:
    class Stubborn(Loader):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise KeyError("no")

    saved(2, lambda rank: {"loader": Loader(4)}, tmp_path)
    errors = loaded(2, lambda rank: {"loader": (Stubborn if rank else Loader)()}, tmp_path)
    assert all(isinstance(error, CheckpointError) for error in errors)
    assert all("loader: the Stubborn did not take its state: KeyError: 'no'" in str(error) for error in errors)


# -- PerRank


def own(rank: int) -> dict[str, Any]:
    return {"rng": PerRank((rank, b"\0" * 10_000)), "data": {"at": PerRank({"position": rank * 10})}, "epoch": 1}


def blank(rank: int) -> dict[str, Any]:
    return {"rng": PerRank(None), "data": {"at": PerRank(-1)}, "epoch": 0}


def test_each_rank_gets_its_own_back(tmp_path: Path) -> None:
    saved(3, own, tmp_path)
    for rank, (target, _) in enumerate(all_ok(loaded(3, blank, tmp_path))):
        assert target == own(rank)
    assert verify(tmp_path).ok


def test_many_ranks_are_told_of_the_values_of_few(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To tell each of them of all would take as many bytes as the square of the ranks."""
    told: list[dict[int, bytes]] = []
    request = LoadCoordinator.request

    def noted(self: LoadCoordinator, messages: Any) -> dict[int, bytes]:
        told.append(request(self, messages))
        return told[-1]

    monkeypatch.setattr(LoadCoordinator, "request", noted)
    monkeypatch.setattr(answering, "_GROUP", 2)
    saved(5, own, tmp_path)
    for rank, (target, report) in enumerate(all_ok(loaded(5, blank, tmp_path, strict="all"))):
        assert target == own(rank)
        assert report.unused_keys == ()
    for rank, data in told.pop().items():
        paths = decode(data, LoadAnswer).tensors.paths
        group = [rank - rank % 2, rank - rank % 2 + 1]
        assert paths == [f"/{key}/~r{one}" for key in ("data/at", "rng") for one in group if one < 5]
    for target, _ in all_ok(loaded(3, blank, tmp_path, per_rank="coordinator")):
        assert target == own(0)
    assert len(decode(told.pop()[0], LoadAnswer).tensors.paths) == 10  # of another number of ranks, any may be taken


def test_own_values_are_in_data_files_and_need_a_reader_that_knows_them(tmp_path: Path) -> None:
    saved(2, own, tmp_path)
    head = (tmp_path / "0.metadata").read_bytes().split(b"\n")[0]
    assert b'"required_features":["per_rank"]' in head
    metadata = read_metadata(tmp_path)
    assert sorted(metadata.table.paths) == ["/data/at/~r0", "/data/at/~r1", "/rng/~r0", "/rng/~r1"]
    saved(2, lambda rank: {"epoch": 1}, tmp_path)
    assert b'"required_features":[]' in (tmp_path / "1.metadata").read_bytes().split(b"\n")[0]


def test_own_values_survive_the_loss_of_the_metadata(tmp_path: Path) -> None:
    saved(2, own, tmp_path)
    (tmp_path / "0.metadata").unlink()
    rebuild_metadata(tmp_path)
    for rank, (target, _) in enumerate(all_ok(loaded(2, blank, tmp_path))):
        assert target == own(rank)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_another_number_of_ranks_is_refused(tmp_path: Path, ranks: int) -> None:
    saved(3, own, tmp_path)
    errors = loaded(ranks, blank, tmp_path)
    assert all(isinstance(error, StateDictMismatchError) for error in errors)
    assert "rng: every rank has saved its own, on 3 ranks (ranks 0, 1, 2), and now there are" in str(errors[0])
    assert "per_rank='by_rank'" in str(errors[0])


def test_another_number_of_ranks_by_rank(tmp_path: Path) -> None:
    saved(3, own, tmp_path)
    results = all_ok(loaded(4, blank, tmp_path, per_rank="by_rank"))
    for rank, (target, report) in enumerate(results):
        assert target == (own(rank) if rank < 3 else {**blank(rank), "epoch": 1})
        assert len(report.skipped) == (0 if rank < 3 else 2)
    assert "left as it is" in results[3][1].skipped[0]
    assert [target for target, _ in all_ok(loaded(1, blank, tmp_path, per_rank="by_rank"))] == [own(0)]


def test_another_number_of_ranks_takes_the_coordinators(tmp_path: Path) -> None:
    saved(3, own, tmp_path)
    for target, _ in all_ok(loaded(4, blank, tmp_path, per_rank="coordinator")):
        assert target == own(0)
    for rank, (target, _) in enumerate(all_ok(loaded(3, blank, tmp_path, per_rank="coordinator"))):
        assert target == own(rank), "the number of ranks is the same"


def test_a_rank_that_saved_none_is_told(tmp_path: Path) -> None:
    saved(2, lambda rank: own(rank) if rank else {"epoch": 1}, tmp_path)
    errors = loaded(2, blank, tmp_path)
    assert isinstance(errors[0], StateDictMismatchError)
    assert "rng: rank 0 has saved no value of its own, only rank 1 has (rank 0)" in str(errors[0])


def test_an_object_comes_back_of_which_one_rank_alone_has_values_of_its_own(tmp_path: Path) -> None:
    """Such as a loader of data, which the first stage of a pipeline has."""

    class Data(Loader):
        def __init__(self, is_first: bool, position: int = 0) -> None:
            super().__init__(position)
            self.is_first = is_first

        def state_dict(self) -> dict[str, Any]:
            return {"epoch": 2, **({"at": PerRank(self.position)} if self.is_first else {})}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            assert state == {"epoch": 2, **({"at": PerRank(7)} if self.is_first else {})}
            self.loaded += 1

    def wanted(rank: int) -> dict[str, Any]:
        return {"data": Data(rank == 0), "same": None, "more": {}}

    def state(rank: int) -> dict[str, Any]:
        plain = Data(rank == 0, 7).state_dict()
        return {"data": Data(rank == 0, 7), "same": plain, "more": plain}

    saved(2, state, tmp_path)
    for mode in ("refuse", "by_rank", "coordinator"):
        for rank, (target, report) in enumerate(all_ok(loaded(2, wanted, tmp_path, per_rank=mode))):
            assert target["data"].loaded == 1
            assert target["same"] == target["more"] == state(rank)["same"]
            assert report.skipped == report.unused_keys == ()
    errors = loaded(2, lambda rank: {"data": Data(is_first=True)}, tmp_path)
    assert "data.at: rank 1 has saved no value of its own, only rank 0 has (rank 1)" in str(errors[0])


def test_an_own_value_against_another(tmp_path: Path) -> None:
    saved(2, lambda rank: {"a": PerRank(rank), "b": 1}, tmp_path)
    errors = loaded(2, lambda rank: {"a": 1, "b": PerRank(2)}, tmp_path)
    text = str(errors[0])
    assert "a: the state_dict has a value, in the checkpoint it is what every rank has saved of its own" in text
    assert "b: the state_dict has a PerRank, in the checkpoint it is a value" in text
    assert "what every rank has saved of its own is loaded into PerRank(None), in the place of the value)" in text


def test_an_own_value_in_the_place_of_whose_dict_another_is_wanted(tmp_path: Path) -> None:
    """As where a state of generators is saved in a PerRank, and wanted without it."""
    saved(2, lambda rank: {"g": {"rng": PerRank({"n": rank, "deep": {"x": np.ones(3)}})}}, tmp_path)
    text = str(loaded(2, lambda rank: {"g": {"rng": {"n": 1, "deep": {"x": np.zeros(3)}}}}, tmp_path)[0])
    for key in ("g.rng.n: the state_dict has a value", "g.rng.deep.x: the state_dict has a tensor"):
        assert f"{key}, in the checkpoint it is missing: g.rng is what every rank has saved of its own" in text
    assert "is loaded into PerRank(None), in the place of the value)" in text
    text = str(loaded(2, lambda rank: {"g": 1}, tmp_path)[0])
    assert "g: the state_dict has a value, in the checkpoint it is a container" in text


def test_own_values_and_others_do_not_mix(tmp_path: Path) -> None:
    errors = run_ranks(2, lambda rank: rank.save({"g": {"x": 1} if rank.rank else PerRank(1)}, tmp_path))
    assert all(isinstance(error, UnsupportedValueError) for error in errors)
    assert "g" in str(errors[0])


def test_none_takes_this_ranks_own(tmp_path: Path) -> None:
    saved(2, own, tmp_path)
    for rank, (target, _) in enumerate(all_ok(loaded(2, lambda rank: {"rng": None, "data": None}, tmp_path))):
        assert target == {name: own(rank)[name] for name in ("rng", "data")}


def test_own_values_in_an_object_and_in_a_list(tmp_path: Path) -> None:
    class Sampler(Loader):
        def state_dict(self) -> dict[str, Any]:
            return {"position": PerRank(self.position)}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.position = state["position"].value

    saved(2, lambda rank: {"s": Sampler(rank + 5), "l": [PerRank(rank), 1]}, tmp_path)
    for rank, (target, _) in enumerate(
        all_ok(loaded(2, lambda rank: {"s": Sampler(), "l": [PerRank(9), 0]}, tmp_path))
    ):
        assert target["s"].position == rank + 5
        assert target["l"] == [PerRank(rank), 1]


def test_an_object_is_given_back_what_it_has_of_its_own_if_none_is_stored(tmp_path: Path) -> None:
    class Shard(Loader):
        def state_dict(self) -> dict[str, Any]:
            return {"position": self.position, "inner": {"order": PerRank(self.order)}}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.position, self.order = state["position"], state["inner"]["order"].value

    saved(1, lambda rank: {"s": Shard(7, [0])}, tmp_path)
    results = all_ok(loaded(2, lambda rank: {"s": Shard(1, [5, rank])}, tmp_path, per_rank="by_rank"))
    assert [(target["s"].position, target["s"].order) for target, _ in results] == [(7, [0]), (7, [5, 1])]
    assert [report.skipped_keys for _, report in results] == [(), ("s.inner.order",)]


def test_an_own_value_that_changes_in_size_a_little_needs_no_new_plan(tmp_path: Path) -> None:
    def work(rank: SimulatedRank) -> Any:
        plans = []
        for i in range(3):
            rank.save({"at": PerRank({"position": 10**i}), "x": np.ones(4)}, tmp_path)
            plans.append(rank.memory.plan.plan_id)
        return plans

    for plans in all_ok(run_ranks(2, work)):
        assert len(set(plans)) == 1
