"""Each check of a machine finds the fault planted in its facts, and nothing in sound ones."""

from __future__ import annotations

import json
import mmap
import os
import re
import resource
import subprocess
import sys
import threading
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import schemas
import torch
from click.testing import CliRunner

from lockstep import doctor, language
from lockstep.cli.doctor import command
from lockstep.cli.main import main
from lockstep.doctor import disk, gpus, leftovers, memory, token
from lockstep.doctor.base import ERROR, OK, UNKNOWN, WARNING, Finding

pytestmark = pytest.mark.launcher

GPU = {"name": "H100", "error": None, "difference": 1e-6, "total": 80, "free": 80,
       "processes": [], "ecc": 0, "throttled": 0}  # fmt: skip
SOUND: dict[str, dict[str, Any]] = {
    "software": {"python": "3.12.1", "lockstep": "0.1.0", "torch": "2.13.0+cu128", "cuda": "12.8",
                 "rocm": None, "nccl": "2.27.3", "driver": "570.1", "available": True},
    "gpus": {"gpus": [GPU, GPU], "nvml": None},
    "cores": {"machine": 16, "allowed": 16, "quota": None, "load": 3.0},
    "memory": {"total": 64 << 30, "available": 60 << 30, "group": None},
    "shared_memory": {"total": 32 << 30, "free": 32 << 30, "writable": True},
    "limits": {"files": 65536, "most_files": None, "processes": None, "locked": None,
               "infiniband": True},
    "clock": {"time": 1.8e9, "synchronised": True},
    "disk": {"folder": "runs", "exists": True, "total": 1 << 40, "free": 1 << 39, "files": None,
             "temporary": "/tmp", "temporary_free": 1 << 36, "speed": 5e8, "problem": None},
    "hostname": {"name": "node1", "addresses": ["10.0.0.1"], "address": "::ffff:10.0.0.1",
                 "waited_s": 0.01},
    "network": {"interfaces": {"lo": ["127.0.0.1"], "eth0": ["10.0.0.1"]}, "loopback_problem": None,
                "address": "10.0.0.1", "interface": "eth0", "mtu": 1500, "mbits": 10000,
                "variables": {"NCCL_SOCKET_IFNAME": "eth"}},
    "variables": {"OMP_NUM_THREADS": "4"},
    "token": {"source": "/home/me/.config/lockstep/token", "problem": None, "do": "", "open": False,
              "digest": "12ab"},
    "leftovers": {"shared": [], "sees_all_processes": True, "logs": []},
}  # fmt: skip

