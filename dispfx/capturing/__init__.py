"""An `nn.Module` becomes a `Program`; and what a trace of somebody's module needs around it.

module_capture   the graph of a decoder
cached_capture   the same with a cache
graph_export     torch.export itself, without what it prints
unlifting        from an exported program to a program
inlining         regions of other gradient or autocast modes become code like other code
in_place         operations in place are spelled as what they compute
document_masks   the documents of a sequence are kept apart
module_state     the module, and the state of random numbers, are afterwards as they were before
fitting_shapes   at which the decoder is traced and compared
warm_up          masks and tables that it makes where it needs them are made first
caches           functions that remember results compute them anew
rounding         how far graph and module may be from each other
valid_lengths    for which sequence lengths the graph holds
refusals         why a module cannot be traced: its line, and what helps
"""
