"""Keeps the catalogue of messages that `lockstep.language` translates with: `make messages`.

1. The messages are *extracted* from the source: what errors and warnings have found and what to do
   about it; every other sentence in the source, unless `NO_MESSAGES_BY_REASON` lists it; and
   `verify/catalogue.toml`. An f-string becomes a template: f"start {count}" is "start {count}".
2. They are *merged* into `lockstep.po`: translations are kept, messages that are no longer in the
   source go, new ones come without a translation.

What runs reads `lockstep.po` itself. The source itself is not marked: see CONTRIBUTING.md.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import house

sys.path.insert(0, str(house.SOURCE.parent))
from lockstep.language import CATALOGUE_FILE, HEADING, fields_of, read_po
from lockstep.verify.catalogue import page_head_to_translate, paragraphs_to_translate
from lockstep.wording import conjugate

PO_FILE = CATALOGUE_FILE
FunctionDef = ast.FunctionDef | ast.AsyncFunctionDef
CATALOGUE_OF_FINDINGS = house.SOURCE / "verify" / "catalogue.toml"

FILES_OF_SHORT_TEXTS = (
    "batch.digest_matching",
    "batch.fingerprint",
    "batch.stream_consistency",
    "checkpoint.bits",
    "checkpoint.checksums",
    "checkpoint.differences",
    "checkpoint.encoding",
    "checkpoint.file_errors",
    "checkpoint.formats.dcp",
    "checkpoint.formats.safetensors",
    "checkpoint.health",
    "checkpoint.keeping_plan",
    "checkpoint.kept_reading",
    "checkpoint.layout",
    "checkpoint.lazy_tensor",
    "checkpoint.random_states",
    "checkpoint.repair",
    "checkpoint.shards",
    "checkpoint.writer",
    "cli.explain_topics",
    "cli.run_help",
    "cli.verify_progress",
    "communication.shared_memory",
    "distributed.collective_calls",
    "distributed.manifest",
    "distributed.rendezvous",
    "doctor.",
    "extensions.autotune",
    "extensions.device_check.message",
    "extensions.journal.comparison",
    "extensions.journal.reading",
    "extensions.journal.summary",
    "extensions.report.analysis",
    "extensions.report.closing",
    "extensions.report.comparison",
    "extensions.report.network_advice",
    "extensions.report.network_forecast",
    "machine.interface",
    "machine.process_copy",
    "run.machines.auth",
    "run.machines.helper",
    "run.machines.machine_connection",
    "run.machines.open_rendezvous",
    "run.machines.peer_connection",
    "run.machines.rendezvous",
    "run.machines.ssh_connection",
    "run.machines.ssh_errors",
    "run.start.plan",
    "run.start.process",
    "run.start.fork_server",
    "run.watch.activity",
    "run.watch.call_table",
    "run.watch.case",
    "run.watch.deadlock",
    "run.watch.failure_advice",
    "run.watch.first_failure",
    "run.watch.hang",
    "run.watch.process_status",
    "run.watch.stacks",
    "run.watch.straggler",
    "session.step",
    "settings",
    "verify.accepted_differences",
    "verify.bit_verdict",
    "verify.cause",
    "verify.causes",
    "verify.joined_parts",
    "verify.line_findings",
    "verify.recording.bit_recorder",
    "verify.recording.determinism",
    "verify.recording.inputs",
    "verify.recording.patches.",
    "verify.recording.progress",
    "verify.recording.recorder",
    "verify.rounding_noise",
    "verify.rules.",
    "verify.run_config",
    "verify.run_failure",
    "verify.self_checks",
    "verify.verdict",
    "wording",
)
"""Modules, or beginnings of their names, in which a text of two words is a message too, because
they write verdicts, which consist of such parts."""
MIN_WORDS_OF_SENTENCE = 3
"""Anywhere in the source, a text with so many words of prose is a message."""
WORD_OF_PROSE = re.compile(r"(?<![\w./_-])[A-Za-z][a-z']+(?![\w/_(=-])")
SIGN_OF_A_PATTERN = re.compile(r"\\[a-zA-Z(\[.|]|\(\?|\.\*|\[\^|\w\|[A-Za-z]{2}")
"""What a regular expression has, and a sentence has not."""
NAMES_OF_OPTIONS = re.compile(r"--[\w-]+ [A-Z:|{}a-z_]+|lockstep run(?: --.*\.py.*)?")
"""An option with its value, and an example of the help: texts that are the same in Chinese."""
NO_MESSAGES_BY_REASON = {
    "it would fit texts that were made from other templates": (
        "a list of {length}",
        "tensors {leaf}",
        "{first_leaves}, ... ({num_leaves} values)",
        "Lockstep {lockstep}",
        "Python {python}",
        "ROCm {hip}",
        "made {folder}",
        "statistics of {samples}",
        "torch {torch}",
        "{milliseconds} ms",
        "{num_bytes} B",
        "{number} {noun}es",
        "{number} {noun}s",
        "{value} GiB",
        "{value} KiB",
        "{value} MiB",
        "{op} number {num_begun}",
        "{describe_op} in slices",
        "{op} of {shown} {unit}",
        "(?:Stack|.*[Tt]hread 0x0*{thread}\\b.*) \\(most recent call first\\):\\n",
    ),
    "it is what torch, Python, the system or another program says, and is looked for": (
        "Application timeout caused pair closure",
        "Connection was likely closed",
        "Current thread's C stack",
        "Failed to check the .should dump. flag on TCPStore",
        "Heartbeat monitor timed out",
        "Python runtime state:",
        "Some NCCL operations have failed or timed out",
        "The client socket has timed out",
        "Traceback (most recent call last):",
        "Watchdog caught collective operation timeout",
        "[Ss]ocket [Tt]imeout",
        "can't allocate memory",
        "can't start new thread",
        "does not have a deterministic implementation",
        "exchange_identification|Connection closed by UNKNOWN port",
        "no such file|not found|does not exist|permission denied|unknown command",
        "not enough memory",
        "out of memory",
        "remote process exited or there was a network error",
        "watchdog got stuck",
    ),
    "it is how a message of Lockstep's begins or what it contains, and is looked for": (
        "all ranks have come, but one did not go on within",
        "faulthandler writes into",
        "its process was then",
        "its store answered once and then went away",
        "rank 0 or its store went away during the join",
    ),
    "it is Python's own text, printed as Python prints it": (
        "Error in sys.excepthook:",
        "Original exception was:",
    ),
    "it is a key, a name or a mark in records and between processes": (
        "LOCKSTEP_TOKEN",
        ', "checksum": "',
        "at its end",
        "in a tree",
        "its value",
        "rank 0",
        "send or receive",
        "snapshot asked for",
        "trained without prepare",
        "version of the order",
        "whether it is set",
        # Of an enumeration.
        "a rank has different bits each time, and the other rank the same both times",
        "both ranks have different bits each time",
        "no bits have a majority",
        "some ranks had different bits than the majority, and the same the second time",
        "some ranks have different bits than the majority",
        "two ranks have different bits, and could not compute them again",
        "two ranks have different bits, each the same both times",
        # Of an exception that is caught.
        "process {getpid} got signal {number}",
        "the actor of Ray is lost",
    ),
    "it stands within what the script has raised, which stays as it is": (
        "(its message cannot be shown)",
        "the first of {count} exceptions",
        "the only exception",
        "{begin}... ({num_removed} characters are left out here) ...{end}",
        "{headline} (in a worker process)",
    ),
    "its parts are messages": (
        "global batches were left out: {places}{explanation}",
        "nothing to resume in {folder}{why_not_from_memory}",
        "the last checkpoint on disk is of step {step_on_disk}{problems}",
        "there is no checkpoint on disk{problems}",
        "{rstrip}\nit started processes of its own, which are not seen: {line}",
        "make all ranks equal in what decides bits, since they may have different bits without "
        "being wrong; if they still differ: {do}",
        "each micro-batch over all ranks, not of the global batch",
        "of parameters: no example to measure with",
        "of parameters: the model has no values yet to measure with",
        "of time and memory, measured on an example",
        "the replica's part of the global batch",
        "the samples of all devices, as on one",
    ),
    "it is the name of a group in a debugger, or what Python shows for an object": (
        "a parameter that was replaced in world.prepare",
        "gradients {number} of model {model_number}",
    ),
    "it is a part of a first line in HEADINGS_MADE_ELSEWHERE": (
        "list of tasks per node",
        "{name}'s rank and size",
    ),
    "it is code, an option or JSON": (
        '<iframe srcdoc="{page}" sandbox="allow-scripts" title="lockstep report" '
        'style="width: 100%; height: {frame_height_px}px; border: 0"></iframe>',
        "--filter=:- .gitignore",
        "world.broadcast(..., source={source})",
        "--rsync-path=mkdir -p {quote} && rsync",
        "import json, sys\nsys.path = json.loads(sys.argv[1])\n"
        "from lockstep.run.start.function_worker import fork_server_main\n"
        "fork_server_main(*map(json.loads, sys.argv[2:]))",
        "import sys; sys.path.insert(0, {packages_folder}); from {name} import fork_server_main; "
        "fork_server_main(*sys.argv[1:])",
        "import sys; sys.path.insert(0, {packages_folder}); import {name} as m; m.main()",
    ),
}
"""Texts that are no messages, though they look like them, by the reason."""
NO_MESSAGES = {text for texts in NO_MESSAGES_BY_REASON.values() for text in texts}
SHORT_MESSAGES = {
    "{count_noun} for {count_noun_2}": "settings",
    "{number} device": "settings",
    "{number} devices": "settings",
    "a block whole": "extensions.memory_table",
    "a step": "extensions.memory_table",
    "measured peak": "extensions.memory_table",
    "parameter copies": "extensions.memory_table",
    "replica {number}": "extensions.memory_table",
    "steps {first} to {last}": "extensions.ledger.report",
    "start {number}, {started}: {num_ranks}, {steps}": "extensions.ledger.report",
    "trained {count_noun} again": "extensions.ledger.report",
    "no step": "extensions.ledger.report",
    "{number} left out: {examples_text}": "extensions.ledger.judge",
    "global batches were left out: {places}": "extensions.ledger.judge",
    "loader {loader} ({dataset}), epoch {epoch}: {what}": "extensions.ledger.judge",
    "{name} now {dtype}, was {dtype_2}": "extensions.checks.parameters",
    "{name} unfrozen": "extensions.checks.parameters",
    "removed every {value}": "checkpoint.name_matching",
    "it started processes of its own, which are not seen: {line}": "verify.reference_check",
    "remove it": "cli.checkpoint",
    "leave it": "cli.checkpoint",
    "main thread": "run.watch.messages",
    "another thread": "run.watch.messages",
    "labels in {name}": "verify.recording.batches",
    "values but {padding} in {name}": "verify.recording.batches",
    "ones in {name}": "verify.recording.batches",
    "non-zero values in {name}": "verify.recording.batches",
    "tensor {number}": "verify.recording.batches",
    "Directory {name} does not exist.": "cli.help_text",
    "File {name} does not exist.": "cli.help_text",
    "Path {name} does not exist.": "cli.help_text",
    "a checkpoint of Lockstep": "checkpoint.formats.reading",
    "a safetensors file": "checkpoint.formats.reading",
    "a torch file": "checkpoint.formats.reading",
    "a folder of torch.distributed.checkpoint": "checkpoint.formats.reading",
    "torch files ({num_files} of them)": "checkpoint.formats.reading",
    "safetensors in {num_files} files": "checkpoint.formats.reading",
    "training state": "cli.checkpoint",
    "total": "cli.checkpoint",
    "{number} to {number_2}": "extensions.journal.comparison",
    "equal losses up to step {last_equal_step}": "extensions.journal.comparison",
    "equal up to step {last_equal_step}": "extensions.journal.comparison",
    "1/{number} of": "verify.rules.evidence",
    "Commands:": "cli.help_text",
    "Error:": "cli.help_text",
    "No such option {name}.": "cli.help_text",
    "No such option {name}. Did you mean {value}?": "cli.help_text",
    "Missing argument {name}.": "cli.help_text",
    "Option {option} requires an argument.": "cli.help_text",
    "Got unexpected extra argument ({value})": "cli.help_text",
    "Got unexpected extra arguments ({value})": "cli.help_text",
    "Invalid value for {name}: {reason}": "cli.help_text",
    "{value} is not a valid {type}.": "cli.help_text",
    "{value} is not a valid integer range.": "cli.help_text",
    "{value} is not in the range {interval}.": "cli.help_text",
    "{value} is not one of {choices}.": "cli.help_text",
    "No such option {name}: {advice}": "cli.unknown_option",
    "strategies are {known_words}": "strategies.find",
    "options of {name} are {known_words}": "strategies.find",
    "compressions are {known_words}": "strategies.ddp",
    "the rules are {known_words}": "optim.learning_rate",
    "languages are {known_words}": "errors",
    "The port number of the rendezvous endpoint {endpoint} must be an integer between 0 and "
    "65536.": ("run.machines.rendezvous_settings"),
    "DIFFERENT": "verify.verdict",
    "EQUAL": "verify.verdict",
    "Examples:": "cli.help_text",
    "FAILED": "verify.verdict",
    "Options:": "cli.help_text",
    "Processes:": "cli.help_text",
    "Ray:": "cli.help_text",
    "Several machines, by ssh:": "cli.help_text",
    "Slurm:": "cli.help_text",
    "Several machines, one command on each:": "cli.help_text",
    "Show the version and exit.": "cli.help_text",
    "Show this message and exit.": "cli.help_text",
    "Training settings (what the script leaves unset in lockstep.init):": "cli.help_text",
    "Watching and restarts:": "cli.help_text",
    "all": "verify.verdict",
    "all {compared}": "verify.bit_verdict",
    "between the machines": "cli.doctor",
    "between {size} machines": "communication.quantized_sum",
    "between {size} ranks": "communication.quantized_sum",
    "argument": "extensions.report.facts",
    "git commit": "extensions.report.facts",
    "host": "extensions.report.facts",
    "bucket": "extensions.report.console",
    "clock": "doctor",
    "clocks": "doctor",
    "compression": "extensions.report.console",
    "cores": "doctor",
    "data": "doctor",
    "disk": "doctor",
    "earlier": "run.watch.straggler",
    "a whole number": "strategies.find",
    "a number": "strategies.find",
    "{option} is a whole number": "strategies.find",
    "{option} is a number": "strategies.find",
    "{option} is true or false": "strategies.find",
    "in the file": "checkpoint.differences",
    "missing": "checkpoint.differences",
    "other shape": "checkpoint.differences",
    "unexpected": "checkpoint.differences",
    "{number} missing": "checkpoint.differences",
    "{number} unexpected": "checkpoint.differences",
    "{number} of another shape": "checkpoint.differences",
    "the script": "machine.topology",
    "device": "settings",
    "element": "run.watch.messages",
    "samples": "verify.rules.gradient_values",
    "error": "doctor",
    "exchange": "extensions.report.console",
    "exit code {number}": "run.watch.exit_status",
    "folder": "doctor",
    "fresh interpreters ({cold_reason})": "run.start.script",
    "function": "testing",
    "gpus": "doctor",
    "gradients": "verify.causes",
    "hostname": "doctor",
    "{checkpoint_name} ({checkpoint_problem})": "checkpoint.find_latest",
    "{checkpoint_name} ({checkpoint_problem}), {passed}": "checkpoint.find_latest",
    "incomplete": "checkpoint.find_latest",
    "timed out": "distributed.rendezvous",
    "two copies": "checkpoint.keeping_plan",
    "two copies on its machine and two on another one": "checkpoint.keeping_plan",
    "one machine has more than {max_senders_per_rank} times as many ranks as the machine that "
    "would get its copies, so that no machine has a copy of the shards of another one": (
        "checkpoint.keeping_plan"
    ),
    "{percentages} of parameters: no example to measure with": "strategies.pipeline.unit_costs",
    "{percentages} of parameters: the model has no values yet to measure with": (
        "strategies.pipeline.unit_costs"
    ),
    "{percentages} of time and memory, measured on an example": "strategies.pipeline.unit_costs",
    "nothing to resume in {folder}": "checkpoint.checkpointer",
    "{get_device_name}, compute capability {major}.{minor}": "distributed.numerics",
    "float32 matmul precision": "distributed.numerics",
    "setting of {setting}": "distributed.numerics",
    "value of {variable}": "distributed.numerics",
    "{who} {verb} another {label} ({value}, others {usual_value})": "distributed.numerics",
    "another {label} ({value}, in the checkpoint {saved_value})": "distributed.numerics",
    "the machine answers, but nothing listens on that port": "machine.network",
    "no answer": "machine.network",
    "the connection was accepted and then cut": "machine.network",
    "{signal_name} ({meaning})": "run.start.process",
    "{operation_name} number {number}": "communication.shared_memory",
    "make all ranks equal in what decides bits, since they may have different bits without being "
    "wrong": "extensions.device_check.message",
    "if they still differ: {advice_on_devices}": "extensions.device_check.message",
    "{wrong} and rank {rank} ({torch_device} of {host})": "extensions.device_check.message",
    "{torch_device} of {host}": "extensions.device_check.message",
    "{places} and {torch_device} of {host}": "extensions.device_check.message",
    "{place} {problem_of_value}": "checkpoint.encoding",
    "is {describe_type}": "checkpoint.encoding",
    "equal up to step {step}, and losses up to step {last_step}": "extensions.journal.comparison",
    "the steps between were not written down by both": "extensions.journal.comparison",
    "weights": "extensions.journal.comparison",
    "process {pid} on {host}": "distributed.join",
    "a port of its own": "distributed.join",
    "a file of its own (if no other run uses this one, it is left over: remove it)": (
        "distributed.join"
    ),
    "{who} on {host}": "distributed.join",
    "{who} has {quoted_value}": "distributed.join",
    "{who} have {quoted_value}": "distributed.join",
    "replica {number} at {place}": "strategies.data_parallel.parallel_apply",
    "in float32": "verify.comparison",
    "in float64": "verify.comparison",
    "in this step{before} the test took another branch at {test}: {outcomes}": (
        "verify.line_findings"
    ),
    "killed": "run.watch.first_failure",
    "killed by {name}": "run.watch.exit_status",
    "last": "run.watch.straggler",
    "node {rank} on host {host}": "run.machines.nodes",
    "process {pid} on host {host}": "run.machines.nodes",
    "node {rank} of {num_nodes} has not joined": "run.machines.nodes",
    "{name} is still ending its previous start": "run.machines.nodes",
    "resumed from memory (epoch {epoch}, step {step}, strategy {strategy}, {count_noun})": (
        "checkpoint.checkpointer"
    ),
    "no steps are kept in memory": "checkpoint.checkpointer",
    "from step {step} in memory": "checkpoint.checkpointer",
    "there is no checkpoint on disk": "checkpoint.checkpointer",
    "the last checkpoint on disk is of step {step}": "checkpoint.checkpointer",
    "it is newer than step {step} in memory": "checkpoint.checkpointer",
    "keeping it takes {milliseconds}": "checkpoint.copy_interval",
    "the copy on another machine takes {milliseconds}": "checkpoint.copy_interval",
    "{number} micro-batches": "cli.verify",
    "{name} has left ({why})": "run.machines.nodes",
    "{count_noun}: {names}; they meet at {address}, port {port}": "run.machines.hosts_run",
    "its connection ended": "run.machines.nodes",
    "it does not speak Lockstep's protocol": "run.machines.auth",
    "its token differs from this machine's, of {source}; set {token_variable} to the same text on "
    "all machines, or copy the token file": "run.machines.auth",
    "leftovers": "doctor",
    "limits": "doctor",
    "link": "extensions.report.console",
    "links": "doctor",
    "losses": "verify.verdict",
    "memory": "doctor",
    "names": "doctor",
    "ok": "doctor",
    "one process and {processes}": "verify.cause",
    "optimizer": "extensions.report.console",
    "optimizer state": "extensions.device_check.message",
    "packages": "doctor",
    "parameters": "extensions.device_check.message",
    "rank {ranges} {does}": "run.watch.case",
    "rank {rank} and {processes}": "verify.cause",
    "ranks {ranges} {does}": "run.watch.case",
    "reached": "doctor",
    "script": "cli.verify",
    "settings": "extensions.report.console",
    "shards": "extensions.report.console",
    "software": "doctor",
    "stages": "extensions.report.console",
    "that is under {test}: {outcomes}": "verify.line_findings",
    "statistics of the replica's part of the global batch": "training.prepare",
    "statistics of each micro-batch over all ranks, not of the global batch": "training.prepare",
    "statistics of the global batch, as on one device": "training.prepare",
    "statistics of the samples of all devices, as on one": "training.prepare",
    "the global batch, as on one device": "training.prepare",
    "each micro-batch over all virtual ranks, not of the global batch": "training.prepare",
    "local rank {local_rank}": "distributed.device",
    "the ranks went different ways at {test}: {outcomes}": "verify.line_findings",
    "the script is given {local_rank_flag}": "run.start.script",
    "the script starts its own processes": "run.start.script",
    "threads": "extensions.report.console",
    "units": "extensions.report.console",
    "values": "extensions.report.console",
    "variables": "doctor",
    "versions": "doctor",
    "wait in {name_call}, {context}": "run.watch.case",
    "waits in {name_call}, {context}": "run.watch.case",
    "warning": "doctor",
    "{number} ({optimizer_class} of {models})": "verify.finding",
    "{operation_name} and {operation_name_2}": "run.watch.deadlock",
    "{operation_name} of {lengths} {element_type}": "run.watch.messages",
    "{operation_name} of {lengths} {element_type} of {group}": "run.watch.case",
    "{single} on {processes}": "verify.cause",
    "{text} ({number} of {number_2})": "verify.finding",
    "{thousands} of {thousands_2}": "batch.loader",
}
"""Texts that are shown and too short to be recognized as messages, are put together from several,
or come from click, with the modules that write them."""
MIN_LETTERS = 4
"""A template with fewer letters between its fields would fit texts that were not made from it."""
MIN_LETTERS_OF_HEADING = 2
"""A first line of an error may have only "of" between its code and fields."""
FUNCTIONS_THAT_WARN = ("warn", "warn_about")
FUNCTIONS_THAT_TRANSLATE = (
    "translate",
    "in_language",
    "_translated",
    "say",
    "_say",
    "say_waiting",
    "labelled",
    "_labelled_lines",
)
"""Functions that are given an English text, and show or return it in the user's language."""
FUNCTIONS_THAT_SHOW_NOTHING = (
    *("AssertionError", "AttributeError"),  # of a mistake of Lockstep's, and of a missing name
    *("open_group", "open_groups", "side_stream"),  # their names are for debuggers
    # See POSITION_AND_HEADING_OF_ACTION.
    *("check_not_in_main_process_first", "plain_errors", "run_on_all_ranks"),
)
"""Functions whose arguments are no messages, though they look like them."""
NAME_OF_FIELD = re.compile(r"\{\w+\}")
HELP_ARGUMENTS = ("help", "short_help", "epilog")
"""Arguments of click's decorators that are texts of the help."""
ERRORS_WITHOUT_SETTING = ("Problem", "ConnectionDropped")
"""Errors about machines of a run: what was found, and what to do."""
POSITION_OF_WAS_SET = 0
POSITION_OF_FOUND = 1
POSITION_OF_DO = 2
MAX_DEPTH = 6
"""How many names and calls are followed from an argument to its texts."""
DEPTH_OF_FOUND = 3
"""How many for what an error has found, which often quotes names and numbers of the script."""
DEPTH_OF_WAS_SET = 1
"""How many for the first line of an error, which often quotes what the user has written."""
POSITION_AND_HEADING_OF_ACTION = {
    "plain_errors": (0, "{action} {path}"),
    "run_on_all_ranks": (1, "{action}"),
    "check_not_in_main_process_first": (0, "{action}"),
}
"""Functions that are told what is done, and raise errors with that in the first line: the position
of this argument, and the line."""
HEADINGS_MADE_ELSEWHERE = (
    "{setting} in {file}, line {line}",
    "{setting} ({file}, line {line})",
    "saving a checkpoint in {folder} in the body of an evaluation loop",
    "{setting} on {count_noun}",
    "launch({name}) on {count_noun}",
    "launch({name}) on {count_noun} of a Ray cluster",
    "a run of {size} processes that meet at {store_location}",
    "the launcher's store at {address}",
    "the node that serves",
    "a shard size of {size_text}",
    "world.broadcast of a nest",
    "world.{name} of a tensor of {dtype}",
    "the host list {value} from Slurm's environment",
    "the list of tasks per node {value} from Slurm's environment",
    "resuming a loader whose batch size is {value}",
    "resuming a loader whose length is {value}",
    "resuming a loader whose seed is {value}",
    "resuming a loader whose shuffle is {value}",
    "resuming a loader whose version of the order is {value}",
)
"""First lines that are made far from the errors that have them."""


