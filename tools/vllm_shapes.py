#!/usr/bin/env python3
"""Check and measure vLLM with pruned decoders of known shapes and random weights.

    python tools/vllm_shapes.py --out serving                                  on a GPU
    python tools/vllm_shapes.py --out serving --shape tiny --layers 2 --prompt 32 --new 9 --device cpu

Needs a Python with vLLM and the requirements of dispfx.  Each step has a process of its own, so that a
failure loses nothing else:

    tiny     write tiny decoders in float32, dense and pruned, and what transformers makes of six prompts
    tokens   compare the greedy tokens of vLLM with those
    rounded  with --schemes int4,int8,fp8: the same decoders, widths aligned to 32, with weights of 8 or 4
             bits, and eagerly with the same numbers as plain weights (…-plain); in --rounded-dtype
    shape    write a decoder of a known shape, dense and pruned
    speed    vLLM with dense and pruned folders in turns (bench_vllm.py); where that fails, one by one
    bench    the steps of `dispfx bench` with the same plans

Widths of the decoder repeat every few layers and are multiples of --align.  OUT gets a log of every step, and
tokens.json, speed.json and bench.json.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
CLIENT = ROOT / "tests" / "serving" / "vllm_client.py"
BENCH = ROOT / "tools" / "bench_vllm.py"
STEPS = ("tiny", "tokens", "rounded", "shape", "speed", "bench")
FAMILIES = ("llama", "qwen3")
TOKENS = 32
PROMPTS = [
    [5, 9, 3],
    [17, 2, 88, 41, 7, 29],
    [11] * 9,
    [64, 3, 77, 21, 90, 14, 33, 8, 55, 19, 4, 100],
    list(range(20, 45)),
    list(range(3, 60)),
]
# The engine lives in the process that is measured.  Triton's float32 products would otherwise be rounded.
SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "INFO",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "TRITON_F32_DEFAULT": "ieee",
    # vLLM 0.26 has a kernel for fp8 weights alone on Hopper and newer GPUs, but takes it only with this.
    "VLLM_TEST_FORCE_FP8_MARLIN": "1",
}


def main() -> None:
    """Run the steps, or the one that this process was started for."""
    args = parsed()
    args.out, args.place = args.out.absolute(), args.place.absolute()
    args.out.mkdir(parents=True, exist_ok=True)
    args.place.mkdir(parents=True, exist_ok=True)
    if args.step:
        {"tiny": write_tiny, "judge": judge, "shape": write_shape, "bench": bench}[args.step](args)
        return
    began = time.perf_counter()
    for name in args.steps:
        left = args.budget_seconds - (time.perf_counter() - began)
        if left < 30:
            print(f"{name}: left out, time is up", flush=True)
            continue
        {"tokens": tokens, "rounded": rounded, "speed": speed}.get(name, own_process)(args, name, left)
        print(f"{name}: done at {time.perf_counter() - began:.0f} s", flush=True)


def parsed() -> argparse.Namespace:
    """Return the options of the command line."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = options.add_argument
    add("--out", type=Path, required=True, help="folder for results")
    add("--place", type=Path, default=Path("vllm_shapes"), help="folder for decoders")
    add("--steps", type=lambda text: text.split(","), default=STEPS, help="comma-separated")
    add("--schemes", type=lambda text: text.split(","), default=[], help="int4,int8,fp8: serve these, too")
    add("--rounded-dtype", default="float16", help="dtype in which vLLM serves weights of 8 or 4 bits")
    add("--shape", default="llama-2-7b", help="name of a shape in decoder_shapes.py")
    add("--layers", type=int, default=16, help="layers of that decoder")
    add("--ratios", type=float, nargs="+", default=[0.3, 0.5], help="shares of the layers' weights to remove")
    add("--align", type=int, default=16, help="widths are multiples of this")
    add("--period", type=int, default=4, help="after how many layers widths repeat")
    add("--batches", default="1,64", help="numbers of prompts")
    add("--prompt", type=int, default=1024, help="tokens of a prompt")
    add("--new", type=int, default=129, help="tokens to add to a prompt")
    add("--dtype", default="bfloat16", help="dtype of the decoder of a known shape")
    add("--memory", type=float, default=0.25, help="share of the GPU's memory for each engine")
    add("--device", default="cuda", help="where decoders are made and `bench` runs")
    add("--eager", action="store_true", help="do not compile the decoders in vLLM")
    add("--budget-seconds", type=float, default=570.0, help="stop when this is over")
    add("--step", help=argparse.SUPPRESS)
    return options.parse_args()


