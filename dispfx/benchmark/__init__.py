"""How fast a decoder is: timing, bounds, static decoders, latency tables."""
