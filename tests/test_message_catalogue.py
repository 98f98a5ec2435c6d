"""The catalogue of messages: complete, and what texts it recognizes."""

from __future__ import annotations

import re
import string
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "tools"))
import message_catalogue as messages

from lockstep import errors, language
from lockstep.columns import pad, width_of, wrap
from lockstep.language import GRAMMATICAL_FIELDS, chinese_catalogue, fields_of, language_of
from lockstep.run.watch.error_record import describe_error
from lockstep.run.watch.failure_report import render_failure
from lockstep.run.watch.first_failure import FirstFailure
from lockstep.run.watch.messages import render
from lockstep.run.watch.verdict import Row, Verdict

pytestmark = pytest.mark.unit

PASSED_ON = {
    "batch.loader:error.do",
    "cli.run_options:error.do",
    "distributed.collectives:do",
    "errors:error.do",
    "run.machines.ssh_connection:advice",
    "run.machines.ssh_errors:cause.advice.format(**values)",
    "run.machines.ssh_errors:do",
    "run.machines.ssh_run:'; '.join(advice)",
    "settings:error.do",
    "strategies.base:error.do",
}
"""Where an error is given the advice of another one, whose texts are found where that is made."""

ENTRIES = messages.read_po(messages.PO_FILE.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def extracted() -> messages.Messages:
    return messages.extract()


@pytest.fixture
def chinese(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(language, "language", lambda: "zh")


def test_every_message_of_the_source_is_in_the_catalogue(extracted: messages.Messages) -> None:
    in_source = set(extracted.places)
    in_catalogue = {entry.message for entry in ENTRIES}
    assert in_source - in_catalogue == set(), "make messages, and translate what is new"
    assert in_catalogue - in_source == set(), "make messages: these are gone"


def test_the_advice_of_every_error_is_found(extracted: messages.Messages) -> None:
    assert set(extracted.advice_not_found) == PASSED_ON


def test_every_message_is_translated() -> None:
    text = messages.PO_FILE.read_text(encoding="utf-8")
    assert [entry.message for entry in ENTRIES if not entry.translation] == []
    assert [entry.message for entry in ENTRIES if "fuzzy" in entry.flags] == []
    assert "\n#~" not in text  # what gettext's own tools make of a message that is gone


def test_both_languages_have_the_same_fields() -> None:
    for entry in ENTRIES:
        fields = set(fields_of(entry.message))
        translated_fields = set(fields_of(entry.translation))
        assert translated_fields <= fields, entry
        assert fields - translated_fields <= set(GRAMMATICAL_FIELDS), entry


def test_the_compiled_catalogue_is_that_of_the_text() -> None:
    assert messages.MO_FILE.read_bytes() == messages.compile_mo(ENTRIES), "make messages"
    translations = {entry.message: entry.translation for entry in ENTRIES}
    assert language.read_mo(messages.MO_FILE.read_bytes()) == translations


def test_entries_of_both_sides_of_a_conflict_are_read() -> None:
    text = (
        'msgid ""\nmsgstr ""\n"Language: zh_CN\\n"\n\n<<<<<<< ours\n#: a\nmsgid "one"\n'
        'msgstr "\u4e00"\n=======\n#, fuzzy\nmsgid ""\n"two "\n"parts"\nmsgstr ""\n'
        '"\u4e8c"\n>>>>>>> theirs\n'
    )
    assert messages.read_po(text) == [
        messages.Entry("one", "\u4e00"),
        messages.Entry("two parts", "\u4e8c", {"fuzzy"}),
    ]


VALUES_OF_FIELDS = {
    **dict.fromkeys(GRAMMATICAL_FIELDS, "word"),
    **dict.fromkeys(("lengths", "number", "rank", "ranges", "steps"), "7"),
    "context": "in backward",
    "element_type": "float",
    "outcomes": "true on rank 7",
    "operation_name": "all_reduce",
    "processes": "rank 7",
    "who": "rank 7",
}
"""What fields may be that may not be any text."""


def values_of(message: str) -> dict[str, str]:
    values = {}
    for name in fields_of(message):
        kind = re.sub(r"_\d+$", "", name)
        values[name] = VALUES_OF_FIELDS.get(kind, f"<{name}>")
    return values


def test_what_was_made_from_a_template_is_recognized() -> None:
    catalogue = chinese_catalogue()
    for entry in ENTRIES:
        values = values_of(entry.message)
        text = entry.message.format(**values)
        translated_values = {name: catalogue.translate(value) for name, value in values.items()}
        expected = entry.translation.format(**translated_values)
        assert catalogue.translate(text).replace(" ", "") == expected.replace(" ", "")


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
        ("all gradients are 1/2 of those of one process", "所有梯度与单进程的梯度相比：1/2"),
        ("but for rounding: fc.weight", "只差舍入误差：fc.weight"),
        (
            "before step 3, in the gradients fc.weight: rank 1 and 2 more",
            "在第 3 步之前，梯度中 fc.weight：rank 1 等，另有 2 个",
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
        "precision='fp8'\n  发现： 可用的精度有 fp32, bf16\n  处理： 选择其中之一\n  位置： "
    )
    assert error.text.startswith(
        "precision='fp8'\n  found: precisions are fp32, bf16\n  do:    choose one of them\n"
    )
    assert error.args == (error.text,)
    assert describe_error(error).message == error.text
    heard: list[str] = []
    errors.on_warning.append(heard.append)
    try:
        with pytest.warns(errors.LockstepWarning, match="处理： 选择其中之一"):
            errors.warn("x", "it is empty", "choose one of them")
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
                "receive first, change the order on one of them, or use `batch_isend_irecv`",),
    )  # fmt: skip
    lines = render(verdict, language.translate).splitlines()
    assert lines[0] == "rank 1 阻塞在集合通信之外，没有在计算；rank 0, 2 已等待 7 s"
    assert lines[1] == "  rank 0（a）：在 barrier 中等待（第 4 步），已 7 s"
    assert lines[2].startswith("  处理：每次发送都要有对应的接收")
    assert lines[3].startswith("    ")
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


def test_lines_are_broken_by_columns() -> None:
    text = "  每个 rank 都必须到达每个集合通信：检查它为什么提前返回（`return`），也可以用 `Join`。"
    lines = wrap(text, 30, subsequent_indent="    ")
    assert all(width_of(line) <= 30 for line in lines)
    assert "".join(line.strip() for line in lines).replace(" ", "") == text.replace(" ", "")
    assert not any(line.strip()[0] in "，。：）" for line in lines)
    assert wrap("one two three", 8) == ["one two", "three"]
    assert pad("发现：", 7) == "发现： "


def test_the_fields_are_those_of_str_format() -> None:
    """A message that `str.format` cannot read would be an error only where it is shown."""
    for entry in ENTRIES:
        for text in (entry.message, entry.translation):
            for _, name, specification, conversion in string.Formatter().parse(text):
                assert name is None or name.isidentifier(), text
                assert not specification, text
                assert conversion is None, text


def test_a_value_that_contains_the_words_around_it_is_recognized() -> None:
    text = "all ranks wait for each other for 33% of the time"
    translated = language.chinese_catalogue().translate(text)
    assert "33%" in translated
    assert not re.search(r"\b(wait|each|other|for)\b", translated)
