"""What leaves the compiler: the checkpoint folder, the exported program, ONNX, generated text."""
