"""Sizes in bytes, for people to read."""


def size(num: int) -> str:
    """Bytes in a unit that fits.

    >>> size(999), size(1234), size(999_999), size(5_000_000_000)
    ('999 B', '1.23 kB', '1 MB', '5 GB')
    """
    value, units = float(num), ["kB", "MB", "GB", "TB", "PB"]
    unit = "B"
    while value >= 999.5 and units:  # what would be written with four digits
        value, unit = value / 1000, units.pop(0)
    return f"{value:.0f} B" if unit == "B" else f"{value:.3g} {unit}"
