"""Options: what they take, and that they refuse the rest by name."""

from __future__ import annotations

import dataclasses
import inspect
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import paddle_dist_ckpt
from paddle_dist_ckpt import LoadOptions, SaveOptions, stored
from paddle_dist_ckpt.arguments import refuse_unused

BOTH = pytest.mark.parametrize("options", [SaveOptions, LoadOptions])


def test_the_defaults_are_those_that_are_documented() -> None:
    assert SaveOptions().check_replicas == "auto"
    assert SaveOptions().block_bytes == 1 << 20
    assert SaveOptions().timeout == LoadOptions().timeout == 300
    assert LoadOptions().strict
    assert not LoadOptions().cast
    assert LoadOptions().exchange == "auto"
    assert not SaveOptions().no_dist
    assert not LoadOptions().no_dist
    assert not SaveOptions().separate_folders
    assert not LoadOptions().separate_folders


@BOTH
def test_options_are_frozen_and_by_keyword_alone(options: Any) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        options().timeout = 5
    with pytest.raises(TypeError):
        options(5)
    with pytest.raises(TypeError):
        options(unknown=1)
    assert options(timeout=5) == options(timeout=5) != options(timeout=6)


@BOTH
@pytest.mark.parametrize("timeout", [0, -1, 0.0, math.nan, -math.inf, "5", None, [1]])
def test_a_timeout_is_a_positive_number(options: Any, timeout: Any) -> None:
    with pytest.raises(ValueError, match="timeout"):
        options(timeout=timeout)
    assert options(timeout=0.5).timeout == 0.5


@BOTH
@pytest.mark.parametrize("seconds", [0, -1, math.nan, math.inf, "5", True, [1]])
def test_a_bound_for_progress_is_a_positive_number_or_none(options: Any, seconds: Any) -> None:
    with pytest.raises(ValueError, match="progress_timeout must be a number of seconds"):
        options(progress_timeout=seconds)
    assert options().progress_timeout is None
    assert options(progress_timeout=0.5).progress_timeout == 0.5


@pytest.mark.parametrize("size", [0, 1, 2048, 5000, 4097, 128 << 20, -4096, 4096.0, "4096", None, True])
def test_a_block_is_a_power_of_two_in_bounds(size: Any) -> None:
    with pytest.raises(ValueError, match="block_bytes"):
        SaveOptions(block_bytes=size)


@pytest.mark.parametrize("size", [4096, 1 << 16, 64 << 20])
def test_blocks_from_the_smallest_to_the_largest(size: int) -> None:
    assert SaveOptions(block_bytes=size).block_bytes == size


@pytest.mark.parametrize("choice", ["", "Warn", None, True, "raise"])
def test_choices_are_named(choice: Any) -> None:
    with pytest.raises(ValueError, match=r"check_replicas.*'warn', 'error', 'off'"):
        SaveOptions(check_replicas=choice)
    with pytest.raises(ValueError, match=r"exchange.*'auto', 'always', 'never'"):
        LoadOptions(exchange=choice)


@pytest.mark.parametrize("choice", ["warn", "error", "off", "sampled"])
def test_every_choice_for_replicas(choice: Any) -> None:
    assert SaveOptions(check_replicas=choice).check_replicas == choice


@pytest.mark.parametrize("choice", ["auto", "always", "never"])
def test_every_choice_for_exchange(choice: Any) -> None:
    assert LoadOptions(exchange=choice).exchange == choice


@pytest.mark.parametrize("metadata", [[], "x", 5, [("a", 1)]])
def test_user_metadata_are_a_mapping(metadata: Any) -> None:
    with pytest.raises(TypeError, match="user_metadata"):
        SaveOptions(user_metadata=metadata)
    assert SaveOptions(user_metadata={"a": 1}).user_metadata == {"a": 1}


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({}, "it has none"),
        ({"aoa_config_reverse": True}, "it has none"),
        ({"aoa_statement": ["a -> b"]}, "it has 'aoa_statement'"),
        ({"aoa_statements": [], "reverse": True}, "it has 'reverse'"),
        ({"aoa_statements": [], 7: True}, "it has 7"),
        ({"aoa_statements": [], "aoa_config_reverse": "yes"}, "aoa_config_reverse of aoa_config"),
        ({"aoa_statements": [], "enable_traceback": None}, "enable_traceback of aoa_config"),
        ({"aoa_statements": None}, "list of str"),
        ({"aoa_statements": ["a -> b", 7]}, "list of str"),
        ([], "must be a mapping"),
    ],
)
def test_an_aoa_config_has_nothing_that_paddle_would_not_look_at(config: Any, text: str) -> None:
    with pytest.raises(TypeError, match=text):
        LoadOptions(aoa_config=config)


