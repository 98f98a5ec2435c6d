"""A real Slurm: its controller on the first machine of a cluster, and a node on each."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from namespaces import until

from clusters.machines import Cluster, Command, Node, on_machine

_CONFIGURATION = """
ClusterName=lockstep
SlurmctldHost=node1(10.98.0.1)
SlurmUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/controller.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/controller.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SlurmdParameters=config_overrides
SchedulerParameters=bf_interval=1,sched_interval=2,requeue_setup_env_fail
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
ReturnToService=2
KillWait=60
OverTimeLimit=0
GresTypes=gpu
NodeName=node1 NodeAddr=10.98.0.1 CPUs=4 Gres=gpu:2 State=UNKNOWN
NodeName=node2 NodeAddr=10.98.0.2 CPUs=4 Gres=gpu:2 State=UNKNOWN
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime=60
PartitionName=high Nodes=ALL PriorityTier=9 PreemptMode=OFF
"""
_PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "srun", "scontrol", "scancel")


@dataclass
class Slurm:
    """The scheduler of a cluster."""

    cluster: Cluster
    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        """By which its commands find it."""
        return {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def run(self, arguments: Sequence[str], folder: Path) -> Command:
        """Starts `lockstep ARGUMENTS` on the first machine."""
        return self.cluster.run(arguments, folder, env=self.environment)

    def ask(self, *line: str) -> str:
        """What one of its commands prints."""
        node = self.cluster.nodes[0]
        done = subprocess.run(
            on_machine(node.namespace, node.name, line),
            env={**os.environ, **self.environment},
            capture_output=True,
            text=True,
        )
        return done.stdout + done.stderr

    def state(self, job: str) -> str:
        """The state of a job: PENDING, RUNNING, COMPLETED, ..."""
        found = re.search(r"JobState=(\w+)", self.ask("scontrol", "show", "job", job))
        return found[1] if found else ""

    def idle(self) -> bool:
        """Whether all nodes are there, and have ended what they had to do."""
        return set(self.ask("sinfo", "--noheader", "-o", "%t").split()) == {"idle"}

    def cancel_all(self) -> None:
        """Ends all jobs, and waits for that."""
        self.ask("scancel", "--user=root")
        until(lambda: not self.ask("squeue", "--noheader").strip(), 120.0)


@contextlib.contextmanager
def slurm(cluster: Cluster, folder: Path) -> Iterator[Slurm]:
    """Slurm on the first two machines; skips where it is not installed."""
    missing = [name for name in _PROGRAMS if not shutil.which(name)]
    if missing:
        pytest.skip(f"Slurm needs {', '.join(missing)} (Debian: slurm-wlm, munge)")
    folder.mkdir()
    for name in ("state", "spool-node1", "spool-node2"):
        (folder / name).mkdir()
    (folder / "slurm.conf").write_text(_CONFIGURATION.format(folder=folder))
    # Devices that every machine has, as GPUs; nobody computes on them.
    (folder / "gres.conf").write_text("Name=gpu File=/dev/zero\nName=gpu File=/dev/full\n")
    # None of its plugins needs control groups, and a network namespace's /sys has none.
    (folder / "cgroup.conf").write_text(f"CgroupPlugin=cgroup/v1\nCgroupMountpoint={folder}\n")
    made = Slurm(cluster, folder)
    with contextlib.ExitStack() as stack:
        _munge(stack, folder)
        first, second = cluster.nodes[:2]
        _daemon(stack, made, first, ["slurmctld", "-D", "-i"])
        for node in (first, second):
            _daemon(stack, made, node, ["slurmd", "-D", "-N", node.name])
        until(made.idle, 120.0)
        for node in (first, second):  # and what they have started for themselves
            node.daemons.update(process.pid for process in node.processes())
        yield made


def _munge(stack: contextlib.ExitStack, folder: Path) -> None:
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o600)
    own = [
        f"--{name}={folder}/munge.{name.split('-')[0]}"
        for name in ("pid-file", "log-file", "seed-file")
    ]
    line = [
        "munged",
        "--foreground",
        "--force",
        f"--socket={folder}/munge.socket",
        f"--key-file={key}",
        *own,
    ]
    _end_with(stack, subprocess.Popen(line, stderr=subprocess.DEVNULL))
    until((folder / "munge.socket").exists, 60.0)


def _daemon(stack: contextlib.ExitStack, made: Slurm, node: Node, line: list[str]) -> None:
    daemon = subprocess.Popen(
        on_machine(node.namespace, node.name, line),
        env={**os.environ, **made.environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    node.daemons.add(daemon.pid)
    _end_with(stack, daemon)


def _end_with(stack: contextlib.ExitStack, process: subprocess.Popen[bytes]) -> None:
    def end() -> None:
        process.kill()
        process.wait()

    stack.callback(end)
