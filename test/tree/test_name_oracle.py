"""Drawn jobs in drawn forms of keys: no tensor ever gets another one's data."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from paddle_dist_ckpt.tree.name_match import NameMatch
from paddle_dist_ckpt.tree.names import Names

KEYS = ["fc.weight", "fc.bias", "x.weight"]
FORMS = ["own", "structured", "sharded"]
Meaning = tuple[str, str, str | None, str | None]


@dataclass(frozen=True)
class Job:
    """Models with their parameters' keys, and optimizers with the models that they step."""

    models: dict[str, list[str]]
    optimizers: dict[str, list[str]]

    @classmethod
    def drawn(cls, draw: random.Random) -> Job:
        models = {name: draw.sample(KEYS, draw.randint(1, 3)) for name in draw.sample("dge", draw.randint(1, 3))}
        optimizers = draw.sample("op", draw.randint(1, 2))
        return cls(models, {name: draw.sample(list(models), draw.randint(1, len(models))) for name in optimizers})

    def state(self, draw: random.Random, own_names: bool) -> dict[str, tuple[str | None, Meaning]] | None:
        """The entries of one run, each with its variable's name and what it is; None if two would have one path.

        Args:
            draw: Draws the order in which layers are made, the form of keys, and which optimizers there are.
            own_names: Whether every model is made under names of its own.
        """
        suffix, made, names = draw.choice(["", ".dist"]), 0, {}
        for model in draw.sample(list(self.models), len(self.models)):
            made = 0 if own_names else made
            for key in draw.sample(self.models[model], len(self.models[model])):
                names[model, key] = f"linear_{made}.{key[3:4] if key[:2] == 'fc' else 'w'}_0{suffix}"
                made += 1
        state: dict[str, tuple[str | None, Meaning]] = {
            f"/{model}/{key}": (name, (model, key, None, None)) for (model, key), name in names.items()
        }
        for optimizer, models in self.optimizers.items():
            form = draw.choice(FORMS)
            for (model, key), name in names.items() if draw.random() < 0.8 else ():
                for accumulator in ("moment1", "moment2") if model in models else ():
                    variable = f"{name}_{accumulator}_0"
                    last = {"own": variable, "structured": f"{key}.{accumulator}", "sharded": f"{key}.{accumulator}_0"}
                    path = f"/{optimizer}/{last[form]}"
                    if path in state:
                        return None
                    state[path] = variable if form != "sharded" else None, (model, key, accumulator, optimizer)
        return state


@pytest.mark.parametrize("own_names", [False, True])
def test_no_tensor_gets_another_ones_data(own_names: bool) -> None:
    found = compared = 0
    for seed in range(6000):
        draw = random.Random(seed)
        job = Job.drawn(draw)
        stored, wanted = job.state(draw, own_names), job.state(draw, draw.random() < 0.5 and own_names)
        if stored is None or wanted is None:
            continue
        paths = list(stored)
        names, asked = Names(paths, [stored[path][0] for path in paths]), list(wanted)
        match = NameMatch(
            names, {path: i for i, path in enumerate(paths)}, Names(asked, [n for n, _ in wanted.values()]), {}
        )
        places = dict(zip(asked, match.places(asked), strict=True))
        there = {meaning for _, meaning in stored.values()}
        for path, (_, meaning) in wanted.items():
            place = places[path]
            if place is not None:
                assert stored[paths[place]][1] == meaning, (seed, path, paths[place])
            compared += meaning in there
            found += place is not None
    assert found > 0.85 * compared > 10_000, "most of what is there is found, too"
