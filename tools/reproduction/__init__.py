"""The tables of `tools/reproduce.py`."""
