"""How much training gets done, by interval and mode: `python benchmarks/goodput.py`.

Simulates jobs of 64 to 16,384 accelerators in each mode, with failures drawn from an exponential
distribution, from a Weibull distribution, and from a trace, and compares on the same failures:

  best      the fixed interval with the highest goodput, found by search on these very failures
  hourly    a save every hour
  Young     sqrt(2 C M), with the true time between failures M and the true cost of a save C
  Daly      his formula of a higher order, with the same
  Saxena    the interval that is optimal for availability, with the same
  advise    the interval of `ckptmgr.advise`, with the same
  adaptive  `ckptmgr.core.advice.adapt`, which is told none of these and learns them

No formula goes below the flush. The figures depend on no machine: the same seed gives the same ones.
`goodput_model.py` is the simulator; `docs/ADVICE.md` says what it leaves out.
"""

import argparse
import functools
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import report
from ckptmgr.core import advice
from ckptmgr.core.advice import Adaptive
from ckptmgr.core.jobfacts import DAY, FLUSH_ROOM
from command import FAILED, MISSED, choice_of, installed, progress
from goodput_model import DISTRIBUTIONS, SLOTS, TRACE, Draws, Job, Learner, draw, simulate

AT_LEAST = 0.98  # of the goodput of the best fixed interval
JOBS = {
    64: Job(64, size=8e9 * 14, write=2e9, read=4e9, step=5.0),
    256: Job(256, size=30e9 * 14, write=4e9, read=8e9, step=8.0),
    1024: Job(1024, size=175e9 * 14, write=10e9, read=20e9, step=10.0),
    4096: Job(4096, size=405e9 * 14, write=20e9, read=40e9, step=12.0),
    16384: Job(16384, size=1e12 * 14, write=50e9, read=100e9, step=15.0),
}
RULES = ("hourly", "Young", "Daly", "Saxena", "advise")
COLUMNS = ("best", *RULES, "adaptive")
HARDER = ("told M / 10", "told 10 M", "storage 3 times slower after a third of the run")


@dataclass(frozen=True)
class Row:
    """A scenario and what came of it: goodput, and intervals in seconds."""

    accelerators: int
    mode: str
    distribution: str
    failures: float  # of a run, in the mean
    goodput: dict[str, float]
    interval: dict[str, float]
    curve: list[tuple[float, float]]  # fixed intervals and their goodput

    @property
    def title(self) -> str:
        return f"{self.accelerators:,}, {self.mode}, {self.distribution}"

    @property
    def share(self) -> float:
        return self.goodput["adaptive"] / self.goodput["best"]

    @property
    def verdict(self) -> str:
        return "OK" if self.share >= AT_LEAST else "MISS"


# -- what is simulated ----------------------------------------------------------------------------


def scenario(args: argparse.Namespace, job: Job, mode: str, distribution: str) -> Row:
    """All intervals on the same runs."""
    runs = draws_of(args, job, distribution)
    interval = rules(job, mode)
    curve = search(functools.partial(fixed, job, mode, runs), job.flush / 2, 3 * DAY, args.points)
    curve |= {each: fixed(job, mode, runs, each) for each in interval.values()}
    goodput = {name: curve[each] for name, each in interval.items()}
    interval["best"] = max(curve, key=curve.__getitem__)
    goodput["best"] = curve[interval["best"]]
    goodput["adaptive"], interval["adaptive"], failures = adaptive(job, mode, runs, Adaptive())
    points = sorted(curve.items())
    return Row(job.accelerators, mode, distribution, failures, goodput, interval, points)


def harder(args: argparse.Namespace, rows: Sequence[Row]) -> Iterator[Row]:
    """The adaptive schedule told a wrong time between failures, and on storage that slows down."""
    for row in rows:
        if row.distribution != "exponential" or row.mode == "copy_on_write":
            continue
        job = job_of(args, row.accelerators)
        runs = draws_of(args, job, row.distribution)
        for title, told in zip(HARDER, (job.mtbf / 10, job.mtbf * 10, None), strict=True):
            if told is None:
                job = replace(job, slower_after=job.seconds / 3, slower=3.0)
                score = functools.partial(fixed, job, row.mode, runs)
                curve = search(score, job.flush / 2, 3 * DAY, args.points)
            else:
                curve = dict(row.curve)
            best = max(curve, key=curve.__getitem__)
            settings = Adaptive(mean_seconds_between_failures=told)
            found, last, failures = adaptive(job, row.mode, runs, settings)
            yield Row(
                row.accelerators,
                row.mode,
                title,
                failures,
                {"best": curve[best], "adaptive": found},
                {"best": best, "adaptive": last},
                sorted(curve.items()),
            )


