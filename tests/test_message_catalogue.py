"""The catalogue of messages: complete, and what texts it recognizes."""

from __future__ import annotations

import itertools
import re
import string
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

sys.path.insert(0, str(Path(__file__).parent.parent / "tools"))
import message_catalogue as messages

from lockstep import errors, language
from lockstep.columns import pad, width_of, wrap
from lockstep.language import (
    FIELDS_WITH_ARTICLE,
    GRAMMATICAL_FIELDS,
    HEADING,
    chinese_catalogue,
    chinese_headings,
    fields_of,
    language_of,
    name_of_value,
    pattern_of_field,
)
from lockstep.run.watch.error_record import describe_error
from lockstep.run.watch.failure_report import render_briefly, render_failure
from lockstep.run.watch.first_failure import FirstFailure
from lockstep.run.watch.messages import render
from lockstep.run.watch.verdict import Row, Verdict

pytestmark = pytest.mark.unit

PASSED_ON = {
    "batch.loader:error.do",
    "checkpoint.kept_steps:reason.advice",
    "checkpoint.training_state:error.do",
    "cli.run_options:error.do",
    "distributed.collectives:do",
    "errors:error.do",
    "run.machines.hosts_run:'; '.join(advice)",
    "run.machines.machine_connection:self._advice_on_missing_file(was_copied=was_copied)",
    "run.machines.ssh_errors:cause.advice.format(**fields_of_texts)",
    "run.machines.ssh_errors:advice",
    "settings:error.do",
}
"""Where an error is given the advice of another one, whose texts are found where that is made."""


@dataclass(frozen=True)
class Entry:
    """A message and its translation."""

    message: str
    translation: str


PO_TEXT = language.CATALOGUE_FILE.read_text(encoding="utf-8")
ALL_ENTRIES = [Entry(*each) for each in language.read_po(PO_TEXT).items()]
ENTRIES = [entry for entry in ALL_ENTRIES if not entry.message.startswith(HEADING)]
HEADINGS = [
    Entry(entry.message.removeprefix(HEADING), entry.translation)
    for entry in ALL_ENTRIES
    if entry.message.startswith(HEADING)
]


@pytest.fixture(scope="module")
def extracted() -> messages.Messages:
    return messages.extract()


