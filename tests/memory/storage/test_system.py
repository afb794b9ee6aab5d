"""What the system has free: its own figure, and what the control groups of the process leave, on made-up trees."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from kvtier.memory.storage import system

MIB = 2**20
V2 = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate"
V1 = "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory"
V1_CPU = "32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu,cpuacct"
UNLIMITED = str(2**63 - 4096)


class Machine:
    """A folder that looks like the root of a Linux system with 1,000 MiB, of which 800 are available."""

    def __init__(self, root: Path) -> None:
        self.root = root
        meminfo = f"MemTotal: {1000 * 1024} kB\nMemFree: {100 * 1024} kB\nMemAvailable: {800 * 1024} kB\n"
        self.write("proc/meminfo", meminfo)

    def write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")

    def runs_in(self, *lines: str, mounts: tuple[str, ...]) -> None:
        """The lines of `/proc/self/cgroup`, and those of mountinfo."""
        self.write("proc/self/cgroup", "\n".join(lines) + "\n")
        self.write("proc/self/mountinfo", "\n".join(mounts) + "\n")

    def v2(self, group: str, *, used: int, high: str = "max", cached: int = 0, **limits: str) -> None:
        """A group of the unified hierarchy; `used` and `cached` in MiB, `max` in bytes or "max"."""
        folder = f"sys/fs/cgroup/{group}".rstrip("/")
        self.write(f"{folder}/memory.max", limits.get("max", "max") + "\n")
        self.write(f"{folder}/memory.high", high + "\n")
        self.write(f"{folder}/memory.current", f"{used * MIB}\n")
        self.write(f"{folder}/memory.stat", f"anon 5\nfile 7\nactive_file 3\ninactive_file {cached * MIB}\n")

    def v1(self, group: str, *, limit: str, used: int, cached: int = 0, total_cached: int | None = None) -> None:
        """A group of the memory controller's own hierarchy."""
        folder = f"sys/fs/cgroup/memory/{group}".rstrip("/")
        self.write(f"{folder}/memory.limit_in_bytes", limit + "\n")
        self.write(f"{folder}/memory.usage_in_bytes", f"{used * MIB}\n")
        stat = f"cache 1\ninactive_file {cached * MIB}\n"
        if total_cached is not None:
            stat += f"total_cache 1\ntotal_inactive_file {total_cached * MIB}\n"
        self.write(f"{folder}/memory.stat", stat)

    @property
    def free(self) -> float:
        """MiB."""
        return system.free_host_memory(self.root) / MIB

    @property
    def total(self) -> float:
        """MiB."""
        return system.total_host_memory(self.root) / MIB


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def mib(n: int) -> str:
    return str(n * MIB)


def test_without_control_groups_the_system_says_what_is_free(machine: Machine) -> None:
    assert (machine.free, machine.total) == (800, 1000)


def test_the_least_of_all_groups_above_the_process_counts(machine: Machine) -> None:
    machine.runs_in("0::/slurm/job_7/step_0/task_1", mounts=(V2,))
    machine.v2("slurm", max=mib(900), used=300)
    machine.v2("slurm/job_7", max=mib(500), used=250)
    machine.v2("slurm/job_7/step_0", used=200)
    machine.v2("slurm/job_7/step_0/task_1", used=150)
    assert (machine.free, machine.total) == (250, 500)
    machine.v2("slurm", max=mib(900), used=700)  # other jobs take what the group above has
    assert (machine.free, machine.total) == (200, 500)
    machine.v2("slurm/job_7/step_0/task_1", max=mib(180), used=150)
    assert (machine.free, machine.total) == (30, 180)


def test_a_group_that_is_not_above_the_process_does_not_count(machine: Machine) -> None:
    machine.runs_in("0::/user.slice/session.scope", mounts=(V2,))
    machine.v2("user.slice", max=mib(600), used=100)
    machine.v2("system.slice", max=mib(10), used=9)
    machine.v2("user.slice/other.scope", max=mib(20), used=1)
    machine.v2("user.slice/session.scope", used=100)
    assert (machine.free, machine.total) == (500, 600)


def test_the_limit_from_which_the_kernel_slows_a_group_down_counts(machine: Machine) -> None:
    machine.runs_in("0::/a.scope", mounts=(V2,))
    machine.v2("a.scope", max=mib(700), high=mib(400), used=100)
    assert (machine.free, machine.total) == (300, 400)


def test_files_that_can_be_dropped_are_not_in_use(machine: Machine) -> None:
    machine.runs_in("0::/a.scope", mounts=(V2,))
    machine.v2("a.scope", max=mib(400), used=300, cached=120)
    assert machine.free == 220


def test_a_limit_above_what_the_system_has_changes_nothing(machine: Machine) -> None:
    machine.runs_in("0::/a.scope", mounts=(V2,))
    machine.v2("a.scope", max=mib(5000), used=10)
    assert (machine.free, machine.total) == (800, 1000)


def test_a_usage_beyond_the_limit_leaves_nothing(machine: Machine) -> None:
    machine.runs_in("0::/a.scope", mounts=(V2,))
    machine.v2("a.scope", max=mib(300), high=mib(100), used=250)
    assert machine.free == 0


