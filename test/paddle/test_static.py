"""Static-graph programs: saved, loaded, and exchanged with jobs that train the same model as a layer."""

from __future__ import annotations

import functools
import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from paddle_dist_ckpt import UnsupportedValueError
from paddle_dist_ckpt.paddle_adapter.static_program import program_state
from test.paddle.versions import LATER_THAN_3_0, lacks
from test.ranks.pool import RankPool
from test.strategies import some

pytest.importorskip("paddle.distributed.auto_parallel.static.dist_input_spec")  # Paddle has it from 3.0 on

from test.paddle import cases_stages
from test.paddle import cases_static as cases
from test.paddle.cases_static import FORMS, LAYOUTS, RANKS, Run

PROGRAMS = [form for form, is_static in FORMS.items() if is_static]
PAIRS = [pair for pair in itertools.product(FORMS, FORMS) if FORMS[pair[0]] or FORMS[pair[1]]]
OTHERS = ["mp4", "mp2_dp2", "dp4", "dp2_mp2"]
# To each pair of forms a layout, such that a form meets all of them.
ROTATED = [(*pair, OTHERS[number % len(OTHERS)]) for number, pair in enumerate(PAIRS)]
Train = Callable[[Run], "list[float]"]
Saved = Callable[..., str]


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    """Ranks of their own, since what programs need on CPU is put into Paddle itself."""
    with RankPool(RANKS) as made:
        yield made


@pytest.fixture(scope="module")
def train(ranks: RankPool) -> Train:
    """Train; returns the losses of whole batches."""

    @functools.cache
    def run(job: Run) -> list[float]:
        return list(np.mean(ranks.run(cases.train, job), axis=0).tolist())

    return run


