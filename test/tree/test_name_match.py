"""Which stored tensor is wanted, by names."""

from __future__ import annotations

import itertools
import time

import pytest

from paddle_dist_ckpt.tree import names as names_module
from paddle_dist_ckpt.tree.name_match import NameMatch
from paddle_dist_ckpt.tree.names import Names
from test.pace import slowness

Entries = dict[str, str | None]

DYNAMIC: Entries = {
    "/model/fc.weight": "linear_0.w_0.dist",
    "/model/fc.bias": "linear_0.b_0",
    "/optimizer/linear_0.w_0.dist_moment1_0": "linear_0.w_0.dist_moment1_0",
    "/optimizer/linear_0.b_0_fp32_master_0_moment1_0": "linear_0.b_0_fp32_master_0_moment1_0",
    "/optimizer/master_weights/linear_0.b_0": "linear_0.b_0_fp32_master_0",
}
OBJECTS: Entries = {
    "/model/fc.weight": "linear_4.w_0",
    "/model/fc.bias": "linear_4.b_0",
    "/optimizer/fc.weight.moment1": "linear_4.w_0_moment1_0",
    "/optimizer/fc.bias.moment1": "linear_4.b_0_fp32_master_0_moment1_0",
    "/optimizer/fc.bias.master_weight": "linear_4.b_0_fp32_master_0",
}
STATIC: Entries = {
    "/model/fc.weight": "linear_2.w_0.dist",
    "/model/fc.bias": "linear_2.b_0",
    "/model/linear_2.w_0.dist_moment1_1": "linear_2.w_0.dist_moment1_1",
    "/model/linear_2.b_0_fp32_master_0_moment1_1": "linear_2.b_0_fp32_master_0_moment1_1",
    "/model/linear_2.b_0_fp32_master_0": "linear_2.b_0_fp32_master_0",
}
SHARDED: Entries = {
    "/model/fc.weight": "linear_7.w_0",
    "/model/fc.bias": "linear_7.b_0",
    "/optimizer/fc.weight.moment1_0": "slice_3",
    "/optimizer/fc.bias.moment1_0": None,
    "/optimizer/fc.bias.w_0": "linear_7.b_0_fp32_master_0",
}
FORMS = {"dynamic": DYNAMIC, "objects": OBJECTS, "static": STATIC, "sharded": SHARDED}
MEANING = [("fc.weight", ""), ("fc.bias", ""), ("fc.weight", "moment1"), ("fc.bias", "moment1"), ("fc.bias", "master")]


def below(prefix: str, entries: Entries) -> Entries:
    return {prefix + path: name for path, name in entries.items()}


def match(stored: Entries, wanted: Entries, moved: dict[str, str] | None = None) -> dict[str, str | None]:
    """The stored path that each wanted one gets."""
    paths = list(stored)
    names, asked = Names(paths, list(stored.values())), Names(list(wanted), list(wanted.values()))
    places = NameMatch(names, {path: i for i, path in enumerate(paths)}, asked, moved or {}).places(list(wanted))
    return {path: None if place is None else paths[place] for path, place in zip(wanted, places, strict=True)}


@pytest.mark.parametrize("prefix", ["", "/job/~i3"])
@pytest.mark.parametrize(("saved", "wanted"), list(itertools.product(FORMS, FORMS)))
def test_every_form_finds_every_other(saved: str, wanted: str, prefix: str) -> None:
    stored, asked = below(prefix, FORMS[saved]), below(prefix, FORMS[wanted])
    assert match(stored, asked) == dict(zip(asked, stored, strict=True))
    assert len(MEANING) == len(stored), "both lists have the same meaning line by line"