@pytest.mark.parametrize(
    "config",
    [{"aoa_statements": []}, {"aoa_statements": ("a -> b",), "aoa_config_reverse": True, "enable_traceback": False}],
)
def test_an_aoa_config(config: Any) -> None:
    assert LoadOptions(aoa_config=config).aoa_config == config


@pytest.mark.parametrize(
    ("function", "given", "hint"),
    [
        ("save_state_dict", {"check_replicas": "off"}, "options=SaveOptions(check_replicas=...)"),
        ("load_state_dict", {"strict": False, "key_map": {}}, "options=LoadOptions(strict=..., key_map=...)"),
        ("load_merged_state_dict", {"aoa_config": {}}, "options=LoadOptions(aoa_config=...)"),
        ("verify", {"progress": True}, "options=LoadOptions(progress=...)"),
        ("copy_checkpoint", {"progress": True}, "options=LoadOptions(progress=...)"),
        ("export", {"no_dist": True}, "options=LoadOptions(no_dist=...)"),
        ("export_state_dict", {"timeout": 5}, "options=SaveOptions(timeout=...)"),
        ("gather_state_dict", {"timeout": 5}, "options=SaveOptions(timeout=...)"),
        ("scatter_state_dict", {"timeout": 5}, "options=LoadOptions(timeout=...)"),
    ],
)
def test_an_option_that_is_passed_by_itself(function: str, given: dict[str, Any], hint: str) -> None:
    called = getattr(paddle_dist_ckpt, function)
    with pytest.raises(TypeError) as caught:
        called({}, "nowhere", **given)
    assert str(caught.value) == f"{function} takes no argument {next(iter(given))!r}; pass {hint}"
    assert list(inspect.signature(called).parameters)[-1] == "options"
    with pytest.raises(TypeError, match=r"^\w+\(\) got an unexpected keyword argument 'nonsense'"):
        called({}, "nowhere", nonsense=1)


@pytest.mark.parametrize("options", [{}, {"no_dist": True}, "off"])
def test_what_is_no_options_is_refused(tmp_path: Path, options: Any) -> None:
    pytest.importorskip("paddle")
    with pytest.raises(TypeError, match="options must be SaveOptions"):
        paddle_dist_ckpt.save_state_dict({}, tmp_path, options=options)
    with pytest.raises(TypeError, match="options must be LoadOptions, not SaveOptions"):
        paddle_dist_ckpt.load_state_dict({}, tmp_path, options=SaveOptions(no_dist=True))  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [-1, 1.0, "1", True])
def test_the_memory_of_a_snapshot_is_a_number_of_bytes_or_none(number: Any) -> None:
    with pytest.raises(ValueError, match="snapshot_bytes must be None or an integer of bytes, not "):
        SaveOptions(snapshot_bytes=number)
    assert SaveOptions(snapshot_bytes=0).snapshot_bytes == 0


@pytest.mark.parametrize("number", [0, -1, 1.5, "1", None, True])
def test_the_memory_that_stands_between_a_file_and_a_device_is_a_number_of_bytes(number: Any) -> None:
    with pytest.raises(ValueError, match="staging_bytes must be an integer of bytes above 0, not "):
        LoadOptions(staging_bytes=number)
    assert LoadOptions(staging_bytes=1).staging_bytes == 1


