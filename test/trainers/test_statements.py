"""Resumes with an ``aoa_config``: the model that goes on does not have the keys of the one that saved.

It computes the same. So losses, weights and optimizer states must be those of a job that was not interrupted.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from test.trainers.jobs import (
    CUT,
    KINDS,
    LAYOUTS,
    Job,
    Jobs,
    Outcome,
    Run,
    assert_resumed,
    differences,
    whole,
    with_layers_exchanged,
)

SOURCES = ("one", "sharding2 of version 2", CUT)
WEIGHTS = [
    *("input_layernorm", "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
    *(f"self_attn.{name}_proj" for name in "qkvo"),
]
EXCHANGED = [  # layers; and there and back again what is no layer's, which is tied to the embedding
    *(f"model.layers.0.{name}.weight -> first.{name}" for name in WEIGHTS),
    *(f"model.layers.1.{name}.weight -> model.layers.0.{name}.weight" for name in WEIGHTS),
    *(f"first.{name} -> model.layers.1.{name}.weight" for name in WEIGHTS),
    "lm_head.weight^T -> turned",
    "turned -> half.0, half.1, axis=1",
    "half.0, half.1 -> joined, axis=1",
    "joined^T -> lm_head.weight",
]
MLP = "model.layers.$LAYER_ID.mlp"
FUSED = [f"{MLP}.gate_proj.weight, {MLP}.up_proj.weight -> {MLP}.up_gate_proj.weight, fused_ffn"]
APART = [f"{MLP}.up_gate_proj.weight -> {MLP}.gate_proj.weight, {MLP}.up_proj.weight, fused_ffn"]
TWICE = [
    "model.layers.0.mlp.up_proj.weight -> model.layers.1.mlp.up_proj.weight",
    "model.layers.1.input_layernorm.weight -> model.layers.0.input_layernorm.weight",
]
STATES = ["", ".moment1_0", ".moment2_0", ".beta1_pow_acc_0", ".beta2_pow_acc_0", ".w_0"]
ways = pytest.mark.parametrize(("writer", "reader"), [("Paddle", "Paddle"), ("Paddle", "ours"), ("ours", "ours")])
readers = pytest.mark.parametrize("reader", ["Paddle", "ours"])


def statements(lines: list[str], reverse: bool = False) -> dict[str, Any]:
    """Return the arguments of a Trainer that has them."""
    return {"aoa_config": {"aoa_statements": lines, "aoa_config_reverse": reverse}}


@ways
@pytest.mark.parametrize(
    ("kind", "source", "target"),
    [
        *(("trained", source, target) for source, target in [("one", "sharding2"), ("data2", "one")]),
        ("trained", "sharding2 of version 2", "data2"),
        *(("bfloat16", source, target) for source in SOURCES for target in LAYOUTS),
    ],
)
def test_layers_with_exchanged_keys(
    run: Run, jobs: Jobs, tmp_path: Path, kind: str, source: str, target: str, writer: str, reader: str
) -> None:
    """Into version 2 of sharding PaddleFormers reads parameters in float32 without statements: not tried."""
    folder, _ = jobs.trained(kind, source, writer == "ours")
    outcomes = resumed(run, folder, tmp_path, kind, target, reader, "exchanged", statements(EXCHANGED))
    assert_resumed(outcomes, jobs.trained(kind, target, False, model="exchanged")[1])
    _, usual = jobs.trained(kind, target, False)
    found = {with_layers_exchanged(key): tensor for key, tensor in whole(outcomes).items()}
    assert not differences(found, whole(usual))
    assert len(differences(whole(outcomes), whole(usual))) >= 2 * len(WEIGHTS)
    if kind == "trained":
        assert [outcome.losses for outcome in outcomes] == [outcome.losses[2:] for outcome in usual]
    else:
        assert all(f"model.norm.weight{state}" in found for state in STATES)


@ways
@pytest.mark.parametrize(
    ("source", "target"),
    [("one", "one"), ("one", CUT), ("sharding2", "sharding2 of version 2"), ("sharding2 of version 2", CUT),
     ("sharding2 of version 2", "sharding2"), (CUT, "data2"), (CUT, CUT), (CUT, "sharding2 of version 2")],
)  # fmt: skip
def test_fused_projections(
    run: Run, jobs: Jobs, tmp_path: Path, source: str, target: str, writer: str, reader: str
) -> None:
    folder, _ = jobs.trained("bfloat16", source, writer == "ours")
    options = statements(FUSED)
    outcomes = resumed(run, folder, tmp_path, "bfloat16", target, reader, "fused", options, every_state=True)
    assert_resumed(outcomes, jobs.trained("bfloat16", target, False, model="fused")[1])
    assert all(f"model.layers.1.mlp.up_gate_proj.weight{state}" in whole(outcomes) for state in STATES)


@ways
@pytest.mark.parametrize(
    ("source", "target", "lines", "reverse"),
    [("one", "sharding2 of version 2", FUSED, True), ("one", "one", APART, False), (CUT, "data2", APART, False),
     (CUT, CUT, APART, False)],
)  # fmt: skip
def test_fused_projections_are_taken_apart(
    run: Run, jobs: Jobs, tmp_path: Path, source: str, target: str, lines: list[str], reverse: bool, writer: str,
    reader: str,
) -> None:  # fmt: skip
    """Paddle's own load fills the powers of betas, which both take of one tensor, of the up projections alone."""
    folder, _ = jobs.trained("bfloat16", source, writer == "ours", model="fused")
    options = statements(lines, reverse)
    outcomes = resumed(run, folder, tmp_path, "bfloat16", target, reader, "Llama", options, every_state=True)
    _, expected = jobs.trained("bfloat16", target, False)
    if reader == "ours":
        assert_resumed(outcomes, expected)
    else:
        gates = {f"model.layers.{i}.mlp.gate_proj.weight{state}" for i in (0, 1) for state in STATES}
        assert set(differences(whole(outcomes), whole(expected))) == gates


