"""The memory of every device of a run, and how it is printed as a table.

A row of the table is a kind of memory, and a column is a device. With many devices, the table has
several blocks of columns, one below the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lockstep.columns import join_label, pad, width_of
from lockstep.language import translate

COLUMNS_PER_BLOCK = 8
LABEL_WIDTH = 18
COLUMN_WIDTH = 12
ROWS = (
    ("samples at a time", "samples"),
    ("parameters", "parameters"),
    ("parameter copies", "copies"),
    ("a block whole", "gathered"),
    ("buffers", "buffers"),
    ("gradients", "gradients"),
    ("optimizer state", "state"),
    ("activations", "activations"),
    ("after the model", "loss"),
    ("all of these", "counted"),
    ("measured peak", "peak"),
    ("a step", "step_s"),
)
"""The label of each row, and the attribute of `DeviceMemory` that it shows."""
UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
REPLICA_PREFIX = "replica "
"""How the name of a device begins that stands for a replica sharing the memory of its process."""
_PEAK_ON_CPU = "tensors alive at one time in a step; what kernels take for themselves is not seen"
_PEAK_ON_CUDA = "torch.cuda.max_memory_allocated of a step; the CUDA context is not in it"
_NOTE_ON_REPLICAS = (
    "replicas share the memory of their process; each is shown as on a device of its own, and with "
    "the first of them the peak of all"
)
_NOTE_ON_STAGES = (
    "activations of one micro-batch; a stage holds those of several, which the peak shows"
)


@dataclass(frozen=True, kw_only=True)
class DeviceMemory:
    """What one device holds, in bytes, and the time of a step. None for what is not known."""

    rank: int
    device: str
    samples: int | None = None
    """Samples that are computed at a time. Known if steps were measured."""
    parameters: int = 0
    copies: int = 0
    """Parameters that are gathered or copied for a forward pass and kept for its backward pass."""
    gathered: int = 0
    """What FSDP needs for a moment for the largest of its units: the parameters, unless they are
    among `copies`, their gradients, and the buffer in which these are sent."""
    buffers: int = 0
    gradients: int = 0
    """The gradients of all trained parameters."""
    state: int | None = 0
    """The state of the optimizer once it has stepped."""
    activations: int | None = None
    """What the model's forward pass keeps for its backward pass, including the batch."""
    loss: int | None = None
    """What is kept for the backward pass after the model: by the loss, or to join outputs."""
    peak: int | None = None
    """The measured peak. If replicas share a device, the first of them has that of all."""
    step_s: float | None = None

    @property
    def counted(self) -> int:
        """The sum of all that is counted, as if it were alive at the same time."""
        always_known = self.parameters + self.copies + self.gathered + self.buffers + self.gradients
        return always_known + (self.state or 0) + (self.activations or 0) + (self.loss or 0)


@dataclass(frozen=True, kw_only=True)
class Memory:
    """The memory of every device of a run; `str()` returns it as a table."""

    strategy: str
    devices: tuple[DeviceMemory, ...]
    stages: bool = False
    """True if ranks hold stages of the model, which compute several micro-batches at a time."""

    def __str__(self) -> str:
        unit_bytes, unit_name = _choose_unit(self.devices)
        lines = [translate(f"memory of each device in {unit_name}, strategy {self.strategy}")]
        for begin in range(0, len(self.devices), COLUMNS_PER_BLOCK):
            lines += self._block(self.devices[begin : begin + COLUMNS_PER_BLOCK], unit_bytes)
        if any(device.peak is not None for device in self.devices):
            any_cuda = any(device.device.startswith("cuda") for device in self.devices)
            lines.append(_format_note("measured:", _PEAK_ON_CUDA if any_cuda else _PEAK_ON_CPU))
        if any(device.device.startswith(REPLICA_PREFIX) for device in self.devices):
            lines.append(_format_note("counted:", _NOTE_ON_REPLICAS))
        if self.stages and any(device.activations for device in self.devices):
            lines.append(_format_note("counted:", _NOTE_ON_STAGES))
        return "\n".join(lines)

    def _block(self, devices: tuple[DeviceMemory, ...], unit_bytes: int) -> list[str]:
        """Returns the lines for some devices: two with their names, then a line for each row.

        Args:
            devices: the columns of this block.
            unit_bytes: the bytes of the unit of all figures.
        """
        lines = [
            _format_line("", [f"rank {device.rank}" for device in devices]),
            _format_line("", [translate(device.device) for device in devices]),
        ]
        for label, attribute in ROWS:
            values = [getattr(device, attribute) for device in devices]
            if self._shows_row(attribute, values):
                cells = [_format_cell(attribute, value, unit_bytes) for value in values]
                lines.append(_format_line(label, cells))
        return lines

    def _shows_row(self, attribute: str, values_in_block: Sequence[int | None]) -> bool:
        """Returns False for a row to leave out, such as "copies" on a single device.

        These are the rows without any figure in the whole table. But where the optimizer's state is
        not known (None), its row says so with "?".
        """
        has_figures = any(getattr(device, attribute) for device in self.devices)
        state_is_unknown = attribute == "state" and None in values_in_block
        return has_figures or state_is_unknown


def _choose_unit(devices: Iterable[DeviceMemory]) -> tuple[int, str]:
    """Returns the bytes and the name of the unit in which the figures of all devices are shown.

    It is the largest unit in which the largest figure is at least 10; if there is none, KiB.
    """
    largest_bytes = 0
    for device in devices:
        peak_bytes = device.peak or 0
        largest_bytes = max(largest_bytes, device.counted, peak_bytes)
    for unit_bytes, unit_name in UNITS:
        if largest_bytes >= 10 * unit_bytes:
            return unit_bytes, unit_name
    return UNITS[-1]


def _format_cell(attribute: str, value: float | None, unit_bytes: int) -> str:
    """Returns a cell of the table as text.

    Args:
        attribute: the attribute of `DeviceMemory` that the row of the cell shows.
        value: bytes, unless it is a number of samples or a time in seconds; None: not known.
        unit_bytes: the bytes of the unit in which bytes are shown.
    """
    if value is None:
        return "?"
    if attribute == "samples":
        return str(value)
    if attribute == "step_s":
        return f"{value * 1e3:,.1f} ms"
    return f"{value / unit_bytes:,.1f}"


def _format_line(label: str, cells: Iterable[str]) -> str:
    """Returns a line of the table: the label in the user's language, and the cells as they are."""
    line = "  " + pad(translate(label), LABEL_WIDTH)
    for cell in cells:
        line += " " * (COLUMN_WIDTH - width_of(cell)) + cell
    return line


def _format_note(label: str, note: str) -> str:
    """Returns a line below the table in the user's language: "  measured: tensors alive ..."."""
    return "  " + join_label(translate(label), translate(note))
