"""The decoder as an ONNX model: made, repaired and legalized, written, run and looked at.

    exporting   lowered graph → ONNX model in memory, through torch's exporter
    legalize    operators that ONNX Runtime has fast kernels for; its steps are files of their own
    files       models on disk, with their weights beside them
    session     models that run on torch tensors
    placement   which nodes ran on the CPU

This package alone knows onnx and ONNX Runtime.
"""
