"""How fast a decoder is: timing, bounds, programs with a static cache, latency tables."""
