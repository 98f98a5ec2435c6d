"""`lockstep.launch` and `lockstep.report` in the kernel of a Jupyter notebook."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ranks import HANG_S

nbformat = pytest.importorskip("nbformat", reason="the extra `notebook` is not installed")
nbclient = pytest.importorskip("nbclient", reason="the extra `notebook` is not installed")
pytest.importorskip("ipykernel", reason="the extra `notebook` is not installed")

pytestmark = [pytest.mark.launcher, pytest.mark.thorough]

TRAINS = """
import torch
import lockstep
from torch.utils.data import DataLoader, TensorDataset

def train(steps):
    world = lockstep.init(seed=0, report="runs/a")
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.randn(8 * steps, 2), torch.randn(8 * steps, 1))
    model, optimizer, loader = world.prepare(model, optimizer, DataLoader(data, batch_size=8))
    for x, y in world.progress(loader):
        world.backward(torch.nn.functional.mse_loss(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
    return world.step, world.rank

lockstep.launch(train, args=(4,), nproc=2)
"""
LAMBDA = "lockstep.launch(lambda: lockstep.init().sum(1), nproc=2)"
FAILS = """
def fails():
    with lockstep.init() as world:
        if world.rank == 1:
            raise ValueError("of the cell")
        world.barrier()

lockstep.launch(fails, nproc=2)
"""
HANGS = """
def hangs():
    world = lockstep.init()
    if world.rank == 1:
        torch.distributed.all_reduce(torch.zeros(1))
    world.barrier()

lockstep.launch(hangs, nproc=2)
"""


def run(folder: Path, *sources: str) -> list[list[Any]]:
    """Runs the cells, also those after an error, and returns the outputs of each."""
    cells = [nbformat.v4.new_code_cell(source) for source in sources]
    notebook = nbformat.v4.new_notebook(cells=cells)
    client = nbclient.NotebookClient(
        notebook,
        timeout=HANG_S,
        kernel_name="python3",
        allow_errors=True,
        resources={"metadata": {"path": str(folder)}},
    )
    # With this variable a kernel does not show what other processes write to its stdout.
    environment = {k: v for k, v in os.environ.items() if k != "PYTEST_CURRENT_TEST"}
    client.execute(env=environment)
    return [cell.outputs for cell in notebook.cells]


def printed(outputs: list[Any]) -> str:
    """What a cell prints, without colours."""
    text = "".join(output.text for output in outputs if output.output_type == "stream")
    return re.sub(r"\x1b\[[\d;]*m", "", text)


def error(outputs: list[Any]) -> str:
    """What the cell shows of its error."""
    [failed] = [output for output in outputs if output.output_type == "error"]
    assert failed.ename == "RankFailedError"
    return "\n".join(failed.traceback)


ON_RAY = """
OFFSET = 5

def on_ray(start):
    with lockstep.init() as world:
        if start > 1 and world.rank == 1:
            fails_in_a_cell()
        return world.sum(start + OFFSET)

lockstep.launch(on_ray, args=(1,), nproc=2, ray=True)
"""
FAILS_ON_RAY = """
def fails_in_a_cell():
    raise ValueError("of another cell")

lockstep.launch(on_ray, args=(2,), nproc=2, ray=True)
"""


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """The address of a Ray cluster of one node."""
    pytest.importorskip("ray", reason="the extra `ray` is not installed")
    from ray.cluster_utils import Cluster

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    head = {"num_cpus": 2, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    yield cluster.address
    cluster.shutdown()


@pytest.mark.filterwarnings("ignore")
def test_the_cells_of_a_notebook_on_ray(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel has an event loop of its own, and the nodes do not have its cells."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("RAY_ADDRESS", address)
    _, returned, failed = run(tmp_path, "import lockstep", ON_RAY, FAILS_ON_RAY)
    assert returned[-1].data["text/plain"] == "[12, 12]"
    traceback = error(failed)
    assert traceback.count('raise ValueError("of another cell")') == 2  # the verdict, the traceback
    assert "rank 1" in traceback


@pytest.mark.filterwarnings("ignore")  # the kernel's client warns of its own future
def test_the_cells_of_a_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    trained, of_lambda, failed, hung, shown = run(
        tmp_path, TRAINS, LAMBDA, FAILS, HANGS, "lockstep.report('runs/a')"
    )
    assert trained[-1].data["text/plain"] == "[(4, 0), (4, 1)]"
    said = printed(trained)
    assert "[rank 0] lockstep 0.1.0 · 2 processes on 1 host" in said
    assert re.search(r"^\[rank 0\]   strategy +ddp", said, re.M)
    assert "[rank 0] epoch 0 " in said
    assert of_lambda[-1].data["text/plain"] == "[2, 2]"
    traceback = error(failed)
    assert traceback.count('raise ValueError("of the cell")') == 2  # the verdict, the traceback
    assert "rank 1 on host" in traceback
    assert "deadlock: " in error(hung)
    assert shown[-1].data["text/plain"].startswith("report of runs/a: 2 ranks, ok, last step 4")
    assert shown[-1].data["text/html"].startswith("<iframe")
