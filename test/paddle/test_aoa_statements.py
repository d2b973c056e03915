"""Statements of an aoa_config that nothing comes of, and those that Paddle's engine takes wrongly."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paddle_dist_ckpt import LoadOptions, LoadReport, StateDictMismatchError, load_merged_state_dict, save_state_dict
from paddle_dist_ckpt.core.dtypes import DTYPES
from paddle_dist_ckpt.core.parts import SourceTensor
from paddle_dist_ckpt.paddle_adapter.aoa import PaddleArranger
from test.paddle.layouts import Array
from test.paddle.tensors import to_array
from test.paddle.test_sharded_weight import assert_same, raise_first, saved, tensor_of

pytest.importorskip("paddle.distributed.flex_checkpoint.aoa.aoa_engine")  # before what cannot be imported without it

from test.paddle.test_aoa import STATES, array_of, cut, loaded, one_rank, saved_by_paddle, weights

SQUARE = {f"l.{i}.w": array_of((4, 4), "float32", i) for i in range(2)}


def zeros_like(arrays: dict[str, Array]) -> dict[str, Array]:
    return {key: np.zeros_like(array) for key, array in arrays.items()}


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_statement_that_stands_for_very_many_more_than_there_are_tensors_is_refused() -> None:
    name = "l.$LAYER_ID.e.$EXPERT_ID.w"
    stored = {f"l.{i}.e.{j}.w": SourceTensor((4, 4), DTYPES["float32"]) for i in range(40) for j in range(40)}
    arranger = PaddleArranger({"aoa_statements": [f"{name}^T -> {name}"], "enable_traceback": False})
    assert len(arranger.arrange(stored, None)) == 1600
    stored = {f"l.{i}.e.{i}.w": one for i, one in enumerate(stored.values())}
    with pytest.raises(ValueError, match=r"stands for 2,560,000 statements.*the checkpoint has 1,600 tensors"):
        arranger.arrange(stored, None)


# -- statements that nothing comes of ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("statements", "said"),
    [
        (["l.$LAYER_ID.ww^T -> l.$LAYER_ID.w"], ["no stored tensor is like it"]),
        (["l.0.w^T -> l.0.v"], ["nothing asks for l.0.v"]),
        (["l.0.w -> t", "t^T -> u", "l.1.w -> l.0.w"], ["nothing asks for t", "nothing asks for u"]),
        (["l.$LAYER_ID.w -> l.$LAYER_ID.t", "l.0.t -> l.0.w"], []),
        (
            ["l.$LAYER_ID.w -> l.$LAYER_ID.t", "l.$LAYER_ID.t^T -> l.$LAYER_ID.w"],
            ["nothing asks for l.0.t, l.1.t", "no stored tensor is like it"],
        ),
        (["l.$LAYER_ID.w^T -> l.$LAYER_ID.w", "other -> _"], ["other is not stored"]),
        (["l.0.w -> t", "t^T -> u", "u -> l.0.w"], []),
        (["l.0.w -> x, l.0.w, axis=0", "l.0.w, x -> l.0.w, axis=0"], []),
        (["l.1.w -> _", "_ -> l.0.w", "_ -> gone"], ["nothing asks for gone"]),
    ],
)
def test_what_changes_nothing_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, statements: list[str], said: list[str]
) -> None:
    save_state_dict({key: tensor_of(array) for key, array in SQUARE.items()}, tmp_path)
    states: list[dict[str, Any]] = [
        {key: tensor_of(array) for key, array in zeros_like(SQUARE).items()} for _ in range(2)
    ]
    caplog.clear()
    raise_first(loaded(tmp_path, states, {"aoa_statements": statements, "enable_traceback": False}))
    warnings = warnings_of(caplog)
    assert len(warnings) == (1 if said else 0)
    if said:
        assert warnings[0].startswith(f"aoa_config: {len(said)} statement(s) change nothing in this load: ")
        assert len(warnings[0].split("; ")) == len(said)
        assert all(f"({reason})" in warnings[0] for reason in said)


def test_the_first_five_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    statements = [f"l.0.w -> x{i}" for i in range(7)]
    raise_first([one_rank(tmp_path, SQUARE, zeros_like(SQUARE), statements)])
    (warning,) = warnings_of(caplog)
    assert "7 statement(s)" in warning
    assert "'l.0.w -> x4' (nothing asks for x4); ..." in warning
    assert "x5" not in warning


@pytest.mark.parametrize(
    ("statements", "wanted", "said"),
    [
        (["m.$LAYER_ID -> l.$LAYER_ID.w"], ["m.0", "m.1"], ""),
        (["m -> t", "t -> l.0.w"], ["m"], ""),
        (["m.$LAYER_ID -> l.$LAYER_ID.ww"], ["l.0.w"], "no stored tensor is like it"),
        (["m.$LAYER_ID -> l.$LAYER_ID.w"], ["l.0.w"], "nothing asks for m.0, m.1"),
    ],
)
def test_in_reverse(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, statements: list[str], wanted: list[str], said: str
) -> None:
    save_state_dict({key: tensor_of(array) for key, array in SQUARE.items()}, tmp_path)
    caplog.clear()
    target = {key: tensor_of(np.zeros((4, 4), "float32")) for key in wanted}
    config = {"aoa_statements": statements, "aoa_config_reverse": True, "enable_traceback": False}
    raise_first(loaded(tmp_path, [target], config))
    assert [text.partition("(s)")[2] for text in warnings_of(caplog)] == (
        [f" change nothing in this load: {statements[0]!r} ({said})"] if said else []
    )


def test_statements_about_states_are_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    arrays = {f"l.0.w{state}": array_of((4, 4), "float32", i) for i, state in enumerate(STATES)}
    statements = ["l.$LAYER_ID.w^T -> l.$LAYER_ID.w"]
    targets = zeros_like(arrays)
    raise_first([one_rank(tmp_path, arrays, targets, statements)])
    assert all((targets[key] == array.T).all() for key, array in arrays.items())
    raise_first([one_rank(tmp_path, arrays, {}, ["a -> b", *statements])])  # nothing is asked for
    assert [text for text in warnings_of(caplog) if "no entries" not in text] == []
    caplog.clear()
    raise_first([one_rank(tmp_path, arrays, zeros_like(arrays), ["l.$LAYER_ID.v^T -> l.$LAYER_ID.v", *statements])])
    assert len(warnings_of(caplog)) == 1


def test_all_that_is_said_must_be_used_if_all_is_to_be(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    statements = ["l.$LAYER_ID.ww^T -> l.$LAYER_ID.w", "l.0.w -> x"]
    targets = zeros_like(SQUARE)
    error = one_rank(tmp_path, SQUARE, targets, statements, strict="all")
    assert isinstance(error, StateDictMismatchError)
    assert error.problems == (
        "aoa_config: 'l.$LAYER_ID.ww^T -> l.$LAYER_ID.w' changes nothing: no stored tensor is like it",
        "aoa_config: 'l.0.w -> x' changes nothing: nothing asks for x",
    )
    assert not any(array.any() for array in targets.values())
    assert not warnings_of(caplog)
    raise_first([one_rank(tmp_path, SQUARE, targets, ["l.$LAYER_ID.w^T -> l.$LAYER_ID.w"], strict="all")])


@pytest.mark.parametrize("state", ["", ".moment1_0"])
def test_a_mismatch_names_the_statement_that_may_have_been_meant(tmp_path: Path, state: str) -> None:
    arrays = {f"l.{i}.g{state}": array_of((4, 6), "float32", i) for i in range(2)}
    targets = {key: np.zeros((6, 4), "float32") for key in arrays}
    statements = ["m.$LAYER_ID.h^T -> m.$LAYER_ID.h", "l.$LAYER_ID.gg^T -> l.$LAYER_ID.g"]
    error = one_rank(tmp_path, arrays, targets, statements)
    assert isinstance(error, StateDictMismatchError)
    for key, line in zip(arrays, error.problems, strict=True):
        assert line == (
            f"{key}: the target has shape [6, 4], the checkpoint [4, 6], its transpose; "
            "'l.$LAYER_ID.gg^T -> l.$LAYER_ID.g' names it, but changes nothing: no stored tensor is like it"
        )


def test_of_all_that_is_made_what_is_not_chosen_is_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_state_dict({key: tensor_of(array) for key, array in SQUARE.items()}, tmp_path)
    caplog.clear()
    for statements in (["l.0.w -> x"], ["l.$LAYER_ID.ww -> m.$LAYER_ID"]):
        options = LoadOptions(aoa_config={"aoa_statements": statements, "enable_traceback": False})
        assert set(load_merged_state_dict(tmp_path, keys="l.1.*", options=options)) == {"l.1.w"}
    (warning,) = warnings_of(caplog)
    assert "'l.$LAYER_ID.ww -> m.$LAYER_ID' (no stored tensor is like it)" in warning


# -- statements that cannot be done ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("statements", "reverse", "place", "text"),
    [
        (["l.0.w -> v, z, axis=2", "l.0.w -> t", "t -> l.0.w"], False, 0, "tuple index out of range"),
        (["l.0.w -> t", "t -> v, x, y, axis=0", "t -> l.0.w"], False, 1, "not divisible by the number of right_vars"),
        (["l.0.w -> t", "t -> u", "l.$LAYER_ID.w -> v"], False, 2, "must contain all of the following keys"),
        (["gone -> v"], False, 0, "gone should be assigned before"),
        (["u -> t", "v -> u, premute='[1, 0]'", "u -> l.0.w"], True, 1, "Unsupported attribute"),
        (["v -> gone", "u -> t", "t -> l.0.w"], True, 0, "gone should be assigned before"),
    ],
)
def test_the_statement_at_fault_is_named(
    tmp_path: Path, statements: list[str], reverse: bool, place: int, text: str
) -> None:
    """Else whoever has hundreds of them would not know where to look. Paddle's engine says it of some errors only."""
    save_state_dict({key: tensor_of(array) for key, array in SQUARE.items()}, tmp_path)
    states: list[dict[str, Any]] = [{"v": tensor_of(np.full((4, 4), 7, "float32"))} for _ in range(2)]
    config = {"aoa_statements": statements, "aoa_config_reverse": reverse, "enable_traceback": False}
    for error in loaded(tmp_path, states, config):
        assert isinstance(error, ValueError), error
        assert text in str(error)
        assert str(error).endswith(f", in the statement {statements[place]!r}")
    assert all((to_array(state["v"]) == 7).all() for state in states)