PLANTED = [
    ("software", {"python": "3.10.2"}, ERROR, "older than 3.11"),
    ("software", {"torch": "2.5.1"}, ERROR, "older than 2.6"),
    ("software", {"torch": None, "problem": "ImportError: libcudart"}, ERROR, "libcudart"),
    ("software", {"cuda": None, "nccl": None}, WARNING, "built without CUDA"),
    ("software", {"available": False}, ERROR, "torch cannot use CUDA"),
    ("gpus", {"gpus": [GPU, GPU | {"error": "an illegal access"}]}, ERROR, "GPU 1 does not"),
    ("gpus", {"gpus": [GPU | {"difference": 0.4}]}, ERROR, "GPU 0 computes wrongly (by 0.4)"),
    ("gpus", {"gpus": [GPU | {"difference": float("nan")}]}, ERROR, "computes wrongly (by nan)"),
    ("gpus", {"gpus": [GPU | {"processes": [77]}]}, WARNING, "used by 1 process: 77"),
    ("gpus", {"gpus": [GPU | {"processes": [7, 8]}]}, WARNING, "used by 2 processes: 7, 8"),
    ("gpus", {"gpus": [GPU | {"ecc": 1}]}, ERROR, "has had 1 memory error that"),
    ("disk", {"files": 1}, WARNING, "no more than 1 file can be made"),
    ("gpus", {"gpus": [GPU | {"free": 20}]}, WARNING, "free"),
    ("gpus", {"gpus": [GPU | {"ecc": 3}]}, ERROR, "3 memory errors"),
    ("gpus", {"gpus": [GPU | {"throttled": 0x40 | 0x4}]}, WARNING, "too hot (hardware)"),
    ("gpus", {"gpus": [GPU, GPU | {"name": "T4"}]}, WARNING, "of different kinds"),
    ("cores", {"allowed": 2, "quota": 2.5}, WARNING, "the control group allows 2.5"),
    ("cores", {"load": 60.0}, WARNING, "60.0 processes want a core"),
    ("memory", {"available": 1 << 30}, WARNING, "0.5 GiB"),
    ("memory", {"group": 1 << 30}, WARNING, "its control group leaves 1 GiB"),
    ("memory", {"group": 1 << 20}, ERROR, "too little for one process with torch"),
    ("shared_memory", {"total": 64 << 20, "free": 64 << 20}, WARNING, "bus error"),
    ("shared_memory", {"free": 1 << 20}, WARNING, "nearly full"),
    ("shared_memory", {"writable": False}, ERROR, "may not write"),
    ("limits", {"files": 1024}, WARNING, "more open files"),
    ("limits", {"processes": 100}, WARNING, "at most 100 processes"),
    ("limits", {"locked": 65536}, WARNING, "64 KiB may be locked"),
    ("clock", {"synchronised": False}, WARNING, "not kept right"),
    ("clock", {"time": 0.0}, ERROR, "1970-01-01"),
    ("disk", {"problem": "Permission denied", "speed": None}, ERROR, "Permission denied"),
    ("disk", {"speed": 1e7}, WARNING, "10 MB/s"),
    ("disk", {"free": 1 << 30}, WARNING, "not much for checkpoints"),
    ("disk", {"files": 10}, WARNING, "no more than 10 files"),
    ("disk", {"temporary_free": 1 << 20}, WARNING, "where logs go"),
    ("hostname", {"addresses": []}, WARNING, "does not resolve"),
    ("hostname", {"addresses": ["127.0.1.1"]}, WARNING, "loopback"),
    ("hostname", {"waited_s": 10.0}, WARNING, "the name of ::ffff:10.0.0.1 takes 10 s"),
    ("network", {"loopback_problem": "it is down"}, ERROR, "loopback does not work: it is down"),
    ("network", {"variables": {"GLOO_SOCKET_IFNAME": "eth7"}}, ERROR, "GLOO_SOCKET_IFNAME=eth7"),
    ("network", {"variables": {"NCCL_SOCKET_IFNAME": "ib"}}, ERROR, "NCCL_SOCKET_IFNAME=ib"),
    ("network", {"mtu": 576}, WARNING, "packets are so small"),
    ("variables", {"RANK": "0", "WORLD_SIZE": "4"}, WARNING, "RANK=0, WORLD_SIZE=4"),
    ("variables", {"CUDA_LAUNCH_BLOCKING": "1"}, WARNING, "every kernel runs synchronously"),
    ("variables", {"CUDA_VISIBLE_DEVICES": ""}, WARNING, "hides all GPUs"),
    ("token", {"problem": "others may read it", "do": "chmod"}, ERROR, "others may read"),
    ("token", {"open": True}, WARNING, "anyone who can reach the port"),
    ("leftovers", {"shared": [["/dev/shm/torch_1_2_3", 5 << 20]]}, WARNING, "5 MiB in 1 file of"),
    ("leftovers", {"logs": [["/tmp/lockstep-logs-0/a", 1 << 30]]}, WARNING, "1024 MiB"),
]  # fmt: skip


def test_every_check_has_sound_facts_and_faults() -> None:
    assert tuple(SOUND) == tuple(doctor.CHECKS)
    assert {name for name, *_ in PLANTED} == set(doctor.CHECKS)


@pytest.mark.parametrize("name", doctor.CHECKS)
def test_nothing_is_found_in_a_sound_machine(name: str) -> None:
    finding = import_module(f"lockstep.doctor.{name}").judge(SOUND[name])
    assert finding.level == OK, finding
    assert finding.do == ""


@pytest.mark.parametrize(("name", "fault", "level", "words"), PLANTED)
def test_a_fault_is_found(name: str, fault: dict[str, Any], level: str, words: str) -> None:
    facts = SOUND | {name: SOUND[name] | fault}
    findings = doctor.judge(facts)
    assert findings[name].level == level
    assert words in findings[name].found
    own = {option for parameter in command.params for option in parameter.opts}
    assert set(re.findall(r"(?<!run )--[a-z-]+", findings[name].do)) <= own
    assert findings[name].do
    others = {other: finding for other, finding in findings.items() if other != name}
    assert {finding.level for finding in others.values()} == {OK}
    assert doctor.exit_code(findings) == (1 if level == ERROR else 0)