@readers
@pytest.mark.parametrize("target", ["one", "sharding2", "sharding2 of version 2"])
def test_paddleformers_leaves_out_states_of_keys_that_are_new(
    run: Run, jobs: Jobs, tmp_path: Path, target: str, reader: str
) -> None:
    """Whoever loads: it does not ask for them. A job that wants them makes them, as ``every_state`` does."""
    folder, _ = jobs.trained("bfloat16", "one", reader == "ours")
    outcomes = resumed(run, folder, tmp_path, "bfloat16", target, reader, "fused", statements(FUSED))
    _, expected = jobs.trained("bfloat16", target, False, model="fused")
    fused = {f"model.layers.{i}.mlp.up_gate_proj.weight{state}" for i in (0, 1) for state in STATES}
    assert set(differences(whole(outcomes), whole(expected))) == fused


@pytest.mark.parametrize("target", LAYOUTS)
def test_a_stored_tensor_that_is_wanted_twice(run: Run, jobs: Jobs, tmp_path: Path, target: str) -> None:
    """Under its own key and, by a statement, under another: each gets it.

    Of targets that take the same piece of a stored tensor on a rank, Paddle's own load fills the one whose key comes
    last, whatever the statement says. The names and the layout decide what stays as it was initialised.
    """
    folder, usual = jobs.trained("bfloat16", "one", False)
    found = {
        reader: whole(resumed(run, folder, tmp_path / reader, "bfloat16", target, reader, "Llama", statements(TWICE)))
        for reader in ("Paddle", "ours")
    }
    expected, lost = whole(usual), set()
    for line, state in itertools.product(TWICE, STATES):
        source, _, given = line.partition(" -> ")
        expected[given + state] = expected[source + state]
        lost.add(min(source, given) + state)
    assert not differences(found["ours"], expected)
    unlike = set(differences(found["Paddle"], expected))
    assert unlike <= lost
    if not target.startswith("sharding2"):  # whose ranks have different parts
        assert unlike == lost


def resumed(
    run: Run, folder: Path, output: Path, kind: str, target: str, reader: str, model: str, arguments: dict[str, Any],
    every_state: bool = False,
) -> list[Outcome]:  # fmt: skip
    """What ranks have that go on from the checkpoint of step 2 in a folder, to the end."""
    begin = str(folder / "checkpoint-2")
    job = Job(target, str(output), begin, reader == "ours", model=model, arguments=arguments, every_state=every_state,
              **KINDS[kind])  # fmt: skip
    return run("train", job)