def test_layers_that_were_made_in_another_order() -> None:
    stored: Entries = {
        "/m/a": "linear_0.w_0",
        "/m/b": "linear_1.w_0",
        **dict.fromkeys(("/o/linear_0.w_0_m_0", "/o/linear_1.w_0_m_0")),
    }
    wanted: Entries = {
        "/m/a": "linear_1.w_0",
        "/m/b": "linear_0.w_0",
        **dict.fromkeys(("/o/linear_0.w_0_m_0", "/o/linear_1.w_0_m_0")),
    }
    found = match(stored, wanted)
    assert found["/o/linear_0.w_0_m_0"] == "/o/linear_1.w_0_m_0"
    assert found["/o/linear_1.w_0_m_0"] == "/o/linear_0.w_0_m_0"


def test_without_a_table_only_equal_keys_match() -> None:
    nameless: Entries = dict.fromkeys(["/model/fc.weight", "/optimizer/linear_0.w_0_moment1_0"])
    assert match(nameless, nameless) == {path: path for path in nameless}
    asked: Entries = dict.fromkeys(["/optimizer/linear_0.w_0.dist_moment1_0", "/model/linear_0.w_0"])
    assert set(match(nameless, asked).values()) == {None}


def test_an_optimizer_alone_is_only_told_by_structured_or_equal_keys() -> None:
    own = "/optimizer/linear_4.w_0.dist_moment1_7"  # of another run, maybe of another layer
    asked: Entries = {own: own.rpartition("/")[2], "/optimizer/fc.bias.moment1_0": None, "/model/linear_4.b_0": None}
    assert match(OBJECTS, asked) == {
        own: None,
        "/optimizer/fc.bias.moment1_0": "/optimizer/fc.bias.moment1",
        "/model/linear_4.b_0": None,
    }
    assert match(DYNAMIC, {"/optimizer/fc.bias.moment1": None, "/optimizer/linear_0.w_0.dist_moment1_0": None}) == {
        "/optimizer/fc.bias.moment1": "/optimizer/linear_0.b_0_fp32_master_0_moment1_0",
        "/optimizer/linear_0.w_0.dist_moment1_0": "/optimizer/linear_0.w_0.dist_moment1_0",
    }


def test_other_optimizers_variables_are_not_taken() -> None:
    asked: Entries = {
        "/model/fc.weight": "linear_0.w_0",
        "/ema/fc.weight.moment1": None,
        "/optimizer/fc.weight.moment2": None,
        "/optimizer/fc.other.moment1": None,
    }
    found = match(OBJECTS, asked)
    assert found.pop("/model/fc.weight") == "/model/fc.weight"
    assert set(found.values()) == {None}


def test_two_optimizers_keep_to_their_containers() -> None:
    def both(key: str) -> Entries:
        return {"/m/w": "p", f"/o/a/{key}": None, f"/o/b/{key}": None}

    found = match(both("p_m_0"), both("w.m"))
    assert found == {"/m/w": "/m/w", "/o/a/w.m": "/o/a/p_m_0", "/o/b/w.m": "/o/b/p_m_0"}
    assert match(both("p_m_0"), {"/m/w": "q", "/m/q_m_0": None})["/m/q_m_0"] is None


def test_two_models_with_parameters_of_one_name() -> None:
    stored: Entries = {"/d/fc.weight": "a_0", "/g/fc.weight": "b_0", "/o/a_0_m_0": None, "/o/b_0_m_0": None}
    asked: Entries = {"/d/fc.weight": "x_0", "/g/fc.weight": "y_0", "/o/d.fc.weight.m": None, "/o/g.fc.weight.m": None}
    found = match(stored, asked)
    assert found["/o/d.fc.weight.m"] == "/o/a_0_m_0"
    assert found["/o/g.fc.weight.m"] == "/o/b_0_m_0"


def test_what_the_user_has_moved() -> None:
    asked = below("/net", OBJECTS)
    moved = {path: path.removeprefix("/net") for path in asked}
    assert match(DYNAMIC, asked, moved) == dict(zip(asked, DYNAMIC, strict=True))


