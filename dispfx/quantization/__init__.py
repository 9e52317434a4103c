"""Weights of 8 or 4 bits, chosen so that a decoder's predictions change as little as possible.

moments          a decoder and calibration data → second moments of each layer's inputs, weighted by token
weight_rounding  one weight and its moments → codes, scales and zero points
rounded_layers   the layers of a decoder and calibration data → a rounded weight per layer
stored_weights   rounded weights ↔ the tensors of a file (compressed-tensors)
"""
