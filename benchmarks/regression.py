"""Has ckptmgr become slower? What continuous integration asks: `python benchmarks/regression.py`.

Small states, saved and restored by ckptmgr, stock Orbax and the raw disk in turns. Seconds of such a
run say nothing, since the machine is shared and differs from run to run; ratios of medians move far
less. Each has a limit of about twice what it usually is, or more where it is of milliseconds. Where one
is exceeded, its workload is measured a second time, and only what is exceeded again counts: then the
exit status is 1.

The file system is one in memory where there is room, so that no disk takes part.
"""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import command
import machine
import report
from systems import SYSTEMS
from workloads import Workload, dense, small

MEMORY = Path("/dev/shm")
WARM_UPS = 1
TITLES = {measure: title for measure, title, _ in report.ROWS}


@dataclass(frozen=True)
class Limit:
    """Of a ratio: ckptmgr's median of `measure` over that of the system `against`.

    `usual` is the median of some runs on 2 cores, writing to memory; to be measured again, with
    `--show` on a quiet machine, when ckptmgr or Orbax has become faster.
    """

    measure: str
    against: str
    usual: float
    at_most: float


LIMITS: Mapping[str, tuple[Limit, ...]] = {
    "dense": (
        Limit("in_save", "orbax", 1.3, 5.0),  # of milliseconds
        Limit("durable", "orbax", 0.41, 0.85),
        Limit("restore", "orbax", 0.29, 0.75),
        Limit("cpu_save", "orbax", 0.43, 0.85),
        Limit("cpu_restore", "orbax", 0.34, 0.70),
        # Of the raw disk only CPU time: its seconds are so few that beside other work the ratios
        # of one code went from 0.4 to 5.
        Limit("cpu_save", "raw", 2.4, 5.0),
        Limit("cpu_restore", "raw", 0.9, 2.5),
    ),
    "small": (
        Limit("in_save", "orbax", 0.10, 0.40),  # of milliseconds
        Limit("durable", "orbax", 0.09, 0.20),
        Limit("restore", "orbax", 0.06, 0.15),
        Limit("cpu_save", "orbax", 0.12, 0.25),
        Limit("cpu_restore", "orbax", 0.05, 0.11),
    ),
}


@dataclass(frozen=True)
class Finding:
    workload: str
    limit: Limit
    value: float

    @property
    def exceeded(self) -> bool:
        return self.value > self.limit.at_most

    @property
    def verdict(self) -> str:
        return "MISS" if self.exceeded else "OK"

    @property
    def sentence(self) -> str:
        limit = self.limit
        return (
            f"{TITLES[limit.measure]} is {self.value:.2f} of {limit.against}'s; "
            f"usually it is {limit.usual:.2f}, and at most {limit.at_most:.2f} is allowed"
        )


def states(smoke: bool) -> dict[str, Workload]:
    """128 MiB in 8 leaves and 8 MiB in 500, on 8 devices."""
    return {
        "dense": dense("dense", 8, 8, 64 if smoke else 1024),
        "small": small("small", 8, 20 if smoke else 500),
    }


def main() -> int:
    args = parse_args()
    directory = Path(args.directory).resolve() if args.directory else usual_directory()
    needed = 4 * max(state.nbytes for state in states(args.smoke).values())
    modules = [SYSTEMS[system].needs for name in args.workloads for system in systems_of(name)]
    problem = command.why_not(directory, needed, modules)
    if problem:
        print(problem, file=sys.stderr)
        return command.FAILED
    facts = command.begin(args, directory)
    settings = {"smoke": args.smoke, "reps": args.reps}

    def measure(name: str) -> list[Finding]:
        devices = states(args.smoke)[name].devices
        task = {**settings, "workload": name}
        records = command.run_child(Path(__file__), devices, task, directory)
        if records is None:
            raise ChildProcessError(f"{name}: the measuring process failed, see above.")
        return findings(name, records)

    try:
        results = [
            result_of(name, judged(name, measure) if args.check else measure(name), args.check)
            for name in args.workloads
        ]
    except ChildProcessError as error:
        print(error, file=sys.stderr)
        return command.FAILED
    print(f"\n{table(results)}", flush=True)
    return command.finish(args, facts, settings, results)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    add = parser.add_argument
    add("--smoke", action="store_true", help="tiny sizes, one repetition, nothing is judged")
    add("--show", action="store_true", help="print the ratios, and judge nothing")
    add("--workloads", type=command.choice_of(LIMITS), default=list(LIMITS))
    add("--reps", type=int, help="after one warm-up. default: 3, smoke: 1")
    add("--directory", "--dir", help=f"where to write. default: {MEMORY}, or else on a disk")
    add("--json", metavar="FILE", help="also write every ratio to FILE")
    args = parser.parse_args()
    args.reps = args.reps or (1 if args.smoke else 3)
    args.check = not (args.smoke or args.show)
    return args


def usual_directory() -> Path:
    """In memory where there is room for it twice, which is taken from what programs can have."""
    room = 8 * max(state.nbytes for state in states(smoke=False).values())
    if MEMORY.is_dir() and machine.free_bytes(MEMORY) >= room:
        return MEMORY
    return machine.default_directory()


def systems_of(name: str) -> list[str]:
    """ckptmgr and all that a limit of this workload compares it with."""
    return [report.SUBJECT, *dict.fromkeys(limit.against for limit in LIMITS[name])]


def measure(task: dict[str, Any]) -> list[dict[str, Any]]:
    """In the child."""
    from rounds import take_turns

    name = task["workload"]
    entries = [(states(task["smoke"])[name], systems_of(name))]
    return take_turns(entries, task["directory"], task["reps"], WARM_UPS)


def findings(name: str, records: list[dict[str, Any]]) -> list[Finding]:
    return [
        Finding(
            name,
            limit,
            report.ratio(records, limit.measure, report.SUBJECT, limit.against, None).value,
        )
        for limit in LIMITS[name]
    ]


def judged(name: str, measure: Callable[[str], list[Finding]]) -> list[Finding]:
    """What was found; what exceeded its limit is replaced by what a second run finds of it."""
    found = measure(name)
    if not any(item.exceeded for item in found):
        return found
    for item in found:
        if item.exceeded:
            command.progress(f"{name}: {item.sentence}. Measured once more.")
    second = {item.limit: item for item in measure(name)}
    return [second[item.limit] if item.exceeded else item for item in found]


def result_of(name: str, found: Sequence[Finding], judge: bool) -> dict[str, Any]:
    return {
        "workload": name,
        "ratios": [
            {**asdict(item.limit), "value": item.value, "verdict": item.verdict if judge else ""}
            for item in found
        ],
        "missed": [item.sentence for item in found if judge and item.exceeded],
    }


def table(results: list[dict[str, Any]]) -> str:
    lines = [["", "ckptmgr's", "of", "found", "usual", "at most", ""]]
    for result in results:
        for ratio in result["ratios"]:
            figures = (f"{ratio[name]:.2f}" for name in ("value", "usual", "at_most"))
            title = TITLES[ratio["measure"]]
            lines.append([result["workload"], title, ratio["against"], *figures, ratio["verdict"]])
    return report.columns(lines)


if __name__ == "__main__":
    sys.exit(command.child(measure) if command.is_child() else main())
