"""What a load of one process would do, without doing it: no file is opened, and no tensor needs memory."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from ..core.box import whole
from ..core.dtypes import DType
from ..core.parts import Arranged, Arranger, IdleStatement, Part, SourceTensor, WantedTensor
from ..core.shards import Kind
from ..core.tensors import Geometry, LocalShard, TensorView
from ..files.metadata import Metadata
from ..planning.recipe_parts import FilledRecipe, PartMaker, RecipeError, recipe_of
from ..recipes import Recipe
from ..tree.paths import join
from .answering import Answering
from .fit import Fit
from .making import RecipeArranger, is_itself
from .messages import WantedPaths, WantedRecord
from .recipes import Matching, idle_hints, match_recipes
from .stored import StoredShards
from .stored_tensors import stored_tensors
from .wanted import WantedState

__all__ = ["MadeTensor", "Rehearsal", "rehearse"]

Outlines = Mapping[str, tuple[tuple[int, ...], DType]]
"""Shape and element type of tensors, by flat key."""


class MadeTensor(NamedTuple):
    """A wanted tensor that is made of others.

    Attributes:
        key: Its flat key.
        shape: Its shape.
        dtype: Its element type.
        recipe: What it is made of; None where no expression says it.
        parts: The same as boxes.
        nbytes: How many bytes are read for it: of all blocks that hold some of it.
    """

    key: str
    shape: tuple[int, ...]
    dtype: DType
    recipe: Recipe | None
    parts: list[Part]
    nbytes: int


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """What a load would do.

    Attributes:
        made: What is made of stored tensors.
        as_stored: The keys of tensors that are loaded as they are stored.
        left: What is left as it is, a line each.
        unused: The stored tensors that nothing asks for.
        problems: What does not fit, a line each, as the load would say it.
        nbytes: How many bytes are read.
        idle: Statements that change nothing, each with the reason.
    """

    made: list[MadeTensor]
    as_stored: list[str]
    left: list[str]
    unused: list[str]
    problems: list[str]
    nbytes: int
    idle: list[str]


def rehearse(
    metadata: Metadata,
    recipes: Mapping[str, Recipe],
    rest: Arranger | None = None,
    targets: Outlines | None = None,
    cast: bool = False,
) -> Rehearsal:
    """Find out what a load would do.

    Args:
        metadata: What the checkpoint holds.
        recipes: The recipes.
        rest: Says what other tensors are made of.
        targets: What is wanted; None for all that is made, and all that is left, as a merged load wants it.
        cast: See :class:`paddle_dist_ckpt.LoadOptions`.
    """
    stored, matching = stored_tensors(metadata), Matching()
    sources, problems = set[str](), list[str]()
    arranged: Mapping[str, Arranged | None] = {}
    idle: list[IdleStatement] = []
    if targets is None:
        made, sources, problems, unfit, *_ = RecipeArranger(recipes, rest).make(stored, Answering(metadata, []).what_is)
        problems += [f"{key}: {text}" for key, text in unfit.items()]
        targets, arranged = {key: (one.shape, one.dtype_of(stored)) for key, one in made.items()}, made
        idle = rest.idle(stored, None) if rest is not None else []
    else:
        matching = match_recipes(recipes, {join("", key): key for key in targets})
        if rest is not None:
            whole_ones = {key: WantedTensor(s, dtype.name, [(0,) * len(s)]) for key, (s, dtype) in targets.items()}
            arranged = rest.arrange(stored, whole_ones)
            idle = rest.idle(stored, whole_ones)
    wanted, records = _wanted(targets, matching)
    answering = Answering(metadata, [0], [key for key, found in matching.patterns.items() if not found])
    paths = WantedPaths(
        wanted.tensors.paths, {}, made=list(matching.recipes), sources=matching.sources, records=records
    )
    ((_, answer),) = answering.answer(paths, arranged)
    fit = Fit(StoredShards(answer, paths.tensors), answer, wanted, cast, (), None)
    reads, nbytes = fit.needs.bytes_to_read()
    tensors = [
        path for path, kind in zip(metadata.table.paths, metadata.table.kinds, strict=True) if kind != Kind.VALUE
    ]
    written = matching.recipes or match_recipes(recipes, {join("", key): key for key in targets}).recipes
    hint = idle_hints(idle)
    problems += [f"{problem}{hint(problem.key)}" for problem in fit.problems]
    keys = {path: record.key for path, record in records.items()}
    found = dict(_made(fit, keys, stored, written))
    bad, asked = {problem.key for problem in fit.problems}, answering.asked
    gone = {*fit.answer.skipped, *fit.answer.unfit}
    return Rehearsal(
        made=[one._replace(nbytes=reads.get(path, 0)) for path, one in found.items()],
        as_stored=[key for path, key in keys.items() if path not in found and path not in gone and key not in bad],
        left=[f"{key}: {fit.answer.skipped[path]}" for path, key in keys.items() if path in fit.answer.skipped],
        unused=[key for path in tensors if (key := metadata.key(path)) not in sources and path not in asked],
        problems=problems,
        nbytes=nbytes,
        idle=list(map(str, idle)),
    )


def _wanted(targets: Outlines, matching: Matching) -> tuple[WantedState, dict[str, WantedRecord]]:
    """What a rank that has these tensors whole would ask for, and what it would say of them. Their memory is none, at
    addresses that are theirs alone."""
    wanted, records, address = WantedState(made=matching), dict[str, WantedRecord](), 1 << 12
    for key, (shape, dtype) in targets.items():
        path, geometry = join("", key), Geometry(Kind.TENSOR, dtype, shape, True, (LocalShard(whole(shape)),))
        wanted.tensors.add(path, TensorView(geometry, (address,), None, None))
        records[path] = WantedRecord(key, shape, dtype.name, None)
        address += math.prod(shape) * dtype.itemsize + 64
    return wanted, records


def _made(
    fit: Fit, keys: Mapping[str, str], stored: Mapping[str, SourceTensor], written: Mapping[str, FilledRecipe]
) -> Iterator[tuple[str, MadeTensor]]:
    """What is made of stored tensors, by path; of what does not fit nothing."""
    recipes, parts = fit.wanted.made.recipes, fit.answer.parts
    maker = PartMaker(stored.__getitem__)
    for path, key in keys.items():
        if path in recipes:
            try:
                made = maker.make(recipes[path])
            except (RecipeError, KeyError):
                continue
            yield path, MadeTensor(key, made.shape, made.dtype, recipes[path].recipe, made.parts, 0)
        elif path in parts and not is_itself(key, parts[path], stored):
            one = parts[path]
            recipe = written[path].recipe if path in written else recipe_of(one.parts, stored.__getitem__)
            yield path, MadeTensor(key, one.shape, one.dtype_of(stored), recipe, one.parts, 0)
