# Needs nothing but make and Python 3.10 to 3.13: everything else is installed into .venv on first use, and again when
# setup.py changes.

VENV := .venv
PYTHON := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed
INSTALLED_DEV := $(VENV)/.installed-dev
INSTALLED_DOCS := $(VENV)/.installed-docs
PIP_INSTALL := $(PYTHON) -m pip install --quiet --disable-pip-version-check
# How many tests run at once. More than two cores can do, since tests also wait for ranks and for disks.
WORKERS := 4
BENCH_VENV := benchmark/.venv
# Older versions of PaddlePaddle: for each the first numpy that it fails with, and the newest Python that it has wheels for.
COMPAT := 3.0.0 2.6.2
NUMPY_3.0.0 := 2.4
NUMPY_2.6.2 := 2
PYTHON_3.0.0 := 3.13
PYTHON_2.6.2 := 3.12
# And the tests of devices, but for those that need a newer one.
DEVICES_3.0.0 := $(filter-out %test_device.py %test_collectives.py,$(wildcard test/device_plugin/test_*.py))
# PaddleFormers' and PaddleNLP's own trainers, with Paddle 3.3.1.
TRAINERS_VENV := .venv-trainers

.DELETE_ON_ERROR:
.PHONY: help demo test test-long test-compat test-trainers torture lint docs package bench clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 24

# Tests start hundreds of processes, each of which would compile the library anew. (`make clean` removes __pycache__.)
test test-long test-compat test-trainers torture: export PYTHONDONTWRITEBYTECODE :=

demo: $(INSTALLED) ## train on 4 ranks, come back on 2 in another layout, compare
	@$(PYTHON) examples/demo.py

test: $(INSTALLED) ## run the tests
	$(PYTHON) -m pytest -q -n $(WORKERS)

test-long: $(INSTALLED) ## run the tests with many more random draws and kills
	$(PYTHON) -m pytest -q -n $(WORKERS) --long

test-compat: $(COMPAT:%=.venv-%/.installed) ## run the core tests with older versions of Paddle (6 minutes; not a part of test)
	@set -e; $(foreach version,$(COMPAT),echo "Paddle $(version)"; .venv-$(version)/bin/python -m pytest -q -n $(WORKERS) \
		test/paddle test/readers/test_paddle.py test/readers/test_pdparams.py $(DEVICES_$(version));)

test-trainers: $(TRAINERS_VENV)/.installed ## run jobs of PaddleFormers' and PaddleNLP's trainers on the library (7 minutes; not a part of test)
	$(TRAINERS_VENV)/bin/python -m pytest -q -n 2 test/trainers

torture: $(INSTALLED) ## try for 20 minutes to lose or to mix checkpoints (TORTURE_OPTIONS=--seed 7; goes on if interrupted)
	$(PYTHON) -m test.torture.run --state .torture $(TORTURE_OPTIONS)
	$(PYTHON) -m test.torture.clients

lint: $(INSTALLED_DEV) ## check style and types
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy

docs: $(INSTALLED_DOCS) ## build the documentation in both languages into build/docs
	@for language in en cn; do \
		$(PYTHON) -m sphinx -q -W --keep-going -E -c docs -t $$language docs_$$language build/docs/$$language || exit 1; \
	done
	@cp docs/templates/first.html build/docs/index.html
	@$(PYTHON) docs/check_links.py build/docs
	@echo "Built build/docs/index.html"

package: $(INSTALLED) ## build wheel and sdist into dist, check them, try the wheel in an empty environment (3 minutes)
	rm -rf build/package dist
	$(PYTHON) -m venv build/package/tools
	build/package/tools/bin/python -m pip install --quiet --disable-pip-version-check build twine
	build/package/tools/bin/python -m build
	build/package/tools/bin/python -m twine check --strict dist/*
	$(PYTHON) -m venv build/package/user
	build/package/user/bin/python -m pip install --quiet --disable-pip-version-check "$$(ls dist/*.whl)[cpu]"
	cd build/package && user/bin/python ../../.ci/try-installed ../../README.md

bench: $(INSTALLED) $(BENCH_VENV)/.installed ## measure against other checkpoint libraries (BENCH_OPTIONS=--quick: in less time)
	$(PYTHON) -m benchmark.run --torch-python $(BENCH_VENV)/bin/python $(BENCH_OPTIONS)
	$(PYTHON) -m benchmark.scale $(BENCH_OPTIONS)
	$(PYTHON) -m benchmark.curves $(BENCH_OPTIONS)
	$(PYTHON) -m benchmark.bytes_read $(BENCH_OPTIONS)
	$(PYTHON) -m benchmark.exchange $(BENCH_OPTIONS)
	$(PYTHON) -m benchmark.replicas $(BENCH_OPTIONS)
	$(PYTHON) -m benchmark.export $(BENCH_OPTIONS)
	$(PYTHON) -m benchmark.foreign $(BENCH_OPTIONS)
	$(PYTHON) -m benchmark.async_save --torch-python $(BENCH_VENV)/bin/python $(BENCH_OPTIONS)
	$(PYTHON) -m benchmark.device $(BENCH_OPTIONS)
	$(BENCH_VENV)/bin/python -m benchmark.charts
	$(PYTHON) -m benchmark.summary

.venv-%/.installed: setup.py
	@python=$$(.ci/find-python $(PYTHON_$*)) || exit 1; \
	echo "Installing Paddle $* and the test requirements into .venv-$*, of $$($$python --version) (once, about a minute)"; \
	$$python -m venv --clear .venv-$*
	@.venv-$*/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[test]' \
		'paddlepaddle==$*' 'numpy<$(NUMPY_$*)' setuptools
	@touch $@

$(TRAINERS_VENV)/.installed: setup.py test/trainers/requirements.txt test/trainers/requirements-alone.txt
	@python=$$(.ci/find-python) || exit 1; \
	echo "Installing PaddleFormers, PaddleNLP and the test requirements into $(TRAINERS_VENV), of $$($$python --version) (once, two minutes)"; \
	$$python -m venv --clear $(TRAINERS_VENV)
	@$(TRAINERS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[test]' \
		-r test/trainers/requirements.txt
	@$(TRAINERS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps \
		-r test/trainers/requirements-alone.txt
	@touch $@

$(BENCH_VENV)/.installed: benchmark/requirements.txt | $(INSTALLED)
	$(PYTHON) -m venv --clear $(BENCH_VENV)
	$(BENCH_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -r benchmark/requirements.txt
	@touch $@

clean: ## remove what tools and builds left behind (not .venv*)
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name '.venv*' -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

$(INSTALLED): setup.py
	@if ! $(PYTHON) -m pip --version >/dev/null 2>&1; then \
		python=$$(.ci/find-python) || exit 1; \
		echo "Making $(VENV) with $$($$python --version)"; \
		$$python -m venv --clear $(VENV); \
	fi
	@echo "Installing PaddlePaddle and the test requirements into $(VENV) (once, about a minute)"
	@$(PIP_INSTALL) --editable '.[cpu,test]'
	@touch $@

$(INSTALLED_DEV): $(INSTALLED)
	@$(PIP_INSTALL) --editable '.[cpu,test,dev]'
	@touch $@

$(INSTALLED_DOCS): $(INSTALLED)
	@$(PIP_INSTALL) --editable '.[cpu,test,docs]'
	@touch $@
