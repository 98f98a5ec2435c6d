"""The settings of a run: each is declared once, as a field of `Settings`.

From the declaration follow the argument of `lockstep.init`, the environment variable, the option of
`lockstep run`, how text is read, and whether all ranks must agree; a test holds the table in
docs/reference.md to it.

`lockstep run --strategy ddp` reaches the script as LOCKSTEP_STRATEGY. A setting may come from the
script or from outside; two that contradict each other are an error.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields
from datetime import timedelta
from enum import Enum
from typing import Any, NamedTuple, TypeGuard

from lockstep.errors import LockstepError, SettingError
from lockstep.units import parse_seconds


class Choice(NamedTuple):
    """Something that the run decided or was told, and why."""

    name: str
    value: str
    reason: str


VERIFY_VARIABLE = "LOCKSTEP_VERIFY"
"""The variable in which `lockstep verify` sets what goes before the script's settings, as JSON."""
AUTO = "auto"
"""The value of shares and micro_batch_size that are to be measured."""


def is_whole_number(value: object, least: int = 1) -> TypeGuard[int]:
    """Returns True for a whole number of at least `least`; True and False are not numbers."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def check_whole_number(
    was_set: str, value: object, least: int = 1, kind: type[LockstepError] = SettingError
) -> None:
    """Raises an error of a kind unless the value is a whole number of at least `least`."""
    if not is_whole_number(value, least):
        raise kind(was_set, f"it is not a whole number of at least {least}", "give such a number")


def is_auto(setting: Any) -> bool:
    """Returns True if shares or a size are to be found by measuring."""
    # An array compares item by item, so the type comes first.
    return isinstance(setting, str) and setting == AUTO


class Agreement(Enum):
    """What must be equal on all ranks of a setting."""

    VALUE = "its value"
    PRESENCE = "whether it is set"
    NONE = "nothing"


@dataclass(frozen=True, kw_only=True)
class Declaration:
    """What is known of a setting besides its default."""

    name: str
    """The argument of `init`."""
    reader: Callable[[str], Any] | None
    """Reads the value of the variable; None: the setting cannot be set outside of the script."""
    metavar: str
    """How `lockstep run --help` shows the value."""
    help: str
    """What `lockstep run --help` says; empty: `lockstep run` has no option for it."""
    agreement: Agreement

    @property
    def variable(self) -> str:
        """The environment variable."""
        return f"LOCKSTEP_{self.name.upper()}"

    @property
    def option(self) -> str:
        """The option of `lockstep run`."""
        return f"--{self.name.replace('_', '-')}"


def _setting(
    default: Any,
    *,
    name: str = "",
    reader: Callable[[str], Any] | None = None,
    metavar: str = "",
    help: str = "",
    agreement: Agreement = Agreement.VALUE,
) -> Any:
    """Returns the field of a setting, with what becomes its `Declaration` as metadata.

    Args:
        default: the value if nothing is set.
        name: of the argument of `init`, if it is not the name of the field.
        reader: reads the value of the environment variable; None: there is no variable.
        metavar: how `lockstep run --help` shows the value.
        help: what `lockstep run --help` says; empty: there is no option.
        agreement: what must be equal on all ranks.
    """
    metadata = {
        "name": name,
        "reader": reader,
        "metavar": metavar,
        "help": help,
        "agreement": agreement,
    }
    return field(default=default, metadata=metadata)


def whole_number_from_1(text: str) -> int:
    """Reads a whole number of at least 1."""
    number = int(text)
    if number < 1:
        raise ValueError(text)
    return number


def whole_number_or_auto(text: str) -> int | str:
    """Reads a whole number, or `auto`."""
    return text if text == AUTO else int(text)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the user set. None: nothing was said."""

    strategy: Any = _setting(
        None,
        reader=str,
        metavar="NAME[:OPTION=VALUE,...]",
        help="How the model is distributed, such as ddp or diloco:every=100.",
    )
    """A name, or an options object of `lockstep.strategies`."""
    precision: str = _setting("fp32", reader=str, metavar="NAME", help="fp32, bf16, fp16 or fp64.")
    shares: Any = _setting(
        None,
        reader=str,
        metavar="A:B:...|auto",
        help="How a batch is divided over the ranks.",
    )
    """One whole number for each part of the global batch, `"auto"`, or None for equal parts."""
    num_micro_batches: int | None = _setting(
        None,
        reader=whole_number_from_1,
        metavar="INTEGER",
        help="Micro-batches of a global batch, the same on any number of ranks.",
    )
    """None: as few as `micro_batch_size` needs."""
    micro_batch_size: int | str | None = _setting(
        None,
        reader=whole_number_or_auto,
        metavar="SAMPLES|auto",
        help="Most samples computed at a time; auto: as many as fit.",
    )
    """Samples of one rank, `"auto"`, or None for the whole part."""
    virtual_ranks: int | None = _setting(
        None,
        reader=whole_number_from_1,
        metavar="INTEGER",
        help="Compute as on this number of ranks, with the same bits on any number of processes.",
    )
    """Parts of every global batch that are computed each by itself; None: those of the ranks."""
    check_devices: int | None = _setting(
        None,
        reader=whole_number_from_1,
        metavar="STEPS",
        help="Every so many steps, recompute a part on another process and compare bits.",
    )
    """Global batches between two checks of the devices; None: they are not checked."""
    backend: str | None = _setting(None, reader=str, metavar="NAME", help="nccl, gloo or mpi.")
    device: str | None = _setting(
        None,
        reader=str,
        metavar="NAME",
        help="cpu, cuda or cuda:0.",
        agreement=Agreement.NONE,
    )
    join_timeout_s: float = _setting(
        30.0,
        name="join_timeout",
        reader=float,
        metavar="SECONDS",
        help="How long ranks wait to join.",
        agreement=Agreement.NONE,
    )
    """Seconds that ranks wait for each other in `init`."""
    seed: int = _setting(0, reader=int, metavar="NUMBER", help="Of everything random.")
    ledger: str | None = _setting(
        None,
        reader=str,
        metavar="FOLDER",
        help="Write down which samples each step trains.",
        agreement=Agreement.PRESENCE,
    )
    """Folder where every rank writes down which samples it trains; None: nowhere."""
    report: str | None = _setting(
        None,
        reader=str,
        metavar="FOLDER",
        help="Write down how the run goes; see lockstep report.",
        agreement=Agreement.PRESENCE,
    )
    """Folder where every rank writes down how its steps go; None: nowhere."""
    journal: str | None = _setting(
        None,
        reader=str,
        metavar="FOLDER",
        help="Write down hashes of what each step computes; see lockstep journal.",
        agreement=Agreement.PRESENCE,
    )
    """Folder where every rank writes down hashes of what it computes; None: nowhere."""
    journal_every: int = _setting(
        10,
        reader=whole_number_from_1,
        metavar="STEPS",
        help="Steps from one whose hashes are in the journal to the next.",
    )
    init_method: str | None = _setting(None, reader=str, agreement=Agreement.NONE)
    collective_timeout_s: float | None = _setting(
        None, name="collective_timeout", agreement=Agreement.NONE
    )
    """Seconds that a collective may take; None: torch's default for the backend."""
    sync_batchnorm: bool = _setting(True)
    measure_link: bool = _setting(True)
    """Measure the network between machines when the run begins."""
    min_micro_batches: int = 1
    """Micro-batches of a global batch, at least; `lockstep verify --accumulate` asks for them."""
    uncompressed: bool = False
    """Gradients are sent as they are, whatever was chosen; `lockstep verify` compares so."""
    virtual_ranks_of_verify: int | None = None
    """The value of `virtual_ranks` if `lockstep verify` has set it because nobody else did."""

    @property
    def collective_timeout(self) -> timedelta | None:
        """How long a collective may take, as torch wants it; None: torch's default."""
        if self.collective_timeout_s is None:
            return None
        return timedelta(seconds=self.collective_timeout_s)


