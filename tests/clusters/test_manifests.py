"""The manifests of deploy/ against the schemas of Kubernetes and of Kubeflow Trainer."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from clusters.machines import Cluster, cluster

pytestmark = pytest.mark.clusters

yaml = pytest.importorskip("yaml", reason="make clusters installs PyYAML and the schemas")
kubernetes_validate = pytest.importorskip("kubernetes_validate")
trainer = pytest.importorskip("kubeflow_trainer_api.models")

DEPLOY = Path(__file__).parents[2] / "deploy"
MEET = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
print("MET", total.item(), os.uname().nodename, flush=True)
dist.destroy_process_group()
"""


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / name).read_text()))


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("version", ["1.31", "1.37"])
def test_those_of_kubernetes(number: int, version: str) -> None:
    kubernetes_validate.validate(documents("kubernetes.yaml")[number], version, strict=True)


def test_the_conda_recipe() -> None:
    rattler_build = pytest.importorskip("rattler_build")
    recipe = rattler_build.Stage0Recipe.from_file(DEPLOY / "conda" / "recipe.yaml")
    [variant] = recipe.render()
    assert variant.recipe.package.name == "torch-lockstep"
    assert "pytorch" in " ".join(map(str, variant.recipe.requirements.run))


def test_that_a_slip_is_found() -> None:
    job = documents("kubernetes.yaml")[1]
    job["spec"]["completionsMode"] = job["spec"].pop("completionMode")
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(job, "1.37", strict=True)


def test_that_of_kubeflow() -> None:
    (job,) = documents("kubeflow.yaml")
    # What is no field of it is left out on the way.
    assert trainer.TrainerV1alpha1TrainJob.from_dict(job).to_dict() == job
    job["spec"]["trainer"]["nodes"] = job["spec"]["trainer"].pop("numNodes")
    assert trainer.TrainerV1alpha1TrainJob.from_dict(job).to_dict() != job


def test_the_names_fit_together() -> None:
    service, job = documents("kubernetes.yaml")
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    name = job["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": name}
    assert pod["subdomain"] == service["metadata"]["name"]
    assert f"--master-addr={name}-0.{pod['subdomain']}" in container["command"]
    assert f"--nnodes={spec['completions']}" in container["command"]
    assert spec["completions"] == spec["parallelism"]
    assert {m["name"] for m in container["volumeMounts"]} == {v["name"] for v in pod["volumes"]}


@pytest.fixture
def machines(tmp_path: Path):
    with cluster(2, tmp_path / "cluster") as made:
        yield made
        made.nothing_runs()


@pytest.mark.parametrize("name", ["kubernetes.yaml", "kubeflow.yaml"])
def test_their_commands_meet(machines: Cluster, tmp_path: Path, name: str) -> None:
    """On two machines, with what the cluster would fill in; the pods' names are the machines'."""
    job = documents(name)[-1]["spec"]
    (tmp_path / "train.py").write_text(MEET)
    commands = []
    for number, node in enumerate(machines.nodes):
        if name == "kubernetes.yaml":
            (container,) = job["template"]["spec"]["containers"]
            line, given = container["command"], {}
        else:
            line = job["trainer"]["command"]
            given = {
                "PET_NNODES": str(job["trainer"]["numNodes"]),
                "PET_NPROC_PER_NODE": str(2),
                "PET_NODE_RANK": str(number),
                "PET_MASTER_ADDR": "node1",
                "PET_MASTER_PORT": "29400",
            }
        line = [word.replace("$(NODE_RANK)", str(number)) for word in line[1:]]
        line = [word.replace("train-0.train", "node1").replace("=gpu", "=2") for word in line]
        line = [re.sub(r"^--log-dir=.*", f"--log-dir={tmp_path}", word) for word in line]
        env = {**given, "LOCKSTEP_TOKEN": "a token of the secret"}
        commands.append(machines.run(line, tmp_path, on=node, env=env))
    for command in commands:
        assert command.wait() == 0, command.said
    said = "".join(command.said for command in commands)
    assert sorted(re.findall(r"MET 4.0 (\w+)", said)) == ["node1", "node1", "node2", "node2"]
