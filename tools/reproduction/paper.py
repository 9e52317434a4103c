"""Figures of the paper (DISP-LLM, arXiv 2410.11988), as later papers and summaries of it quote them.

Only figures that were found quoted are here; a table without one says so.
"""

import re

# Table 1: perplexity on WikiText-2 by share removed; 0 is dense.
PERPLEXITY = {
    "LLaMA-2-7B": {0.0: 5.12, 0.2: 6.10, 0.3: 6.85, 0.4: 8.11, 0.5: 9.84},
    "LLaMA-2-13B": {0.5: 7.11},
}
# Mean accuracy over the five zero-shot tasks, in percent, by share removed.
ZERO_SHOT = {"LLaMA-7B": {0.2: 62.34}, "LLaMA-2-7B": {0.3: 59.53}}
# Cards (NVIDIA A100 80GB) and hours for 10,000 steps.
COST = {
    "LLaMA-7B": (2, 2.41),
    "LLaMA-2-7B": (2, 2.41),
    "LLaMA-13B": (4, 8.83),
    "LLaMA-2-13B": (4, 8.83),
}
# Throughput over the dense decoder's, least and most.
THROUGHPUT = {"LLaMA-13B": (1.08, 1.50)}

# Shown next to each of them.
SECOND_HAND = (
    "The paper's figures are second-hand: as later papers quote them, not compared with the paper itself."
)
WORKED_BACK = "Those at 20, 30 and 40% are worked back from the interpolation in such a quotation."

_FAMILIES = ("LLaMA-2-13B", "LLaMA-2-7B", "LLaMA-13B", "LLaMA-7B")


def family(model: str) -> str | None:
    """Return which of the paper's decoders MODEL is, or None.

    >>> family("organisation/Llama-2-7b-hf")
    'LLaMA-2-7B'
    """
    words = re.split(r"[^a-z0-9]+", model.lower())
    for known in _FAMILIES:
        wanted = known.lower().split("-")
        if any(words[at : at + len(wanted)] == wanted for at in range(len(words))):
            return known
    return None
