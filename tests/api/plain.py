"""MODEL for tests of the public functions: a module that transformers does not know."""

from torch import nn

from tests.plain_decoders import FORMS, build


def build_decoder() -> nn.Module:
    """Return the same decoder at every call."""
    return build(FORMS["pre-norm"], layers=1)


def another_decoder() -> nn.Module:
    """Return a decoder with the same shapes and other weights."""
    return build(FORMS["pre-norm"], layers=1, seed=9)
