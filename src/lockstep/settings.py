"""The settings of a run: each is declared once, as a field of `Settings`.

The declaration determines the argument of `lockstep.init`, the environment variable, the option of
`lockstep run`, how its text is parsed, and whether all ranks must agree. A test keeps the table in
docs/reference.md consistent with it.

`lockstep run --strategy ddp` reaches the script as LOCKSTEP_STRATEGY. A setting may come from the
script or from outside; it is an error if both set it to different values.
"""

from __future__ import annotations

import difflib
import json
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from datetime import timedelta
from enum import Enum
from functools import partial
from typing import Any, NamedTuple, TypeGuard

from lockstep.errors import LockstepError, SettingError, check_language
from lockstep.file_paths import check_path_of_this_system
from lockstep.units import parse_seconds
from lockstep.wording import count_noun, did_you_mean


class Choice(NamedTuple):
    """A decision of the run, or a setting that it was given, with the reason."""

    name: str
    value: str
    reason: str


VARIABLE_PREFIX = "LOCKSTEP_"
VERIFY_VARIABLE = "LOCKSTEP_VERIFY"
"""The variable in which `lockstep verify` sets what goes before the script's settings, as JSON."""
QUIET_VARIABLE = "LOCKSTEP_QUIET"
"""Variable of the ranks: 1 if only the script's own output and failures are printed."""
FROM_FILE_VARIABLE = "LOCKSTEP_FROM_FILE"
"""Variable of the ranks: which options come from a launch file, "lockstep.toml: nproc, seed"."""
AUTO = "auto"
"""The value of shares and micro_batch_size that are to be measured."""
PRECISIONS = ("fp32", "bf16", "fp16", "fp64")
PRECISION_OF_PART = {
    "bf": "bf16",
    "64": "fp64",
    "double": "fp64",
    "16": "fp16",
    "half": "fp16",
    "32": "fp32",
}
"""Parts of the names that other tools have for a precision, such as "16-mixed". The first part that
a name has decides which precision is suggested."""
BACKENDS = ("nccl", "gloo", "mpi")
CUDA_BACKENDS = "cpu:gloo,cuda:nccl"
"""Both backends of a run on GPUs, in torch's notation."""
SUPPORTED_DEVICES = "Lockstep computes on CPUs and on CUDA devices, which those of ROCm are too"
DEVICE_PATTERN = re.compile(r"(cpu|cuda)(:\d+)?")
MAX_SHARES_IN_EXAMPLE = 8
SIMILAR_VARIABLE = 0.8
"""A variable with a name this similar to that of a setting is a setting that was misspelt."""


def is_whole_number(value: object, least: int = 1) -> TypeGuard[int]:
    """Returns True for a whole number of at least `least`; True and False are not numbers."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def check_whole_number(
    was_set: str, value: object, least: int = 1, kind: type[LockstepError] = SettingError
) -> None:
    """Raises an error of the given class unless the value is a whole number of at least `least`."""
    if not is_whole_number(value, least):
        raise kind(was_set, f"it is not a whole number of at least {least}", "give such a number")


def is_auto(setting: Any) -> bool:
    """Returns True if the value of a setting is `"auto"`: it will be measured."""
    # Check the type first, because an array would be compared item by item.
    return isinstance(setting, str) and setting == AUTO


def is_quiet(environ: Mapping[str, str]) -> bool:
    """Returns True if only the script's own output and failures are printed (--quiet)."""
    return environ.get(QUIET_VARIABLE, "") not in ("", "0")


class Agreement(Enum):
    """Which property of a setting must be equal on all ranks."""

    VALUE = "its value"
    PRESENCE = "whether it is set"
    NONE = "nothing"


