"""Decides where the ranks of `lockstep run --ray` run: on which nodes of a Ray cluster and which
GPUs.

A *placement group* of Ray reserves the resources of the run: one *bundle* for each rank, with a GPU
and a core, or only a core if the cluster has no GPUs. Ray places the bundles on as few nodes as
possible, beside the tasks of other users. Each node with bundles then gets one launcher, for as
many ranks as it has bundles.

Ray is imported only where it is needed, since most runs do not use it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.errors import HostError, SettingError
from lockstep.machine.network import wait_until
from lockstep.run.machines.hosts import Host
from lockstep.wording import count_noun

RUNNING_CLUSTER = "auto"
"""The address with which Ray finds the cluster that was started on this machine."""
POLL_INTERVAL_S = 0.2
NODE_DEATH_TIMEOUT_S = 60.0
"""The time within which Ray notices that a node is lost. By default, it asks each node every 3 s,
and a node that leaves five questions unanswered is lost."""
TELL_AFTER_S = 5.0
"""The time after which the user is told that the run waits for resources."""


@dataclass(frozen=True, kw_only=True)
class RayNode(Host):
    """A node of a Ray cluster, with the bundles that the run has there."""

    node_id: str
    ip_address: str
    """The address at which the other nodes reach it."""
    bundle_index: int
    """The index of one of the run's bundles on this node."""
    gpu_ids: tuple[str, ...]
    """The GPUs of all of the run's bundles on this node; empty if the cluster has no GPUs."""

    @property
    def address(self) -> str:
        """The IP address of the node."""
        return self.ip_address

    def _is_this_machine(self) -> bool:
        """Returns False, as the helper is started by Ray even on this machine."""
        return False


def connect(address: str, setting: str) -> bool:
    """Connects this process to a Ray cluster, unless it is connected already.

    Args:
        address: address of the cluster, in the form that `ray.init` accepts.
        setting: what the user has set, for errors.

    Returns:
        True if the process was connected before.

    Raises:
        SettingError: Ray is not installed, or this process is connected to another cluster.
        HostError: there is no such cluster, or it has another version of Ray or Python.
    """
    try:
        import ray
    except ImportError:
        raise SettingError(
            setting,
            "Ray cannot be imported here",
            "install it, in the version of the cluster: pip install ray",
        ) from None

    if ray.is_initialized():
        connected_to = ray.get_runtime_context().gcs_address
        if address not in (RUNNING_CLUSTER, connected_to):
            raise SettingError(
                setting,
                f"this process is connected to the Ray cluster at {connected_to}",
                "leave the address out (ray=True), or call ray.shutdown() first",
            )
        return True

    try:
        # The ranks' output comes with the names of their nodes. Ray would print it a second time.
        ray.init(address, logging_level="ERROR", log_to_driver=False)
    except (ConnectionError, RuntimeError, ValueError) as error:
        lines = [line.strip() for line in str(error).splitlines()]
        raise HostError(
            setting,
            " ".join(line for line in lines if line),
            "start a cluster with `ray start --head`, or give the address that it printed: "
            "HOST:6379",
        ) from None
    return False


def disconnect() -> None:
    """Disconnects this process from the cluster. Ray then ends everything it has started there."""
    import ray

    ray.shutdown()


def put_in_object_store(content: bytes) -> Any:
    """Puts data into Ray's store, from which every node that needs it copies it once.

    Returns:
        Ray's reference to the data.
    """
    import ray

    return ray.put(content)


def num_ranks(nproc: str | None, option: str) -> int:
    """Returns the number of ranks that a value of --nproc stands for on the cluster.

    Args:
        nproc: a number; `gpu`: one for each GPU; `cpu`: one for each core; `auto`: one for each
            GPU, or for each core if there is no GPU; None: 1.
        option: the option that chose Ray, such as `--ray`, for errors.

    Raises:
        SettingError: the value is none of these, or the cluster has no GPUs.
    """
    import ray

    if nproc is None:
        return 1
    if nproc.isdigit() and int(nproc) > 0:
        return int(nproc)

    setting = f"--nproc {nproc} with {option}"
    if nproc not in ("auto", "gpu", "cpu"):
        do = "give the number of all ranks, or gpu: one for each GPU of the cluster"
        raise SettingError(setting, "it is no number of ranks", do)

    num_gpus = int(ray.cluster_resources().get("GPU", 0))
    if num_gpus == 0 and nproc == "gpu":
        raise SettingError(setting, "the cluster has no GPUs", "give the number of ranks")

    wants_gpus = nproc in ("auto", "gpu")
    if wants_gpus and num_gpus > 0:
        return num_gpus
    return int(ray.cluster_resources()["CPU"])


def bundle() -> dict[str, float]:
    """Returns the resources that one rank needs, by Ray's names for them."""
    import ray

    if ray.cluster_resources().get("GPU", 0) > 0:
        return {"CPU": 1, "GPU": 1}
    return {"CPU": 1}


def reserve(bundles: Sequence[Mapping[str, float]], say: Callable[[str], None]) -> Any:
    """Reserves a bundle for each rank, and waits until the cluster can provide all of them.

    The wait has no limit: another job may end, or the cluster may add nodes by itself.

    Args:
        bundles: the resources of each rank.
        say: function that shows a line to the user, if this takes long.

    Returns:
        Ray's placement group.
    """
    from ray.util.placement_group import placement_group

    group = placement_group([dict(resources) for resources in bundles], strategy="PACK")
    tell_at = time.monotonic() + TELL_AFTER_S
    has_told = False
    while not group.wait(POLL_INTERVAL_S):
        takes_long = time.monotonic() >= tell_at
        if takes_long and not has_told:
            _say_what_is_awaited(bundles, say)
            has_told = True

    return group


