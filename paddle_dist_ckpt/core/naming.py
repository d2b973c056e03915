"""Names of optimizer variables that are the same in every run: the parameter's structured name and the accumulator's.

Paddle calls an accumulator after its parameter's variable, and numbers it: ``linear_0.w_0_moment1_0``. The numbers
depend on what else the process has made, and ``.dist`` stands behind a variable that was distributed. Here it is called
``layers.0.weight.moment1``. A master weight is called ``layers.0.weight.master_weight``; with one, the accumulators are
named after it: ``linear_0.w_0.dist_fp32_master_0_moment1_0``.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from .paths import join, plain_key

__all__ = [
    "OptimizerVariable",
    "canonical_paths",
    "is_learning_rate",
    "is_of_run",
    "optimizer_key",
    "parameters_of",
    "structured_variables",
    "variables_of_run",
]

_DIST = ".dist"
_MASTER = "master_weight"
_MASTERS = "/master_weights"
_SHARDED_MASTER = "w_0"
_OF_RUN = re.compile(r"_\d+\.[wb]_\d+(?:\.dist)?_\w+_\d+$")
_LEARNING_RATE = re.compile(r"/learning_rate_\d+$")
_ACCUMULATOR = re.compile(r"([^\W\d]\w*?)(?:_\d+)?")
_NUMBER = r"_\d+(?:\.dist)?(?:_deepcopy_\d+(?:\.dist)?)*"
# What follows a parameter's name. A copy of the parameter has a name that continues likewise, but is another parameter.
_REST = re.compile(rf"(?:_fp32_master{_NUMBER})?(?:_(?!deepcopy_\d)([^\W\d]\w*?){_NUMBER})?")


class OptimizerVariable(NamedTuple):
    """An optimizer's variable in terms of a state_dict: its parameter's path, and the accumulator's name."""

    parameter: str
    accumulator: str


class _Variable(NamedTuple):
    """The variable name of an optimizer variable's parameter, and the accumulator's name."""

    parameter: str
    accumulator: str

    def key(self, structured: str) -> str:
        return f"{structured}.{self.accumulator}"


class _Found(NamedTuple):
    """An optimizer variable under Paddle's own name, and the container in which it gets another one."""

    path: str
    container: str
    variable: _Variable


def optimizer_key(key: str, parameters: Mapping[str, str]) -> str | None:
    """What an optimizer variable is called in every run.

    Args:
        key: Paddle's name of it, such as ``linear_0.w_0_moment1_0``.
        parameters: The structured name for each parameter's variable name. The longest one that fits is taken, and a
            ``.dist`` on one side only does not matter.

    Returns:
        For example ``fc.weight.moment1``, or None if it is not an optimizer variable of one of these parameters.
    """
    variable = _parse(key, parameters)
    return None if variable is None else variable.key(parameters[variable.parameter])


def canonical_paths(paths: Sequence[str], names: Sequence[str | None]) -> dict[str, str]:
    """The paths that optimizer variables have in every run.

    The parameters are found among the same entries. If an optimizer has entries of parameters from several containers
    (two models), and these share structured names, the container's own name is put before: ``d.fc.weight.moment1``.
    Entries that would get one path, or one that exists already, are left out.

    Args:
        paths: Those of all tensors of a checkpoint or of a state_dict.
        names: The framework's name of each tensor's variable, or None.

    Returns:
        The new path for each path that ends in Paddle's own name of an optimizer variable.
    """
    if not any(map(_may_be_variable, paths)):
        return {}
    parameters, known = _find_parameters(paths, names)
    if not parameters:
        return {}
    places = {name: path.rpartition("/")[0] for name, path in parameters.items()}
    structured = {name: _last(path) for name, path in parameters.items()}
    found = _find_variables(paths, parameters, known)
    ambiguous = _ambiguous_containers(found, places, structured)
    translated: dict[str, str] = {}
    for path, container, variable in found:
        name = structured[variable.parameter]
        model = places[variable.parameter]
        if model and container in ambiguous:
            name = f"{_last(model)}.{name}"
        translated[path] = join(container, variable.key(name))
    counts = Counter(translated.values())
    taken = set(paths)
    return {old: new for old, new in translated.items() if counts[new] == 1 and new not in taken}


def parameters_of(paths: Sequence[str], names: Sequence[str | None]) -> dict[str, str]:
    """The path of each parameter by its variable's name; the first one of several."""
    return _find_parameters(paths, names)[0]


def variables_of_run(
    paths: Sequence[str], names: Sequence[str | None], table: Mapping[str, str] | None = None
) -> dict[str, OptimizerVariable]:
    """The optimizer variables among tensors whose keys are Paddle's own, which differ from run to run.

    Args:
        paths: Those of all tensors of a checkpoint or of a state_dict.
        names: The framework's name of each tensor's variable, or None.
        table: The path of each parameter by its variable's name, if these are to be taken from elsewhere.
    """
    if not any(map(_may_be_variable, paths)):
        return {}
    parameters, known = _find_parameters(paths, names) if table is None else (table, {})
    found = _find_variables(paths, parameters, known)
    return {
        path: OptimizerVariable(parameters[variable.parameter], variable.accumulator) for path, _, variable in found
    }