@dataclass
class Messages:
    """What was extracted."""

    places: dict[str, set[str]] = field(default_factory=dict)
    """The modules of each message."""
    no_messages_found: set[str] = field(default_factory=set)
    """The texts of `NO_MESSAGES` that are in the source."""
    advice_not_found: list[str] = field(default_factory=list)
    """Where the advice of an error is an expression whose texts are not found."""

    def add(self, message: str, module: str) -> None:
        """Adds a message, unless it has too few letters to be recognized."""
        if message in NO_MESSAGES:
            self.no_messages_found.add(message)
        elif has_enough_letters(message):
            self.places.setdefault(message, set()).add(module)


def messages_of_page() -> list[str]:
    """Returns the texts of the report page, which its template translates by `_("text")`."""
    template = (house.SOURCE / "extensions" / "report" / "web" / "page.html").read_text()
    return re.findall(r'\b_\("([^"]*)"\)', template)


def has_enough_letters(message: str) -> bool:
    """True if a message says something besides its fields, and is no single name of code."""
    literal = NAME_OF_FIELD.sub(" ", message)
    num_letters = len(re.findall(r"[A-Za-z]", literal))
    return num_letters >= MIN_LETTERS


def num_words_of_prose(message: str) -> int:
    """Returns how many words a message has that are no names, options or parts of code.

    A text that looks like a regular expression has none.
    """
    if SIGN_OF_A_PATTERN.search(message):
        return 0
    without_fields = NAME_OF_FIELD.sub(" ", message)
    return len(WORD_OF_PROSE.findall(without_fields))


