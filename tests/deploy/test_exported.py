import json
import logging
import os
import shutil
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dispfx.deploy.archive import check_archive
from dispfx.deploy.exported import PROGRAM_FILE, count_parameters, load_program, save_program
from dispfx.errors import DataError, OutputError

GRAPH = "models/model.json"
WEIGHTS = "data/weights/model_weights_config.json"
CONSTANTS = "data/constants/model_constants_config.json"


class Decoder(nn.Module):
    """A tied decoder with a persistent, a derived and an index buffer, and symbolic arithmetic."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(40, 8)
        self.inner = nn.Linear(3, 8)
        self.head = nn.Linear(8, 40, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.tensor([2.0]))
        self.register_buffer("shift", torch.tensor([0.5]), persistent=False)
        self.register_buffer("dispfx_index", torch.tensor([0, 3, 4]))

    def forward(self, input_ids: Tensor) -> Tensor:
        x_BTD = self.embedding(input_ids) * self.scale + self.shift
        x_BTD = x_BTD + torch.arange(input_ids.shape[1])[:, None]
        x_BTD = x_BTD + self.inner(x_BTD.index_select(-1, self.dispfx_index))
        return self.head(x_BTD)


def exported(module: nn.Module) -> torch.export.ExportedProgram:
    dynamic = {0: torch.export.Dim.AUTO, 1: torch.export.Dim.AUTO}
    ids_BT = torch.zeros(3, 13, dtype=torch.int64)
    return torch.export.export(module, (ids_BT,), dynamic_shapes=(dynamic,))  # noqa: TID251


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    save_program(exported(Decoder().eval()), folder)
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    shutil.copy(saved / PROGRAM_FILE, tmp_path)
    return tmp_path


def rewrite(folder: Path, changes: Mapping[str, Callable[[bytes], bytes | None]]) -> None:
    """Copy the archive entry by entry; a change gets an entry's bytes, or b"" where there is none."""
    path = folder / PROGRAM_FILE
    with zipfile.ZipFile(path) as opened:
        root = opened.namelist()[0].partition("/")[0]
        entries = {name.partition("/")[2]: opened.read(name) for name in opened.namelist()}
    for name, change in changes.items():
        content = change(entries.get(name, b""))
        entries.pop(name, None)
        if content is not None:
            entries[name] = content
    with zipfile.ZipFile(path, "w") as opened:
        for name, content in entries.items():
            opened.writestr(f"{root}/{name}", content)


def replaced(old: str, new: str) -> Callable[[bytes], bytes]:
    def change(content: bytes) -> bytes:
        assert old.encode() in content
        return content.replace(old.encode(), new.encode(), 1)

    return change


def changed(path: list[Any], value: Any) -> Callable[[bytes], bytes]:
    def change(content: bytes) -> bytes:
        at = tree = json.loads(content)
        for step in path[:-1]:
            at = at[step]
        at[path[-1]] = value
        return json.dumps(tree).encode()

    return change


def test_a_saved_program_computes_the_same_at_other_shapes(folder: Path) -> None:
    loaded, module = load_program(folder), Decoder().eval()

    for shape in ((2, 9), (1, 17), (1, 1)):
        ids_BT = torch.randint(40, shape, generator=torch.Generator().manual_seed(0))
        assert torch.equal(loaded(ids_BT), module(ids_BT))
    assert os.listdir(folder) == [PROGRAM_FILE]


def test_a_rewritten_archive_is_still_readable(folder: Path) -> None:
    # The refusals below are worth something only if the rewriting itself breaks nothing.
    rewrite(folder, {})

    assert load_program(folder)(torch.zeros(2, 9, dtype=torch.int64)).shape == (2, 9, 40)


def test_parameters_are_counted_once_without_buffers(folder: Path) -> None:
    assert count_parameters(folder) == 40 * 8 + 3 * 8 + 8


def test_saving_leaves_the_program_as_it_was(tmp_path: Path) -> None:
    program = exported(Decoder().eval())
    inputs = program.example_inputs
    traces = [node.meta.get("stack_trace") for node in program.graph.nodes]

    save_program(program, tmp_path)

    assert program.example_inputs is inputs
    assert any(traces)
    assert [node.meta.get("stack_trace") for node in program.graph.nodes] == traces


def test_torch_has_nothing_to_say_of_what_is_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    program = exported(Decoder().eval())
    caplog.clear()
    save_program(program, tmp_path)
    assert not [one for one in caplog.records if one.levelno >= logging.WARNING]
    assert not any(capfd.readouterr())


def test_the_archive_holds_no_path_of_this_machine(folder: Path) -> None:
    with zipfile.ZipFile(folder / PROGRAM_FILE) as opened:
        text = opened.read(next(name for name in opened.namelist() if name.endswith(GRAPH)))

    for path in (Path(__file__).parent, Path(torch.__file__).parent):
        assert str(path).encode() not in text


SYSTEM = "__import__('os').system('touch /tmp/never')"


