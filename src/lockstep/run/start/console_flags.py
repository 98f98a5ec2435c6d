"""Reads torchrun's flags on the output of the ranks."""

from __future__ import annotations

import argparse
import os
import socket
from collections.abc import Mapping
from string import Template

from lockstep.errors import SettingError
from lockstep.run.start.console import DEFAULT_PREFIX, Console


def console_for(flags: argparse.Namespace, nproc: int) -> Console:
    """Creates the console that torchrun's flags ask for.

    Args:
        flags: torchrun's flags.
        nproc: number of ranks on this machine.

    Raises:
        SettingError: torchrun refuses the value of a flag.
    """
    shown = choose_streams(nproc, flags.redirects, flags.tee, flags.local_ranks_filter)

    # Older versions of torch do not have these flags. They are None if they were not given.
    filters = {
        "stdout": getattr(flags, "duplicate_stdout_filters", None) or (),
        "stderr": getattr(flags, "duplicate_stderr_filters", None) or (),
    }

    # --log-line-prefix-template, which torch has since 2.14.
    flag_template = getattr(flags, "log_line_prefix_template", "")
    environment_template = os.environ.get("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE")
    template = flag_template or environment_template or DEFAULT_PREFIX
    # `${rank}` and the like stay in the text, as they are replaced for each rank later.
    prefix = Template(template).safe_substitute(role_name=flags.role, hostname=socket.gethostname())

    # With --tee (any value except "0", the default) the user has asked for log files, so a single
    # rank gets them too.
    return Console(shown, filters, prefix, always_logged=flags.tee != "0")


def choose_streams(
    nproc: int, redirects: str = "0", tee: str = "0", local_ranks_filter: str = ""
) -> dict[int, frozenset[str]]:
    """Chooses which streams of each local rank are shown on the console, from torchrun's flags.

    By default all of them are. The values of `redirects` and `tee` are described in
    `torch.distributed.elastic.multiprocessing`: 0 stands for no stream, 1 for stdout, 2 for stderr
    and 3 for both, either for all ranks ("3") or for some of them ("0:3,1:2").

    Args:
        nproc: number of ranks on this machine.
        redirects: streams that are only written to files, and not shown.
        tee: streams that are shown as well, in spite of `redirects`.
        local_ranks_filter: the ranks that are shown at all, such as "0,2"; empty for all of them.

    Returns:
        The names of the streams, by local rank: `{0: {"stdout", "stderr"}, 1: {"stderr"}}`.

    Raises:
        SettingError: torchrun refuses a value.
    """
    redirected_of_rank = _streams_of_ranks("--redirects", redirects, nproc)
    teed_of_rank = _streams_of_ranks("--tee", tee, nproc)
    shown_ranks = _parse_ranks_filter(local_ranks_filter, nproc)

    shown: dict[int, frozenset[str]] = {rank: frozenset() for rank in range(nproc)}
    for rank in shown_ranks & shown.keys():
        shown[rank] = _shown_streams(redirected_of_rank[rank], teed_of_rank[rank])
    return shown


def _shown_streams(redirected: int, teed: int) -> frozenset[str]:
    """Returns the names of the streams of a rank that are shown: not redirected, or else teed.

    Args:
        redirected: a bit set of `Std.OUT` and `Std.ERR`.
        teed: another one.
    """
    from torch.distributed.elastic.multiprocessing import Std

    names = set()
    for name, stream in (("stdout", Std.OUT), ("stderr", Std.ERR)):
        is_redirected = bool(stream & redirected)
        is_teed = bool(stream & teed)
        if is_teed or not is_redirected:
            names.add(name)
    return frozenset(names)


def _parse_ranks_filter(local_ranks_filter: str, nproc: int) -> set[int]:
    """Returns the ranks that a value of `--local-ranks-filter` names; all ranks if it is empty."""
    if not local_ranks_filter:
        return set(range(nproc))

    try:
        return {int(part) for part in local_ranks_filter.split(",")}
    except ValueError:
        raise SettingError(
            f"--local-ranks-filter {local_ranks_filter}",
            "not a list of ranks",
            "write such as 0,2",
        ) from None


def _streams_of_ranks(flag: str, text: str, nproc: int) -> Mapping[int, int]:
    """Parses a value of `--redirects` or `--tee`, such as `3` or `0:1,1:3`.

    Returns:
        The streams of each local rank, as a bit set of `Std.OUT` and `Std.ERR`.
    """
    from torch.distributed.elastic.multiprocessing import Std, to_map

    try:
        streams: Mapping[int, int] = to_map(Std.from_str(text), nproc)
    except ValueError:
        raise SettingError(
            f"{flag} {text}",
            "neither one of 0 to 3 nor a list such as 0:1,1:3",
            "0: none, 1: stdout, 2: stderr, 3: both; RANK:NUMBER for single ranks",
        ) from None

    return streams
