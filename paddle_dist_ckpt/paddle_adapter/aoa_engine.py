"""Paddle's own engine for an ``aoa_config``: what is told to it, and what it says as parts of stored tensors.

To be imported where an ``aoa_config`` is carried out alone, for not every Paddle has the engine.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from paddle.distributed.flex_checkpoint.aoa import aoa_engine as paddles

from ..core.box import Box, whole
from ..core.dtypes import arithmetic_dtype, can_cast, dtype_named
from ..core.parts import Arranged, IdleStatement, Part, SourceTensor, WantedTensor
from .aoa_statements import OF_PARTS, Statements, check_numbers

__all__ = ["arranged", "engine_of", "idle_statements"]

_POWERS = (".beta1_pow_acc_0", ".beta2_pow_acc_0")
_STATES = ("", ".w_0", ".moment1_0", ".moment2_0")  # that are cut as their parameter is

# A macro whose result depends on how many parts a tensor is in, and which is to fuse along rows.
_BY_ROWS = re.compile(rf"(?=.*,\s*({'|'.join(OF_PARTS)})\s*(,|$))(?=.*,\s*axis\s*=\s*['\"]?0\b)", re.DOTALL)


def arranged(
    config: dict[str, Any], stored: Mapping[str, SourceTensor], wanted: Mapping[str, WantedTensor] | None
) -> dict[str, Arranged | None]:
    """What the engine says of all that is wanted; of all that the statements make or leave if that is None."""
    engine = engine_of(config, stored, wanted)
    keys = wanted if wanted is not None else _all_outputs(engine, stored)
    return dict(_arrangements(engine, stored, keys))


class _Inputs(dict[str, Any]):
    """The engine's variables for stored tensors. One that is not there is None, which leaves the key to the load."""

    def __missing__(self, key: str) -> None:
        return None


class _StoredParts(Mapping[str, Any]):
    """What the engine asks about stored tensors: which there are, and in how many parts their jobs had them.

    It fuses along columns if not told otherwise, so that the parts are those of columns where only these are known.
    """

    def __init__(self, stored: Mapping[str, SourceTensor], statements: Sequence[str]) -> None:
        self._stored = stored
        self._by_columns = not any(map(_BY_ROWS.match, statements))

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)

    def __contains__(self, key: object) -> bool:
        return key in self._stored

    def __getitem__(self, key: str) -> list[Any]:
        """The parts of a tensor, one for each place where a part starts; where that is not known, as those of its
        parameter or of a state of it."""
        one = self._stored[key]
        family = self._family(paddles.split_optimizer_state_key(key)[0])
        known = [tensor.offsets for tensor in (one, *family) if tensor.offsets]
        known += [tensor.columns for tensor in (one, *family) if tensor.columns and self._by_columns]
        if not known:
            raise ValueError(
                f"{key}: the checkpoint does not tell in how many parts the job that saved it had this tensor, since "
                "its rows were divided further when it was saved; LoadOptions(recipes=...) can say what is meant"
            )
        return [_description(key, one.shape, offset, one.dtype.name) for offset in known[0]]

    def _family(self, parameter: str) -> list[SourceTensor]:
        return [self._stored[parameter + state] for state in _STATES if parameter + state in self._stored]

    def tells_rows(self, parameter: str) -> bool:
        """Whether it is known how a tensor was cut along its rows, too; true of one that is not stored."""
        family = self._family(parameter)
        return not family or any(one.offsets for one in family)


def _wanted_parts(wanted: Mapping[str, WantedTensor] | None) -> dict[str, list[Any]] | None:
    """What the engine asks about wanted tensors; None if it is to make all that it can."""
    if wanted is None:
        return None
    return {
        key: [_description(key, tensor.shape, offset, tensor.dtype) for offset in tensor.offsets]
        for key, tensor in wanted.items()
    }


def _description(key: str, shape: Sequence[int], offset: Sequence[int], dtype: str) -> Any:
    return paddles.ShardedWeightDesc(key, tuple(shape), tuple(shape), tuple(offset), dtype)


def engine_of(
    config: dict[str, Any], stored: Mapping[str, SourceTensor], wanted: Mapping[str, WantedTensor] | None
) -> Any:
    """Paddle's engine, when it has gone through all statements."""
    destinations = _wanted_parts(wanted)

    class Engine(paddles.AOAEngine):
        def build_input_vars(self) -> _Inputs:
            inputs = _Inputs()
            for key, tensor in sorted(stored.items()):
                parameter, state = paddles.split_optimizer_state_key(key)
                if state not in _POWERS and parameter not in inputs:
                    dtype = stored[parameter].dtype.name if parameter in stored else None
                    inputs[parameter] = self.make_input_tensor(parameter, tensor.shape, dtype)
            return inputs

        def shape_propagation(self) -> None:
            for one in (one for statement in self.statements for one in statement.attrs if one.key == "permute"):
                # Paddle 3.3.1 takes it for a cast of what has another shape. In reverse it makes a list of any axes.
                if not (self.aoa_config_reverse or str(one.value).startswith("[")):
                    raise ValueError(f"permute must be a list of axes, such as '[1, 0]', not {one.value!r}")
            # Paddle 3.3.1 takes a tensor that is split in one, or made of one, for the same under two names, of which
            # one is left where nothing is said to be wanted.
            for statement in self.statements:
                is_single = len(statement.left_vars) == len(statement.right_vars) == 1
                if is_single and [one.key for one in statement.attrs] == ["axis"]:
                    statement.attrs = []
            # And it has a stored tensor for one that is made under the same name there.
            self.destination_state_shard_info = destinations or {}
            super().shape_propagation()
            if destinations is None:
                stay = {key: one for key, one in self.input_vars.items() if key not in self.need_remove_input_vars}
                left = {key: one for key, one in {**stay, **self.intermediate_vars}.items() if not one.out_degree}
                self.output_vars = {key: self.identity(one) for key, one in left.items()}

    check_numbers(config, stored)
    sources = _StoredParts(stored, config["aoa_statements"])
    statements = Statements(config, sources, destinations)
    statements.check_counts()
    engine = Engine(config, sources, destinations)
    statements.check_rows(engine, sources.tells_rows)
    return engine


