"""What ranks of a static program saved one by one is read as whole tensors."""

from __future__ import annotations

import itertools
import pickle
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from paddle_dist_ckpt import read_metadata
from paddle_dist_ckpt.errors import CheckpointCorruptedError, CheckpointNotFoundError, UnsupportedValueError
from paddle_dist_ckpt.readers.catalog import Catalog
from paddle_dist_ckpt.readers.pdparams import PdparamsReader
from paddle_dist_ckpt.readers.static_auto import PaddleStaticReader
from paddle_dist_ckpt.storage import LocalStorage, as_source
from paddle_dist_ckpt.testing.catalogs import read_catalog
from paddle_dist_ckpt.testing.reader_conformance import ForeignCheckpoint, ReaderTests, check_catalog
from test.readers.golden import GOLDEN, golden_checkpoint

READER = PaddleStaticReader()
WEIGHT = np.arange(48, dtype=np.float32).reshape(8, 6)
BIAS = np.arange(6, dtype=np.float32)

Array = npt.NDArray[Any]


def attributes(mesh: Any, ranks: Any, mapping: Any) -> dict[str, Any]:
    """The distributed attributes of a variable, as Paddle's `get_dist_attr` has them."""
    return {
        "process_shape": mesh,
        "process_group": ranks,
        "dims_mapping": mapping,
        "dim_names": ["x", "y"][: len(mesh)],
    }


def local(array: Array, told: dict[str, Any], rank: int) -> Array:
    """What a rank has of an array that is cut so."""
    at = np.unravel_index(told["process_group"].index(rank), told["process_shape"])
    for d, m in enumerate(told["dims_mapping"]):
        for dimension in [m] if isinstance(m, int) else m:
            if dimension != -1:
                array = np.array_split(array, told["process_shape"][dimension], axis=d)[at[dimension]]
    return array.copy()


def files_of(
    variables: dict[str, tuple[Array, dict[str, Any]]], suffix: str = "pdparams", prefix: str = "m"
) -> dict[str, bytes]:
    """The files of all ranks, as `DistributedSaver.save` writes them."""
    files = {}
    for rank in sorted({rank for _, told in variables.values() for rank in told["process_group"]}):
        mine = {name: of for name, of in variables.items() if rank in of[1]["process_group"]}
        state = {name: local(array, told, rank) for name, (array, told) in mine.items()}
        files[f"{prefix}_dist{rank}.{suffix}"] = pickle.dumps(state)
        files[f"{prefix}_dist{rank}.pdattr"] = pickle.dumps({name: told for name, (_, told) in mine.items()})
    return files


def read(path: Path, files: dict[str, bytes], unique_id: int = 0) -> Catalog:
    """The catalog of these files, checked."""
    for name, data in files.items():
        (path / name).write_bytes(data)
    storage = LocalStorage(path)
    catalog = READER.read(storage, list(files), unique_id)
    check_catalog(storage, catalog)
    return catalog


def arrays_of(path: Path, catalog: Catalog) -> dict[str, Array]:
    """Its tensors, those of float32 as such."""
    return {key: array.view(np.float32) for key, array in read_catalog(LocalStorage(path), catalog).items()}


GRID = attributes([2, 2], [0, 1, 2, 3], [0, 1])


class TestOfARankGrid(ReaderTests):
    """Two variables on a mesh of two by two ranks."""

    @pytest.fixture
    def reader(self) -> PaddleStaticReader:
        return READER

    @pytest.fixture
    def checkpoint(self) -> ForeignCheckpoint:
        files = files_of({"w": (WEIGHT, GRID), "b": (BIAS, attributes([2, 2], [0, 1, 2, 3], [-1]))})
        return ForeignCheckpoint(files, arrays={"w": WEIGHT, "b": BIAS})


class TestOfTheEngine(ReaderTests):
    """What Paddle's Engine saved on two by two ranks; a weight is cut by rows and columns, others by one of these."""

    @pytest.fixture
    def reader(self) -> PaddleStaticReader:
        return READER

    @pytest.fixture
    def checkpoint(self) -> ForeignCheckpoint:
        name = "static-3.3.1"
        return golden_checkpoint(name, without=("rank_mapping.csv",))


