"""Process groups, coordinators, and what differs between their ranks."""

from __future__ import annotations

import itertools
import os
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import paddle
import pytest
from paddle.base import core

from paddle_dist_ckpt import (
    CheckpointError,
    CheckpointManager,
    CheckpointTimeoutError,
    LoadOptions,
    SaveOptions,
    export,
    export_state_dict,
    list_checkpoints,
    load_merged_state_dict,
    load_state_dict,
    save,
    save_state_dict,
    wiring,
)
from paddle_dist_ckpt.control import AgreedHub
from paddle_dist_ckpt.control.ranks import Ranks
from paddle_dist_ckpt.errors import CollectiveError
from paddle_dist_ckpt.paddle_adapter import groups, job_secret
from paddle_dist_ckpt.paddle_adapter.transport import PaddleTransport
from test.control.groups import Store
from test.interrupts import interrupted
from test.paddle import cases_groups as cases
from test.ranks.launcher import forked
from test.ranks.pool import RankPool

SOME = [2, 3, 5]


@pytest.fixture
def some(pool: RankPool) -> RankPool:
    """The pool, with a group of the ranks in SOME."""
    pool.run(cases.make_group, SOME)
    return pool


def test_default_group(pool: RankPool, tmp_path: Path) -> None:
    results = pool.run(cases.save_and_load, str(tmp_path), None, 0)
    assert [(right, value) for right, value, _ in results] == [(True, 0)] * 8


def test_group_without_rank_0(some: RankPool, tmp_path: Path) -> None:
    results = some.run(cases.save_and_load, str(tmp_path), SOME, 0, ranks=SOME)
    assert [(right, value) for right, value, _ in results] == [(True, 2)] * 3
    ranks = sorted(int(path.name.partition("_")[0]) for path in tmp_path.glob("*.safetensors"))
    assert ranks == SOME
    assert load_merged_state_dict(tmp_path)["x"].tolist() == cases.array().tolist()


@pytest.mark.parametrize("coordinator", [3, 5])
def test_coordinator_is_who_was_named(some: RankPool, tmp_path: Path, coordinator: int) -> None:
    results = some.run(cases.save_and_load, str(tmp_path), SOME, coordinator, True, ranks=SOME)
    assert [(right, value) for right, value, _ in results] == [(True, coordinator)] * 3
    committed = {rank: "0.metadata" in files for rank, (_, _, files) in zip(SOME, results, strict=True)}
    assert committed == {rank: rank == coordinator for rank in SOME}


def test_coordinator_outside_the_group(some: RankPool, tmp_path: Path) -> None:
    for outcomes in some.run(cases.call_wrongly, str(tmp_path), SOME, 4, ranks=SOME):
        for outcome in outcomes:
            assert outcome.error == "ValueError"
            assert "coordinator_rank 4" in outcome.message
    assert not list(tmp_path.iterdir())


def test_rank_outside_the_group(some: RankPool, tmp_path: Path) -> None:
    for outcomes in some.run(cases.call_wrongly, str(tmp_path), SOME, 2, ranks=[0, 7]):
        for outcome in outcomes:
            assert outcome.error == "ValueError"
            assert "[2, 3, 5]" in outcome.message
    assert not list(tmp_path.iterdir())


def test_no_dist_needs_no_other_rank(pool: RankPool, tmp_path: Path) -> None:
    assert pool.run(cases.save_and_load_alone, str(tmp_path), ranks=[3]) == [(9.0, 3)]
    assert pool.run(cases.save_and_load_alone, str(tmp_path), ranks=[0, 1, 3]) == [(0.0, 0), (3.0, 1), (9.0, 3)]
    assert list_checkpoints(tmp_path / "3") == [0, 1]


@pytest.mark.parametrize("coordinators", [(0, 0), (0, 1), (1, 0)])
def test_collectives_of_two_threads_take_turns(pool: RankPool, tmp_path: Path, coordinators: tuple[int, int]) -> None:
    named = dict(zip(("first", "second"), coordinators, strict=True))
    assert pool.run(cases.load_from_two_threads, str(tmp_path), 2, named, ranks=2) == [[True, True]] * 2


