"""Run by a Python that has optimum-onnx and not dispfx: what it and its transformers say to a folder."""

import json
import sys

from optimum.onnxruntime import ORTModelForCausalLM  # type: ignore[import-not-found]
from transformers import AutoModelForCausalLM


def main() -> None:
    """The argument is a folder; what each way to load it said comes as JSON."""
    attempts = {
        "transformers": lambda: AutoModelForCausalLM.from_pretrained(sys.argv[1]),
        "mismatched": lambda: AutoModelForCausalLM.from_pretrained(sys.argv[1], ignore_mismatched_sizes=True),
        "optimum": lambda: ORTModelForCausalLM.from_pretrained(sys.argv[1], export=True),
    }
    found = {}
    for name, attempt in attempts.items():
        try:
            attempt()
            found[name] = "loaded"
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    print(json.dumps(found))


if __name__ == "__main__":
    main()