def idle_statements(
    config: Mapping[str, Any], stored: Mapping[str, SourceTensor], wanted: Mapping[str, WantedTensor] | None
) -> list[IdleStatement]:
    """The statements that change nothing."""
    return Statements(config, _StoredParts(stored, config["aoa_statements"]), _wanted_parts(wanted)).idle()


def _all_outputs(engine: Any, stored: Mapping[str, SourceTensor]) -> list[str]:
    """The keys of everything that the statements make or leave, parameters with their states."""
    states = {paddles.split_optimizer_state_key(key)[1] or "" for key in stored}
    return sorted(
        parameter + state
        for parameter, tensor in engine.output_vars.items()
        for state in states
        if any(source + state in stored for source, *_ in tensor.slices)
    )


def _arrangements(
    engine: Any, stored: Mapping[str, SourceTensor], keys: Iterable[str]
) -> Iterator[tuple[str, Arranged | None]]:
    """What each of some keys is made of; nothing of those that no statement is about."""
    dropped: set[str] = engine.need_remove_input_vars
    for key in keys:
        parameter, state = paddles.split_optimizer_state_key(key)
        tensor = engine.output_vars.get(parameter)
        if tensor is None:
            if parameter in engine.need_add_output_vars:
                yield key, None
            continue
        if tensor is engine.input_vars[parameter] and parameter not in dropped:
            continue
        slices = [one for one in tensor.slices if one[0] not in dropped]
        if slices and len(slices) < len(tensor.slices):
            raise ValueError(f"{key} is made of tensors some of which are dropped")
        if not slices:
            yield key, None
        elif state in _POWERS:
            sources = sorted(name + state for name, *_ in slices)
            source = next(filter(stored.__contains__, sources), sources[0])
            shape = stored[source].shape if source in stored else ()
            yield key, Arranged(shape, [Part(source, whole(shape), tuple(range(len(shape))), whole(shape))])
        else:
            suffix, shape = state or "", tuple(tensor.shape)
            parts = [_part(stored, suffix, *one) for one in slices]
            shapes = [tuple(engine.input_vars[source].shape) for source, *_ in slices]
            if any(part.key in stored and stored[part.key].shape != n for part, n in zip(parts, shapes, strict=True)):
                shape, parts = _alone(stored, shape, parts, shapes[0])  # only a state's can be another one
            yield key, Arranged(shape, parts)


def _alone(
    stored: Mapping[str, SourceTensor], shape: tuple[int, ...], parts: list[Part], parameter: tuple[int, ...]
) -> tuple[tuple[int, ...], list[Part]]:
    """The shape and parts of a state that is not of its parameter's shape: itself, if that is only renamed, or nothing,
    which does not fit."""
    one = parts[0]
    if len(parts) > 1 or one.key not in stored or (one.box, one.place) != (whole(parameter), whole(shape)):
        return shape, []
    if one.axes != tuple(range(len(parameter))):
        return shape, []
    own = tuple(stored[one.key].shape)
    return own, [Part(one.key, whole(own), tuple(range(len(own))), whole(own))]


def _part(
    stored: Mapping[str, SourceTensor],
    state: str,
    source: str,
    taken: Sequence[slice],
    given: Sequence[slice],
    operations: Sequence[str] | None,
) -> Part:
    """A slice of a stored tensor that becomes one of a wanted tensor, after permutations and casts in this order."""
    axes = tuple(range(len(taken)))
    dtypes = []
    for operation in operations or ():
        if operation.startswith("["):
            axes = tuple(axes[a] for a in ast.literal_eval(operation))
        elif not state:
            dtypes.append(operation)
    key = source + state
    return Part(key, _box(taken), axes, _box(given), _one_cast(key, stored.get(key), dtypes))


def _one_cast(key: str, stored: SourceTensor | None, names: Sequence[str]) -> str | None:
    """The one cast that does the same as several, one after the other."""
    if not names or stored is None:
        return None
    last = dtype_named(names[-1])
    now = stored.dtype
    for dtype in map(dtype_named, names):
        if not can_cast(now, dtype):
            raise ValueError(f"{key}: a cast from {now.name} to {dtype.name} is not done")
        exact = np.can_cast(arithmetic_dtype(stored.dtype), arithmetic_dtype(now), "safe")
        if dtype is not now and not exact:
            raise ValueError(f"{key}: a cast from {stored.dtype.name} by way of {now.name} would round twice")
        now = dtype
    return last.name


def _box(slices: Sequence[slice]) -> Box:
    return Box(tuple(one.start for one in slices), tuple(one.stop - one.start for one in slices))
