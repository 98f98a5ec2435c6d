"""Which arguments may differ from rank to rank: those whose difference is known to be harmless."""

from __future__ import annotations

import pytest

from lockstep.distributed.arguments import command_of_script
from lockstep.distributed.manifest import describe_mismatches, without_harmless_differences
from lockstep.machine.topology import SET_BY_SCRIPT, SET_BY_VARIABLES, Topology

pytestmark = pytest.mark.unit

SCRIPT = "script"
VARIABLES = "variables"
LAUNCHER = "launcher"
SRUN = "srun"
SOURCES = {
    SCRIPT: SET_BY_SCRIPT,
    VARIABLES: SET_BY_VARIABLES,
    LAUNCHER: "torchrun",
    SRUN: "Slurm",
}
"""What `Topology.source` is: `init` was given the rank; RANK was set by hand; a launcher."""

ALL = (SCRIPT, VARIABLES, LAUNCHER, SRUN)
BY_HAND = (SCRIPT, VARIABLES)

ONE_MACHINE = (2,)
TWO_MACHINES = (1, 1)
"""How many processes each machine has."""


def differ(values: str, arguments: str, machines: tuple[int, ...], started: str) -> bool:
    """True if `train.py` with these arguments is told to differ.

    Args:
        values: what stands for `{}` in the arguments on each rank, such as `0 1`.
        arguments: such as `-rn {} -ws 2`.
        machines: how many processes each of them has.
        started: one of `SOURCES`.
    """
    topologies = []
    for machine, num_processes in enumerate(machines):
        for local_rank in range(num_processes):
            topologies.append(
                Topology(
                    rank=len(topologies),
                    size=sum(machines),
                    local_rank=local_rank,
                    local_size=num_processes,
                    node_rank=machine,
                    source=SOURCES[started],
                )
            )
    manifests = []
    for value in values.split():
        manifests.append({"arguments": f"train.py {arguments.replace('{}', value)}"})
    assert len(manifests) == len(topologies)
    return describe_mismatches(without_harmless_differences(manifests, topologies)) != []


@pytest.mark.parametrize(
    ("argv", "command"),
    [
        (["/a/train.py", "--lr", "1"], ["train.py", "--lr", "1"]),
        (["t.py", "--local_rank=3"], ["t.py", "--local_rank=3"]),
        ([], []),
    ],
)
def test_the_folder_of_the_script_may_differ(argv: list[str], command: list[str]) -> None:
    assert command_of_script(argv) == command


# How the processes are started, how many each machine has, the values and the arguments.
ACCEPTED = [
    # The number of the process or its machine, under a name that says so.
    *[
        (ALL, machines, "0 1", arguments)
        for machines in (ONE_MACHINE, TWO_MACHINES)
        for arguments in (
            *("--rank {}", "--rank={}", "--local_rank {}", "--node-rank={}", "--machine-rank {}"),
            *(
                "-rn {}",
                "-rn{}",
                "-nr {}",
                "--rank-number {}",
                "--node {}",
                "--machineId={}",
                "+dist.rank={}",
            ),
            *("--process_id {}", "--worker-index {}", "rank={}", "--world_rank {} --lr 0.1"),
            # Several of them, each by its own name, and devices beside them.
            *("--rank {} --local-rank {}", "-rn {} --gpu {}", "-nr {} --device cuda:{}"),
        )
    ],
    (ALL, (2, 2), "0 1 2 3", "--rank {}"),
    (ALL, (2, 2), "0 1 0 1", "--local_rank={}"),
    (ALL, (2, 2), "0 0 1 1", "--node_rank {}"),
    (ALL, (2, 2), "0 0 1 1", "--rank {}"),  # torch's ImageNet example calls the machine so
    (ALL, (2, 2), "0 0 2 2", "--start-rank {}"),
    (ALL, (2, 2), "1 1 0 0", "--node_rank {}"),  # torchrun has numbered them the other way round
    (BY_HAND, (4,), "0 0 1 1", "--node_rank {}"),  # two machines are tried out on one
    # Devices.
    (ALL, ONE_MACHINE, "2 3", "--gpu {}"),
    (ALL, ONE_MACHINE, "0,1 2,3", "--devices {}"),
    (ALL, ONE_MACHINE, "cuda:0 cuda:1", "--device {}"),
    (ALL, ONE_MACHINE, "[0,1] [2,3]", "trainer.devices={}"),
    (ALL, (2, 1), "0,1 0,1 3", "--gpu_ids={}"),
    (ALL, TWO_MACHINES, "3 0", "--cuda-device {} --lr 0.1"),
    # How many processes a machine has.
    (ALL, (2, 1), "2 2 1", "--nproc_per_node {}"),
    (ALL, (2, 1), "2 2 1", "--num-gpus={}"),
    (ALL, (2, 1), "2 2 1", "--nproc {}"),
    # Under any name: the script has given `init` the rank, and no other argument differs.
    *[
        ((SCRIPT,), machines, "0 1", arguments)
        for machines in (ONE_MACHINE, TWO_MACHINES)
        for arguments in ("-x {} -ws 2", "{} 2 tcp://host:1", "-q{} -v", "+d.p={}", "--me {}")
    ],
    ((SCRIPT,), (2, 2), "0 0 1 1", "-m {}"),
    ((SCRIPT,), ONE_MACHINE, "0 1", "--rank 0 --me {}"),  # that of the machine, which is one
    # Under any name: `${local_rank}`, in one command for all processes of a machine.
    ((LAUNCHER,), (2, 2), "0 1 0 1", "--k={} --more {}"),
    ((LAUNCHER,), ONE_MACHINE, "0 1", "--me {}"),
]