def job_of(args: argparse.Namespace, accelerators: int) -> Job:
    return replace(JOBS[accelerators], seconds=args.days * DAY)


def draws_of(args: argparse.Namespace, job: Job, distribution: str) -> list[Draws]:
    return [draw(job, distribution, args.seed + n, args.gaps) for n in range(args.runs)]


def rules(job: Job, mode: str) -> dict[str, float]:
    """The intervals to compare, from save to save."""
    cost, mtbf = job.cost(mode), job.mtbf
    found = {
        "hourly": 3600.0,
        "Young": advice.young(cost, mtbf) + cost,
        "Daly": advice.daly(cost, mtbf) + cost,
        "Saxena": advice.availability_optimal(cost, mtbf, job.recovery),
        "advise": advice.best_interval(cost, FLUSH_ROOM * job.flush, job.recovery, mtbf),
    }
    return {name: max(interval, job.flush) for name, interval in found.items()}


def fixed(job: Job, mode: str, runs: Sequence[Draws], interval: float) -> float:
    return statistics.fmean(simulate(job, mode, draws, interval).goodput for draws in runs)


def adaptive(
    job: Job, mode: str, runs: Sequence[Draws], settings: Adaptive
) -> tuple[float, float, float]:
    """Goodput, the last interval, and the number of failures."""
    found = [simulate(job, mode, draws, math.nan, Learner(settings, job)) for draws in runs]
    return (
        statistics.fmean(out.goodput for out in found),
        statistics.median(out.last_interval for out in found),
        statistics.fmean(out.failures for out in found),
    )


def search(
    score: Callable[[float], float], low: float, high: float, points: int
) -> dict[float, float]:
    """Scores on a geometric grid from low to high, and twice on a finer one around the best."""
    ratio = (high / low) ** (1 / (points - 1))
    found = {low * ratio**n: score(low * ratio**n) for n in range(points)}
    for _ in range(2):
        best = max(found, key=found.__getitem__)
        ratio **= 1 / 3
        for interval in (best / ratio**2, best / ratio, best * ratio, best * ratio**2):
            found[interval] = score(interval)
    return found


# -- what is shown --------------------------------------------------------------------------------


def table(rows: Sequence[Row], names: Sequence[str] = COLUMNS) -> str:
    lines = [["accelerators, mode, failures", "failures", *names, "adaptive / best", "target"]]
    for row in rows:
        cells = [f"{100 * row.goodput[name]:.2f} ({minutes(row.interval[name])})" for name in names]
        target = f">= {AT_LEAST} {row.verdict}"
        lines.append([row.title, f"{row.failures:.1f}", *cells, f"{row.share:.4f}", target])
    return report.columns(lines)


def minutes(interval: float) -> str:
    return f"{interval / 60:.3g} min" if interval < 6000 else f"{interval / 3600:.3g} h"


def plot_curves(rows: Sequence[Row], path: Path) -> None:
    """Goodput over the interval, a panel per size, a line per mode; marks for the rules."""
    from matplotlib.figure import Figure

    rows = [row for row in rows if row.distribution == "exponential"]
    sizes = sorted({row.accelerators for row in rows})[-3:]
    figure = Figure(figsize=(4 * len(sizes), 3.6), dpi=90, layout="constrained")
    axes = figure.subplots(1, len(sizes), squeeze=False, sharey=True)[0]
    marks = {"Young": "v", "Saxena": "s", "advise": "o", "adaptive": "*"}
    for axis, size in zip(axes, sizes, strict=True):
        for row in (row for row in rows if row.accelerators == size):
            x, y = zip(*((t / 60, 100 * good) for t, good in row.curve if good > 0.4), strict=True)
            (line,) = axis.plot(x, y, label=row.mode, linewidth=1.2)
            for name, mark in marks.items():
                at = row.interval[name] / 60, 100 * row.goodput[name]
                axis.plot(*at, mark, color=line.get_color(), markersize=7, alpha=0.8)
        axis.set(xscale="log", title=f"{size:,} accelerators", xlabel="interval, minutes")
        axis.grid(alpha=0.3)
    for name, mark in marks.items():
        axes[0].plot([], [], mark, color="gray", label=name)
    axes[0].set_ylabel("goodput, %")
    axes[0].legend(fontsize=7)
    figure.savefig(path)