def test_names_of_a_run_say_nothing_where_the_user_has_moved_containers() -> None:
    def run(first: str, second: str) -> Entries:
        entries = {f"/o/{name}": name for name in ("p_0.w_0_moment1_0", "p_0.w_0_fp32_master_0", "p_1.w_0_moment1_0")}
        masters = {f"/o/master_weights/p_{i}.w_0": f"p_{i}.w_0_fp32_master_1" for i in range(2)}
        return {f"/m/{first}": "p_0.w_0", f"/m/{second}": "p_1.w_0", **entries, **masters}

    saved, wanted = below("/x", run("a", "b")), run("b", "a")
    moved = {path: f"/x{path}" for path in wanted}
    found = match(saved, wanted, moved)
    assert found["/m/a"] == "/x/m/a"
    assert found["/o/p_0.w_0_moment1_0"] == "/x/o/p_1.w_0_moment1_0"
    assert found["/o/p_1.w_0_moment1_0"] == "/x/o/p_0.w_0_moment1_0"
    assert found["/o/master_weights/p_0.w_0"] == "/x/o/master_weights/p_1.w_0"
    del saved["/x/o/p_1.w_0_moment1_0"]
    assert match(saved, wanted, moved)["/o/p_0.w_0_moment1_0"] is None, "that there is another parameter's"
    said = {**moved, "/o/p_1.w_0_moment1_0": "/x/o/p_0.w_0_fp32_master_0"}
    assert match(saved, wanted, said)["/o/p_1.w_0_moment1_0"] == "/x/o/p_0.w_0_fp32_master_0", "they have named it"
    alone = {path: name for path, name in wanted.items() if path.startswith("/o/")}
    assert match(saved, alone, moved)["/o/p_0.w_0_moment1_0"] == "/x/o/p_0.w_0_moment1_0", "nobody knows whose it is"
    names = Names(list(saved), list(saved.values())), Names(list(wanted), list(wanted.values()))
    matching = NameMatch(names[0], {path: i for i, path in enumerate(saved)}, names[1], moved)
    (place,) = matching.places(["/o/p_0.w_0_moment1_0"])
    assert place is not None, "its parameter is left as it is"
    assert list(saved)[place] == "/x/o/p_0.w_0_moment1_0"
    only = {"/model/fc.weight": "x_0", "/optimizer/fc.weight.moment1": None}
    found = match(DYNAMIC, only, {"/model/fc.weight": "/model/fc.bias"})
    assert found["/model/fc.weight"] == "/model/fc.bias"
    assert found["/optimizer/fc.weight.moment1"] == "/optimizer/linear_0.b_0_fp32_master_0_moment1_0"
    assert match(DYNAMIC, only, {"/model/fc.weight": "/model/nothing"})["/model/fc.weight"] is None


def test_learning_rates_of_programs() -> None:
    def rates(*paths: str) -> Entries:
        return {path: path.rpartition("/")[2] for path in paths}

    assert match(rates("/m/learning_rate_0"), rates("/m/learning_rate_5")) == {
        "/m/learning_rate_5": "/m/learning_rate_0"
    }
    assert match(
        rates("/a/learning_rate_0", "/b/learning_rate_1"), rates("/b/learning_rate_7", "/c/learning_rate_3")
    ) == {
        "/b/learning_rate_7": "/b/learning_rate_1",
        "/c/learning_rate_3": None,
    }
    named_so: Entries = {"/m/learning_rate_0": "x"}
    assert match(named_so, rates("/m/learning_rate_5")) == {"/m/learning_rate_5": None}
    assert match(rates("/m/learning_rate_5"), named_so) == {"/m/learning_rate_0": None}


def test_what_programs_count_of_their_loss_scaling() -> None:
    """Paddle numbers it as it does the learning rates."""

    def counted(container: str, number: int) -> Entries:
        kinds = ("learning_rate", "loss_scaling", "num_good_steps", "num_bad_steps")
        return {f"/{container}/{kind}_{number}": f"{kind}_{number}" for kind in kinds}

    found = match({**counted("a", 0), **counted("b", 1)}, counted("a", 1))
    assert found == dict(zip(counted("a", 1), counted("a", 0), strict=True))
    of_user: Entries = {"/a/num_good_steps_0": "x"}
    assert match(of_user, counted("a", 1))["/a/num_good_steps_1"] is None


