"""Comparisons of two forms of a decoder."""