def test_ranks_with_different_keys(pool: RankPool, tmp_path: Path) -> None:
    pool.run(cases.save_different_keys, str(tmp_path), 4, ranks=4)
    merged = load_merged_state_dict(tmp_path, flat=True)
    assert sorted(merged) == ["all", "nested.big", "nested.value", "only1", "only2", "only3"]
    assert merged["only2"].tolist() == [2.0, 2.0]
    assert merged["nested.big"] == "y" * 9000
    results = pool.run(cases.load_different_keys, str(tmp_path), 4, ranks=4)
    assert [state for state, _ in results] == [
        {},
        {"only3": [3.0, 3.0]},
        {"nested": {"value": 5, "big": "y" * 9000}},
        {"all": [1.0, 1.0]},
    ]
    assert {tuple(sorted(unused)) for _, unused in results} == {("only1", "only2")}


def test_everything_empty(pool: RankPool, tmp_path: Path) -> None:
    pool.run("test.paddle.cases_failures:save", str(tmp_path), 3, None, {}, ranks=3)
    assert load_merged_state_dict(tmp_path) == {}


def test_replicas_that_differ_are_named(pool: RankPool, tmp_path: Path) -> None:
    outcomes = pool.run(cases.save_differing_replicas, str(tmp_path), "warn", ranks=3)
    for outcome in outcomes:
        assert outcome.error is None
        assert len(outcome.result) == 2
        assert "other" in outcome.result[0]
        assert "seed" in outcome.result[1]
    merged = load_merged_state_dict(tmp_path)
    assert merged["other"].tolist() == [1.0] * 4  # rank 1 was the coordinator
    assert merged["seed"] == 1


def test_replicas_that_differ_can_be_refused(pool: RankPool, tmp_path: Path) -> None:
    for outcome in pool.run(cases.save_differing_replicas, str(tmp_path), "error", ranks=3):
        assert outcome.error == "UnsupportedValueError"
        assert "other" in outcome.message
    assert list_checkpoints(tmp_path) == []
    for outcome in pool.run(cases.save_differing_replicas, str(tmp_path), "off", ranks=3):
        assert outcome.result == ()


@pytest.mark.parametrize("in_background", [False, True])
def test_stages_of_equal_keys_are_refused_unless_asked_for(pool: RankPool, tmp_path: Path, in_background: bool) -> None:
    for outcome in pool.run(cases.save_as_stages, str(tmp_path), 3, "auto", in_background, ranks=3):
        assert outcome.error == "UnsupportedValueError"
        assert "model.weight: differs on ranks 1, 2" in outcome.message
    assert not list(tmp_path.iterdir())
    for outcome in pool.run(cases.save_as_stages, str(tmp_path), 3, "warn", in_background, ranks=3):
        assert len(outcome.result) >= 1
    assert (load_merged_state_dict(tmp_path)["model"]["weight"].numpy() == 0).all()


@pytest.mark.parametrize("in_background", [False, True])
def test_what_data_parallel_ranks_have_alike_is_written_by_all(
    pool: RankPool, tmp_path: Path, in_background: bool
) -> None:
    results = pool.run(cases.save_data_parallel, str(tmp_path), 3, in_background, ranks=3)
    written = [nbytes for nbytes, _ in results]
    assert max(written) <= sum(written) // 3 + (64 << 10)
    assert [warnings for _, warnings in results] == [1] * 3  # the statistic
    assert load_merged_state_dict(tmp_path)["norm"]["_mean"].tolist() == [0.0] * 8


def test_two_groups_save_into_one_folder(some: RankPool, tmp_path: Path) -> None:
    others = [0, 1, 6]
    some.run(cases.make_group, others)
    by_rank = {**dict.fromkeys(SOME, SOME), **dict.fromkeys(others, others)}
    results = some.run(cases.save_together_with, str(tmp_path), by_rank, 6, ranks=[0, 2, 1, 3, 6, 5])
    first, second = results[0], results[1]
    assert results == [first, second] * 3
    assert sorted([*first, *second]) == list_checkpoints(tmp_path) == list(range(12))
    for ids, lead in ((first, others[0]), (second, SOME[0])):
        for i, unique_id in enumerate(ids):
            merged = load_merged_state_dict(tmp_path, unique_id=unique_id)
            assert merged["i"] == 100 * lead + i
            assert (merged["x"].numpy() == 100 * lead + i).all()