@pytest.fixture
def chinese(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(language, "language", lambda: "zh")


def test_every_message_of_the_source_is_in_the_catalogue(extracted: messages.Messages) -> None:
    in_source = set(extracted.places)
    in_catalogue = {entry.message for entry in ALL_ENTRIES}
    assert in_source - in_catalogue == set(), "make messages, and translate what is new"
    assert in_catalogue - in_source == set(), "make messages: these are gone"


def test_texts_that_are_listed_as_no_messages_are_in_the_source(
    extracted: messages.Messages,
) -> None:
    assert set(messages.NO_MESSAGES) - extracted.no_messages_found == set()


SENTENCES = '''
"""A docstring of several words."""
LIMITS = {"the key of a dictionary": "a limit that the user has set"}
OUT_OF_MEMORY = re.compile("not enough memory for this")
PATTERN = r"not enough memory for \\d+ bytes"

def describe(number):
    """Another docstring of several words."""
    if "is not enough memory" in str(number):
        raise AssertionError("this can not happen")
    text = f"the {number} samples were left out"
    text += f"; so were {number} of the others"
    return text + f", and {number} of all of them", "two words"
'''


def test_a_sentence_anywhere_in_a_module_is_a_message(tmp_path: Path) -> None:
    """Only those in calls of errors were found, and those of listed modules."""
    file = tmp_path / "made.py"
    file.write_text(SENTENCES)
    modules = {**messages.house.read_house(), "made": messages.house.Module("made", file)}
    found = messages.Reader(modules).read()
    assert {message for message, places in found.places.items() if "made" in places} == {
        "a limit that the user has set",
        "the {number} samples were left out",
        "so were {number} of the others",
        "{text}, and {number} of all of them",
    }


def test_the_advice_of_every_error_is_found(extracted: messages.Messages) -> None:
    assert set(extracted.advice_not_found) == PASSED_ON


def test_every_message_is_translated() -> None:
    assert [entry.message for entry in ALL_ENTRIES if not entry.translation] == []
    # What gettext's own tools make of a message that has changed, or is gone.
    assert "fuzzy" not in PO_TEXT
    assert "\n#~" not in PO_TEXT


def test_both_languages_have_the_same_fields() -> None:
    for entry in ALL_ENTRIES:
        fields = set(fields_of(entry.message))
        translated_fields = set(fields_of(entry.translation))
        assert translated_fields <= fields, entry
        assert fields - translated_fields <= set(GRAMMATICAL_FIELDS), entry


def test_messages_that_differ_only_in_names_of_fields_have_one_translation() -> None:
    """With two translations a text would have two readings, and stay English."""
    translations: dict[tuple[str, ...], set[str]] = {}
    for entry in ENTRIES:
        patterns = [pattern_of_field(field).pattern for field in fields_of(entry.message)]
        number_of_field = {field: str(n) for n, field in enumerate(fields_of(entry.message))}
        key = (entry.message.format(**number_of_field), *patterns)
        translation = entry.translation.format(**number_of_field)
        translations.setdefault(key, set()).add(without_spaces(translation))
    assert [found for found in translations.values() if len(found) > 1] == []


NAMES_IN_MESSAGES = re.compile(
    r"`[^`]*`"  # code
    r"|(?<![\w-])--?[a-zA-Z][\w-]*"  # an option
    r"|\b[A-Za-z_]\w*(?:\.[A-Za-z_]\w+)+"  # such as world.prepare
    r"|\b\w+_\w+\b|\b\w+(?==)"  # such as batch_size, or seed=
    r"|\b[A-Z][a-z]+[A-Z]\w*|\b[A-Z][A-Z_0-9]{2,}\b"  # such as DataLoader, NCCL
    r"|(?<![\w{.])\d+(?:\.\d+)?(?![\w}])"  # a number
)
"""What both languages write in the same way."""
OTHER_IN_CHINESE = {
    "DataLoaders": "DataLoader",
    "GPU": "显存",  # in "GPU memory"
    "RUN": "",  # "given OTHER runs, RUN is compared with them" needs no second name
    "65536": "65535",  # torch's message has the first number that is no port
    "`lockstep explain --markdown en`": "`lockstep explain --markdown zh`",
}


def test_names_options_and_numbers_are_the_same_in_both_languages() -> None:
    """A translation that belongs to another message would give wrong advice."""
    wrong = []
    for entry in ALL_ENTRIES:
        for name in NAMES_IN_MESSAGES.findall(entry.message.removeprefix(HEADING)):
            is_kept = name in entry.translation or name in GRAMMATICAL_FIELDS
            if not is_kept and OTHER_IN_CHINESE.get(name, name) not in entry.translation:
                wrong.append((name, entry))
    assert wrong == []


def test_what_is_written_is_read_again() -> None:
    messages_with_quotes = messages.Messages()
    message = 'a "quoted" path C:\\new\nin two lines {name}'
    messages_with_quotes.add(message, "module")
    messages_with_quotes.add(HEADING + message, "module")
    translations = {message: "\u4e00", HEADING + message: "\u4e8c"}
    text = messages.write_po(messages_with_quotes, translations)
    assert language.read_po(text) == translations


def test_a_message_whose_field_is_renamed_keeps_its_translation() -> None:
    translations = {"{check} has {n} bytes": "{check}\u6709 {n} \u5b57\u8282", "gone": "x"}
    renamed = "{name} has {n} bytes"
    assert messages.translations_of_renamed([renamed, "new", "gone"], translations) == {
        renamed: "{name}\u6709 {n} \u5b57\u8282"
    }


def test_entries_of_both_sides_of_a_conflict_are_read() -> None:
    text = (
        'msgid ""\nmsgstr ""\n"Language: zh_CN\\n"\n\n<<<<<<< ours\n#: a\nmsgid "one"\n'
        'msgstr "\u4e00"\n=======\n#: b\nmsgid ""\n"two "\n"parts"\nmsgstr ""\n'
        '"\u4e8c"\n>>>>>>> theirs\n'
    )
    assert language.read_po(text) == {"one": "\u4e00", "two parts": "\u4e8c"}


TYPICAL_VALUES = (
    *(
        "7",
        "rank 7",
        "33%",
        "runs/lockstep.toml",
        "7 steps",
        "in backward",
        "true on rank 7",
        "(7, 7)",
        "w",
        ", w",
        "parameters",
        "7 GiB",
        "between w",
        "shared memory",
        " (w)",
        "; w",
        "a Linear",
        "rank 7 (w)",
        "step-7",
        "step-7 (w)",
        "SIGKILL",
        "UsageError: w",
        "cpu",
        "cpu of w",
        "is a Linear",
        "'w'",
        "[7]",
    ),
)
"""Values of which one is right for each field that may not be any text."""


def typical_value(field: str) -> str:
    pattern = pattern_of_field(field)
    values = (f"<{field}>", *TYPICAL_VALUES)
    return next(value for value in values if pattern.fullmatch(value))


def values_of(message: str) -> dict[str, str]:
    return {field: typical_value(field) for field in fields_of(message)}


def translated_value(field: str, value: str) -> str:
    """Returns what Chinese has for a value: for a class its name, without the article.

    In most fields a single word is a name, even if the catalogue has the word: "ok" stays "ok".
    """
    name = name_of_value(field)
    if name in FIELDS_WITH_ARTICLE:
        return re.sub(r"\Aan? ", "", value)

    def translate(text: str) -> str:
        cache = language.Cache(single_words_are_names=False)
        words_are_names = name not in language.FIELDS_OF_CATALOGUED_WORDS
        translation = chinese_catalogue()._translate_text(
            text, cache, single_words_are_names=words_are_names
        )
        return translation.text

    if name in language.FIELDS_OF_JOINED_ITEMS:
        return language.CHINESE_AND.join(map(translate, value.split(language.AND)))
    return translate(value)


def test_a_noun_of_one_word_is_translated() -> None:
    translated = chinese_catalogue().translate("that is by their samples: 8, 4")
    assert translated == "即按它们的样本数：8, 4"


def test_what_was_made_from_a_template_is_recognized() -> None:
    catalogue = chinese_catalogue()
    for entry in ENTRIES:
        values = values_of(entry.message)
        text = entry.message.format(**values)
        translated_values = {
            field: translated_value(field, value) for field, value in values.items()
        }
        expected = entry.translation.format(**translated_values)
        assert catalogue.translate(text).replace(" ", "") == expected.replace(" ", "")


def test_first_lines_of_errors_are_recognized_as_a_whole() -> None:
    """A template may be like another one, as "a {x}" and "a {x} of {y}"; none may be English."""
    catalogue = chinese_headings()
    english = []
    for entry in HEADINGS:
        heading = entry.message.format(**values_of(entry.message))
        is_all_code = entry.translation == entry.message
        if catalogue.translate_whole(heading) == heading and not is_all_code:
            english.append(heading)
    assert english == []


def test_first_lines_keep_code_and_what_is_not_theirs(chinese: None) -> None:
    for heading, expected in {
        "world.prepare of an int": "对 int 调用 world.prepare",
        "launch(train) on 2 processes": "在 2 个进程上 launch(train)",
        "--hosts with --slurm": "--hosts 与 --slurm 同用",
        "--node-rank with --hosts": "--node-rank 与 --hosts 同用",
        "resuming from runs/a with model, optimizer": (
            "从 runs/a 续训，传入的对象：model, optimizer"
        ),
        "world.checkpoint without anything to save": "world.checkpoint 没有要保存的内容",
        "rank=1, world_size=2": "rank=1, world_size=2",
        "a loss of the user's own": "a loss of the user's own",
        "a sampler of your own; an int": "a sampler of your own; an int",
    }.items():
        assert language.translate_heading(heading) == expected
    # They are not messages, so that they fit no other text.
    assert language.translate("training over an unprepared DataLoader").isascii()


def test_values_of_a_template_are_translated_too(chinese: None) -> None:
    text = "deadlock: ranks 0-2, 5 wait in barrier, for each other, and nothing has moved for 5 s"
    expected = "死锁：rank 0-2, 5 在 barrier（互相等待）中等待，5 s 内没有任何进展"
    assert language.translate(text) == expected
    assert language.translate("rank 1 waits for data; no such message") == (
        "rank 1 在等待数据；no such message"
    )
    assert language.translate("ranks 1-2 wait for data") == "rank 1-2 在等待数据"


def test_lists_keep_which_value_belongs_to_which_rank(chinese: None) -> None:
    """A short template may take the beginning of a list for its first field."""
    for text, expected in (
        ("0.5 on rank 0, 2 on rank 1", "0.5（rank 0），2（rank 1）"),
        (
            "torch was seeded with 11 on one process and rank 0, 12 on rank 1 and rank 2",
            "torch 的种子：11（单进程和 rank 0），12（rank 1 和 rank 2）",
        ),
        (
            "it ends after 5 samples on rank 0, not yet on rank 1",
            "结束的位置：5 个样本之后（rank 0），尚未结束（rank 1）",
        ),
        (
            "they are those of rank 0, 2 times on rank 1, 3 times on rank 2",
            "它们与 rank 0 的相比：2 倍（rank 1），3 倍（rank 2）",
        ),
    ):
        assert language.translate(text) == expected


def test_values_in_parts_of_a_verdict_are_translated(chinese: None) -> None:
    for text, expected in (
        (
            ", first in the parameters before the first step (1 of 2), step 1",
            "，首个差异：第一步之前的参数（2 个中的 1 个），第 1 步",
        ),
        (
            ", bits differ first in gradients of virtual ranks (1 of 54), step 2 of optimizer 2",
            "，首个逐位差异：虚拟 rank 的梯度（54 个中的 1 个），第 2 步（优化器 2）",
        ),
        (
            "gradients (2 of 4), step 3 of optimizer 2 (SGD of Net)",
            "梯度（4 个中的 2 个），第 3 步（优化器 2，Net 的 SGD）",
        ),
        (
            ", first in gradients (16 of 16), step 2",
            "，首个差异：梯度（16 个中的 16 个），第 2 步",
        ),
        ("all gradients are 1/2 of those of one process", "所有梯度与单进程的梯度相比：1/2"),
        ("but for rounding: fc.weight", "只差舍入误差：fc.weight"),
        (
            "before step 3, in the parameters fc.weight, fc.bias: rank 1 and 2 more",
            "在第 3 步之前，参数中 fc.weight, fc.bias：rank 1 等，另有 2 个",
        ),
        (
            "the ranks went different ways at train.py:71: if rank == 0: true on one process, "
            "not reached on rank 0 and rank 1",
            "各 rank 在 train.py:71: if rank == 0 处走了不同的分支：true（单进程），"
            "没有到达（rank 0 和 rank 1）",
        ),
        (
            "deadlock: ranks 0-1 wait in all_gather and recv, for each other, and nothing has "
            "moved for 5 s",
            "死锁：rank 0-1 在 all_gather 和 recv（互相等待）中等待，5 s 内没有任何进展",
        ),
        ("1/2 of: fc.weight", "1/2：fc.weight"),
        (
            "the gradient of one process is that of parts 1, 2 of 4 alone",
            "单进程的梯度只是 4 个部分中第 1, 2 个的梯度",
        ),
        (
            "fc.bias (3 of 4 values): gradients up to 1.0e-08 in the script's precision and "
            "1.0e-17 in float64; the step moves it 90% as far as the parameter that moves most",
            "fc.bias（4 个值中的 3 个）：以脚本的精度计算，梯度最大为 1.0e-08，以 float64 计算为 "
            "1.0e-17；这一步移动的距离是移动最多的参数的 90%",
        ),
        ("waits in all_reduce of 25x4 float, in backward",
         "在 all_reduce（25x4 个 float）中等待（在反向传播中）"),
    ):  # fmt: skip
        assert language.translate(text) == expected


def test_spaces_stand_where_latin_letters_meet_chinese_characters(chinese: None) -> None:
    """The same template with a value of either kind."""
    same = " averages its gradients itself; here they would be averaged twice, and not weighted"
    rest = "自己对梯度取平均；在这里会取平均两次，而且没有加权"
    assert language.translate(f"the model{same}") == f"模型{rest}"
    assert language.translate(f"layers.0{same}") == f"layers.0 {rest}"


def test_what_a_script_says_is_not_translated(chinese: None) -> None:
    for quoted in (
        "ValueError: torchvision is not installed",
        "train.py:4: raise ValueError('it is empty')",
        "subprocess.CalledProcessError: it is empty",
    ):
        assert language.translate(quoted) == quoted


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, "en"),
        ({"LANG": "zh_CN.UTF-8"}, "zh"),
        ({"LANG": "de_DE.UTF-8"}, "en"),
        ({"LANG": "zh_CN.UTF-8", "LC_ALL": "C"}, "en"),
        ({"LANG": "C.UTF-8", "LC_MESSAGES": "zh_TW"}, "zh"),
        ({"LANG": "zh_CN.UTF-8", "LOCKSTEP_LANG": "en"}, "en"),
        ({"LANG": "en_US.UTF-8", "LOCKSTEP_LANG": "zh-CN"}, "zh"),
        ({"LOCKSTEP_LANG": "zh_CN.UTF-8"}, "zh"),
        ({"LOCKSTEP_LANG": ""}, "en"),
        ({"LOCKSTEP_LANG": "chinese"}, None),
    ],
)
def test_the_variable_goes_before_the_locale(variables: dict[str, str], expected: str) -> None:
    assert language_of(variables) == expected


