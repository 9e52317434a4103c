"""Commands of the pages that the tests of the pages do not run: another test does, or none can.

Every other command that begins with `dispfx` and stands in a block of its own is run by the test of its page.
"""

_GUIDE = "tests/docs/test_guide.py::test_the_guide_works_from_top_to_bottom"
_LAUNCHED = "tests/docs/test_other_pages.py::test_the_commands_of_the_page_on_learning_run"
_INSTALLED = "tests/test_installed.py::test_the_page_on_transformers_works_with_only_the_wheel_installed"
_REPEATED = "tests/trust/test_repeated_runs.py::test_a_run_is_repeated_from_its_report_to_the_same_bytes"
_SCRIPTS = "tests/huggingface/test_registering.py::test_a_script_that_does_not_know_dispfx_trains_a_folder"
_LOST = "tests/cli/test_lost_rank.py::test_a_killed_rank_ends_the_run_with_its_name_and_the_run_goes_on"
_TABLES = "tests/tools/test_reproduce.py::test_every_table_is_made_and_stands_on_the_page"
_QUALITY = "tests/tools/test_quality.py::test_the_table_holds_every_row_and_the_message_of_a_failed_one"
_SMALL = "tests/tools/test_train_small.py::test_a_decoder_is_trained_and_written_with_its_tokenizer"
_BUILD = "tests/tools/test_build.py::test_two_builds_have_the_same_bytes"
_TENSORBOARD = "tests/docs/test_other_pages.py::test_tensorboard_shows_the_figures_of_a_run"
_NARROW = "tests/huggingface/test_ordinary.py::test_a_smaller_ordinary_decoder_needs_no_dispfx"
_GGUF = "tests/tools/test_gguf_file.py::test_transformers_reads_the_file_as_the_decoder_that_was_written"
_ROUNDED = "tests/api/test_quantized_checkpoint.py::test_what_cannot_be_done_is_refused_and_leaves_nothing"
_WHEEL = "tests/test_installed.py::wheel"

_COSTS = "tests/measure/test_costs.py::test_the_verb_writes_a_table_that_a_run_takes"

_TARGETS = "tests/measure/test_costs.py::test_the_tool_prints_what_was_asked_expected_and_measured"

# Command → the test that runs it, or the same with other names or fewer steps.
ELSEWHERE = {
    "pip install .": _WHEEL,
    "dispfx compile demo --ratio 0.3 --out DIR": _INSTALLED,
    "DISPFX_AUTOLOAD=1 lm_eval --model hf --model_args pretrained=DIR --tasks copied_word "
    "--include_path tasks --device cpu": _INSTALLED,
    "DISPFX_AUTOLOAD=1 lm_eval --model hf --model_args pretrained=DIR --tasks …": _INSTALLED,
    "DISPFX_AUTOLOAD=1 accelerate launch train.py": _SCRIPTS,
    "DISPFX_AUTOLOAD=1 torchrun --nproc-per-node 2 train.py": _SCRIPTS,
    "dispfx compile --config DIR/report.json --out NEW": _REPEATED,
    # The guide has the same, and these take long.
    "dispfx bench DIR --dense MODEL": _GUIDE,
    "dispfx recover DIR --dense MODEL --data text.txt --out OUT": _GUIDE,
    "dispfx recover DIR --dense MODEL --data text.txt --train lora --out OUT": _GUIDE,
    "dispfx eval DIR --dense MODEL --tasks piqa,winogrande": _GUIDE,
    # With two processes on a CPU.
    "torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29400 "
    "-m dispfx learn MODEL --ratio 0.3 --data text.txt --batch-size 16 --device cuda "
    "--out plan.safetensors": _LAUNCHED,
    "dispfx learn ORGANISATION/MODEL --ratio 0.3 --data text.txt --batch-size 8 --launch 4 "
    "--shard --out plan.safetensors": _LOST,
    "dispfx learn MODEL --ratio 0.3 --data text.txt --batch-size 4 --device cuda --launch 4 "
    "--shard --out plan.safetensors": _LOST,
    "dispfx learn demo --launch 2 --shard": _LOST,
    "dispfx apply MODEL plan.safetensors": _GUIDE,
    # What is reached depends on the machine.
    'dispfx costs demo --step "prefill 4x256" --sites heads --out costs.json': _COSTS,
    'dispfx compile demo --constraint "prefill 4x256: 1.05x" --costs costs.json --sites heads --export none '
    "--out out/fast": _COSTS,
    "dispfx bench out/fast --batch 4 --prompt 256": _GUIDE,
    "tools/bench_targets.py --shape tiny --align 8": _TARGETS,
    # A checkpoint of 4 bits needs widths of 32, which the decoder of the page's test has not.
    "dispfx export DIR --quantize int4 --data text.txt": _ROUNDED,
    "tensorboard --logdir DIR.state/tensorboard": _TENSORBOARD,
    "python tools/reproduce.py TABLE --out DIR": _TABLES,
    "python tools/reproduce.py all --out DIR --model MODEL --data LEARN --eval-data TEST "
    "--device cuda": _TABLES,
    "tools/quality.py --rows informed:0.3": _QUALITY,
    "tools/quality.py --rows informed:0.3:steps=3": _QUALITY,
    "tools/quality.py --rows informed:0.5:steps=200 --align N": _QUALITY,
    "tools/train_small.py --steps 1800 --lr 3e-3": _SMALL,
    "tools/train_small.py --width 256 --batch-size 16 --steps 3000 --lr 3e-3": _SMALL,
    "tools/build.py --out dist": _BUILD,
    "dispfx compile demo --constrained --select before-norm --ratio 0.3 --method fisher --export dense "
    "--out NARROW": _NARROW,
    "python tools/gguf_file.py NARROW/dense narrow.gguf": _GGUF,
}  # fmt: skip