def test_coordinator_that_was_never_there(some: RankPool, tmp_path: Path) -> None:
    group = [1, 4, 7]
    some.run(cases.make_group, group)
    outcomes = some.run(cases.save_before_others, str(tmp_path), group, 4, 2.0, ranks=[1, 7])
    assert [(outcome.error, outcome.ranks) for outcome in outcomes] == [("CheckpointTimeoutError", (4,))] * 2
    assert all(1.5 < outcome.seconds < 30 for outcome in outcomes)
    # A call that came to nothing counts, so the coordinator is a call behind; all are in step from the next one on.
    outcomes = some.run(cases.save_before_others, str(tmp_path), group, 4, 60.0, ranks=group)
    assert [outcome.error for outcome in outcomes] == ["RankFailureError", "CheckpointTimeoutError", "RankFailureError"]
    texts = ["the next calls are matched by number again", "arrived late", "matched by number again"]
    assert all(text in one.message and one.seconds < 30 for text, one in zip(texts, outcomes, strict=True))
    outcomes = some.run(cases.save_before_others, str(tmp_path), group, 4, 60.0, ranks=group)
    assert [outcome.message for outcome in outcomes] == [""] * 3
    assert list_checkpoints(tmp_path) == [0]


@pytest.mark.parametrize("victim", [3, 6])
def test_an_interrupt_before_the_coordinators_hub_is_known_is_told_to_all(
    some: RankPool, tmp_path: Path, victim: int
) -> None:
    group, coordinator = [0, 3, 6, victim + 1], 6
    some.run(cases.make_group, group)
    results = some.run(cases.interrupt_before_the_hub, str(tmp_path), group, coordinator, victim, ranks=group)
    for rank, (said, seconds, unique_id) in zip(group, results, strict=True):
        assert said.startswith("KeyboardInterrupt" if rank == victim else "RankFailureError"), said
        assert seconds < 30
        assert unique_id == 1


@pytest.mark.parametrize("named", [{2: 2, 3: 3, 5: 3}, {2: 0, 3: 5, 5: 0}, {2: 5, 3: 5, 5: 3}], ids=str)
def test_coordinators_that_differ_are_named_at_once(some: RankPool, tmp_path: Path, named: dict[int, int]) -> None:
    results = some.run(cases.name_coordinators, str(tmp_path), SOME, named, ranks=SOME)
    for outcomes in results:
        for call, outcome in outcomes.items():
            assert outcome.error == "ValueError", (call, outcome)
            assert outcome.seconds < 30, call
            for rank, coordinator in named.items():
                assert f"with coordinator_rank={coordinator or 2}" in outcome.message, (rank, outcome.message)
    assert not list(tmp_path.iterdir())
    for coordinator in (0, 3):  # and all are in step
        assert [
            right for right, _, _ in some.run(cases.save_and_load, str(tmp_path), SOME, coordinator, ranks=SOME)
        ] == [True] * 3


@pytest.mark.parametrize("wrong", [4, -1, "3", True, cases.Several()], ids=repr)
def test_a_wrong_coordinator_on_one_rank_is_told_to_all(some: RankPool, tmp_path: Path, wrong: Any) -> None:
    for outcomes in some.run(cases.name_coordinators, str(tmp_path), SOME, {2: 0, 3: wrong, 5: 0}, ranks=SOME):
        for call, outcome in outcomes.items():
            assert outcome.error == "ValueError", (call, outcome)
            assert repr(wrong) in outcome.message
            assert outcome.seconds < 30
    assert not list(tmp_path.iterdir())