def plot_sizes(rows: Sequence[Row], path: Path) -> None:
    """Goodput over the size, a panel per mode: hourly saves, the best interval and the adaptive."""
    from matplotlib.figure import Figure

    rows = [row for row in rows if row.distribution == "exponential"]
    modes = list(dict.fromkeys(row.mode for row in rows))
    figure = Figure(figsize=(4 * len(modes), 3.4), dpi=90, layout="constrained")
    axes = figure.subplots(1, len(modes), squeeze=False, sharey=True)[0]
    styles = {"hourly": ":", "advise": "--", "best": "-", "adaptive": "*"}
    for axis, mode in zip(axes, modes, strict=True):
        found = sorted((r for r in rows if r.mode == mode), key=lambda row: row.accelerators)
        for name, style in styles.items():
            goodput = [100 * row.goodput[name] for row in found]
            axis.plot([row.accelerators for row in found], goodput, style, label=name)
        axis.set(xscale="log", title=mode, xlabel="accelerators")
        axis.set_xticks([row.accelerators for row in found], [f"{r.accelerators:,}" for r in found])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("goodput, %")
    axes[0].legend()
    figure.savefig(path)


PLOTS = {"goodput.png": plot_curves, "goodput_sizes.png": plot_sizes}


# -- the command ----------------------------------------------------------------------------------


def main() -> int:
    args = arguments()
    if args.plots and not installed("matplotlib"):
        print("--plots: matplotlib is not installed; pip install 'ckptmgr[plots]'", file=sys.stderr)
        return FAILED
    began = time.perf_counter()
    rows = []
    for count in args.accelerators:
        for mode in args.modes:
            for distribution in args.distributions:
                rows.append(scenario(args, job_of(args, count), mode, distribution))
                progress(f"{rows[-1].title}: {rows[-1].share:.4f}")
    more = list(harder(args, rows))
    print(f"{args.runs} runs of {args.days:g} days in each row; goodput in %, with the interval.\n")
    print(table(rows))
    if more:
        print("\nHarder for the adaptive schedule:\n")
        print(table(more, ("best", "adaptive")))
    missed = [row for row in [*rows, *more] if row.verdict == "MISS"]
    took = f"it took {time.perf_counter() - began:.0f} s, {time.process_time():.0f} s of one core"
    print(f"\n{len(missed)} of {len(rows) + len(more)} targets missed; {took}")
    for row in missed:
        print(f"  {row.title}: {row.share:.4f} of the best")
    if args.json:
        settings = {name: getattr(args, name) for name in ("seed", "runs", "points", "days")}
        results = [{**asdict(row), "share": row.share} for row in [*rows, *more]]
        whole = {"format": 1, "settings": settings, "results": results}
        Path(args.json).write_text(json.dumps(whole, indent=1) + "\n")
    for name, plot in PLOTS.items() if args.plots else ():
        plot(rows, Path(args.plots, name))
    return MISSED if args.check and missed else 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--smoke", action="store_true", help="few, short runs: for CI")
    parser.add_argument("--accelerators", type=sizes, default=list(JOBS), help="default: all")
    for name, known in (("modes", tuple(SLOTS)), ("distributions", DISTRIBUTIONS)):
        about = f"default: {','.join(known)}"
        parser.add_argument(f"--{name}", type=choice_of(known), default=list(known), help=about)
    parser.add_argument("--runs", type=int, default=20, help="of each scenario (default: 20)")
    parser.add_argument("--days", type=float, default=30.0, help="length of a run (default: 30)")
    parser.add_argument("--points", type=int, default=16, help="of the coarse search (default: 16)")
    parser.add_argument("--seed", type=int, default=1, help="of the first run (default: 1)")
    parser.add_argument(
        "--trace",
        dest="gaps",
        metavar="FILE",
        type=read_trace,
        default=TRACE,
        help="seconds from one failure to the next, one a line, instead of the made-up trace; "
        "they are scaled to each job's time between failures",
    )
    parser.add_argument("--json", metavar="FILE", help="also write every record to FILE")
    parser.add_argument("--plots", metavar="DIR", help="also draw plots into DIR; wants matplotlib")
    parser.add_argument("--check", action="store_true", help="exit with 1 when a target is missed")
    args = parser.parse_args()
    if args.smoke:
        args.accelerators, args.runs, args.days, args.points = [64, 16384], 1, 2.0, 4
        print("Smoke sizes: they prove that the benchmark runs; the figures mean nothing.")
    return args


def sizes(text: str) -> list[int]:
    return [int(name) for name in choice_of([str(count) for count in JOBS])(text)]


def read_trace(path: str) -> list[float]:
    gaps = [float(line) for line in Path(path).read_text().split()]
    if len(gaps) < 2 or not all(0 < gap < math.inf for gap in gaps):
        raise argparse.ArgumentTypeError(f"{path}: two or more positive numbers, one a line")
    return gaps


if __name__ == "__main__":
    sys.exit(main())