MAPPINGS = [
    attributes([2, 2], [0, 1, 2, 3], [-1, -1]),
    attributes([2, 2], [0, 1, 2, 3], [0, -1]),
    attributes([2, 2], [0, 1, 2, 3], [1, -1]),
    attributes([2, 2], [0, 1, 2, 3], [-1, 0]),
    attributes([2, 2], [0, 1, 2, 3], [0, 1]),
    attributes([2, 2], [0, 1, 2, 3], [1, 0]),
    attributes([2, 2], [3, 1, 0, 2], [1, 0]),
    attributes([2, 3], [5, 7, 1, 0, 2, 11], [0, 1]),
    attributes([4], [0, 1, 2, 3], [0, -1]),
    attributes([3], [0, 1, 2], [0, -1]),
    attributes([2], [2, 3], [-1, 0]),
    attributes([2, 2], [0, 1, 2, 3], [[0, 1], -1]),
    attributes([2, 2], [0, 1, 2, 3], [[1, 0], []]),
    attributes([1], [0], [-1, -1]),
    attributes([1], [0], [0, -1]),
]


@pytest.mark.parametrize("told", MAPPINGS, ids=lambda told: f"{told['process_group']}{told['dims_mapping']}")
def test_a_variable_that_is_cut_over_ranks_is_one_tensor(told: dict[str, Any], tmp_path: Path) -> None:
    catalog = read(tmp_path, files_of({"w": (WEIGHT, told)}))
    (tensor,) = catalog.tensors
    assert (tensor.path, tensor.name, tensor.shape) == (("w",), "w", WEIGHT.shape)
    assert np.array_equal(arrays_of(tmp_path, catalog)["w"], WEIGHT)
    assert catalog.world_size == 1 + max(told["process_group"])


def test_parts_in_fortrans_order_are_read(tmp_path: Path) -> None:
    array = np.arange(24, dtype=np.float32).reshape(6, 4)
    files = files_of({"w": (array, GRID)})
    for name, data in files.items():
        if name.endswith("pdparams"):
            files[name] = pickle.dumps({key: np.asfortranarray(part) for key, part in pickle.loads(data).items()})
    catalog = read(tmp_path, files)
    assert np.array_equal(arrays_of(tmp_path, catalog)["w"], array)
    assert catalog.tensors[0].offsets == [(0, 0), (0, 2), (3, 0), (3, 2)]


def test_parts_are_where_paddle_has_them(tmp_path: Path) -> None:
    """By what Paddle's converter computes; its merge itself loses rows where two dimensions are cut."""
    resharder = pytest.importorskip("paddle.distributed.auto_parallel.static.reshard").Resharder
    for told in MAPPINGS[:8]:
        mapping, mesh, ranks = told["dims_mapping"], told["process_shape"], told["process_group"]
        catalog = read(tmp_path, files_of({"w": (WEIGHT, told)}))
        numbers = {file.name: number for number, file in enumerate(catalog.files)}
        boxes = {piece.file: piece.box for piece in catalog.tensors[0].pieces}
        for rank in ranks:
            spans = resharder.compute_partition_index(rank, WEIGHT.shape, mapping, mesh, ranks)
            box = boxes.get(numbers[f"m_dist{rank}.pdparams"])
            if box is not None:  # of ranks that have the same, one is read
                assert [[o, o + n] for o, n in zip(*box, strict=True)] == spans


def test_stages_of_a_pipeline_have_variables_of_their_own(tmp_path: Path) -> None:
    variables = {
        "first": (WEIGHT, attributes([2], [0, 1], [0, -1])),
        "second": (WEIGHT + 1, attributes([2], [2, 3], [-1, 0])),
        "scalar": (np.array(3, np.float32), attributes([2], [2, 3], [])),
    }
    catalog = read(tmp_path, files_of(variables) | files_of(variables, "pdopt"))
    arrays = arrays_of(tmp_path, catalog)
    assert {key: array.tolist() for key, array in arrays.items()} == {
        key: array.tolist() for key, (array, _) in variables.items()
    }


