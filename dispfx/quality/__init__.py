"""What a decoder is worth and whether two forms of it are the same.

perplexity   how well it predicts a text
equivalence  how far two forms of it are apart
"""