# -- numbers of parts, in reverse --------------------------------------------------------------------------------------


FUSED = [
    ("gate, up -> f, fused_ffn", {"gate": (4, 8), "up": (4, 8)}),
    ("x.$LAYER_ID.gate, x.$LAYER_ID.up -> x.$LAYER_ID.f, fused_ffn", {"x.0.gate": (4, 8), "x.0.up": (4, 8)}),
    ("q, k, v -> f, fused_qkv_old, num_heads=2, num_key_value_groups=2", {"q": (4, 4), "k": (4, 4), "v": (4, 4)}),
]


@pytest.mark.parametrize("state", ["", ".moment1_0"])
@pytest.mark.parametrize("paddles", [False, True])
@pytest.mark.parametrize(("statement", "shapes"), FUSED)
def test_what_was_in_parts_is_not_taken_apart_in_reverse(
    tmp_path: Path, statement: str, shapes: dict[str, tuple[int, ...]], paddles: bool, state: str
) -> None:
    """The engine takes it for one part, and something else would come out."""
    width = sum(shape[1] for shape in shapes.values())
    array, key = array_of((4, width), "float32", 0), ("x.0.f" if "x." in statement else "f") + state
    config = {"aoa_statements": [statement], "aoa_config_reverse": True, "enable_traceback": False}
    text = "is in 2 parts"
    for how in ("columns", "rows") if paddles else ("columns",):
        parts, folder = {key: cut(how, array.shape, 2)}, tmp_path / how
        if paddles:
            saved_by_paddle(folder, {key: array}, parts, 2)
        else:
            raise_first(saved(folder, *(weights({key: array}, parts, rank) for rank in range(2))))
        states: list[dict[str, Any]] = [
            {name + state: tensor_of(np.full(shape, 7, "float32")) for name, shape in shapes.items()} for _ in range(2)
        ]
        for error in loaded(folder, states, config):
            assert isinstance(error, ValueError), error
            assert str(error).startswith(f"aoa_config: {key}")
            assert text in str(error)
            assert f"write {statement!r} forwards, without aoa_config_reverse" in str(error)
        assert all((to_array(one) == 7).all() for target in states for one in target.values())
        with pytest.raises(ValueError, match=text):
            load_merged_state_dict(folder, options=LoadOptions(aoa_config=config))


