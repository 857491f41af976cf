"""When a request leaves its full KV to the host, and when it gets it back."""

from __future__ import annotations

from dataclasses import dataclass

# Requests leave while less than this share of device slots is free or evictable.
LOW_WATER = 0.25
# One comes back to stay if more than this share is left with it; more than ``LOW_WATER`` if the
# link cannot keep up.
HIGH_WATER = 0.5


@dataclass(frozen=True)
class Room:
    """Device slots for KV.

    Attributes:
        size: in all.
        left: free, or evictable.
        growth: that running requests may take in one iteration.
        refused: whether somebody has been refused for want of room.
    """

    size: int
    left: int
    growth: int
    refused: bool

    def should_leave(self, carries: bool) -> bool:
        """Whether a resident should leave its full KV to the host.

        Args:
            carries: whether the link has time to bring that back once a round.
        """
        if self.left < self.growth:
            return True  # or somebody is retracted
        return carries and (self.refused or self.left < LOW_WATER * self.size)

    def may_return(self, missing: int, link_busy: float) -> bool:
        """Whether an offloaded request may keep its full KV on the device.

        Args:
            missing: slots that this takes.
            link_busy: share of the link's time that copies take.
        """
        water = LOW_WATER if link_busy > 1.0 else HIGH_WATER
        return not self.refused and self.left - missing > water * self.size
