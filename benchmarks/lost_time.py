"""What a save costs training: `python benchmarks/lost_time.py`.

A loop of donated, jitted steps, each waited for, saves in each system in turn. Three cases:

`single`: one save. A window of steps without saving comes first, right before it, and gives the
median step. Then `save()`, and steps until nothing of the save is left to do, its deletions
included. What is lost is the time in `save()`, what the first step after it takes longer than the
median, and what the further ones take longer, added up.

`behind`: the same of a save that begins one step after another one, which is then in flight. A
system with room for one waits for it in `save()`; what the first still takes from the steps counts
with the second.

`continuous`: a new save as soon as the one before is done, for some seconds. The rate of steps is
compared with that of a window without saving right before.

The writer's CPU time is what the process used beyond what as many steps use without saving. It
holds all that saving does, and the steps' own slowing down by it (caches, memory). On the cores that
the steps need, it is taken from them; a machine with cores to spare would not feel it. The
CPU-adjusted rate leaves it out:

    adjusted rate = steps * t / (W - taken),  taken = max(0, C - (cores - u) * W) / u

with t the mean step and u the cores busy without saving, W the length of the window and C the
writer's CPU time in it. That the steps leave `cores - u` idle and that the writer uses those first
makes `taken`, and with it the adjusted rate, rather too low than too high.
"""

import argparse
import itertools
import os
import statistics
import sys
from dataclasses import asdict
from pathlib import Path

import command
import report
from command import name_of, progress
from measure import Clock, settle
from report import Check, Target
from systems import MODES_AND_ORBAX, MODES_AND_PEERS, by_mode, each_open
from training import Baseline, Training, Window, save_and_step
from workloads import Workload, catalogue

WORKLOADS = ("dense8", "small8", "trainstate")
CASES = ("single", "behind", "continuous")
KEEP = 2  # steps kept; with those in flight there are four on disk
SETTINGS = (
    *("smoke", "systems", "cases", "reps", "warm_ups"),
    *("compute_ms", "steps", "at_least", "seconds"),
)
WARM_UPS = 3  # buffers are made in the first saves, programs for them compiled beside them
JUDGED = ("copy_on_write",)  # the default mode: the targets against Orbax are for it
MODES = ("copy_on_write", "double_buffer")  # which the checks are for
PEERS = ("orbax", "bare")  # what the others are compared with
LOST = Target("lost", "orbax", 0.7, goal=0.4)
TARGETS = {
    "dense": (LOST, Target("in_save", "orbax", 0.3)),
    "small": (Target("in_save", "orbax", 0.1),),
    "trainstate": (LOST,),
}
ADJUSTED_AT_LEAST = 0.9
CHECK_TITLES = {"adjusted": "CPU-adjusted rate", "donated": "share of arrays donated"}

SINGLE_ROWS: report.Rows = (
    ("step", "step without saving", report.seconds),
    ("in_save", "in save()", report.seconds),
    ("first", "first step after, longer by", report.seconds),
    ("further", "further steps, longer by", report.seconds),
    ("lost", "lost per save", report.seconds),
    ("durable", "to durable", report.seconds),
    ("steps", "steps in the window", report.count),
    ("cpu", "CPU of the writer", report.seconds),
    ("cpu_share", "of all cores meanwhile", report.percent),
    ("donated", "arrays donated to the first step", report.percent),
)
SINGLE_RATIOS = ("in_save", "first", "lost", "durable", "cpu")
BEHIND_ROWS: report.Rows = (
    *SINGLE_ROWS,
    ("behind", "calls that found the save before in flight", report.percent),
)
CONTINUOUS_ROWS: report.Rows = (
    ("step", "step without saving", report.seconds),
    ("rate", "rate of steps, of that without saving", report.factor),
    ("adjusted", "the same, CPU-adjusted", report.factor),
    ("per_save", "from save to save", report.seconds),
    ("lost", "lost per save", report.seconds),
    ("cpu", "CPU of the writer, per save", report.seconds),
    ("cpu_share", "of all cores", report.percent),
)
CONTINUOUS_RATIOS = ("per_save", "lost", "cpu")


