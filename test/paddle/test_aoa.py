"""Paddle's aoa_config, compared with what Paddle's own engine and Paddle's own load make of it."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import paddle
import paddle.distributed as dist
import pytest

from paddle_dist_ckpt import (
    CheckpointNotFoundError,
    LoadOptions,
    StateDictMismatchError,
    UnsupportedValueError,
    concat,
    export,
    load_merged_state_dict,
    load_state_dict,
    read_metadata,
    save_state_dict,
    stored,
)
from paddle_dist_ckpt.core import parts as core_parts
from paddle_dist_ckpt.core.box import Box, whole
from paddle_dist_ckpt.core.dtypes import DTYPES
from paddle_dist_ckpt.loading.stored_tensors import stored_tensors
from paddle_dist_ckpt.wiring import load_with, paddles
from test.paddle.layouts import Array
from test.paddle.tensors import to_array
from test.paddle.test_sharded_weight import Part, assert_same, on_ranks, raise_first, saved, tensor_of
from test.strategies import some

aoa_engine: Any = pytest.importorskip("paddle.distributed.flex_checkpoint.aoa.aoa_engine")
our_engine: Any = pytest.importorskip("paddle_dist_ckpt.paddle_adapter.aoa_engine")
macros: Any = pytest.importorskip("paddle.distributed.flex_checkpoint.aoa.macros")
ShardedWeight: Any = pytest.importorskip("paddle.distributed.flex_checkpoint.dcp.sharded_weight").ShardedWeight

BF16 = np.dtype(ml_dtypes.bfloat16)
Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Case:
    """Statements, the tensors that are stored and those that are wanted.

    Attributes:
        statements: The statements.
        stored, wanted: The shapes.
        reverse: Whether the statements are taken backwards.
        dtypes: Those that are not float32, by key; a key of a wanted tensor has ``>`` before it.
        kept: Wanted keys that are left as they are.
        lost: Wanted keys that Paddle's own load does not fill.
    """

    statements: list[str]
    stored: Shapes
    wanted: Shapes
    reverse: bool = False
    dtypes: dict[str, Any] = field(default_factory=dict)
    kept: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()

    @property
    def config(self) -> dict[str, Any]:
        return {"aoa_statements": list(self.statements), "aoa_config_reverse": self.reverse, "enable_traceback": False}


QKV: Shapes = {"q": (8, 16), "k": (8, 8), "v": (8, 8)}
FUSED: Shapes = {"qkv": (8, 32)}
HEADS = "num_heads=4, num_key_value_groups=2"
LAYERS: Shapes = {f"m.{i}.{name}": (4, 6) for i in (0, 1, 10) for name in "ab"}
CASES: dict[str, Case] = {
    "rename": Case(["a -> b"], {"a": (4, 6), "c": (2, 2)}, {"b": (4, 6), "c": (2, 2)}),
    "exchange": Case(["a -> t", "b -> a", "t -> b"], {"a": (4, 6), "b": (4, 6)}, {"a": (4, 6), "b": (4, 6)}),
    "split": Case(["a -> x, y, axis=1"], {"a": (4, 12)}, {"x": (4, 6), "y": (4, 6)}),
    "concat": Case(["a, b -> x, axis=0"], {"a": (4, 6), "b": (2, 6)}, {"x": (6, 6)}),
    "permute": Case(['a -> x, permute="[2, 0, 1]"'], {"a": (2, 4, 6)}, {"x": (6, 2, 4)}),
    "reverse all axes": Case(['a -> x, permute="[]"'], {"a": (2, 4, 6)}, {"x": (6, 4, 2)}),
    "permute, split, permute, concat": Case(
        ['a -> t, permute="[1, 0]"', "t -> u, w, axis=0", 'u -> u2, permute="[1, 0]"', 'w -> w2, permute="[1, 0]"',
         "w2, u2 -> x, axis=1"],
        {"a": (4, 12)},
        {"x": (4, 12)},
    ),
    "three axes twice": Case(
        ['a -> t, permute="[2, 0, 1]"', "t -> u, w, axis=0", 'u -> x, permute="[1, 2, 0]"', "w -> y"],
        {"a": (2, 4, 6)},
        {"x": (2, 4, 3), "y": (3, 2, 4)},
    ),
    "transposed": Case(["a^T -> x", "b^T, c^T -> y, axis=1"], {"a": (4, 6), "b": (2, 4), "c": (6, 4)},
                       {"x": (6, 4), "y": (4, 8)}),
    "cast": Case(["a -> a, dtype='bfloat16'", "b -> c, src_dtype='bfloat16', dst_dtype='float32'"],
                 {"a": (4, 6), "b": (4, 6)}, {"a": (4, 6), "c": (4, 6)},
                 dtypes={">a": BF16, "b": BF16}),
    "permute and cast": Case(["a^T -> t", "t -> x, dtype='bfloat16'"], {"a": (4, 6)}, {"x": (6, 4)},
                             dtypes={">x": BF16}),
    "fused_qkv": Case([f"q^T, k^T, v^T -> qkv, fused_qkv, {HEADS}"], {"q": (16, 8), "k": (8, 8), "v": (8, 8)}, FUSED),
    "fused_qkv taken apart": Case([f"qkv -> q, k, v, fused_qkv, {HEADS}"], FUSED, QKV),
    "fused_qkv of biases": Case([f"q, k, v -> qkv, fused_qkv, {HEADS}, axis=0"], {"q": (16,), "k": (8,), "v": (8,)},
                                {"qkv": (32,)}),
    "fused_qkv_old": Case([f"q, k, v -> qkv, fused_qkv_old, {HEADS}"], QKV, FUSED),
    "fused_qkv_old taken apart": Case([f"qkv -> q, k, v, fused_qkv_old, {HEADS}"], FUSED, QKV),
    "fused_qkv_old to another": Case([f"qkv -> qkv, fused_qkv_old, {HEADS}"], FUSED, FUSED),
    "fused_ffn": Case(["gate, up -> ffn, fused_ffn"], {"gate": (4, 8), "up": (4, 8)}, {"ffn": (4, 16)}),
    "fused_ffn taken apart": Case(["ffn -> gate, up, fused_ffn"], {"ffn": (4, 16)}, {"gate": (4, 8), "up": (4, 8)}),
    "fused_ffn to another": Case(["ffn -> ffn, fused_ffn"], {"ffn": (4, 16)}, {"ffn": (4, 16)}),
    "fused_ffn after a rename": Case(["gate, up -> t, fused_ffn", "t -> ffn"], {"gate": (4, 8), "up": (4, 8)},
                                     {"ffn": (4, 16)}),
    "layers": Case(["m.$LAYER_ID.a, m.$LAYER_ID.b -> n.$LAYER_ID.ab, axis=0"], LAYERS,
                   {f"n.{i}.ab": (8, 6) for i in (0, 1, 10)}),
    "layers and experts": Case(
        ["l.$LAYER_ID.e.$EXPERT_ID.w^T -> n.$LAYER_ID.x.$EXPERT_ID.w"],
        {f"l.{i}.e.{e}.w": (4, 6) for i in range(2) for e in range(3)},
        {f"n.{i}.x.{e}.w": (6, 4) for i in range(2) for e in range(3)},
    ),
    "layers one less": Case(["m.$LAYER_ID_OFFSET.a -> m.$LAYER_ID_OFFSET.b"], {f"m.{i}.a": (4, 6) for i in (1, 2)},
                            {f"m.{i}.b": (4, 6) for i in (0, 1)}),
    "array": Case(["a -> t[0:3], axis=1", "t_2, t_0, t_1 -> x, axis=1"], {"a": (4, 6)}, {"x": (4, 6)}),
    "star": Case(["m.*.a -> x, axis=0"], {f"m.{i}.a": (2, 6) for i in (0, 2, 10)}, {"x": (6, 6)}),
    "star on the right": Case(["x -> m.*.a, axis=0"], {"x": (6, 6)}, {f"m.{i}.a": (2, 6) for i in (0, 2, 10)}),
    "reverse": Case(["a, b -> t, axis=1", 't -> x, permute="[1, 0]"'], {"x": (12, 4)}, {"a": (4, 6), "b": (4, 6)},
                    reverse=True),
    "reverse of a cast": Case(["a -> x, src_dtype='bfloat16', dst_dtype='float32'"], {"x": (4, 6)}, {"a": (4, 6)},
                              reverse=True, dtypes={">a": BF16}),
    "reverse with layers": Case(["m.$LAYER_ID.a -> n.$LAYER_ID.a"], {f"n.{i}.a": (4, 6) for i in range(3)},
                                {f"m.{i}.a": (4, 6) for i in range(3)}, reverse=True),
    "taken and wanted": Case(["a -> b"], {"a": (4, 6)}, {"a": (4, 6), "b": (4, 6)}, lost=("a",)),
    "taken and wanted, of the last key": Case(["b -> a"], {"b": (4, 6)}, {"a": (4, 6), "b": (4, 6)}, lost=("a",)),
    "taken twice": Case(["a -> x", "a -> y"], {"a": (4, 6)}, {"x": (4, 6), "y": (4, 6)}, lost=("x",)),
    "nothing to be filled": Case(["_ -> b", "a -> c"], {"a": (4, 6)}, {"b": (4, 6), "c": (4, 6)}, kept=("b",)),
    "dropped and wanted": Case(["a -> _"], {"a": (4, 6), "b": (4, 6)}, {"a": (4, 6), "b": (4, 6)}, kept=("a",)),
    "dropped": Case(["a -> _", "_ -> a"], {"a": (4, 6), "b": (4, 6)}, {"a": (4, 6), "b": (4, 6)}, kept=("a",)),
}  # fmt: skip
STATES = {".w_0": "float32", ".moment1_0": "float32", ".moment2_0": "float32"}


def array_of(shape: tuple[int, ...], dtype: Any, seed: int) -> Array:
    return np.random.default_rng(seed).normal(size=shape).astype("float32").astype(dtype)


def arrays_of(case: Case, states: bool) -> dict[str, Array]:
    """What is stored: the parameters, and their optimizer states in float32."""
    found = {}
    for i, (key, shape) in enumerate(case.stored.items()):
        found[key] = array_of(shape, case.dtypes.get(key, "float32"), i)
        for j, state in enumerate(STATES if states else ()):
            found[key + state] = array_of(shape, "float32", 100 * (j + 1) + i)
    return found


def targets_of(case: Case, states: bool) -> dict[str, Array]:
    """What is wanted, filled with something else."""
    found = {}
    for key, shape in case.wanted.items():
        found[key] = np.full(shape, 7, case.dtypes.get(">" + key, "float32"))
        found |= {key + state: np.full(shape, 7, "float32") for state in (STATES if states else ())}
    return found


def cut(how: str, shape: tuple[int, ...], ranks: int) -> list[Part]:
    """How a tensor lies on ranks."""
    if how == "whole":
        return [Part(whole(shape))] * ranks
    if how == "flat":  # all ranks have ranges of the whole
        size = int(np.prod(shape))
        edges = [0, size // 3, *([size] * (ranks - 1))]
        return [Part(whole(shape), (edges[i], edges[i + 1])) for i in range(ranks)]
    dim = {"rows": 0, "columns": len(shape) - 1, "flat columns": len(shape) - 1}[how]
    parts = 2 if how == "flat columns" else ranks
    step = shape[dim] // parts
    boxes = []
    for i in range(parts):
        offset, extent = [0] * len(shape), list(shape)
        offset[dim], extent[dim] = i * step, step
        boxes.append(Box(tuple(offset), tuple(extent)))
    if how != "flat columns":
        return [Part(box) for box in boxes]
    spans = [(0, boxes[0].size // 2 + 1), (boxes[0].size // 2 + 1, boxes[0].size)]
    return [Part(boxes[i // 2], spans[i % 2]) for i in range(ranks)]


def description(key: str, array: Array, part: Part) -> Any:
    return aoa_engine.ShardedWeightDesc(key, part.box.shape, array.shape, part.box.offset, str(array.dtype))


def weights(arrays: dict[str, Array], parts: dict[str, list[Part]], rank: int) -> dict[str, Any]:
    """What a rank has of some tensors."""
    found = {}
    for key, array in arrays.items():
        part = parts[key][rank]
        local, box = tensor_of(part.of(array)), part.box
        flat = (True, slice(*part.span)) if part.span is not None else ()
        found[key] = ShardedWeight(key, local, box.shape, array.shape, box.offset, *flat)
    return found


def by_paddles_engine(
    case: Case, arrays: dict[str, Array], sources: dict[str, list[Part]], targets: dict[str, Array],
    parts: dict[str, list[Part]],
) -> list[dict[str, Array]]:  # fmt: skip
    """What each rank has in the end, by Paddle's engine and numpy."""
    infos = [
        {key: [description(key, array, part) for part in cuts[key]] for key, array in tensors.items()}
        for tensors, cuts in ((arrays, sources), (targets, parts))
    ]
    engine = aoa_engine.AOAEngine(case.config, *infos)
    results = []
    for rank in range(len(next(iter(parts.values())))):
        found: dict[str, Array] = {}
        for key, target in targets.items():
            part = parts[key][rank]
            box = target[part.box.slices].copy()
            for mapping in engine.find_shard_sources(description(key, target, part)):
                one, other = mapping.source_slice, mapping.target_slice
                data = arrays[one.key][Box(one.global_offset, one.local_shape).slices]
                for operation in mapping.postprocess_list or ():
                    if operation.startswith("["):
                        data = data.transpose(ast.literal_eval(operation))
                    elif not key.endswith(tuple(STATES)):
                        data = data.astype(BF16 if operation == "bfloat16" else operation)
                assert data.dtype == target.dtype
                box[Box(other.global_offset, other.local_shape).relative_to(part.box.offset).slices] = data
            found[key] = box if part.span is None else box.reshape(-1)[slice(*part.span)]
        results.append(found)
    return results