def is_prose(heading: str) -> bool:
    """True if the first line of an error has words of its own beside code, names and fields.

    "a batch with batch_size=None" has; "lockstep verify {script}" and "rank={rank}" have not.
    """
    text = re.sub(r"^lockstep \w+", "", heading)
    text = re.sub(r"\{\w+\}|'[^']*'|\"[^\"]*\"", "_", text)
    words = []
    for word in text.split():
        is_word = re.fullmatch(r"[A-Za-z][a-z'-]*[,:;]?", word) is not None
        if is_word and word not in ("a", "an", "the"):
            words.append(word)
    return " " in heading and len("".join(words)) >= MIN_LETTERS_OF_HEADING


# --- From expressions to messages


def messages_of(node: ast.expr) -> Iterator[str]:
    """Yields the messages that a text expression stands for, in the form of `str.format`."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield without_semicolon(escape(node.value).strip())
    elif isinstance(node, ast.JoinedStr | ast.BinOp):
        yield without_semicolon(template_of(node))


def without_semicolon(text: str) -> str:
    """Returns a text without the semicolon that joins it to the text before it.

    `lockstep.language` splits a list of messages at its semicolons before it looks for messages,
    so a message that began with one would never be found.
    """
    return text.removeprefix("; ")


def template_of(node: ast.expr) -> str:
    """Returns the template of an f-string, or of texts and other values that are added up."""
    names: list[str] = []
    return "".join(_pieces(node, names)).strip()


def _pieces(node: ast.expr, names: list[str]) -> Iterator[str]:
    """Yields the literals and the fields of a text.

    Args:
        node: the text.
        names: the names of the fields so far, to which those of this text are added.
    """
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield escape(node.value)
    elif isinstance(node, ast.JoinedStr):
        for part in node.values:
            yield from _pieces(part, names)
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        yield from _pieces(node.left, names)
        yield from _pieces(node.right, names)
    else:
        value = node.value if isinstance(node, ast.FormattedValue) else node
        name = field_name(value)
        number = 2
        while name in names:
            name = f"{field_name(value)}_{number}"
            number += 1
        names.append(name)
        yield f"{{{name}}}"


def field_name(node: ast.expr) -> str:
    """Returns the name of the field for a value: the last name in it that says what it is."""
    if isinstance(node, ast.Name):
        return node.id.lower().strip("_")
    if isinstance(node, ast.Attribute):
        return node.attr.lower().strip("_")
    if isinstance(node, ast.Call):
        name = field_name(node.func)
        if name in ("len", "join_first", "join", "format_ranks", "abs", "sorted") and node.args:
            inner = field_name(node.args[0])
            return f"num_{inner}" if name == "len" else inner
        return name
    if isinstance(node, ast.Subscript):
        key = node.slice.value if isinstance(node.slice, ast.Constant) else None
        return key if isinstance(key, str) and key.isidentifier() else field_name(node.value)
    return "value"


def escape(text: str) -> str:
    """Doubles the braces of a text, as `str.format` wants it.

    `{name}` remains: such a text is formatted where it is used. `{}` becomes `{value}` there.
    """
    doubled = text.replace("{", "{{").replace("}", "}}")
    return re.sub(r"\{\{([a-z_]+)\}\}", r"{\1}", doubled)


# --- Where expressions are


class Reader:
    """Reads the messages of the whole source."""

    def __init__(self, modules: Mapping[str, house.Module]) -> None:
        self._modules = modules
        self._functions: dict[str, list[tuple[str, FunctionDef]]] = {}
        self._calls: dict[str, list[tuple[str, ast.Call]]] = {}
        self._error_classes = _error_classes(modules["errors"].tree)
        self._calls_in: dict[str, list[tuple[FunctionDef | None, ast.Call]]] = {}
        self._function_of_call: dict[int, FunctionDef | None] = {}
        self._assigned_in: dict[int, dict[str, list[ast.expr]]] = {}
        self.messages = Messages()
        for name, module in modules.items():
            self._calls_in[name] = list(_calls_by_function(module.tree))
            for function, call in self._calls_in[name]:
                self._function_of_call[id(call)] = function
            for node in ast.walk(module.tree):
                if isinstance(node, FunctionDef):
                    self._functions.setdefault(node.name, []).append((name, node))
                elif isinstance(node, ast.Call):
                    self._calls.setdefault(_called_name(node), []).append((name, node))

    def read(self) -> Messages:
        """Reads everything."""
        for name, module in self._modules.items():
            if name.startswith("cli."):
                self._read_help_of_commands(name, module.tree)
            if name.startswith("strategies"):
                self._read_reasons(name, module.tree)
            for function, call in self._calls_in[name]:
                self._read_call(name, function, call)
        for word, module_name in SHORT_MESSAGES.items():
            self.messages.places.setdefault(word, set()).add(module_name)
        for heading in HEADINGS_MADE_ELSEWHERE:
            self.messages.places.setdefault(HEADING + heading, set()).add("run")
        # Last, as first lines of errors are known then: they may look like sentences.
        for name, module in self._modules.items():
            self._read_sentences(name, module.tree)
        for message in messages_of_page():
            self.messages.add(message, "extensions.report.web.page")
        for message in messages_of_findings():
            self.messages.add(message, "verify.catalogue")
        return self.messages

    def _read_sentences(self, module: str, tree: ast.Module) -> None:
        """Reads the sentences of a module, and all texts of two words in `FILES_OF_SHORT_TEXTS`."""
        no_sentences = {id(node) for node in self._nodes_without_messages(tree)}
        for node in ast.walk(tree):
            if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add):
                if _begins_with_semicolon(node.value):
                    continue  # the text that is added is a message of its own
                whole = ast.BinOp(node.target, ast.Add(), node.value)
                no_sentences |= {id(part) for part in _literal_parts(whole)}
                self._add_sentences(whole, module)
            elif isinstance(node, ast.expr) and id(node) not in no_sentences:
                self._add_sentences(node, module)

    def _add_sentences(self, node: ast.expr, module: str) -> None:
        writes_verdicts = module.startswith(FILES_OF_SHORT_TEXTS)
        for message in messages_of(node):
            if message.replace("{{}}", "{value}") in self.messages.places:
                continue  # a text for `str.format`, which was found where it is formatted
            if "\n\n" in message:
                continue  # a page, which is translated by paragraphs
            is_sentence = num_words_of_prose(message) >= MIN_WORDS_OF_SENTENCE
            is_heading = HEADING + message in self.messages.places
            if writes_verdicts or (is_sentence and not is_heading):
                self._add_if_sentence(message, module)

    def _nodes_without_messages(self, tree: ast.Module) -> Iterator[ast.expr]:
        """Yields the texts of a module that are parts of others, or that nobody is shown."""
        for node in ast.walk(tree):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                yield node.value  # a docstring
            elif isinstance(node, ast.JoinedStr | ast.BinOp):
                yield from _literal_parts(node)  # the whole is one message
            elif isinstance(node, ast.Dict):
                yield from (key for key in node.keys if key is not None)
            elif isinstance(node, ast.Subscript) and ast.unparse(node.value) == "Literal":
                yield from _expressions_in(node.slice)
            elif isinstance(node, ast.Compare):
                yield node.left  # such as `"out of memory" in str(error)`
            elif isinstance(node, ast.Call):
                yield from self._arguments_without_messages(node)

    def _arguments_without_messages(self, call: ast.Call) -> Iterator[ast.expr]:
        """Yields the arguments of a call that nobody is shown, or that are read elsewhere."""
        name = _called_name(call)
        if self._has_heading(call):
            heading = _argument(call, POSITION_OF_WAS_SET, "was_set")
            if heading is not None:
                yield from _expressions_in(heading)
        elif _is_of_re(call) or name in FUNCTIONS_THAT_SHOW_NOTHING:
            for argument in call.args:
                yield from _expressions_in(argument)
        elif name == "Cause":  # a pattern in the output of ssh, or a code such as LS205
            yield from _expressions_in(call.args[0])

    def _has_heading(self, call: ast.Call) -> bool:
        """True for an error or a warning, whose first line is translated apart from other texts.

        The errors of click are translated as other texts, also `click.UsageError`, which has the
        name of an error of Lockstep's.
        """
        if ast.unparse(call.func).startswith("click."):
            return False
        return _called_name(call) in {*self._error_classes, *FUNCTIONS_THAT_WARN}

    def _add_if_sentence(self, message: str, module: str) -> None:
        """Adds a message of several words; one alone is a name in code, or a grammatical form.

        Verdicts on ranks put what one rank does into the plural.
        """
        if " " in message and not NAMES_OF_OPTIONS.fullmatch(message):
            self.messages.add(message, module)
            if module.startswith("run.watch."):
                self.messages.add(conjugate(message, count=2), module)

    def _read_call(self, module: str, function: FunctionDef | None, call: ast.Call) -> None:
        """Reads what an error or a warning has found, and what it says to do."""
        name = _called_name(call)
        if name in FUNCTIONS_THAT_TRANSLATE and call.args and module != "language":
            self._read_translated(call, module, function)
        if name == "count_noun":
            self._read_noun(call, module)
        if module == "settings" and name == "_setting":
            self._read_help(call, module, function)
        if name == "Choice":
            self._read_choice(call, module, function)
        if module.startswith("cli."):
            self._read_help(call, module, function)
        if name in POSITION_AND_HEADING_OF_ACTION:
            self._read_action(call, module, function)
        if not self._has_heading(call) and name not in ERRORS_WITHOUT_SETTING:
            return
        self._read_heading(call, module, function)
        shift = 1 if name in ERRORS_WITHOUT_SETTING else 0
        found = _argument(call, POSITION_OF_FOUND - shift, "found")
        if found is not None:
            for text in self._texts(found, module, function, MAX_DEPTH - DEPTH_OF_FOUND):
                self._add_if_sentence(text, module)
        do = _argument(call, POSITION_OF_DO - shift, "do")
        if do is not None:
            texts = list(self._texts(do, module, function))
            for text in texts:
                self._add_if_sentence(text, module)
            if not texts:
                place = f"{module}:{ast.unparse(do)}"
                self.messages.advice_not_found.append(place)

    def _read_heading(self, call: ast.Call, module: str, function: FunctionDef | None) -> None:
        """Reads the first line of an error or a warning: what was set."""
        if _called_name(call) in ERRORS_WITHOUT_SETTING:
            return
        was_set = _argument(call, POSITION_OF_WAS_SET, "was_set")
        if was_set is None:
            return
        for text in self._texts(was_set, module, function, MAX_DEPTH - DEPTH_OF_WAS_SET):
            if is_prose(text):
                self.messages.places.setdefault(HEADING + text, set()).add(module)

    def _read_translated(self, call: ast.Call, module: str, function: FunctionDef | None) -> None:
        """Reads a text that is given to `translate`. It may be a single word."""
        for message in self._texts(call.args[0], module, function, MAX_DEPTH - 1):
            has_letters = re.search("[A-Za-z]", NAME_OF_FIELD.sub("", message))
            if message in NO_MESSAGES:
                self.messages.no_messages_found.add(message)
            elif has_letters:
                self.messages.places.setdefault(message, set()).add(module)

    def _read_action(self, call: ast.Call, module: str, function: FunctionDef | None) -> None:
        """Reads what a call does, which is the first line of the error that it may raise."""
        position, heading = POSITION_AND_HEADING_OF_ACTION[_called_name(call)]
        action = _argument(call, position, "action")
        if action is not None:
            for text in self._texts(action, module, function, MAX_DEPTH - DEPTH_OF_WAS_SET):
                whole = heading.replace("{action}", text)
                self.messages.places.setdefault(HEADING + whole, set()).add(module)

    def _read_choice(self, call: ast.Call, module: str, function: FunctionDef | None) -> None:
        """Reads a line of the summary that is printed at the start: name, value and reason."""
        for argument in call.args:
            for text in self._texts(argument, module, function, MAX_DEPTH - DEPTH_OF_FOUND):
                self._add_if_sentence(text, module)

    def _read_help(self, call: ast.Call, module: str, function: FunctionDef | None) -> None:
        """Reads the help of a command or an option."""
        for keyword in call.keywords:
            if keyword.arg in HELP_ARGUMENTS:
                for text in self._texts(keyword.value, module, function):
                    self._add_if_sentence(text, module)

    def _read_help_of_commands(self, module: str, tree: ast.Module) -> None:
        """Reads the docstrings of commands, whose paragraphs are their help."""
        for node in ast.walk(tree):
            if not isinstance(node, FunctionDef) or not node.decorator_list:
                continue
            decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
            is_command = any(re.match(r"[\w.]*\b(command|group)\b", text) for text in decorators)
            docstring = ast.get_docstring(node)
            if is_command and docstring is not None:
                for paragraph in re.split(r"\n\s*\n", docstring):
                    self.messages.add(escape(" ".join(paragraph.split())), module)

    def _read_reasons(self, module: str, tree: ast.Module) -> None:
        """Reads the facts of strategies that are parts of errors: `why_ranks_differ = "..."`."""
        for node in ast.walk(tree):
            if isinstance(node, ast.keyword):
                name = node.arg or ""
            elif isinstance(node, ast.AnnAssign):
                name = ast.unparse(node.target)
            else:
                continue
            if name.startswith("why_") and isinstance(node.value, ast.Constant):
                self._add_if_sentence(str(node.value.value), module)

    def _read_noun(self, call: ast.Call, module: str) -> None:
        """Reads the noun of `count_noun`, in both numbers."""
        noun = call.args[1]
        if isinstance(noun, ast.Constant) and isinstance(noun.value, str):
            plural = f"{noun.value}es" if noun.value.endswith("s") else f"{noun.value}s"
            for form in (noun.value, plural):
                message = f"{{number}} {form}"
                self.messages.places.setdefault(message, set()).add(module)

    def _texts(
        self,
        node: ast.expr,
        module: str,
        function: FunctionDef | None,
        depth: int = 0,
        *,
        is_field: bool = False,
    ) -> Iterator[str]:
        """Yields the messages that an expression may stand for.

        Names are followed to what is assigned to them, parameters to the calls of their function,
        calls to what their function returns.

        Args:
            node: the expression.
            module: the name of its module.
            function: the function that it is in, if any.
            depth: how many names and calls were followed so far.
            is_field: True for the value of a field of a text.
        """
        if depth > MAX_DEPTH:
            return
        yield from messages_of(node)
        is_text_with_fields = isinstance(node, ast.JoinedStr | ast.BinOp)
        for inner in _alternatives(node):
            yield from self._texts(
                inner, module, function, depth, is_field=is_field or is_text_with_fields
            )
        if isinstance(node, ast.Name):
            values = self._values_of_name(node.id, module, function, is_field=is_field)
            for where, owner, value in values:
                yield from self._texts(value, where, owner, depth + 1, is_field=is_field)
        elif isinstance(node, ast.Call):
            yield from self._texts_of_call(node, module, function, depth)

    def _texts_of_call(
        self, call: ast.Call, module: str, function: FunctionDef | None, depth: int
    ) -> Iterator[str]:
        """Yields what a call returns: of methods of texts and dicts the texts in them."""
        name = _called_name(call)
        if isinstance(call.func, ast.Attribute) and name == "format":
            for text in self._texts(call.func.value, module, function, depth):
                yield text.replace("{{}}", "{value}")
        elif isinstance(call.func, ast.Attribute) and name == "join":
            for argument in call.args:
                yield from self._texts(argument, module, function, depth)
        elif isinstance(call.func, ast.Attribute) and name in ("get", "items", "values"):
            yield from self._texts(call.func.value, module, function, depth)
        else:
            for where, called in self._functions_called(name, module):
                for node in ast.walk(called):
                    if isinstance(node, ast.Return) and node.value is not None:
                        yield from self._texts(node.value, where, called, depth + 1)

    def _functions_called(self, name: str, module: str) -> Iterator[tuple[str, FunctionDef]]:
        """Yields the functions of a name in a module, and those that it imports."""
        for where, called in self._functions.get(name, ()):
            if where == module or where in self._modules[module].imports:
                yield where, called

    def _values_of_name(
        self,
        name: str,
        module: str,
        function: FunctionDef | None,
        *,
        is_field: bool = False,
    ) -> Iterator[tuple[str, FunctionDef | None, ast.expr]]:
        """Yields what may be behind a name, with the module and the function of each.

        The parameters of a function are followed to its calls, unless they are fields of a text,
        which are seldom texts themselves.
        """
        if function is not None:
            assigned = self._assigned(name, function)
            for value in assigned:
                yield module, function, value
            parameters = [each.arg for each in (*function.args.args, *function.args.kwonlyargs)]
            if name in parameters and not is_field:
                yield from self._arguments(name, parameters, function)
            if assigned or name in parameters:
                return
        for value in self._assigned(name, self._modules[module].tree):
            yield module, None, value
        for source in sorted(self._modules[module].imports):
            for value in self._assigned(name, self._modules[source].tree):
                yield source, None, value

    def _arguments(
        self, parameter: str, parameters: Sequence[str], function: FunctionDef
    ) -> Iterator[tuple[str, FunctionDef | None, ast.expr]]:
        """Yields what is given for a parameter, in all calls of a function of that name."""
        position = parameters.index(parameter)
        if parameters[0] in ("self", "cls"):
            position -= 1
        if position < 0:
            return
        for module, call in self._calls.get(function.name, ()):
            value = _argument(call, position, parameter)
            if value is not None:
                yield module, self._function_of_call[id(call)], value

    def _assigned(self, name: str, scope: FunctionDef | ast.Module) -> list[ast.expr]:
        """Returns what is assigned to a name in a function or a module."""
        if id(scope) not in self._assigned_in:
            self._assigned_in[id(scope)] = _values_assigned_in(scope)
        return self._assigned_in[id(scope)].get(name, [])


def _alternatives(node: ast.expr) -> list[ast.expr]:
    """Returns the expressions of which a value is one, or of which it consists."""
    if isinstance(node, ast.IfExp):
        return [node.body, node.orelse]
    if isinstance(node, ast.BoolOp):
        return node.values
    if isinstance(node, ast.Tuple | ast.List):
        return node.elts
    if isinstance(node, ast.Dict):
        return node.values
    if isinstance(node, ast.Subscript | ast.Starred | ast.FormattedValue):
        return [node.value]
    if isinstance(node, ast.JoinedStr):
        return [part for part in node.values if isinstance(part, ast.FormattedValue)]
    if isinstance(node, ast.BinOp):
        return [part for part in (node.left, node.right) if not isinstance(part, ast.Constant)]
    return []


def _literal_parts(node: ast.expr) -> Iterator[ast.expr]:
    """Yields the texts that an f-string or a sum consists of, which are no messages themselves."""
    if isinstance(node, ast.JoinedStr):
        for part in node.values:
            if isinstance(part, ast.Constant):
                yield part
            elif isinstance(part, ast.FormattedValue) and part.format_spec is not None:
                yield part.format_spec
                yield from _literal_parts(part.format_spec)
    elif isinstance(node, ast.BinOp):
        for part in (node.left, node.right):
            if isinstance(part, ast.Constant | ast.JoinedStr | ast.BinOp):
                yield part
                yield from _literal_parts(part)


def _values_assigned_in(scope: FunctionDef | ast.Module) -> dict[str, list[ast.expr]]:
    """Returns what is assigned to each name, or appended to it, in a function or a module."""
    values: dict[str, list[ast.expr]] = {}
    nodes = ast.walk(scope) if isinstance(scope, FunctionDef) else iter(scope.body)
    for node in nodes:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                for name in _names_in(target):
                    values.setdefault(name, []).append(node.value)
        elif isinstance(node, ast.For):
            for name in _names_in(node.target):
                values.setdefault(name, []).append(node.iter)
        elif isinstance(node, ast.AnnAssign | ast.AugAssign) and node.value is not None:
            if isinstance(node.target, ast.Name):
                values.setdefault(node.target.id, []).append(node.value)
                if isinstance(node, ast.AugAssign):
                    whole = ast.BinOp(node.target, ast.Add(), node.value)
                    values[node.target.id].append(whole)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
            if node.func.attr == "append" and isinstance(node.func.value, ast.Name):
                values.setdefault(node.func.value.id, []).append(node.args[0])
    return values


def _names_in(target: ast.expr) -> list[str]:
    """Returns the names to which an assignment or a loop gives values."""
    return [node.id for node in ast.walk(target) if isinstance(node, ast.Name)]


def _calls_by_function(tree: ast.Module) -> Iterator[tuple[FunctionDef | None, ast.Call]]:
    """Yields all calls, each with the innermost function that it is in."""

    def visit(
        node: ast.AST, function: FunctionDef | None
    ) -> Iterator[tuple[FunctionDef | None, ast.Call]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Call):
                yield function, child
            inside = child if isinstance(child, FunctionDef) else function
            yield from visit(child, inside)

    yield from visit(tree, None)


def _called_name(call: ast.Call) -> str:
    if isinstance(call.func, ast.Name):
        return call.func.id
    return call.func.attr if isinstance(call.func, ast.Attribute) else ""


def _expressions_in(node: ast.expr) -> Iterator[ast.expr]:
    """Yields an expression and all that it consists of."""
    for part in ast.walk(node):
        if isinstance(part, ast.expr):
            yield part


def _begins_with_semicolon(node: ast.expr) -> bool:
    """True for a text such as `f"; {number} more"`."""
    if isinstance(node, ast.JoinedStr) and node.values:
        node = node.values[0]
    return isinstance(node, ast.Constant) and str(node.value).startswith("; ")


def _is_of_re(call: ast.Call) -> bool:
    """True for a call such as `re.compile(...)`, whose texts are patterns."""
    owner = call.func.value if isinstance(call.func, ast.Attribute) else None
    return isinstance(owner, ast.Name) and owner.id == "re"


def _argument(call: ast.Call, position: int, name: str) -> ast.expr | None:
    """Returns an argument of a call, by its position or its name."""
    for keyword in call.keywords:
        if keyword.arg == name:
            return keyword.value
    return call.args[position] if len(call.args) > position else None


def _error_classes(tree: ast.Module) -> set[str]:
    """Returns the names of all errors that are told what was set, what was found and what to do."""
    names = {"LockstepError"}
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            bases = {base.id for base in node.bases if isinstance(base, ast.Name)}
            if bases & names:
                names.add(node.name)
    return names


def messages_of_findings() -> Iterator[str]:
    """Yields the messages of `catalogue.toml`: headings, titles, and paragraphs of the texts."""
    texts = tomllib.loads(CATALOGUE_OF_FINDINGS.read_text(encoding="utf-8"))
    for heading in texts["groups"].values():
        yield escape(heading)
    for paragraph in page_head_to_translate():
        yield escape(paragraph)
    for entry in texts["entries"]:
        yield escape(entry["title"])
        for text in (entry["cause"], entry["cure"]):
            for paragraph in paragraphs_to_translate(text.strip("\n")):
                yield escape(paragraph)


def extract() -> Messages:
    """Returns the messages of the whole source."""
    return Reader(house.read_house()).read()


# --- Files of gettext


def write_po(messages: Messages, translations: Mapping[str, str]) -> str:
    """Returns the text of the .po file: all messages in the order of their texts.

    Which modules have a message is left out, so that a function that is moved changes nothing here.
    """
    header = (
        "Content-Type: text/plain; charset=UTF-8\n",
        "Content-Transfer-Encoding: 8bit\n",
        "Language: zh_CN\n",
    )
    blocks = ['msgid ""\nmsgstr ""\n' + "\n".join(_quote(line) for line in header)]

    def order(message: str) -> tuple[str, bool]:
        return message.removeprefix(HEADING), message.startswith(HEADING)

    for message in sorted(messages.places, key=order):
        lines = []
        if NAME_OF_FIELD.search(message):
            lines.append("#, python-brace-format")
        if message.startswith(HEADING):
            lines.append('msgctxt "heading"')
        lines.append(f"msgid {_quote(message.removeprefix(HEADING))}")
        lines.append(f"msgstr {_quote(translations.get(message, ''))}")
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks) + "\n"


def translations_of_renamed(
    messages: Iterable[str], translations: Mapping[str, str]
) -> dict[str, str]:
    """Returns translations of messages whose fields alone have other names than before.

    A variable of the source that is renamed renames a field: "{check} failed" is "{name} failed",
    whose translation is that of the former message, with the field's new name.
    """
    former_message_of: dict[str, str] = {}  # by the message without the names of its fields
    for message, translation in translations.items():
        if translation:
            former_message_of[NAME_OF_FIELD.sub("{}", message)] = message

    found: dict[str, str] = {}
    for message in messages:
        former_message = former_message_of.get(NAME_OF_FIELD.sub("{}", message))
        if former_message is None or translations.get(message):
            continue
        names = zip(fields_of(former_message), fields_of(message), strict=True)
        new_names = {former: f"{{{name}}}" for former, name in names}
        found[message] = translations[former_message].format(**new_names)
    return found


def _quote(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


def main() -> None:
    """Extracts and merges."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    messages = extract()
    translations = read_po(PO_FILE.read_text(encoding="utf-8"))
    translations |= translations_of_renamed(messages.places, translations)
    PO_FILE.write_text(write_po(messages, translations), encoding="utf-8")
    missing = [message for message in messages.places if not translations.get(message)]
    stale = [message for message in translations if message not in messages.places]
    print(f"{len(messages.places)} messages; {len(stale)} are gone; to translate: {len(missing)}")
    for message in missing[:20]:
        modules = ", ".join(sorted(messages.places[message]))
        print(f"  {message}  (in {modules})")


if __name__ == "__main__":
    main()