@pytest.mark.parametrize(("statement", "shapes"), FUSED)
def test_what_was_in_one_part_is_taken_apart_in_reverse(
    tmp_path: Path, statement: str, shapes: dict[str, tuple[int, ...]]
) -> None:
    width = sum(shape[1] for shape in shapes.values())
    array, key = array_of((4, width), "float32", 0), "x.0.f" if "x." in statement else "f"
    save_state_dict({key: tensor_of(array)}, tmp_path)
    target: dict[str, Any] = {name: tensor_of(np.zeros(shape, "float32")) for name, shape in shapes.items()}
    raise_first(loaded(tmp_path, [target], {"aoa_statements": [statement], "aoa_config_reverse": True}))
    assert_same(np.concatenate([to_array(tensor) for tensor in target.values()], axis=1), array)
    target[key] = tensor_of(np.zeros_like(array))  # whose ranks want it in two parts, which the engine would count
    parts = {name: cut("columns", tensor.shape, 2) for name, tensor in target.items()}
    states = [weights({name: to_array(tensor) for name, tensor in target.items()}, parts, rank) for rank in range(2)]
    for error in loaded(tmp_path, states, {"aoa_statements": [statement], "aoa_config_reverse": True}):
        assert isinstance(error, ValueError)
        assert f"{key} is in 2 parts" in str(error)


