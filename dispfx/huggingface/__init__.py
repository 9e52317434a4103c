"""A pruned decoder as an ordinary transformers model.

    layout      how the modules of a pruned decoder differ from the dense one's, as the config holds it
    facts       which module a site's weights, values and norms belong to, read off the graph
    planning    sites and selections → layout, index buffers and cut tensors; no module is known by name
    modules     the modules that select before, or scatter after, an ordinary smaller one
    building    layout → a model whose modules have the pruned shapes, with or without values
    quantizer   the extension point of transformers through which `from_pretrained` finds all this
    registering when that extension point is filled, without importing transformers

Nothing is imported here, so that `import dispfx` stays quick.
"""
