"""The compiler's outputs: checkpoint folder, exported program, ONNX, generated text."""
