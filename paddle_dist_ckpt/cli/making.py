"""What recipes make of a checkpoint, in what can be printed."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from typing import Any

import msgspec

from ..core.dtypes import DType
from ..core.shards import Kind
from ..files.metadata import Metadata
from ..folder.checkpoint import read_checkpoint
from ..loading.rehearsal import MadeTensor, Rehearsal, rehearse
from ..options import LoadOptions
from ..storage.base import Storage
from ..storage.opening import open_to_read
from ..wiring import arranger_of
from .documents import Lazy
from .inspection import matches

__all__ = ["MadeFacts", "PartFacts", "RecipesFacts", "read_rules", "recipes_facts"]

_NAMES = ("recipes", "aoa_config")  # of what a file of Python has, if it is not said


@dataclass(frozen=True, slots=True)
class PartFacts:
    """A box of a stored tensor, and where it goes in the wanted one.

    ``axes`` says for each dimension of the wanted tensor which dimension of the stored tensor becomes it.
    """

    stored: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    axes: tuple[int, ...]
    to: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class MadeFacts:
    """A tensor that is made of stored ones; ``bytes`` are those that are read for it."""

    key: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    recipe: str | None
    parts: list[PartFacts]


@dataclass(frozen=True, slots=True)
class RecipesFacts:
    """What a load with recipes would do. ``left`` and ``problems`` are lines, ``idle`` statements that change nothing;
    ``bytes`` are all that are read."""

    path: str
    unique_id: int
    format: str
    made: Sequence[MadeFacts]
    as_stored: list[str]
    left: list[str]
    unused: list[str]
    problems: list[str]
    bytes: int
    idle: list[str]


def read_rules(given: str) -> LoadOptions:
    """Recipes or an aoa_config from a file that the user names.

    Args:
        given: A JSON file with an ``aoa_config``, or with its statements; or a file of Python, which is run, perhaps
            with a colon and the name of what is meant in it.

    Raises:
        ValueError, TypeError: it has no such thing.
    """
    file, _, name = given.partition(".py:")
    if given.endswith(".json"):
        with open(open_to_read(given, anywhere=True), "rb") as opened:
            text = opened.read()
        try:
            return _as_options(given, msgspec.json.decode(text))
        except (msgspec.DecodeError, RecursionError) as error:
            raise ValueError(f"{given} is no JSON, or nested too deep: {error}") from None
    file = f"{file}.py" if name else given
    if not file.endswith(".py"):
        raise ValueError(f"{given}: recipes come from a file that ends with .json or .py")
    names = (name,) if name else _NAMES
    with redirect_stdout(sys.stderr):  # on stdout is what the command says alone
        try:
            found = runpy.run_path(file)
        except SystemExit as error:
            raise ValueError(f"{file} ends the program ({error}) before it has defined anything") from None
        rules = [found[each]() if callable(found[each]) else found[each] for each in names if each in found]
    if not rules:
        raise ValueError(f"{file} has no {' and no '.join(names)}; {file}:NAME names another")
    options = [_as_options(given, each) for each in rules]
    if len(options) == 1:
        return options[0]
    recipes = next((each.recipes for each in options if each.recipes is not None), None)
    aoa_config = next((each.aoa_config for each in options if each.aoa_config is not None), None)
    return LoadOptions(recipes=recipes, aoa_config=aoa_config)


def _as_options(given: str, rules: Any) -> LoadOptions:
    if isinstance(rules, Sequence) and not isinstance(rules, str):
        rules = {"aoa_statements": list(rules)}
    if not isinstance(rules, Mapping):
        raise TypeError(f"{given}: recipes are a mapping, an aoa_config is one too, not {type(rules).__name__}")
    if "aoa_statements" in rules or "aoa_config_reverse" in rules:
        return LoadOptions(aoa_config={**rules, "enable_traceback": False})  # which Paddle would print
    if given.endswith(".json"):
        raise ValueError(f"{given}: it has no aoa_statements; recipes are written in Python")
    return LoadOptions(recipes=rules)


def recipes_facts(
    storage: Storage, unique_id: int | None, rules: LoadOptions, into: Storage | None, pattern: str | None, cast: bool
) -> RecipesFacts:
    """What a load with these rules would do.

    Args:
        storage: The checkpoint.
        unique_id: Which of the folder.
        rules: Recipes, or an aoa_config.
        into: A checkpoint with tensors like those that are wanted; None for all that can be made.
        pattern: Of which keys to tell what is made.
        cast: Whether dtypes are converted without a word of the recipes.
    """
    metadata = read_checkpoint(storage, unique_id)
    targets = None if into is None else _outlines(read_checkpoint(into, None))
    try:
        found = rehearse(metadata, rules.recipes or {}, arranger_of(rules), targets, cast)
    except ValueError as error:
        if rules.aoa_config is None:
            raise
        found = Rehearsal([], dict[str, MadeTensor]().__getitem__, [], [], [], [str(error)], 0, [])
    return RecipesFacts(
        path=storage.location,
        unique_id=metadata.unique_id,
        format=metadata.format,
        made=Lazy([key for key in found.made if matches(key, pattern)], lambda key: _facts(found.tell(key))),
        as_stored=[key for key in found.as_stored if matches(key, pattern)],
        left=found.left,
        unused=found.unused,
        problems=found.problems,
        bytes=found.nbytes,
        idle=found.idle,
    )


def _outlines(metadata: Metadata) -> dict[str, tuple[tuple[int, ...], DType]]:
    table = metadata.table
    columns = zip(table.paths, table.layout_of.tolist(), table.dtypes, table.kinds.tolist(), strict=True)
    return {
        metadata.key(path): (table.layouts[layout].shape, dtype)
        for path, layout, dtype, kind in columns
        if kind != Kind.VALUE
    }


def _facts(made: MadeTensor) -> MadeFacts:
    recipe = None if made.recipe is None else str(made.recipe)
    parts = [PartFacts(part.key, part.box.offset, part.box.shape, part.axes, part.place.offset) for part in made.parts]
    return MadeFacts(made.key, made.shape, made.dtype.name, made.nbytes, recipe, parts)
