"""Ranks on which trainers run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from typing import Any

import pytest

from test.ranks.pool import RankPool
from test.trainers.jobs import STAGES, Job, Jobs, Outcome, Run

_SECONDS = 300.0  # which a machine that is busy otherwise may take


@pytest.fixture(scope="session")
def run() -> Iterator[Run]:
    """Calls a function of `test.trainers.formers` with a job and more, on as many warm ranks as the layout has."""
    yield from _calls("paddleformers", "test.trainers.formers")


@pytest.fixture(scope="session")
def run_auto() -> Iterator[Run]:
    """Calls a function of `test.trainers.nlp` likewise."""
    yield from _calls("paddlenlp", "test.trainers.nlp")


def _calls(package: str, module: str) -> Iterator[Run]:
    if find_spec(package) is None:
        pytest.skip(f"needs {package}: make test-trainers")
    with ExitStack() as stack:
        one, two, in_stages = (stack.enter_context(RankPool(ranks)) for ranks in (1, 2, 2))

        def call(function: str, job: Job, *arguments: Any) -> list[Outcome]:
            # Where ranks have been in stages, later jobs of PaddleFormers come to slightly other sums.
            pool = one if job.layout == "one" else in_stages if job.layout == STAGES else two
            return pool.run(f"{module}:{function}", job, *arguments, timeout=_SECONDS)

        yield call


@pytest.fixture(scope="session")
def jobs(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    """Jobs that several tests look at. Each is run once."""
    return Jobs(run, lambda: tmp_path_factory.mktemp("job"))