def test_rocm_and_its_nccl_are_named() -> None:
    rocm = {"cuda": None, "rocm": "6.4.2", "nccl": "2.22.3", "driver": None}
    finding = import_module("lockstep.doctor.software").judge(SOUND["software"] | rocm)
    assert finding.level == OK
    assert "ROCm 6.4.2, RCCL 2.22.3" in finding.found
    assert "CUDA" not in finding.found


def test_visible_gpus_that_cuda_cannot_use_are_no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)  # so says NVML
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "init", fail)
    software = import_module("lockstep.doctor.software")
    assert software.gather(Path())["available"] is False
    assert gpus.gather(Path())["gpus"] == []


@pytest.mark.parametrize(
    ("others", "words"),
    [
        ({}, "no route to other machines"),
        ({"lan": ["10.0.0.1"]}, "no default route: lan (10.0.0.1)"),
    ],
)
def test_a_machine_without_a_default_route(others: dict[str, list[str]], words: str) -> None:
    facts = SOUND["network"] | {"interface": None, "variables": {}}
    facts |= {"interfaces": {"lo": ["127.0.0.1"]} | others}
    finding = import_module("lockstep.doctor.network").judge(facts)
    assert finding.level == OK
    assert finding.found.startswith(words)


def test_a_machine_without_gpus_is_sound() -> None:
    assert gpus.judge({"gpus": [], "nvml": None}).level == OK
    found = gpus.judge({"gpus": [GPU], "nvml": "nvidia-ml-py is not installed"})
    assert (found.level, "not known: nvidia-ml-py" in found.found) == (OK, True)


def test_a_limit_that_the_user_may_raise_is_raised_without_root() -> None:
    from lockstep.doctor import limits

    sound = SOUND["limits"] | {"files": 256}
    assert limits.judge(sound | {"most_files": 8192}).do == "ulimit -n 8192"
    assert "as root" in limits.judge(sound | {"most_files": 512}).do


def test_the_command_on_this_machine(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["doctor", "--folder", str(tmp_path), "--json", "-"])
    report = json.loads(result.stdout)
    schemas.check("doctor", report)
    assert tuple(report) == tuple(doctor.CHECKS)
    assert all(set(of) == {"level", "found", "do", "facts"} for of in report.values())
    assert all(UNKNOWN not in of["facts"] for of in report.values())
    assert result.exit_code == int(any(of["level"] == ERROR for of in report.values()))
    facts = {name: of["facts"] for name, of in report.items()}
    assert facts["software"]["python"] == sys.version.split()[0]
    assert facts["disk"]["speed"] > 0
    assert facts["limits"]["files"] == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert list(tmp_path.iterdir()) == []


def test_a_check_that_hangs_or_raises_hides_no_other(monkeypatch: Any) -> None:
    from lockstep.doctor import clock, cores, hostname

    go_on = threading.Event()

    def broken(folder: Path) -> Any:
        raise ZeroDivisionError("no cores")

    monkeypatch.setattr(hostname, "gather", lambda folder: go_on.wait())
    monkeypatch.setattr(cores, "gather", broken)
    monkeypatch.setattr(clock, "gather", lambda folder: SOUND["clock"])
    before = set(threading.enumerate())
    facts = doctor.gather(Path("."), ("hostname", "cores", "clock"), deadline_s=0.2)
    go_on.set()
    for thread in set(threading.enumerate()) - before:
        thread.join()
    findings = doctor.judge(facts)
    assert findings["hostname"].found == "not known: no answer within 0.2 s"
    assert findings["cores"].found == "not known: ZeroDivisionError: no cores"
    assert [finding.level for finding in findings.values()] == [WARNING, WARNING, OK]
    text = doctor.format_findings(findings)
    assert text[0].startswith("warning  hostname  not known")
    assert text[-1].startswith("ok       clock")