REFUSED = [
    # Other values than the numbers of the processes.
    (ALL, ONE_MACHINE, "8 16", "--rank {}"),  # of LoRA
    (ALL, ONE_MACHINE, "1 2", "--rank {}"),
    (ALL, ONE_MACHINE, "1 0", "--rank {}"),
    (ALL, (3,), "0 1 3", "-rn {}"),
    (ALL, (3,), "0 1 0", "-rn {}"),
    (ALL, TWO_MACHINES, "1 2", "--node_rank {}"),
    (ALL, (2, 2), "0 1 1 0", "--node_rank {}"),
    (ALL, ONE_MACHINE, "00 01", "--rank {}"),
    (ALL, ONE_MACHINE, "a b", "-rn {}"),
    ((LAUNCHER, SRUN), (4,), "0 0 1 1", "--rank {}"),  # a launcher knows the machines
    # Names of which only a part says what they are.
    *[
        ((VARIABLES, LAUNCHER, SRUN), TWO_MACHINES, values, arguments)
        for values in ("0 1", "8 16")
        for arguments in (
            *("--per_device_train_batch_size {}", "--batch-size-per-gpu {}", "--per-gpu {}"),
            *("--per_device {}", "--warmup_per_device {}", "--gpu-crop {}", "--no-cuda {}"),
            *("--lora-rank {}", "lora.rank={}", "--num-workers {}", "--worker {}"),
            *("--preprocess {}", "--process {}", "--local-loss {}", "--local_loss_weight={}"),
            *("--nodes {}", "--ranking {}", "--rankings={}", "--augment {}", "--use_ema {}"),
        )
    ],
    # Devices that look like none.
    (ALL, ONE_MACHINE, "128 256", "--gpu {}"),
    (ALL, ONE_MACHINE, "0.5 0.7", "--gpu {}"),
    (ALL, ONE_MACHINE, "0,0 1,1", "--gpu {}"),
    (ALL, ONE_MACHINE, "small big", "--device {}"),
    # Beside the number of the process, nothing else may differ under any name.
    (ALL, TWO_MACHINES, "0 1", "--rank {} --augment {}"),
    (ALL, TWO_MACHINES, "0 1", "--gpu {} --augment {}"),
    ((SCRIPT, VARIABLES, SRUN), ONE_MACHINE, "0 1", "--me {} --layers {}"),
    (ALL, TWO_MACHINES, "0 1", "-rn {} --layers {}"),
    (ALL, ONE_MACHINE, "0 1", "--me {} --lr 0.{}"),
    (ALL, ONE_MACHINE, "0 1", "--rank {} --lr 0.{}"),
    # Where something else numbers the processes, an unknown name is no number.
    ((VARIABLES, SRUN), ONE_MACHINE, "0 1", "--augment {}"),
    ((LAUNCHER,), TWO_MACHINES, "0 1", "--augment {}"),
    ((LAUNCHER,), (2, 2), "0 0 1 1", "--fold {}"),  # two runs that met by mistake
    # Without a launcher, but not the numbers of the processes.
    ((SCRIPT,), ONE_MACHINE, "1 2", "--layers {}"),
    ((SCRIPT,), (4,), "0 0 1 1", "--augment {}"),
    ((SCRIPT,), ONE_MACHINE, "10 20", "--lr-steps {}"),
    (ALL, (2, 1), "2 2 1", "--layers {}"),
    (ALL, (2, 1), "4 4 2", "--nproc {}"),
]


