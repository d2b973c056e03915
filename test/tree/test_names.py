"""Names of optimizer variables that are the same in every run."""

from __future__ import annotations

import random
import time

import pytest

from paddle_dist_ckpt.tree import names as names_module
from paddle_dist_ckpt.tree.canonical import canonical_paths
from paddle_dist_ckpt.tree.paths import join
from test.pace import slowness

TABLE = {"linear_0.w_0": "fc.weight", "linear_1.w_0.dist": "out.weight", "embedding_0.w_0.dist": "embed"}
KINDS = [
    *("moment1", "moment2", "moment2_max", "beta1_pow_acc", "beta2_pow_acc", "velocity", "moment", "inf_norm"),
    *("momentum", "mean_square", "mean_grad", "_avg_squared_grad", "_avg_squared_update", "beta1_pow", "beta2_pow"),
    *("momentum_decay_pow", "mu_product", "rho", "d", "y", "m", "prevs", "learning_rates", "sum_1", "mine_moment1"),
]


def name_of(key: str, parameters: dict[str, str]) -> str | None:
    """What an optimizer's entry is called, if the parameters have these structured names by their variables' names."""
    path = join("/optimizer", key)
    paths = [*(f"/model/{name}" for name in parameters.values()), path]
    found = canonical_paths(paths, [*parameters, None]).get(path)
    return None if found is None else found.removeprefix("/optimizer/")


@pytest.mark.parametrize("kind", KINDS)
def test_an_accumulator_of_any_kind(kind: str) -> None:
    for name, structured in TABLE.items():
        for number in (0, 1, 12):
            assert name_of(f"{name}_{kind}_{number}", TABLE) == f"{structured}.{kind}"
            assert name_of(f"{name}_fp32_master_{number}_{kind}_0", TABLE) == f"{structured}.{kind}"


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("linear_0.w_0_fp32_master_0", "fc.weight.master_weight"),
        ("linear_1.w_0.dist_fp32_master_3", "out.weight.master_weight"),
        ("embedding_0.w_0.dist_fp32_master_0.dist_moment1_0", "embed.moment1"),
        ("embedding_0.w_0.dist_fp32_master_0.dist", "embed.master_weight"),
        ("linear_0.w_0_moment1_0.dist", "fc.weight.moment1"),
        ("linear_0.w_0.dist_moment1_0", "fc.weight.moment1"),
        ("linear_1.w_0_moment1_0", "out.weight.moment1"),
        ("linear_0.w_0_moment1_0_deepcopy_5", "fc.weight.moment1"),
        ("linear_0.w_0", None),
        ("linear_0.w_0_moment1", None),
        ("linear_0.w_0_1_moment1_0", None),
        ("linear_0.w_01_moment1_0", None),
        ("linear_2.w_0_moment1_0", None),
        ("linear_0.w_0_deepcopy_0", None),
        ("linear_0.w_0_deepcopy_0_moment1_0", None),
        ("LR_Scheduler", None),
        ("", None),
        ("_", None),
    ],
)
def test_names(key: str, expected: str | None) -> None:
    assert name_of(key, TABLE) == expected


def test_the_longest_parameter_wins() -> None:
    table = {"w": "a", "w_b": "b", "w_b_0": "c", "w_b_0_deepcopy_1": "d"}
    assert name_of("w_b_0_moment1_0", table) == "c.moment1"
    assert name_of("w_b_moment1_0", table) == "b.moment1"
    assert name_of("w_moment1_0", table) == "a.moment1"
    assert name_of("w_b_0_deepcopy_1_moment1_0", table) == "d.moment1"
    assert name_of("w_b_1", table) == "a.b", "not w_b, of which _1 cannot be an accumulator"


def test_both_a_variable_and_its_distributed_one() -> None:
    table = {"w": "plain", "w.dist": "spread"}
    assert name_of("w_moment1_0", table) == "plain.moment1"
    assert name_of("w.dist_moment1_0", table) == "spread.moment1"


# -- whole checkpoints


