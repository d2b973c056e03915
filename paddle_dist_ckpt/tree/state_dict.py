"""Takes a state_dict apart into leaves with paths; :mod:`.building` puts leaves together again."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ..core.tensors import TensorAdapter
from ..errors import UnsupportedValueError
from .canonical import canonical_paths
from .objects import ObjectKind, OpenedObject, is_stateful, set_state, state_of
from .paths import ListIndex, Part, TupleIndex, join_all, plain_key

__all__ = ["Adapter", "Leaves", "PerRank", "flatten"]

_MAX_DEPTH = 200
_KEYS = "keys above a tensor must be str or int (of 64 bits)"
_INT64 = range(-(2**63), 2**63)
_PLAIN = frozenset({int, float, str, bool, bytes, complex, type(None)})
"""Types of values that are leaves, of which a list or dict may have millions."""


@dataclass(slots=True)
class PerRank:
    """A value of which every rank keeps its own: the state of a random generator, a position in the data.

    Other values must be equal on all ranks and are stored once. This one is stored for each rank, and a load gives it
    back to the rank of the same number, in a new ``PerRank``; for another number of ranks see ``LoadOptions.per_rank``.

    Attributes:
        value: Anything that can be a value in a state_dict, and numpy arrays; no paddle Tensors.

    Examples:
        >>> from paddle_dist_ckpt import PerRank, load_state_dict, rng_state, save_state_dict, set_rng_state
        >>> report = save_state_dict({"rng": PerRank(rng_state())}, "checkpoint")
        >>> state = {"rng": PerRank(None)}
        >>> report = load_state_dict(state, "checkpoint")
        >>> set_rng_state(state["rng"].value)
    """

    value: Any


@dataclass(frozen=True, slots=True, eq=False)
class Leaves:
    """The entries of a flattened state_dict in its own order (those of objects last), tensors and values apart.

    ``objects`` are the objects that have a state_dict of their own, an outer one before those in it. ``kept`` are
    tensors that were left out, by path: a load leaves them as they are, whether something is stored for them or not.
    ``repeated`` are containers and objects that were found again, by path, each with the path where it was found first.
    """

    tensor_paths: list[str] = field(default_factory=list)
    tensors: list[Any] = field(default_factory=list)
    value_paths: list[str] = field(default_factory=list)
    values: list[Any] = field(default_factory=list)
    objects: list[OpenedObject] = field(default_factory=list)
    kept: dict[str, Any] = field(default_factory=dict)
    repeated: dict[str, str] = field(default_factory=dict)


class Adapter(TensorAdapter, Protocol):
    """All that a save or a load needs to know of a framework: its tensors, and its objects with states of their own.

    What is here is so of one that has neither optimizers nor other objects of its own.
    """

    def is_object(self, value: Any) -> bool:
        """Whether a value is an object with a state_dict of its own, as :func:`.objects.is_stateful` or as it knows."""
        return is_stateful(value)

    def open_object(self, value: Any, key: str) -> tuple[ObjectKind, dict[Any, Any]]:
        """What kind an object is of, and its state_dict.

        Raises:
            UnsupportedValueError: it has none.
        """
        return ObjectKind.FREE, state_of(value, key)

    def restore(self, value: Any, state: dict[Any, Any]) -> list[str]:
        """Give an object its state back, of which the tensors that it has already are filled.

        Args:
            value: The object.
            state: The dict that :meth:`open_object` gave, with other values; or another one, for a FREE object.

        Returns:
            The entries that it is known not to take.
        """
        set_state(value, state)
        return []

    def change(self, tensors: Sequence[Any]) -> None:
        """Have the framework know that what these tensors hold changes, which it does not see."""
        return

    def renew(self, leaves: Leaves, filled: Collection[int], lacking: Collection[int]) -> Collection[int]:
        """Set what follows from tensors that were filled, as master weights of parameters do; returns their tokens.

        Args:
            leaves: What is in the state_dict, whose objects have not been given their states yet.
            filled: The tokens of the tensors that were filled.
            lacking: The tokens of those for which nothing was stored, which may be set.
        """
        return ()

    def is_defined_by_user(self, value: Any) -> bool:
        """Whether an object that asks for the entries that it has now is of a class whose ``state_dict()`` and setter
        are the user's: if entries appear later, nobody else knows of them."""
        return False

    def parameters(self, value: Any) -> list[int]:
        """The tokens of the parameters that an optimizer steps, as far as it tells them."""
        return []

    def needs_all_entries(self, value: Any) -> bool:
        """Whether an object refuses a state that lacks an entry which it has now."""
        return False

    def may_be_disabled(self, value: Any) -> bool:
        """Whether an object may be disabled, and has an empty state then."""
        return False

    def frozen(self, value: Any) -> list[int]:
        """The tokens of the parameters of an optimizer that are not trained now, and have no entries in its state."""
        return []

    def make_entries(self, value: Any, parameters: Collection[int]) -> None:
        """Give an optimizer the entries that it would have if the parameters with these tokens were trained."""
        return

    def token(self, tensor: Any) -> int:
        """What a tensor and an optimizer's parameter have in common if they are the same."""
        return id(tensor)


