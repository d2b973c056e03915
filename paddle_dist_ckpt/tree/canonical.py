"""Paths of optimizer variables that are the same in every run, whatever it calls its variables; see :mod:`.names`."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

from .names import Names, VariableOfRun, last_part, may_end_in_name
from .paths import join, parent_of
from .variables import container_of

__all__ = ["canonical_paths"]


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
    if not any(map(may_end_in_name, paths)):
        return {}
    table = Names(paths, names)
    homes = {name: own[0] for name, own in table.parameters.items() if len(set(map(parent_of, own))) == 1}
    of_run = ((path, table.of_run(path)) for path in paths)
    found = [(path, one) for path, one in of_run if one is not None and one.parameter in homes]
    ambiguous = _ambiguous_containers(found, homes)
    translated: dict[str, str] = {}
    for path, (parameter, accumulator) in found:
        container, model, name = container_of(path), parent_of(homes[parameter]), last_part(homes[parameter])
        if model and container in ambiguous:
            name = f"{last_part(model)}.{name}"
        translated[path] = join(container, f"{name}.{accumulator}")
    counts = Counter(translated.values())
    taken = set(paths)
    return {old: new for old, new in translated.items() if counts[new] == 1 and new not in taken}


def _ambiguous_containers(found: Iterable[tuple[str, VariableOfRun]], homes: Mapping[str, str]) -> set[str]:
    """The optimizers' containers with entries of parameters from several containers that share structured names."""
    models: dict[str, set[str]] = defaultdict(set)
    for path, (parameter, _) in found:
        models[container_of(path)].add(parent_of(homes[parameter]))
    members: dict[str, set[str]] = defaultdict(set)
    for home in homes.values():
        members[parent_of(home)].add(last_part(home))
    counts = {
        container: Counter(key for place in group for key in members[place]) for container, group in models.items()
    }
    return {container for container, count in counts.items() if max(count.values()) > 1}