def as_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make Paddle believe that this is one of two processes that were launched."""
    monkeypatch.setenv("PADDLE_TRAINERS_NUM", "2")
    monkeypatch.setattr("paddle.distributed.parallel._global_parallel_env", None)
    assert paddle.distributed.get_world_size() == 2


class Initialised(Exception):
    """Raised in the place of what init_parallel_env does."""


def first_calls(folder: Path, no_dist: bool) -> dict[str, Callable[[], object]]:
    """What a program may call first, each with options."""
    save, load = SaveOptions(no_dist=no_dist), LoadOptions(no_dist=no_dist)
    state = {"x": np.ones(2)}
    return {
        "save": lambda: save_state_dict(state, folder, options=save),
        "async": lambda: save_state_dict(state, folder, async_save=True, options=save).result(),
        "load": lambda: load_state_dict(state, folder, unique_id=0, options=load),
        "manager": lambda: CheckpointManager(folder / "steps", options=save).close(),
        "export_state_dict": lambda: export_state_dict(state, folder / "exported", options=save),
    }


@pytest.mark.parametrize("call", [*first_calls(Path(), False), "one call", "export"])
def test_a_launched_job_that_is_not_initialised_is_initialised_by_its_first_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def initialise() -> None:
        assert paddle.in_dynamic_mode()
        raise Initialised

    save_state_dict({"x": np.ones(2)}, tmp_path)
    calls = first_calls(tmp_path, no_dist=False)
    calls["one call"] = lambda: save(tmp_path / "model", paddle.nn.Linear(2, 2))
    calls["export"] = lambda: export(tmp_path, tmp_path / "out")
    monkeypatch.setattr(paddle.distributed, "init_parallel_env", initialise)
    as_launched(monkeypatch)
    with pytest.raises(Initialised):
        calls[call]()
    paddle.enable_static()
    try:
        with pytest.raises(Initialised):
            calls[call]()
    finally:
        paddle.disable_static()


def test_a_rank_of_a_launched_job_may_act_alone_without_initialising(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paddle.distributed, "init_parallel_env", pytest.fail)
    as_launched(monkeypatch)
    for call in first_calls(tmp_path, no_dist=True).values():
        call()
    assert list_checkpoints(tmp_path) == [0, 1]


UNINITIALISED = """
import numpy
import paddle.distributed as dist
from paddle_dist_ckpt import load_state_dict, read_metadata, save_state_dict

assert not dist.is_initialized()
rank = dist.get_rank()
save_state_dict({"w": numpy.ones(4), f"own{rank}": numpy.full(4, float(rank))}, "checkpoint", async_save=True).result()
assert read_metadata("checkpoint").world_size == dist.get_world_size() == 2
state = {"own0": numpy.zeros(4), "own1": numpy.zeros(4)}
load_state_dict(state, "checkpoint")
assert (state["own1"] == 1).all()
"""


def test_a_launched_job_that_is_not_initialised_saves_together(tmp_path: Path) -> None:
    ends = forked(tmp_path, UNINITIALISED.replace('"checkpoint"', repr(str(tmp_path / "checkpoint"))))
    assert [code for code, _ in ends] == [0, 0], ends
    assert list_checkpoints(tmp_path / "checkpoint") == [0]


WITHOUT_RANK_0 = """
import os
import time

import numpy
import paddle.distributed as dist
from paddle.base import core
from paddle_dist_ckpt import RankFailureError, save_state_dict

if dist.get_rank() == 0:
    store = core.create_or_get_global_tcp_store()
    time.sleep(1)
    os._exit(0)
for _ in range(2):
    try:
        save_state_dict({"w": numpy.ones(4)}, "checkpoint")
    except RankFailureError as error:
        assert "init_parallel_env() failed on rank 1" in str(error), error
        assert "see whether that is alive" in str(error), error
        assert list(error.failures) == [1]
    else:
        raise AssertionError("it was saved")
os._exit(0)
"""


def test_a_job_that_cannot_be_initialised_is_told_so(tmp_path: Path) -> None:
    ends = forked(tmp_path, WITHOUT_RANK_0.replace('"checkpoint"', repr(str(tmp_path / "checkpoint"))))
    assert [code for code, _ in ends] == [0, 0], ends
    assert not (tmp_path / "checkpoint").exists()


DESTROYED = """
import numpy
import paddle.distributed as dist
from paddle_dist_ckpt import CheckpointError, CheckpointManager, LoadOptions, load_state_dict, save_state_dict

dist.init_parallel_env()
rank = dist.get_rank()
group = dist.get_group(0)
dist.destroy_process_group()
for again in (False, True):
    if again:
        dist.init_parallel_env()  # does nothing
    state = {f"own{rank}": numpy.full(4, float(rank))}
    calls = {
        "save": lambda: save_state_dict(state, "refused"),
        "load": lambda: load_state_dict(state, "refused"),
        "manager": lambda: CheckpointManager("refused"),
    }
    for name, call in calls.items():
        try:
            call()
        except CheckpointError as error:
            assert "destroy_process_group()" in str(error), (name, error)
        else:
            raise AssertionError(name)
