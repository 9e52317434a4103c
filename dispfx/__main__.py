"""`python -m dispfx` is the `dispfx` command."""

from dispfx.cli import main

if __name__ == "__main__":
    main()
