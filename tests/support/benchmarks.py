"""Running a benchmark at its smoke size, and reading the tables that it prints."""

from tests.support.child import ROOT, run_python

BENCHMARKS = ROOT / "benchmarks"


def run(name: str, *args: object) -> str:
    """The output of a benchmark that has to succeed."""
    done = run_python(
        """
        import subprocess, sys
        sys.exit(subprocess.run([sys.executable, *sys.argv[1:]]).returncode)
        """,
        BENCHMARKS / name,
        "--smoke",
        *args,
        timeout=100,
    )
    return done.stdout


def tables(text: str) -> list[dict[str, list[str]]]:
    """Each markdown table as {title of the row: its cells}, the head under ""."""
    found: list[dict[str, list[str]]] = []
    inside = False
    for line in text.splitlines():
        if not line.startswith("|"):
            inside = False
            continue
        title, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        if not inside:
            found.append({"": [title, *cells][1:]})
        elif set(title) != {"-"}:
            found[-1][title] = cells
        inside = True
    return found


def full(table: dict[str, list[str]], head: list[str], *rows: str) -> None:
    """The table has these columns and rows, and a figure in each cell."""
    assert table[""] == head
    assert [row for row in table if row] == list(rows)
    assert [row for row in rows if not all(table[row])] == []
