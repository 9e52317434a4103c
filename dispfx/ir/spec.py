"""The specification of a valid program at each level.

captured   the named inputs (token ids first) and outputs (logits first), every tensor read exists
canonical  and: no in-place operation, one read per tensor, every fact names a value that exists
gated      and: one mask input per site at the end, every gate multiplies an activation by one
lowered    canonical again, no gate left, all index tensors inside their dimension
static     and: keys and values are written into the caches that the program takes, in place

That canonicalize erased what does nothing is its own promise, which its second run shows.
"""

from torch import fx

from dispfx.ir import ops
from dispfx.ir.program import Program

_INDEXED = ops.packets("index_select index_add")

LEVELS = ("captured", "canonical", "gated", "lowered", "static")


def verify_program(program: Program) -> str | None:
    """Return what is wrong with the program at its level, or None."""
    if program.level not in LEVELS:
        return f"{program.level!r} is no level; they are {', '.join(LEVELS)}"
    try:
        program.graph.lint()
    except (RuntimeError, AttributeError) as error:
        return f"the graph is broken: {error}"
    problems = (_shape_of_program(program), _missing_tensor(program))
    if program.level != "captured":
        problems += (_not_canonical(program), _stale_fact(program))
    problems += (_gates(program),)
    if program.level in ("lowered", "static"):
        problems += (_index_outside(program),)
    return next((problem for problem in problems if problem), None)


def _shape_of_program(program: Program) -> str | None:
    inputs = [node for node in program.graph.nodes if node.op == "placeholder"]
    expected = len(program.inputs) + (len(program.sites) if program.level == "gated" else 0)
    if len(inputs) != expected:
        return f"a {program.level} program has {expected} input(s), this one has {len(inputs)}"
    returned = program.graph.output_node().args[0]
    values = returned if isinstance(returned, list | tuple) else (returned,)
    if not all(isinstance(value, fx.Node) for value in values):
        return "a program returns tensors and nothing else"
    if len(values) != len(program.outputs):
        return f"this program returns {len(program.outputs)} tensor(s), the graph {len(values)}"
    return None


def _missing_tensor(program: Program) -> str | None:
    known = {path for path, _ in program.tensors()}
    for node in program.graph.nodes:
        if node.op == "get_attr" and node.target not in known:
            return f"{node.name} reads {node.target}, which does not exist"
    return None


def _not_canonical(program: Program) -> str | None:
    read: set[object] = set()
    for node in program.graph.nodes:
        if ops.mutates(node) and not (program.level == "static" and _writes_a_cache(node)):
            return f"{node.name} changes its operand in place"
        if node.op == "get_attr" and node.target in read:
            return f"{node.target} is read by two nodes"
        if node.op == "get_attr":
            read.add(node.target)
    return None


def _writes_a_cache(node: fx.Node) -> bool:
    cache = node.args[0]
    is_input = isinstance(cache, fx.Node) and cache.op == "placeholder"
    return is_input and ops.packet(node) is ops.aten.index_copy_


def _stale_fact(program: Program) -> str | None:
    """Facts about the stream and gate points name values of the canonical graph."""
    if program.level in ("lowered", "static") or program.stream is None:
        return None
    names = {node.name for node in program.graph.nodes}
    facts = {*program.stream.values, *program.stream.writes}
    facts |= {point.value for site in program.sites for point in site.gates}
    missing = facts - names
    return f"a fact names {sorted(missing)[0]}, which is not in the graph" if missing else None


def _gates(program: Program) -> str | None:
    gates = [node for node in program.graph.nodes if ops.is_gate(node)]
    if program.level != "gated":
        return f"{gates[0].name} is a gate in a {program.level} program" if gates else None
    # Those that correct a mean or a norm have other names.
    found = sum(gate.name.startswith("gate_") for gate in gates)
    if found != sum(len(site.gates) for site in program.sites):
        return f"{sum(len(site.gates) for site in program.sites)} gates were expected, {found} are there"
    for gate in gates:
        value, _, dim, *_ = gate.args
        if not isinstance(value, fx.Node) or value.op == "get_attr":
            return f"{gate.name} does not stand on an activation"
        if not isinstance(dim, int) or not 0 <= dim < ops.rank(value):
            return f"{gate.name} gates dimension {dim} of {value.name}"
    return None


def _index_outside(program: Program) -> str | None:
    """Every position that a lowered read or write takes must exist, where the index has values yet."""
    tensors = dict(program.tensors())
    for node in program.graph.nodes:
        if ops.packet(node) not in _INDEXED:
            continue
        value, dim, index = node.args[:3]
        positions = tensors.get(str(index.target)) if index.op == "get_attr" else None
        if positions is None or positions.is_meta or positions.numel() == 0:
            continue
        size = ops.shape_of(value)[dim]
        if int(positions.min()) < 0 or int(positions.max()) >= size:
            return f"{node.name} takes positions of {index.target} that are not in [0, {size})"
    return None