@dataclass(frozen=True, kw_only=True)
class Declaration:
    """The properties of a setting, except for its default value."""

    name: str
    """The argument of `init`."""
    reader: Callable[[str], Any] | None
    """Parses the text of the variable; None if the setting cannot be set outside of the script."""
    metavar: str
    """How `lockstep run --help` shows the value."""
    help: str
    """The text in `lockstep run --help`; empty if `lockstep run` has no option for the setting."""
    check: Callable[[Any], object] | None
    """Raises SettingError for a value that is invalid on any machine and with any model."""
    convert: Callable[[Any], Any] | None
    """Returns the value that the field has; raises SettingError for an invalid one."""
    agreement: Agreement

    @property
    def variable(self) -> str:
        """The environment variable."""
        return f"{VARIABLE_PREFIX}{self.name.upper()}"

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
    check: Callable[[Any], object] | None = None,
    convert: Callable[[Any], Any] | None = None,
    agreement: Agreement = Agreement.VALUE,
) -> Any:
    """Returns the dataclass field of a setting, whose metadata become its `Declaration`.

    Args:
        default: value of the setting if nobody sets it.
        name: name of the argument of `init`, if it differs from that of the field.
        reader: function that parses the text of the environment variable; None if there is none.
        metavar: how `lockstep run --help` shows the value.
        help: text in `lockstep run --help`; empty if there is no option.
        check: function that raises SettingError for an invalid value.
        convert: like `check`, but it returns the value of the field: what the user has given, in
            another form.
        agreement: what must be equal on all ranks.
    """
    metadata = {
        "name": name,
        "reader": reader,
        "metavar": metavar,
        "help": help,
        "check": check,
        "convert": convert,
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


def check_seed(seed: Any) -> None:
    """Raises SettingError unless torch accepts the seed."""
    if not is_whole_number(seed, least=0) or seed >= 2**64:
        raise SettingError(
            f"seed={seed!r}",
            "a seed is a whole number from 0 to 2**64 - 1",
            "pass a whole number from 0 to 2**64 - 1",
        )


def check_number(name: str, value: Any) -> None:
    """Raises SettingError unless the value of a setting is a whole number of at least 1.

    Args:
        name: the name of the setting.
        value: its value.
    """
    check_whole_number(f"{name}={value!r}", value)


def folder_as_text(name: str, folder: Any) -> str:
    """Returns the path of a folder as a text.

    Args:
        name: the name of the setting.
        folder: its value.

    Raises:
        SettingError: it is a folder of Windows on another system.
    """
    text = str(folder)
    check_path_of_this_system(f"{name}={text!r}", text)
    return text


def check_precision(precision: Any) -> None:
    """Raises SettingError for an unknown precision, and suggests the one that was meant."""
    if precision in PRECISIONS:
        return

    # "bfloat16" contains the part "bf", for example, so "bf16" was probably meant.
    advice = "choose one of them"
    for part, suggested in PRECISION_OF_PART.items():
        if part in str(precision):
            advice = f"did you mean {suggested!r}?"
            break

    raise SettingError(
        f"precision={precision!r}", "precisions are " + ", ".join(PRECISIONS), advice
    )


def check_backend(backend: Any) -> None:
    """Raises SettingError for an unknown backend, and suggests the one that was meant."""
    if backend in (*BACKENDS, CUDA_BACKENDS):
        return
    advice = did_you_mean(str(backend).lower(), BACKENDS, "leave it out to have one chosen")
    raise SettingError(f"backend={backend!r}", f"the backends are {', '.join(BACKENDS)}", advice)


def check_device(device: Any) -> None:
    """Raises SettingError for a type of device that Lockstep does not support."""
    if not DEVICE_PATTERN.fullmatch(str(device)):
        raise SettingError(f"device={device!r}", SUPPORTED_DEVICES, "use cpu, cuda or cuda:0")


def check_shares(shares: Any) -> None:
    """Raises SettingError unless shares are `"auto"`, or whole numbers of which one is above 0."""
    if is_auto(shares):
        return

    numbers = _whole_numbers(shares)
    advice = _advice_on_shares(num_parts=None, part="rank")
    if numbers is None:
        raise SettingError(f"shares={shares!r}", "these are not whole numbers", advice)
    if not numbers or min(numbers) < 0 or max(numbers) == 0:
        found = "shares are at least 0, and one is above 0"
        raise SettingError(f"shares={shares!r}", found, advice)


def parse_shares(
    shares: str | Sequence[int] | None, size: int, *, of: str = "rank"
) -> tuple[int, ...]:
    """Parses shares and divides them by their common divisor: `"2:4"` and `(2, 4)` give `(1, 2)`.

    Args:
        shares: one non-negative whole number for each rank or device; None for equal shares.
        size: number of ranks or devices.
        of: whether the shares are those of ranks or devices: "rank" or "device".

    Raises:
        SettingError: the wrong number of shares, none above zero, or not whole numbers.
    """
    if shares is None:
        return (1,) * size

    numbers = _whole_numbers(shares)
    advice = _advice_on_shares(size, of)
    if numbers is None:
        raise SettingError(f"shares={shares!r}", "these are not whole numbers", advice)

    if len(numbers) != size:
        if of == "rank":
            found = f"{count_noun(len(numbers), 'share')} for a world size of {size}"
        else:
            found = f"{count_noun(len(numbers), 'share')} for {count_noun(size, of)}"
        raise SettingError(f"shares={shares!r}", found, advice)

    # Raises if a number is below 0, or all are 0. The error shows the shares as they were given.
    check_shares(shares)
    divisor = math.gcd(*numbers)
    return tuple(number // divisor for number in numbers)


def _advice_on_shares(num_parts: int | None, part: str) -> str:
    """Returns the advice in errors about shares, if possible with an example of the right length.

    Args:
        num_parts: number of ranks or devices; None if it is not known.
        part: what has a share each, as a word of the advice: "rank" or "device".
    """
    if num_parts == 1:
        return f"leave shares out: there is one {part}, which gets the whole batch"
    if num_parts is None:
        return f"give one whole number for each {part}; 1:2 gives the second of two twice as much"
    if num_parts > MAX_SHARES_IN_EXAMPLE:
        return f"give {num_parts} whole numbers, one for each {part}"

    example = ":".join(["1"] * (num_parts - 1) + ["2"])
    return f"give {num_parts} whole numbers, one for each {part}, for example {example}"


def _whole_numbers(shares: str | Sequence[int]) -> tuple[int, ...] | None:
    """Parses `"1:2"` or `(1, 2)` to `(1, 2)`; returns None if these are not whole numbers."""
    numbers = []
    try:
        parts = shares.split(":") if isinstance(shares, str) else shares
        for part in parts:
            number = int(part)
            is_fraction = not isinstance(part, str) and number != part  # 1.5, which `int` cuts to 1
            if is_fraction:
                return None

            numbers.append(number)
    except (TypeError, ValueError):
        return None

    return tuple(numbers)


def check_micro_batch_size(size: Any) -> None:
    """Raises SettingError unless the size is `"auto"`, or a whole number of at least 1."""
    if is_auto(size):
        return
    if isinstance(size, bool) or not isinstance(size, int):
        raise SettingError(
            f"micro_batch_size={size!r}",
            "a micro-batch holds a whole number of samples on each rank",
            "give the number of samples one device computes at a time, or 'auto', or leave it out",
        )
    if size < 1:
        raise SettingError(
            f"micro_batch_size={size}",
            "a micro-batch holds at least one sample on each rank",
            "give the number of samples one device computes at a time, or leave it out",
        )


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of a run. A value of None means that the user has not set it."""

    strategy: Any = _setting(
        None,
        reader=str,
        metavar="NAME[:OPTION=VALUE,...]",
        help="How the model is distributed: ddp, fsdp, diloco:every=100, ...",
    )
    """A name, or an options object of `lockstep.strategies`."""
    precision: str = _setting(
        "fp32",
        check=check_precision,
        reader=str,
        metavar="NAME",
        help="fp32, bf16 or fp16 (mixed precision), or fp64.",
    )
    shares: Any = _setting(
        None,
        check=check_shares,
        reader=str,
        metavar="A:B:...|auto",
        help="Split each batch over the ranks in this ratio; auto: by measured speed.",
    )
    """One whole number for each part of the global batch, `"auto"`, or None for equal parts."""
    num_micro_batches: int | None = _setting(
        None,
        check=partial(check_number, "num_micro_batches"),
        reader=whole_number_from_1,
        metavar="N",
        help="Cut each global batch into N micro-batches, on any number of ranks.",
    )
    """None: as few as `micro_batch_size` needs."""
    micro_batch_size: int | str | None = _setting(
        None,
        check=check_micro_batch_size,
        reader=whole_number_or_auto,
        metavar="SAMPLES|auto",
        help="Compute at most this many samples at a time on a rank; auto: as many as fit.",
    )
    """Samples of one rank, `"auto"`, or None for the whole part."""
    virtual_ranks: int | None = _setting(
        None,
        check=partial(check_number, "virtual_ranks"),
        reader=whole_number_from_1,
        metavar="N",
        help="Get bit-identical results on any number of processes up to N.",
    )
    """Parts of every global batch that are computed each by itself; None: those of the ranks."""
    check_devices: int | None = _setting(
        None,
        check=partial(check_number, "check_devices"),
        reader=whole_number_from_1,
        metavar="STEPS",
        help="Check the devices: every STEPS steps, recompute a part on another one and compare.",
    )
    """Global batches between two checks of the devices; None: they are not checked."""
    backend: str | None = _setting(
        None,
        check=check_backend,
        reader=str,
        metavar="NAME",
        help="Communicate through nccl, gloo or mpi.",
    )
    device: str | None = _setting(
        None,
        check=check_device,
        reader=str,
        metavar="NAME",
        help="Compute on cpu, cuda or cuda:0.",
        agreement=Agreement.NONE,
    )
    join_timeout_s: float = _setting(
        30.0,
        name="join_timeout",
        convert=partial(parse_seconds, "join_timeout"),
        reader=float,
        metavar="SECONDS",
        help="How long ranks wait for each other in lockstep.init.",
        agreement=Agreement.NONE,
    )
    """Seconds that ranks wait for each other in `init`."""
    seed: int = _setting(
        0, check=check_seed, reader=int, metavar="NUMBER", help="Seed of all random numbers."
    )
    ledger: str | None = _setting(
        None,
        convert=partial(folder_as_text, "ledger"),
        reader=str,
        metavar="FOLDER",
        help="Record which samples each step trains on; see lockstep ledger.",
        agreement=Agreement.PRESENCE,
    )
    """Folder where every rank writes down which samples it trains; None: nowhere."""
    report: str | None = _setting(
        None,
        convert=partial(folder_as_text, "report"),
        reader=str,
        metavar="FOLDER",
        help="Record loss, speed and waiting times; see lockstep report.",
        agreement=Agreement.PRESENCE,
    )
    """Folder where every rank writes down how its steps go; None: nowhere."""
    trace_step: int | None = _setting(
        None,
        check=partial(check_number, "trace_step"),
        reader=whole_number_from_1,
        metavar="STEP",
        help="With --report: trace this step with torch.profiler, for ui.perfetto.dev.",
    )
    """The step that every rank traces, counted from 1; None: none."""
    journal: str | None = _setting(
        None,
        convert=partial(folder_as_text, "journal"),
        reader=str,
        metavar="FOLDER",
        help="Record hashes of what each step computes; see lockstep journal.",
        agreement=Agreement.PRESENCE,
    )
    """Folder where every rank writes down hashes of what it computes; None: nowhere."""
    journal_every: int = _setting(
        10,
        check=partial(check_number, "journal_every"),
        reader=whole_number_from_1,
        metavar="STEPS",
        help="With --journal: how many steps there are between two that are hashed.",
    )
    init_method: str | None = _setting(None, reader=str, agreement=Agreement.NONE)
    collective_timeout_s: float | None = _setting(
        None,
        name="collective_timeout",
        convert=partial(parse_seconds, "collective_timeout"),
        agreement=Agreement.NONE,
    )
    """Seconds that a collective may take; None: torch's default for the backend."""
    sync_batchnorm: bool | None = _setting(None)
    """None: see `synchronises_batchnorm`."""
    measure_link: bool = _setting(True)
    """Measure the network between machines when the run begins."""
    min_micro_batches: int = 1
    """Micro-batches of a global batch, at least; `lockstep verify --accumulate` asks for them."""
    uncompressed: bool = False
    """Gradients are sent as they are, whatever was chosen; `lockstep verify` compares so."""
    reference_of_verify: bool = False
    """This is the run on one process with which `lockstep verify` compares within a tolerance."""
    virtual_ranks_of_verify: int | None = None
    """The value of `virtual_ranks` if `lockstep verify` has set it because nobody else did."""

    @property
    def synchronises_batchnorm(self) -> bool:
        """True if BatchNorm computes its statistics over the samples of all ranks.

        With virtual ranks this has to be set, because it needs a process for each virtual rank.
        """
        if self.sync_batchnorm is None:
            return self.virtual_ranks is None
        return self.sync_batchnorm

    @property
    def collective_timeout(self) -> timedelta | None:
        """How long a collective may take; None for torch's default."""
        if self.collective_timeout_s is None:
            return None
        return timedelta(seconds=self.collective_timeout_s)


def _declaration_of(setting: Field[Any]) -> Declaration:
    """Returns the declaration of a field of `Settings` that was defined with `_setting`."""
    values = dict(setting.metadata)  # the arguments of `Declaration`
    if not values["name"]:  # the argument of `init` has the name of the field
        values["name"] = setting.name
    return Declaration(**values)


DECLARATIONS: dict[str, Declaration] = {
    setting.name: _declaration_of(setting) for setting in fields(Settings) if setting.metadata
}
"""All settings that a user can set, by the names of their fields."""

OPTION_OF_LAUNCHER_VARIABLE = {
    "NPROC": "--nproc",
    "NPROCS": "--nproc",
    "NPROC_PER_NODE": "--nproc",
    "NUM_PROCESSES": "--nproc",
    "WORLD_SIZE": "--nproc",
    "HOSTS": "--hosts",
    "COPY": "--copy",
    "ON_LOST": "--on-lost",
    "FORWARD_ENV": "--forward-env",
    "SSH": "--ssh",
    "RAY": "--ray",
    "SLURM": "--slurm",
    "NODES": "--nodes",
    "NNODES": "--nnodes",
    "NODE_RANK": "--node-rank",
    "MASTER_ADDR": "--master-addr",
    "MASTER_PORT": "--master-port",
    "GPUS_PER_NODE": "--gpus-per-node",
    "TIME": "--time",
    "SBATCH": "--sbatch",
    "LAUNCH_FILE": "--launch-file",
    "DRY_RUN": "--dry-run",
    "WARM": "--no-warm",
    "KEEP_IN_MEMORY": "--keep-in-memory",
    "ON_HANG": "--on-hang",
    "HANG_AFTER": "--hang-after",
    "MAX_RESTARTS": "--max-restarts",
    "LOG_DIR": "--log-dir",
    "LOCAL_RANK_ARGUMENT": "--local-rank-argument",
}
"""Options of `lockstep run` that cannot be set by a variable, by what would be its name without
the prefix."""


def settings_of_ranks(settings: Settings) -> dict[str, object]:
    """Returns the values that must be equal on all ranks, by the names of the settings.

    Most settings must have the same value. A folder may differ between machines, so only whether it
    is set must be equal. Some settings may differ, and are left out.
    """
    compared: dict[str, object] = {}
    for field_name, declaration in DECLARATIONS.items():
        value = getattr(settings, field_name)
        if declaration.agreement is Agreement.VALUE:
            # Only a strategy may be an object with a name, by which it is compared.
            compared[declaration.name] = getattr(value, "name", value)
        elif declaration.agreement is Agreement.PRESENCE:
            compared[declaration.name] = value is not None

    return compared


def resolve_settings(environ: Mapping[str, str], **given: Any) -> Settings:
    """Merges the arguments of `init` with the LOCKSTEP_* variables.

    The settings that `lockstep verify` makes override both.

    Args:
        environ: the environment variables.
        **given: the arguments of `init`; None for one that was left out.

    Raises:
        SettingError: a value is invalid, an argument and a variable contradict each other, or
            LOCKSTEP_LANG names an unknown language.
    """
    check_language(environ)

    # Start with the settings of the script, then add those from outside. Keys are argument names.
    values: dict[str, Any] = {}
    for name, value in given.items():
        if value is not None:
            values[name] = os.fspath(value) if isinstance(value, os.PathLike) else value

    outside = read_variables(environ)
    for declaration in DECLARATIONS.values():
        name = declaration.name
        if name in values:
            check_value(declaration, values[name])
        if name not in outside:
            continue

        if name not in values:
            values[name] = outside[name]
        elif not _mean_the_same(values[name], outside[name]):
            set_outside = f"{declaration.variable}={outside[name]} outside it"
            file, names = _options_from_file(environ)
            if declaration.option.removeprefix("--") in names:
                set_outside = f"{outside[name]} in {file}"
            raise SettingError(
                f"{name}={values[name]!r} in the script and {set_outside}",
                "they contradict each other",
                "set it in one place",
            )

    if environ.get(VERIFY_VARIABLE):
        _override_by_verify(values, json.loads(environ[VERIFY_VARIABLE]))

    check_outside(values)
    check_device_checks(values)
    check_trace_step(values)

    # The names of some fields have a unit, those of the arguments have none: join_timeout_s.
    for field_name, declaration in DECLARATIONS.items():
        if declaration.convert is not None and declaration.name in values:
            values[field_name] = declaration.convert(values.pop(declaration.name))

    return Settings(**values)


def _override_by_verify(values: dict[str, Any], settings_of_verify: Mapping[str, Any]) -> None:
    """Writes the settings of `lockstep verify` into those of the run.

    `verify` runs the script on several processes and on one, the *reference*. It compares their
    results bit by bit or within a tolerance.

    Args:
        values: the settings of the run, by the names of the arguments; they are changed.
        settings_of_verify: the settings that `lockstep verify` makes. If results are compared bit
            by bit, it has `virtual_ranks_of_verify`, e.g. 4. In a reference that is compared within
            a tolerance, `reference_of_verify` is True.
    """
    values.update(settings_of_verify)

    # `verify` compares runs micro-batch by micro-batch, and a check of devices would add
    # micro-batches. It keeps no report, so there is no folder for a trace.
    values.pop("check_devices", None)
    values.pop("trace_step", None)

    compares_bits = values.get("virtual_ranks_of_verify") is not None
    if compares_bits:
        _use_virtual_ranks_of_verify(values)
    elif values.get("reference_of_verify") and values.get("sync_batchnorm"):
        # Synchronised BatchNorm must get the whole batch at once, even if the script sets a number
        # of virtual ranks.
        values["virtual_ranks"] = None


def _use_virtual_ranks_of_verify(values: dict[str, Any]) -> None:
    """Sets the number of virtual ranks that `lockstep verify` has chosen to compare bits.

    Only with virtual ranks do runs have equal bits. A number that the user has set is kept.
    """
    user_has_set_number = values.get("virtual_ranks") is not None
    if user_has_set_number:
        values["virtual_ranks_of_verify"] = None  # it is not in use
        return

    values["virtual_ranks"] = values["virtual_ranks_of_verify"]
    # One process that computes several virtual ranks cannot synchronise their BatchNorm.
    values["sync_batchnorm"] = False


def _read_variable(declaration: Declaration, environ: Mapping[str, str]) -> Any:
    """Returns the value of a setting's variable, or None if it is not set.

    Raises:
        SettingError: the value is invalid.
    """
    if declaration.reader is None:  # this setting can only be set in the script
        return None

    text = environ.get(declaration.variable)
    if not text:
        return None

    was_set = f"{declaration.variable}={text}"
    try:
        value = declaration.reader(text)
    except ValueError:
        # The reader is named after the values that it accepts: "whole number or auto".
        kind = declaration.reader.__name__.replace("_", " ")
        raise SettingError(was_set, f"it is not a valid {kind}", "correct or unset it") from None

    check_value(declaration, value, was_set)
    return value


def check_value(declaration: Declaration, value: Any, was_set: str | None = None) -> None:
    """Checks the value of a setting, as far as possible without knowing the machine and the model.

    Args:
        declaration: declaration of the setting.
        value: the value, which is not None.
        was_set: how the user has set it, for the error message; None for an argument of `init`.

    Raises:
        SettingError: the value is invalid.
    """
    check = declaration.check or declaration.convert  # both raise SettingError
    if check is None:
        return

    try:
        check(value)
    except SettingError as error:
        if was_set is None:
            raise
        raise SettingError(was_set, error.found, error.do) from None


def read_variables(environ: Mapping[str, str]) -> dict[str, Any]:
    """Returns the settings that are set by environment variables, by the names of the arguments.

    Raises:
        SettingError: the value of a variable is invalid, or its name looks like a misspelt setting.
    """
    check_names_of_variables(environ)
    values = {}
    for declaration in DECLARATIONS.values():
        value = _read_variable(declaration, environ)
        if value is not None:
            values[declaration.name] = value
    return values


def _options_from_file(environ: Mapping[str, str]) -> tuple[str, list[str]]:
    """Returns the name of the launch file, and the options of `lockstep run` that it sets.

    For example, "lockstep.toml: nproc, seed" gives `("lockstep.toml", ["nproc", "seed"])`.

    Args:
        environ: the environment variables of a rank.
    """
    file, _, names = environ.get(FROM_FILE_VARIABLE, "").rpartition(": ")
    return file, names.split(", ")


def choices_from_file(environ: Mapping[str, str]) -> list[Choice]:
    """Returns the line of the startup summary about settings from a launch file, if there are any.

    Args:
        environ: the environment variables of a rank.
    """
    file, names = _options_from_file(environ)  # names of options without dashes: ["nproc", "seed"]
    texts = []
    for declaration in DECLARATIONS.values():
        if declaration.option.removeprefix("--") in names:
            texts.append(f"{declaration.name}={environ.get(declaration.variable)}")

    if not texts:
        return []

    return [Choice("settings", ", ".join(texts), f"from {file}")]


def check_names_of_variables(environ: Mapping[str, str]) -> None:
    """Raises SettingError for a variable that would have no effect, such as LOCKSTEP_PRECISON."""
    # A setting with a reader can be set by a variable: the reader turns its text into a value.
    known_names = []
    name_in_script = {}
    for declaration in DECLARATIONS.values():
        if declaration.reader is not None:
            known_names.append(declaration.name.upper())
        else:
            name_in_script[declaration.name.upper()] = declaration.name

    for variable, value in environ.items():
        if not variable.startswith(VARIABLE_PREFIX):
            continue
        name = variable.removeprefix(VARIABLE_PREFIX)
        if name in known_names:
            continue

        # LOCKSTEP_NPROC: an option of `lockstep run` that is no setting.
        option = OPTION_OF_LAUNCHER_VARIABLE.get(name)
        if option is not None and value:
            raise SettingError(
                f"{variable}={value}",
                f"no variable stands for {option}, so this one would have no effect",
                f"unset it, and write the option: lockstep run {option} ... SCRIPT",
            )

        # A setting that can only be set in the script.
        setting = name_in_script.get(name)
        if setting is not None and value:
            raise SettingError(
                f"{variable}={value}",
                f"no variable stands for {setting}, so this one would have no effect",
                f"unset it, and pass {setting} to lockstep.init in the script",
            )

        # A misspelt setting.
        similar = difflib.get_close_matches(name, known_names, n=1, cutoff=SIMILAR_VARIABLE)
        if similar:
            raise SettingError(
                f"{variable}={value}",
                "there is no such setting",
                f"did you mean {VARIABLE_PREFIX}{similar[0]}?",
            )


def check_outside(values: Mapping[str, Any]) -> None:
    """Checks that settings made outside of the script do not contradict each other.

    It is not an error if a setting is missing, because the script may still set it.

    Args:
        values: the settings, by the names of the arguments.

    Raises:
        SettingError: two settings contradict each other.
    """
    check_micro_batches(values.get("num_micro_batches"), values.get("micro_batch_size"))
    check_virtual_ranks(values)


def check_micro_batches(number: Any, size: Any) -> None:
    """Raises SettingError if a number of micro-batches is invalid, or their size is set too.

    Args:
        number: the setting `num_micro_batches`; None if it is not set.
        size: the setting `micro_batch_size`; None if it is not set.
    """
    if number is None:
        return

    check_whole_number(f"num_micro_batches={number!r}", number)

    # Each of the two settings determines how a global batch is cut, so only one may be set.
    if size is not None:
        raise SettingError(
            f"num_micro_batches={number} and micro_batch_size={size!r}",
            "either says how a global batch is cut",
            "set num_micro_batches, which gives the same micro-batches on any number of ranks, or "
            "micro_batch_size, which bounds what one rank computes at a time",
        )


def check_virtual_ranks(values: Mapping[str, Any]) -> None:
    """Raises SettingError if `virtual_ranks` contradicts another setting.

    Args:
        values: the settings, by the names of the arguments.
    """
    number = values.get("virtual_ranks")
    if number is None:
        return

    for name in ("shares", "micro_batch_size"):
        if is_auto(values.get(name)):
            raise SettingError(
                f"virtual_ranks={number} with {name}='auto'",
                "what is measured differs from run to run, and with it the bits",
                f"give {name} as a number, or leave it out",
            )


def too_few_virtual_ranks_error(
    number: int, num_processes: int, found: str | None = None
) -> SettingError:
    """Returns the error for a process without a virtual rank.

    Args:
        number: number of virtual ranks.
        num_processes: number of processes.
        found: what was found, if it is more than their number.
    """
    if found is None:
        found = f"{num_processes} processes, each of which computes at least one of them"
    return SettingError(
        f"virtual_ranks={number}",
        found,
        "start fewer processes, or set a larger number from the beginning of the training",
    )


def check_device_checks(values: Mapping[str, Any]) -> None:
    """Raises SettingError if `check_devices` is set, and there are no virtual ranks.

    A check computes a part of a global batch again on another device, and compares the bits.

    Args:
        values: the settings, by the names of the arguments.
    """
    number = values.get("check_devices")
    if number is None:
        return

    if values.get("virtual_ranks") is None:
        raise SettingError(
            f"check_devices={number} without virtual_ranks",
            "bits are compared, and only virtual ranks have the same bits on every process",
            "set virtual_ranks too, for example to the number of processes, or leave check_devices "
            "out",
        )


def check_trace_step(values: Mapping[str, Any]) -> None:
    """Raises SettingError if `trace_step` is set, and there is no folder for the trace.

    Args:
        values: the settings, by the names of the arguments.
    """
    step = values.get("trace_step")
    if step is None:
        return

    if values.get("report") is None:
        raise SettingError(
            f"trace_step={step} without report",
            "the trace is written into the folder of the report",
            "set report too, or leave trace_step out",
        )


def _mean_the_same(in_script: Any, outside: Any) -> bool:
    """Returns True if an argument of `init` and the value of a variable mean the same.

    They may have different types: `shares=(1, 2)` is `1:2` in a variable, and a strategy may be an
    object or a name. So both are compared in the form of the command line.
    """
    return _as_comparable_text(in_script) == _as_comparable_text(outside)


def _as_comparable_text(value: Any) -> str:
    """Returns a text that is the same for a value in a script and on the command line.

    Values that mean the same have equal texts: 30 and 30.0 both give "30.0", and `(1, 2)` gives
    "1:2", as it is written on the command line. The parts of a list are always whole numbers.
    """
    if isinstance(value, list | tuple):
        return ":".join(str(part) for part in value)
    if isinstance(value, timedelta):
        return str(value.total_seconds())
    if isinstance(value, int):  # also a bool, with "1.0" for True
        return str(float(value))
    return str(getattr(value, "name", value))  # a strategy is written as its name
