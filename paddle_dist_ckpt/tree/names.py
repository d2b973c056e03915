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
from functools import cached_property
from typing import NamedTuple

from .paths import join, plain_key

__all__ = [
    "Names",
    "OptimizerVariable",
    "canonical_paths",
    "container_of",
    "is_of_run",
    "may_be_optimizers",
]

_DIST = ".dist"
_MASTER = "master_weight"
_MASTERS = "/master_weights"
_SHARDED_MASTER = ".w_0"
_ACCUMULATORS = (
    *("moment1", "moment2", "moment2_max", "moment", "velocity", "beta1_pow_acc", "beta2_pow_acc"),
    *("beta1_pow", "beta2_pow", "inf_norm", "momentum", "momentum_acc", "mean_square", "mean_grad"),
    *("_avg_squared_grad", "_avg_squared_update", "momentum_decay_pow", "mu_product", "rho", "d", "y", "m", "prevs"),
    *("learning_rates", "master_weight"),
)
_OF_RUN = re.compile(r"_\d+\.[wb]_\d+(?:\.dist)?_\w+_\d+$")
_LEARNING_RATE = re.compile(r"/learning_rate_\d+$")
_STRUCTURED = re.compile(rf"\.(?:({'|'.join(_ACCUMULATORS)})(?:_0)?|w_0)$")
_NUMBER = r"_\d+(?:\.dist)?(?:_deepcopy_\d+(?:\.dist)?)*"
# What follows a parameter's name. A copy of the parameter has a name that continues likewise, but is another parameter.
_REST = re.compile(rf"(?:_fp32_master{_NUMBER})?(?:_(?!deepcopy_\d)([^\W\d]\w*?){_NUMBER})?")


class OptimizerVariable(NamedTuple):
    """An optimizer's variable in terms of a state_dict: its parameter's path, and the accumulator's name.

    If only the name of the parameter's variable is known, and tensors at several paths have it, these are all there: as
    tied parameters have, models made under names of their own, and stages of a pipeline, which count for themselves.
    """

    parameters: tuple[str, ...]
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


def canonical_paths(paths: Sequence[str], names: Sequence[str | None]) -> dict[str, str]:
    """The paths that optimizer variables have in every run.

    The parameters are found among the same entries. If an optimizer has entries of parameters from several containers
    (two models), and these share structured names, the container's own name is put before: ``d.fc.weight.moment1``.
    Entries that would get one path, or one that exists already, are left out, and those of parameters that cannot be
    told from others in another container.

    Args:
        paths: Those of all tensors of a checkpoint or of a state_dict.
        names: The framework's name of each tensor's variable, or None.

    Returns:
        The new path for each path that ends in Paddle's own name of an optimizer variable.
    """
    if not any(map(_may_be_variable, paths)):
        return {}
    bearers, known = _find_parameters(paths, names)
    parameters = {name: group[0] for name, group in bearers.items() if len({_place(path) for path in group}) == 1}
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