def test_nested_groups_of_the_first_version(machine: Machine) -> None:
    machine.runs_in("9:name=systemd:/", "4:memory:/pods/p1/c1", "1:cpu,cpuacct:/x", "0::/", mounts=(V1_CPU, V1))
    machine.v1("", limit=UNLIMITED, used=600)
    machine.v1("pods", limit=UNLIMITED, used=500)
    machine.v1("pods/p1", limit=mib(400), used=100, cached=1, total_cached=30)
    machine.v1("pods/p1/c1", limit=UNLIMITED, used=80)
    assert (machine.free, machine.total) == (330, 400)
    machine.v1("pods/p1/c1", limit=mib(90), used=80, cached=5)  # an old kernel without totals
    assert (machine.free, machine.total) == (15, 90)


def test_both_versions_at_once(machine: Machine) -> None:
    unified = "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw"
    machine.runs_in("4:memory:/a", "0::/b", mounts=(V1, unified))
    machine.v1("a", limit=mib(600), used=100)
    machine.v2("unified/b", max=mib(500), used=100)
    assert machine.free == 400
    machine.v2("unified/b", max="max", used=100)
    assert machine.free == 500


@pytest.mark.parametrize(
    ("group", "mounted"),
    [
        ("/docker/c1", "/docker/c1"),  # no namespace: the own part of the hierarchy is mounted
        ("/", "/"),  # a namespace
        ("/", "/docker/c1"),  # a namespace, and a mount made outside it
        ("/../../system.slice", "/"),  # a process that was moved out of its namespace
        ("/elsewhere", "/docker/c1"),
    ],
)
def test_in_a_container_the_part_that_is_mounted_counts(machine: Machine, group: str, mounted: str) -> None:
    machine.runs_in(f"0::{group}", mounts=(V2.replace(" / ", f" {mounted} ", 1),))
    machine.v2("", max=mib(300), used=100)
    machine.v2("..", max="1", used=0)  # outside the mount: not a control group
    assert (machine.free, machine.total) == (200, 300)


def test_a_group_below_the_part_that_is_mounted(machine: Machine) -> None:
    machine.runs_in("0::/docker/c1/inner", mounts=(V2.replace(" / ", " /docker/c1 ", 1),))
    machine.v2("", max=mib(300), used=100)
    machine.v2("inner", max=mib(150), used=90)
    assert machine.free == 60


def test_a_mount_point_with_a_space(machine: Machine) -> None:
    machine.runs_in("0::/", mounts=(V2.replace("/sys/fs/cgroup", "/my\\040groups"),))
    machine.write("my groups/memory.max", mib(50))
    machine.write("my groups/memory.current", "0")
    assert machine.free == 50


def test_where_mounts_cannot_be_read_the_usual_places_are_tried(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "0::/a.scope\n")
    machine.v2("a.scope", max=mib(300), used=100)
    assert machine.free == 200
    machine.write("proc/self/cgroup", "4:memory:/a\n")
    machine.v1("a", limit=mib(200), used=100)
    assert machine.free == 100


def test_files_that_are_missing_or_make_no_sense_are_no_limit(machine: Machine) -> None:
    machine.runs_in("0::/a/b/c", mounts=(V2, "garbage", "1 2 - cgroup2"))
    assert machine.free == 800
    machine.write("sys/fs/cgroup/a/memory.max", mib(100))  # without a usage
    machine.write("sys/fs/cgroup/a/b/memory.max", "")
    machine.write("sys/fs/cgroup/a/b/memory.current", "5")
    machine.write("sys/fs/cgroup/a/b/c/memory.max", mib(300))
    machine.write("sys/fs/cgroup/a/b/c/memory.current", mib(100))  # without statistics
    assert machine.free == 200
    machine.write("proc/meminfo", "")
    assert machine.free <= 200
    assert machine.total == 100


def test_this_machine_has_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0 < system.free_host_memory() <= system.total_host_memory() <= physical
    cpu = torch.device("cpu")
    assert 0 < system.free_device_memory(cpu) <= system.total_device_memory(cpu)


def test_memory_that_torch_holds_and_does_not_use_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (100, 1000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 70)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 30)
    assert system.free_device_memory(torch.device("cuda:0")) == 140
    assert system.total_device_memory(torch.device("cuda:0")) == 1000


@pytest.mark.parametrize(
    ("kind", "features", "lends"),
    [
        ("0x0005", "0110010100", True),
        ("0x0005", "0110000100", False),
        ("0x0005", "01", False),
        ("0x0002", "0110010100", False),
        ("rubbish", "0110010100", False),
        (None, None, False),
    ],
)
def test_a_machine_lends_free_memory_where_its_balloon_reports_it(
    kind: str | None, features: str | None, lends: bool, tmp_path: Path
) -> None:
    machine = Machine(tmp_path)
    machine.write("sys/bus/virtio/devices/virtio0/device", "0x0004\n")
    if kind is not None and features is not None:
        machine.write("sys/bus/virtio/devices/virtio1/device", f"{kind}\n")
        machine.write("sys/bus/virtio/devices/virtio1/features", f"{features}\n")
    assert system.lends_free_memory(tmp_path) == lends