def test_an_unknown_language_is_refused() -> None:
    with pytest.raises(errors.SettingError, match="languages are en, zh"):
        errors.check_language({"LOCKSTEP_LANG": "zz"})


def test_an_error_is_shown_in_chinese_and_recorded_in_english(chinese: None) -> None:
    error = errors.SettingError(
        "precision='fp8'", "precisions are fp32, bf16", "choose one of them"
    )
    assert str(error).startswith(
        "precision='fp8'\n  原因：可用的精度有 fp32, bf16\n  建议：选择其中之一\n  位置："
    )
    assert error.text.startswith(
        "precision='fp8'\n  found: precisions are fp32, bf16\n  do:    choose one of them\n"
    )
    assert error.args == (error.text,)
    assert describe_error(error).message == error.text
    of_catalogue = errors.UsageError("world.backward of a float", "x", "y", code="LS407")
    assert str(of_catalogue).splitlines()[0] == "world.backward 收到的是 float"
    assert "\n  详见：lockstep explain LS407" in str(of_catalogue)
    assert "\n  more:  [LS407: lockstep explain LS407]" in of_catalogue.text
    heard: list[str] = []
    errors.on_warning.append(heard.append)
    try:
        with pytest.warns(errors.LockstepWarning, match="建议：选择其中之一"):
            errors.warn("x", found="it is empty", do="choose one of them")
    finally:
        errors.on_warning.remove(heard.append)
    assert heard == ["x\n  found: it is empty\n  do:    choose one of them"]