class Names:
    """What the tensors of a checkpoint or of a state_dict are called, and which of them are an optimizer's variables.

    Args:
        paths: Their paths.
        names: The framework's name of each one's variable, or None.
    """

    def __init__(self, paths: Sequence[str], names: Sequence[str | None]) -> None:
        self.paths, self.names = paths, names

    @cached_property
    def variables(self) -> dict[str, OptimizerVariable]:
        """The optimizer variables, as far as something says whose they are.

        That is their key, if it is Paddle's name of one; or their variable's name, if the key is structured; or else
        the key alone, if it begins with a parameter's key and ends with the name of one of Paddle's accumulators.
        """
        parameters, known = _find_parameters(self.paths, self.names)
        found: dict[str, OptimizerVariable] = {}
        for path, name in zip(self.paths, self.names, strict=True):
            variable = self._of_run(path, parameters, known)
            if variable is not None:
                found[path] = OptimizerVariable(tuple(parameters[variable.parameter]), variable.accumulator)
                continue
            structured = self._by_name(path, name, parameters, known) or self.structured(path)
            if structured is not None:
                found[path] = structured
        return found

    @staticmethod
    def _of_run(
        path: str, parameters: Mapping[str, Sequence[str]], known: Mapping[str, _Variable | None]
    ) -> _Variable | None:
        container, _, part = path.rpartition("/")
        key = part if "~" not in part else _last(path)
        if container.endswith(_MASTERS):
            parameter = _table_name(key, parameters)
            return None if parameter is None else _Variable(parameter, _MASTER)
        variable = known[key] if key in known else _parse(key, parameters)
        return None if variable is None or path in parameters.get(key, ()) else variable

    @staticmethod
    def _by_name(
        path: str,
        name: str | None,
        parameters: Mapping[str, Sequence[str]],
        known: Mapping[str, _Variable | None],
    ) -> OptimizerVariable | None:
        variable = known.get(name) if name is not None else None
        if variable is None or path in parameters.get(name or "", ()):
            return None
        last = _last(path)
        end = next((end for end in _ends_of(variable.accumulator) if last.endswith(end)), None)
        if end is None:
            return None
        own = last[: -len(end)]
        group = parameters[variable.parameter]
        exact = [other for other in group if own in (_last(other), f"{_last(_place(other))}.{_last(other)}")]
        # Without one, the names are of several ranks that count for themselves, and this one says nothing.
        return OptimizerVariable(tuple(exact), variable.accumulator) if exact else None

    def structured(self, path: str) -> OptimizerVariable | None:
        """Which variable a path is by its structured key, of a parameter that is among these tensors.

        Such keys are ``fc.weight.moment1``, and as optimizers' ``sharded_state_dict()`` has them
        ``fc.weight.moment1_0`` and, for master weights, ``fc.weight.w_0``. With the container's own name before them,
        ``d.fc.weight.moment1``, they tell models apart.
        """
        match = _STRUCTURED.search(path)
        if match is None:
            return None
        candidates = self._by_key.get(_last(path[: match.start()]), [])
        if len(candidates) > 1:
            container = path.rpartition("/")[0]
            candidates = [other for other in candidates if other.rpartition("/")[0] == container]
        if len(candidates) != 1 or candidates[0] == path:
            return None
        return OptimizerVariable((candidates[0],), _MASTER if match[1] is None else match[1])

    @cached_property
    def _by_key(self) -> Mapping[str, list[str]]:
        places: dict[str, list[str]] = defaultdict(list)
        for path in self.paths:
            container, _, part = path.rpartition("/")
            key = part if "~" not in part else _last(path)
            places[key].append(path)
            if container:
                places[f"{_last(container)}.{key}"].append(path)
        return places

    @cached_property
    def learning_rates(self) -> list[str]:
        """The paths of static-graph programs' learning rates: that are called so and are under that name."""
        pairs = zip(self.paths, self.names, strict=True)
        return [path for path, name in pairs if name and _LEARNING_RATE.search(path) and _last(path) == name]


def may_be_optimizers(path: str) -> bool:
    """Whether a path may be an optimizer variable's, in any form. Many a state has none of these."""
    return _may_be_variable(path) or _STRUCTURED.search(path) is not None


def is_of_run(key: str) -> bool:
    """Whether a flat key looks like Paddle's own name of an optimizer variable, such as ``linear_0.w_0_moment1_0``."""
    return _OF_RUN.search(key) is not None


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


def container_of(path: str) -> str:
    """Where an entry is; that of a master weight in a dict of its own is its optimizer's."""
    return path.rpartition("/")[0].removesuffix(_MASTERS)


def _last(path: str) -> str:
    """The last part of a path, as a str."""
    part = path.rpartition("/")[2]
    return part if "~" not in part else plain_key("/" + part)


def _find_parameters(
    paths: Sequence[str], names: Sequence[str | None]
) -> tuple[dict[str, list[str]], dict[str, _Variable | None]]:
    """The paths of each parameter by its variable's name, ascending, and the names that were parsed."""
    bearers: dict[str, list[str]] = {}
    for path, name in zip(paths, names, strict=True):
        if name is not None:
            bearers.setdefault(name, []).append(path)
    parameters: dict[str, list[str]] = {}
    known: dict[str, _Variable | None] = {}
    for name in sorted(bearers):  # a parameter's name comes before those of its accumulators
        variable = known[name] = _parse(name, parameters)
        own = sorted(
            path
            for path in bearers[name]
            if not _place(path).endswith(_MASTERS)
            and (variable is None or not _is_called_so(_last(path), name, variable))
        )
        if own:
            parameters[name] = own
    return parameters, known


def _place(path: str) -> str:
    return path.rpartition("/")[0]


def _is_called_so(last: str, name: str, variable: _Variable) -> bool:
    """Whether an entry has an optimizer variable's name, Paddle's or that of every run."""
    return last == name or last.endswith(_ends_of(variable.accumulator))


def _ends_of(accumulator: str) -> tuple[str, ...]:
    """How structured keys end that are an accumulator's, here or in ``sharded_state_dict()``."""
    ends = (f".{accumulator}", f".{accumulator}_0")
    return (*ends, _SHARDED_MASTER) if accumulator == _MASTER else ends


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
