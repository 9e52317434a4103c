"""Several processes: ranks of one run, and their launcher."""