def main() -> int:
    args = parse_args()
    return command.measure_each(
        args,
        Path(__file__),
        [catalogue(args.smoke)[name] for name in args.workloads],
        lambda workload, records: show(workload, args, records),
        copies=(KEEP + 2) * len(args.systems) + 1,
        modules=[MODES_AND_PEERS[name_of(label)].needs for label in args.systems],
        settings={name: getattr(args, name) for name in SETTINGS},
    )


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    command.add_arguments(parser, WORKLOADS, MODES_AND_PEERS, MODES_AND_ORBAX)
    add = parser.add_argument
    add("--cases", type=command.choice_of(CASES), default=list(CASES), help="default: all")
    add("--reps", type=int, help=f"after {WARM_UPS} warm-ups. default: 5, smoke: 1")
    add("--compute-ms", type=float, help="compute of a step. default: 150, smoke: 2")
    add("--steps", type=int, help="of a window without saving. default: 10, smoke: 3")
    add("--at-least", type=int, help="steps from a save on. default: 5, smoke: 3")
    add("--seconds", type=float, help="of saving continuously. default: 12, smoke: 0.3")
    args = parser.parse_args()
    usual = {"reps": 5, "compute_ms": 150.0, "steps": 10, "at_least": 5, "seconds": 12.0}
    smoke = {"reps": 1, "compute_ms": 2.0, "steps": 3, "at_least": 3, "seconds": 0.3}
    for name, value in (smoke if args.smoke else usual).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
        elif getattr(args, name) < (0 if name == "compute_ms" else 1e-9):
            parser.error(f"--{name.replace('_', '-')} is too small")
    args.warm_ups = 1 if args.smoke else WARM_UPS
    args.systems = command.labels(args.systems)
    return args


# -- the child ----------------------------------------------------------------------------------


def measure(task: dict) -> dict[str, list[dict]]:
    """One record per case, system and repetition."""
    workload = catalogue(task["smoke"])[task["workload"]]
    training = Training(workload, seed=1)
    training.compute_for(task["compute_ms"] / 1000)
    records: dict[str, list[dict]] = {case: [] for case in task["cases"]}
    numbers = itertools.count()
    made = each_open(task, lambda name, root: by_mode(name, root, KEEP))
    with made as systems:
        last: dict[str, tuple[int, int]] = {}
        for rep in range(1 - task["warm_ups"], task["reps"] + 1):
            for case, (label, system) in itertools.product(task["cases"], systems.items()):
                if rep < 0 and case != "single":
                    continue  # these save several times: one warm-up is enough
                if label not in systems_in(case, task["systems"]):
                    continue
                settle(flush=not task["smoke"])
                before = Baseline.of(training, task["steps"])
                measures, last[label] = RUNS[case](task, system, training, before, numbers)
                found = {"system": label, "rep": rep, "warmup": rep <= 0, "measures": measures}
                records[case].append({**found, "steps_without": before.steps})
                _progress(task, case, found)
        for label, system in systems.items():
            number, moved = last[label]
            training.verify(system.restore(number, workload.like()), moved)
    return records


def systems_in(case: str, labels: list[str]) -> list[str]:
    """A synchronous save is never in flight when the next one comes."""
    return [label for label in labels if case != "behind" or name_of(label) != "sync"]


def single(task, system, training, before, numbers) -> tuple[dict, tuple[int, int]]:
    number = next(numbers)
    window = save_and_step(system, training, number, task["at_least"])
    return lost_in(window, before), (number, window.moved)


def behind(task, system, training, before, numbers) -> tuple[dict, tuple[int, int]]:
    system.save(next(numbers), training.state)
    training.step()
    found = not system.durable()
    measures, last = single(task, system, training, before, numbers)
    return {**measures, "behind": float(found)}, last


def lost_in(window: Window, before: Baseline) -> dict[str, float]:
    """What the save that a window begins with costs the steps in it, in parts."""
    first, *further = (seconds - before.median for seconds in window.steps)
    cpu = window.cpu - before.cpu * len(window.steps)
    return {
        "step": before.median,
        "in_save": window.in_save,
        "first": first,
        "further": sum(further),
        "lost": window.in_save + first + sum(further),
        "durable": window.durable,
        "steps": len(window.steps),
        "cpu": cpu,
        "cpu_share": cpu / (window.wall * cores()),
        "donated": window.donated,
    }


