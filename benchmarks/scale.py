"""What a save costs a job of up to 10,000 processes: `python benchmarks/scale.py`.

No such job runs here. One process does, one after the other, what each process of the job would do,
with the library's own code: the plan of process 0, the sharing among all, real databases with
small values that are merged, real receipts, the commit, opening the step, and the puts and gets of
all processes against a real coordination service. What a column holds is said below the table, and
in `docs/SCALE.md` what that leaves out. A figure with "~" is not measured: it is scaled from a
smaller job, by the rule that stands below the table.

In `groups` every 16 processes hold all of the state (data parallel over fully sharded groups); in
`all` it is cut over the whole job. Either way 16 processes hold 102,400 shards of 800 leaves.
"""

import argparse
import socket
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import command
import report
from report import Check

SCRIPT = Path(__file__).with_name("scale_parts.py")
GROUPS = (16, 64, 256, 1024, 4096, 10_000)
ALL = (32, 1024, 10_000)  # only of the first are the databases made
LEAVES, SMALL = 800, 200
DEVICES = 8
VIRTUAL = (128, 256, 512)  # devices of one process
ROUND_TRIP = 1e-3  # assumed of storage that machines share
COMMIT_AT_MOST = 10.0

Row = dict[str, Any]


def main() -> int:
    args = parse_args()
    directory = command.directory_of(args)
    problem = command.why_not(directory, 4 * 2**30 if not args.smoke else 2**26, ["ckptmgr"])
    if problem:
        print(problem, file=sys.stderr)
        return command.FAILED
    facts = command.begin(args, directory)
    rows = measure(args, directory)
    if rows is None:
        print("a measuring process failed, see above.", file=sys.stderr)
        return command.FAILED
    rows = [with_sums(row) for row in rows]
    checks = [
        Check(
            f"commit of {row['processes']:,} processes, s", "ckptmgr", row["commit"], COMMIT_AT_MOST
        )
        for row in rows
        if row["layout"] == "groups" and row["processes"] == max(args.processes)
    ]
    print(f"\n{tables(rows)}\n\n{report.check_table(checks)}")
    result = {
        "workload": "scale",
        "rows": rows,
        "checks": [{**asdict(item), "verdict": item.verdict} for item in checks],
        "missed": report.missed(checks),
    }
    settings = {"smoke": args.smoke, "leaves": args.leaves, "small": args.small}
    return command.finish(args, facts, settings, [result])


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--smoke", action="store_true", help="tiny sizes: for CI")
    parser.add_argument(
        "--processes",
        type=lambda text: [int(number) for number in text.split(",")],
        help=f"sizes of the job, of `groups`, multiples of 16. default: {','.join(map(str, GROUPS))}",
    )
    command.add_output_arguments(parser)
    args = parser.parse_args()
    args.processes = args.processes or ([16, 32] if args.smoke else list(GROUPS))
    if any(number < 16 or number % 16 for number in args.processes):
        parser.error("--processes must be multiples of 16")
    args.all = [32, 48] if args.smoke else list(ALL)
    args.leaves, args.small = (8, 4) if args.smoke else (LEAVES, SMALL)
    return args


# -- measuring ----------------------------------------------------------------------------------


def measure(args: argparse.Namespace, directory: Path) -> list[Row] | None:
    """A row per job; what was scaled is named in its `scaled`. None where a child failed."""
    rows: list[Row] = []
    jobs = [("groups", number) for number in args.processes] + [("all", n) for n in args.all]
    for layout, processes in jobs:
        job = {
            "layout": layout,
            "processes": processes,
            "leaves": args.leaves,
            "small": args.small,
        }
        row: Row = {"layout": layout, "processes": processes, "scaled": []}
        for part in ("pure", "commit"):
            if part == "commit" and layout == "all" and processes > args.all[0]:
                continue
            found = command.run_child(SCRIPT, 1, {"part": part, "job": job}, directory)
            if found is None:
                return None
            row |= found
        rows.append(row)
    sizes = [[row["processes"], row["share"]] for row in rows]
    task = {"part": "messages", "port": free_port(), "sizes": sizes}
    heard = command.run_child(SCRIPT, 1, task, directory)
    devices = VIRTUAL[:1] if args.smoke else VIRTUAL
    task = {"part": "places", "sizes": devices}
    lain = command.run_child(SCRIPT, max(devices), task, directory)
    if heard is None or lain is None:
        return None
    for row, found in zip(rows, heard, strict=True):
        row |= found
        add_places(row, lain)
        if "merge" not in row:
            scale(row, rows)
    return rows


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return found.getsockname()[1]


def add_places(row: Row, lain: list[dict[str, float]]) -> None:
    devices = row["processes"] * DEVICES
    there = next((one for one in lain if one["devices"] == devices), None)
    if there is not None:
        row["places"] = there["places"]
        return
    row["places"] = lain[-1]["places"] * devices / lain[-1]["devices"]
    row["scaled"].append("places")


BY_CHUNKS = ("merge", "merge_cpu", "merge_memory", "open", "open_memory")
BY_FILES = (
    "rest",
    "rest_cpu",
    "sharding",
    "sharding_cpu",
    "sharding_bytes",
    "sharding_read",
    "listing",
    "files",
    "manifest",
)