def test_a_verdict_fits_the_width_in_chinese(chinese: None) -> None:
    verdict = Verdict(
        kind="blocked",
        fatal=False,
        ranks=(1,),
        headline="rank 1 is blocked outside any collective, without computing; "
        "ranks 0, 2 have waited for it for 7 s",
        rows=(Row(0, "a", "waits in barrier (step 4)", None, 7.0),),
        advice=("every send needs its receive, in the same order on both ranks: where both send or "
                "receive first, change the order on one of them, or use `batch_isend_irecv`",
                "look at its host: other programs on its cores or its GPU, an older or a hotter "
                "device, slower storage; and at what it does alone in every step. Uneven `shares` "
                "give it less work, except under diloco"),
    )  # fmt: skip
    lines = render(verdict, language.translate).splitlines()
    assert lines[0] == "rank 1 阻塞在集合通信之外，没有在计算；rank 0, 2 已等待 7 s"
    assert lines[1] == "  rank 0（a）：在 barrier 中等待（第 4 步），已 7 s"
    assert lines[2].startswith("  建议：每次发送都要有对应的接收")
    assert lines[3].startswith("    ")
    assert "\n  建议：检查它的主机：" in "\n".join(lines)  # an advice that has a semicolon itself
    assert all(width_of(line) <= 100 for line in lines)
    assert render(verdict).isascii()


