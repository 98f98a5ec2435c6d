"""Whole lines as Lockstep prints them: nothing of them may stay English but names.

A line is often joined from several messages. Each of them may be in the catalogue, and the line is
shown half English all the same, where a template takes a part of it for the value of a field.
"""

from __future__ import annotations

import re

import pytest

from lockstep import language

pytestmark = pytest.mark.unit

SAME_IN_BOTH_LANGUAGES = {
    *(
        "rank",
        "ranks",
        "loss",
        "inf",
        "dict",
        "killer",
        "list",
        "forward",
        "epoch",
        "batch",
        "hook",
        "hooks",
        "stage",
        "token",
        "dtype",
    ),
    *("ddp", "fsdp", "cuda", "cpu", "torch", "numpy", "lockstep", "run", "prepare", "loader"),
    *("shares", "auto", "store", "seed", "worker", "dropout", "hsdp", "ms", "slurm", "traceback"),
    *("ctrl", "explain", "safetensors"),
}
"""Words that a Chinese practitioner uses as they are, and names of settings and strategies."""

QUOTED = re.compile(r"\w+Error: .*|'[^']*'|\"[^\"]*\"|`[^`]*`|\[Errno[^\]]*\] [^)）]*")
CODE = re.compile(r"\S*[/\\_=\[\]()@.:]\S*|--?[A-Za-z]\S*|\b[A-Z]\w*[A-Z]\w*|[\w-]*\d[\w-]*")


def english_words(text: str) -> list[str]:
    """Returns the words of a text that should have been translated."""
    without_names = CODE.sub(" ", QUOTED.sub(" ", text))
    words = re.findall(r"[A-Za-z][a-z]+", without_names)
    return [word for word in words if word.lower() not in SAME_IN_BOTH_LANGUAGES]


RESUMED = "resumed c/step-7 (epoch 1, step 7, strategy ddp, 2 ranks)"
RESUMED_IN_CHINESE = "已从 c/step-7 续训（epoch 1，第 7 步，策略 ddp，2 个 rank）"
DEVICE_0 = "rank 0 (cuda:0 of node0)"
DEVICE_1 = "rank 1 (cuda:1 of node7)"
DEVICE_0_IN_CHINESE = "rank 0（node0 的 cuda:0）"
DEVICE_1_IN_CHINESE = "rank 1（node7 的 cuda:1）"
DEVICES = f"{DEVICE_0} and {DEVICE_1}"

