import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from tests.huggingface.conftest import Folder
from tests.pruned_modules import writers

CHECKOUT = Path(__file__).parents[2]
LOAD = """
import sys
from transformers import AutoModelForCausalLM
print("before", "dispfx" in sys.modules)
try:
    print(type(AutoModelForCausalLM.from_pretrained(sys.argv[1])).__name__)
except Exception as error:
    print("refused:", error)
"""


@pytest.fixture
def installed(tmp_path: Path) -> dict[str, str]:
    """The environment of a process that sees the checkout as an installation with its entry points."""
    group = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]["entry-points"][
        "torch.backends"
    ]
    info = tmp_path / "dispfx-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: dispfx\nVersion: 0\n")
    lines = [f"{name} = {target}" for name, target in group.items()]
    (info / "entry_points.txt").write_text("[torch.backends]\n" + "\n".join(lines) + "\n")
    return os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{CHECKOUT}", "OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize("value", ["1", "0"], ids=["asked for", "not asked for"])
def test_a_program_that_does_not_know_dispfx_loads_a_folder_only_where_the_environment_asks_for_it(
    llama: Folder, installed: dict[str, str], tmp_path: Path, value: str
) -> None:
    environment = installed | {"DISPFX_AUTOLOAD": value}

    ran = subprocess.run(
        [sys.executable, "-c", LOAD, str(llama.path)],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )

    asked = value == "1"
    assert ran.stdout.splitlines()[0] == f"before {asked}"
    assert ran.stdout.splitlines()[1].startswith("LlamaForCausalLM" if asked else "refused:"), ran.stdout
    assert asked or "pruned by dispfx" in ran.stdout


TRAIN = """
import sys
import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM
accelerator = Accelerator(cpu=True)
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
ids = torch.arange(64).reshape(4, 16)[2 * accelerator.process_index :][:2]
losses = []
for _ in range(4):
    loss = model(ids, labels=ids).loss
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(accelerator.gather(loss.detach()).mean().item())
if accelerator.is_main_process:
    accelerator.unwrap_model(model).save_pretrained(sys.argv[2])
    print("trained", accelerator.num_processes, losses[0], losses[-1])
accelerator.wait_for_everyone()
"""


TRAINER = """
import sys
import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
rows = [{"input_ids": row, "labels": row} for row in torch.arange(64).reshape(4, 16)]
options = {"use_cpu": True, "report_to": [], "logging_steps": 1, "save_strategy": "no", "disable_tqdm": True}
options |= {"per_device_train_batch_size": 2, "num_train_epochs": 6, "learning_rate": 1e-2}
trainer = Trainer(model, TrainingArguments(sys.argv[2], **options), train_dataset=rows)
trainer.train()
trainer.save_model(sys.argv[2] + "-by-the-trainer")
losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
if trainer.is_world_process_zero():
    print("trained", trainer.accelerator.num_processes, losses[0], losses[-1])
"""
# accelerate starts several processes on a CPU by MPI alone; torchrun starts them by itself.
ACCELERATE = "accelerate.commands.accelerate_cli launch --cpu --num_processes 1 --num_machines 1"
ACCELERATE += " --mixed_precision no --dynamo_backend no --main_process_port 0"
TORCHRUN = "torch.distributed.run --standalone --nproc-per-node 2"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launch", "scripts", "processes"),
    [(ACCELERATE, [TRAIN], 1), (TORCHRUN, [TRAIN, TRAINER], 2)],
    ids=["accelerate launch", "torchrun"],
)
def test_a_script_that_does_not_know_dispfx_trains_a_folder(
    llama: Folder, installed: dict[str, str], tmp_path: Path, launch: str, scripts: list[str], processes: int
) -> None:
    pytest.importorskip("accelerate")
    (tmp_path / "train.py").write_text("\n".join(scripts))

    ran = subprocess.run(
        [sys.executable, "-m", *launch.split(), "train.py", str(llama.path), str(tmp_path / "tuned")],
        env=installed | {"DISPFX_AUTOLOAD": "1", "HF_HOME": str(tmp_path / "home")},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )

    assert ran.returncode == 0, ran.stderr
    told = [line.split() for line in ran.stdout.splitlines() if line.startswith("trained")]
    assert len(told) == len(scripts)
    for _, count, first, last in told:
        assert int(count) == processes and float(last) < float(first)
    folders = sorted(tmp_path.glob("tuned*"))
    assert len(folders) == len(scripts)
    for folder in folders:
        tuned = AutoModelForCausalLM.from_pretrained(folder)
        assert writers(tuned)


def test_a_finder_that_waits_finds_nothing_else() -> None:
    code = (
        "import sys, dispfx, dispfx.huggingface.registering as r\n"
        "r.register()\n"
        "waiting = [finder for finder in sys.meta_path if isinstance(finder, r._Waiting)]\n"
        "assert len(waiting) == 2 and waiting[0].find_spec('json', None) is None\n"
        "import transformers.modeling_utils as m\n"
        "assert not any(isinstance(finder, r._Waiting) for finder in sys.meta_path)\n"
        "from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING\n"
        "assert 'dispfx' in AUTO_QUANTIZER_MAPPING\n"
        "r.register()\n"
    )

    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    "first",
    [
        "from transformers.quantizers.auto import AutoQuantizationConfig",
        "import dispfx.huggingface.quantizer",
    ],
)
def test_the_weight_format_is_known_whatever_is_imported_first(first: str) -> None:
    code = (
        f"import dispfx\n{first}\n"
        "from transformers.quantizers.auto import AutoQuantizationConfig\n"
        "assert AutoQuantizationConfig.from_dict({'quant_method': 'dispfx'}).quant_method == 'dispfx'\n"
        "from transformers.modeling_utils import PreTrainedModel\n"
        "assert PreTrainedModel._from_config.__func__.__module__ == 'dispfx.huggingface.guards'\n"
    )

    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