@pytest.mark.parametrize(
    ("statement", "shapes", "other"),
    [
        ("f -> gate, up, fused_ffn", {"gate": (4, 8), "up": (4, 8)}, "gate, up -> f, ..."),
        ("y.$LAYER_ID.f -> x.$LAYER_ID.g, x.$LAYER_ID.u, fused_ffn, axis=1", {"x.0.g": (4, 8), "x.0.u": (4, 8)},
         "x.0.g, x.0.u -> y.0.f, ..."),
        ("f -> q, k, v, fused_qkv_old, num_heads=2, num_key_value_groups=1", {"q": (4, 8), "k": (4, 4), "v": (4, 4)},
         "q, k, v -> f, ..."),
    ],
)  # fmt: skip
def test_parts_are_not_fused_in_reverse(
    tmp_path: Path, statement: str, shapes: dict[str, tuple[int, ...]], other: str
) -> None:
    """Paddle's engine ends with an AttributeError of its own."""
    arrays = {key: array_of(shape, "float32", i) for i, (key, shape) in enumerate(shapes.items())}
    save_state_dict({key: tensor_of(array) for key, array in arrays.items()}, tmp_path)
    state: dict[str, Any] = {"y.0.f" if "y." in statement else "f": tensor_of(np.full((4, 16), 7, "float32"))}
    (error,) = loaded(tmp_path, [state], {"aoa_statements": [statement], "aoa_config_reverse": True})
    assert isinstance(error, ValueError), error
    assert str(error).startswith(f"aoa_config: {statement!r} is not taken in reverse")
    assert f"write it the other way round, as '{other}', without aoa_config_reverse" in str(error)
    assert str(error).count(statement) == 1
    assert all((to_array(tensor) == 7).all() for tensor in state.values())


def test_fewer_heads_of_keys_and_values_are_not_taken_apart_in_reverse(tmp_path: Path) -> None:
    """Paddle's engine would give each of the three a third, of which merged loads would know nothing else."""
    save_state_dict({"f": tensor_of(array_of((4, 6), "float32", 0))}, tmp_path)
    statement = "q, k, v -> f, fused_qkv_old, num_heads=4, num_key_value_groups = 1"
    config = {"aoa_statements": [statement], "aoa_config_reverse": True}
    target: dict[str, Any] = {name: tensor_of(np.zeros((4, 4 if name == "q" else 1), "float32")) for name in "qkv"}
    for call in (
        lambda: raise_first(loaded(tmp_path, [target], config)),
        lambda: load_merged_state_dict(tmp_path, options=LoadOptions(aoa_config=config)),
    ):
        with pytest.raises(ValueError, match="is not taken in reverse") as raised:
            call()
        assert "write 'f -> q, k, v, ...' in its place, without aoa_config_reverse" in str(raised.value)


def test_forwards_it_is_taken_apart_by_its_parts(tmp_path: Path) -> None:
    array = array_of((4, 16), "float32", 0)
    parts = {"f": cut("columns", array.shape, 2)}
    raise_first(saved(tmp_path, *(weights({"f": array}, parts, rank) for rank in range(2))))
    target: dict[str, Any] = {name: tensor_of(np.zeros((4, 8), "float32")) for name in ("gate", "up")}
    (report,) = loaded(tmp_path, [target], {"aoa_statements": ["f -> gate, up, fused_ffn"]})
    assert isinstance(report, LoadReport)
    pieces = np.split(array, 4, axis=1)
    assert_same(to_array(target["gate"]), np.concatenate(pieces[::2], axis=1))