def test_a_failure_leaves_what_the_rank_has_printed_as_it_is(chinese: None) -> None:
    failure = FirstFailure(
        kind="exit",
        time=0.0,
        headline="exit code 3; no exception was recorded",
        ranks=(0, 1),
        host="a",
        step=12,
        details=("its last lines:", "  it is empty"),
        consequences=("ranks 2-3 (Connection closed by peer)",),
    )
    assert render_failure(failure, language.translate) == (
        "FIRST FAILURE（首个故障）：rank 0-1（主机 a），第 12 步之后\n"
        "  退出码 3；没有记录到异常\n"
        "  它最后的输出：\n"
        "    it is empty\n"
        "连带后果：rank 2-3 (Connection closed by peer)"
    )
    assert render_failure(failure).startswith("FIRST FAILURE: ranks 0-1 on host a, after step 12\n")


def test_what_a_script_has_raised_is_not_touched(chinese: None) -> None:
    """Its exception may read like a message of ours."""
    failure = FirstFailure(
        kind="exception",
        time=0.0,
        headline="Diverged: last is missing",
        ranks=(0,),
        host="a",
        details=("found:   3 files", "its shape is 3", "its process was then killed by SIGABRT"),
        folder="logs",
    )
    assert render_failure(failure, language.translate) == (
        "FIRST FAILURE（首个故障）：rank 0（主机 a）\n"
        "  Diverged: last is missing\n"
        "  found:   3 files\n"
        "  its shape is 3\n"
        "  它的进程随后被 SIGABRT 杀死\n"
        "traceback 和日志：logs"
    )
    assert "Diverged: last is missing" in render_briefly(failure, 2, language.translate)
    long_one = replace(failure, headline="x" * 2000)
    assert "xxx... （其余见日志）\n" in render_failure(long_one, language.translate)
    of_ours = replace(failure, is_from_lockstep=True, details=("  found: it is empty",))
    assert "原因：它是空的" in render_failure(of_ours, language.translate)
    hint = "  more:  [LS407: lockstep explain LS407]"
    of_catalogue = replace(failure, is_from_lockstep=True, details=(hint,))
    assert "详见：lockstep explain LS407" in render_failure(of_catalogue, language.translate)


def test_failures_of_other_ranks_are_translated_as_the_first_one(chinese: None) -> None:
    first = FirstFailure(kind="exception", time=10.0, headline="ValueError: no", ranks=(0,))
    headline = "RanksDifferError: collectives: all_gather and all_reduce"
    other = replace(first, ranks=(1,), time=10.3, headline=headline, is_from_lockstep=True)
    own = replace(other, ranks=(2,), headline="Diverged: it is empty", is_from_lockstep=False)
    text = render_failure(replace(first, later_failures=(other, own)), language.translate)
    assert text.splitlines()[-1] == (
        "连带后果：rank 1 (RanksDifferError: 集合通信：all_gather 和 all_reduce，0.3 s 之后)，"
        "rank 2 (Diverged: it is empty，0.3 s 之后)"
    )
    text = render_failure(replace(first, simultaneous_failures=(other, own)), language.translate)
    assert text.splitlines()[-2:] == [
        "  rank 1: RanksDifferError: 集合通信：all_gather 和 all_reduce",
        "  rank 2: Diverged: it is empty",
    ]


