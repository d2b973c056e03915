"""Crash states: the power is lost while a checkpoint is saved, at any moment, with all that a disk may do then."""

from __future__ import annotations

import random
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from paddle_dist_ckpt.manager import CheckpointManager
from paddle_dist_ckpt.manager.steps import step_folder
from paddle_dist_ckpt.testing import SimulatedRank, run_ranks
from test.jobs import all_ok

from .calls import Disks
from .leftovers import LATER, age_all, check_clean, check_later_save
from .power import after_power_loss, materialise
from .scenarios import FOLDER, SCENARIOS, Made, Recorded, managers
from .states import states_of, versions_in

NAME = "crash states"
STATES = 20


def attempt(seed: int, folder: Path) -> Counter[str]:
    """Record one scenario, and lose the power during it twenty times."""
    rng, scenario = random.Random(seed), seed % len(SCENARIOS)
    (folder / "recorded").mkdir()
    recorded = SCENARIOS[scenario](Disks(folder / "recorded", rng.choice((1, 1, 2))), rng)
    outcomes: Counter[str] = Counter()
    for number in range(STATES):
        log, begin = recorded.recorder.log, recorded.recorder.begin
        count, journal = rng.randint(begin, len(log)), rng.random() < 0.5
        state = folder / f"state{number}"
        state.mkdir()
        materialise(after_power_loss(log, count, journal, rng), state)
        try:
            outcomes[_check(recorded, count, journal, state, goes_on=number % 2 == 0)] += 1
        except Exception as error:
            how = "journal" if journal else "any names"
            last = log[count - 1] if count else None
            raise AssertionError(
                f"{recorded.name}, {recorded.ranks} ranks, state {number} (after {count} effects of {len(log)}, the "
                f"last of which {str(last)[:200]}; {how}): {type(error).__name__}: {error}"
            ) from error
        shutil.rmtree(state)
    return outcomes


def _check(recorded: Recorded, count: int, journal: bool, state: Path, goes_on: bool) -> str:
    """What a state has turned out to be: what was there before, or a later save. One more save may be made in it."""
    if recorded.keep_last:
        return _check_steps(recorded, count, journal, state / "steps", goes_on)
    folder = state / FOLDER
    found = versions_in(folder)
    allowed: dict[int, set[int | None]] = {unique_id: {version} for unique_id, version in recorded.before.items()}
    for made in recorded.made:
        if made.begun < count:
            if made.reported <= count:
                allowed[made.unique_id] = set()
            allowed.setdefault(made.unique_id, {None}).add(made.version)
    for unique_id in found.keys() | allowed.keys():
        assert found.get(unique_id) in allowed.get(unique_id, {None}), f"{found}, but there may be {allowed}"
    if goes_on:  # where any names may be lost, that of a claim may be, which says what is to be removed
        check_later_save([folder], data=journal)
    return _name_of(recorded, count, [made for made in recorded.made if found.get(made.unique_id) == made.version])


def _check_steps(recorded: Recorded, count: int, journal: bool, root: Path, goes_on: bool) -> str:
    """The same for a manager's folder."""
    found = _steps_in(root)
    told = [*recorded.before, *(made.version for made in recorded.made if made.reported <= count)]
    begun = {*recorded.before, *(made.version for made in recorded.made if made.begun < count)}
    assert found <= begun, f"{found} are committed, of which only {begun} were saved"
    assert max(found, default=0) >= max(told), f"{told[-1]} is gone: {found}"
    kept = set(told[-recorded.keep_last :] if begun == {*told} else told[len(told) - recorded.keep_last + 1 :])
    assert kept <= found, f"{kept} are to be kept; there are {found}"
    if goes_on:
        _check_later_step(recorded, journal, root, found)
    return _name_of(recorded, count, [made for made in recorded.made if made.version in found])


def _check_later_step(recorded: Recorded, journal: bool, root: Path, found: set[int]) -> None:
    """One more step can be saved, and leaves only what is to be kept."""
    age_all(root.parent)
    with managers() as make:
        all_ok(run_ranks(recorded.ranks, lambda rank: _save_step(make, recorded, rank, root)))
    left = _steps_in(root)
    assert left == {*sorted([*found, LATER])[-recorded.keep_last :]}, f"{left} are kept of {found}"
    if journal:
        assert {path.name for path in root.iterdir()} == {step_folder(root, step).name for step in left}
        for step in left:
            check_clean(step_folder(root, step), claims=False)


def _save_step(make: Callable[..., CheckpointManager], recorded: Recorded, rank: SimulatedRank, root: Path) -> None:
    with make(rank, root, keep_last=recorded.keep_last, async_save=False) as managed:
        managed.save(LATER, states_of(LATER, recorded.ranks)[rank.rank])


def _steps_in(root: Path) -> set[int]:
    """The steps that are committed, each of which must be whole."""
    found = set()
    for folder in sorted(root.iterdir()):
        for step, version in versions_in(folder).items():
            assert step == version
            assert folder == step_folder(root, step)
            found.add(step)
    return found


def _name_of(recorded: Recorded, count: int, found: list[Made]) -> str:
    if not found:
        return "nothing" if not recorded.before else "the old one"
    return "the new one, reported" if found[-1].reported <= count else "the new one, not reported yet"