save_state_dict(state, "checkpoint", group)
state = {"own0": numpy.zeros(4), "own1": numpy.zeros(4)}
load_state_dict(state, "checkpoint", group)
assert (state["own1"] == 1).all()
load_state_dict(state, "checkpoint", options=LoadOptions(no_dist=True))
"""


def test_ranks_whose_groups_were_destroyed_do_not_act_alone(tmp_path: Path) -> None:
    script = DESTROYED.replace('"refused"', repr(str(tmp_path / "refused")))
    ends = forked(tmp_path, script.replace('"checkpoint"', repr(str(tmp_path / "checkpoint"))))
    assert [code for code, _ in ends] == [0, 0], ends
    assert not (tmp_path / "refused").exists()


def test_threads_do_not_mix_the_answers_of_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = core.TCPStore("127.0.0.1", port, True, 1, 10)
    monkeypatch.setattr(core, "create_or_get_global_tcp_store", lambda: shared)

    def ask(thread: int) -> list[bytes]:
        store = groups._PaddleStore(10.0)
        for i in range(4):
            store.set(f"{thread}/{i}", b"%d" % (1000 * thread + i))
        return [store.get(f"{thread}/{i}", 10.0) for i in range(4)]

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(ask, range(4)))
    assert found == [[b"%d" % (1000 * thread + i) for i in range(4)] for thread in range(4)]


def test_a_tiny_timeout_counts_as_a_second_where_a_hub_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else whoever comes first would not wait for the coordinator."""
    given, hub = list[float](), SimpleNamespace(pass_over=lambda number: None, announce=lambda: None)
    monkeypatch.setattr(groups._HubMaker, "_made", lambda self, number, timeout: given.append(timeout) or hub)
    for timeout in (0.001, 5.0):
        groups._HubMaker(None, (0, 1), 1, 0).hub(timeout)
    assert given == [1.0, 5.0]


def test_the_first_calls_of_several_threads_make_one_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[int]()

    def slow_hub(self: Any, *_: Any) -> object:
        made.append(self._coordinator)
        time.sleep(0.1)
        return object()

    monkeypatch.setattr(groups._HubMaker, "hub", slow_hub)
    group = SimpleNamespace(id=0, ranks=[0, 1])
    with ThreadPoolExecutor(4) as pool:
        calls = [pool.submit(groups._connection, group, (0, 1), 1, coordinator, 5.0) for coordinator in (0, 1, 0, 1)]
    assert len({id(call.result()) for call in calls}) == 2
    assert made == [0]
    agreed = groups._connection(group, (0, 1), 1, 1, 5.0).hub
    assert isinstance(agreed, AgreedHub)
    with ThreadPoolExecutor(4) as pool:
        assert len({id(hub) for hub in pool.map(agreed._own, [5.0] * 4)}) == 1
    assert made == [0, 1]


def test_saves_of_two_threads_have_their_turns_in_the_same_order_on_all_ranks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    store, fakes = Store(), [SimpleNamespace(id=0, ranks=[0, 1]) for _ in range(2)]
    monkeypatch.setattr(groups, "_PaddleStore", lambda timeout: store)
    begun = [threading.Event() for _ in fakes]

    def call(rank: int, name: str) -> None:
        ranks = groups._connection(fakes[rank], (0, 1), rank, 0, 20.0)

        def find() -> Any:
            begun[rank].set()
            if (rank, name) == (1, "first"):
                time.sleep(0.5)  # in which the other thread would take the turn
            return wiring.paddles(ranks, {"x": np.ones(4)})()

        if name == "second":
            assert begun[rank].wait(20)
        options = SaveOptions(timeout=20, separate_folders=True)
        wiring.save_with(ranks, find, tmp_path / name, None, False, options)

    threads = [
        threading.Thread(target=call, args=(rank, name), daemon=True) for rank in (0, 1) for name in ("first", "second")
    ]
    for thread in threads:
        thread.start()
    until = time.monotonic() + 20
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    assert list_checkpoints(tmp_path / "first") == list_checkpoints(tmp_path / "second") == [0]
    assert not any(thread.is_alive() for thread in threads)


