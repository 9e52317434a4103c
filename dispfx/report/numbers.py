"""Numbers formatted for people."""

_LARGEST_WRITTEN_OUT = 1e6
_MEGA, _GIGA = 1e6, 1e9


def shown_perplexity(value: float) -> str:
    """Format a perplexity with three decimals, or in scientific notation if it is huge."""
    return f"{value:,.3f}" if value < _LARGEST_WRITTEN_OUT else f"{value:.2e}"


def shown_bytes(size: float) -> str:
    """Format a size in gigabytes, or in megabytes below one gigabyte."""
    return f"{size / _GIGA:,.1f} GB" if size >= _GIGA else f"{size / _MEGA:,.1f} MB"