def test_parameters_and_optimizer_states_are_one_checkpoint(tmp_path: Path) -> None:
    files = {
        **files_of({"w": (WEIGHT, GRID)}),
        "rank_mapping.csv": b"",
        "m_serial.pdmodel": b"",
        "m_dist0.pdmodel": b"",
    }
    moment = files_of({"w_moment1_0": (WEIGHT * 2, GRID)}, "pdopt")
    told = pickle.dumps({"w": GRID, "w_moment1_0": GRID})
    files |= moment | {f"m_dist{rank}.pdattr": told for rank in range(4)}
    arrays = arrays_of(tmp_path, read(tmp_path, files))
    assert np.array_equal(arrays["w"], WEIGHT)
    assert np.array_equal(arrays["w_moment1_0"], WEIGHT * 2)
    assert PdparamsReader().found(files) == []


def test_prefixes_are_numbered_in_alphabetical_order(tmp_path: Path) -> None:
    files = files_of({"w": (WEIGHT, GRID)}, prefix="b") | files_of({"v": (WEIGHT, GRID)}, prefix="a_dist0")
    assert READER.found(files) == [0, 1]
    assert [tensor.path for tensor in read(tmp_path, files, 0).tensors] == [("v",)]
    assert [tensor.path for tensor in read(tmp_path, files, 1).tensors] == [("w",)]
    for names in (["a_dist0.pdparams"], ["a_dist0.pdattr"], ["a.pdparams", "a.pdattr"], ["a_dist00.pdparams"]):
        assert READER.found(names) == []


def test_checkpoints_of_programs_are_read(tmp_path: Path) -> None:
    """As `save_distributed_checkpoint` writes them."""
    files = {}
    for rank in range(4):
        state = {"w": local(WEIGHT, GRID, rank)}
        files[f"model_state_rank{rank}.pdmodel"] = pickle.dumps(
            {"model": state, "world_size": 4, "addition_info": {"epoch": 3, "batch_size": None}}
        )
        files[f"dist_attr_rank{rank}.pdattr"] = pickle.dumps({"model": {"w": GRID}, "world_size": 4})
    assert READER.found(files) == [0]
    catalog = read(tmp_path, files)
    assert np.array_equal(arrays_of(tmp_path, catalog)["w"], WEIGHT)
    assert dict(catalog.values) == {("addition_info", "epoch"): 3, ("addition_info", "batch_size"): None}


def test_what_save_for_auto_inference_saves_is_read(tmp_path: Path) -> None:
    paddle = pytest.importorskip("paddle")
    from paddle.incubate.distributed.utils.io import save_for_auto_inference

    layer = paddle.nn.Linear(3, 4)
    save_for_auto_inference(str(tmp_path / "m"), layer)
    storage = LocalStorage(tmp_path)
    assert READER.found(storage.names()) == [0]
    catalog = READER.read(storage, storage.names(), 0)
    check_catalog(storage, catalog)
    arrays = arrays_of(tmp_path, catalog)
    assert arrays.keys() == {layer.weight.name, layer.bias.name}
    assert np.array_equal(arrays[layer.weight.name], layer.weight.numpy())


def test_a_part_that_no_rank_has_is_an_error(tmp_path: Path) -> None:
    files = files_of({"w": (WEIGHT, attributes([2, 2], [0, 1, 2, 3], [0, -1]))})
    rest = {name: data for name, data in files.items() if "dist2." not in name}
    assert np.array_equal(arrays_of(tmp_path, read(tmp_path, rest))["w"], WEIGHT), "rank 3 has the same"
    rest = {name: data for name, data in rest.items() if "dist3." not in name}
    with pytest.raises(CheckpointCorruptedError, match="m_dist0.pdparams: 'w' lacks what rank 2 had of it"):
        read(tmp_path, rest)


@pytest.mark.parametrize(
    ("told", "message"),
    [
        (attributes([2, 2], [0, 1, 2], [0, 1]), "does not fit 3 ranks"),
        (attributes([2, 2], [0, 1, 2, 2], [0, 1]), "does not fit 4 ranks"),
        (attributes([2, 2], [0, 1, 2, 3], [0, 0]), "used twice"),
        (attributes([2, 2], [0, 1, 2, 3], [2, -1]), "not there"),
        (attributes([2, 2], [0, 1, 2, 3], [-2, -1]), "pdattr"),
        (attributes([2, 2], [0, 1, 2, 3], [0]), "different types or dimensions"),
        (attributes([2, 2], [4, 5, 6, 7], [0, 1]), "lacks what rank 4 had"),
        (attributes([2**40] * 40, [0, 1, 2, 3], [0, 1]), "pdattr"),
        (attributes([2**30] * 40, [0, 1, 2, 3], [0, 1]), "more dimensions"),
        (attributes([2**30] * 30, [0, 1, 2, 3], [0, 1]), "does not fit"),
        (attributes("ab", [0, 1, 2, 3], [0, 1]), "pdattr"),
        (attributes([4], [0, 1, 2, 3], [0, 0.5]), "pdattr"),
        (attributes([4], [0, 1, 2, 3], 5), "pdattr"),
        ({}, "pdattr"),
        (None, "pdattr"),
    ],
)
def test_attributes_that_fit_nothing_are_refused(told: Any, message: str, tmp_path: Path) -> None:
    files = files_of({"w": (WEIGHT, GRID)})
    files |= {f"m_dist{rank}.pdattr": pickle.dumps({"w": told}) for rank in range(4)}
    with pytest.raises(CheckpointCorruptedError, match=message):
        read(tmp_path, files)


