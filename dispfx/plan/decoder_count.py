"""What a budget counts of a decoder: parameters, the KV cache, and what its constraints limit."""

from math import prod

from dispfx.errors import BudgetError
from dispfx.ir.program import Program
from dispfx.plan.budget import Budget
from dispfx.plan.latency_table import LatencyTable
from dispfx.plan.limit import Counter, Limit
from dispfx.plan.linear_count import LinearCount
from dispfx.plan.parameter_count import ParameterCount
from dispfx.plan.step_time import StepTime
from dispfx.words.constraint_text import Constraint, parse_constraint
from dispfx.words.option_names import option


def count_of(budget: Budget, program: Program) -> ParameterCount:
    """Return the count of a program, with the cache and the limits that the budget needs.

    Raises:
        BudgetError: if the size of the cache is needed and not known.
        BudgetError, SourceError, PassError: as `ParameterCount.of_sites`.
    """
    count = ParameterCount.of_sites(program.sites, program.shapes, budget.of)
    constraints = [parse_constraint(text) for text in budget.constraints]
    return count.with_targets(
        None if budget.kv_ratio is None else _cache_by_heads(program),
        [
            _time_limit(one, program, budget.costs) if one.is_time else _size_limit(one, program)
            for one in constraints
        ],
    )


def _cache_by_heads(program: Program) -> LinearCount:
    """Return the cache, as far as heads hold it."""
    size = program.cache
    if size is not None and size.unaffected:
        raise BudgetError(
            f"a share of the KV cache was requested, but heads do not make it smaller: {size.unaffected}",
            hint=f"leave out {option('kv_ratio')}",
        )
    return _cache(program, f"leave out {option('kv_ratio')}")


def _cache(program: Program, hint: str) -> LinearCount:
    size = program.cache
    if size is None or size.unknown:
        raise BudgetError(
            "the size of the KV cache is needed, but it is not known: "
            + ("sites of a graph without a cache tell it" if size is None else size.unknown),
            hint=hint,
        )
    return LinearCount.of_cache(program.sites, size)


def _time_limit(constraint: Constraint, program: Program, costs: LatencyTable | None) -> Limit:
    """Return the limit of a time, from the times of the table.

    Raises:
        BudgetError: if the table does not have the step, or is of another decoder.
    """
    step = constraint.text.partition(":")[0].strip().lower().replace(" ", "")
    known = {one.text.replace(" ", ""): one for one in (() if costs is None else costs.steps)}
    if step not in known:
        names = ", ".join(one.text for one in known.values()) or "no step"
        asked = option("step", constraint.text.partition(":")[0])
        raise BudgetError(
            f"{constraint.text!r} needs the times of that step, and the latency table has {names}",
            hint=f"measure it: `dispfx costs MODEL` with {asked}, and name the table with {option('costs')}",
        )
    times = known[step]
    if times.dense_parameters != program.size:
        raise BudgetError(
            f"the latency table was measured on a decoder of {times.dense_parameters:,} parameters, and this "
            f"one has {program.size:,}",
            hint="measure this decoder with `dispfx costs MODEL`",
        )
    heads = any(site.kind == "heads" for site in program.sites)
    known_cache = program.cache is not None and not program.cache.unknown
    cache = _cache(program, "") if heads and known_cache and times.cache_seconds else None
    parameters = ParameterCount.of_sites(program.sites, program.shapes, "total")
    time = StepTime.of(times, parameters, cache)
    return Limit(constraint.text, time.dense, constraint.most(time.dense), (time,))


def _size_limit(constraint: Constraint, program: Program) -> Limit:
    parameters = program.all_parameters
    item_bytes = {path: tensor.element_size() for path, tensor in parameters.items()}
    weights = ParameterCount.of_sites(program.sites, program.shapes, "total", item_bytes)
    dense = sum(prod(shape) * item_bytes[path] for path, shape in program.shapes.items())
    parts: list[Counter] = [weights, LinearCount.of_indices(program.sites, parameters)]
    if constraint.kind == "memory":
        tokens = constraint.batch * constraint.length
        cache = _cache(program, "limit the size of the weights alone").times(tokens)
        dense += cache.dense
        parts.append(cache)
    return Limit(constraint.text, dense, constraint.most(dense), tuple(parts))