def _declaration_of(setting: Field[Any]) -> Declaration:
    """Returns the declaration of a field of `Settings` that `_setting` has made."""
    values = dict(setting.metadata)  # the arguments of `Declaration`
    if not values["name"]:  # the argument of `init` has the name of the field
        values["name"] = setting.name
    return Declaration(**values)


DECLARATIONS: dict[str, Declaration] = {
    setting.name: _declaration_of(setting) for setting in fields(Settings) if setting.metadata
}
"""By the name of the field: all settings that a user can set."""


def settings_of_ranks(settings: Settings) -> dict[str, object]:
    """Returns what must be equal on all ranks, by the names of the settings.

    For most settings that is the value. For a folder, which may differ between machines, it is only
    whether there is one; and some settings may differ altogether.
    """
    compared: dict[str, object] = {}
    for field_name, declaration in DECLARATIONS.items():
        value = getattr(settings, field_name)
        if declaration.agreement is Agreement.VALUE:
            # A strategy may be an object, which is compared by its name.
            compared[declaration.name] = getattr(value, "name", value)
        elif declaration.agreement is Agreement.PRESENCE:
            compared[declaration.name] = value is not None
    return compared


def resolve_settings(environ: Mapping[str, str], **given: Any) -> Settings:
    """Merges the arguments of `init` with the LOCKSTEP_* variables.

    What `lockstep verify` sets replaces both.

    Args:
        environ: the environment variables.
        **given: the arguments of `init`; None for one that was left out.

    Raises:
        SettingError: a value that is invalid, or an argument and a variable that contradict.
    """
    # By the name of the argument: what the script has set, then what was set outside of it.
    values = {name: value for name, value in given.items() if value is not None}
    for declaration in DECLARATIONS.values():
        name = declaration.name
        outside = _read_variable(declaration, environ)
        if outside is None:  # there is no variable, or it is not set
            continue
        if name not in values:
            values[name] = outside
        elif not _mean_the_same(values[name], outside):
            raise SettingError(
                f"{name}={values[name]!r} in the script and {declaration.variable}={outside} "
                "outside it",
                "they contradict each other",
                "set it in one place",
            )
    if environ.get(VERIFY_VARIABLE):
        values.update(json.loads(environ[VERIFY_VARIABLE]))
        # It compares runs by their micro-batches, of which a check adds some.
        values.pop("check_devices", None)
        # To compare bits, `verify` needs virtual ranks; those that the user has set come first.
        if values.get("virtual_ranks") is None:
            values["virtual_ranks"] = values.get("virtual_ranks_of_verify")
        else:
            values["virtual_ranks_of_verify"] = None
    # The fields of these two say their unit, which the arguments do not.
    for name in ("join_timeout", "collective_timeout"):
        if name in values:
            values[f"{name}_s"] = parse_seconds(name, values.pop(name))
    check_seed(values.get("seed", 0))
    check_micro_batches(values.get("num_micro_batches"), values.get("micro_batch_size"))
    check_virtual_ranks(values)
    if "journal_every" in values:
        every = values["journal_every"]
        check_whole_number(f"journal_every={every!r}", every)
    check_device_checks(values)
    return Settings(**values)


