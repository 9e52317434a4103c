"""Printed graphs cut down to the lines that a test is about."""

from dispfx.ir.printer import print_program
from dispfx.ir.program import Program


def lines_of(program: Program, *names: str) -> str:
    """Return the printed lines of the named values, in the graph's order, the stream's mark kept."""
    chosen = [line for line in print_program(program).splitlines() if _name(line) in names]
    assert len(chosen) == len(set(names)), f"{set(names) - set(map(_name, chosen))} not in the graph"
    return "\n".join(line.rstrip() for line in chosen)


def names_of(program: Program) -> set[str]:
    """Return the names of all values."""
    return {node.name for node in program.graph.nodes}


def _name(line: str) -> str:
    return line[2:].split(" = ")[0].split(":")[0]


def calls_of(program: Program, operation: str) -> str:
    """Return the printed calls of an operation, in the graph's order, without the names they get."""
    calls = [line.split(" = ", 1)[1] for line in print_program(program).splitlines() if " = " in line]
    return "\n".join(call for call in calls if call.startswith(f"{operation}("))
