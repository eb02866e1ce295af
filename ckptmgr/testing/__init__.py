"""For tests of code that saves through ckptmgr: a store that fails on demand."""

from ckptmgr.testing.faults import Fault, FaultyStore, Hold, Operation

__all__ = ["Fault", "FaultyStore", "Hold", "Operation"]