def canonical(entries: dict[str, str | None]) -> dict[str, str]:
    """Canonical paths; and the order of the entries never matters."""
    found = canonical_paths(list(entries), list(entries.values()))
    assert found == canonical_paths(list(entries)[::-1], list(entries.values())[::-1])
    return found


def own(*keys: str, container: str = "/optimizer") -> dict[str, str | None]:
    """Optimizer variables as a state_dict has them: each under its own name."""
    return {f"{container}/{key}": key for key in keys}


def test_a_model_and_its_optimizer() -> None:
    entries = {
        "/model/fc.weight": "linear_7.w_0.dist",
        "/model/fc.bias": "linear_7.b_0",
        **own("linear_7.w_0.dist_moment1_0", "linear_7.b_0_fp32_master_0_moment1_0", "linear_8.w_0_moment1_0"),
        "/optimizer/master_weights/linear_7.b_0": "linear_7.b_0_fp32_master_0",
        "/optimizer/master_weights/linear_9.b_0": "linear_9.b_0_fp32_master_0",
    }
    assert canonical(entries) == {
        "/optimizer/linear_7.w_0.dist_moment1_0": "/optimizer/fc.weight.moment1",
        "/optimizer/linear_7.b_0_fp32_master_0_moment1_0": "/optimizer/fc.bias.moment1",
        "/optimizer/master_weights/linear_7.b_0": "/optimizer/fc.bias.master_weight",
    }


def test_two_runs_agree() -> None:
    def entries(number: int, dist: str) -> dict[str, str | None]:
        name = f"linear_{number}.w_0{dist}"
        return {"/m/fc.weight": name, **own(f"{name}_moment1_{number}", f"{name}_fp32_master_{number}")}

    first, second = canonical(entries(0, "")), canonical(entries(5, ".dist"))
    assert set(first.values()) == {"/optimizer/fc.weight.moment1", "/optimizer/fc.weight.master_weight"}
    assert set(first.values()) == set(second.values())


def test_one_flat_dict() -> None:
    entries = {"/fc.weight": "linear_0.w_0", **own("linear_0.w_0_moment1_0", container="")}
    assert canonical(entries) == {"/linear_0.w_0_moment1_0": "/fc.weight.moment1"}


def test_what_is_canonical_already_stays() -> None:
    entries = {
        "/model/fc.weight": "linear_0.w_0",
        "/optimizer/fc.weight.master_weight": "linear_0.w_0_fp32_master_0",
        "/optimizer/fc.weight.moment1": "linear_0.w_0_fp32_master_0_moment1_0",
        "/other/linear_0.w_0_fp32_master_0_moment1_0": "linear_0.w_0_fp32_master_0_moment1_0",
    }
    assert canonical(entries) == {"/other/linear_0.w_0_fp32_master_0_moment1_0": "/other/fc.weight.moment1"}


def test_the_key_counts_and_not_the_variables_name() -> None:
    entries = {"/model/w": "p", "/o/p_m_0": "generated_tensor_3", "/o/p_d_0": None, "/o/p_y_0": "p_y_0"}
    assert canonical(entries) == {"/o/p_m_0": "/o/w.m", "/o/p_d_0": "/o/w.d", "/o/p_y_0": "/o/w.y"}


def test_parameters_under_their_variables_names() -> None:
    entries = {**own("linear_0.w_0", container="/model"), **own("linear_0.w_0_moment1_0")}
    assert canonical(entries) == {"/optimizer/linear_0.w_0_moment1_0": "/optimizer/linear_0.w_0.moment1"}


def test_without_names_or_parameters_nothing_is_translated() -> None:
    assert canonical({"/model/fc.weight": None, "/optimizer/linear_0.w_0_moment1_0": None}) == {}
    assert canonical(own("linear_0.w_0_moment1_0")) == {}
    assert canonical({}) == {}


def test_a_shared_parameter_has_its_first_path() -> None:
    entries = {"/model/out.weight": "w_0", "/model/embed.weight": "w_0", **own("w_0_moment1_0")}
    assert canonical(entries) == {"/optimizer/w_0_moment1_0": "/optimizer/embed.weight.moment1"}


