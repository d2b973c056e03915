"""How much memory there is for this process, on hosts and in containers that are a folder here."""

from __future__ import annotations

from pathlib import Path

import pytest

from paddle_dist_ckpt.core.host_memory import free_memory

GIB = 1 << 30
HOST = {"proc/meminfo": f"MemTotal: {1 << 21} kB\nMemAvailable: {8 << 20} kB\nBuffers: 1 kB\n"}
JOB = "sys/fs/cgroup/kube.slice/pod"
VERSION_2 = {
    **HOST,
    "proc/self/cgroup": "0::/kube.slice/pod/job\n",
    f"{JOB}/job/memory.max": "max\n",
    f"{JOB}/job/memory.current": "1\n",
    f"{JOB}/memory.max": f"{4 * GIB}\n",
    f"{JOB}/memory.current": f"{3 * GIB}\n",
    f"{JOB}/memory.stat": f"anon {2 * GIB}\ninactive_file {GIB // 2}\nactive_file 4096\nslab 7\n",
}
OLD = "sys/fs/cgroup/memory"
VERSION_1 = {
    **HOST,
    "proc/self/cgroup": "9:name=systemd:/\n4:hugetlb,memory:/docker/5f\n1:cpu:/docker/5f\n0::/\n",
    f"{OLD}/docker/5f/memory.limit_in_bytes": f"{2 * GIB}",
    f"{OLD}/docker/5f/memory.usage_in_bytes": f"{GIB}",
    f"{OLD}/docker/5f/memory.stat": "inactive_file 5\ntotal_inactive_file 4096\ntotal_active_file 8192\n",
    f"{OLD}/memory.limit_in_bytes": f"{(1 << 63) - 4096}",
    f"{OLD}/memory.usage_in_bytes": f"{7 * GIB}",
}


def made(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (HOST, 8 * GIB),
        (VERSION_2, GIB + GIB // 2 + 4096),
        (VERSION_1, GIB + 4096 + 8192),
        ({**VERSION_2, "proc/meminfo": "MemAvailable: 7 kB\n"}, 7 * 1024),
        ({name: text for name, text in VERSION_1.items() if name != "proc/meminfo"}, GIB + 4096 + 8192),
        ({**VERSION_2, f"{JOB}/memory.current": f"{9 * GIB}"}, 0),
        ({**VERSION_2, f"{JOB}/memory.max": "max"}, 8 * GIB),
        ({**VERSION_2, f"{JOB}/memory.high": f"{3 * GIB + 1}"}, GIB // 2 + 4096 + 1),
        ({**VERSION_2, f"{JOB}/memory.max": "max", f"{JOB}/memory.high": f"{4 * GIB}"}, GIB * 3 // 2 + 4096),
        ({**VERSION_2, f"{JOB}/memory.high": "max"}, GIB * 3 // 2 + 4096),
        (
            {name.replace("pod", "作业"): text.replace("pod", "作业") for name, text in VERSION_2.items()},
            GIB * 3 // 2 + 4096,
        ),
        ({}, None),
        (
            {"proc/meminfo": "MemAvailable: lots\n", "proc/self/cgroup": "nonsense\n::\n", f"{OLD}/memory.stat": ""},
            None,
        ),
    ],
    ids=[
        "a host",
        "version 2",
        "version 1",
        "a full host",
        "no word of the host",
        "more than may be",
        "max",
        "high",
        "high alone",
        "no high",
        "a name",
        "-",
        "?",
    ],
)
def test_what_is_left(tmp_path: Path, files: dict[str, str], expected: int | None) -> None:
    assert free_memory(made(tmp_path, files)) == expected


@pytest.mark.parametrize(
    ("group", "files"), [("sys/fs/cgroup", VERSION_2), (OLD, VERSION_1)], ids=["version 2", "version 1"]
)
def test_a_container_that_sees_its_own_group_where_all_would_be(
    tmp_path: Path, group: str, files: dict[str, str]
) -> None:
    names = ("memory.max", "memory.current") if group != OLD else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    inside = {name: text for name, text in files.items() if name.startswith("proc/")}
    inside |= dict(zip([f"{group}/{name}" for name in names], (f"{3 * GIB}", f"{GIB}"), strict=True))
    assert free_memory(made(tmp_path, inside)) == 2 * GIB


@pytest.mark.parametrize("group", ["sys/fs/cgroup", OLD], ids=["version 2", "version 1"])
@pytest.mark.parametrize("child", ["job", ""])
def test_a_group_in_a_container_that_is_told_its_path_on_the_host(tmp_path: Path, group: str, child: str) -> None:
    """As where there is no namespace of groups: what is mounted is the container's group, and so are paths below it."""
    names = ("memory.max", "memory.current") if group != OLD else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    told, version = f"/docker/5f/{child}", "0:" if group != OLD else "4:hugetlb,memory"
    inside = {
        "proc/self/cgroup": f"{version}:{told.rstrip('/')}\n",
        "proc/self/mountinfo": "25 1 0:22 / /sys rw - sysfs sysfs rw\nnonsense\n\n"
        f"36 25 98:0 /docker/5f /{group} ro,nosuid - cgroup cgroup rw,memory\n",
    }
    for limit, folder in ((3 * GIB, group), (2 * GIB, f"{group}/job"), (1, f"{group}/docker/5f/job")):
        inside |= dict(zip([f"{folder}/{name}" for name in names], (f"{limit}", f"{GIB}"), strict=True))
    assert free_memory(made(tmp_path, inside)) == (GIB if child else 2 * GIB)


def test_of_this_host() -> None:
    found = free_memory()
    assert found is None or 0 <= found < 1 << 50