def test_what_can_be_mended_is_mended(tmp_path: Path, monkeypatch: Any) -> None:
    shared, temporary = tmp_path / "shm", tmp_path / "tmp"
    logs = temporary / f"lockstep-logs-{os.getuid()}"
    for folder in (shared, logs / "old", logs / "new"):
        folder.mkdir(parents=True)
    ended = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"],
                           capture_output=True, text=True, check=True).stdout.strip()  # fmt: skip
    gone, runs = shared / f"torch_{ended}_1_0", shared / f"torch_{os.getpid()}_1_0"
    young, other = shared / f"torch_{ended}_2_0", shared / "sem.mine"
    long_ago = time.time() - 30 * 24 * 3600
    for path in (gone, runs, young, other, logs / "old" / "log", logs / "new" / "log"):
        path.write_bytes(bytes(1000))
        if path not in (young, logs / "new" / "log"):
            os.utime(path, (long_ago, long_ago))
    monkeypatch.setattr(leftovers, "SHARED_MEMORY", shared)
    monkeypatch.setattr(leftovers, "sees_all_processes", lambda: True)
    used = shared / f"torch_{ended}_3_0"
    used.write_bytes(bytes(1000))
    os.utime(used, (long_ago, long_ago))
    with used.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ):
        assert leftovers.gather(tmp_path)["shared"] == [[str(gone), 1000]]
    used.unlink()
    monkeypatch.setattr(leftovers.tempfile, "gettempdir", lambda: str(temporary))
    folder = tmp_path / "runs" / "a"
    facts = {"leftovers": leftovers.gather(folder), "disk": disk.gather(folder)}
    assert facts["disk"]["exists"] is False
    # Another container's process may have it.
    hidden = {**facts["leftovers"], "sees_all_processes": False}
    assert leftovers.fix(hidden) == []
    assert "if no container" in leftovers.judge(hidden).do
    few = {**facts["leftovers"], "shared": []}
    assert leftovers.judge(few).level == OK  # what takes little is no finding, and stays
    assert leftovers.fix(few) == []
    assert (logs / "old").is_dir()
    monkeypatch.setattr(leftovers, "MAX_LOGS_SIZE", 999)
    done = doctor.fix(facts)
    assert sorted(done) == sorted([f"made {folder}", f"removed {gone}", f"removed {logs / 'old'}"])
    assert folder.is_dir()
    assert sorted(shared.iterdir()) == sorted([runs, young, other])
    assert list(logs.iterdir()) == [logs / "new"]


def test_whether_processes_have_other_numbers_elsewhere(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "space").touch()
    for process in ("1", "22"):
        (tmp_path / process / "ns").mkdir(parents=True)
        (tmp_path / process / "ns" / "pid").hardlink_to(tmp_path / "space")
    (tmp_path / "333").mkdir()  # another user's
    monkeypatch.setattr(leftovers, "PROC", tmp_path)
    assert leftovers.sees_all_processes() is False  # this is a container
    monkeypatch.setattr(leftovers, "INITIAL_PID_NAMESPACE", (tmp_path / "space").stat().st_ino)
    assert leftovers.sees_all_processes() is True
    (tmp_path / "333" / "ns").mkdir()
    (tmp_path / "333" / "ns" / "pid").touch()
    assert leftovers.sees_all_processes() is False  # that is one
    monkeypatch.setattr(leftovers, "PROC", tmp_path / "none")
    assert leftovers.sees_all_processes() is False


def test_a_token_that_others_may_read(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv("LOCKSTEP_TOKEN", raising=False)
    assert token.gather(tmp_path)["source"] is None
    assert list(tmp_path.iterdir()) == []
    file = tmp_path / "lockstep" / "token"
    file.parent.mkdir()
    file.write_text("s" * 32)
    file.chmod(0o644)
    facts = token.gather(tmp_path)
    assert token.judge(facts).level == ERROR
    assert "0644" in token.judge(facts).found
    assert doctor.fix({"token": facts}) == [f"made {file} unreadable for other users (mode 0600)"]
    facts = token.gather(tmp_path)
    assert token.judge(facts).level == OK
    assert len(facts["digest"]) == 4
    assert token.fix(facts) == []


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: Any) -> None:
    def refused(**_: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(disk.tempfile, "TemporaryFile", refused)
    facts = disk.gather(tmp_path)
    assert disk.judge(facts).level == ERROR
    assert disk.fix({**facts, "exists": False, "folder": str(tmp_path / "no")}) == []
    assert not (tmp_path / "no").exists()


def test_a_folder_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "runs"):
        facts = disk.gather(folder)
        assert disk.judge(facts).level == ERROR
        assert f"{tmp_path / 'file'} is no folder" in disk.judge(facts).found
        assert disk.fix(facts) == []
    facts = disk.gather(tmp_path / ("x" * 300))  # as other folders that cannot be looked at
    assert (disk.judge(facts).level, facts["problem"]) == (ERROR, "File name too long")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may enter every folder")