def test_a_table_in_an_error_of_a_rank_is_translated(chinese: None) -> None:
    details = (
        "  found: of the model's 6 names 5 fit; 1 missing, 1 unexpected",
        "    missing     fc.weight  [4, 3]  nearest in the file: fc.w",
        "    unexpected  ... and 6 more",
        "  do:    build the model as it was when the file was saved",
    )
    failure = FirstFailure(
        kind="exception",
        time=0.0,
        headline="CheckpointError: saving",
        ranks=(0,),
        details=details,
        is_from_lockstep=True,
    )
    assert render_failure(failure, language.translate).splitlines()[2:] == [
        "    原因：模型的 6 个名字中有 5 个对得上；缺少 1 个，多出 1 个",
        "      缺少        fc.weight  [4, 3]  文件中最接近的是：fc.w",
        "      多出        ……另有 6 个",
        "    建议：按保存文件时的方式构建模型",
    ]
    assert render_failure(failure).splitlines()[2:] == [f"  {line}" for line in details]


def test_lines_of_verify_of_launchers_and_of_kept_steps_are_translated(chinese: None) -> None:
    for text, expected in (
        ("2 runs of train.py: 1 process; 2 processes", "运行 train.py 2 次：1 个进程；2 个进程"),
        ("run 2 of 4", "第 2 次运行（共 4 次）"),
        ("step 5 of at most 50", "第 5 步（共最多 50 步）"),
        ("0:20 left of about 1:00", "还需 0:20，共约 1:00"),
        (
            "every step is kept in memory: two copies, 1.2 MiB for a rank at most, 4.8 MiB on a "
            "machine at most",
            "每一步都保存在内存中：两份，每个 rank 最多 1.2 MiB，每台机器最多 4.8 MiB",
        ),
        (
            "every 6 steps, one is kept in memory from now on: keeping it takes 13 ms, and a step "
            "takes 0.05 ms",
            "从现在起，每 6 步在内存中保存一步：保存需要 13 ms，而一步需要 0.05 ms",
        ),
        (
            "node 1 of 2 has not joined; here: node 0 on host a (waiting for 5 s)",
            "节点 1（共 2 个）还没有加入；已加入：节点 0（主机 a）（已等待 5 s）",
        ),
        ("lockstep 0.1.0 · 1 process on 1 host", "lockstep 0.1.0 · 1 个进程（1 台主机）"),
        ("No such option '--foder'. Did you mean '--folder'?",
         "没有选项 '--foder'。是不是想写 '--folder'？"),
    ):  # fmt: skip
        assert language.translate(text) == expected


def test_lines_about_checkpoints_journals_and_shares_are_translated(chinese: None) -> None:
    lines = {
        "runs/step-12: complete, metric 0.5, the best": "runs/step-12：完整，指标 0.5，最佳",
        "net.pt: a torch file": "net.pt：torch 文件",
        "resumed from step 39 in memory (epoch 1, step 39, strategy fsdp, 2 ranks); there is no "
        "checkpoint on disk": (
            "已从内存中的第 39 步续训（epoch 1，第 39 步，策略 fsdp，2 个 rank）；磁盘上没有检查点"
        ),
        "resumed c/step-7 (epoch 1, step 7, strategy ddp, 2 ranks); it is newer than step 3 in "
        "memory": (
            "已从 c/step-7 续训（epoch 1，第 7 步，策略 ddp，2 个 rank）；它比内存中的第 3 步要新"
        ),
        "total: 2 tensors (2 float32), 12,610 values, 20.1 kB": (
            "合计：2 个张量（2 float32），12,610 个数值，20.1 kB"
        ),
        "1 of 2 tensors differ": "2 个张量中有 1 个不同",
        "A: j2: 8 steps, 0 to 7; 2 processes": "A: j2：8 步，0 到 7；2 个进程",
        "step 3: the loss diverged first; equal up to step 2": (
            "第 3 步：loss 最先出现差异；到第 2 步为止相同"
        ),
        "Directory 'j3' does not exist.": "文件夹 'j3' 不存在。",
        "waiting for 3 nodes; here: node 0 on host a, node 1 on host b": (
            "等待 3 个节点；已加入：节点 0（主机 a），节点 1（主机 b）"
        ),
        "permission is denied ([Errno 13] Permission denied: 'a: b')": (
            "没有权限（[Errno 13] Permission denied: 'a: b'）"
        ),
        "shares auto: kept 1:1: the ranks are equally fast (time per sample: rank 0 2 ms, rank 1 "
        "2 ms, within noise)": (
            "shares auto：保持 1:1：各 rank 一样快"
            "（每个样本的时间：rank 0 2 ms, rank 1 2 ms，在噪声范围内）"
        ),
    }
    for line, expected in lines.items():
        assert language.translate(line) == expected


def test_names_that_are_words_of_the_catalogue_stay_names(chinese: None) -> None:
    assert language.translate_names("losses, last") == "losses, last"
    assert language.translate_names("all, losses, last and 3 more") == (
        "all, losses, last 等，另有 3 个"
    )


