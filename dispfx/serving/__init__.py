"""A pruned folder in vLLM: `vllm serve DIR`.

    fused_layers     what each linear layer of an engine reads, computes and writes, from the folder's layout
    rounded_weights  which of the layers have weights of 8 or 4 bits
    stored_indices   the indices while they are loaded, and the names of all tensors
    linear_method    one linear layer of vLLM on fewer features
    kernel_widths    the widths for which vLLM has a kernel for weights of 8 or 4 bits
    weight_format    the folder as a weight format of vLLM: refusals, names of tensors, checks of the indices
    plugin           the entry point that vLLM calls in each of its processes

Only this room imports vLLM, and no other room imports this one.
"""
