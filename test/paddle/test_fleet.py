"""Jobs of fleet's layers and optimizers, saved on one hybrid strategy and loaded on another, on real ranks."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from paddle_dist_ckpt import load_merged_state_dict, read_metadata
from test import strategies
from test.paddle import cases_fleet as cases
from test.paddle.cases_fleet import STRATEGIES, Saved, Table
from test.paddle.tensors import to_array
from test.ranks.pool import RankPool
from test.strategies import some

pytest.importorskip("paddle.distributed.flex_checkpoint.dcp.sharded_weight")  # Paddle has it from 3.3 on

CONVERSIONS = [
    *(("d2", "d4"), ("t2", "t4"), ("p2", "p4"), ("e2", "e4"), ("p2", "t4"), ("t2", "p2"), ("d4", "d2t2"), ("d2", "p2")),
    *(("d2", "e2"), ("e2", "t2"), ("t2", "e2"), ("d2t2", "t4"), ("d2t2", "p4"), ("d2p2", "t4"), ("t2p2", "d4")),
    *(("t2p2", "d2t2"), ("d2e2", "d4"), ("t2e2", "t4"), ("d2t2", "p2"), ("d2e2", "t2e2")),
    *(("t2e2 of fleet", "t2e2"), ("t2e2", "t2e2 of fleet")),
]
SHARDED = [
    *(("s2", "s4"), ("s4", "s2"), ("s2", "d2"), ("d4", "s4"), ("s4", "t4"), ("t2", "s2t2"), ("s2t2", "t2p2")),
    *(("s2t2", "s4"), ("e4", "s2p2"), ("s2p2", "s2t2"), ("s2p2", "t2e2")),
    *(("s2 of version 1", "s2t2 of version 1"), ("s2t2 of version 1", "s4"), ("s2t2", "s2 of version 1")),
]
WITH_EACH = [  # some of both, with each strategy at least once
    *(("d2", "d4"), ("p2", "p4"), ("e2", "e4"), ("d2p2", "t4"), ("t2p2", "d2t2"), ("d2e2", "t2e2")),
    *(
        ("t2e2 of fleet", "t2e2"),
        ("s4", "s2"),
        ("t2", "s2t2"),
        ("s2p2", "s2t2"),
        ("s2 of version 1", "s2t2 of version 1"),
    ),
]
TENSORS = 378  # of the model and the optimizer

Folders = Callable[[str], tuple[Path, list[Saved]]]


@pytest.fixture(scope="module")
def four() -> Iterator[RankPool]:
    """Ranks of their own, no more than the largest strategies have: fleet's topologies are of all, and so is the work.

    The dozens of groups that they make, whose threads go on waking up, end with them.
    """
    with RankPool(4) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def saved(four: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """Gives the folder of a checkpoint that a strategy has saved, and what each rank did. Each strategy saves once."""
    folders: dict[str, tuple[Path, list[Saved]]] = {}

    def folder(source: str) -> tuple[Path, list[Saved]]:
        if source not in folders:
            path = tmp_path_factory.mktemp("fleet")
            results = four.run(cases.save, source, str(path))
            folders[source] = path, [result for result in results if result is not None]
            assert len(folders[source][1]) == STRATEGIES[source].ranks
        return folders[source]

    return folder


@pytest.fixture(scope="module")
def table(saved: Folders) -> Table:
    """All tensors of the job, as one strategy has saved them."""
    found: Table = {"model": {}, "optimizer": {}}
    for name, shards in read_metadata(saved("d2")[0]).state_dict_metadata.items():
        part, _, key = name.partition(".")
        found[part][key] = shards[0].global_shape, shards[0].dtype
    return found


# What each strategy saves is looked at whole below.
@pytest.mark.parametrize(
    ("source", "target"),
    [*CONVERSIONS, *SHARDED] if strategies.long_run else WITH_EACH,
    ids=lambda name: name.replace(" ", "_"),
)
def test_conversion(four: RankPool, saved: Folders, source: str, target: str) -> None:
    path, _ = saved(source)
    ranks = STRATEGIES[target].ranks
    assert four.run(cases.load, target, str(path)) == [[]] * ranks + [None] * (4 - ranks)


@pytest.mark.parametrize("source", STRATEGIES, ids=lambda name: name.replace(" ", "_"))
def test_whole_tensors(saved: Folders, table: Table, source: str) -> None:
    path, reports = saved(source)
    merged = load_merged_state_dict(path, flat=True)
    names = {f"{part}.{key}" for part, tensors in table.items() for key in tensors}
    assert merged.keys() == names
    assert len(names) == TENSORS
    for part, tensors in table.items():
        for key, (shape, dtype) in tensors.items():
            found, expected = to_array(merged[f"{part}.{key}"]), cases.contents(key, shape, dtype)
            assert (found.dtype, found.shape, found.tobytes()) == (expected.dtype, expected.shape, expected.tobytes())
    assert sum(report.bytes_written for report in reports) == sum(to_array(value).nbytes for value in merged.values())


def test_the_job_has_all_that_is_to_be_tested(table: Table) -> None:
    kinds = Counter(key.rpartition(".")[2] for key in table["optimizer"])
    parameters = len(table["model"])
    halves = [key for key, (_, dtype) in table["model"].items() if dtype == "bfloat16"]
    assert kinds == {
        **dict.fromkeys(("moment1_0", "moment2_0", "beta1_pow_acc_0", "beta2_pow_acc_0"), parameters),
        "w_0": len(halves),
    }
    assert {"shared_layers.tokens.weight", "1.feed.up.weight", "2.experts.3.down.bias", "4.weight"} <= set(
        table["model"]
    )
    assert any(".experts." in key for key in halves)


@pytest.mark.parametrize("source", ["s2", "s4", "s2t2", "s2p2"])
def test_ranges_become_few_boxes(saved: Folders, source: str) -> None:
    path, reports = saved(source)
    assert all(report.flattened for report in reports)
    strategy = STRATEGIES[source]
    ranges = strategy.sharding * strategy.tensor
    shards = read_metadata(path).state_dict_metadata
    assert all(len(found) <= ranges * (2 * len(found[0].global_shape) - 1) for found in shards.values())
    cut = [key for key, found in shards.items() if key.startswith("optimizer.") and len(found) > ranges]
    assert len(cut) >= 20  # ranges that are several boxes


@pytest.mark.parametrize("name", ["s2", "s2t2"])
def test_slices_that_leave_a_padding_out_are_not_copies(four: RankPool, name: str) -> None:
    for padded, copies in four.run(cases.slices_of_accumulators, name):
        assert padded > 0
        assert copies == 0


@pytest.mark.parametrize(("source", "semi_auto"), some(itertools.product(["t4", "p2", "e2", "s2t2"], [False, True]), 2))
def test_sharded_weights_to_dist_tensors(
    four: RankPool, saved: Folders, table: Table, source: str, semi_auto: bool
) -> None:
    path, _ = saved(source)
    assert four.run(cases.load_dist_tensors, str(path), table, semi_auto, ranks=4) == [[]] * 4


@pytest.mark.parametrize("semi_auto", [False, True], ids=["same keys", "semi-auto keys"])
def test_dist_tensors_to_sharded_weights(four: RankPool, tmp_path: Path, table: Table, semi_auto: bool) -> None:
    four.run(cases.save_dist_tensors, str(tmp_path), table, semi_auto, ranks=4)
    for target in some(["t2p2", "s4", "t2e2", "d2"], 2):
        ranks = STRATEGIES[target].ranks
        assert four.run(cases.load, target, str(tmp_path)) == [[]] * ranks + [None] * (4 - ranks)


@pytest.mark.parametrize(("source", "target"), some([("s2t2", "t2p2"), ("e4", "s4")], 1))
def test_both_in_one_state_dict(four: RankPool, tmp_path: Path, table: Table, source: str, target: str) -> None:
    four.run(cases.save_with_dist_tensors, source, str(tmp_path), table)
    assert four.run(cases.load_with_dist_tensors, target, str(tmp_path), table) == [[]] * 4


def test_plain_parts_are_refused(four: RankPool, tmp_path: Path) -> None:
    for outcome in four.run(cases.save_plain_state_dict, "t2", str(tmp_path))[:2]:
        assert outcome.error == "UnsupportedValueError"
        assert "sharded_state_dict()" in outcome.message
        assert "1.feed.up.weight" in outcome.message
    assert not list(tmp_path.iterdir())
