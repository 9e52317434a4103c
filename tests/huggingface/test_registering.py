import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.huggingface.conftest import Folder

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
