"""Figures as people read them."""

_LARGEST_WRITTEN_OUT = 1e6


def shown_perplexity(value: float) -> str:
    """Return three places, or a power of ten where a decoder predicts so badly that digits say nothing."""
    return f"{value:,.3f}" if value < _LARGEST_WRITTEN_OUT else f"{value:.2e}"
