"""Where the time of all threads goes, by function: a sampling profiler.

cProfile sees the thread that it is started in; most of a save happens on others. Here a thread looks
at all of them every millisecond, and gives the CPU time that each has used since it looked last to
the function that it finds it in. A call into C counts with the Python function that made it. Linux
only, by the clock that each thread has there.
"""

import contextlib
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from types import CodeType

import report

INTERVAL = 0.001
TOP = 15


class Sampler:
    """Samples while a `during` block runs; blocks of one name are added up."""

    def __init__(self) -> None:
        self._cpu: dict[str, Counter[str]] = defaultdict(Counter)
        self._there: dict[str, Counter[str]] = defaultdict(Counter)
        self._process: Counter[str] = Counter()
        self._wall: Counter[str] = Counter()

    @contextlib.contextmanager
    def during(self, phase: str) -> Iterator[None]:
        self._phase = phase
        self._used = {number: thread_seconds(number) for number in native_ids().values()}
        self._last = time.perf_counter(), time.process_time()
        self._ended = threading.Event()
        thread = threading.Thread(target=self._run, name="sampler")
        usual = sys.getswitchinterval()
        sys.setswitchinterval(INTERVAL / 4)  # else it waits 5 ms for its turn to look
        thread.start()
        try:
            yield
        finally:
            self._ended.set()
            thread.join()
            sys.setswitchinterval(usual)

    def _run(self) -> None:
        while not self._ended.wait(INTERVAL):
            self._look()
        self._look()

    def _look(self) -> None:
        phase = self._phase
        ids = native_ids()
        frames = sys._current_frames()
        now = time.perf_counter(), time.process_time()
        wall, process = (new - old for new, old in zip(now, self._last, strict=True))
        self._last = now
        self._wall[phase] += wall
        self._process[phase] += process
        for ident, frame in frames.items():
            if ident not in ids:
                continue
            seconds = thread_seconds(ids[ident])
            used = seconds - self._used.get(ids[ident], 0.0)
            self._used[ids[ident]] = seconds
            if ident == threading.get_ident():
                self._process[phase] -= used
                continue
            function = name_of(frame.f_code)
            self._cpu[phase][function] += used
            self._there[phase][function] += wall

    def tables(self, rounds: int) -> str:
        """For each phase the functions with the most CPU time, in milliseconds a round."""
        return "\n\n".join(self._table(phase, 1000 / rounds) for phase in self._wall)

    def _table(self, phase: str, scale: float) -> str:
        found = self._cpu[phase]
        lines = [["", "CPU, ms", "threads there, ms"]]
        for function, used in found.most_common(TOP):
            there = self._there[phase][function]
            lines.append([function, f"{used * scale:.1f}", f"{there * scale:.1f}"])
        rest = self._process[phase] - sum(found.values())
        lines.append(["threads that are not Python's", f"{max(0.0, rest) * scale:.1f}", ""])
        whole = f"{self._wall[phase] * scale:.1f}"
        lines.append([f"all of {phase}", f"{self._process[phase] * scale:.1f}", whole])
        return f"{phase}, by function\n\n{report.columns(lines)}"


def name_of(code: CodeType) -> str:
    return f"{'/'.join(code.co_filename.rsplit('/', 2)[1:])}: {code.co_qualname}"


def native_ids() -> dict[int, int]:
    """The system's number of each thread of Python's, by Python's; one that starts has none yet."""
    threads = ((thread.ident, thread.native_id) for thread in threading.enumerate())
    return {ident: number for ident, number in threads if ident and number}


def thread_seconds(native_id: int) -> float:
    """CPU seconds of one thread of this process; 0 when it has ended meanwhile."""
    try:
        return time.clock_gettime(~native_id << 3 | 6)  # Linux's clock of the thread with this id
    except OSError:
        return 0.0