@pytest.mark.parametrize(
    "changes",
    [
        {"data/sample_inputs/model.pt": lambda _: b"\x80\x02c"},
        {"data/weights/model.pt": lambda _: b"\x80\x02c"},
        {"data/constants/model.pt": lambda _: b"\x80\x02c"},
        {"data/constants/opaque_obj_0": lambda _: b"\x80\x02c"},
        {"data/aotinductor/model/code.so": lambda _: b"\x7fELF"},
        {"models/other.json": lambda _: b"{}"},
        {"serialized_state_dict.pt": lambda _: b"\x80\x02c"},
        {WEIGHTS: replaced('"use_pickle": false', '"use_pickle": true')},
        {WEIGHTS: replaced('"path_name": "weight_0"', '"path_name": "../x"')},
        {CONSTANTS: replaced('"path_name": "tensor_0"', '"path_name": "opaque_obj_0"')},
        {GRAPH: replaced("torch.ops.aten.embedding.default", "torch.os.system")},
        {GRAPH: replaced("torch.ops.aten.embedding.default", "torch.ops.load_library")},
        {GRAPH: replaced("torch.ops.aten.embedding.default", "torch.ops.aten.from_file.default")},
        {GRAPH: replaced("torch.ops.aten.embedding.default", "torch.ops.aten.embedding.__init__")},
        {GRAPH: replaced("torch.ops.aten.embedding.default", "_operator.methodcaller")},
        {GRAPH: replaced("torch.ops.aten.embedding.default", "#custom:op")},
        {GRAPH: replaced("Integer(8)", SYSTEM)},
        {GRAPH: replaced("Symbol('s", "Symbol('x y")},
        {GRAPH: replaced("Integer(8)", "().__class__")},
        {GRAPH: changed(["guards_code"], [SYSTEM])},
        {GRAPH: changed(["guards_code"], ["L['input_ids'].__class__"])},
        {GRAPH: changed(["guards_code"], ["torch.load('x') > 0"])},
        {GRAPH: changed(["guards_code"], SYSTEM)},
        {GRAPH: replaced("builtins.tuple", "collections.defaultdict")},
        {GRAPH: changed(["graph_module", "treespec_namedtuple_fields"], {"a": {"field_names": ["b"]}})},
        {GRAPH: changed(["graph_module", "graph", "nodes", 0, "inputs", 0, "arg"], {"as_custom_obj": {}})},
        {
            GRAPH: changed(
                ["graph_module", "graph", "nodes", 0, "inputs", 0, "arg"], {"as_operator": "torch.os.system"}
            )
        },
    ],
    ids=lambda changes: "+".join(changes),
)
def test_an_archive_that_could_run_code_is_refused_before_torch_reads_it(
    folder: Path, changes: dict[str, Callable[[bytes], bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    rewrite(folder, changes)
    monkeypatch.setattr(torch.export, "load", lambda *_: pytest.fail("torch must not read this"))

    with pytest.raises(DataError) as error:
        load_program(folder)

    assert PROGRAM_FILE in str(error.value)


def test_an_entry_that_stands_twice_is_refused(folder: Path) -> None:
    path = folder / PROGRAM_FILE
    with zipfile.ZipFile(path, "a") as opened, pytest.warns(UserWarning, match="Duplicate"):
        name = next(name for name in opened.namelist() if name.endswith(GRAPH))
        opened.writestr(name, b"{}")

    with pytest.raises(DataError):
        check_archive(path)


def test_an_entry_outside_the_archives_folder_is_refused(folder: Path) -> None:
    with zipfile.ZipFile(folder / PROGRAM_FILE, "a") as opened:
        opened.writestr("version", b"1")

    with pytest.raises(DataError):
        check_archive(folder / PROGRAM_FILE)


@pytest.mark.parametrize(
    "guard",
    [
        "L['input_ids'].size()[0] <= 64",
        "Eq(Mod(L['input_ids'].size()[1], 2), 0)",
        "(-1)*torch.sym_min(20, L['input_ids'].size()[1]) >= (-1)*L['input_ids'].size()[1]",
        "min(32*L['input_ids'].size()[1], 64*L['input_ids'].size()[1]) == (32*L['input_ids'].size()[1])",
    ],
)
def test_guards_that_are_arithmetic_are_let_through(folder: Path, guard: str) -> None:
    rewrite(folder, {GRAPH: changed(["guards_code"], [guard])})

    check_archive(folder / PROGRAM_FILE)


@pytest.mark.parametrize("name", [GRAPH, WEIGHTS, CONSTANTS])
@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\xff", b"[" * 100_000, None])
def test_a_damaged_entry_is_a_data_error(folder: Path, name: str, content: bytes | None) -> None:
    rewrite(folder, {name: lambda _: content})

    with pytest.raises(DataError):
        load_program(folder)


@pytest.mark.parametrize("keep", [0, 10, 1000, -30])
def test_a_cut_archive_is_a_data_error(folder: Path, keep: int) -> None:
    path = folder / PROGRAM_FILE
    path.write_bytes(path.read_bytes()[:keep])

    with pytest.raises(DataError):
        load_program(folder)


def test_a_missing_program_and_a_missing_folder_say_so(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no program"):
        load_program(tmp_path)
    with pytest.raises(OutputError):
        save_program(exported(Decoder().eval()), tmp_path / "gone")
    assert os.listdir(tmp_path) == []
