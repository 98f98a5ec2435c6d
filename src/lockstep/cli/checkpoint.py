"""`lockstep checkpoint`: looks at, compares, converts and repairs checkpoints and weights."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lockstep.errors import LockstepError, SettingError
from lockstep.wording import replace_unprintable

if TYPE_CHECKING:
    from lockstep.checkpoint.contents import Contents, Pair
    from lockstep.checkpoint.health import Inspection
    from lockstep.checkpoint.sharding import LazyTensor


_PATH = click.Path(path_type=Path)
_NAME = click.option("--name", metavar="NAME", help="One model, where there are several.")
_TRUST = click.option("--trust", is_flag=True, help="Read a pickled model, which runs code of it.")
_UNITS = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3))


@click.group(name="checkpoint", short_help="Looks at, converts, repairs checkpoints.")
def command() -> None:
    """Looks at, compares, converts and repairs checkpoints and weights.

    A PATH is a safetensors file, a file of torch.save, the index of several of either, a folder of
    torch.distributed.checkpoint, a checkpoint of Lockstep, or the folder of a run, which stands for
    its latest complete checkpoint.
    """


@command.command("inspect")
@click.argument("path", type=_PATH)
@_NAME
@_TRUST
@click.option(
    "--sort", type=click.Choice(["size", "file"]), default="size", help="The largest, or as stored."
)
@click.option(
    "--limit",
    type=click.IntRange(0),
    default=40,
    metavar="ROWS",
    help="Most rows; 0: all.",
)
@click.option("--json", "as_json", is_flag=True, help="Everything, as one JSON object.")
@click.pass_context
def inspect_command(
    ctx: click.Context, /, path: Path, sort: str, limit: int, as_json: bool, **reading: Any
) -> None:
    """Shows what is in PATH, and whether it is whole.

    Ends with 0, or with 1 where something is broken.
    """
    from lockstep.checkpoint.health import inspect

    found = inspect(path, **reading)
    if as_json:
        click.echo(json.dumps(_as_json(found), indent=2))
    else:
        _show_health(found)
        if found.contents is not None:
            _show_contents(found.contents, sort, limit)
    ctx.exit(0 if found.sound else 1)


@command.command("diff")
@click.argument("a", type=_PATH)
@click.argument("b", type=_PATH)
@_NAME
@_TRUST
@click.option("--match", is_flag=True, help="Pair names that differ in wrappers' prefixes alone.")
@click.option("--training", is_flag=True, help="Compare the optimizer's tensors and the like too.")
@click.option("--atol", type=click.FloatRange(min=0), default=0.0, metavar="X", help="See --rtol.")
@click.option(
    "--rtol",
    type=click.FloatRange(min=0),
    default=0.0,
    metavar="Y",
    help="Values are equal where |a - b| <= X + Y * |b|; with 0 only if they are the same.",
)
@click.option("--all", "show_all", is_flag=True, help="Show the tensors that are equal too.")
@click.pass_context
def diff_command(
    ctx: click.Context, /, a: Path, b: Path, match: bool, show_all: bool, **options: Any
) -> None:
    """Says which tensors of A and B differ, and by how much.

    Ends with 0 where they are equal, 1 where they differ, 2 where they cannot be compared.
    """
    from lockstep.checkpoint.contents import compare, open_contents, renamed

    try:
        tolerance = {name: options.pop(name) for name in ("atol", "rtol")}
        sides = [open_contents(path, everything=True, **options) for path in (a, b)]
        first, second = (_tensors(side) for side in sides)
        other, changes = renamed(first, second)
        second = other if match else second
        if changes:
            pairing = "paired after this" if match else "with --match they would pair after this"
            _say(f"names in {b}: {pairing}: {changes}")
        pairs = list(compare(first, second, **tolerance))
        extra = _differing_extra(*(side.extra for side in sides))
    except LockstepError as error:
        error.exit_code = 2  # 1 says that they differ
        raise
    shown = [pair for pair in pairs if pair.differs or show_all]
    if shown:
        head = ("name", "what", "a", "b", "values", "largest |a-b|", "relative")
        _table(head, [_difference(pair) for pair in shown], right=(4, 5, 6))
    for key in extra:
        _say(f"{key}: differs, and is no tensor")
    different = sum(pair.differs for pair in pairs)
    _say(f"{different} of {len(pairs)} tensors differ")
    ctx.exit(1 if different or extra else 0)


@command.command("convert")
@click.argument("source", metavar="IN", type=_PATH)
@click.argument("out", type=_PATH)
@_NAME
@_TRUST
@click.option(
    "--dtype",
    type=click.Choice(["fp32", "bf16", "fp16"]),
    help="Of the tensors with fractions.  [default: as they are]",
)
@click.option("--prefix", metavar="TEXT", help="Put before every name.")
@click.option("--remove-prefix", multiple=True, metavar="TEXT", help="Cut from names; repeatable.")
@click.option("--shard-size", default="5GB", metavar="SIZE", help="Of a safetensors file, at most.")
@click.option("--overwrite", is_flag=True, help="Take the place of what OUT is now.")
def convert_command(
    source: Path,
    out: Path,
    dtype: str | None,
    prefix: str | None,
    remove_prefix: tuple[str, ...],
    shard_size: str,
    overwrite: bool,
    **reading: Any,
) -> None:
    """Writes the weights in IN to OUT, in full or not at all.

    OUT ends in .safetensors, or in .pt, .pth, .bin or .ckpt for what torch.load reads.
    """
    from lockstep.checkpoint.contents import DTYPES, convert, open_contents
    from lockstep.checkpoint.formats.safetensors import index_of, shard_bytes

    size = shard_bytes(shard_size)
    there = next((path for path in (out, index_of(out)) if path.exists()), None)
    if there is not None and not overwrite:
        raise SettingError(f"the output {out}", f"{there} is there already", "add --overwrite")
    contents = open_contents(source, **reading)
    done = convert(
        contents,
        out,
        dtype=None if dtype is None else DTYPES[dtype],
        remove=remove_prefix,
        add=prefix or "",
        shard_size=size,
    )
    what = contents.facts.get("read", "")
    _say(f"read    {contents.source.path}: {contents.source.kind}{what and f', {what}'}")
    changes = f"; {done.renamed} renamed" if done.renamed else ""
    changes += f"; {done.cast} converted to {dtype}" if done.cast else ""
    _say(f"tensors {done.tensors}{changes}")
    for file in done.files:
        _say(f"wrote   {file} ({_size(file.stat().st_size)})")


@command.command("repair", short_help="Puts the folder of a run in order.")
@click.argument("folder", type=_PATH)
@click.option("--yes", is_flag=True, help="Do it. Without, it is only said what would be done.")
@click.pass_context
def repair_command(ctx: click.Context, folder: Path, yes: bool) -> None:
    """Says what is wrong in the FOLDER of a run or a checkpoint, and puts it in order with --yes.

    Ends with 0 where nothing is wrong any more. Complete checkpoints are not touched.
    """
    from lockstep.checkpoint.health import carry_out, plan_repairs

    plan = plan_repairs(folder)
    for repair in plan:
        _say(f"{repair.path}\n  found: {repair.why}\n  do:    {_REPAIRS[repair.what]}")
    if not plan:
        _say(f"{folder}: nothing is wrong")
        return
    todo = [repair for repair in plan if repair.what != "leave"]
    if yes:
        carry_out(todo)
        _say(f"{len(todo)} done, {len(plan) - len(todo)} left as they are")
    elif todo:
        _say("nothing was changed; add --yes to do it")
    ctx.exit(0 if yes and len(todo) == len(plan) else 1)


_REPAIRS = {
    "remove": "remove it",
    "finish": "rename it into place",
    "rebuild": "write the manifest's list of files anew",
    "leave": "leave it",
}


def _as_json(found: Inspection) -> dict[str, Any]:
    from lockstep.checkpoint.contents import totals

    contents = found.contents
    return {
        "path": str(found.path),
        "sound": found.sound,
        "checkpoints": [
            {"path": str(health.path), "problems": list(health.problems)}
            for health in found.checkpoints
        ],
        "leftovers": [str(path) for path in found.leftovers],
        "contents": contents
        and {
            "path": str(contents.source.path),
            "kind": contents.source.kind,
            "facts": dict(contents.facts),
            "files": dict(contents.files),
            "modules": list(contents.source.modules),
            "tensors": _tensor_rows(contents.tensors),
            "training": _tensor_rows(contents.training),
            "extra": list(contents.extra),
            "totals": totals(contents.tensors.values()),
        },
    }


def _tensor_rows(tensors: Mapping[str, LazyTensor]) -> list[dict[str, Any]]:
    from lockstep.checkpoint.contents import tied_to
    from lockstep.checkpoint.sharding import dtype_name

    ties = tied_to(tensors)
    return [
        {
            "name": name,
            "shape": list(tensor.shape),
            "dtype": dtype_name(tensor.dtype),
            "bytes": tensor.nbytes,
            "tied_to": ties.get(name),
        }
        for name, tensor in tensors.items()
    ]


def _show_health(found: Inspection) -> None:
    for health in found.checkpoints:
        metric = (health.manifest or {}).get("metric")
        more = f", metric {metric:g}" if isinstance(metric, float) else ""
        more += ", the best" if health.path == found.best else ""
        _say(f"{health.path}: {'; '.join(health.problems) or f'complete{more}'}")
    for path in found.leftovers:
        _say(f"{path}: a save that was stopped, or goes on")
    if found.contents is None:
        _say("no complete checkpoint is there; lockstep checkpoint repair says what can be done")
    elif found.checkpoints:
        _say()


def _show_contents(contents: Contents, sort: str, limit: int) -> None:
    from lockstep.checkpoint.contents import totals

    _say(f"{contents.source.path}: {contents.source.kind}")
    for key, value in contents.facts.items():
        _say(f"  {key.replace('_', ' '):12} {value}")
    if len(contents.source.modules) > 1:
        _say(f"  {'models':12} {', '.join(contents.source.modules)}")
    for name, length in contents.files.items():
        _say(f"  {'file':12} {name}, {_size(length)}")
    shown = _tensor_rows(contents.tensors)
    if sort == "size":
        shown.sort(key=itemgetter("bytes"), reverse=True)
    kept = shown[:limit] if limit else shown
    _say()
    rows = []
    for row in kept:
        size = f"is {row['tied_to']}" if row["tied_to"] else _size(row["bytes"])
        rows.append((row["name"], str(row["shape"]), row["dtype"], size))
    _table(("name", "shape", "dtype", "size"), rows, right=(3,))
    if len(kept) < len(shown):
        _say(f"... and {len(shown) - len(kept)} more (--limit 0 shows all)")
    _say()
    parts = {"total": contents.tensors}
    if contents.training:
        parts["besides, of the training"] = contents.training
    for what, tensors in parts.items():
        total = totals(tensors.values())
        kinds = ", ".join(f"{count} {name}" for name, count in total["dtypes"].items())
        _say(
            f"{what}: {total['tensors']} tensors ({kinds or 'none'}), {total['values']:,} "
            f"values, {_size(total['bytes'])}"
        )
    if contents.extra:
        _say(f"no tensors: {', '.join(contents.extra)}")


def _tensors(contents: Contents) -> dict[str, LazyTensor]:
    others = {f"training: {name}": stored for name, stored in contents.training.items()}
    return {**contents.tensors, **others}


def _difference(pair: Pair) -> tuple[str, ...]:
    from lockstep.checkpoint.sharding import dtype_name

    a, b, values = pair.a, pair.b, pair.values
    sides = ["" if t is None else f"{dtype_name(t.dtype)} {list(t.shape)}" for t in (a, b)]
    if a is None or b is None or values is None:
        lacks = "shape" if a and b else f"in {'a' if a else 'b'} alone"
        return (pair.name, lacks, *sides, "", "", "")
    what = ["dtype"] if a.dtype is not b.dtype else []
    what += ["values"] if values.count else []
    if any(values.nans):
        what.append(f"NaN {values.nans[0]}/{values.nans[1]}")
    measures = (
        (f"{values.count}/{a.count}", f"{values.absolute:.3g}", f"{values.relative:.3g}")
        if values.count or values.absolute
        else ("0", "", "")
    )
    return (pair.name, ", ".join(what) or "equal", *sides, *measures)


def _table(
    head: tuple[str, ...], rows: Sequence[tuple[str, ...]], right: tuple[int, ...] = ()
) -> None:
    table = [tuple(map(replace_unprintable, row)) for row in (head, *rows)]
    widths = [max(len(row[i]) for row in table) for i in range(len(head))]
    for row in table:
        cells = [
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        click.echo("  ".join(cells).rstrip())


def _differing_extra(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    from lockstep.checkpoint.contents import same_extra

    both = a.keys() & b.keys()
    return [name for name in {**a, **b} if name not in both or not same_extra(a[name], b[name])]


def _say(text: str = "") -> None:
    click.echo("\n".join(map(replace_unprintable, text.split("\n"))))  # much of it comes from files


def _size(size: float) -> str:
    for unit, base in _UNITS:
        if size >= base:
            return f"{size / base:.1f} {unit}"
    return f"{size:.0f} B"