def started(args: argparse.Namespace, name: str, words: list[str], seconds: float, **settings: str) -> bool:
    """Run a Python process, keep its output in OUT, and show the end of it where the process failed."""
    log = args.out / f"{name}.log"
    with log.open("w", encoding="utf-8") as file:
        try:
            code = subprocess.run(
                [sys.executable, "-u", *words], stdout=file, stderr=subprocess.STDOUT, timeout=seconds,
                env=os.environ | SETTINGS | settings, cwd=args.place, check=False,
            ).returncode  # fmt: skip
        except subprocess.TimeoutExpired:
            code = "timeout"
    if code:
        print(f"{name}: FAILED ({code})\n{log.read_text(encoding='utf-8')[-2500:]}", flush=True)
    return not code


def own_process(args: argparse.Namespace, name: str, seconds: float) -> None:
    """Run one of the steps that this file holds in a process of its own, and print its lines."""
    words = [str(Path(__file__).resolve()), *sys.argv[1:], "--out", str(args.out), "--place", str(args.place)]
    started(args, name, [*words, "--step", name], seconds)
    for line in (args.out / f"{name}.log").read_text(encoding="utf-8").splitlines():
        if line.startswith("  "):
            print(line, flush=True)


def write_tiny(args: argparse.Namespace) -> None:
    """Write tiny decoders, and tiny.json with the greedy tokens of each folder."""
    import torch
    from transformers import AutoModelForCausalLM

    sys.path.insert(0, str(ROOT))
    import dispfx
    from dispfx import api
    from tests.serving.families import tiny_decoder

    found = {}
    for family in FAMILIES:
        dense, pruned = args.place / f"{family}-dense", args.place / f"{family}-pruned"
        shutil.rmtree(dense, ignore_errors=True)
        shutil.rmtree(pruned, ignore_errors=True)
        model: Any = tiny_decoder(family)
        model.save_pretrained(dense)
        plan = dispfx.Plan.random(dispfx.capture(model), 0.4, seed=1, align=4)
        api.apply(model, plan, out=pruned, export="none")
        whole = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32)
        for path, one in ((dense, whole), (pruned, dispfx.load(pruned))):
            found[str(path)] = [continued(one, prompt) for prompt in PROMPTS]
        if args.schemes:
            write_rounded(args, model, family)
    (args.place / "tiny.json").write_text(json.dumps(found), encoding="utf-8")


def write_rounded(args: argparse.Namespace, model: Any, family: str) -> None:
    """Write a pruned decoder with rounded weights, by a random text, and with the same numbers in float32."""
    import torch
    from safetensors.torch import save_file

    import dispfx
    from dispfx import api

    folder, text = args.place / f"{family}-aligned", args.place / "text.safetensors"
    shutil.rmtree(folder, ignore_errors=True)
    api.apply(
        model, dispfx.Plan.random(dispfx.capture(model), 0.4, seed=1, align=32), out=folder, export="none"
    )
    ids = torch.randint(0, model.config.vocab_size, (2000,), generator=torch.Generator().manual_seed(3))
    save_file({"tokens": ids.to(torch.int32)}, text)
    for scheme in args.schemes:
        api.export(folder, quantize=scheme, data=str(text))
        shutil.rmtree(plain_of(folder / scheme), ignore_errors=True)
        again: Any = dispfx.load(folder / scheme)
        again.save_pretrained(plain_of(folder / scheme))


def plain_of(folder: Path) -> Path:
    """Return where the rounded numbers of a folder are kept as plain weights."""
    return folder.with_name(f"{folder.name}-plain")


def continued(model: Any, prompt: list[int]) -> list[int]:
    """Return the tokens that transformers adds greedily to one prompt."""
    import torch

    ids = torch.tensor([prompt], device=next(model.parameters()).device)
    length = {"max_new_tokens": TOKENS, "min_new_tokens": TOKENS, "do_sample": False, "pad_token_id": 0}
    return model.generate(ids, attention_mask=torch.ones_like(ids), **length)[0, len(prompt) :].tolist()


def tokens(args: argparse.Namespace, name: str, seconds: float) -> None:
    """Compare the tokens of vLLM, eager and compiled, with those of transformers; write tokens.json."""
    expected = json.loads((args.place / "tiny.json").read_text(encoding="utf-8"))
    options = [{"enforce_eager": True}] if args.eager else [{"enforce_eager": True}, {}]
    runs = [
        {"folder": folder, "batches": [PROMPTS], "tokens": TOKENS,
         "options": option | {"gpu_memory_utilization": args.memory}}
        for option in options for folder in expected
    ]  # fmt: skip
    found = answers_of(args, name, runs, seconds)
    report = []
    for run, answer in zip(runs, found, strict=True):
        batch = answer.get("greedy", [[]])[0]
        same = [one == other for one, other in zip(batch, expected[run["folder"]], strict=False)]
        how = "eager" if "enforce_eager" in run["options"] else "compiled"
        folder, error = Path(run["folder"]).name, answer.get("error", "")
        report.append({"folder": folder, "how": how, "same": same, "error": error})
        print(f"  {folder}, {how}: {sum(same)} of {len(PROMPTS)} prompts equal {error[:300]}", flush=True)
    kept = {"runs": report, "expected": expected, "found": found}
    (args.out / "tokens.json").write_text(json.dumps(kept), encoding="utf-8")