def test_names_that_only_look_like_accumulators() -> None:
    stored: Entries = dict.fromkeys(["/m/fc.weight", "/m/fc.weight.ema_999", "/m/fc.weight.lora_A"])
    asked: Entries = dict.fromkeys(["/m/fc.weight", "/m/fc.weight.ema_9999", "/n/fc.weight.lora_A", "/n/fc.weight.m"])
    assert match(stored, asked) == {"/m/fc.weight": "/m/fc.weight", **dict.fromkeys(list(asked)[1:])}


def test_a_stored_variable_is_found_for_one_wanted_one_only() -> None:
    job: Entries = {"/job/fc.weight": "p", "/job/p_moment1_0": "p_moment1_0"}
    asked: Entries = {
        "/job/fc.weight": "q",
        "/a/q_moment1_0": "q_moment1_0",
        "/b/q_moment1_1": "q_moment1_1",
    }
    assert set(match(job, asked).values()) == {"/job/fc.weight", None}
    del asked["/b/q_moment1_1"]
    assert match(job, asked)["/a/q_moment1_0"] == "/job/p_moment1_0"
    both: Entries = {**job, "/ema/p_moment1_1": "p_moment1_1"}
    assert match(both, asked)["/a/q_moment1_0"] is None, "two optimizers have one, and neither is meant"


def test_models_whose_variables_have_equal_names() -> None:
    def entries(first: str, second: str, *optimizers: str) -> Entries:
        found: Entries = {}
        for model in ("d", "g"):
            found |= {f"/{model}/a": first, f"/{model}/b": second}
        for optimizer in optimizers:
            found |= {f"/{optimizer}/{name}_m_0": f"{name}_m_0" for name in (first, second)}
        return found

    stored, asked = entries("l_0", "l_1", "o"), entries("l_1", "l_0", "o")
    found = match(stored, asked)
    assert found["/o/l_0_m_0"] == "/o/l_1_m_0", "whichever model's it is, it is that of b"
    assert match(stored, entries("x_0", "x_1", "o"))["/o/x_1_m_0"] == "/o/l_1_m_0"
    apart = {**entries("l_0", "l_1", "o"), "/g/a": "l_1", "/g/b": "l_0"}
    assert match(stored, apart)["/o/l_0_m_0"] is None, "of a in one model and of b in the other"


def test_equal_keys_do_not_match_against_what_the_tables_say() -> None:
    def models(first: str, second: str) -> Entries:
        return {"/m/~l0/w": first, "/m/~l1/w": second}

    stored: Entries = {**models("p_0", "p_1"), "/o/~l0/w.moment1": "p_0_moment1_0", "/o/~l1/w.moment1": "p_1_moment1_0"}
    asked: Entries = {**models("q_0", "q_1"), "/o/~l0/w.moment1": "q_1_moment1_0", "/o/~l1/w.moment1": "q_0_moment1_0"}
    found = match(stored, asked)
    assert found["/o/~l0/w.moment1"] is None
    assert found["/m/~l0/w"] == "/m/~l0/w"


def test_of_several_of_one_parameter_the_equal_key_is_taken() -> None:
    entries: Entries = {"/m/w": "p", **dict.fromkeys(("/o/p_moment1_0", "/o/p_moment1_1"))}
    assert match(entries, {**entries, "/m/w": "p", "/m/x": None}) == {**{path: path for path in entries}, "/m/x": None}


