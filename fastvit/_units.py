"""Amounts of memory as people write them."""

from __future__ import annotations

UNITS = {
    "b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
}  # fmt: skip


def read_bytes(text: str) -> int:
    """Read "24GiB", "80GB" or "500 MiB" as bytes.

    Raises:
        ValueError: no amount of memory, or a number without a unit.
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
    if not 0 < value < 1e18:
        raise ValueError(f"must be an amount of memory such as 24GiB or 80GB, got {text!r}")
    return int(value)
