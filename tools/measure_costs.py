#!/usr/bin/env python3
"""Measure how long products take on this device, for `dispfx compile --costs FILE`.

    python tools/measure_costs.py --out h100.json --device cuda --dtype bfloat16 --tokens 64
    python tools/measure_costs.py --out cpu.json --tokens 128 --sizes 64,128,256,512

--tokens is the batch times the new tokens of the steps that the pruned decoder is for: 1 for generating one
text, 2048 for reading long prompts.  The plan keeps the table, so it is measured once.
"""

import argparse
import json
from dataclasses import asdict
from pathlib import Path

import torch

from dispfx.benchmark.latency_measurement import measure_costs
from dispfx.files.disk import replacing

SIZES = "256,512,1024,1536,2048,2560,3072,4096,5120,6144,8192,11008,13824"


def main() -> None:
    args = parse_arguments()
    sizes = sorted({int(size) for size in args.sizes.split(",")})
    table = measure_costs(torch.device(args.device), getattr(torch, args.dtype), args.tokens, sizes)
    with replacing(Path(args.out)) as partial:
        partial.write_text(json.dumps(asdict(table), indent=1) + "\n", encoding="utf-8")
    print(f"{len(sizes)} × {len(sizes)} products on {table.device}: {args.out}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", required=True, help="JSON file to write")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--tokens", type=int, default=1, help="rows of activations")
    parser.add_argument("--sizes", default=SIZES, help="rows and columns of weights, comma-separated")
    return parser.parse_args()


if __name__ == "__main__":
    main()