@pytest.mark.parametrize(
    ("kind", "name", "values", "error"),
    [
        (SaveOptions, "timeout", [True, 1_000_001], ValueError),
        (SaveOptions, "no_dist", [None, 0, "yes"], TypeError),
        (SaveOptions, "progress", [0, "yes"], TypeError),
        (SaveOptions, "separate_folders", [None, 1], TypeError),
        (SaveOptions, "when_busy", ["later", None, True], ValueError),
        (LoadOptions, "timeout", [True, 1_000_001], ValueError),
        (LoadOptions, "no_dist", [None, 0, "yes"], TypeError),
        (LoadOptions, "progress", [0, "yes"], TypeError),
        (LoadOptions, "separate_folders", [None, 1], TypeError),
        (LoadOptions, "cast", [None, 1], TypeError),
        (LoadOptions, "strict", [None, 1, "ALL"], TypeError),
        (LoadOptions, "per_rank", ["first", None], ValueError),
        (LoadOptions, "allow_missing", ["a", None, {"a"}, ["a", 1]], TypeError),
        (LoadOptions, "allow_unused", ["a", None, {"a"}, ["a", 1]], TypeError),
        (LoadOptions, "resize", [{1: 0}, {"a": True}, {"a": (0, 1, 2)}, {"a": [0, 1]}], TypeError),
        (LoadOptions, "key_map", ["a", [("a", "b")], {1: "a"}, {"a": 1}, {"a": "b", "c": 0}], TypeError),
        (LoadOptions, "recipes", ["a", [stored("a")], {1: stored("a")}, {"a": "b"}], TypeError),
        (LoadOptions, "recipes", [{"a.{i}": stored("b.{i}.{j}")}, {"a": stored("b.{i}")}], ValueError),
    ],
)
def test_what_an_option_does_not_take_is_refused_by_its_name(
    kind: Any, name: str, values: list[Any], error: type[Exception]
) -> None:
    for value in values:
        with pytest.raises(error, match=f"^{name}"):
            kind(**{name: value})


@pytest.mark.parametrize(
    ("kind", "name", "values"),
    [
        *((kind, "timeout", [1, 1_000_000]) for kind in (SaveOptions, LoadOptions)),
        *((kind, "progress_timeout", [None, 1, 1_000_000]) for kind in (SaveOptions, LoadOptions)),
        *((kind, "progress", [None, True, False]) for kind in (SaveOptions, LoadOptions)),
        (SaveOptions, "when_busy", ["wait", "raise"]),
        (LoadOptions, "strict", [True, False, "all"]),
        (LoadOptions, "per_rank", ["refuse", "by_rank", "coordinator"]),
        (LoadOptions, "allow_missing", [(), ["a"], ("a", "b.*")]),
        (LoadOptions, "key_map", [None, {}, {"a": "b", "c": None}, str.lower]),
        (LoadOptions, "recipes", [None, {}, {"a.{i}": stored("b.{i}")}]),
        (LoadOptions, "staging_bytes", [1, np.int64(5)]),
    ],
)
def test_what_an_option_takes(kind: Any, name: str, values: list[Any]) -> None:
    for value in values:
        assert getattr(kind(**{name: value}), name) == value


def test_an_option_that_a_function_leaves_aside_is_refused() -> None:
    names = ("cast", "key_map", "strict")
    refuse_unused("f", LoadOptions(strict=False, key_map={}, no_dist=True), names, "call g")
    with pytest.raises(ValueError, match=re.escape("f does not use LoadOptions(key_map=...): call g")):
        refuse_unused("f", LoadOptions(strict=False, key_map={"a": "b"}), names, "call g")


def test_numpys_numbers_are_numbers() -> None:
    """They become Python's, which other ranks can be sent, and which have no largest one."""
    saving = SaveOptions(
        timeout=np.int64(60),
        progress_timeout=np.float32(0.5),
        block_bytes=np.int32(1 << 16),
        snapshot_bytes=np.uint8(7),
    )
    loading = LoadOptions(timeout=np.float64(60), staging_bytes=np.int32(1 << 30))
    plain = (saving.timeout, saving.progress_timeout, saving.block_bytes, saving.snapshot_bytes)
    assert plain == (60, 0.5, 1 << 16, 7)
    assert [type(number) for number in plain] == [int, float, int, int]
    assert (type(loading.timeout), type(loading.staging_bytes)) == (float, int)
    LoadOptions(resize={"*": np.int64(0), "a": (np.int64(0), np.int64(5))})
    for bad in ({"a": -1}, {"a": (0, np.int64(-1))}, {"a": True}, {"a": 0.0}):
        with pytest.raises(TypeError, match="resize must have patterns"):
            LoadOptions(resize=bad)
