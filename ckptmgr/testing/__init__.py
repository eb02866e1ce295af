"""For tests of code that saves through ckptmgr: stores and copies that fail on demand."""

from ckptmgr.testing.faults import Fault, FaultyStore, Hold, Operation
from ckptmgr.testing.torn import TornStager

__all__ = ["Fault", "FaultyStore", "Hold", "Operation", "TornStager"]