def test_an_address_that_the_store_takes_late_leads_to_the_hub_that_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    class Late(Store):
        def __init__(self) -> None:
            super().__init__()
            self.in_time = False

        def set(self, key: str, value: bytes) -> None:
            super().set(key, value)
            if not self.in_time and "/secret/" not in key:  # but the address
                raise TimeoutError("no answer in time")

    def call(rank: int) -> list[CheckpointError]:
        errors = list[CheckpointError]()
        while len(errors) < 3:  # the coordinator's first call counts
            try:
                ranks = groups._connection(fakes[rank], (0, 1), rank, 0, 10.0)
                with ranks.session("save", 10.0) as made, made as session:
                    session.gather_scatter("plan", lambda: b"", lambda parts: parts)
                break
            except CheckpointError as error:
                store.in_time = True
                errors.append(error)
        return errors

    store, fakes = Late(), [SimpleNamespace(id=0, ranks=[0, 1]) for _ in range(2)]
    monkeypatch.setattr(groups, "_PaddleStore", lambda timeout: store)
    with ThreadPoolExecutor(2) as pool:
        first, other = pool.map(call, range(2))
    for group in fakes:
        groups._connection(group, (0, 1), 0, 0, 10.0).hub.close()
    assert "could not leave the address of its control hub" in str(first[0])
    assert max(len(first), len(other)) < 3, (first, other)


def test_a_call_waits_no_longer_than_its_own_timeout_for_what_an_interrupted_one_began(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted_once(call: Callable[[], Any], name: str) -> Any:
        monkeypatch.setattr(groups, "_started", started)
        started(call, name)
        raise KeyboardInterrupt

    store, started, group = Store(), groups._started, SimpleNamespace(id=0, ranks=[0, 1])
    monkeypatch.setattr(groups, "_PaddleStore", lambda timeout: store)
    monkeypatch.setattr(groups, "_started", interrupted_once)
    with pytest.raises(KeyboardInterrupt):
        groups._connection(group, (0, 1), 1, 0, 10.0)
    begun = time.monotonic()
    with pytest.raises(CheckpointTimeoutError, match="within 1 s"):
        groups._connection(group, (0, 1), 1, 0, 1.0)
    assert time.monotonic() - begun < 5


@pytest.mark.parametrize("victim", [0, 1])
def test_a_first_call_that_was_interrupted_leaves_nothing_in_the_way_of_the_next(
    monkeypatch: pytest.MonkeyPatch, victim: int
) -> None:
    def connection(group: Any, rank: int) -> Ranks:
        return groups._connection(group, (0, 1), rank, 0, 5.0)

    def call(ranks: Ranks) -> list[CheckpointError]:
        errors = list[CheckpointError]()
        while len(errors) < 3:  # a call that was interrupted counts, unless it was before it had begun
            try:
                with ranks.session("save", 30.0) as made, made as session:
                    session.gather_scatter("plan", lambda: b"", lambda parts: parts)
                break
            except CheckpointError as error:
                errors.append(error)
        return errors

    def goes_on(number: int) -> bool:
        store = Store()
        monkeypatch.setattr(groups, "_PaddleStore", lambda timeout: store)
        fakes = [SimpleNamespace(id=0, ranks=[0, 1]) for _ in range(2)]
        other, more = pool.submit(connection, fakes[1 - victim], 1 - victim), True
        if victim == 1:
            other.result()
        with suppress(RuntimeError, CheckpointError):  # of a Condition that was interrupted
            more = interrupted(number, lambda: connection(fakes[victim], victim))
        both = [connection(fakes[victim], victim), other.result()]
        outcomes = list(pool.map(call, both))
        for ranks in both:
            ranks.hub.close()
        assert all(len(errors) < 3 for errors in outcomes), (number, outcomes)
        return more

    with ThreadPoolExecutor(2) as pool:
        number = next(number for number in itertools.count() if not goes_on(number))
    assert number > 5


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"short", "has 5 bytes"),
        (b"x" * 100_000, "has more than 65536 bytes"),
        (b"\n" * 20, "nothing but white space"),
        (None, "is not a regular file"),
    ],
    ids=["short", "long", "white", "pipe"],
)
def test_what_can_be_no_secret_is_refused_at_once(tmp_path: Path, content: bytes | None, words: str) -> None:
    if content is None:
        os.mkfifo(tmp_path / "secret")
    else:
        (tmp_path / "secret").write_bytes(content)
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(job_secret._read, str(tmp_path / "secret"))
        try:
            with pytest.raises(ValueError, match=words):
                reading.result(5)
        finally:
            if content is None:  # let who waits for a writer go on
                os.close(os.open(tmp_path / "secret", os.O_RDWR | os.O_NONBLOCK))


