"""What a budget counts of a decoder: parameters, the KV cache, and what its constraints limit."""

from math import prod

from dispfx.errors import BudgetError
from dispfx.ir.program import Program
from dispfx.plan.budget import Budget
from dispfx.plan.limit import Counter, Limit
from dispfx.plan.linear_count import LinearCount
from dispfx.plan.parameter_count import ParameterCount
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
        [_limit(one, program) for one in constraints],
    )


def _cache_by_heads(program: Program) -> LinearCount:
    """Return the cache, of which heads can be removed."""
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


def _limit(constraint: Constraint, program: Program) -> Limit:
    parameters = program.all_parameters
    item_bytes = {path: tensor.element_size() for path, tensor in parameters.items()}
    weights = ParameterCount.of_sites(program.sites, program.shapes, "total", item_bytes)
    dense = sum(prod(shape) * item_bytes[path] for path, shape in program.shapes.items())
    parts: list[Counter] = [weights, LinearCount.of_indices(program.sites, parameters)]
    if constraint.kind == "memory":
        cache = _cache(program, "limit the size of the weights alone").times(constraint.tokens)
        dense += cache.dense
        parts.append(cache)
    return Limit(constraint.text, dense, constraint.most(dense), tuple(parts))