def each_start(rows: list[tuple[tuple[str, ...], tuple[int, ...], str, str]]) -> list[object]:
    """Returns a test case for each row and each way in which its processes may be started."""
    cases: list[object] = []
    for ways, machines, values, arguments in rows:
        for started in ways:
            case_id = f"{arguments}|{values}|{started}|{machines}"
            cases.append(pytest.param(started, machines, values, arguments, id=case_id))
    return cases


@pytest.mark.parametrize(("started", "machines", "values", "arguments"), each_start(ACCEPTED))
def test_harmless_differences(
    started: str, machines: tuple[int, ...], values: str, arguments: str
) -> None:
    assert not differ(values, arguments, machines, started)


@pytest.mark.parametrize(("started", "machines", "values", "arguments"), each_start(REFUSED))
def test_all_other_differences_are_told(
    started: str, machines: tuple[int, ...], values: str, arguments: str
) -> None:
    assert differ(values, arguments, machines, started)


@pytest.mark.parametrize("source", [SET_BY_SCRIPT, SET_BY_VARIABLES, "Slurm"])
@pytest.mark.parametrize(
    ("commands", "is_told"),
    [
        (("--rank=0 -v", "-v --rank 1"), False),
        (("-v", "-v --rank 1"), False),  # 0 is the default
        (("--gpu 0", "--local_rank=1 --gpu 1"), False),
        (("--rank 8 --rank 0", "--rank 1"), False),  # the last one counts
        (("-v", "-v --rank 8"), True),
        (("--rank auto", "--rank 1"), True),
        (("--rank 1", ""), True),
        (("--layers 0", "--layers 1 --rank 1"), True),
        (("-rn 0", "-rn 1 -v"), True),
    ],
)
def test_the_rank_may_stand_anywhere_and_be_left_out_for_the_first_process(
    commands: tuple[str, str], is_told: bool, source: str
) -> None:
    manifests = [{"arguments": f"train.py {command}"} for command in commands]
    topologies = []
    for rank in range(2):
        topologies.append(Topology(rank=rank, size=2, local_rank=rank, local_size=2, source=source))
    assert (
        describe_mismatches(without_harmless_differences(manifests, topologies)) != []
    ) == is_told


@pytest.mark.parametrize(
    ("commands", "is_told"),
    [
        (("-ws 2", "-rn 1 -ws 2"), False),
        (("-ws 2", "-ws 2 -rn 1"), False),
        (("-ws 2", "-rn=1 -ws 2"), False),
        (("-ws 2", "-rn1 -ws 2"), False),
        (("-ws 3", "-rn 1 -ws 3", "-ws 3 --rn 2"), True),  # it is one flag
        (("-ws 3", "-rn 1 -ws 3", "-ws 3 -rn 2"), False),
        (("--lr 1", "--lr 1 --me 1"), False),
        (("--lr 1", "--me=1 --lr 1"), False),
        (("-ws 2", "-rn 2 -ws 2"), True),
        (("-rn 1 -ws 2", "-ws 2"), True),  # rank 0 says that it is rank 1
        (("-ws 2", "-rn 1 -ws 2 -v"), True),  # -v is given on one rank only
        (("--lr 1", "--lr 2 -rn 1"), True),
        (("", "-rn 1 --me 1"), True),  # two flags
        (("-v", "-v 1"), True),  # a value without a flag
    ],
)
def test_where_the_script_sets_the_rank_its_flag_may_be_left_out_under_any_name(
    commands: tuple[str, ...], is_told: bool
) -> None:
    manifests = [{"arguments": f"train.py {command}".strip()} for command in commands]
    size = len(commands)
    for source, is_told_there in ((SET_BY_SCRIPT, is_told), ("Slurm", True)):
        topologies = []
        for rank in range(size):
            topologies.append(
                Topology(rank=rank, size=size, local_rank=rank, local_size=size, source=source)
            )
        told = describe_mismatches(without_harmless_differences(manifests, topologies)) != []
        assert told == is_told_there, source
