"""ckptmgr: checkpoints for JAX training that do not stall it and can prove what they saved."""

from ckptmgr.checking import verify
from ckptmgr.core.advice import Adaptive
from ckptmgr.core.advisor import advise
from ckptmgr.core.figures import Advice
from ckptmgr.core.info import Items, PerProcess, Restored, Skipped, StepInfo
from ckptmgr.core.plan import RestorePlan
from ckptmgr.core.retention import (
    Budget,
    Decision,
    KeepAll,
    KeepBest,
    KeepEvery,
    KeepEverySeconds,
    KeepHeartbeats,
    KeepLast,
    KeepLogSpaced,
)
from ckptmgr.describing import Description, describe
from ckptmgr.engine.verify import Verdict
from ckptmgr.engine.worker import SaveHandle
from ckptmgr.errors import (
    AuditFailed,
    CheckpointError,
    CorruptCheckpoint,
    InvalidOption,
    ManagerClosed,
    NotAllowedHere,
    PeerFailed,
    Problem,
    ReadOnly,
    SaveFailed,
    SnapshotLost,
    StepExists,
    StepNotFound,
    StoreError,
    TreeMismatch,
    UnsupportedLeaf,
)
from ckptmgr.manager import CheckpointManager
from ckptmgr.options import (
    Coordination,
    Heartbeat,
    Integrity,
    LeafRule,
    Options,
    Restore,
    Schedule,
    Snapshot,
    Storage,
)
from ckptmgr.pruning import prune
from ckptmgr.reading import plan_restore, restore
from ckptmgr.watching import watch

__all__ = [
    "Adaptive",
    "Advice",
    "AuditFailed",
    "Budget",
    "CheckpointError",
    "CheckpointManager",
    "Coordination",
    "CorruptCheckpoint",
    "Decision",
    "Description",
    "Heartbeat",
    "Integrity",
    "InvalidOption",
    "Items",
    "KeepAll",
    "KeepBest",
    "KeepEvery",
    "KeepEverySeconds",
    "KeepHeartbeats",
    "KeepLast",
    "KeepLogSpaced",
    "LeafRule",
    "ManagerClosed",
    "NotAllowedHere",
    "Options",
    "PeerFailed",
    "PerProcess",
    "Problem",
    "ReadOnly",
    "Restore",
    "RestorePlan",
    "Restored",
    "SaveFailed",
    "SaveHandle",
    "Schedule",
    "Skipped",
    "Snapshot",
    "SnapshotLost",
    "StepExists",
    "StepInfo",
    "StepNotFound",
    "Storage",
    "StoreError",
    "TreeMismatch",
    "UnsupportedLeaf",
    "Verdict",
    "advise",
    "describe",
    "plan_restore",
    "prune",
    "restore",
    "verify",
    "watch",
]
