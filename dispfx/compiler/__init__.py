"""The compiler: its pipelines, and the functions that run them."""
