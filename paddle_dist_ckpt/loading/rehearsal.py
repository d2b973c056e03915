"""What a load of one process would do, without doing it: no file is opened, and no tensor needs memory."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from ..core.box import whole
from ..core.dtypes import DType
from ..core.garbage import no_collections
from ..core.parts import Arranged, Arranger, IdleStatement, Part, SourceTensor, WantedTensor
from ..core.shards import Kind
from ..core.tensors import Geometry, LocalShard, TensorView
from ..errors import UnsupportedValueError
from ..files.metadata import Metadata
from ..planning.recipe_parts import FilledRecipe, PartMaker, RecipeError, recipe_of
from ..recipes import Recipe
from ..tree.paths import join
from .answering import Answering
from .choosing import refused_keys
from .fit import Fit
from .making import RecipeArranger, unless_itself
from .messages import LoadAnswer, Mismatch, WantedPaths, WantedRecord
from .recipes import Matching, idle_hints, match_recipes, recipe_finder
from .stored import StoredShards
from .stored_tensors import stored_tensors
from .wanted import WantedState

__all__ = ["MadeTensor", "Rehearsal", "rehearse"]

_MOST_BYTES = 1 << 63
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
        made: The flat keys of what is made of stored tensors.
        tell: Says what is made for one of them. There may be very many.
        as_stored: The keys of tensors that are loaded as they are stored.
        left: What is left as it is, a line each.
        unused: The stored tensors that nothing asks for.
        problems: What does not fit, a line each, as the load would say it.
        nbytes: How many bytes are read.
        idle: Statements that change nothing, each with the reason.
    """

    made: list[str]
    tell: Callable[[str], MadeTensor]
    as_stored: list[str]
    left: list[str]
    unused: list[str]
    problems: list[str]
    nbytes: int
    idle: list[str]


