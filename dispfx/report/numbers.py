"""Figures as people read them."""

_LARGEST_WRITTEN_OUT = 1e6
_MEGA, _GIGA = 1e6, 1e9


def shown_perplexity(value: float) -> str:
    """Return three places, or a power of ten where a decoder predicts so badly that digits say nothing."""
    return f"{value:,.3f}" if value < _LARGEST_WRITTEN_OUT else f"{value:.2e}"


def shown_bytes(size: float) -> str:
    """Return gigabytes, or megabytes where there is less than one."""
    return f"{size / _GIGA:,.1f} GB" if size >= _GIGA else f"{size / _MEGA:,.1f} MB"