def flatten(state_dict: dict[Any, Any], adapter: Adapter) -> Leaves:
    """The leaves of a state_dict.

    Dicts with str and int keys are taken apart, and lists and tuples that hold a tensor or an object somewhere. Objects
    are replaced by their state_dicts; an optimizer's entries are called after the parameters if these are there too.
    Everything else is a leaf: tensors, values, empty dicts, lists of values.

    Raises:
        TypeError: ``state_dict`` is not a dict.
        UnsupportedValueError: a tensor under a dict key that is neither str nor int, or a tree without an end.
    """
    given: Any = state_dict
    if not isinstance(given, dict):
        text = f"state_dict must be a dict, not {type(given).__name__}"
        if callable(getattr(given, "state_dict", None)):
            text += (
                "; pass {'model': model, 'optimizer': optimizer} or its state_dict(), or call save(path, model, "
                "optimizer) and load(path, model, optimizer)"
            )
        raise TypeError(text)
    odd = _odd_keys(state_dict)
    if odd:
        raise UnsupportedValueError(f"state_dict has the key {_shown(odd[0])}; {_KEYS}")
    flattening = _Flattening(adapter)
    flattening.add("", state_dict, 0)
    flattening.open_objects()
    flattening.name_after_parameters()
    return flattening.leaves


