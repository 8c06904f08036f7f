"""Amounts of memory as people write them, and the largest sizes of a step that are planned."""

from __future__ import annotations

UNITS = {
    "b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
}  # fmt: skip

# More than any machine takes. Up to these, all products of sizes that a study computes by itself fit into 64 bits.
MOST_BYTES = 1 << 50
MOST_IMAGES = 1 << 20  # of a batch
MOST_PIXELS = 1 << 16  # of a side of an image


def read_bytes(text: str) -> int:
    """Read "24GiB", "80GB" or "500 MiB" as bytes.

    Raises:
        ValueError: no amount of memory, a number without a unit, or more than 1 PiB.
    """
    words = text.strip().lower()
    number = words.rstrip("abcdefghijklmnopqrstuvwxyz ")
    unit = words[len(number) :].strip()
    if number and not unit:
        raise ValueError(f"must have a unit, such as {number}GiB or {number}GB, got {text!r}")
    try:
        value = float(number) * UNITS[unit]
    except (ValueError, KeyError):
        value = 0.0
    if not 1 <= value <= MOST_BYTES:
        raise ValueError(f"must be an amount of memory such as 24GiB or 80GB, up to 1024TiB, got {text!r}")
    return int(value)