def test_keys_that_paths_escape() -> None:
    entries = {
        "/model/~i5": "a_0",
        "/model/x~1y~0": "b_0",
        "/model/z": "c/d",
        "/~l0/a_0_m_0": "a_0_m_0",
        "/o/b_0_m_0": "b_0_m_0",
        "/o/c~1d_m_0": "c/d_m_0",
    }
    assert canonical(entries) == {
        "/~l0/a_0_m_0": "/~l0/5.m",
        "/o/b_0_m_0": "/o/x~1y~0.m",
        "/o/c~1d_m_0": "/o/z.m",
    }


def test_two_optimizers_of_one_model() -> None:
    entries = {"/model/w": "p", **own("p_m_0", container="/a"), **own("p_m_1", container="/b")}
    assert canonical(entries) == {"/a/p_m_0": "/a/w.m", "/b/p_m_1": "/b/w.m"}


def test_entries_that_clash_stay() -> None:
    twice = {"/model/w": "p", "/model/v": "q", **own("p_m_0", "p_m_1", "q_m_0")}
    assert canonical(twice) == {"/optimizer/q_m_0": "/optimizer/v.m"}
    taken = {"/model/w": "p", **own("p_m_0"), "/optimizer/w.m": "other"}
    assert canonical(taken) == {}
    masters = {"/model/w": "p", **own("p_fp32_master_0"), "/optimizer/master_weights/p": "p_fp32_master_1"}
    assert canonical(masters) == {}


MODELS = {"/nets/g/w": "g_w", "/nets/g/v": "g_v", "/nets/d/w": "d_w"}


def test_one_optimizer_of_two_models_that_share_names() -> None:
    assert canonical({**MODELS, **own("g_w_m_0", "g_v_m_0", "d_w_m_0")}) == {
        "/optimizer/g_w_m_0": "/optimizer/g.w.m",
        "/optimizer/g_v_m_0": "/optimizer/g.v.m",
        "/optimizer/d_w_m_0": "/optimizer/d.w.m",
    }


def test_an_optimizer_of_each_model() -> None:
    entries = {**MODELS, **own("g_w_m_0", container="/og"), **own("d_w_m_0", container="/od")}
    assert canonical(entries) == {"/og/g_w_m_0": "/og/w.m", "/od/d_w_m_0": "/od/w.m"}


def test_one_optimizer_of_two_models_that_share_no_name() -> None:
    entries = {"/g/w": "g_w", "/d/v": "d_v", "/ema/w": "e_w", **own("g_w_m_0", "d_v_m_0")}
    assert canonical(entries) == {"/optimizer/g_w_m_0": "/optimizer/w.m", "/optimizer/d_v_m_0": "/optimizer/v.m"}


def test_models_in_containers_of_one_name() -> None:
    entries = {"/a/net/w": "a_w", "/b/net/w": "b_w", **own("a_w_m_0", "b_w_m_0")}
    assert canonical(entries) == {}


def test_a_copy_of_a_model_keeps_to_itself() -> None:
    entries = {"/model/w": "w_0", "/copy/w": "w_0_deepcopy_3", **own("w_0_m_0", "w_0_deepcopy_3_m_0")}
    assert canonical(entries) == {
        "/optimizer/w_0_m_0": "/optimizer/model.w.m",
        "/optimizer/w_0_deepcopy_3_m_0": "/optimizer/copy.w.m",
    }
    del entries["/copy/w"]
    assert canonical(entries) == {"/optimizer/w_0_m_0": "/optimizer/w.m"}