LINES = {
    # What is noted after "resumed ...".
    f"{RESUMED}; saved by 1 process, resumed on 2: dropout's random state restarts from the seed": (
        f"{RESUMED_IN_CHINESE}；由 1 个进程保存，现在用 2 个进程续训："
        "dropout 的随机状态从种子重新开始"
    ),
    f"{RESUMED}; saved with virtual ranks: dropout's random state restarts from the seed": (
        f"{RESUMED_IN_CHINESE}；保存时使用了虚拟 rank：dropout 的随机状态从种子重新开始"
    ),
    f"{RESUMED}; dropout's random state restarts from the seed": (
        f"{RESUMED_IN_CHINESE}；dropout 的随机状态从种子重新开始"
    ),
    f"{RESUMED}; passed over: step-000000600 (net.pt is damaged: its checksum differs; a is "
    "missing), step-000000300 (incomplete); process 3 on host a writes into this folder": (
        f"{RESUMED_IN_CHINESE}；跳过了：step-000000600（net.pt 已损坏：校验和不同；缺少 a），"
        "step-000000300（不完整）；进程 3（主机 a）正在写入这个文件夹"
    ),
    "nothing to resume in runs/a; step 812 in memory is incomplete: what ranks 2-3 kept is "
    "missing": "runs/a 中没有可续训的检查点；内存中的第 812 步不完整：缺少 rank 2-3 保存的部分",
    "nothing to resume in runs/a; no step of this run is in memory": (
        "runs/a 中没有可续训的检查点；内存中没有这次训练的任何一步"
    ),
    # The startup summary and the report.
    "48% + 52% of time and memory, measured on an example": (
        "时间和显存的占比 48% + 52%，用一个样例批次测得"
    ),
    "gradients between 2 machines; not the numbers of one device": (
        "梯度在 2 台机器之间；结果与单设备不同"
    ),
    "bf16: other numbers, about 1.7 times as fast; hsdp: same numbers, about 2.0 times as fast": (
        "bf16：结果会不同，速度约为 1.7 倍；hsdp：结果不变，速度约为 2.0 倍"
    ),
    "every 6 steps, one is kept in memory from now on: keeping it takes 13 ms, and a step takes "
    "5 ms": None,
    # Devices that compute wrongly.
    f"step 1500, virtual rank 2: all ranks computed it again, and {DEVICE_1} got different bits "
    "than 3 ranks that agree; the gradients that differ: fc.weight": (
        "第 1500 步，虚拟 rank 2：所有 rank 都重新计算了一次，另外 3 个 rank 的结果一致，"
        f"{DEVICE_1_IN_CHINESE}的不同；不同的梯度：fc.weight"
    ),
    f"step 9, virtual rank 0: {DEVICES} got different bits, each the same ones both times, and "
    "one of the two is wrong; the gradients that differ: fc.weight": (
        f"第 9 步，虚拟 rank 0：{DEVICE_0_IN_CHINESE}和 {DEVICE_1_IN_CHINESE}的结果不同，"
        "但各自两次都一样；其中之一出错；不同的梯度：fc.weight"
    ),
    f"before step 9, in the parameters fc.weight: {DEVICES} have different bits, and one of the "
    "two is wrong": None,
    "the check in step 101 found no difference: resume from a checkpoint that is older, "
    "runs/a/step-100": "第 101 步的检查没有发现差异：请从更早的检查点 runs/a/step-100 续训",
    "make all ranks equal in what decides bits, since they may have different bits without being "
    "wrong; if they still differ: look first whether the script does something else on rank 2 "
    "(world.rank, world.is_main); if not, take cuda:2 of node2 out of the run and test it": None,
    "rank 3 has another CPU (AVX2, others AVX512)": (
        "rank 3 的 CPU 不同（AVX2，其他 rank 是 AVX512）"
    ),
    # Checkpoints and files of weights that are damaged.
    "its manifest is damaged: it names files outside of its folder": None,
    "w is at byte 8, where 4 is next": "w 位于第 8 字节，而下一个位置应是 4",
    "fc.weight: [2, 8] in the file, [5, 8] in the model": (
        "fc.weight：文件中是 [2, 8]，模型中是 [5, 8]"
    ),
    "optimizer.x is a numpy value of dtype <U1": "optimizer.x 是 dtype 为 <U1 的 numpy 值",
    "a[0] contains itself": "a[0] 包含它自己",
    "w claims 400 bytes and has 4": "w 声称有 400 字节，实际只有 4 字节",
    "its largest value inf is beyond what that dtype can hold (65504)": (
        "其中最大的值 inf 超出了该 dtype 的范围（65504）"
    ),
    # Models and settings that do not fit the devices.
    "the module has a forward set on the object; such code is bound to one object on one device": (
        "模块有直接赋给实例的 forward；这样的代码绑定在一个设备的一个对象上"
    ),
    "layers.0 is compiled; such code is bound to one object on one device": (
        "layers.0 已被编译；这样的代码绑定在一个设备的一个对象上"
    ),
    "2 shares for 3 devices": "有 3 个设备，却给出了 2 份",
    "a list of 8 values, beside tensors of 8 samples: it is not split, so every replica gets all "
    "of it": (
        "8 个值的 list，与 8 个样本的张量一起传入：它不会被划分，因此每个副本都得到全部"
    ),
    "an array of shape (8, 3), beside tensors of 8 samples: it is not split, so every replica "
    "gets all of it": (
        "形状为 (8, 3) 的数组，与 8 个样本的张量一起传入：它不会被划分，因此每个副本都得到全部"
    ),
    "head.weight is a dict, and the file can hold plain tensors alone": None,
    "2 missing, 1 unexpected, 1 of another shape": "缺少 2 个，多出 1 个，1 个形状不同",
    # A table: its labels are words, and "loss" and "batch" in other cells are names.
    "of the model's 9 names 3 fit; 4 missing, 1 of another shape\n"
    "    missing      fc.weight       [4, 3]  nearest in the file: fc.wieght\n"
    "    missing      loss            [3]\n"
    "    missing      batch\n"
    "    missing      ... and 1 more\n"
    "    other shape  head.weight     [7, 3] in the file, [2, 3] in the model": (
        "模型的 9 个名字中有 3 个对得上；缺少 4 个，1 个形状不同\n"
        "    缺少         fc.weight       [4, 3]  文件中最接近的是：fc.wieght\n"
        "    缺少         loss            [3]\n"
        "    缺少         batch\n"
        "    缺少         ……另有 1 个\n"
        "    形状不同     head.weight     文件中是 [7, 3]，模型中是 [2, 3]"
    ),
    "outer_lr is a number": "outer_lr 是数",
    "set in the script; ranks given by the script": "在脚本中设置；rank 由脚本给出",
    "out of memory with 1 sample at a time on this rank.": (
        "内存或显存不足：这个 rank 每次计算 1 个样本。"
    ),
    "killed by the kernel's out-of-memory killer (SIGKILL; it had used 1.5 GiB)": (
        "被杀死（内核的 OOM killer；SIGKILL；此前最多占用 1.5 GiB 内存）"
    ),
    "No such command 'check'. Did you mean one of: lockstep run; lockstep run --help?": None,
    # Ranks that do not come together.
    "two processes claim rank 0: process 2442 on host0 and process 2443 on host1": None,
    "ranks 3, 5 did not come within 1 s; came: ranks 0-1 on host0; rank 2 on host1": None,
    "start each rank once, and give a second run a port of its own": None,
    "port 29500 is taken by another Lockstep run: process 7 on host0, train.py --seed 3": None,
    "seed: ranks 0-1 have '0', rank 2 has '7'": "seed：rank 0-1 上是 '0'，rank 2 上是 '7'",
    "shared memory: rank 3 did not come within 5 s to all_reduce number 7": None,
    # Lists with "and" between the items.
    "deadlock: ranks 0-2 wait in a collective and all_gather and all_reduce, for process groups "
    "that differ, and nothing has moved for 12 s": (
        "死锁：rank 0-2 在集合通信和 all_gather 和 all_reduce（进程组不同）中等待，"
        "12 s 内没有任何进展"
    ),
    "deadlock after an exception: ranks 0-1 wait in a collective and all_reduce while handling "
    "ValueError; nothing has moved for 12 s": (
        "异常之后的死锁：rank 0-1 在处理 ValueError 时停在集合通信和 all_reduce 中等待；"
        "12 s 内没有任何进展"
    ),
    "all ranks must call world.sum() and world.mean(), in the same order: take what only some "
    "ranks call out of `if world.is_main:`": (
        "所有 rank 都必须以相同顺序调用 world.sum() 和 world.mean()："
        "把只有部分 rank 调用的移出 `if world.is_main:`"
    ),
    "the loss comes from 2 batches, of which this rank has 3 of 8 and 2 of 8 samples: no single "
    "factor is exact for all of them on these ranks": None,
    "the batches of the ranks have tensors of shapes [3, 4] and [5, 4], which make no one batch": (
        "各 rank 的批次中张量的形状是 [3, 4] 和 [5, 4]，无法合成一个批次"
    ),
    # Options from a launch file.
    "seed, shares from lockstep.toml": "seed, shares 来自 lockstep.toml",
    "seed from runs/pyproject.toml": "seed 来自 runs/pyproject.toml",
    "it is not a whole number of at least 1": "它不是不小于 1 的整数",
    "killed by SIGSEGV (segmentation fault)": "被 SIGSEGV（段错误）杀死",
    "exit code 139 (128 + 11: SIGSEGV (segmentation fault))": (
        "退出码 139（128 + 11：SIGSEGV（段错误））"
    ),
    "seed: rank 0 has '0', rank 1 has '1', and 3 more values": (
        "seed：rank 0 上是 '0'，rank 1 上是 '1'，另有 3 个值"
    ),
    "rank 1: it is not the number of a rank: there are 3 of them": (
        "rank 1：它不是 rank 的编号：一共有 3 个 rank"
    ),
    "give an integer from 0 to 2": "给出从 0 到 2 的整数",
    "see the traceback of that rank": None,
    # Machines that are reached by ssh.
    "node3: it cannot reach node2 at 10.0.0.1, port 29500 (short messages arrive, long ones do "
    "not, as where the MTU of an interface is larger than that of the way)": (
        "node3：它无法访问 node2，地址 10.0.0.1，端口 29500（短消息能到达，长消息不能，"
        "例如网卡的 MTU 大于途中网络的 MTU 时就会这样）"
    ),
    "node3: it cannot reach node2 at 10.0.0.1, port 29500 (no answer within 5 s); node4: it "
    "requires a password": (
        "node3：它无法访问 node2，地址 10.0.0.1，端口 29500（5 s 内没有应答）；"
        "node4：登录它需要密码"
    ),
    "Ctrl-Z does nothing here: a run on several machines cannot be stopped for a while": None,
    # Verdicts of verify, which are joined from parts.
    "on one process it ended with TypeError: unsupported operand": (
        "在单进程上，它因 TypeError: unsupported operand 而结束"
    ),
    ", on rank 1": "，在 rank 1 上",
    ", on ranks 1-2": "，在 rank 1-2 上",
    "0.0025 on one process, 0.01 on 2": "0.0025（单进程），0.01（2 个进程）",
    "steps of the scheduler until then: 1 on one process, 1 on 2": (
        "到此为止调度器的步数：1（单进程），1（2 个进程）"
    ),
    "torch was seeded with 0 on one process, no seed on rank 0": (
        "torch 的种子：0（单进程），没有设置种子（rank 0）"
    ),
    "not compared: 1 process with virtual ranks: 2 shares for 3 devices "
    "(UsageError: world.broadcast of a nest)": (
        "没有比较：1 个进程，使用虚拟 rank：有 3 个设备，却给出了 2 份"
        "（UsageError: 对嵌套结构调用 world.broadcast）"
    ),
    "run 1 of 4, 1 process: step 0 of at most 50, 0:20 left of about 1:02:05": (
        "第 1 次运行（共 4 次），1 个进程：第 0 步（共最多 50 步），还需 0:20，共约 1:02:05"
    ),
    # Other lines with values that are joined from texts.
    "not in the checkpoint: net_1; in the checkpoint alone: loader, net_2": (
        "检查点中没有：net_1；只在检查点中有：loader, net_2"
    ),
    "in the checkpoint alone: loader": "只在检查点中有：loader",
    "There is no LS999. Codes are LS101-LS112, LS501; lockstep explain lists all of them": (
        "没有 LS999。代码有 LS101-LS112, LS501；lockstep explain 列出全部"
    ),
    "Nothing in the catalogue is about 'x, y'. There are topics: exit_1, batch_size. lockstep "
    "explain lists all codes": (
        "没有关于 'x, y' 的条目。主题有：exit_1, batch_size。lockstep explain 列出全部代码"
    ),
    "n0 resolves to 127.0.0.1, ::1; that is loopback, which other machines cannot reach; Lockstep "
    "goes around it, other programs may not": (
        "n0 解析为 127.0.0.1, ::1；这是回环地址，其他机器无法访问；Lockstep 会绕开它，其他程序未必"
    ),
    "a loader over 101 samples in global batches of 32 (checksum 50b8a6dc)": (
        "含 101 个样本、全局批次大小为 32 的 loader（校验和 50b8a6dc）"
    ),
    "the file is written as safetensors, and .pth is the ending of files of torch.save: torch.load "
    "may not read it": (
        "文件以 safetensors 格式写出，而 .pth 是 torch.save 的文件的后缀：torch.load 可能读不了"
    ),
    "they take different ways through the model: replica 0 at 'norms.0', replica 1 at 'norms.1'": (
        "它们在模型中走了不同的路径：副本 0 在 'norms.0'，副本 1 在 'norms.1'"
    ),
}  # fmt: skip
"""English lines with their Chinese, or None where only English words must not be left."""