def structured_variables(paths: Sequence[str], parameters: Iterable[str]) -> dict[str, OptimizerVariable]:
    """The optimizer variables among tensors whose keys begin with their parameter's structured name.

    Such keys are ``fc.weight.moment1``, and as optimizers' ``sharded_state_dict()`` has them ``fc.weight.moment1_0``
    and, for master weights, ``fc.weight.w_0``. With the container's own name before them, ``d.fc.weight.moment1``, they
    tell models apart.

    Args:
        paths: Those of tensors that may be such.
        parameters: The paths of tensors that may be parameters. Several that have a name in common are left out.
    """
    places: dict[str, set[str]] = defaultdict(set)
    for parameter in parameters:
        key = _last(parameter)
        places[key].add(parameter)
        container = parameter.rpartition("/")[0]
        if container:
            places[f"{_last(container)}.{key}"].add(parameter)
    found: dict[str, OptimizerVariable] = {}
    for path in paths:
        name, _, accumulator = _last(path).rpartition(".")
        several = places.get(name)
        match = _ACCUMULATOR.fullmatch(accumulator) if several is not None and len(several) == 1 else None
        if match is not None and several is not None:
            (parameter,) = several
            found[path] = OptimizerVariable(parameter, _MASTER if accumulator == _SHARDED_MASTER else match[1])
    return found


def is_of_run(key: str) -> bool:
    """Whether a flat key looks like Paddle's own name of an optimizer variable, such as ``linear_0.w_0_moment1_0``."""
    return _OF_RUN.search(key) is not None


def is_learning_rate(path: str) -> bool:
    """Whether a path ends in the name that the learning rate of a static-graph program has."""
    return _LEARNING_RATE.search(path) is not None


def _may_be_variable(path: str) -> bool:
    """Whether a path may end in Paddle's own name of an optimizer variable. Many a state has none of these."""
    if path[-1:].isdigit() or path.endswith(_DIST):
        return "_" in path.rpartition("/")[2] or _MASTERS in path
    return _MASTERS in path


def _parse(key: str, parameters: Mapping[str, object]) -> _Variable | None:
    end = key.rfind("_")
    while end > 0:
        parameter = _table_name(key[:end], parameters)
        if parameter is not None:
            match = _REST.fullmatch(key, end)
            if match is not None:
                return _Variable(parameter, match[1] or _MASTER)
        end = key.rfind("_", 0, end)
    return None


def _table_name(name: str, parameters: Mapping[str, object]) -> str | None:
    """A variable's name as a table has it, distributed or not; None if it does not."""
    if name in parameters:
        return name
    other = name[: -len(_DIST)] if name.endswith(_DIST) else name + _DIST
    return other if other in parameters else None


def _last(path: str) -> str:
    """The last part of a path, as a str."""
    part = path.rpartition("/")[2]
    return part if "~" not in part else plain_key("/" + part)


def _find_parameters(
    paths: Sequence[str], names: Sequence[str | None]
) -> tuple[dict[str, str], dict[str, _Variable | None]]:
    """The path of each parameter by its variable's name (the first one of several), and the names that were parsed."""
    first: dict[str, str] = {}
    for path, name in zip(paths, names, strict=True):
        if name is not None and (name not in first or path < first[name]):
            first[name] = path
    parameters: dict[str, str] = {}
    known: dict[str, _Variable | None] = {}
    for name in sorted(first):  # a parameter's name comes before those of its accumulators
        path = first[name]
        if path.rpartition("/")[0].endswith(_MASTERS):
            continue
        variable = known[name] = _parse(name, parameters)
        if variable is None or not _is_called_so(_last(path), name, variable):
            parameters[name] = path
    return parameters, known


def _is_called_so(last: str, name: str, variable: _Variable) -> bool:
    """Whether an entry has an optimizer variable's name, Paddle's or that of every run."""
    return last == name or last.endswith("." + variable.accumulator)


def _find_variables(
    paths: Sequence[str], parameters: Mapping[str, str], known: Mapping[str, _Variable | None]
) -> list[_Found]:
    found = []
    for path in paths:
        container, _, part = path.rpartition("/")
        key = part if "~" not in part else _last(path)
        if container.endswith(_MASTERS):
            parameter = _table_name(key, parameters)
            if parameter is not None:
                found.append(_Found(path, container[: -len(_MASTERS)], _Variable(parameter, _MASTER)))
            continue
        variable = known[key] if key in known else _parse(key, parameters)
        if variable is not None and parameters.get(key) != path:
            found.append(_Found(path, container, variable))
    return found


def _ambiguous_containers(
    found: Iterable[_Found], places: Mapping[str, str], structured: Mapping[str, str]
) -> set[str]:
    """The optimizers' containers with entries of parameters from several containers that share structured names."""
    models: dict[str, set[str]] = defaultdict(set)
    for _, container, variable in found:
        models[container].add(places[variable.parameter])
    several = {container: group for container, group in models.items() if len(group) > 1}
    if not several:
        return set()
    members: dict[str, set[str]] = defaultdict(set)
    for name, place in places.items():
        members[place].add(structured[name])
    return {container for container, group in several.items() if _share([members[place] for place in group])}


def _share(groups: Sequence[set[str]]) -> bool:
    return len(set().union(*groups)) < sum(len(group) for group in groups)