class _Flattening:
    """Collects the leaves of one state_dict."""

    def __init__(self, adapter: Adapter) -> None:
        self.leaves = Leaves()
        self._adapter, self._is_tensor = adapter, adapter.is_tensor
        self._found: list[tuple[str, Any, int]] = []  # objects that are not open yet, with the depth at which they are
        self._places: dict[int, str] = {}  # where containers and objects were found first, by their ids

    def add(self, path: str, parts: Mapping[Part, Any], depth: int) -> None:
        """Add what is in a container."""
        leaves, is_tensor = self.leaves, self._is_tensor
        children = join_all(path, parts)
        if self._are_tensors(parts.values()):  # which many a large container has alone
            leaves.tensor_paths.extend(children)
            leaves.tensors.extend(parts.values())
            return
        for child, value in zip(children, parts.values(), strict=True):
            if type(value) in _PLAIN:
                leaves.value_paths.append(child)
                leaves.values.append(value)
                continue
            if is_tensor(value):
                leaves.tensor_paths.append(child)
                leaves.tensors.append(value)
                continue
            try:
                below = self._children(child, value, depth)
                if below is not None:
                    if type(value) is not tuple:  # which a load replaces
                        self._note(child, value)
                    self.add(child, below, depth + 1)
                    continue
            except RecursionError:
                raise UnsupportedValueError(f"{plain_key(child)[:80]}: nested too deeply, or contains itself") from None
            if self._adapter.is_object(value):
                self._note(child, value)
                self._found.append((child, value, depth))
            else:
                leaves.value_paths.append(child)
                leaves.values.append(value)

    def _note(self, path: str, value: Any) -> None:
        """Note where a container or an object is, which all stay alive."""
        first, repeated = self._places.setdefault(id(value), path), self.leaves.repeated
        above, name = path.rpartition("/")[::2]
        if first != path and f"{repeated.get(above)}/{name}" != first:  # else what it is in was found again as well
            repeated[path] = first

    def _are_tensors(self, values: Collection[Any]) -> bool:
        """Whether all are tensors. Of a type whose instances all are, and of which there may be many, one is asked."""
        types = set(map(type, values))
        return types <= self._adapter.tensor_types or all(map(self._is_tensor, values))

    def _children(self, path: str, value: Any, depth: int) -> Mapping[Part, Any] | None:
        """The parts of a container that is taken apart, or None for a leaf."""
        if depth > _MAX_DEPTH:
            raise UnsupportedValueError(
                f"{plain_key(path)[:80]}: nested deeper than {_MAX_DEPTH} levels, or contains itself"
            )
        if isinstance(value, dict) and value:
            odd = _odd_keys(value)
            if not odd:
                return value
            if _holds(value.values(), self._is_apart, set()):
                raise UnsupportedValueError(
                    f"{plain_key(path)}: holds tensors, and has the key {_shown(odd[0])}; {_KEYS}"
                )
        elif isinstance(value, (list, tuple)) and _holds(value, self._is_apart, set()):
            if type(value) not in (list, tuple):
                raise UnsupportedValueError(
                    f"{plain_key(path)}: a {type(value).__name__} of tensors cannot be stored; use a tuple"
                )
            place = ListIndex if type(value) is list else TupleIndex
            return {place(i): child for i, child in enumerate(value)}
        return None

    def _is_apart(self, value: Any) -> bool:
        """Whether a value is never a part of a larger one."""
        return self._is_tensor(value) or isinstance(value, PerRank) or self._adapter.is_object(value)

    def open_objects(self) -> None:
        """Replace the objects by their state_dicts."""
        leaves = self.leaves
        while self._found:
            path, value, depth = self._found.pop(0)
            kind, state = self._adapter.open_object(value, plain_key(path))
            leaves.objects.append(OpenedObject(path, value, kind, state))
            below = self._children(path, state, depth)
            if below is not None:
                self.add(path, below, depth + 1)
            else:
                leaves.value_paths.append(path)
                leaves.values.append(dict(state))

    def name_after_parameters(self) -> None:
        """Rename the entries of optimizers and of programs.

        The parameters of an optimizer are those that it steps, if they are in the state_dict; or else any.
        """
        leaves, adapter = self.leaves, self._adapter
        named = [opened for opened in leaves.objects if opened.kind in (ObjectKind.OPTIMIZER, ObjectKind.PROGRAM)]
        if not named:
            return
        names = adapter.names(leaves.tensors)
        paths = list(leaves.tensor_paths)
        numbers: dict[int, int] = {}
        for i in sorted(range(len(paths)), key=paths.__getitem__):
            numbers.setdefault(adapter.token(leaves.tensors[i]), i)
        for opened in named:
            inside = [i for i, path in enumerate(paths) if path.startswith(opened.path + "/")]
            is_optimizer = opened.kind is ObjectKind.OPTIMIZER
            tokens = adapter.parameters(opened.value) if is_optimizer else []
            own = [numbers[token] for token in tokens if token in numbers]
            rest = range(len(paths)) if is_optimizer and not own else sorted({*inside, *own})
            canonical = canonical_paths([paths[i] for i in rest], [names[i] for i in rest])
            for i in inside:
                leaves.tensor_paths[i] = canonical.get(paths[i], paths[i])


def _odd_keys(keys: Iterable[Any]) -> list[Any]:
    """Those that cannot stand above a tensor."""
    if set(map(type, keys)) == {str}:
        return []
    return [key for key in keys if type(key) is not str and (type(key) is not int or key not in _INT64)]


def _shown(key: Any) -> str:
    return "of more than 64 bits" if type(key) is int else repr(key)[:80]


def _holds(values: Collection[Any], is_apart: Callable[[Any], bool], seen: set[int]) -> bool:
    """Whether one such is among the values or in containers among them. ``seen`` are containers without one."""
    for value in values if not _PLAIN.issuperset(map(type, values)) else ():
        if is_apart(value):
            return True
        if not isinstance(value, (dict, list, tuple)) or id(value) in seen:
            continue
        seen.add(id(value))
        if _holds(value.values() if isinstance(value, dict) else value, is_apart, seen):
            return True
    return False