def _say_what_is_awaited(
    bundles: Sequence[Mapping[str, float]], say: Callable[[str], None]
) -> None:
    """Tells the user how many of the GPUs or CPUs that a run needs are free in the cluster."""
    import ray

    name = _scarce_resource(bundles[0])
    num_free = ray.available_resources().get(name, 0)
    num_all = ray.cluster_resources().get(name, 0)
    say(
        f"waiting until the Ray cluster has {count_noun(len(bundles), name)} for this run: of "
        f"its {num_all:g}, {num_free:g} are free; Ctrl-C gives up"
    )


def have_died(nodes: Sequence[RayNode]) -> bool:
    """Returns True if Ray has lost one of the nodes, for which it may need some seconds."""
    node_ids = {node.node_id for node in nodes}
    deadline = time.monotonic() + NODE_DEATH_TIMEOUT_S
    return wait_until(lambda: not node_ids <= _alive_nodes(), deadline)


def is_placed(group: Any) -> bool:
    """Returns True if all bundles of a placement group have a place.

    After a node was lost, Ray itself places its bundles on other nodes, when these have room.
    """
    from ray.util.placement_group import placement_group_table

    table = placement_group_table(group)
    node_ids = set(table["bundles_to_node_id"].values())
    return table["state"] == "CREATED" and node_ids <= _alive_nodes()


def _alive_nodes() -> set[str]:
    """Returns the ids of the nodes that the cluster has now."""
    import ray

    return {facts["NodeID"] for facts in ray.nodes() if facts["Alive"]}


def describe_shortage(group: Any) -> str:
    """Describes what a placement group has asked for, and what the cluster has.

    The text continues a message about the ranks, which it calls "they".
    """
    import ray

    resource = _scarce_resource(group.bundle_specs[0])
    num_all = ray.cluster_resources().get(resource, 0)
    num_free = ray.available_resources().get(resource, 0)
    return (
        f"they need {count_noun(group.bundle_count, resource)}, and the cluster has {num_all:g}, "
        f"of which {num_free:g} are neither reserved nor used"
    )


def _scarce_resource(bundle_resources: Mapping[str, float]) -> str:
    """Returns the resource that decides how many bundles the cluster has room for."""
    return "GPU" if "GPU" in bundle_resources else "CPU"


def nodes_of_group(group: Any) -> list[RayNode]:
    """Returns the nodes on which a placement group has bundles, in the order of the bundles."""
    import ray

    indices_of_node = _bundles_of_each_node(group)
    gpu_of_bundle: list[str] = []
    if "GPU" in group.bundle_specs[0]:
        gpu_of_bundle = _gpu_of_each_bundle(group)

    facts_of_node = {facts["NodeID"]: facts for facts in ray.nodes()}
    host_name_of_node = {}
    for node_id in indices_of_node:
        host_name_of_node[node_id] = facts_of_node[node_id]["NodeManagerHostname"]
    names = names_of_nodes(host_name_of_node)  # tells nodes with the same host name apart

    nodes = []
    for node_id, indices in indices_of_node.items():
        gpu_ids = [gpu_of_bundle[index] for index in indices] if gpu_of_bundle else []
        node = RayNode(
            names[node_id],
            nproc=str(len(indices)),  # one rank for each bundle; a text, as with `--hosts`
            node_id=node_id,
            ip_address=facts_of_node[node_id]["NodeManagerAddress"],
            bundle_index=indices[0],  # the node's launcher is placed in the first of its bundles
            gpu_ids=tuple(gpu_ids),
        )
        nodes.append(node)
    return nodes


def _bundles_of_each_node(group: Any) -> dict[str, list[int]]:
    """Returns the indices of a placement group's bundles on each node, by the id of the node.

    The nodes are in the order of their first bundles.
    """
    from ray.util.placement_group import placement_group_table

    node_of_bundle = placement_group_table(group)["bundles_to_node_id"]
    indices_of_node: dict[str, list[int]] = {}
    for index in range(group.bundle_count):
        indices_of_node.setdefault(node_of_bundle[index], []).append(index)
    return indices_of_node


def names_of_nodes(host_name_of_node: Mapping[str, str]) -> dict[str, str]:
    """Returns a unique name for each node, by its id.

    It is the host name. If several nodes have the same host name, the beginning of the id is added.
    """
    host_names = list(host_name_of_node.values())
    names = {}
    for node_id, host_name in host_name_of_node.items():
        is_unique = host_names.count(host_name) == 1
        names[node_id] = host_name if is_unique else f"{host_name}-{node_id[:6]}"
    return names


def _gpu_of_each_bundle(group: Any) -> list[str]:
    """Asks each bundle of a placement group, on its node, which GPU Ray has assigned to it."""
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    def gpu_id() -> str:
        return str(ray.get_runtime_context().get_accelerator_ids()["GPU"][0])

    answers = []
    for index in range(group.bundle_count):
        strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
        task = ray.remote(num_cpus=0, num_gpus=1, scheduling_strategy=strategy)(gpu_id)
        answers.append(task.remote())

    gpu_ids: list[str] = ray.get(answers)
    return gpu_ids


def release(group: Any) -> None:
    """Gives back the resources that a placement group has reserved.

    If the cluster is gone, they are gone as well, and that does not change how the run has ended.
    """
    from ray.exceptions import RayError
    from ray.util.placement_group import remove_placement_group

    with contextlib.suppress(RayError, ConnectionError):
        remove_placement_group(group)