def test_lines_are_broken_by_columns() -> None:
    text = "  每个 rank 都必须到达每个集合通信：检查它为什么提前返回（`return`），也可以用 `Join`。"
    lines = wrap(text, 30, subsequent_indent="    ")
    assert all(width_of(line) <= 30 for line in lines)
    assert "".join(line.strip() for line in lines).replace(" ", "") == text.replace(" ", "")
    assert not any(line.strip()[0] in "，。：）" for line in lines)
    assert wrap("one two three", 8) == ["one two", "three"]
    assert pad("原因：", 7) == "原因： "


def test_the_fields_are_those_of_str_format() -> None:
    """A message that `str.format` cannot read would be an error only where it is shown."""
    for entry in ENTRIES:
        for text in (entry.message, entry.translation):
            for _, name, specification, conversion in string.Formatter().parse(text):
                assert name is None or name.isidentifier(), text
                assert not specification, text
                assert conversion is None, text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # A value contains the words around it, and what the value may be says where it ends.
        (
            "all ranks wait for each other for 33% of the time",
            "所有 rank 有 33% 的时间在互相等待",
        ),
        # Nothing says where the first name ends.
        ("a (stage 1) and b (stage 2) and c (stage 3) are one parameter", None),
        # A name of the user's may be a word of the catalogue, quoted or in a list.
        ("gradients is missing", "缺少 gradients"),
        ("'a, losses: b' is missing", "缺少 'a, losses: b'"),
        ("losses, all is missing", "缺少 losses, all"),
        # Messages between semicolons are read one by one; where one is not known, what stands
        # before the semicolon may belong to it.
        ("a is missing; b has 10 bytes", "缺少 a；b 有 10 字节"),
        ("a is missing; b broke", "缺少 a；b broke"),
        ("killed by x y; b broke", None),
        ("a\nb is missing", None),
        (
            "check that it is up and reachable: `ping a`; a firewall must let ssh through; "
            "it does not answer",
            "检查它是否开机、能否访问：`ping a`；防火墙必须放行 ssh；它没有响应",
        ),
        ("rank 1 failed 3 times", None),
        # A class stands behind its article, and a message that begins with one is no class.
        (
            "a batch has no state_dict() and load_state_dict()",
            "batch 没有 state_dict() 和 load_state_dict()",
        ),
        (
            "an NVIDIA driver is installed, but this torch is built without CUDA has no "
            "state_dict() and load_state_dict()",
            None,
        ),
        ("no weights: it holds a loop over it is running", None),
        # Two templates have the same words.
        ("3 (3 of 3)", "3（3 个中的 3 个）"),
        ("3 (Adam of x)", "3，x 的 Adam"),
        # The last values may be divided at any space, and a part of them is a message.
        ("leave train.py out: a b c d e f g h i j k l m n o p q r, state and groups. x", None),
        # What the script has printed or raised stays as it is, with its punctuation.
        ('it is damaged: x: File "/a b/c.py", line 3, in f: x on rank 2', None),
    ],
)
def test_a_text_that_can_be_read_in_two_ways_stays_english(text: str, expected: str | None) -> None:
    assert language.chinese_catalogue().translate(text) == (expected or text)


HOSTILE_VALUES = (
    *("", "3", "it's", "{x}", "rank 1", "ranks 0-2, 5", "step 3", "in backward", "the model"),
    *("/data/my set/part 1.bin", "C:\\x\\y z", "'a, b': c", '"x: y; z"', "0.5, 2"),
    *("fc.weight, fc.bias and head.weight", "a and b and c", "all, losses, script", "gradients"),
    *("line one\nline two: x", "x on rank 0, y on rank 1", "model.layers.0 (3 of 4)", "%s"),
    *("rank 0 and rank 2", "ranks 0-1, 4", "1.5e-08", "12%", "one process", *TYPICAL_VALUES),
    *("an Adam", "a batch", "a dict with 'epoch', 'losses'", "None"),
)
TEMPLATES = [entry for entry in ENTRIES if fields_of(entry.message)]
TEXTS = [entry.message.format() for entry in ENTRIES if not fields_of(entry.message)]


@st.composite
def made_of_hostile_values(draw: st.DrawFn) -> tuple[Entry, dict[str, str]]:
    """Draws a template and values: names, lists, other messages, parts of the same template."""
    entry = draw(st.sampled_from(TEMPLATES))
    other = draw(st.sampled_from(TEMPLATES)).message
    literals = re.split(r"\{\w+\}", entry.message)
    with_literal = st.builds(
        "{}{}{}".format,
        st.sampled_from(("a", "x y", "")),
        st.sampled_from(literals),
        st.sampled_from(("b", "2", "")),
    )
    anything = st.one_of(
        st.sampled_from(HOSTILE_VALUES),
        st.sampled_from(TEXTS),
        with_literal,
        st.just(other.format(**values_of(other))),
    ).filter(lambda value: value == value.strip())
    values = {}
    for field in fields_of(entry.message):
        pattern = pattern_of_field(field)
        if pattern.fullmatch("any text"):
            values[field] = draw(anything.filter(pattern.fullmatch))
        else:
            fitting = [value for value in HOSTILE_VALUES if pattern.fullmatch(value)]
            values[field] = draw(st.sampled_from(fitting))
    return entry, values


