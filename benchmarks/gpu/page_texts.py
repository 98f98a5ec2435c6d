"""What `docs/gpu.md` and `docs/gpu.zh.md` say around the results."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu.results import ROOT
from benchmarks.gpu.stages import STAGES


@dataclass(frozen=True)
class PageTexts:
    """The texts of the page in one language. Words in braces are filled in."""

    page: Path
    introduction: str
    on_a_gpu: str
    not_run: str
    rehearsed: str
    rehearsal_note: str
    passed: str
    other_results: str
    begun: str
    machine: str
    columns: str
    results: dict[str, str]
    as_it_should: str
    whole_stage: str
    about: dict[str, str]
    """What each stage shows, by its name."""
    comma: str
    colon: str
    readme_without_a_gpu: str
    readme_with_a_gpu: str
    unknown_gpu: str


ENGLISH = PageTexts(
    page=ROOT / "docs" / "gpu.md",
    introduction="""# GPUs: what has been run, and what has not

`make gpu` runs everything below on a machine with one GPU, in at most 540 s. Each part runs in its own
process with its own time limit, and each result is written to disk as soon as it is known. If a part
hangs or crashes, only its own results are lost.

```sh
make gpu                                  # everything
make gpu STAGES=probe,nccl                # only some stages
make gpu DEVICE=cpu                       # rehearse on a machine without a GPU
make gpu-table                            # write this page from the results
```

NCCL refuses two ranks on one GPU if both the hash of their host and the PCI bus ID of their GPU are
equal. If each rank has a different `NCCL_HOSTID`, NCCL treats them as separate hosts, and they
communicate over its socket transport. Several ranks on one GPU then run real kernels, streams,
communicator splits, point-to-point transfers, the watchdog and the Flight Recorder, but their speed is
meaningless. One GPU cannot show NVLink, InfiniBand, several GPUs in one machine, several machines with
GPUs, or the speed of anything on several GPUs.

Some checks have a limit for the figure that they measure (column *aim*). Limits are asserted on a GPU
only. A check that misses its aim is listed as `missed`, with the figure that was found.
""",
    on_a_gpu="On a GPU",
    not_run=(
        "Not run yet. Until then, nothing that this documentation says about GPUs is based on a "
        "measurement."
    ),
    rehearsed="Rehearsed on the CPU",
    rehearsal_note="""
In a rehearsal Gloo replaces NCCL, models are smaller, and the times are meaningless. Instead of
synchronizations with the device, it counts how often Python reads a value of a tensor; most of these
reads would not wait for a GPU. A rehearsal shows that the run itself works: the stages `rehearse-...`
hang, crash and fill a disk on purpose.
""",
    passed="{number} checks passed",
    other_results="{number} {result}",
    begun="Started at {when}, at commit {commits}. Later changes have not been run.",
    machine="machine",
    columns="check | result | aim | s | found",
    results={},
    as_it_should=", as expected",
    whole_stage="the whole stage",
    about={stage.name: stage.about for stage in STAGES},
    comma=", ",
    colon=": ",
    readme_without_a_gpu=(
        "**Not tested yet:** GPUs. Neither Lockstep's CUDA code nor NCCL has run on one; a nine-minute "
        "test on one GPU is ready and has been rehearsed on the CPU ([what it covers](docs/gpu.md))."
    ),
    readme_with_a_gpu=(
        "**GPUs:** run on one {gpu} ({day}): {counts}. Over NCCL two to four ranks shared that one "
        "GPU, so its speed on several GPUs is not known ([results](docs/gpu.md))."
    ),
    unknown_gpu="GPU of a kind that was not recorded",
)
CHINESE = PageTexts(
    page=ROOT / "docs" / "gpu.zh.md",
    introduction="""# GPU：哪些运行过，哪些还没有

[English](gpu.md)

`make gpu` 在一台单卡机器上运行下面的全部内容，最多 540 秒。每个部分在各自的进程里运行，各有时间上限，每个结果一得到就写到磁盘；某个部分卡死或崩溃时，只损失它自己的结果。

```sh
make gpu                                  # 全部
make gpu STAGES=probe,nccl                # 只运行其中几个阶段
make gpu DEVICE=cpu                       # 在没有 GPU 的机器上演练
make gpu-table                            # 根据结果写出本页
```

如果两个 rank 的主机哈希和 GPU 的 PCI 总线编号都相同，NCCL 会拒绝它们使用同一张 GPU。给每个 rank 设置不同的 `NCCL_HOSTID` 之后，NCCL 把它们当作不同的主机，通过 socket 通信。这样，一张 GPU 上的多个 rank 就能运行真实的 kernel、CUDA 流、通信子的拆分、点对点传输、看门狗和 Flight Recorder，但速度没有意义。单卡不能说明 NVLink、InfiniBand、单机多卡、多机多卡，也不能说明任何多卡场景的速度。

有的检查项有目标，即数值的上限，只在 GPU 上断言。没有达到目标的检查项标为“未达目标”，并记录测得的数值。
""",
    on_a_gpu="在 GPU 上",
    not_run="还没有运行过。在此之前，本文档关于 GPU 的任何说法都没有实测依据。",
    rehearsed="在 CPU 上的演练",
    rehearsal_note="""
演练时用 Gloo 代替 NCCL，模型更小，时间没有意义。与设备的同步次数改为统计 Python 读取张量数值的次数，其中多数在 GPU 上并不会等待。演练说明这套流程本身能用：名为 `rehearse-...` 的阶段会故意卡死、崩溃和写满磁盘。
""",
    passed="{number} 项通过",
    other_results="{number} 项{result}",
    begun="开始于 {when}，提交 {commits}。之后的改动尚未运行过。",
    machine="机器",
    columns="检查项 | 结果 | 目标 | 秒 | 内容",
    results={
        "passed": "通过",
        "missed": "未达目标",
        "failed": "失败",
        "not run": "未运行",
        "timed out": "超时",
        "crashed": "崩溃",
    },
    as_it_should="（符合预期）",
    whole_stage="整个阶段",
    about={
        "machine": "版本、`lockstep doctor`、空闲 rank 的内存",
        "probe": "NCCL 能否连接同一张 GPU 上的多个 rank",
        "product": "从热启动的 `lockstep run`：kill、断点续训、编译",
        "syncs": "每步与设备同步的次数及位置",
        "nccl": "2 个和 4 个 rank 用 NCCL，与 CPU 上的单进程比较",
        "hangs": "NCCL 下卡死或出错时的诊断结论",
        "speed": "与原生 PyTorch 比较时间和显存",
        "bits": "虚拟 rank：在一张 GPU 上用 1、2、4 个进程逐位相同",
        "tests": "逐个文件运行 `pytest -m gpu`",
        "rehearse-hang": "会卡死的阶段",
        "rehearse-kill": "会被杀死的阶段",
        "rehearse-disk": "会写满磁盘的阶段",
    },
    comma="，",
    colon="：",
    readme_without_a_gpu=(
        "**尚未测试：** GPU。Lockstep 的 CUDA 代码和 NCCL 都还没有在 GPU 上运行过；一套九分钟的单卡测试"
        "已经准备好，并在 CPU 上演练过（[覆盖的内容](docs/gpu.zh.md)）。"
    ),
    readme_with_a_gpu=(
        "**GPU：** 在一张 {gpu} 上运行过（{day}）：{counts}。用 NCCL 时，两到四个 rank 共用这一张"
        " GPU，因此多卡上的速度还不清楚（[结果](docs/gpu.zh.md)）。"
    ),
    unknown_gpu="型号未记录的 GPU",
)