def rounded(args: argparse.Namespace, name: str, seconds: float) -> None:
    """Serve rounded weights, and the same numbers as plain ones; write rounded.json and judge it."""
    folders = [args.place / f"{family}-aligned" / scheme for family in FAMILIES for scheme in args.schemes]
    more = {"gpu_memory_utilization": args.memory, "dtype": args.rounded_dtype}
    both = [path for folder in folders for path in (folder, plain_of(folder))]
    rows = [(path, "eager", more | {"enforce_eager": True}) for path in both]
    rows += [] if args.eager else [(path, "compiled", more) for path in folders]
    if not rows:
        return
    began = time.perf_counter()
    runs = [
        {"folder": str(path), "batches": [PROMPTS], "tokens": TOKENS, "options": options}
        for path, _, options in rows
    ]
    found = answers_of(args, name, runs, seconds - 30)
    report = [
        {"folder": str(path), "how": how} | answer for (path, how, _), answer in zip(rows, found, strict=True)
    ]
    (args.out / "rounded.json").write_text(json.dumps(report), encoding="utf-8")
    own_process(args, "judge", max(30.0, seconds - (time.perf_counter() - began)))


def judge(args: argparse.Namespace) -> None:
    """Compare the tokens in rounded.json with the logits of transformers in float32 on a CPU.

    Kernels for rounded weights do not compute in float32, so tokens may differ where two are nearly equal.
    "below" is how far the logit of a token that vLLM chose is below the best one at most.
    """
    import torch

    sys.path.insert(0, str(ROOT))
    import dispfx

    for one in json.loads((args.out / "rounded.json").read_text(encoding="utf-8")):
        where = f"{Path(one['folder']).parent.name}/{Path(one['folder']).name}, {one['how']}"
        if "error" in one:
            print(f"  {where}: {' '.join(one['error'].split())[:500]}", flush=True)
            continue
        model: Any = dispfx.load(one["folder"])
        below = []
        for prompt, added in zip(PROMPTS, one["greedy"][0], strict=True):
            with torch.no_grad():
                logits = model(torch.tensor([prompt + added])).logits[0, len(prompt) - 1 : -1]
            taken = logits.gather(1, torch.tensor(added)[:, None])[:, 0]
            below.append(float((logits.amax(1) - taken).max()))
        # A token below the best is the first difference; none means that all are those of transformers.
        same = sum(one == 0 for one in below)
        print(
            f"  {where}: {same} of {len(PROMPTS)} prompts equal, at most {max(below):.3f} below; logits have "
            f"a standard deviation of {float(logits.std()):.1f}",
            flush=True,
        )


def answers_of(
    args: argparse.Namespace, name: str, runs: list[dict[str, Any]], seconds: float
) -> list[dict[str, Any]]:
    """Return what the client finds, with a second try in a process of its own for an engine that failed."""
    began = time.perf_counter()
    found = client(args, name, runs, seconds)
    for index, run in enumerate(runs):
        # After an engine that failed, the next ones of the same process may fail with it.
        left = seconds - (time.perf_counter() - began)
        refused = found[index].get("error", "").startswith("OutputError")
        if "error" in found[index] and not refused and len(runs) > 1 and left > 60:
            found[index] = client(args, f"{name}-{index}", [run], left)[0]
    return found


def client(
    args: argparse.Namespace, name: str, runs: list[dict[str, Any]], seconds: float
) -> list[dict[str, Any]]:
    """Return what the client of the tests finds for each run, or an error where it ended before."""
    file = args.place / f"{name}.jsonl"
    file.unlink(missing_ok=True)
    started(args, name, [str(CLIENT), json.dumps(runs), str(file)], seconds)
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    answers = [json.loads(line) for line in lines]
    return answers + [{"error": "the process ended before this run"}] * (len(runs) - len(answers))


