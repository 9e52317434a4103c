"""The compiler: its stages, and the functions that run them."""
