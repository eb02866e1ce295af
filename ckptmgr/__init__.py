"""ckptmgr: checkpoints for JAX training that do not stall it and can prove what they saved."""

from ckptmgr.checking import verify
from ckptmgr.core.info import Items, PerProcess, Restored, Skipped, StepInfo
from ckptmgr.core.plan import RestorePlan
from ckptmgr.core.retention import KeepAll, KeepLast
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
from ckptmgr.reading import Description, describe, plan_restore, restore

__all__ = [
    "AuditFailed",
    "CheckpointError",
    "CheckpointManager",
    "Coordination",
    "CorruptCheckpoint",
    "Description",
    "Heartbeat",
    "Integrity",
    "InvalidOption",
    "Items",
    "KeepAll",
    "KeepLast",
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
    "describe",
    "plan_restore",
    "restore",
    "verify",
]