@pytest.mark.parametrize(
    ("parameters", "key", "expected"),
    [
        (["/m1/d/fc.w", "/m2/d/fc.w"], "/opt/d.fc.w.moment1", "/m1/d/fc.w"),  # the key alone does not tell the models
        (["/fc.w", "/out.w"], "/opt/out.w.moment1", "/out.w"),  # on the rank that has saved it the name was another's
    ],
)
def test_a_variables_name_tells_whose_it_is_unless_its_key_says_otherwise(
    parameters: list[str], key: str, expected: str
) -> None:
    names = names_module.Names([*parameters, key], ["linear_0.w_0", "linear_1.w_0", "linear_0.w_0_moment1_0"])
    assert names.variables == {key: ((expected,), "moment1")}


def test_many_entries_are_quick() -> None:
    count, kinds = 20_000, ("moment1", "moment2", "beta1_pow_acc", "beta2_pow_acc")
    parameters = {f"/model/layers.{i}.weight": f"linear_{i}.w_0.dist" for i in range(count)}
    entries = {**parameters, **own(*(f"{name}_{kind}_0" for name in parameters.values() for kind in kinds))}
    paths, names = list(entries), list(entries.values())
    start = time.process_time()
    assert len(canonical_paths(paths, names)) == 80_000
    assert time.process_time() - start < 10, "it takes about half a second for 100,000 entries"


def test_names_in_their_order_are_parsed_as_each_alone() -> None:
    """Any names of few pieces, so that many begin by others, with and without ``.dist``."""
    rng, found = random.Random(0), 0
    pieces = ["a", "b_0", "0", "w_0", "m_0", "fp32_master_0", "moment1_0", "deepcopy_1", "1"]
    for _ in range(300):
        drawn = ("_".join(rng.choices(pieces, k=rng.randint(1, 4))) for _ in range(rng.randint(2, 25)))
        names = list({name + rng.choice(["", "", ".dist"]) for name in drawn})
        paths = [join("/optimizer", name) if rng.random() < 0.5 else f"/model/p{i}" for i, name in enumerate(names)]
        table = names_module.Names(paths, names)
        _, parsed = table._table
        for name in names:
            before = {other: own for other, own in table.parameters.items() if other < name}
            assert parsed[name] == names_module._parse(name, before), name
            found += parsed[name] is not None
    assert found > 500


def test_very_long_names_take_linear_time() -> None:
    start = time.process_time()
    for part in ("w_0_", "_0", "_0_deepcopy", ".w_0", "0"):
        key = f"/optimizer/linear_0.w_0_m{part * (200_000 // len(part))}_moment1_0"
        table = names_module.Names(["/model/w", key, "/x"], ["linear_0.w_0", None, key.rpartition("/")[2]])
        assert table.of_run(key) is None
        assert table.variables == {}
        names_module.parameter_of_run(key)
        names_module.may_be_of_run(key)
    assert time.process_time() - start < 2 * slowness(), "it takes a few hundredths of a second"


@pytest.mark.parametrize(
    ("key", "parameter"),
    [
        ("linear_0.w_0_moment1_0", "linear_0.w_0"),
        ("d.linear_0.w_0.dist_moment1_0", "linear_0.w_0"),
        ("a/b_x_0.b_12_beta1_pow_acc_0", "b_x_0.b_12"),
        ("x_0_y_0.w_0_m_0", "x_0_y_0.w_0"),
        ("_0.w_0_m_0", "_0.w_0"),
        ("x.w_0_m_0", None),
        ("linear_0.w_0", None),
    ],
)
def test_the_parameter_of_a_name_of_a_run(key: str, parameter: str | None) -> None:
    assert names_module.parameter_of_run(key) == parameter


def test_a_name_behind_its_parameters_is_seen_without_a_search(monkeypatch: pytest.MonkeyPatch) -> None:
    searched: list[str] = []
    parse = names_module._parse
    monkeypatch.setattr(names_module, "_parse", lambda key, table: searched.append(key) or parse(key, table))
    parameters = {f"/model/layers.{i}.weight": f"linear_{i}.w_0.dist" for i in range(100)}
    entries = {**parameters, **own(*(f"{name}_{kind}_0" for name in parameters.values() for kind in KINDS[:5]))}
    assert len(names_module.Names(list(entries), list(entries.values())).variables) == 500
    assert set(searched) == set(parameters.values())