@pytest.mark.parametrize(("mode", "warned"), [(0o640, False), (0o620, True), (0o602, True), (0o644, True)])
def test_a_secret_that_others_may_read_or_write_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: int, warned: bool
) -> None:
    (tmp_path / "secret").write_bytes(b"x" * 20)
    (tmp_path / "secret").chmod(mode)
    with caplog.at_level("WARNING", "paddle_dist_ckpt"):
        assert job_secret._read(str(tmp_path / "secret")) == b"x" * 20
    assert ("others than the owner may read or write" in caplog.text) == warned


def test_a_rank_that_can_start_no_thread_for_the_store_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(self: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    with pytest.raises(CheckpointError, match="rank 0 cannot ask Paddle's store: can't start new thread"):
        groups._PaddleStore(10.0)


@pytest.mark.parametrize("error", [RuntimeError("Broken pipe"), ValueError("TCP receive error")], ids=repr)
def test_whatever_paddles_store_raises_is_the_end_of_a_connection(error: Exception) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(ConnectionError) as caught:
        groups._PaddleStore._bounded(fail, 10.0)
    assert str(caught.value) == f"Paddle's store: {type(error).__name__}: {error}"


def test_a_store_that_does_not_answer_is_waited_for_no_longer_than_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "_STORE_GRACE", 0.0)
    answers = threading.Event()
    with pytest.raises(TimeoutError, match=r"Paddle's store has not answered within 0\.05 s"):
        groups._PaddleStore._bounded(answers.wait, 0.05)
    answers.set()


def test_what_nobody_leaves_in_the_store_is_waited_for_no_longer_than_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "create_or_get_global_tcp_store", lambda: SimpleNamespace(add=lambda key, amount: 0))
    monkeypatch.setattr(groups, "_POLL_SECONDS", 0.001)
    store = groups._PaddleStore(10.0)
    begun = time.monotonic()
    with pytest.raises(TimeoutError):
        store.get("key", 0.05)
    assert 0.05 <= time.monotonic() - begun < 5


def test_a_first_rank_that_says_nothing_of_the_secret_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Store:
        def set(self, key: str, value: bytes) -> None:
            pass

        def get(self, key: str, timeout: float) -> bytes:
            raise TimeoutError(key)

    (tmp_path / "secret").write_bytes(b"x" * 20)
    (tmp_path / "secret").chmod(0o600)
    monkeypatch.setenv(job_secret.SECRET_FILE, str(tmp_path / "secret"))
    with pytest.raises(
        CheckpointTimeoutError, match=r"rank 2 did not say within 0\.5 s whether the job's control secret"
    ):
        job_secret.agreed_secret(Store(), "key", 5, [2, 5], 0.5)


def test_a_collective_that_fails_is_told_as_such_and_is_the_last() -> None:
    def fails() -> Any:
        raise RuntimeError("Connection reset by peer")

    transport, data = PaddleTransport(fails), np.zeros(4, np.uint8)
    with pytest.raises(CollectiveError, match="^a collective failed: RuntimeError: Connection reset by peer; "):
        transport.broadcast(data, 0, 1 << 20)
    with pytest.raises(CollectiveError, match="^an earlier collective failed, hung, or delivered other "):
        transport.exchange({}, {}, [], 1 << 20)


def test_an_interrupted_collective_is_the_last() -> None:
    def interrupted() -> Any:
        raise KeyboardInterrupt

    transport = PaddleTransport(interrupted)
    with pytest.raises(KeyboardInterrupt):
        transport.broadcast(np.zeros(4, np.uint8), 0, 1 << 20)
    with pytest.raises(CollectiveError, match="^an earlier collective failed"):
        transport.broadcast(np.zeros(4, np.uint8), 0, 1 << 20)
