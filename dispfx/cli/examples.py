"""Examples of every verb, shown at the end of its help; every example parses as written."""

from collections.abc import Mapping

EXAMPLES: Mapping[str, tuple[str, ...]] = {
    "compile": (
        "dispfx compile demo --ratio 0.3 --out out/demo",
        "dispfx compile ORGANISATION/MODEL --ratio 0.3 --data text.txt --out out/pruned --dry-run",
        "dispfx compile model.gguf --ratio 0.5 --data text.jsonl --steps 2000 --export onnx --out out/pruned",
    ),
    "inspect": (
        "dispfx inspect demo",
        "dispfx inspect ORGANISATION/MODEL --config-only",
        "dispfx inspect out/demo/plan.safetensors",
    ),
    "learn": (
        "dispfx learn demo --ratio 0.3 --out plan.safetensors",
        "dispfx learn demo --ratio 0.1:0.6 --out family.safetensors",
        "dispfx learn ORGANISATION/MODEL --ratio 0.3 --data text.txt --batch-size 8 --launch 4",
    ),
    "curve": (
        "dispfx curve demo family.safetensors",
        "dispfx curve demo family.safetensors --within 0.02 --points 11 --out curve.html",
    ),
    "apply": (
        "dispfx apply demo plan.safetensors --out out/demo",
        "dispfx apply demo family.safetensors --ratio 0.37 --out out/demo",
    ),
    "verify": ("dispfx verify out/demo", "dispfx verify out/demo --json"),
    "eval": (
        "dispfx eval out/demo --eval-data text.txt --dense demo",
        "dispfx eval out/pruned --tasks piqa,arc_easy --limit 100 --out out/pruned",
    ),
    "export": ("dispfx export out/demo --onnx", "dispfx export out/demo --onnx --quantize int4"),
    "generate": (
        'dispfx generate out/demo --prompt "copy abc xyz ="',
        'dispfx generate demo --prompt "sort" --temperature 0.8 --top-k 20 --max-new-tokens 32',
    ),
    "sample": ("dispfx sample ORGANISATION/MODEL --data text.txt --tokens 3000000 --out own.safetensors",),
    "bench": (
        "dispfx bench out/demo --dense demo --batch 1 --prompt 128 --past 128 --out out/demo",
        "dispfx bench out/demo --dense demo --runtime onnx",
    ),
    "costs": (
        "dispfx costs demo --out costs.json",
        'dispfx costs ORGANISATION/MODEL --device cuda --step "decode 1@1024" --out costs.json',
    ),
    "recover": (
        "dispfx recover out/demo --dense demo --data text.txt --out out/recovered",
        "dispfx recover out/demo --dense demo --data text.txt --train scales --steps 200 --out out/scaled",
    ),
    "finetune": ("dispfx finetune out/demo --dense demo --data text.txt --rank 32 --out out/adapters",),
    "report": ("dispfx report out/demo",),
    "compare": (
        "dispfx compare out/demo out/half --out both.html",
        "dispfx compare out/demo/plan.safetensors out/half/plan.safetensors",
    ),
    "passes": ("dispfx passes",),
    "doctor": ("dispfx doctor",),
}


def epilog(verb: str) -> str:
    """Return the end of a verb's help, in Markdown."""
    return "\n".join(["Examples:", "", "```", *EXAMPLES[verb], "```"])
