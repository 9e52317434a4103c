"""The products of learning: every linear layer's two, and the kinds of kernels."""

import importlib
import sys
from pathlib import Path

import dispfx
from dispfx.fast_decoder.decoder import TrainingDecoder
from dispfx.run.learning_setup import prepared_loss
from dispfx.run.mask_learning import batches_of
from dispfx.settings import ComputeSettings
from dispfx.settings.learning_settings import LearnSettings
from tests.plain_decoders import FORMS, build
from tests.programs import token_ids

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
learning_profile = importlib.import_module("learning_profile")
kernels = importlib.import_module("kernels")
sys.path.pop(0)

LAYERS, TOKENS = 2, 16


def test_every_linear_layer_has_two_products_of_all_its_weights():
    module = build(FORMS["pre-norm"], layers=LAYERS)
    program = dispfx.capture(module)
    settings = LearnSettings(steps=2, seq_len=TOKENS, batch_size=1)
    text = batches_of(token_ids(1, 64).flatten(), settings)
    prepared = prepared_loss(program, text, settings, ComputeSettings())
    assert isinstance(prepared.decoder, TrainingDecoder)
    found = learning_profile.products_alone(prepared.decoder, TOKENS, lambda: None)
    linear = [path for path in program.parameters if "embedding" not in path and "norm" not in path]
    weights = sum(program.parameters[path].numel() for path in linear if path != "positions")
    assert found.count == 2 * (7 * LAYERS + 1)
    assert found.operations == 4 * TOKENS * weights
    assert found.seconds > 0


def test_kernels_are_told_apart_by_name():
    names = {
        "nvjet_sm90_tst_256x128": "products",
        "sm80_xmma_gemm_bf16bf16": "products",
        "pytorch_flash::flash_bwd_dq_dk_dv_loop": "attention",
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop": "attention",
        "triton_poi_fused__scaled_dot_product_cudnn_attention__to_copy_": "compiled",
        "Memcpy DtoD (Device -> Device)": "copies",
        "something_new": "other",
    }
    found = [kernels.Kernel(name, 1.0, 0.5) for name in names]
    assert [kernel.kind for kernel in found] == list(names.values())
    assert kernels.seconds_by_kind(found)["products"] == 1.0
    assert kernels.kernel_rows(found, 2)[2].endswith("| 500000.0 | 14.3% |")