_PACKAGES = "fetches packages; `.ci/run` begins with tools/setup, which installs the same extras"
_ON_A_GPU = "needs an NVIDIA GPU; the page says when it was run, on what, and what came out"
_OTHER_ENGINE = "needs packages of another engine; the page says when it was run, and what came out"

# Command → why no test runs it.
NOT_RUN = {
    "git clone … && cd dispfx": "fetches the repository",
    "./tools/demo": "`.ci/run` runs it on every change, beside the tests",
    "./tools/test": "it is what runs the tests",
    "./tools/test --quick": "it runs the tests, too",
    "./tools/campaigns": "takes hours; the same programs run at a small size in tests/trust",
    "tools/setup && . .venv/bin/activate": "`.ci/run` begins with it, on a fresh clone",
    "pip install '.[peft,lm-eval]'": _PACKAGES,
    "pip install '.[peft]'": _PACKAGES,
    "pip install '.[quantize]'": _PACKAGES,
    "pip install '.[lm-eval]'": _PACKAGES,
    "pip install '.[vllm]'": "fetches vLLM, which has requirements of its own",
    "pip uninstall torchvision torchaudio torchcodec": "changes the environment that it runs in",
    "VLLM_CPU_KVCACHE_SPACE=1 python -m vllm.entrypoints.openai.api_server --model DIR "
    "--enforce-eager": "needs vLLM; tests/serving serves the same folders without the server",
    "python tools/bench_vllm.py DIR --dense MODEL": "needs a Python with vLLM",
    "python tools/vllm_shapes.py --out OUT": _ON_A_GPU,
    "python tools/openvino_genai.py DIR/onnx OUT": "needs a Python with openvino-genai",
    "python tools/executorch_program.py DIR OUT.pte": "needs a Python with executorch",
    "pip install onnxruntime-genai prism-local": _OTHER_ENGINE,
    "pip install onnx-genai-server": _OTHER_ENGINE,
    "pip install 'llama-cpp-python[server]'": _OTHER_ENGINE,
    "python -m llama_cpp.server --model narrow.gguf": _OTHER_ENGINE,
    "DISPFX_VLLM=ENV/bin/python tools/test tests/serving": "needs a Python with vLLM",
    "pip install 'dispfx[data]'": _PACKAGES,
    "pip install pip-audit && pip-audit": "asks a database on the network",
    "dispfx --install-completion": "changes files of the shell; tests/cli/test_app.py completes words",
    "tools/measure_memory.py 7b 1 2048 large 8 1024 experts 4 512 --device cuda --dtype bfloat16": _ON_A_GPU,
    "tools/bench_learn.py --profile": _ON_A_GPU,
    "tools/bench_shapes.py --sections check": _ON_A_GPU,
    "tools/bench_shapes.py --sections short --layers 4": _ON_A_GPU,
    "DISPFX_CLIENTS=FOLDER tools/test tests/clients": "makes environments of other programs from the network",
    "DISPFX_KILLS=50 tools/test tests/trust": "takes an hour; the same test kills fewer runs every time",
}  # fmt: skip
LISTED = ELSEWHERE.keys() | NOT_RUN.keys()