@no_collections()
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

    Raises:
        UnsupportedValueError: all together has 2**63 bytes or more.
    """
    stored, sources, problems = stored_tensors(metadata), set[str](), list[str]()
    arranged: Mapping[str, Arranged | None] = {}
    idle: list[IdleStatement] = []
    keys = {join("", key): key for key in targets or ()}
    matching = match_recipes(recipes, keys) if targets is not None else Matching()
    answering = Answering(metadata, [0], [key for key, found in matching.patterns.items() if not found])
    if targets is None:
        made, sources, problems, unfit, *_ = RecipeArranger(recipes, rest).make(stored, answering.what_is)
        problems += [f"{key}: {text}" for key, text in unfit.items()]
        arranged = {key: one for key, one in made.items() if one is not None}
        problems += refused_keys(metadata, list(arranged))
        keys = {metadata.path_of[key] if one is None else join("", key): key for key, one in made.items()}
        idle = rest.idle(stored, None) if rest is not None else []
    elif rest is not None:
        whole_ones = {key: WantedTensor(s, dtype.name, [(0,) * len(s)]) for key, (s, dtype) in targets.items()}
        arranged = rest.arrange(stored, whole_ones)
        idle = rest.idle(stored, whole_ones)

    def outline(key: str) -> tuple[tuple[int, ...], DType]:
        if targets is not None:
            return targets[key]
        one = arranged.get(key)
        return (stored[key].shape, stored[key].dtype) if one is None else (one.shape, one.dtype_of(stored))

    wanted = _wanted(keys, outline, matching)
    unused = [key for key in stored if key not in sources]
    made, sources = {}, set()  # there may be very many
    answer = _answer(answering, wanted, keys, arranged)
    asked = answering.asked
    unused = [key for key in unused if metadata.path_of[key] not in asked]
    arranged, asked = {}, set()
    answering.forget()
    misfits, reads, nbytes = _fit(answer, wanted, cast)
    hint = idle_hints(idle)
    problems += [f"{problem}{hint(problem.key)}" for problem in misfits]
    bad = {problem.key for problem in misfits}
    teller = _Teller(stored, answer.parts, matching.recipes, recipes, reads)
    made_at = {path for path, key in keys.items() if teller.makes(path, key, key in bad)}
    others = made_at | answer.skipped.keys() | answer.unfit.keys()
    return Rehearsal(
        made=[key for path, key in keys.items() if path in made_at],
        tell=teller.tell,
        as_stored=[key for path, key in keys.items() if path not in others and key not in bad],
        left=[f"{key}: {answer.skipped[path]}" for path, key in keys.items() if path in answer.skipped],
        unused=unused,
        problems=problems,
        nbytes=nbytes,
        idle=list(map(str, idle)),
    )


class _Teller:
    """Tells of what is made, as it is asked for.

    Args:
        stored: What there is.
        parts: What the answer says of what is made, by path.
        written: The recipes of this rank, by path.
        recipes: All recipes.
        reads: How many bytes are read for each path.
    """

    def __init__(
        self,
        stored: Mapping[str, SourceTensor],
        parts: Mapping[str, Arranged],
        written: Mapping[str, FilledRecipe],
        recipes: Mapping[str, Recipe],
        reads: Mapping[str, int],
    ) -> None:
        self._stored, self._parts, self._written, self._reads = stored, parts, written, reads
        self._find, self._maker = recipe_finder(recipes), PartMaker(stored.__getitem__)

    def tell(self, key: str) -> MadeTensor:
        """What is made for a key."""
        path = join("", key)
        nbytes = self._reads.get(path, 0)
        if path in self._written:
            made = self._maker.make(self._written[path])
            return MadeTensor(key, made.shape, made.dtype, self._written[path].recipe, made.parts, nbytes)
        one, found = self._parts[path], self._find(key)
        recipe = recipe_of(one.parts, self._stored.__getitem__) if found is None else found[1].recipe
        return MadeTensor(key, one.shape, one.dtype_of(self._stored), recipe, one.parts, nbytes)

    def makes(self, path: str, key: str, is_bad: bool) -> bool:
        """Whether something is made there; of what does not fit perhaps not."""
        if path in self._parts:
            return unless_itself(key, self._parts[path], self._stored) is not None
        if path not in self._written or not is_bad:
            return path in self._written
        try:
            self._maker.make(self._written[path])
        except (RecipeError, KeyError):
            return False
        return True


class _Records(Mapping[str, WantedRecord]):
    """What is said of each of very many tensors: its key, by its path. They are made as they are asked for."""

    def __init__(self, keys: Mapping[str, str]) -> None:
        self._keys = keys

    def __getitem__(self, path: str) -> WantedRecord:
        return WantedRecord(self._keys[path], (), "", None)

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)


def _answer(
    answering: Answering, wanted: WantedState, keys: Mapping[str, str], arranged: Mapping[str, Arranged | None]
) -> LoadAnswer:
    """What the checkpoint has of it."""
    paths = WantedPaths(
        wanted.tensors.paths,
        made=list(wanted.made.recipes),
        sources=wanted.made.sources,
        records=_Records(keys if arranged else {}),
    )
    ((_, answer),) = answering.answer(paths, arranged)
    return answer


def _fit(answer: LoadAnswer, wanted: WantedState, cast: bool) -> tuple[list[Mismatch], dict[str, int], int]:
    """What of it does not fit; and how many bytes are read for each path that is made, and for all."""
    fit = Fit(StoredShards(answer, wanted.tensors.paths), answer, wanted, cast, (), None)
    return fit.problems, *fit.needs.bytes_to_read([*answer.parts, *wanted.made.recipes])


def _wanted(
    keys: Mapping[str, str], outline: Callable[[str], tuple[tuple[int, ...], DType]], matching: Matching
) -> WantedState:
    """What a rank would ask for that has these tensors whole, by path. Their memory is none, at addresses that are
    theirs alone."""
    wanted, address = WantedState(made=matching), 1 << 12

    @functools.lru_cache(maxsize=256)  # most are like one of the latest
    def geometry(shape: tuple[int, ...], dtype: DType) -> Geometry:
        return Geometry(Kind.TENSOR, dtype, shape, True, (LocalShard(whole(shape)),))

    for path, key in keys.items():
        shape, dtype = outline(key)
        wanted.tensors.add(path, TensorView(geometry(shape, dtype), (address,), None, None))
        address += math.prod(shape) * dtype.itemsize + 64
        if address >= _MOST_BYTES:
            raise UnsupportedValueError(f"{key}: with this, there are more bytes than a process can have memory for")
    return wanted
