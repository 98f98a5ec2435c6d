"""Implements `lockstep checkpoint`: inspects, compares, converts and repairs checkpoints and
weights.

The work is done in `lockstep.checkpoint`; here the results are printed. `Contents` describes what a
checkpoint or a file of weights contains, `Inspection` also says whether it is complete and
undamaged, and a `Pair` is one tensor in two checkpoints that are compared.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lockstep.cli.command_group import SuggestingGroup
from lockstep.columns import pad_label
from lockstep.errors import LockstepError, SettingError
from lockstep.file_paths import check_path_of_this_system
from lockstep.language import translate
from lockstep.wording import replace_unprintable

if TYPE_CHECKING:
    from lockstep.checkpoint.comparison import Pair, ValueDifferences
    from lockstep.checkpoint.contents import Contents
    from lockstep.checkpoint.health import Inspection
    from lockstep.checkpoint.lazy_tensor import LazyTensor


PATH_TYPE = click.Path(path_type=Path)
name_option = click.option("--name", metavar="NAME", help="Which model to use if PATH has several.")
trust_option = click.option(
    "--trust", is_flag=True, help="Read a pickled model, which runs code that is in it."
)
LABEL_WIDTH = 12  # columns
SIZE_UNITS = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3))
REPAIR_TEXTS = {
    "remove": "remove it",
    "finish": "rename it into place",
    "rebuild": "write the manifest's list of files anew",
    "leave": "leave it",
}


@click.group(
    cls=SuggestingGroup,
    name="checkpoint",
    short_help="Inspects, compares, converts and repairs checkpoints.",
)
def command() -> None:
    """Inspects, compares, converts and repairs checkpoints and weights.

    A PATH is a safetensors file, a file of torch.save, the index of several of either, a folder of
    torch.distributed.checkpoint, a checkpoint of Lockstep, or the folder of a run, which stands for
    its latest complete checkpoint.
    """


@command.command("inspect", short_help="Shows what PATH contains, and whether it is intact.")
@click.argument("path", type=PATH_TYPE)
@name_option
@trust_option
@click.option(
    "--sort",
    type=click.Choice(["size", "file"]),
    default="size",
    help="Show the largest tensors first, or in file order.",
)
@click.option(
    "--limit",
    type=click.IntRange(0),
    default=40,
    metavar="ROWS",
    help="Show at most this many rows; 0: all.",
)
@click.option("--json", "as_json", is_flag=True, help="Print everything as one JSON object.")
@click.pass_context
def inspect_command(
    ctx: click.Context, /, path: Path, sort: str, limit: int, as_json: bool, **reading: Any
) -> None:
    """Shows what PATH contains, and whether it is complete and undamaged.

    Ends with 0, or with 1 if something is broken.
    """
    from lockstep.checkpoint.health import inspect

    # `reading` contains the values of --name and --trust.
    inspection = inspect(path, **reading)
    if as_json:
        click.echo(json.dumps(_inspection_as_json(inspection), indent=2))
    else:
        _print_health(inspection)
        if inspection.contents is not None:
            _print_contents(inspection.contents, sort, limit)

    ctx.exit(0 if inspection.sound else 1)


@command.command("diff")
@click.argument("a", type=PATH_TYPE)
@click.argument("b", type=PATH_TYPE)
@name_option
@trust_option
@click.option(
    "--match",
    is_flag=True,
    help="Match names that differ only in a wrapper's prefix, such as module.",
)
@click.option(
    "--training",
    is_flag=True,
    help="Also compare the optimizer and the rest of the training state.",
)
@click.option("--atol", type=click.FloatRange(min=0), default=0.0, metavar="X", help="See --rtol.")
@click.option(
    "--rtol",
    type=click.FloatRange(min=0),
    default=0.0,
    metavar="Y",
    help="Values are equal if |a - b| <= X + Y * |b|; 0 and 0: if they are identical.",
)
@click.option("--all", "show_all", is_flag=True, help="Also show equal tensors.")
@click.pass_context
def diff_command(
    ctx: click.Context,
    /,
    a: Path,
    b: Path,
    match: bool,
    show_all: bool,
    atol: float,
    rtol: float,
    **reading: Any,
) -> None:
    """Lists the tensors that differ between A and B, and by how much.

    Ends with 0 if they are equal, 1 if they differ, 2 if they cannot be compared.
    """
    from lockstep.checkpoint.comparison import compare, rename_to_match
    from lockstep.checkpoint.contents import open_contents

    # `reading` contains the values of --name, --trust and --training. `everything` also opens the
    # values that are not tensors.
    try:
        contents_a = open_contents(a, everything=True, **reading)
        contents_b = open_contents(b, everything=True, **reading)
        tensors_a = _all_tensors(contents_a)
        tensors_b = _all_tensors(contents_b)

        # The names of B may have to be changed to match those of A; a text says how. Without
        # --match it is only printed, as a hint.
        tensors_b_renamed, changes = rename_to_match(tensors_a, tensors_b)
        if changes:
            pairing = "paired after this" if match else "with --match they would pair after this"
            _say(f"names in {b}: {pairing}: {changes}")

        if match:
            tensors_b = tensors_b_renamed

        pairs = list(compare(tensors_a, tensors_b, atol=atol, rtol=rtol))
        differing_extra = _differing_extra(contents_a.extra, contents_b.extra)
    except LockstepError as error:
        error.exit_code = 2  # 1 would mean that they differ
        raise

    _print_differences(pairs, differing_extra, show_all)
    has_differing_pair = any(pair.differs for pair in pairs)
    ctx.exit(1 if has_differing_pair or differing_extra else 0)


def _print_differences(
    pairs: Sequence[Pair], differing_extra: Sequence[str], show_all: bool
) -> None:
    """Prints a table of the tensors that differ, other values that differ, and a summary.

    Args:
        pairs: the tensors of both sides.
        differing_extra: names of values that differ and are not tensors.
        show_all: whether to show equal tensors too.
    """
    shown = [pair for pair in pairs if pair.differs or show_all]
    if shown:
        head = ("name", "what", "a", "b", "values", "largest |a-b|", "relative")
        _print_table(head, [_pair_row(pair) for pair in shown], right_aligned=(4, 5, 6))

    for key in differing_extra:
        _say(f"{key}: differs, and is no tensor")

    num_differing = len([pair for pair in pairs if pair.differs])
    _say(f"{num_differing} of {len(pairs)} tensors differ")


@command.command("convert")
@click.argument("source", metavar="IN", type=PATH_TYPE)
@click.argument("out", type=PATH_TYPE)
@name_option
@trust_option
@click.option(
    "--dtype",
    type=click.Choice(["fp32", "bf16", "fp16"]),
    help="Convert floating-point tensors to this dtype.  [default: unchanged]",
)
@click.option("--prefix", metavar="TEXT", help="Add this prefix to every name.")
@click.option(
    "--remove-prefix",
    multiple=True,
    metavar="TEXT",
    help="Remove this prefix from names; may be repeated.",
)
@click.option(
    "--shard-size", default="5GB", metavar="SIZE", help="Maximum size of a safetensors file."
)
@click.option("--overwrite", is_flag=True, help="Replace OUT if it exists.")
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
    """Writes the weights of IN to OUT, completely or not at all.

    OUT ends in .safetensors, or in .pt, .pth, .bin or .ckpt for what torch.load reads.
    """
    from lockstep.checkpoint.contents import open_contents
    from lockstep.checkpoint.conversion import DTYPE_OF_OPTION, convert
    from lockstep.checkpoint.formats.safetensors_files import index_of, parse_shard_size

    max_shard_bytes = parse_shard_size(shard_size)
    check_path_of_this_system(f"the output {out}", out)

    # The output is either one file, or an index and several files.
    for path in (out, index_of(out)):
        if path.exists() and not overwrite:
            raise SettingError(f"the output {out}", f"{path} is there already", "add --overwrite")

    contents = open_contents(source, **reading)  # with the values of --name and --trust
    converted = convert(
        contents,
        out,
        dtype=None if dtype is None else DTYPE_OF_OPTION[dtype],
        remove_prefixes=remove_prefix,
        add_prefix=prefix or "",
        shard_bytes=max_shard_bytes,
    )

    source_text = f"read    {contents.source.path}: {contents.source.kind}"
    if contents.facts.get("read"):
        source_text += f", {contents.facts['read']}"

    _say(source_text)

    tensors_text = f"tensors {converted.num_tensors}"
    if converted.num_renamed:
        tensors_text += f"; {converted.num_renamed} renamed"
    if converted.num_cast:
        tensors_text += f"; {converted.num_cast} converted to {dtype}"
    _say(tensors_text)

    for file in converted.files:
        _say(f"wrote   {file} ({_format_size(file.stat().st_size)})")


@command.command("repair", short_help="Repairs the checkpoints of a run.")
@click.argument("folder", type=PATH_TYPE)
@click.option("--yes", is_flag=True, help="Make the repairs; without it they are only listed.")
@click.pass_context
def repair_command(ctx: click.Context, folder: Path, yes: bool) -> None:
    """Lists what is wrong in FOLDER, of a run or a checkpoint, and repairs it with --yes.

    Ends with 0 if nothing is wrong any more. Complete checkpoints are not touched.
    """
    from lockstep.checkpoint.repair import carry_out, plan_repairs

    plan = plan_repairs(folder)
    if not plan:
        _say(f"{folder}: nothing is wrong")
        return

    for repair in plan:
        _print(str(repair.path))
        for label, text in (("found:", repair.why), ("do:", REPAIR_TEXTS[repair.action])):
            _print(f"  {pad_label(translate(label), translate(text))}")

    # A problem that cannot be repaired is in the plan, too: as a "repair" that leaves the files.
    repairs = [repair for repair in plan if repair.action != "leave"]
    if yes:
        carry_out(repairs)
        _say(f"{len(repairs)} done, {len(plan) - len(repairs)} left as they are")
    elif repairs:
        _say("nothing was changed; add --yes to do it")

    all_problems_are_solved = yes and len(repairs) == len(plan)
    ctx.exit(0 if all_problems_are_solved else 1)


def _inspection_as_json(inspection: Inspection) -> dict[str, Any]:
    """Returns the result of `inspect --json`: the state of each checkpoint, and the contents."""
    checkpoints = [
        {"path": str(health.path), "problems": list(health.problems)}
        for health in inspection.checkpoints
    ]
    contents = inspection.contents
    return {
        "path": str(inspection.path),
        "sound": inspection.sound,
        "checkpoints": checkpoints,
        "leftovers": [str(path) for path in inspection.leftovers],
        "contents": None if contents is None else _contents_as_json(contents),
    }


def _contents_as_json(contents: Contents) -> dict[str, Any]:
    """Returns everything that is known about a checkpoint or a file, as plain values.

    "tensors" are the weights and buffers of the models, and "training" the tensors of the training
    state, such as those of the optimizer. "extra" are the names of saved values that are not
    tensors.
    """
    from lockstep.checkpoint.contents import totals

    return {
        "path": str(contents.source.path),
        "kind": contents.source.kind,
        "facts": dict(contents.facts),
        "files": dict(contents.files),
        "modules": list(contents.source.modules),
        "tensors": _describe_tensors(contents.tensors),
        "training": _describe_tensors(contents.training),
        "extra": list(contents.extra),
        "totals": totals(contents.tensors.values()),
    }


def _describe_tensors(tensors: Mapping[str, LazyTensor]) -> list[dict[str, Any]]:
    """Returns the name, shape, dtype and size of each tensor, as plain values.

    If a tensor is stored under several names, all other names have the first one as "tied_to":

        {"name": "embedding.weight", ..., "tied_to": None}
        {"name": "head.weight", ..., "tied_to": "embedding.weight"}
    """
    from lockstep.checkpoint.contents import tied_to
    from lockstep.checkpoint.lazy_tensor import dtype_name

    first_names = tied_to(tensors)
    return [
        {
            "name": name,
            "shape": list(tensor.shape),
            "dtype": dtype_name(tensor.dtype),
            "bytes": tensor.nbytes,
            "tied_to": first_names.get(name),
        }
        for name, tensor in tensors.items()
    ]


def _print_health(inspection: Inspection) -> None:
    """Prints a line for each checkpoint, and for each save that has not ended.

    A save has not ended if its process was stopped, or if it is being written at this moment.
    """
    for health in inspection.checkpoints:
        if health.problems:
            _say(f"{health.path}: {'; '.join(health.problems)}")
            continue

        text = "complete"
        metric = (health.manifest or {}).get("metric")  # the metric passed when it was saved
        if isinstance(metric, float):
            text += f", metric {metric:g}"
        if health.path == inspection.best:
            text += ", the best"
        _say(f"{health.path}: {text}")

    for path in inspection.leftovers:
        _say(f"{path}: a save that was stopped, or goes on")

    if inspection.contents is None:
        _say("no complete checkpoint is there; lockstep checkpoint repair says what can be done")
        return

    if inspection.checkpoints:
        _print()  # an empty line before the contents, which the caller prints next


def _print_contents(contents: Contents, sort: str, limit: int) -> None:
    """Prints the facts, the files, the table of tensors, and the totals.

    The arguments `sort` and `limit` are those of `_print_tensors`.
    """
    _say(f"{contents.source.path}: {contents.source.kind}")
    for key, value in contents.facts.items():
        _print_labelled(key.replace("_", " "), value)
    if len(contents.source.modules) > 1:
        _print_labelled("models", ", ".join(contents.source.modules))
    for name, num_bytes in contents.files.items():
        _print_labelled("file", f"{name}, {_format_size(num_bytes)}")
    _print()

    _print_tensors(contents.tensors, sort, limit)
    _print()

    _print_totals("total", contents.tensors)  # of the weights
    if contents.training:  # tensors of the training state, such as the optimizer's
        _print_totals("training state", contents.training)
    if contents.extra:
        _say(f"besides tensors: {', '.join(contents.extra)}")


def _print_tensors(all_tensors: Mapping[str, LazyTensor], sort: str, limit: int) -> None:
    """Prints the table of tensors.

    Args:
        all_tensors: the tensors of a checkpoint or file.
        sort: `size` for the largest tensors first, `file` for the order in the file.
        limit: the largest number of tensors to show; 0 for all.
    """
    tensors = _describe_tensors(all_tensors)
    if sort == "size":
        tensors.sort(key=lambda tensor: tensor["bytes"], reverse=True)
    shown = tensors[:limit] if limit else tensors

    rows = []
    for tensor in shown:
        # A tensor that is stored under a second name has no size of its own. The table then says
        # "is embedding.weight" in place of the size.
        first_name = tensor["tied_to"]
        size = f"is {first_name}" if first_name else _format_size(tensor["bytes"])
        rows.append((tensor["name"], str(tensor["shape"]), tensor["dtype"], size))
    _print_table(("name", "shape", "dtype", "size"), rows, right_aligned=(3,))
    if len(shown) < len(tensors):
        _say(f"... and {len(tensors) - len(shown)} more (--limit 0 shows all)")


def _print_labelled(label: str, value: object) -> None:
    """Prints a labelled value, aligned with the values of other lines."""
    _print(f"  {label.ljust(LABEL_WIDTH)} {value}")


def _print_totals(label: str, tensors: Mapping[str, LazyTensor]) -> None:
    """Prints a line such as `total: 12 tensors (12 float32), 4,810 values, 19.2 kB`."""
    from lockstep.checkpoint.contents import totals

    total = totals(tensors.values())
    dtypes = ", ".join(f"{count} {name}" for name, count in total["dtypes"].items())
    amount = _format_size(total["bytes"])
    _say(
        f"{label}: {total['tensors']} tensors ({dtypes or 'none'}), {total['values']:,} values, "
        f"{amount}"
    )


def _all_tensors(contents: Contents) -> dict[str, LazyTensor]:
    """Returns the tensors of the model, and those of the training state as `training: NAME`."""
    tensors = dict(contents.tensors)
    for name, tensor in contents.training.items():
        tensors[f"training: {name}"] = tensor
    return tensors


def _pair_row(pair: Pair) -> tuple[str, ...]:
    """Returns the seven cells of a tensor's row in the table of `diff`.

    These are its name, what differs, its dtype and shape in A and in B, and three cells on its
    values: how many differ, the largest difference and the largest relative difference. The last
    three are empty if the values cannot be compared.
    """
    a = pair.a
    b = pair.b
    values = pair.values
    no_cells_of_values = ("", "", "")
    if a is None:
        return (pair.name, "in b alone", "", _dtype_and_shape(b), *no_cells_of_values)
    if b is None:
        return (pair.name, "in a alone", _dtype_and_shape(a), "", *no_cells_of_values)
    if values is None:  # the shapes differ, so the values cannot be compared
        return (pair.name, "shape", _dtype_and_shape(a), _dtype_and_shape(b), *no_cells_of_values)

    differing = []
    if a.dtype is not b.dtype:
        differing.append("dtype")
    if values.count > 0:
        differing.append("values")

    num_nans_in_a, num_nans_in_b = values.nans
    if num_nans_in_a > 0 or num_nans_in_b > 0:
        differing.append(f"NaN {num_nans_in_a}/{num_nans_in_b}")

    what = ", ".join(differing) or "equal"
    cells = (pair.name, what, _dtype_and_shape(a), _dtype_and_shape(b))
    return (*cells, *_cells_of_values(values, a.num_elements))


def _cells_of_values(values: ValueDifferences, num_elements: int) -> tuple[str, str, str]:
    """Returns the last three cells of a tensor's row in the table of `diff`.

        a        b         --atol    values    largest |a-b|    relative
        [1.0]    [1.0]               0
        [1.0]    [1.01]              1/1       0.01             0.0099
        [1.0]    [1.01]    0.1       0/1       0.01             0.0099
        [1.0]    [nan]               1/1       0                0

    Args:
        values: how much the values differ.
        num_elements: the number of values of each side.
    """
    if values.are_equal:
        return ("0", "", "")
    return (f"{values.count}/{num_elements}", f"{values.absolute:.3g}", f"{values.relative:.3g}")


def _dtype_and_shape(tensor: LazyTensor | None) -> str:
    """Returns "float32 [64, 10]", or an empty string if there is no such tensor."""
    from lockstep.checkpoint.lazy_tensor import dtype_name

    return "" if tensor is None else f"{dtype_name(tensor.dtype)} {list(tensor.shape)}"


def _print_table(
    head: tuple[str, ...], rows: Sequence[tuple[str, ...]], right_aligned: tuple[int, ...] = ()
) -> None:
    """Prints rows in aligned columns.

    Args:
        head: the names of the columns.
        rows: the cells of each row.
        right_aligned: the indices of the columns that are aligned on the right.
    """
    table = []  # the printable cells of each row
    widths = [0] * len(head)  # the width of each column, in characters
    for row in (head, *rows):
        cells = [replace_unprintable(cell) for cell in row]
        table.append(cells)
        for column, cell in enumerate(cells):
            widths[column] = max(widths[column], len(cell))

    for cells in table:
        padded_cells = []
        for column, cell in enumerate(cells):
            if column in right_aligned:
                padded_cells.append(cell.rjust(widths[column]))
            else:
                padded_cells.append(cell.ljust(widths[column]))
        click.echo("  ".join(padded_cells).rstrip())


def _differing_extra(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """Returns the names of saved values that are not tensors and differ between `a` and `b`.

    Args:
        a: the values of one checkpoint or file by name, such as {"epoch": 3}.
        b: the values of the other checkpoint or file.
    """
    from lockstep.checkpoint.comparison import same_extra

    differing = []
    for name in {**a, **b}:  # all names, beginning with those of `a`
        in_both = name in a and name in b
        if not in_both or not same_extra(a[name], b[name]):
            differing.append(name)
    return differing


def _say(text: str) -> None:
    """Prints an English sentence in the language of this process."""
    _print(translate(text))


def _print(text: str = "") -> None:
    """Prints a text of one or more lines, with control characters replaced.

    Much of the text comes from files, which could otherwise move the cursor of a terminal.
    """
    click.echo("\n".join(replace_unprintable(line) for line in text.split("\n")))


def _format_size(num_bytes: float) -> str:
    """Formats a size: `1.5 GB`, `20.0 MB`, `3.1 kB` or `12 B`."""
    for unit, bytes_per_unit in SIZE_UNITS:
        if num_bytes >= bytes_per_unit:
            return f"{num_bytes / bytes_per_unit:.1f} {unit}"
    return f"{num_bytes:.0f} B"
