"""Who drafts and who verifies, and how much: plain Python bookkeeping, no tensors, no engine."""

from sglang_vericache.scheduler.cost_model import CostModel, Work
from sglang_vericache.scheduler.draft_length import AdaptiveLength, DraftLength, FixedLength, Length
from sglang_vericache.scheduler.link import Link, LinkLoad
from sglang_vericache.scheduler.phases import Copy, PhaseWheel
from sglang_vericache.scheduler.planner import Planner
from sglang_vericache.scheduler.residency import Room

__all__ = [
    "AdaptiveLength",
    "Copy",
    "CostModel",
    "DraftLength",
    "FixedLength",
    "Length",
    "Link",
    "LinkLoad",
    "PhaseWheel",
    "Planner",
    "Room",
    "Work",
]