@pytest.fixture(autouse=True)
def chinese(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(language, "language", lambda: "zh")


@pytest.mark.parametrize(("line", "expected"), LINES.items(), ids=range(len(LINES)))
def test_a_whole_line_is_chinese(line: str, expected: str | None) -> None:
    translated = language.translate(line)
    assert english_words(translated) == [], translated
    if expected is not None:
        assert translated == expected


@pytest.mark.parametrize(
    ("heading", "expected"),
    [
        (
            "a run of 6 processes that meet at tcp://10.0.0.1:29500",
            "6 个进程在 tcp://10.0.0.1:29500 会合的运行",
        ),
        (
            "a run of 2 processes that meet at the launcher's store at tcp://127.0.0.1:29500",
            "2 个进程在启动器的 store（tcp://127.0.0.1:29500）会合的运行",
        ),
        (
            "processes that meet at the launcher's store at tcp://127.0.0.1:29500",
            "在启动器的 store（tcp://127.0.0.1:29500）会合的进程",
        ),
        ("the node that serves at n:29500", "n:29500 上的提供服务的节点"),
        (
            "the list of tasks per node '2(x)' from Slurm's environment",
            "Slurm 环境变量中的每节点任务数列表 '2(x)'",
        ),
        ("resuming a loader whose length is 24", "续训长度为 24 的 loader"),
        ("world.broadcast of a nest", "对嵌套结构调用 world.broadcast"),
        ("world.sum of a tensor of torch.bool", "对 torch.bool 张量调用 world.sum"),
        ("a shard size of '5 XB'", "分片大小 '5 XB'"),
        ("collectives: all_gather and all_reduce", "集合通信：all_gather 和 all_reduce"),
    ],
)
def test_a_first_line_is_chinese(heading: str, expected: str) -> None:
    assert language.translate_heading(heading) == expected
    assert english_words(expected) == []


def test_english_that_is_left_over_is_found() -> None:
    assert english_words("缺少 step 812 in memory is incomplete") == [
        *("step", "in", "memory", "is", "incomplete")
    ]
    assert english_words("rank 1（node7 的 cuda:1）：见 `lockstep explain LS303`，a.b") == []
