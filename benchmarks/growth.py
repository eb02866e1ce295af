"""How the time of a save and of a restore grows with the tree: `python benchmarks/growth.py`.

Two series of small arrays, saved and restored by one process: more leaves on one device, and the
same leaves split over more devices. Between two sizes of a series

    time of one more = (median at the larger - median at the smaller) / (count - count)

which leaves out what a save of anything costs. The terms of the largest step of each series have
limits. Time that grows in proportion has the same term at each step, so that the ratio of a term
to the one before says whether it does.
"""

import argparse
import itertools
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import command
import report
from command import name_of
from report import Check, Spread, values
from systems import SYSTEMS
from workloads import Leaf, Workload

LEAVES = (100, 1_000, 10_000)
DEVICES = (1, 8, 64)
SPLIT_LEAVES = 300  # of the series of devices
SMALL, SPLIT = Leaf((16, 64)), Leaf((64, 256))  # 4 KiB on one device; 64 KiB, over all devices
WARM_UPS = 2  # programs are compiled in the first save, and some of them beside the second
BEARS = {"orbax": {"leaf": 1_000, "shard": 8 * SPLIT_LEAVES}}  # more would take it minutes
LINEAR_AT_MOST = 1.3  # a term over the one before it; only asked where the term misses its limit

MEASURES = {
    "in_save": "in save()",
    "durable": "to durable",
    "restore": "restore",
    "cpu_save": "CPU, save",
    "cpu_restore": "CPU, restore",
}


@dataclass(frozen=True)
class Case:
    """A workload of a series, and how many of what the series counts it has."""

    workload: Workload
    count: int


@dataclass(frozen=True)
class Series:
    """Workloads that differ in one number. `limits` are microseconds for one more, by measure."""

    name: str
    one: str
    title: str
    limits: dict[str, float]
    cases: tuple[Case, ...]

    def cases_of(self, system: str) -> list[Case]:
        name = name_of(system)
        most = BEARS.get(name, {}).get(self.one, float("inf"))
        takes = SYSTEMS[name].takes
        return [case for case in self.cases if case.count <= most and takes(case.workload)]


def all_series(leaves: Sequence[int], devices: Sequence[int], split_leaves: int) -> list[Series]:
    return [
        Series(
            name="leaves",
            one="leaf",
            title="Leaves of 4 KiB on 1 device",
            limits={"durable": 30.0, "restore": 60.0},
            cases=tuple(Case(_workload("leaves", count, 1, SMALL), count) for count in leaves),
        ),
        Series(
            name="shards",
            one="shard",
            title=f"Shards: {split_leaves} leaves of 64 KiB, split over "
            f"{', '.join(map(str, devices))} devices",
            limits={"durable": 15.0, "restore": 30.0},
            cases=tuple(
                Case(_workload("shards", split_leaves, count, SPLIT), split_leaves * count)
                for count in devices
            ),
        ),
    ]


def _workload(series: str, leaves: int, devices: int, leaf: Leaf) -> Workload:
    number = leaves if series == "leaves" else leaves * devices
    names = (f"leaf_{i:05d}" for i in range(leaves))
    return Workload(f"{series}_{number}", "growth", {"x": devices}, dict.fromkeys(names, leaf))


def main() -> int:
    args = parse_args()
    directory = command.directory_of(args)
    modules = [SYSTEMS[name_of(label)].needs for label in args.systems]
    problem = command.why_not(directory, 2**26 if args.smoke else 2**30, modules)
    if problem:
        print(problem, file=sys.stderr)
        return command.FAILED
    facts = command.begin(args, directory)
    settings = {
        name: getattr(args, name)
        for name in ("smoke", "systems", "reps", "leaves", "devices", "split_leaves", "profile")
    }
    series = all_series(args.leaves, args.devices, args.split_leaves)
    records: list[dict[str, Any]] = []
    profiles: list[str] = []
    for devices in sorted({case.workload.devices for one in series for case in one.cases}):
        found = command.run_child(
            Path(__file__), devices, {**settings, "process_devices": devices}, directory
        )
        if found is None:
            print(f"{devices} devices: the measuring process failed, see above.", file=sys.stderr)
            return command.FAILED
        records += found["records"]
        profiles += found["profiles"]
    results = [show(one, args, records) for one in series]
    for profile in profiles:
        print(f"\n{profile}")
    return command.finish(args, facts, settings, results)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    add = parser.add_argument
    add("--smoke", action="store_true", help="tiny sizes, one repetition: for CI")
    add(
        "--systems",
        type=command.choice_of(SYSTEMS),
        default=[report.SUBJECT],
        help=f"orbax is left out where it would take minutes. default: {report.SUBJECT}",
    )
    add("--leaves", type=_sizes, help=f"on 1 device. default: {','.join(map(str, LEAVES))}")
    add("--devices", type=_sizes, help=f"virtual ones. default: {','.join(map(str, DEVICES))}")
    add(
        "--profile",
        action="store_true",
        help="save and restore the largest of each series some more times, and say in which "
        "functions the time went",
    )
    command.add_reps(parser, 5, "two warm-ups")
    command.add_output_arguments(parser)
    args = command.repeated(parser)
    args.leaves = args.leaves or ([10, 20, 40] if args.smoke else list(LEAVES))
    args.devices = args.devices or ([1, 4] if args.smoke else list(DEVICES))
    args.split_leaves = 8 if args.smoke else SPLIT_LEAVES
    if any(SPLIT.shape[0] % count for count in args.devices):
        parser.error(f"--devices must divide {SPLIT.shape[0]}")
    return args