def check_that_values_keep_their_places(entry: Entry, values: dict[str, str]) -> None:
    """Each value is in its own place, as it was or translated, or else the text is English."""
    catalogue = chinese_catalogue()
    text = entry.message.format(**values)
    translated = catalogue.translate(text)
    # Two fields without a word between them are one value, and without its empty values a text may
    # be a message of its own, or be made from another template.
    if translated == text or re.search(r"\}\{", entry.message) or text in TEXTS:
        return
    if "" in values.values():
        return
    if any(may_be_made_from(other, text, entry) for other in TEMPLATES):
        return
    # A text that ends as a shortened list does may be that list as a whole, "{text} and 7 more".
    if re.search(r" and \d+ more\Z", text):
        return
    # A name with the quotes that divide two quoted names, "a' and 'b", makes them other two names.
    dividing_quotes = [part for part in re.split(r"\{\w+\}", entry.message)[1:-1] if "'" in part]
    if any(part in value for part in dividing_quotes for value in values.values()):
        return
    alternatives = []
    for field, value in values.items():
        readings = {value, translated_value(field, value)}
        # What stands between separators of messages may be a message: "Start; ..." has two.
        if re.search(rf"(?:\A|\n|; )\{{{field}\}}(?:\n|; |\Z)", entry.message):
            readings.add(catalogue.translate(value))
        alternatives.append(readings)
    possible = set()
    for chosen in itertools.product(*alternatives):
        filled = language.fill_in(entry.translation, dict(zip(values, chosen, strict=True)))
        possible.add(without_spaces(filled))
    assert without_spaces(translated) in possible, (entry.message, values)


def may_be_made_from(other: Entry, text: str, entry: Entry) -> bool:
    """True if a text of one message may also be made from another one.

    - A message may go on where another ends: "state 7 (idle)" is made from "state {state}" or from
      "state {state} ({meanings})".
    - A message may begin with a value that is the beginning of another: "no file: a.txt, for each
      other" is made from "{names}, for each other" or from "no file: {name}".
    """
    own_beginning, *own_rest = re.split(r"\{\w+\}", entry.message)
    beginning, *rest = re.split(r"\{\w+\}", other.message)
    goes_on = beginning == own_beginning and len(rest) > len(own_rest)
    begins_as_value = own_beginning == ""
    if not beginning or not (goes_on or begins_as_value):
        return False
    return re.fullmatch(".+".join(map(re.escape, [beginning, *rest])), text) is not None


def without_spaces(text: str) -> str:
    """Returns a text without spaces and with English punctuation."""
    for mark, translated_mark in language.SEPARATORS.items():
        text = text.replace(translated_mark, mark)
    return re.sub(r"\s", "", text)


@given(st.sampled_from(TEMPLATES), st.sampled_from(TEMPLATES))
@settings(max_examples=15, deadline=None, derandomize=True)
def test_messages_in_a_list_are_read_one_by_one(first: Entry, second: Entry) -> None:
    """A list with semicolons is what its messages are one by one, or it is English in parts."""
    catalogue = chinese_catalogue()
    texts = [entry.message.format(**values_of(entry.message)) for entry in (first, second)]
    alternatives = [{text, catalogue.translate(text)} for text in texts]
    possible = {without_spaces("; ".join(each)) for each in itertools.product(*alternatives)}
    assert without_spaces(catalogue.translate("; ".join(texts))) in possible, texts


def test_the_time_for_a_long_text_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twelve hosts, each with a sentence of several fields, took 12 s, and each more doubled it."""
    num_readings = 0
    original = language.Catalogue._translate_reading

    def count(*arguments: Any, **options: Any) -> language.Translation:
        nonlocal num_readings
        num_readings += 1
        return original(*arguments, **options)

    monkeypatch.setattr(language.Catalogue, "_translate_reading", count)
    host = "node1: it cannot reach node0 at 10.0.0.1, port 29500 (it does not answer)"
    found = "; ".join([host] * 50)
    assert chinese_catalogue().translate(found).count("它没有响应") == 50
    assert num_readings < 50 * 40
    # Commas may belong to a message, so that such a list is read in many ways; then it is English.
    num_readings = 0
    names = ", ".join(["a with virtual ranks: x"] * 60)
    assert chinese_catalogue().translate(names) == names
    assert num_readings < 2_000


@given(made_of_hostile_values())
@settings(max_examples=80, deadline=None, derandomize=True)
def test_values_keep_their_places(drawn: tuple[Entry, dict[str, str]]) -> None:
    check_that_values_keep_their_places(*drawn)


@pytest.mark.thorough
@given(made_of_hostile_values())
@settings(max_examples=3_000, deadline=None)
def test_many_values_keep_their_places(drawn: tuple[Entry, dict[str, str]]) -> None:
    check_that_values_keep_their_places(*drawn)
