"""Weights in fewer bits, chosen so that a decoder's predictions change as little as possible.

moments         what the layers of a decoder read on a text, weighed by what errors would do to its loss
rounding        one weight and its moments → codes, scales and zero points
rounded_layers  the layers of a decoder and a text → a rounded weight for each
stored_weights  rounded weights ↔ the tensors of a file (compressed-tensors)
"""
