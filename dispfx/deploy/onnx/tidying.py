"""Fold constants, inline functions and drop operators that do nothing, in time that grows with the graph.

torch's exporter does this with every rule that it knows.  One of them (slices that become a split) looks at
the whole graph again from each node; half of the exporter's time went there for thirty layers.  A decoder
needs the few rules below, and each looks at a node and what it reads.

    functions inlined → constants folded, rules, twice → constants lifted → equal values merged
    → norms and rotations as operators, from opset 23 on
"""

import onnx_ir as ir
import onnx_ir.passes.common as common
from onnxscript import optimizer, rewriter
from onnxscript.rewriter import onnx_fusions
from onnxscript.rewriter.rules import common as rules

ROUNDS = 2  # Constants that a rule creates are folded in the next round.
_RULES = rewriter.RewriteRuleSet(
    [
        rules.mul_by_1_rule,
        rules.add_0_rule,
        rules.sub_0_rule,
        rules.div_by_1_rule,
        rules.no_op_cast_rule,
        rules.cast_cast_rule,
        rules.no_op_expand_rule,
        rules.no_op_transpose_rule,
        rules.transpose_transpose_rule,
        rules.collapse_slice_rule,
        rules.collapse_slice2_rule,
        rules.unsqueeze_unsqueeze_rule,
        rules.squeeze_reshape_1d_rule,
        rules.reshape_reshape_rule,
        rules.cast_constant_of_shape_rule,
        rules.cast_constant_of_shape_without_value_rule,
        rules.no_op_dynamic_scatter_nd_rule,
        rules.no_op_static_scatter_nd_rule,
        # onnxscript before 0.7.1 has no such rule.
        *(rule for name in ("materialize_reshape_shape_rule",) if (rule := getattr(rules, name, None))),
    ]
)


def tidy(model: ir.Model) -> None:
    """Rewrite a model that the exporter has just translated in place."""
    common.InlinePass()(model)
    for _ in range(ROUNDS):
        optimizer.fold_constants(model, onnx_shape_inference=True)
        rewriter.RewritePass(_RULES)(model)
        common.RemoveUnusedNodesPass()(model)
    common.RemoveUnusedFunctionsPass()(model)
    common.RemoveUnusedOpsetsPass()(model)
    for step in (
        common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        common.LiftSubgraphInitializersToMainGraphPass(),
        common.DeduplicateInitializersPass(),
        common.CommonSubexpressionEliminationPass(),
        common.OutputFixPass(),
        common.NameFixPass(),
    ):
        step(model)
    onnx_fusions.fuse(model)
    _forget()


def _forget() -> None:
    """Show every rule a graph without weights: each keeps the last one that it saw, for good."""
    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([1]))
    node = ir.node("Identity", [x])
    node.outputs[0].type, node.outputs[0].shape = x.type, x.shape
    graph = ir.Graph([x], [node.outputs[0]], nodes=[node], opset_imports={"": 23}, name="nothing")
    nothing = ir.Model(graph, ir_version=10)
    rewriter.RewritePass(_RULES)(nothing)
    onnx_fusions.fuse(nothing)
