"""What is fuzzed, by name."""

from __future__ import annotations

from tools.fuzz.target import Target
from tools.fuzz.targets import blocks, objects, places, texts, tiers, whole

TARGETS: dict[str, Target] = {
    target.name: target for module in (texts, objects, blocks, tiers, places, whole) for target in module.TARGETS
}
