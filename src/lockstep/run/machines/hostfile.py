"""Parses the value of `--hosts`: a list such as `node1,node2:4`, or the name of a hostfile.

A hostfile has the format of Open MPI: one host per line, such as `node1 slots=4`. *Slots* is the
number of processes on the host. Text after a `#` is a comment.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from lockstep.errors import SettingError
from lockstep.run.machines.hosts import Host

# "node1", "user@node1.example.org", "user@[fe80::1]"
HOST_NAME_PATTERN = re.compile(r"(?:[\w.-]+@)?(?:[\w.][\w.-]*|\[[0-9a-fA-F:.]+\])")
# "node1:4", "node1:gpu", "[fe80::1]:4"; the name may not end in a colon.
HOST_WITH_PROCESSES_PATTERN = re.compile(r"(?P<name>.*[^:]):(?P<processes>[^:\]]*)")
POSITIVE_NUMBER_PATTERN = re.compile("0*[1-9][0-9]*")
EQUALS_WITH_SPACES_PATTERN = re.compile(r"\s*=\s*")

FULL_WIDTH = {"，": ",", "、": ",", "：": ":", "；": ",", "．": ".", "　": ","}
"""Full-width characters that Chinese and Japanese input methods write, and what is meant."""

LINE_ADVICE = "write the line as: node1 slots=4"


def parse_hosts(text: str) -> list[Host]:
    """Parses a list of hosts or a hostfile: `"node1,node2:4"` -> two hosts.

    Args:
        text: the value of --hosts.

    Raises:
        SettingError: a part of it is not a host, or a host is named twice.
    """
    setting = f"--hosts {text}"  # every error begins with it
    # `Path.is_file` is not used, as it raises if a long list is not a valid file name.
    if os.path.isfile(text):
        hosts = _parse_file(setting, text)
    else:
        hosts = [_parse_list_item(setting, part.strip()) for part in text.split(",")]

    _check_named_once(setting, hosts)
    return hosts


def _check_named_once(setting: str, hosts: Sequence[Host]) -> None:
    """Raises SettingError if two hosts have the same address, perhaps with other user names.

    Args:
        setting: the option as the user has set it, which the error begins with.
        hosts: all hosts of the run.
    """
    host_of_address: dict[str, Host] = {}
    for host in hosts:
        if host.address in host_of_address:
            other = host_of_address[host.address]
            raise SettingError(
                setting,
                f"{other.name} and {host.name} are one machine",
                "name each machine once, with its number of processes",
            )
        host_of_address[host.address] = host


def _parse_file(setting: str, path: str) -> list[Host]:
    """Parses a hostfile.

    Args:
        setting: the option as the user has set it, which an error begins with.
        path: the path of the file.
    """
    hosts = []
    for line_number, line in enumerate(_read_lines(setting, path), start=1):
        without_comment = line.partition("#")[0]
        words = EQUALS_WITH_SPACES_PATTERN.sub("=", without_comment).split()
        if words:
            hosts.append(_parse_line(f"{setting}, line {line_number}", words))

    if not hosts:
        raise SettingError(
            setting, "the file lists no hosts", "write one line per host: node1 slots=4"
        )
    return hosts


def _read_lines(setting: str, path: str) -> list[str]:
    """Reads the lines of a hostfile."""
    try:
        return Path(path).read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingError(setting, str(error), "make it a text file that can be read") from None


def _is_bare_ipv6_address(text: str) -> bool:
    """Returns True for an IPv6 address without brackets.

    - `fe80::1`, `2001:db8:0:0:0:0:0:1`: True; both have "::" or more than two colons.
    - `[fe80::1]:4`: False, an address in brackets and a number of processes.
    - `node1:4`: False, a name and a number of processes.
    """
    if "[" in text:
        return False
    return "::" in text or text.count(":") > 2


def _check_processes(setting: str, given: str) -> None:
    """Raises SettingError unless a text is a number of processes, or `auto`, `gpu` or `cpu`."""
    is_number = POSITIVE_NUMBER_PATTERN.fullmatch(given) is not None
    if not is_number and given not in ("auto", "gpu", "cpu"):
        raise SettingError(
            setting,
            f"{given!r} is not a number of processes",
            "write node1:4, or node1:gpu for one for each GPU",
        )


def _parse_list_item(setting: str, text: str) -> Host:
    """Parses one item of a list: `node1`, `node1:4` or `node1:gpu`.

    Args:
        setting: the option as the user has set it, which an error begins with.
        text: the item.
    """
    for character in FULL_WIDTH:
        if character in text:
            raise SettingError(
                setting,
                f"{character!r} is a full-width character",
                f"type {FULL_WIDTH[character]!r} in its place",
            )

    name = text
    processes = None

    # The end of a bare IPv6 address such as `fe80::1` is no number of processes.
    match = HOST_WITH_PROCESSES_PATTERN.fullmatch(text)
    if match and not _is_bare_ipv6_address(text):
        name = match["name"]
        processes = match["processes"]
        _check_processes(setting, processes)

    _check_name(
        setting,
        name,
        "give hosts (node1,node2:4, with 4 processes on node2) or the name of a hostfile; there is "
        f"no file {name!r}",
    )
    return Host(name, processes)


def _parse_line(setting: str, words: list[str]) -> Host:
    """Parses one line of a hostfile.

    Args:
        setting: the option as the user has set it and the line, which an error begins with.
        words: the words of the line, such as `["node1", "slots=4"]`.
    """
    name = words[0]
    options = words[1:]
    numbers: dict[str, int] = {}
    for option in options:
        key, _, value = option.partition("=")
        key = key.replace("max-slots", "max_slots")  # Open MPI accepts both
        if key not in ("slots", "max_slots") or not re.fullmatch("[0-9]+", value):
            raise SettingError(setting, f"{option!r} is not understood", LINE_ADVICE)
        numbers[key] = int(value)

    slots = numbers.get("slots")
    max_slots = numbers.get("max_slots")
    has_no_slots = slots == 0
    needed_slots = 1 if slots is None else slots  # without "slots" there is one process
    exceeds_max_slots = max_slots is not None and needed_slots > max_slots
    if has_no_slots or exceeds_max_slots:
        raise SettingError(
            setting,
            f"{' '.join(options)}: there is no room for so many processes",
            "give slots of at least 1, and no more than max_slots",
        )

    _check_name(setting, name, LINE_ADVICE)
    nproc = None if slots is None else str(slots)  # a text, as it may also be "gpu" in a list
    return Host(name, nproc)


def _check_name(setting: str, name: str, advice: str) -> None:
    """Checks that a host's name is well-formed.

    Args:
        setting: the option as the user has set it, which the error begins with.
        name: the name of the host.
        advice: what the user can do. An IPv6 address without brackets has advice of its own.

    Raises:
        SettingError: the name is not well-formed.
    """
    if HOST_NAME_PATTERN.fullmatch(name):
        return

    is_bare_ipv6 = name.count(":") > 1 and "[" not in name
    if is_bare_ipv6:
        user, at, address = name.rpartition("@")
        advice = f"write an IPv6 address in brackets: {user}{at}[{address}]"
    found = f"{name!r} is not a host name" if name else "a host's name is missing"
    raise SettingError(setting, found, advice)