def scale(row: Row, rows: list[Row]) -> None:
    """What was not measured of a job of `all`: by its chunks, or as a job with as many files."""
    smaller = next(r for r in rows if r["layout"] == "all" and "open" in r)
    alike = min(rows, key=lambda r: (r["layout"] == "all", abs(r["processes"] - row["processes"])))
    for key in BY_CHUNKS:
        row[key] = smaller[key] * row["chunks"] / smaller["chunks"]
    for key in BY_FILES:
        row[key] = alike[key] * row["processes"] / alike["processes"]
    row["bytes_by_0"] = (
        row["sharding_bytes"]
        + row["manifest"]
        + (smaller["bytes_by_0"] - smaller["sharding_bytes"] - smaller["manifest"])
        * row["chunks"]
        / smaller["chunks"]
    )
    row["scaled"] += [*BY_CHUNKS, *BY_FILES, "bytes_by_0"]


def with_sums(row: Row) -> Row:
    """Besides what was measured: what process 0 needs from the last payload on, and in a row."""
    parts = ("messages_by_0", "shares_parse", "merge", "sharding", "rest")
    cpu = sum(row[part] for part in ("shares_parse", "merge_cpu", "sharding_cpu", "rest_cpu"))
    sums = {
        "commit_cpu": cpu,
        "commit": sum(row[part] for part in parts),
        "in_a_row": 3 * row["processes"] * ROUND_TRIP,
        "looks": row["files"] * row["processes"],
    }
    scaled = [*row["scaled"], "in_a_row"]
    scaled += ["commit", "commit_cpu"] if set(parts) & set(scaled) else []
    scaled += ["looks"] if "files" in scaled else []
    return {**row, **sums, "scaled": scaled}


# -- the table ----------------------------------------------------------------------------------


def seconds(value: float) -> str:
    return f"{value:.1f} s" if value >= 9.95 else f"{value:.2g} s" if value >= 1 else _ms(value)


def _ms(value: float) -> str:
    return f"{value * 1e3:.0f} ms" if value >= 0.00995 else f"{value * 1e3:.2g} ms"


def nbytes(value: float) -> str:
    for power, name in ((3, "GB"), (2, "MB"), (1, "kB")):
        if value >= 1000**power:
            return f"{value / 1000**power:.3g} {name}"
    return f"{value:.0f} B"


def count(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.3g}"


def of_even(value: float) -> str:
    return f"{value:.2f}"


Column = tuple[str, str, Callable[[float], str], str]
PIECES: dict[str, list[Column]] = {
    "What each process works out and tells": [
        ("chunks", "chunks", count, "in the step"),
        ("chunks_each", "of one", count, "chunks that one process writes, at most"),
        ("places", "places", seconds, "the shards of one new sharding and shape, CPU"),
        ("plan", "plan", seconds, "of a new structure, CPU"),
        ("least", "least", of_even, "bytes that one process writes, of an even share"),
        ("most", "most", of_even, "the same of another"),
        ("receipt", "receipt", nbytes, "the largest"),
        ("receipt_parse", "parsed in", seconds, "one receipt, CPU"),
        ("share", "Share", nbytes, "what one process tells process 0"),
        ("messages_each", "messages", count, "of one process in a save"),
        ("message", "each in", seconds, "client and service both on this machine"),
    ],
    "What process 0 does from the last word of another to the step in its place": [
        ("messages_all", "messages", count, "that the service in process 0 answers"),
        ("messages_by_0", "gathered in", seconds, "process 0's own part of the meetings"),
        ("shares_parse", "parsed in", seconds, "all Shares, CPU"),
        ("shares_held", "held", nbytes, "all Shares"),
        ("merge", "merge", seconds, "of the databases, median of three"),
        ("merge_memory", "its memory", nbytes, "how far it rises"),
        ("sharding", "`_sharding`", seconds, "Orbax's file, made, written and synced"),
        ("rest", "the rest", seconds, "other metadata, sync, manifest, rename"),
        ("commit", "commit", seconds, "all of this but what is held, and memory"),
        ("commit_cpu", "its CPU", seconds, "without the meetings; steadier on a busy machine"),
        ("in_a_row", "besides, at 1 ms", seconds, "three calls of storage per process, in a row"),
    ],
    "The step, and opening it": [
        ("files", "files", count, "of the step"),
        ("bytes_by_0", "by process 0", nbytes, "what it writes once"),
        ("sharding_bytes", "`_sharding`", nbytes, "the largest part of that"),
        ("manifest", "manifest", nbytes, "read whenever steps are listed"),
        ("listing", "walked in", seconds, "all names and sizes, CPU"),
        (
            "open",
            "opened in",
            seconds,
            "by each process before it restores, without `_sharding`; CPU",
        ),
        ("open_memory", "its memory", nbytes, "how far it rises"),
        ("sharding_read", "`_sharding` in", seconds, "read besides, by each process; CPU"),
        ("looks", "files opened", count, "or looked at, by all processes that restore"),
    ],
}

SCALED = (
    '"~": not measured. `places` goes by the number of devices; in `all`, beyond its first job, the '
    "merge and opening go by the number of chunks, and what has to do with files is as in "
    "`groups`; 1 ms is an assumption."
)


def tables(rows: list[Row]) -> str:
    """One table in pieces, each with what its columns mean."""
    found = []
    for title, columns in PIECES.items():
        lines = [["processes", *(head for _, head, _, _ in columns)]]
        for row in rows:
            cells = [
                ("~" if key in row["scaled"] else "") + show(row[key])
                for key, _, show, _ in columns
            ]
            lines.append([f"{row['processes']:,} {row['layout']}", *cells])
        legend = "; ".join(f"*{head}*: {text}" for _, head, _, text in columns)
        found.append(f"{title}\n\n{report.columns(lines)}\n\n{legend}.")
    return "\n\n".join([*found, SCALED])


if __name__ == "__main__":
    sys.exit(main())
