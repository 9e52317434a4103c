"""The quality of a decoder, and the agreement of two decoders.

perplexity   how well it predicts a text
equivalence  how far two forms of it are apart
"""
