"""Stacked bars as an SVG picture, in groups; nothing but text is needed to write one."""

from dataclasses import dataclass
from html import escape
from math import ceil, log10
from pathlib import Path

COLOURS = ("#4477aa", "#66ccee", "#aa3377", "#ee7733", "#ccbb44", "#228833")
"""Told apart with any eyes (Paul Tol, "bright"), on white and on black."""
STYLE = """
  text { font: 13px system-ui, "Segoe UI", Helvetica, Arial, sans-serif; fill: #24292f }
  .page { fill: #ffffff } .line { stroke: #d0d7de }
  .strong { font-weight: 600; paint-order: stroke; stroke: #ffffff; stroke-width: 3px }
  .faint { fill: #57606a; font-size: 12px }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 } .faint { fill: #9198a1 }
    .page { fill: #0d1117 } .line { stroke: #30363d } .strong { stroke: #0d1117 }
  }
"""
TOP, HEIGHT, LEFT, WIDE, GAP, BETWEEN = 76, 260, 56, 52, 10, 44
MIB = 2**20


@dataclass(frozen=True)
class Bar:
    """One device."""

    group: str
    under_group: str
    label: str
    parts: dict[str, int]
    """Bytes by what they are, in the order in which they are stacked."""


def write_svg(path: Path, bars: list[Bar]) -> None:
    """Writes the picture."""
    groups = list(dict.fromkeys(bar.group for bar in bars))
    highest = max(sum(bar.parts.values()) for bar in bars) / MIB
    step = nice(highest / 5)
    top = ceil(highest / step) * step
    width = LEFT + len(bars) * (WIDE + GAP) + len(groups) * BETWEEN
    drawn = [text(LEFT, 24, "Memory of each device, MiB", "strong", "start")]
    drawn += legend(list(bars[0].parts))
    for line in range(round(top / step) + 1):
        y = TOP + HEIGHT * (1 - line * step / top)
        drawn.append(f'<path class="line" d="M{LEFT} {y:.1f}H{width - 16}"/>')
        drawn.append(text(LEFT - 8, y + 4, f"{line * step:g}", "faint", "end"))
    x = LEFT + BETWEEN / 2
    for group in groups:
        members = [bar for bar in bars if bar.group == group]
        middle = x + (len(members) * (WIDE + GAP) - GAP) / 2
        drawn.append(text(middle, TOP + HEIGHT + 42, group, "strong"))
        drawn.append(text(middle, TOP + HEIGHT + 60, members[0].under_group, "faint"))
        for bar in members:
            drawn += stack(bar, x, top)
            x += WIDE + GAP
        x += BETWEEN
    height = TOP + HEIGHT + 76
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"'
    head += f' width="{width}" height="{height}" role="img" aria-label="Memory of each device">'
    page = f'<rect class="page" width="{width}" height="{height}"/>'
    path.write_text("\n".join([head, f"<style>{STYLE}</style>", page, *drawn, "</svg>\n"]))


def stack(bar: Bar, x: float, top: float) -> list[str]:
    """One bar from the ground up, its sum above it."""
    drawn = []
    y = float(TOP + HEIGHT)
    for (name, size), colour in zip(bar.parts.items(), COLOURS, strict=True):
        height = HEIGHT * size / MIB / top
        y -= height
        rect = f'<rect x="{x:.1f}" y="{y:.1f}" width="{WIDE}" height="{height:.1f}"'
        drawn.append(f'{rect} fill="{colour}"><title>{name}: {size / MIB:.1f} MiB</title></rect>')
    total = sum(bar.parts.values()) / MIB
    drawn.append(text(x + WIDE / 2, y - 6, f"{total:.1f}", "strong"))
    drawn.append(text(x + WIDE / 2, TOP + HEIGHT + 20, bar.label, "faint"))
    return drawn


def legend(names: list[str]) -> list[str]:
    """A square and a word for each colour, in one line."""
    drawn = []
    x = float(LEFT)
    for name, colour in zip(names, COLOURS, strict=True):
        drawn.append(f'<rect x="{x:.1f}" y="39" width="12" height="12" fill="{colour}"/>')
        drawn.append(text(x + 17, 50, name, "faint", "start"))
        x += 31 + 6.4 * len(name)  # about as wide as the word is
    return drawn


def text(x: float, y: float, words: str, kind: str, anchor: str = "middle") -> str:
    """A line of text."""
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text class="{kind}" {place}>{escape(words)}</text>'


def nice(step: float) -> float:
    """The next of 1, 2, 5, 10, 20, ... above."""
    unit = 10.0 ** int(log10(step)) if step >= 1 else 10.0 ** (int(log10(step)) - 1)
    return next(unit * n for n in (1, 2, 5, 10) if unit * n >= step)