def continuous(task, system, training, before, numbers) -> tuple[dict, tuple[int, int]]:
    """From the start of one save to the end of another, so that only whole saves count."""
    saves, steps = 0, 0
    with Clock() as clock:
        while True:
            if saves == 0 or system.idle():
                if saves and clock.lap() >= task["seconds"]:
                    break
                number, moved = next(numbers), training.moved
                system.save(number, training.state)
                saves += 1
            training.step()
            steps += 1
    system.wait()
    cpu = clock.cpu - before.cpu * steps
    measures = {
        "step": before.median,
        "rate": steps * before.mean / clock.wall,
        "adjusted": adjusted(steps, before, clock.wall, cpu),
        "per_save": clock.wall / saves,
        "lost": (clock.wall - steps * before.mean) / saves,
        "cpu": cpu / saves,
        "cpu_share": cpu / (clock.wall * cores()),
    }
    return measures, (number, moved)


RUNS = {"single": single, "behind": behind, "continuous": continuous}


def adjusted(steps: int, before: Baseline, wall: float, cpu: float) -> float:
    """The rate of steps, of that without saving, had the writer taken no CPU time from them."""
    busy = min(cores(), before.cpu / before.mean)
    taken = max(0.0, cpu - (cores() - busy) * wall) / busy
    return steps * before.mean / (wall - taken)


def cores() -> int:
    return len(os.sched_getaffinity(0))


def _progress(task: dict, case: str, record: dict) -> None:
    which = "warm-up" if record["warmup"] else f"{record['rep']}/{task['reps']}"
    measures = record["measures"]
    shown = f"step {measures['step']:.3f} s, lost per save {measures['lost']:7.3f} s"
    if case == "continuous":
        shown += f", rate {measures['rate']:.2f}, adjusted {measures['adjusted']:.2f}"
    progress(f"{task['workload']} {which:>7} {case:<10} {record['system']:<14} {shown}")


# -- the tables ---------------------------------------------------------------------------------


def show(workload: Workload, args: argparse.Namespace, records: dict[str, list[dict]]) -> dict:
    """Print the tables of one workload; return what goes into the JSON file."""
    found: dict[str, list[report.Ratio]] = {}
    print(
        f"\n{workload.name}: {workload.describe()}, about {args.compute_ms:g} ms of compute a step."
        f"\nMedian of {args.reps} (smallest .. largest), and ratio of the medians (rep by rep)."
    )
    for case, title, rows, measures, targets in (
        ("single", "One save", SINGLE_ROWS, SINGLE_RATIOS, TARGETS[workload.kind]),
        ("behind", "A save while one is in flight", BEHIND_ROWS, SINGLE_RATIOS, ()),
        ("continuous", "Saving all the time", CONTINUOUS_ROWS, CONTINUOUS_RATIOS, ()),
    ):
        if not records.get(case):
            continue
        labels = systems_in(case, args.systems)
        print(f"\n{title}\n\n{report.table(labels, records[case], rows)}")
        pairs = [
            (label, against)
            for against in PEERS
            if against in labels
            for label in labels
            if label != against and (against == "orbax" or name_of(label) in MODES)
        ]
        if pairs:
            ratios = report.compare(records[case], pairs, measures, targets, JUDGED)
            print(f"\n{report.ratio_table(ratios, rows)}")
            found[case] = ratios
    checks = [
        *checks_of(records, args.systems, "single", "donated", 1.0),
        *checks_of(records, args.systems, "continuous", "adjusted", ADJUSTED_AT_LEAST),
    ]
    if checks:
        print(f"\n{report.check_table(checks)}")
    sys.stdout.flush()
    judged: list[report.Ratio | Check] = [*found.get("single", ()), *checks]
    return {
        "workload": workload.name,
        "ratios": [
            {**asdict(item), "verdict": item.verdict, "case": case}
            for case, ratios in found.items()
            for item in ratios
        ],
        "checks": [{**asdict(item), "verdict": item.verdict} for item in checks],
        "judged": [
            {**line, "measure": f"{line['measure']}, {item.system}"}
            for item in judged
            for line in report.judged(workload.name, [item], SINGLE_ROWS)
        ],
        "missed": report.missed(judged, SINGLE_ROWS),
        "records": records,
    }


def checks_of(
    records: dict[str, list[dict]], systems: list[str], case: str, measure: str, limit: float
) -> list[Check]:
    return [
        Check(
            CHECK_TITLES[measure],
            label,
            statistics.median(report.values(records[case], label, measure)),
            limit,
            at_least=True,
        )
        for label in systems
        if case in records and name_of(label) in MODES
    ]


if __name__ == "__main__":
    sys.exit(command.child(measure) if command.is_child() else main())