def test_a_folder_that_may_not_be_entered(tmp_path: Path) -> None:
    (tmp_path / "locked").mkdir(mode=0)
    facts = disk.gather(tmp_path / "locked" / "runs")
    assert (disk.judge(facts).level, facts["problem"]) == (ERROR, "Permission denied")


def test_what_cannot_be_mended_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    facts = disk.gather(tmp_path) | {"exists": False, "folder": str(tmp_path / "file" / "runs")}
    [said] = doctor.fix({"disk": facts})
    assert said.startswith("disk: cannot be fixed: ")
    assert "Not a directory" in said


def test_what_a_control_group_leaves(tmp_path: Path) -> None:
    group = tmp_path / "sys/fs/cgroup/job"
    group.mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/job\n")
    (group.parent / "memory.max").write_text("max\n")
    (group.parent / "memory.current").write_text("5000\n")
    (group / "memory.max").write_text("1000\n")
    (group / "memory.current").write_text("400\n")
    assert memory.available_in_group(tmp_path) == 600
    (group / "memory.stat").write_text("anon 100\ninactive_file 250\nactive_file 50\n")
    assert memory.available_in_group(tmp_path) == 850
    assert memory.available_in_group(tmp_path / "none") is None


def test_a_second_look_at_what_was_mended_has_the_rest_of_the_time(
    tmp_path: Path, monkeypatch: Any
) -> None:
    given = []

    def gather(folder: Path, checks: Any = ("disk",), deadline_s: float = 0.0) -> Any:
        given.append(deadline_s)
        return {"disk": disk.gather(folder)}

    monkeypatch.setattr(doctor, "gather", gather)
    facts, done = doctor.examine(tmp_path / "runs", repair=True, deadline_s=20.0)
    assert facts["disk"]["exists"] is True
    assert done == [f"made {tmp_path / 'runs'}"]
    assert given[0] == 15.0
    assert 0 < given[1] <= 20.0


def test_a_report_is_json_and_says_where_it_cannot_be_written(
    tmp_path: Path, monkeypatch: Any
) -> None:
    facts = {**SOUND, "gpus": {"gpus": [GPU | {"difference": float("nan")}], "nvml": None}}
    monkeypatch.setattr(doctor, "examine", lambda folder, repair: (facts, []))

    def refused(constant: str) -> Any:
        raise AssertionError(f"{constant} is no JSON")

    for line in (["--json", "-"], ["--json"]):
        result = CliRunner().invoke(main, ["doctor", *line])
        report = json.loads(result.stdout, parse_constant=refused)
        assert report["gpus"]["facts"]["gpus"][0]["difference"] == "NaN"
    result = CliRunner().invoke(main, ["doctor", "--json", str(tmp_path / "none" / "found.json")])
    assert result.exit_code == 2
    assert "--json" in result.stderr
    assert "No such file or directory" in result.stderr


def test_secrets_are_not_shown(monkeypatch: Any) -> None:
    from lockstep.doctor import variables

    monkeypatch.setenv("LOCKSTEP_TOKEN", "abc123")
    facts = variables.gather(Path("."))
    assert facts["LOCKSTEP_TOKEN"] == "***"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["node1", "node2"], "lockstep doctor --hosts node1,node2"),
        (["--hosts", "node1", "node2"], "lockstep doctor --hosts node1,node2"),
        (["--hosts", "node1", "--ssh", 'ssh "x'], "No closing quotation"),
        (["--data", "d"], "add --hosts"),
    ],
)
def test_slips_of_the_command_line(arguments: list[str], words: str) -> None:
    result = CliRunner().invoke(main, ["doctor", *arguments])
    assert result.exit_code == 2
    assert words in result.stderr


def test_run_takes_the_same_words_for_ssh(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    line = ["run", "--hosts", "node1", "--ssh", 'ssh "x', str(tmp_path / "train.py")]
    result = CliRunner().invoke(main, line)
    assert result.exit_code == 2
    assert "No closing quotation" in result.stderr


def test_findings_stand_in_columns_in_chinese(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(language, "language", lambda: "zh")
    findings = {
        "shared_memory": Finding("ok", "23.5 GiB of 23.5 GiB free in /dev/shm"),
        "clock": Finding("warning", "it is nearly full", "use a newer Python"),
    }
    assert doctor.format_findings(findings) == [
        "正常     共享内存  /dev/shm 剩余 23.5 GiB，共 23.5 GiB",
        "警告     时钟      几乎已满",
        "                   建议：使用较新版本的 Python",
    ]
