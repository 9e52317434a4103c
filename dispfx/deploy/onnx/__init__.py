"""The decoder as an ONNX model: export, repair, legalize, write, run and inspect.

    exporting   lowered graph → ONNX model in memory, through torch's exporter
    legalize    operators that ONNX Runtime has fast kernels for; its steps are files of their own
    files       models on disk, with their external weights
    quantize    weights of 4 and 8 bits; dequantize reads them back by definition
    session     models that run on torch tensors

Only this package knows onnx and ONNX Runtime.
"""
