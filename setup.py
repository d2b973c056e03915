"""Packaging of paddle_dist_ckpt. Tool settings are in pyproject.toml."""

from __future__ import annotations

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).resolve().parent

# The oldest versions that pass the tests together. Of most, older ones lack something that is used (msgspec's convert,
# tqdm's delay), which fails only when it is. typer brings its own click from 0.26 on; with some that others install,
# the commands took wrong arguments without a word.
REQUIRES = [
    "ml_dtypes>=0.3.1",
    "msgspec>=0.18",
    "numpy>=1.24",
    "rich>=13.8",
    "tqdm>=4.58",
    "typer>=0.26",
    "xxhash>=3.0",
]
# Paddle's CPU and GPU builds are different distributions, and 3.x builds for GPUs come from Paddle's own index. So
# neither is a plain requirement: whoever installs the library has one, or asks for it with an extra.
EXTRAS = {
    "cpu": ["paddlepaddle>=3.0", "numpy<2.4"],  # Paddle's shard_dataloader fails with numpy 2.4
    "gpu": ["paddlepaddle-gpu"],
    "test": ["hypothesis", "numpy<2.4", "pytest>=8", "pytest-xdist>=3.6", "safetensors"],
    "dev": ["mypy", "ruff"],
    "docs": ["furo", "jieba", "sphinx>=7.4"],
}


def version() -> str:
    """Return the version without importing the package, whose requirements may not be installed yet."""
    text = (ROOT / "paddle_dist_ckpt" / "version.py").read_text(encoding="utf-8")
    found = re.search(r'^__version__ = "([^"]+)"$', text, re.MULTILINE)
    if found is None:
        raise RuntimeError('paddle_dist_ckpt/version.py has no line of the form: __version__ = "1.2.3"')
    return found[1]


# Where the repository's files can be read, up to the path of a file; the only place where that is said. As long as it
# is empty, a package index is told of no project pages.
FILES_URL = ""


def long_description() -> str:
    """Return the README as a package index shows it, where paths of the repository lead nowhere.

    With FILES_URL links are made absolute. Without it, images and the choice of a language are left out, and of other
    links to files the text is kept.
    """
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    if FILES_URL:
        return re.sub(r"(?<=\]\()(?!\w+:)", f"{FILES_URL}/", text)
    text = re.sub(r"^(?:!\[.*\]\(.*\)|\*\*English\*\* \| .*)\n\n", "", text, flags=re.MULTILINE)
    return re.sub(r"\[([^\]]*)\]\((?!\w+:)[^)]*\)", r"\1", text)


setup(
    name="paddle_dist_ckpt",
    version=version(),
    description="Distributed checkpoints for PaddlePaddle: save on one layout of ranks, load on any other",
    long_description=long_description(),
    long_description_content_type="text/markdown",
    project_urls={"Documentation": f"{FILES_URL}/docs_en/index.rst"} if FILES_URL else {},
    license="Apache-2.0",
    license_files=["LICENSE"],
    packages=find_packages(include=["paddle_dist_ckpt", "paddle_dist_ckpt.*"]),
    package_data={"paddle_dist_ckpt": ["py.typed"], "paddle_dist_ckpt.report": ["assets/*"]},
    python_requires=">=3.10",
    install_requires=REQUIRES,
    extras_require=EXTRAS,
    entry_points={"console_scripts": ["paddle-dist-ckpt = paddle_dist_ckpt.cli.main:main"]},
    classifiers=[
        "Intended Audience :: Developers",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    zip_safe=False,
)