def test_parts_that_do_not_fit_together_are_refused(tmp_path: Path) -> None:
    files = files_of({"w": (WEIGHT, GRID)})
    for part, message in (
        (WEIGHT[:3, :3], "different sizes along its dimension 0"),
        (WEIGHT[:4], "different sizes along its dimension 1"),
        (WEIGHT[0], "different types or dimensions"),
        (WEIGHT[:4, :3].astype(np.int32), "different types or dimensions"),
    ):
        with pytest.raises(CheckpointCorruptedError, match=message):
            read(tmp_path, {**files, "m_dist1.pdparams": pickle.dumps({"w": np.ascontiguousarray(part)})})
    with pytest.raises(UnsupportedValueError, match="asks for"):
        read(tmp_path, {**files, "m_dist1.pdattr": b"cos\nsystem\n."})


def test_without_attributes_all_ranks_have_the_whole(tmp_path: Path) -> None:
    files = {f"m_dist{rank}.pdparams": pickle.dumps({"w": WEIGHT}) for rank in range(2)}
    files |= {"m_dist0.pdattr": pickle.dumps({})}
    catalog = read(tmp_path, files)
    assert np.array_equal(arrays_of(tmp_path, catalog)["w"], WEIGHT)
    assert len(catalog.tensors[0].pieces) == 1


def test_every_order_of_ranks_is_read(tmp_path: Path) -> None:
    for ranks in itertools.permutations(range(4)):
        told = attributes([2, 2], list(ranks), [0, 1])
        assert np.array_equal(arrays_of(tmp_path, read(tmp_path, files_of({"w": (WEIGHT, told)})))["w"], WEIGHT)


def test_attributes_that_many_variables_share_take_little_time(tmp_path: Path) -> None:
    group, mapping = list(range(20_000)), [0]
    told = {f"v{i}": {"process_shape": [20_000], "process_group": group, "dims_mapping": mapping} for i in range(4000)}
    state = dict.fromkeys(told, BIAS)
    files = {"m_dist0.pdattr": pickle.dumps(told), "m_dist0.pdparams": pickle.dumps(state)}
    start = time.process_time()
    with pytest.raises(CheckpointCorruptedError, match="'v0' lacks what rank 1 had of it"):
        read(tmp_path, files)
    told = {name: {**of, "dims_mapping": [-1]} for name, of in told.items()}
    assert len(read(tmp_path, {**files, "m_dist0.pdattr": pickle.dumps(told)}).tensors) == 4000
    assert time.process_time() - start < 10


def test_what_comes_before_the_ranks_of_the_names_means_the_files_that_have_it(tmp_path: Path) -> None:
    for file in (GOLDEN / "static-3.3.1").glob("m_dist*"):
        shutil.copy(file, tmp_path)
        shutil.copy(file, tmp_path / f"a{file.name[1:]}")
    (tmp_path / "m_dist0.txt").write_text("not of it")
    expected = read_metadata(GOLDEN / "static-3.3.1")
    found = read_metadata(tmp_path / "m")
    assert (found.format, found.table.paths) == (expected.format, expected.table.paths)
    assert {info.name for info in found.files} == {info.name for info in expected.files}
    storage = pickle.loads(pickle.dumps(as_source(tmp_path / "m")))
    assert sorted(storage.names()) == sorted(path.name for path in tmp_path.glob("m_dist*"))
    with pytest.raises(CheckpointNotFoundError, match="there is no folder"):
        read_metadata(tmp_path / "m_dist")