def write_shape(args: argparse.Namespace) -> None:
    """Write a decoder of a known shape with random weights, and a pruned folder for each ratio."""
    import torch
    from transformers import AutoModelForCausalLM

    sys.path.insert(0, str(ROOT / "tools"))
    import decoder_shapes as shapes

    import dispfx
    from dispfx import api

    began = time.perf_counter()
    config = shapes.config_of(args.shape, args.layers, shapes.vocabulary_of(args.shape))
    torch.manual_seed(0)
    with torch.device(args.device):
        drawn: Any = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, args.dtype))
    folders = shape_folders(args)
    for path in folders.values():
        shutil.rmtree(path, ignore_errors=True)
    drawn.save_pretrained(folders[0.0])
    # Read again, for its tables of angles to be those of the CPU: vLLM refuses a folder that stores others.
    model: Any = AutoModelForCausalLM.from_pretrained(folders[0.0], dtype=getattr(torch, args.dtype))
    model.to(args.device).eval()
    print(f"  dense written at {time.perf_counter() - began:.0f} s", flush=True)
    program = dispfx.capture(model)
    for ratio in args.ratios:
        plan = shapes.periodic_plan(program, ratio, period=args.period, align=args.align)
        api.apply(model, plan, out=folders[ratio], export="none")
        print(f"  {plan.achieved:.1%} removed, written at {time.perf_counter() - began:.0f} s", flush=True)


def shape_folders(args: argparse.Namespace) -> dict[float, Path]:
    """Return where the dense decoder (0.0) and the pruned ones are."""
    return {0.0: args.place / "dense"} | {ratio: args.place / f"removed-{ratio:.0%}" for ratio in args.ratios}


def speed(args: argparse.Namespace, name: str, seconds: float) -> None:
    """Measure vLLM with all folders in turns, or one by one where that fails; write speed.json."""
    began = time.perf_counter()
    dense, *pruned = map(str, shape_folders(args).values())
    words = ["--dtype", args.dtype, "--batches", args.batches, "--prompt", str(args.prompt)]
    words += ["--new", str(args.new), "--memory", str(args.memory), *(["--eager"] if args.eager else [])]
    file = args.place / "speed.json"
    file.unlink(missing_ok=True)
    command = [str(BENCH), *pruned, "--dense", dense, *words, "--out", str(file)]
    found: dict[str, dict[str, float]] = {}
    if started(args, name, command, seconds):
        found = json.loads(file.read_text(encoding="utf-8"))["rates"]
    for path in [] if found else [dense, *pruned]:
        left = seconds - (time.perf_counter() - began)
        file.unlink(missing_ok=True)
        command = [str(BENCH), "--dense", path, *words, "--out", str(file)]
        if left > 30 and started(args, f"{name}-{Path(path).name}", command, left):
            for what, rates in json.loads(file.read_text(encoding="utf-8"))["rates"].items():
                found.setdefault(what, {})["dense" if path == dense else path] = rates["dense"]
    (args.out / "speed.json").write_text(json.dumps(found, indent=1), encoding="utf-8")
    for what, rates in found.items():
        for path, rate in rates.items():
            times = rate / rates["dense"] if "dense" in rates else float("nan")
            print(f"  {what} {Path(path).name}: {rate:,.0f} tokens per second, × {times:.2f}", flush=True)


def bench(args: argparse.Namespace) -> None:
    """Time the steps of `dispfx bench` with the plans of the folders; write bench.json after every row."""
    import torch

    sys.path.insert(0, str(ROOT / "tools"))
    import decoder_shapes as shapes

    from dispfx.benchmark.decoder_speed import compare
    from dispfx.ir.cached_inputs import CachedShape
    from dispfx.plan.plan import Plan
    from dispfx.report.speed import speed_line, speed_plain

    config = shapes.config_of(args.shape, args.layers, shapes.vocabulary_of(args.shape))
    program = shapes.captured(config, torch.device(args.device), getattr(torch, args.dtype))
    shapes.fill(program)
    dense = shapes.contender(program, Plan.random(program, 0.0, 0))
    rows = []
    batches = [int(batch) for batch in args.batches.split(",")]
    steps = [CachedShape(batch, 1, args.prompt) for batch in batches] + [CachedShape(1, args.prompt, 0)]
    for ratio in reversed(args.ratios):
        plan = shapes.periodic_plan(program, ratio, period=args.period, align=args.align)
        pruned = shapes.contender(program, plan)
        for step in steps:
            kernels = ("library",) if step.tokens == 1 else ("layers",)
            rows.append(
                compare(f"{plan.achieved:.1%} removed", dense, pruned, step, "compiled", kernels=kernels)
            )
            print(f"  {speed_line(rows[-1])}", flush=True)
            kept = speed_plain(rows, {"torch": torch.__version__})
            (args.out / "bench.json").write_text(json.dumps(kept), encoding="utf-8")


if __name__ == "__main__":
    main()