@pytest.fixture(scope="module")
def saved(train: Train, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Train three steps and save, once for each job; returns the folder."""

    @functools.cache
    def save(form: str, layout: str = "dp2_mp2", **more: object) -> str:
        folder = str(tmp_path_factory.mktemp(form))
        train(Run(form=form, layout=layout, steps=range(3), save=folder, **more))  # type: ignore[arg-type]
        return folder

    return save


def go_on(train: Train, form: str, folder: str, layout: str = "dp2_mp2", **more: object) -> list[float]:
    """The losses of three more steps of a job that begins anew, with layers made in another order, and loads."""
    return train(Run(form=form, layout=layout, seed=1, load=folder, steps=range(3, 6), **more))  # type: ignore[arg-type]


def uninterrupted(train: Train, **more: object) -> list[float]:
    """The same losses of a job that neither saved nor loaded."""
    return train(Run(form="objects", steps=range(6), **more))[3:]  # type: ignore[arg-type]


@pytest.mark.parametrize("layout", some(LAYOUTS, 1))
def test_programs_compute_what_layers_do(train: Train, layout: str) -> None:
    losses = [train(Run(form=form, layout=layout, steps=range(6))) for form in ("objects", "program")]
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)
    np.testing.assert_allclose(losses[0][3:], uninterrupted(train), rtol=1e-5)
    fresh = train(Run(form="objects", seed=1, steps=range(3, 6)))
    assert np.abs(np.subtract(fresh, losses[0][3:])).min() > 0.01  # so that what was not loaded is noticed


@pytest.mark.parametrize(("source", "destination", "layout"), some(ROTATED, 2))
def test_training_goes_on(train: Train, saved: Saved, source: str, destination: str, layout: str) -> None:
    losses = go_on(train, destination, saved(source), layout)
    np.testing.assert_allclose(losses, uninterrupted(train), rtol=1e-4)


@pytest.mark.parametrize(
    ("source", "form"), some(itertools.product(["mp4", "mp2_dp2", "dp4"], ["objects", "program"]), 1)
)
def test_from_other_layouts(train: Train, saved: Saved, source: str, form: str) -> None:
    other = "program" if form == "objects" else "dicts"
    losses = go_on(train, other, saved(form, source))
    np.testing.assert_allclose(losses, uninterrupted(train), rtol=1e-4)


@pytest.mark.parametrize(
    ("source", "destination"), some([("program", "objects"), ("objects", "program"), ("program", "program")], 1)
)
def test_schedules_go_on(train: Train, saved: Saved, source: str, destination: str) -> None:
    losses = go_on(train, destination, saved(source, schedule=True), "mp4", schedule=True)
    expected = uninterrupted(train, schedule=True)
    np.testing.assert_allclose(losses, expected, rtol=1e-4)
    assert np.abs(np.subtract(expected, uninterrupted(train))).max() > 1e-2


@pytest.mark.parametrize(
    ("source", "destination"),
    some(
        [
            ("program", "program"),
            ("program", "program_split"),
            ("program_dict", "program"),
            ("program_split", "program_dict"),
        ],
        1,
    ),
)
def test_constant_learning_rates_are_loaded(train: Train, saved: Saved, source: str, destination: str) -> None:
    losses = go_on(train, destination, saved(source), rate=0.001)
    np.testing.assert_allclose(losses, uninterrupted(train), rtol=1e-4)


@pytest.mark.parametrize(
    ("source", "destination"),
    some([("objects", "program_split"), ("program_dict", "dicts"), ("program", "program_dict")], 1),
)
def test_deep_in_a_state(train: Train, saved: Saved, source: str, destination: str) -> None:
    nest = ("jobs", "0.model", "master_weights")
    losses = go_on(train, destination, saved(source, nest=nest), "dp4", nest=nest)
    np.testing.assert_allclose(losses, uninterrupted(train), rtol=1e-4)


@pytest.mark.parametrize(
    ("source", "destination"), some([("objects", "program_split"), ("program_split", "objects")], 1)
)
def test_from_elsewhere(train: Train, saved: Saved, source: str, destination: str) -> None:
    moved = (("later.model", "model"), ("later.optimizer", "optimizer"))
    losses = go_on(train, destination, saved(source), nest=("later",), moved=moved)
    np.testing.assert_allclose(losses, uninterrupted(train), rtol=1e-4)


@lacks(LATER_THAN_3_0, "cannot add up bfloat16 among ranks on CPU")
@pytest.mark.parametrize(
    ("source", "destination"),
    some(
        [
            ("objects", "program"),
            ("dicts", "program_dict"),
            ("objects", "program_split"),
            ("program", "dicts"),
            ("program_dict", "objects"),
            ("program_split", "dicts"),
        ],
        1,
    ),
)
def test_master_weights_go_on(train: Train, saved: Saved, source: str, destination: str) -> None:
    losses = go_on(train, destination, saved(source, "mp4", half=True), "mp4", half=True)
    expected = uninterrupted(train, layout="mp4", half=True)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)


@lacks(LATER_THAN_3_0, "cannot add up bfloat16 among ranks on CPU")
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_master_weights_follow_parameters_that_are_loaded_without_them(
    ranks: RankPool, tmp_path: Path, mode: str
) -> None:
    ranks.run(cases.save_weights, Run(form="objects", layout="mp4", half=True, save=str(tmp_path)))
    run = Run(form="program", layout="mp4", half=True, seed=1, load=str(tmp_path))
    for pairs in ranks.run(cases.load_weights, run, mode):
        assert len(pairs) > 3
        assert all(parameter == master for parameter, master in pairs)


@pytest.mark.parametrize("from_static", [False, True])
def test_master_weights_and_their_moments_by_name(ranks: RankPool, tmp_path: Path, from_static: bool) -> None:
    (found,) = ranks.run(cases.move_masters, str(tmp_path), from_static, ranks=1)
    assert found == {"parameter": 1, "master_0": 2, "moment1_0": 3, "moment2_0": 4}


@pytest.mark.parametrize("from_static", [False, True])
def test_tied_parameters_and_their_moments(tmp_path: Path, from_static: bool) -> None:
    with RankPool(1) as alone:  # what the others have put into Paddle asks all of them
        ((before, after),) = alone.run(cases.move_tied, str(tmp_path), from_static)
    assert before == after
    assert {"embed.weight", "head.weight", "embed.weight.moment1", "embed.weight.moment2"} < before.keys()
    assert any(before["embed.weight.moment1"])


def test_all_of_a_program_is_saved_in_whatever_mode_it_is(tmp_path: Path) -> None:
    keys = []
    for mode in ("train", "eval", "predict"):
        with RankPool(1) as alone:
            keys += alone.run(cases.save_in_mode, str(tmp_path / mode), mode)
    assert "model.embed.weight.moment1" in keys[0]
    assert keys[1:] == keys[:1] * 2


def test_all_of_a_program_that_is_not_in_pir_is_saved_in_whatever_mode_it_is(tmp_path: Path) -> None:
    keys = []
    for mode in ("train", "eval"):
        call = f"save_and_load_without_pir({str(tmp_path / mode)!r}, {mode!r})"
        script = f"from test.paddle import cases_static as cases; print(cases.{call})"
        env = {**os.environ, "FLAGS_enable_pir_api": "0"}
        done = subprocess.run([sys.executable, "-c", script], env=env, stdout=subprocess.PIPE, text=True, check=True)
        keys.append(done.stdout.splitlines()[-1])
    assert "moment1" in keys[0]
    assert keys[1] == keys[0]


def test_tensors_that_no_layer_has_in_its_state_are_none_of_a_program(tmp_path: Path) -> None:
    """Such as tables of positions; Paddle gives them keys by numbers of the run. A loss may have some in its own."""
    with RankPool(1) as alone:
        ((numbers, keys, with_loss),) = alone.run(cases.move_tables, str(tmp_path))
    assert {numbers[name] for name in ("mean", "first.weight", "last.weight")} == {2.0}
    made_anew = [number for name, number in numbers.items() if name.startswith(("eager_tmp_", "generated_tensor_"))]
    assert made_anew == [3.0] * 3
    in_state = ["model.first.weight", "model.last.weight", "model.mean"]
    assert [key for key in keys if "learning_rate" not in key] == in_state
    assert sorted({*with_loss} - {*in_state})[0].startswith("model.eager_tmp_")
    assert len(with_loss) == len(in_state) + 2


def test_parameters_that_pipeline_stages_share(tmp_path: Path) -> None:
    """Paddle gives the later stage a copy, under another name (auto_parallel_sync_shared_params)."""
    with RankPool(2) as stages:
        (before, first, keys), (_, second, _) = stages.run(cases_stages.move_shared, str(tmp_path))
    of_embedding = sorted(value for name, value in before.items() if name.startswith("embedding"))
    for loaded in (*first, *second):
        shared = [name for name in loaded if "embedding" in name and "beta" not in name]
        assert sorted(loaded[name] for name in shared) == of_embedding
    of_layer, of_program = ({key.partition(".")[2] for key in each} for each in keys)
    assert of_layer == of_program - {"learning_rate_0"}


def test_what_a_program_does_not_train_is_left_out_if_told_so() -> None:
    with RankPool(1) as alone:
        ((trained, numbers),) = alone.run(cases.scatter_to_tables)
    assert [key for key in trained if "learning_rate" not in key] == ["last.weight", "mean"]
    assert numbers == {"first.weight": 3.0, "last.weight": 2.0}


@pytest.mark.parametrize(("source", "destination"), some(itertools.product(["objects", "program_dict"], PROGRAMS), 1))
def test_evaluation(ranks: RankPool, train: Train, saved: Saved, source: str, destination: str) -> None:
    run = Run(form=destination, layout="mp4", seed=1, load=saved(source))
    loss = np.mean(ranks.run(cases.evaluate, run, 3))
    np.testing.assert_allclose(loss, uninterrupted(train)[0], rtol=1e-5)


@pytest.mark.parametrize("form", some(FORMS, 3))
def test_variables_are_known_by_their_names(ranks: RankPool, saved: Saved, form: str) -> None:
    (names,) = ranks.run(cases.variable_names, saved(form), ranks=1)
    assert names["model.up.weight"] == "linear_0.w_0.dist"
    assert names["model.embedding.weight"] == "embedding_0.w_0.dist"
    assert not [name for name in names.values() if name.startswith("eager_tmp")]


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("program", "train()"),
        ("evaluated", "only train() moves"),
        ("layer", "use the DistModel"),
        ("optimizer", "use the DistModel"),
    ],
)
def test_nothing_to_save(ranks: RankPool, tmp_path: Path, what: str, said: str) -> None:
    run = Run(form="program", save=str(tmp_path))
    for outcome in ranks.run(cases.save_without_state, run, what):
        assert outcome.error in ("UnsupportedValueError", "RankFailureError")
        assert said in outcome.message
    assert not list(tmp_path.glob("*.metadata"))


@pytest.mark.parametrize(
    ("keys", "error"),
    [
        ({"linear_0.w_0": "linear_9.w_0", "linear_0.w_0_moment1_0": "x"}, None),
        ({"fc.weight": "linear_0.w_0"}, "StateDictMismatchError"),
        ({"linear_0.w_0.dist": "linear_0.w_0.dist"}, "StateDictMismatchError"),
        ({"linear_0.w_0_moment1_1": "linear_0.w_0_moment1_1"}, "StateDictMismatchError"),
        ({"linear_0.w_0": "linear_0.w_0", "linear_0.w_0.dist_moment1_0": "x"}, "StateDictMismatchError"),
    ],
)
def test_only_equal_keys_without_a_table(
    ranks: RankPool, tmp_path: Path, keys: dict[str, str], error: str | None
) -> None:
    ranks.run(cases.save_arrays, str(tmp_path), ranks=1)
    (outcome,) = ranks.run(cases.load_named, str(tmp_path), keys, ranks=1)
    assert outcome.error == error
    assert error is not None or outcome.result == {"linear_0.w_0": 1, "linear_0.w_0_moment1_0": 2}


@pytest.mark.parametrize(
    ("source", "destination"),
    some([("dicts", "program_split"), ("program_split", "dicts"), ("program_split",) * 2], 1),
)
def test_names_of_another_run_are_not_guessed(ranks: RankPool, saved: Saved, source: str, destination: str) -> None:
    """The keys differ in the accumulators' numbers only, but the parameters are those of other layers.

    (Keys that happen to be equal do match, as those of dynamic optimizers do here.)
    """
    ranks.run(cases.train, Run(form="program"))  # so that the programs below are not the first, and numbered otherwise
    for outcome in ranks.run(cases.load_optimizer, Run(form=destination, seed=1, load=saved(source))):
        assert outcome.error == "StateDictMismatchError"


def test_a_program_without_a_state_is_told_by_its_key() -> None:
    class Unready:
        _mode = "train"
        _engine = None

        def state_dict(self) -> dict[str, object]:
            raise ValueError("no program is built")

    text = r"^net: this DistModel has no state \(ValueError: no program is built\); was it set to train\(\) before\?$"
    with pytest.raises(UnsupportedValueError, match=text):
        program_state(Unready(), "net")