def check_seed(seed: Any) -> None:
    """Raises SettingError unless torch takes the seed."""
    if not is_whole_number(seed, least=0) or seed >= 2**64:
        raise SettingError(
            f"seed={seed!r}",
            "a seed is a whole number from 0 to 2**64 - 1",
            "pass a whole number from 0 to 2**64 - 1",
        )


def _read_variable(declaration: Declaration, environ: Mapping[str, str]) -> Any:
    """Returns the value of a setting's variable, or None if it is not set.

    Raises:
        SettingError: the variable does not have such a value.
    """
    text = environ.get(declaration.variable)
    if not text or declaration.reader is None:  # not set, or it can only be set in the script
        return None
    try:
        return declaration.reader(text)
    except ValueError:
        # The reader is named after what it reads: "whole number or auto".
        kind = declaration.reader.__name__.replace("_", " ")
        raise SettingError(
            f"{declaration.variable}={text}", f"it is not a valid {kind}", "correct or unset it"
        ) from None


def check_micro_batches(number: Any, size: Any) -> None:
    """Raises SettingError if a number of micro-batches is invalid, or their size is set too.

    Args:
        number: the setting `num_micro_batches`; None: not set.
        size: the setting `micro_batch_size`; None: not set.
    """
    if number is None:
        return
    check_whole_number(f"num_micro_batches={number!r}", number)
    if size is not None:
        raise SettingError(
            f"num_micro_batches={number} and micro_batch_size={size!r}",
            "either says how a global batch is cut",
            "set num_micro_batches, which gives the same micro-batches on any number of ranks, or "
            "micro_batch_size, which bounds what one rank computes at a time",
        )


def check_virtual_ranks(values: Mapping[str, Any]) -> None:
    """Raises SettingError if `virtual_ranks` is invalid, or does not go with another setting.

    Args:
        values: what was set, by the names of the arguments.
    """
    number = values.get("virtual_ranks")
    if number is None:
        return
    check_whole_number(f"virtual_ranks={number!r}", number)
    for name in ("shares", "micro_batch_size"):
        if is_auto(values.get(name)):
            raise SettingError(
                f"virtual_ranks={number} with {name}='auto'",
                "what is measured differs from run to run, and with it the bits",
                f"give {name} as a number, or leave it out",
            )


def check_device_checks(values: Mapping[str, Any]) -> None:
    """Raises SettingError if `check_devices` is invalid, or there are no virtual ranks.

    Args:
        values: what was set, by the names of the arguments.
    """
    number = values.get("check_devices")
    if number is None:
        return
    check_whole_number(f"check_devices={number!r}", number)
    if values.get("virtual_ranks") is None:
        raise SettingError(
            f"check_devices={number} without virtual_ranks",
            "bits are compared, and only virtual ranks have the same bits on every process",
            "set virtual_ranks too, for example to the number of processes, or leave check_devices "
            "out",
        )


def _mean_the_same(in_script: Any, outside: Any) -> bool:
    """Returns True if an argument and the value of a variable say the same.

    They may be of different types: `shares=(1, 2)` is `1:2` outside, a strategy may be an object or
    a name. So both are compared as they are written on the command line.
    """
    return _as_comparable_text(in_script) == _as_comparable_text(outside)


def _as_comparable_text(value: Any) -> str:
    """Returns a text that is equal for values that mean the same.

    It is how the value is written on the command line, with whole numbers as floats.
    """
    if isinstance(value, list | tuple):
        return ":".join(str(part) for part in value)
    if isinstance(value, timedelta):
        return str(value.total_seconds())
    if isinstance(value, int):  # 30 and 30.0 are the same
        return str(float(value))
    return str(getattr(value, "name", value))  # of a strategy its name