def test_variables_of_a_parameter_that_has_several_paths() -> None:
    stored = Names(["/model/b.weight", "/model/b.weight.moment1"], ["linear_2.w_0.dist", "linear_2.w_0.dist_moment1_0"])
    wanted = Names(
        ["/model/a.weight", "/model/b.weight", "/optimizer/a.weight.moment1"],
        ["linear_9.w_0", "linear_9.w_0", "linear_9.w_0_moment1_0"],
    )
    index = {path: i for i, path in enumerate(stored.paths)}
    group = ["/model/a.weight", "/model/b.weight"]
    tied = dict.fromkeys(group, group)
    assert NameMatch(stored, index, wanted, {}, tied).places(wanted.paths) == [None, 0, 1]
    assert NameMatch(stored, index, wanted, {}).places(wanted.paths) == [None, 0, None]
    both = Names(["/optimizer/b.weight.moment1", *wanted.paths], ["linear_9.w_1_moment1_0", *wanted.names])
    twice = NameMatch(stored, index, both, {}, tied).places(both.paths)
    assert twice[0] is None or twice[3] is None, "no stored tensor is given to two"


@pytest.mark.parametrize("one", ["/o/master_weights/p_0.w_0", "/o.master_weights.p_0.w_0", "/o/master_weights.p_0.w_0"])
def test_master_weights_of_unknown_parameters_are_told_by_the_names_of_these(one: str) -> None:
    other, others = "/o/p_0.w_0_fp32_master_0", dict.fromkeys(("/o/p_0.w_1_fp32_master_0", "/q/p_0.w_0_fp32_master_0"))
    assert match({other: None, **others}, {one: None}) == {one: other}
    assert match({one: None, **others}, {other: None}) == {other: one}
    assert match({one: None, other: None}, {one: None, other: None}) == {one: one, other: other}
    assert match({one: None}, {other: None, "/o/p_0.w_0_fp32_master_1": None})[other] is None, "it is of one of both"
    assert match(others, {one: None}) == {one: None}
    known: Entries = {"/m/w": "p_0.w_0"}
    assert match({**known, other: None}, {"/m/w": "p_5.w_0", one: None})[one] == other, "as equal keys are taken"


def test_master_weights_of_known_parameters_are_not_told_by_the_names_of_these() -> None:
    one, other = "/o/master_weights/p_0.w_0", "/o/p_0.w_0_fp32_master_0"
    for path, its in ((one, other), (other, one)):
        assert match({"/m/w": "p_5.w_0", path: None}, {"/m/w": "p_0.w_0", its: None})[its] is None


def test_stored_master_weights_are_looked_for_once_for_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """For each of many ranks that lack a tensor it would take seconds."""
    asked = list[str]()
    monkeypatch.setattr(names_module, "master_of_run", lambda path: asked.append(path))
    stored = Names(["/o/a", "/o/b"], [None, None])
    for _ in range(3):
        wanted = Names(["/o/c_moment1_0"], [None])
        assert NameMatch(stored, {"/o/a": 0, "/o/b": 1}, wanted, {}).places(wanted.paths) == [None]
    assert asked == ["/o/a", "/o/b"]


@pytest.mark.parametrize(("form", "count"), [("{name}_moment1_0", 400), ("{key}.moment1", 2000)])
def test_many_models_of_equal_names_are_quick(form: str, count: int) -> None:
    """As of stages that count for themselves, and of models made one like another. Their layers were made in another
    order, so that nothing is known by its place alone."""

    def job(models: int, shift: int) -> tuple[Names, list[str]]:
        entries: dict[str, str] = {}
        for model in range(models):
            for layer in range(2):
                name, key = f"linear_{(layer + shift) % 2}.w_0", f"l{layer}.weight"
                entries[f"/{model}/model/{key}"] = name
                entries[f"/{model}/optimizer/{form.format(name=name, key=key)}"] = f"{name}_moment1_0"
        return Names(list(entries), list(entries.values())), list(entries)

    (stored, paths), (wanted, asked) = job(count, 0), job(count, 1)
    start = time.process_time()
    places = NameMatch(stored, {path: i for i, path in enumerate(paths)}, wanted, {}).places(asked)
    assert time.process_time() - start < 2 * slowness(), "it takes a few hundredths of a second"
    for path, place in zip(asked, places, strict=True):
        assert place is not None
        assert paths[place].split("/")[1] == path.split("/")[1]
        assert (stored.variables.get(paths[place]) is None) == (wanted.variables.get(path) is None)