def loaded(path: Path, states: Sequence[dict[str, Any]], config: Any, **more: Any) -> list[Any]:
    options = LoadOptions(timeout=60, aoa_config=config, **more)
    return on_ranks(list(states), lambda ranks, state: load_with(ranks, paddles(ranks, state), path, None, options))


CUTS = [
    ("whole", "whole"), ("whole", "columns"), ("columns", "whole"), ("columns", "columns"), ("whole", "rows"),
    ("columns", "flat columns"), ("whole", "flat"),
]  # fmt: skip
# Each case with some of the cuts, the next with others.
TRIED = some([(name, *cut) for name in CASES for cut in CUTS], len(CASES) * len(CUTS) // 10)


@pytest.mark.parametrize(("name", "source", "target"), TRIED)
def test_as_paddles_engine(tmp_path: Path, name: str, source: str, target: str) -> None:
    case = CASES[name]
    ranks = 4 if "columns" in target and "flat" in target else 2
    arrays, targets = arrays_of(case, True), targets_of(case, True)
    flat_source = source == "columns" and any(len(shape) == 1 for shape in case.stored.values())
    sources = {key: cut("whole" if flat_source else source, array.shape, 2) for key, array in arrays.items()}
    parts = {key: cut(target, array.shape, ranks) for key, array in targets.items()}
    expected = by_paddles_engine(case, arrays, sources, targets, parts)
    raise_first(saved(tmp_path, *(weights(arrays, sources, rank) for rank in range(2))))
    states = [weights(targets, parts, rank) for rank in range(ranks)]
    reports = loaded(tmp_path, states, case.config)
    raise_first(reports)
    for state, found in zip(states, expected, strict=True):
        for key, array in found.items():
            assert_same(to_array(state[key].local_tensor), array)
            assert state[key].local_tensor.shape == list(array.shape)
    kept = {key + state for key in case.kept for state in ("", *STATES)}
    assert {line.partition(":")[0] for line in reports[0].skipped} == kept


@pytest.mark.parametrize("name", some(CASES, 8))
def test_as_paddles_load(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name]
    monkeypatch.setattr(paddle.Tensor, "cuda", lambda self, *_, **__: self)  # as there is none
    arrays, targets = arrays_of(case, False), targets_of(case, False)
    all_here = {key: cut("whole", array.shape, 1) for key, array in (*arrays.items(), *targets.items())}
    dist.save_state_dict(weights(arrays, all_here, 0), str(tmp_path / "paddles"))
    theirs, ours = weights(targets, all_here, 0), weights(targets, all_here, 0)
    dist.load_state_dict(theirs, str(tmp_path / "paddles"), aoa_config=case.config)
    raise_first(loaded(tmp_path / "paddles", [ours], case.config))  # Paddle's own checkpoint
    save_state_dict(weights(arrays, all_here, 0), tmp_path / "own")
    again = weights(targets, all_here, 0)
    raise_first(loaded(tmp_path / "own", [again], case.config))
    for key in targets:
        expected = to_array(theirs[key].local_tensor)
        assert (expected == 7).any() == (key in case.kept + case.lost)
        if key in case.lost:  # since it takes the same piece as a later key, which is all that it remembers
            (expected,) = arrays.values()
        assert_same(to_array(ours[key].local_tensor), expected)
        assert_same(to_array(again[key].local_tensor), expected)


# -- what is done otherwise than by Paddle, and what is refused --------------------------------------------------------


def one_rank(
    path: Path, arrays: dict[str, Array], targets: dict[str, Array], statements: list[str], **more: Any
) -> Any:
    """Save and load by one rank; returns the report, or the error. The targets are filled."""
    save_state_dict({key: tensor_of(array) for key, array in arrays.items()}, path)
    tensors = {key: tensor_of(array) for key, array in targets.items()}
    (report,) = loaded(path, [tensors], {"aoa_statements": statements, "enable_traceback": False}, **more)
    for key, array in targets.items():
        array[...] = to_array(tensors[key])
    return report


def test_a_cast_of_a_parameter_is_none_of_its_states(tmp_path: Path) -> None:
    arrays = {"a": array_of((4, 6), "float32", 0)} | {f"a{s}": array_of((4, 6), "float32", 1) for s in STATES}
    arrays["a.beta1_pow_acc_0"] = np.full(1, 0.9, "float32")
    targets = {"b": np.zeros((6, 4), BF16)} | {f"b{s}": np.zeros((6, 4), "float32") for s in STATES}
    targets["b.beta1_pow_acc_0"] = np.zeros(1, "float32")
    statements = ["a^T -> t", "t -> b, dtype='bfloat16'"]
    raise_first([one_rank(tmp_path, arrays, targets, statements)])
    assert_same(targets["b"], arrays["a"].T.astype(BF16))
    for state in STATES:
        assert_same(targets["b" + state], arrays["a" + state].T)
    assert targets["b.beta1_pow_acc_0"] == arrays["a.beta1_pow_acc_0"]


def test_nothing_is_asked_for(tmp_path: Path) -> None:
    """As of the master weights of a job that has none, to which its statements are given too."""
    raise_first([one_rank(tmp_path, {}, {}, ["l.$LAYER_ID.a -> l.$LAYER_ID.b", "a -> b"])])
    arrays = {"c": array_of((4, 6), "float32", 0)}
    assert isinstance(one_rank(tmp_path, arrays, {"c": np.zeros((4, 6), "float32")}, ["a -> b"]), ValueError)


def test_states_alone(tmp_path: Path) -> None:
    arrays = {f"{key}.moment1_0": array_of((4, 6), "float32", i) for i, key in enumerate("ab")}
    targets = {"x.moment1_0": np.zeros((4, 12), "float32")}
    raise_first([one_rank(tmp_path, arrays, targets, ["a, b -> x, axis=1"])])
    assert_same(targets["x.moment1_0"], np.hstack([arrays["a.moment1_0"], arrays["b.moment1_0"]]))


def test_only_what_is_needed_is_read(tmp_path: Path) -> None:
    arrays = {"a": array_of((512, 1024), "float32", 0), "b": array_of((512, 1024), "float32", 1)}
    targets = {"x": np.zeros((256, 1024), "float32")}  # of two blocks of each of two tensors it is one
    report = one_rank(tmp_path, arrays, targets, ["a -> x, y, axis=0"])
    assert_same(targets["x"], arrays["a"][:256])
    assert report.bytes_read == targets["x"].nbytes
    assert report.unused_keys == ("b",)


def test_other_formats(tmp_path: Path) -> None:
    arrays = {f"l.{i}.{name}": array_of((8, 6), BF16, i) for i in range(2) for name in ("gate", "up")}
    save_state_dict({key: tensor_of(array) for key, array in arrays.items()}, tmp_path / "own")
    export(tmp_path / "own", tmp_path / "files")
    parts = {f"m.{i}": cut("flat columns", (6, 16), 4) for i in range(2)}
    states = [weights({key: np.zeros((6, 16), BF16) for key in parts}, parts, rank) for rank in range(4)]
    statements = ["l.$LAYER_ID.gate^T, l.$LAYER_ID.up^T -> m.$LAYER_ID, fused_ffn"]
    raise_first(loaded(tmp_path / "files", states, {"aoa_statements": statements}))
    for i in range(2):
        halves = [np.split(arrays[f"l.{i}.{name}"].T, 2, axis=1) for name in ("gate", "up")]
        expected = np.hstack([halves[0][0], halves[1][0], halves[0][1], halves[1][1]])
        for state, part in zip(states, parts[f"m.{i}"], strict=True):
            assert_same(to_array(state[f"m.{i}"].local_tensor), part.of(expected))


def test_what_no_statement_is_about_is_as_in_any_load(tmp_path: Path) -> None:
    arrays = {
        "a": array_of((4, 6), "float32", 0),
        "c": array_of((4, 6), "float32", 1),
        "d": array_of((2, 2), "float32", 2),
    }
    targets = {"b": np.zeros((4, 6), "float32"), "e": np.zeros((4, 6), "float32"), "f": np.zeros((2, 2), "float32")}
    raise_first([
        one_rank(tmp_path, arrays, targets, ["a -> b"], key_map={"e": "c"}, recipes={"f": stored("d").T})
    ])  # fmt: skip
    for target, source in (("b", arrays["a"]), ("e", arrays["c"]), ("f", arrays["d"].T)):
        assert_same(targets[target], np.ascontiguousarray(source))
    targets["gone"] = np.zeros((1, 1), "float32")
    error = one_rank(tmp_path, arrays, targets, ["a -> b"], key_map={"e": "c"}, recipes={"f": stored("d").T})
    assert isinstance(error, StateDictMismatchError)
    assert [line.partition(":")[0] for line in error.problems] == ["gone"]


def test_a_recipe_counts_more(tmp_path: Path) -> None:
    arrays = {"a": array_of((4, 6), "float32", 0), "b": array_of((2, 6), "float32", 1)}
    targets = {"x": np.zeros((6, 6), "float32")}
    recipes = {"x": concat(stored("b"), stored("a"))}
    raise_first([one_rank(tmp_path, arrays, targets, ["a, b -> x, axis=0"], recipes=recipes)])
    assert_same(targets["x"], np.concatenate([arrays["b"], arrays["a"]]))


def test_nested_state_dicts(tmp_path: Path) -> None:
    array = array_of((4, 6), "float32", 0)
    save_state_dict({"model": {"a": tensor_of(array)}}, tmp_path)
    target = {"net": {"b": tensor_of(np.zeros((6, 4), "float32"))}}
    raise_first(loaded(tmp_path, [target], {"aoa_statements": ["model.a^T -> net.b"]}))
    assert_same(to_array(target["net"]["b"]), np.ascontiguousarray(array.T))


def test_macros_of_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def swapped(tokens: Any, expression: str, context: Any) -> Any:
        if not any(token.value == "swapped" for token in tokens):
            return expression
        source, target = tokens[0].value, tokens[2].value
        count = 2 * context.get_dst_state_shard_num(target)
        names = [f"{source}.swapped.{i}" for i in range(count)]
        return [f"{source} -> {','.join(names)}, axis=1", f"{','.join(reversed(names))} -> {target}, axis=1"]

    monkeypatch.setattr(macros.macro_registry, "macros", list(macros.macro_registry.macros))
    macros.macro_registry.register_macro("swapped_macro", swapped, 6)
    monkeypatch.setattr(macros, "GLOBAL_ATTRIBUTE_KEYWORDS", [*macros.GLOBAL_ATTRIBUTE_KEYWORDS, "swapped"])
    array = array_of((2, 8), "float32", 0)
    save_state_dict({"a": tensor_of(array)}, tmp_path)
    parts = {"b": cut("columns", (2, 8), 2)}
    states = [weights({"b": np.zeros_like(array)}, parts, rank) for rank in range(2)]
    raise_first(loaded(tmp_path, states, {"aoa_statements": ["a -> b, swapped"]}))
    expected = np.concatenate(np.split(array, 4, axis=1)[::-1], axis=1)
    for state, part in zip(states, parts["b"], strict=True):
        assert_same(to_array(state["b"].local_tensor), part.of(expected))


def test_a_macro_of_a_program_that_fuses_is_not_taken_in_reverse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(macros.macro_registry, "macros", list(macros.macro_registry.macros))
    macros.macro_registry.register_macro("gated_macro", lambda _, text, context: text.replace("gated", "fused_ffn"), 3)
    monkeypatch.setattr(macros, "GLOBAL_ATTRIBUTE_KEYWORDS", [*macros.GLOBAL_ATTRIBUTE_KEYWORDS, "gated"])
    save_state_dict({key: tensor_of(array_of((4, 4), "float32", 0)) for key in "ab"}, tmp_path)
    state = {"x": tensor_of(np.zeros((4, 8), "float32"))}
    (error,) = loaded(tmp_path, [state], {"aoa_statements": ["x -> a, b, gated"], "aoa_config_reverse": True})
    assert isinstance(error, ValueError)
    assert "'x -> a, b, gated' is not taken in reverse, since Paddle's engine fails on it" in str(error)


@pytest.mark.parametrize("how", ["rows", "flat", "flat columns", "replicas of columns"])
def test_columns_tell_in_how_many_parts_a_tensor_was(tmp_path: Path, how: str) -> None:
    """Rows are divided by the save itself, and statements fuse along columns."""
    array = array_of((512, 1024), "float32", 0)  # large enough to be divided
    ranks = 4 if "columns" in how else 2
    columns = cut("columns", array.shape, 2)
    parts = {"ffn": [*columns, *columns] if how.startswith("replicas") else cut(how, array.shape, ranks)}
    raise_first(saved(tmp_path, *(weights({"ffn": array}, parts, rank) for rank in range(ranks))))
    assert len(read_metadata(tmp_path).state_dict_metadata["ffn"]) >= ranks
    states = [{key: tensor_of(np.zeros((512, 512), "float32")) for key in ("gate", "up")} for _ in range(2)]
    raise_first(loaded(tmp_path, states, {"aoa_statements": ["ffn -> gate, up, fused_ffn"]}))
    pieces = np.split(array, 4 if "columns" in how else 2, axis=1)
    assert_same(to_array(states[1]["gate"]), np.concatenate(pieces[::2], axis=1))
    assert_same(to_array(states[0]["up"]), np.concatenate(pieces[1::2], axis=1))


@pytest.mark.parametrize("statements", [["ffn -> ffn, fused_ffn"], ["ffn -> t, fused_ffn", "t -> ffn"]])
def test_columns_alone_do_not_tell_what_ranks_with_rows_each_are_to_get(tmp_path: Path, statements: list[str]) -> None:
    """The layout is the same, and yet the engine would count two parts of what had one."""
    array = array_of((8, 16), "float32", 0)
    parts = {"ffn": cut("rows", array.shape, 2)}
    raise_first(saved(tmp_path, *(weights({"ffn": array}, parts, rank) for rank in range(2))))
    states = [weights({"ffn": np.full_like(array, 7)}, parts, rank) for rank in range(2)]
    for error in loaded(tmp_path, states, {"aoa_statements": statements, "enable_traceback": False}):
        assert isinstance(error, ValueError)
        assert "the checkpoint tells only the columns, and ranks want rows of ffn each" in str(error)
    assert all((to_array(state["ffn"].local_tensor) == 7).all() for state in states)


@pytest.mark.parametrize(
    "other",
    ["q, k, v -> b, fused_qkv, num_heads=2, num_key_value_groups=2, axis=0", "fused_ffn.q, k -> b, axis=0"],
)
def test_only_what_depends_on_parts_says_along_what_they_are_counted(tmp_path: Path, other: str) -> None:
    array = array_of((512, 1024), "float32", 0)
    small = {key: array_of((4,), "float32", i) for i, key in enumerate(("q", "k", "v", "fused_ffn.q"))}
    arrays = {"ffn": array, **small}
    whole = {key: cut("whole", one.shape, 1) * 2 for key, one in small.items()}
    parts = {"ffn": cut("rows", array.shape, 2), **whole}
    raise_first(saved(tmp_path, *(weights(arrays, parts, rank) for rank in range(2))))
    states = [{key: tensor_of(np.zeros((512, 512), "float32")) for key in ("gate", "up")} for _ in range(2)]
    raise_first(loaded(tmp_path, states, {"aoa_statements": ["ffn -> gate, up, fused_ffn", other]}))
    pieces = np.split(array, 2, axis=1)
    assert_same(to_array(states[1]["gate"]), pieces[0])
    assert_same(to_array(states[0]["up"]), pieces[1])


@pytest.mark.parametrize(("how", "axis"), [("rows", "0"), ("flat", "0"), ("single rows", "1")])
def test_a_number_of_stored_parts_that_is_not_known_is_refused(tmp_path: Path, how: str, axis: str) -> None:
    array = array_of((2 if how == "single rows" else 4, 16), "float32", 0)
    parts = {"ffn": cut(how.removeprefix("single "), array.shape, 2)}
    raise_first(saved(tmp_path, *(weights({"ffn": array}, parts, rank) for rank in range(2))))
    states = [{"ffn": tensor_of(np.zeros_like(array))} for _ in range(2)]
    statements = [f"ffn -> ffn, fused_ffn, axis={axis}"]
    for error in loaded(tmp_path, states, {"aoa_statements": statements, "enable_traceback": False}):
        assert isinstance(error, ValueError)
        assert "aoa_config: ffn: the checkpoint does not tell in how many parts" in str(error)
    raise_first(loaded(tmp_path, states, {"aoa_statements": ["ffn -> x"]}))  # the others do not ask
    assert_same(to_array(states[1]["ffn"]), array)


def saved_by_paddle(path: Path, arrays: dict[str, Array], parts: dict[str, list[Part]], ranks: int) -> None:
    """Write what Paddle's own function writes on so many ranks."""
    classes: Any = pytest.importorskip("paddle.distributed.flex_checkpoint.dcp.metadata")
    described: dict[str, list[Any]] = {key: [] for key in arrays}
    places: dict[Any, str] = {}
    path.mkdir()
    for rank in range(ranks):
        name = f"{rank}_0.distcp"
        held = weights(arrays, parts, rank)
        paddle.save({key: weight.local_tensor for key, weight in held.items()}, str(path / name))
        for key, weight in held.items():
            flat = weight.flattened_range and (weight.flattened_range.start, weight.flattened_range.stop)
            shape, offset, is_flat = weight.local_shape, weight.global_offset, weight.is_flattened
            dtype = str(arrays[key].dtype)
            described[key].append(classes.LocalTensorMetadata(offset, shape, dtype, weight.global_shape, is_flat, flat))
            index = classes.LocalTensorIndex(key, offset, is_flat, flat, None, shape)
            places[index] = name
    metadata = classes.Metadata(described, places, {key: (key,) for key in arrays})
    paddle.save(metadata, str(path / "0.metadata"))


@pytest.mark.parametrize(
    ("how", "statement"),
    some(
        itertools.product(
            ["columns", "rows", "flat", "flat columns"], ["ffn -> gate, up, fused_ffn", "ffn -> t, fused_ffn, axis=0"]
        ),
        3,
    ),
)
def test_paddles_checkpoints_tell_in_how_many_parts_tensors_were(
    tmp_path: Path, how: str, statement: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paddle.Tensor, "cuda", lambda self, *_, **__: self)  # as there is none
    array, ranks = array_of((8, 16), "float32", 0), 4 if how == "flat columns" else 2
    parts = {"ffn": cut(how, array.shape, ranks)}
    saved_by_paddle(tmp_path / "paddles", {"ffn": array}, parts, ranks)
    taken_apart = {"gate": (8, 8), "up": (8, 8)} if "gate" in statement else {"ffn": (8, 16)}
    statements = [statement] if "gate" in statement else [statement, "t -> ffn"]
    targets = {key: np.full(shape, 7, "float32") for key, shape in taken_apart.items()}
    here = {key: cut("whole", target.shape, 1) for key, target in targets.items()}
    theirs, ours = weights(targets, here, 0), weights(targets, here, 0)
    config = {"aoa_statements": statements, "enable_traceback": False}
    dist.load_state_dict(theirs, str(tmp_path / "paddles"), aoa_config=config)
    raise_first(loaded(tmp_path / "paddles", [ours], config))
    for key in targets:
        assert_same(to_array(ours[key].local_tensor), to_array(theirs[key].local_tensor))
    counts = {"columns": 2, "rows": 2, "flat": 1, "flat columns": 2}
    assert len(stored_tensors(read_metadata(tmp_path / "paddles"))["ffn"].offsets) == counts[how]
    if "gate" in statement:  # it matters: with another number of parts something else comes out
        pieces = np.split(array, 2 * counts[how], axis=1)
        assert_same(to_array(ours["gate"].local_tensor), np.concatenate(pieces[::2], axis=1))


def test_a_state_tells_in_how_many_parts_its_parameter_was(tmp_path: Path) -> None:
    arrays = {key: array_of((4, 16), "float32", i) for i, key in enumerate(("ffn", "ffn.moment1_0"))}
    parts = {"ffn": cut("rows", (4, 16), 2), "ffn.moment1_0": cut("columns", (4, 16), 2)}
    raise_first(saved(tmp_path, *(weights(arrays, parts, rank) for rank in range(2))))
    (target,) = states = [
        {"gate": tensor_of(np.zeros((4, 8), "float32")), "up": tensor_of(np.zeros((4, 8), "float32"))}
    ]
    raise_first(loaded(tmp_path, states, {"aoa_statements": ["ffn -> gate, up, fused_ffn"]}))
    pieces = np.split(arrays["ffn"], 4, axis=1)
    assert_same(to_array(target["gate"]), np.concatenate(pieces[::2], axis=1))


@pytest.mark.parametrize(
    ("statements", "shape", "dtype", "texts"),
    [
        (["a, b -> x, axis=0"], (5, 6), "float32", ["x: the target has shape [5, 6], its recipe makes [8, 6]", "a, b"]),
        (["a -> x"], (4, 6), BF16, ["x: the target has dtype bfloat16, its recipe makes float32 (of a)"]),
        (["a -> x, dtype='float16'"], (4, 6), BF16, ["x: its recipe casts to float16, and not to bfloat16"]),
        (
            ["a^T -> t", "a, t -> x, axis=0"],
            (10, 6),
            "float32",
            ["x: its parts do not make up a tensor of shape [10, "],
        ),
        (["a^T -> t", "a, t, b -> x, axis=1"], (4, 16), "float32", ["x: its parts do not make up a tensor"]),
    ],
)
def test_what_does_not_fit(tmp_path: Path, statements: list[str], shape: Any, dtype: Any, texts: list[str]) -> None:
    arrays = {"a": array_of((4, 6), "float32", 0), "b": array_of((4, 6), "float32", 1)}
    targets = {"x": np.full(shape, 7, dtype)}
    error = one_rank(tmp_path, arrays, targets, statements)
    assert isinstance(error, StateDictMismatchError)
    assert all(text in str(error) for text in texts), error
    assert (targets["x"] == 7).all()


@pytest.mark.parametrize(
    ("statements", "text"),
    [
        (["a, b -> x, y, axis=0"], "multiple var"),
        (["a -> x, y, z, w, v, axis=0"], "not divisible"),
        (["gone -> x"], "gone should be assigned before"),
        (["a -> x, dtype='int8'"], "Unsupported cast dtype: int8"),
        (["a -> x^T"], "Cannot assign to transpose"),
        (["a -> x, permute"], "only support one attr named `axis`"),
        (["a -> x, permute=x"], "Unexpected value"),
        (["a -> t, dtype='bfloat16'", "t -> x, dtype='float32'"], "by way of bfloat16 would round twice"),
        (["a, b -> x, axis=0", "b -> _"], "x is made of tensors some of which are dropped"),
        (['a -> x, permute="(1, 0)"'], "permute must be a list of axes, such as '[1, 0]', not '(1, 0)'"),
    ],
)
def test_statements_that_cannot_be_done(tmp_path: Path, statements: list[str], text: str) -> None:
    arrays = {"a": array_of((4, 6), "float32", 0), "b": array_of((4, 6), "float32", 1)}
    error = one_rank(tmp_path, arrays, {"x": np.zeros((4, 6), "float32")}, statements)
    assert isinstance(error, ValueError)
    assert str(error).startswith("aoa_config: ")
    assert text in str(error)


def test_axes_that_are_no_list_are_taken_in_reverse(tmp_path: Path) -> None:
    """Of these Paddle's engine makes a list."""
    array = array_of((4, 6, 2), "float32", 0)
    save_state_dict({"x": tensor_of(array)}, tmp_path)
    for axes in ("(1, 2, 0)", "1, 2, 0", "[1, 2, 0]"):
        config = {"aoa_statements": [f'a -> x, permute="{axes}"'], "aoa_config_reverse": True}
        target = paddle.zeros([2, 4, 6])
        load_state_dict({"a": target}, tmp_path, options=LoadOptions(aoa_config=config))
        assert_same(to_array(target), array.transpose(2, 0, 1))


def test_states_are_not_left_as_they_lie_where_a_permutation_is_none(tmp_path: Path) -> None:
    """Of these alone there is nothing that would be cast to what it is taken for."""
    state = {"x.w_0": np.full((3, 3), 7, "float32")}
    error = one_rank(tmp_path, {"a.w_0": array_of((3, 3), "float32", 0)}, state, ['a -> x, permute=" [1, 0]"'])
    assert isinstance(error, ValueError)
    assert "permute must be a list of axes" in str(error)
    assert (state["x.w_0"] == 7).all()


@pytest.mark.parametrize(
    ("stored", "wanted", "statement", "text"),
    [
        ((4, 4), (2, 2), "a -> b", "the target has shape [2, 2], its recipe makes [4, 4]"),
        ((4, 4), (2, 2), "a^T -> b", "its parts do not make up a tensor of shape [2, 2]"),
        ((8,), (2, 2), "a^T -> b", "its parts do not make up a tensor of shape [2, 2]"),
        ((8,), (8,), "a -> b", None),
    ],
)
def test_a_state_of_another_shape_than_its_parameter(
    tmp_path: Path, stored: Any, wanted: Any, statement: str, text: str | None
) -> None:
    arrays = {"a": array_of((2, 2), "float32", 0), "a.moment1_0": array_of(stored, "float32", 1)}
    targets = {"b": np.zeros((2, 2), "float32"), "b.moment1_0": np.full(wanted, 7, "float32")}
    error = one_rank(tmp_path, arrays, targets, [statement])
    if text is None:
        raise_first([error])
        assert_same(targets["b.moment1_0"], arrays["a.moment1_0"])
        return
    assert isinstance(error, StateDictMismatchError)
    assert error.problems[0].startswith(f"b.moment1_0: {text}"), error
    assert (targets["b.moment1_0"] == 7).all()


def test_a_state_that_is_not_stored_is_missing(tmp_path: Path) -> None:
    arrays = {"a": array_of((4, 6), "float32", 0)}
    targets = {"b": np.zeros((4, 6), "float32"), "b.moment1_0": np.zeros((4, 6), "float32")}
    error = one_rank(tmp_path, arrays, targets, ["a -> b"])
    assert isinstance(error, StateDictMismatchError)
    assert error.problems[0].startswith("b.moment1_0: it is made of a.moment1_0, which in the checkpoint is missing")


def test_a_state_need_not_be_stored(tmp_path: Path) -> None:
    """Nor one of those of which it is made. What is stored has to fit."""
    arrays = {key: array_of((4, 6), "float32", i) for i, key in enumerate(("a", "b", "a.moment1_0"))}
    statements, keys = ["a, b -> x, axis=0"], ("x", "x.w_0", "x.moment1_0")
    targets = {key: np.full((8, 6), 7, "float32") for key in keys}
    raise_first([one_rank(tmp_path, arrays, targets, statements, allow_missing=["x.*"])])
    assert_same(targets["x"], np.concatenate([arrays["a"], arrays["b"]]))
    assert all((targets[key] == 7).all() for key in keys[1:])
    config = {"aoa_statements": statements, "enable_traceback": False}
    options = LoadOptions(aoa_config=config, allow_missing=["x.mom*"])
    assert set(load_merged_state_dict(tmp_path, options=options)) == {"x"}
    assert export(tmp_path, tmp_path / "out", "native", options=options).tensors == 1
    wrong = {"x": np.zeros((8, 5), "float32"), "x.moment1_0": np.zeros((8, 6), "float32")}
    error = one_rank(tmp_path, arrays, wrong, statements, allow_missing=["x*"])
    assert isinstance(error, StateDictMismatchError)
    assert [problem[:2] for problem in error.problems] == ["x:"]


def test_ranks_that_want_different_shapes_are_told(tmp_path: Path) -> None:
    save_state_dict({"a": tensor_of(array_of((4, 6), "float32", 0))}, tmp_path)
    states = [{"b": tensor_of(np.zeros(shape, "float32"))} for shape in ((4, 6), (6, 4))]
    for error in loaded(tmp_path, states, {"aoa_statements": ["a -> b"]}):
        assert isinstance(error, ValueError)
        assert "b in different shapes: [4, 6], [6, 4]" in str(error)


def with_statements_of_their_own(
    path: Path, arrays: dict[str, Array], wanted: list[dict[str, Any]], said: list[list[str] | None], **more: Any
) -> list[Any]:
    """Save, and load on ranks that have statements of their own, or None; returns their reports, or errors."""
    save_state_dict({key: tensor_of(array) for key, array in arrays.items()}, path)

    def one(ranks: Any, state: dict[str, Any]) -> Any:
        statements = said[ranks.rank]
        config = None if statements is None else {"aoa_statements": statements, "enable_traceback": False}
        return load_with(ranks, paddles(ranks, state), path, None, LoadOptions(timeout=60, aoa_config=config, **more))

    return on_ranks(wanted, one)


def test_ranks_may_have_statements_of_their_own(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As stages of a pipeline have, or ranks with other experts, if a program writes one for each key that it has."""
    arrays = {key: array_of((4, 6), "float32", i) for i, key in enumerate("abc")}
    both = ["a -> u, v, axis=0", "u, v -> shared, axis=0"]
    said = [[*both, "b -> first, dtype='bfloat16'"], ["c^T -> c", *both], [*both, "u, c -> third, axis=0"]]
    cuts = cut("rows", (4, 6), 2)
    state = {"shared": np.zeros((4, 6), "float32")}
    wanted = [weights(state, {"shared": cuts}, rank) for rank in range(2)] + [weights(state, {"shared": cuts}, 0)]
    wanted[0]["first"] = tensor_of(np.zeros((4, 6), BF16))
    wanted[1]["c"] = tensor_of(np.zeros((6, 4), "float32"))
    wanted[2]["third"] = tensor_of(np.zeros((6, 6), "float32"))
    raise_first(with_statements_of_their_own(tmp_path, arrays, wanted, said, strict="all"))
    for found, rows in zip(wanted, (slice(0, 2), slice(2, 4), slice(0, 2)), strict=True):
        assert_same(to_array(found["shared"].local_tensor), arrays["a"][rows])
    assert_same(to_array(wanted[0]["first"]), arrays["b"].astype(BF16))
    assert_same(to_array(wanted[1]["c"]), arrays["c"].T)
    assert_same(to_array(wanted[2]["third"]), np.concatenate([arrays["a"][:2], arrays["c"]]))


@pytest.mark.parametrize("without", [0, 1])
def test_ranks_with_statements_beside_one_without_any(tmp_path: Path, without: int) -> None:
    arrays = {key: array_of((4, 6), "float32", i) for i, key in enumerate("ab")}
    wanted = [{"a": tensor_of(np.zeros((4, 6), "float32"))}, {"b": tensor_of(np.zeros((6, 4), "float32"))}]
    said = [[], ["a^T -> b"]]
    order = [without, 1 - without]
    raise_first(with_statements_of_their_own(tmp_path, arrays, [wanted[i] for i in order], [said[i] for i in order]))
    assert_same(to_array(wanted[0]["a"]), arrays["a"])
    assert_same(to_array(wanted[1]["b"]), np.ascontiguousarray(arrays["a"].T))


@pytest.mark.parametrize("said", [[None, []], [[], None], [[], []]])
def test_ranks_of_which_none_has_a_statement(tmp_path: Path, said: list[list[str] | None]) -> None:
    arrays = {"a": array_of((4, 6), "float32", 0)}
    wanted = [{"a": tensor_of(np.zeros((4, 6), "float32"))} for _ in range(2)]
    raise_first(with_statements_of_their_own(tmp_path, arrays, wanted, said))
    for state in wanted:
        assert_same(to_array(state["a"]), arrays["a"])


def test_statements_beside_ranks_without_a_config_are_refused(tmp_path: Path) -> None:
    arrays = {"a": array_of((4, 6), "float32", 0)}
    said: list[list[str] | None] = [["a -> b"], [], None]
    wanted = [{"b": tensor_of(np.zeros((4, 6), "float32"))}, {}, {"a": tensor_of(np.zeros((4, 6), "float32"))}]
    for error in with_statements_of_their_own(tmp_path, arrays, wanted, said):
        assert isinstance(error, ValueError)
        assert "rank 2 passed aoa_config=None, rank 0 aoa_config=statements" in str(error)


@pytest.mark.parametrize("other", [["b -> y", "b -> x"], ["b -> y", "a^T -> x"], ["b -> y"], []])
def test_ranks_whose_statements_make_a_tensor_of_different_things_are_told(tmp_path: Path, other: list[str]) -> None:
    arrays = {key: array_of((4, 4), "float32", i) for i, key in enumerate("abx")}
    parts = {"x": cut("rows", (4, 4), 2)}
    wanted = [weights({"x": np.full((4, 4), 7, "float32")}, parts, rank) for rank in range(2)]
    said = [["a -> x"], other]
    for error in with_statements_of_their_own(tmp_path, arrays, wanted, said):
        assert isinstance(error, ValueError)
        assert "by the statements of some ranks x is made of other things" in str(error)
    assert all((to_array(state["x"].local_tensor) == 7).all() for state in wanted)


def test_statements_that_differ_about_a_tensor_that_has_a_recipe(tmp_path: Path) -> None:
    """The recipe comes first, on all ranks."""
    arrays = {key: array_of((4, 4), "float32", i) for i, key in enumerate("abc")}
    parts = {"x": cut("rows", (4, 4), 2)}
    wanted = [weights({"x": np.zeros((4, 4), "float32")}, parts, rank) for rank in range(2)]
    said = [["a -> x"], ["b -> x"]]
    raise_first(with_statements_of_their_own(tmp_path, arrays, wanted, said, recipes={"x": stored("c")}))
    assert_same(to_array(wanted[1]["x"].local_tensor), arrays["c"][2:])


def test_whole_tensors_of_everything(tmp_path: Path) -> None:
    arrays = {key: array_of((4, 6), "float32", i) for i, key in enumerate(("a", "b", "c", "d", "a.moment1_0"))}
    save_state_dict(
        {**{key: tensor_of(array) for key, array in arrays.items()}, "step": 7, "text": "x" * 9000}, tmp_path
    )
    statements = ["a^T -> x", "b, c -> y.z, axis=0", "d -> _"]
    options = LoadOptions(aoa_config={"aoa_statements": statements})
    expected = {
        "x": arrays["a"].T,
        "x.moment1_0": arrays["a.moment1_0"].T,
        "y.z": np.concatenate([arrays["b"], arrays["c"]]),
    }
    found = load_merged_state_dict(tmp_path, options=options)
    assert set(found) == {*expected, "step", "text"}
    assert (found["step"], len(found["text"])) == (7, 9000)
    for key, array in expected.items():
        assert_same(to_array(found[key]), np.ascontiguousarray(array))
    assert set(load_merged_state_dict(tmp_path, keys="y.*", options=options)) == {"y.z"}
    assert set(load_merged_state_dict(tmp_path, keys="x*", flat=True, options=options)) == {"x", "x.moment1_0"}
    with pytest.raises(CheckpointNotFoundError, match="d"):
        load_merged_state_dict(tmp_path, keys="d", options=options)
    export(tmp_path, tmp_path / "out", "native", options=options)
    exported = load_merged_state_dict(tmp_path / "out", flat=True)
    assert set(exported) == set(found)
    for key, array in expected.items():
        assert_same(to_array(exported[key]), np.ascontiguousarray(array))


def made_whole(folder: Path, statements: list[str]) -> dict[str, Any]:
    """All that statements make or leave of a checkpoint; a merged load and an export say the same."""
    options = LoadOptions(aoa_config={"aoa_statements": statements})
    made = load_merged_state_dict(folder / "saved", options=options)
    export(folder / "saved", folder / "out", options=options)
    exported = load_merged_state_dict(folder / "out")
    assert set(made) == set(exported)
    for key, tensor in made.items():
        assert_same(to_array(tensor), to_array(exported[key]))
    return {key: to_array(tensor).tolist() for key, tensor in made.items()}


@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        ("f -> gate, up, fused_ffn", {"gate": [[0, 1, 2]], "up": [[3, 4, 5]]}),
        (f"f -> q, k, v, fused_qkv, {HEADS.replace('2', '1')}", {"q": [[0, 1, 2, 3]], "k": [[4]], "v": [[5]]}),
        (f"f -> q, k, v, fused_qkv_old, {HEADS.replace('2', '1')}", {"q": [[0, 1, 2, 3]], "k": [[4]], "v": [[5]]}),
        ("f -> x, axis=1", {"x": [[0, 1, 2, 3, 4, 5]]}),
    ],
)
def test_all_that_is_made_has_its_key_where_there_is_one_part_of_it(
    tmp_path: Path, statement: str, expected: dict[str, Any]
) -> None:
    save_state_dict({"f": tensor_of(np.arange(6, dtype="float32").reshape(1, 6))}, tmp_path / "saved")
    assert made_whole(tmp_path, [statement]) == expected


@pytest.mark.parametrize(
    ("statements", "expected"),
    [
        (["a -> b"], {"b": "a", "c": "c"}),
        (["a -> c"], {"b": "b", "c": "a"}),
        (["a -> b", "b -> d"], {"d": "a", "c": "c"}),
        (["b -> b", "b -> b, axis=0"], {"a": "a", "b": "b", "c": "c"}),
    ],
)
def test_what_is_made_under_a_stored_key_stands_for_what_was_stored(
    tmp_path: Path, statements: list[str], expected: dict[str, str]
) -> None:
    arrays = {"a": [[1.0, 2.0]], "b": [[3.0, 4.0]], "c": [[5.0]]}
    save_state_dict({key: paddle.to_tensor(values) for key, values in arrays.items()}, tmp_path / "saved")
    assert made_whole(tmp_path, statements) == {key: arrays[source] for key, source in expected.items()}


@pytest.mark.parametrize(("statements", "left"), [(["_ -> b"], "ab"), (["a -> b", "a -> _"], "")])
def test_whole_tensors_are_never_what_memory_had_before(tmp_path: Path, statements: list[str], left: str) -> None:
    arrays = {"a": [[1.0, 2.0]], "b": [[3.0, 4.0]], "c": [[5.0]]}
    save_state_dict({key: paddle.to_tensor(values) for key, values in arrays.items()}, tmp_path / "saved")
    assert made_whole(tmp_path, statements) == {key: arrays[key] for key in (*left, "c")}


@pytest.mark.parametrize(
    ("statement", "shapes", "text"),
    [
        ("a, b -> x, axis=1", {"a": (2, 2), "b": (3, 2)}, "x: its parts do not make up a tensor of shape [2, 4]"),
        ("b, a -> x, axis=1", {"a": (2, 2), "b": (3, 2)}, "x: its parts do not make up a tensor of shape [3, 4]"),
        ("a, b -> x, axis=0", {"a": (2, 2), "b": (4,)}, "x: its parts do not make up a tensor of shape [6, 2]"),
        ('a -> x, permute="[0, 0]"', {"a": (2, 2)}, "x: its parts do not make up a tensor of shape [2, 2]"),
        ("a^T -> x", {"a": (2, 2), "a.w_0": (4,)}, "x.w_0: its parts do not make up a tensor of shape [2, 2]"),
        (
            "a, b -> x, axis=0",
            {"a": (2, 2), "b": (2, 2), "a.w_0": (2, 2)},
            "x.w_0: it is made of b.w_0, which in the checkpoint is missing",
        ),
        (
            "a -> t, dtype='bfloat16'",
            {"a": (2, 2), "b": (2, 2)},
            "x: its recipe casts to float32, and not to bfloat16, the target's dtype (of a, b)",
        ),
    ],
)
def test_what_does_not_fit_is_made_nowhere(tmp_path: Path, statement: str, shapes: Shapes, text: str) -> None:
    """Where everything is made, as where it is wanted; without ``strict`` it is left out."""
    arrays = {key: array_of(shape, "float32", i) for i, (key, shape) in enumerate(shapes.items())}
    save_state_dict({key: tensor_of(array) for key, array in arrays.items()}, tmp_path / "saved")
    config = {"aoa_statements": [statement, *(["t, b -> x, axis=0"] if "-> t" in statement else [])]}
    for call in (
        lambda options: load_merged_state_dict(tmp_path / "saved", options=options),
        lambda options: export(tmp_path / "saved", tmp_path / "out", options=options),
    ):
        with pytest.raises(StateDictMismatchError) as raised:
            call(LoadOptions(aoa_config=config))
        assert list(raised.value.problems) == [text]
    if "x.w_0" in text:
        options = LoadOptions(aoa_config=config, strict=False)
        assert set(load_merged_state_dict(tmp_path / "saved", options=options)) == {"x"}


@pytest.mark.parametrize("asked", [{"keys": ["x", "m.c"]}, {"prefix": "m"}])
def test_what_does_not_fit_does_not_matter_if_it_is_not_asked_for(tmp_path: Path, asked: dict[str, Any]) -> None:
    """Such as the optimizer's states, which one of the parameters does not have, where the others are wanted alone."""
    keys = ["a", "b", "m.c", "a.moment1_0"]
    save_state_dict({key: paddle.full([2], number) for number, key in enumerate(keys)}, tmp_path / "saved")
    options = LoadOptions(aoa_config={"aoa_statements": ["a, b -> x, axis=0"]})
    expected = {"c": [2, 2]} if "prefix" in asked else {"x": [0, 0, 1, 1], "m.c": [2, 2]}
    export(tmp_path / "saved", tmp_path / "out", options=options, **asked)
    for merged in (
        load_merged_state_dict(tmp_path / "saved", options=options, flat=True, **asked),
        load_merged_state_dict(tmp_path / "out", flat=True),
    ):
        assert {key: tensor.tolist() for key, tensor in merged.items()} == expected
    with pytest.raises(StateDictMismatchError, match="x.moment1_0: it is made of b.moment1_0"):
        load_merged_state_dict(tmp_path / "saved", options=options, keys="x.*")


def test_powers_of_betas_are_those_of_any_part_that_has_them(tmp_path: Path) -> None:
    power = ".beta1_pow_acc_0"
    state = {"a": paddle.ones([2]), "b": paddle.ones([2]), f"b{power}": paddle.full([1], 0.5)}
    save_state_dict(state, tmp_path / "saved")
    assert made_whole(tmp_path, ["a, b -> x, axis=0"]) == {"x": [1] * 4, f"x{power}": [0.5]}
    target = {f"x{power}": paddle.zeros([1])}
    config = {"aoa_statements": ["a, b -> x, axis=0"]}
    load_state_dict(target, tmp_path / "saved", options=LoadOptions(aoa_config=config))
    assert target[f"x{power}"].tolist() == [0.5]


def test_statements_that_change_nothing_are_errors_for_whole_tensors_too_if_nothing_may_be_idle(tmp_path: Path) -> None:
    save_state_dict({"a": paddle.ones([2, 3]), "b": paddle.zeros([2, 3])}, tmp_path / "saved")
    config = {"aoa_statements": ["a -> b", "l.$LAYER_ID.q -> l.$LAYER_ID.k"]}
    options = LoadOptions(aoa_config=config, strict="all")
    problem = "aoa_config: 'l.$LAYER_ID.q -> l.$LAYER_ID.k' changes nothing: no stored tensor is like it"
    for call in (
        lambda: load_merged_state_dict(tmp_path / "saved", options=options),
        lambda: export(tmp_path / "saved", tmp_path / "out", options=options),
    ):
        with pytest.raises(StateDictMismatchError) as raised:
            call()
        assert list(raised.value.problems) == [problem]
        assert "strict=True lets statements change nothing" in str(raised.value)
    all_in_use = LoadOptions(aoa_config={"aoa_statements": ["a -> b"]}, strict="all")
    assert set(load_merged_state_dict(tmp_path / "saved", options=all_in_use)) == {"b"}
    assert export(tmp_path / "saved", tmp_path / "out", options=all_in_use).tensors == 1


# -- other versions of Paddle ------------------------------------------------------------------------------------------


def changed(name: str, value: Any) -> Any:
    return lambda patch: patch.setattr(aoa_engine, name, value)


class OtherEngine(aoa_engine.AOAEngine):
    """An engine whose tensors have another form."""

    def shape_propagation(self) -> None:
        super().shape_propagation()
        for tensor in self.output_vars.values():
            tensor.slices = [one[:3] for one in tensor.slices]


class WrongEngine(aoa_engine.AOAEngine):
    """An engine that means something else by a permutation."""

    def transpose(self, tensor: Any, permutation: str) -> Any:
        return tensor


@pytest.mark.parametrize(
    "change",
    [
        lambda patch: patch.delattr(aoa_engine, "split_optimizer_state_key"),
        lambda patch: patch.delattr(aoa_engine.AOAEngine, "make_input_tensor"),
        changed("AOAEngine", None),
        changed("AOAEngine", lambda config, sources, targets, more: None),
        changed("AOAEngine", OtherEngine),
        changed("AOAEngine", WrongEngine),
        changed("ShardedWeightDesc", lambda key: None),
        changed("Lexer", lambda context: None),
    ],
)
def test_an_engine_that_is_not_known_is_refused(tmp_path: Path, change: Any) -> None:
    array = array_of((4, 6), "float32", 0)
    save_state_dict({"a": tensor_of(array)}, tmp_path)
    states = [{"b": tensor_of(np.full_like(array, 7))} for _ in range(2)]
    with pytest.MonkeyPatch.context() as patch:
        change(patch)
        for error in loaded(tmp_path, states, {"aoa_statements": ["a -> b"], "enable_traceback": False}):
            assert isinstance(error, UnsupportedValueError), error
            assert f"the engine of Paddle {paddle.__version__} is not as this library knows it" in str(error)
    assert all((to_array(state["b"]) == 7).all() for state in states)
    raise_first(loaded(tmp_path, states, {"aoa_statements": ["a -> b"]}))


def test_errors_of_internals_behind_the_first_trial_are_none_of_statements(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(tokens: Any, expression: str, context: Any) -> Any:
        if "broken" in expression:
            raise AttributeError("another context")
        return expression

    monkeypatch.setattr(macros.macro_registry, "macros", list(macros.macro_registry.macros))
    macros.macro_registry.register_macro("broken_macro", broken, 6)
    error = one_rank(tmp_path, {"broken": np.zeros(2, "float32")}, {"b": np.zeros(2, "float32")}, ["broken -> b"])
    assert isinstance(error, UnsupportedValueError)
    assert "AttributeError: another context" in str(error)


def test_a_state_of_another_shape_than_its_parameters_is_not_made_of_several() -> None:
    part = core_parts.Part("b", whole((2,)), (0,), whole((2,)))
    stored = {"b": core_parts.SourceTensor((1,), DTYPES["float32"])}
    assert our_engine._alone(stored, (2,), [part], (2,)) == (
        (1,),
        [core_parts.Part("b", whole((1,)), (0,), whole((1,)))],
    )
    assert our_engine._alone(stored, (4,), [part, part], (2,)) == ((4,), [])
    assert our_engine._alone({}, (2,), [part], (2,)) == ((2,), [])


def test_casts_that_are_not_done_are_refused() -> None:
    stored = core_parts.SourceTensor((2,), DTYPES["int64"])
    with pytest.raises(ValueError, match="^w: a cast from int64 to float32 is not done$"):
        our_engine._one_cast("w", stored, ["float32"])


def test_what_cannot_be_looked_for_stops_no_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> Any:
        raise AttributeError("an engine of another version")

    monkeypatch.setattr(our_engine, "idle_statements", fails)
    save_state_dict({"a": paddle.arange(6.0)}, tmp_path)
    target = {"b": paddle.zeros([6])}
    load_state_dict(target, tmp_path, options=LoadOptions(aoa_config={"aoa_statements": ["a -> b"]}))
    assert target["b"].tolist() == [0, 1, 2, 3, 4, 5]