def _sizes(text: str) -> list[int]:
    sizes = [int(number) for number in text.split(",")]
    if len(sizes) < 2 or sizes[0] < 1 or sorted(set(sizes)) != sizes:
        raise argparse.ArgumentTypeError("two or more numbers, each larger than the one before")
    return sizes


# -- the child ----------------------------------------------------------------------------------


def measure(task: dict[str, Any]) -> dict[str, Any]:
    """All cases of as many devices as this process has."""
    from rounds import take_turns

    devices = task["process_devices"]
    series = all_series(task["leaves"], task["devices"], task["split_leaves"])
    entries = []
    for one in series:
        for case in one.cases:
            labels = [label for label in task["systems"] if case in one.cases_of(label)]
            if case.workload.devices == devices:
                entries.append((case.workload, labels))
    records = take_turns(entries, task["directory"], task["reps"], WARM_UPS)
    profiles = []
    if task["profile"]:
        largest = [one.cases[-1].workload for one in series]
        profiles = [
            profile_of(workload, task["directory"], task["reps"])
            for workload in largest
            if workload.devices == devices
        ]
    return {"records": records, "profiles": profiles}


def profile_of(workload: Workload, directory: str, rounds: int) -> str:
    import jax

    from measure import settle
    from sampling import Sampler

    root = Path(directory, "profile", workload.name)
    root.mkdir(parents=True)
    system, like = SYSTEMS[report.SUBJECT](root), workload.like()
    for rep in range(WARM_UPS + rounds):
        if rep in (0, WARM_UPS):
            sampler = Sampler()
        state = workload.state(rep)
        settle()
        with sampler.during("in save()"):
            system.save(rep, state)
        with sampler.during("from then until durable"):
            system.wait()
        del state
        settle()
        with sampler.during("restore"):
            restored = jax.block_until_ready(system.restore(rep, like))
        workload.verify(restored, rep)
        del restored
        system.delete(rep)
        command.progress(f"{workload.name} {rep + 1}/{WARM_UPS + rounds} profiled")
    system.close()
    return f"{workload.name}, mean of {rounds}\n\n{sampler.tables(rounds)}"


# -- the tables ---------------------------------------------------------------------------------


def of_workload(records: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    return [record for record in records if record["workload"] == name]


def terms(counts: Sequence[int], seconds: Sequence[float]) -> list[float]:
    """Seconds for one more, between each count and the next."""
    return [
        (later - earlier) / (more - fewer)
        for (fewer, earlier), (more, later) in itertools.pairwise(zip(counts, seconds, strict=True))
    ]


def growth(found: Sequence[float]) -> float | None:
    """The last term over the one before; None where there is none, or none that could be told."""
    return found[-1] / found[-2] if len(found) > 1 and found[-2] > 0 else None


def show(series: Series, args: argparse.Namespace, records: list[dict[str, Any]]) -> dict:
    """Print the table of one series; return what goes into the JSON file."""
    steps = [f"{a.count:,} to {b.count:,}" for a, b in itertools.pairwise(series.cases)]
    lines = [
        [
            *("", ""),
            *(f"{case.count:,}" for case in series.cases),
            *(f"us a {series.one}, {step}" for step in steps),
            "last / before",
        ]
    ]
    checks: list[Check] = []
    rows: list[dict[str, Any]] = []
    for system, (measure, title) in itertools.product(args.systems, MEASURES.items()):
        cases = series.cases_of(system)
        spreads = [
            Spread.of(values(of_workload(records, case.workload.name), system, measure))
            for case in cases
        ]
        each = terms([case.count for case in cases], [spread.median for spread in spreads])
        grown = growth(each) if len(cases) == len(series.cases) else None
        shown = [spread.show(report.seconds) for spread in spreads]
        micros = [f"{term * 1e6:.1f}" for term in each]
        blanks = [[""] * (len(series.cases) - len(cases)), [""] * (len(steps) - len(each))]
        lines.append(
            [
                *(system, title, *shown, *blanks[0], *micros, *blanks[1]),
                "" if grown is None else f"{grown:.2f}",
            ]
        )
        rows.append({"system": system, "measure": measure, "terms": each, "growth": grown})
        if name_of(system) == report.SUBJECT and measure in series.limits:
            what = f"{title}, of one {series.one}"
            checks += judged(what, system, each[-1], grown, series.limits[measure])
    print(
        f"\n{series.title}. Median of {args.reps} (smallest .. largest)\n\n"
        f"{report.columns(lines)}\n\n{report.check_table(checks)}",
        flush=True,
    )
    names = {case.workload.name for case in series.cases}
    return {
        "workload": series.name,
        "rows": rows,
        "checks": [{**asdict(item), "verdict": item.verdict} for item in checks],
        "judged": report.judged(series.name, checks),
        "missed": report.missed(checks),
        "records": [record for record in records if record["workload"] in names],
    }


def judged(what: str, system: str, term: float, grown: float | None, limit: float) -> list[Check]:
    """Whether a term is small enough; where it is not, also whether it has grown."""
    checks = [Check(f"{what}, us", system, term * 1e6, limit, digits=0)]
    if checks[0].verdict == "MISS" and grown is not None:
        checks.append(Check(f"{what}, over that before", system, grown, LINEAR_AT_MOST))
    return checks


if __name__ == "__main__":
    sys.exit(command.child(measure) if command.is_child() else main())
