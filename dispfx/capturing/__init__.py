"""What a trace of somebody's module needs around it.

module_state   the module, and the state of random numbers, are afterwards as they were before
caches         functions that remember results compute them anew
exporting      torch.export itself, without what it prints
"""
