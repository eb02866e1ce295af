"""Checkpoints that real Orbax releases wrote, kept as archives."""

import pathlib
import tarfile

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
NAMES = sorted(path.name.removesuffix(".tar.gz") for path in GOLDEN.glob("*.tar.gz"))


def unpack(name: str, root: pathlib.Path) -> pathlib.Path:
    """The directory of the archive `name`, unpacked under `root`."""
    # Python before 3.11.4, as Debian 12 has it, knows no filters; the archives are ours
    safe = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
    with tarfile.open(GOLDEN / f"{name}.tar.gz") as archive:
        archive.extractall(root, **safe)
    return root / name
