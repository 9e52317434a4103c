"""Every kind of file that dispfx reads: a valid one, how it is spoilt, and what reads it.

`kinds(folder)` makes the valid ones; a `Kind` draws files, writes them into a folder, and reads them the way
a command does.
"""

import gzip
import io
import json
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from onnx import TensorProto, helper, numpy_helper
from safetensors.torch import save

from dispfx.api import capture
from dispfx.api.compilation import apply
from dispfx.deploy import reload, weights
from dispfx.deploy.archive import check_archive
from dispfx.deploy.exported import count_parameters as count_program
from dispfx.deploy.exported import load_program
from dispfx.deploy.onnx.files import check_external_data, takes_cache, takes_padding
from dispfx.deploy.section import read_layout, read_section
from dispfx.huggingface.model_loading import load_model
from dispfx.learning.state import Position, load_state, save_state, saved_step
from dispfx.plan.budget import Budget
from dispfx.plan.family import Family
from dispfx.plan.knots import Knots
from dispfx.plan.latency_table import read_costs
from dispfx.plan.plan import Plan
from dispfx.report import load_report, to_json
from dispfx.report.plans import (
    family_lines,
    family_plain,
    plan_difference,
    plan_lines,
    plan_plain,
    plan_rows,
)
from dispfx.report.run import read_run
from dispfx.report.run_comparison import run_notes, run_rows, runs_plain
from dispfx.run.folders import require_record
from dispfx.source import load_source
from dispfx.source.text import read_text
from tests.api.plain import build_decoder
from tests.tiny_transformers import tiny_transformer
from tests.trust.mutations import ODD_TEXT, changed_bytes, changed_json, changed_json_text, json_text

Files = Mapping[str, bytes]


@dataclass(frozen=True)
class Kind:
    """One kind of input.

    Args:
        name: for the record.
        cases: draws the files of a case, by name.
        read: reads them from the folder that they were written to.
        whole: files that every case needs as they are.
        valid: the files of a case that must be accepted, else refusing the others would mean nothing.
        share: how many of all inputs are of this kind, beside the others' shares.
    """

    name: str
    cases: SearchStrategy[Files]
    read: Callable[[Path], object]
    whole: Files
    valid: Files
    share: float = 1.0


class Letters:
    """A tokenizer that knows bytes."""

    def __call__(self, texts: list[str], **_: object) -> dict[str, list[list[int]]]:
        return {"input_ids": [list(text.encode()) for text in texts]}


def one(name: str, data: SearchStrategy[bytes]) -> SearchStrategy[Files]:
    """Return cases of one file."""
    return data.map(lambda raw: {name: raw})


def kinds(folder: Path) -> list[Kind]:
    """Make valid files in `folder`, and return every kind of input."""
    pruned, archive = folder / "pruned", folder / "plain"
    _compile(tiny_transformer("llama"), pruned, "none")
    _compile(build_decoder(), archive, "pt2")
    return [
        _plans(pruned), _families(folder), _reports(pruned), _configs(pruned), _modules(pruned),
        _weights(pruned), _shards(),
        *_texts(), _gguf(folder), *_programs(archive), *_onnx(), _costs(),
        *_states(folder),
    ]  # fmt: skip


def _compile(model: torch.nn.Module, out: Path, export: str) -> None:
    plan = Plan.random(capture(model), 0.4, 3)
    apply(model, plan, out=out, export=export)


def _files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def safetensors_header(raw: bytes) -> dict[str, Any]:
    """Return the header of a safetensors file."""
    return json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])


def with_header(raw: bytes, header: bytes) -> bytes:
    """Return a safetensors file with another header, its length right."""
    return len(header).to_bytes(8, "little") + header + raw[8 + int.from_bytes(raw[:8], "little") :]


def changed_header(raw: bytes) -> SearchStrategy[bytes]:
    """Return safetensors files whose header claims something else, or whose bytes were changed."""
    claimed = changed_json(safetensors_header(raw)).map(lambda header: with_header(raw, json_text(header)))
    return claimed | changed_bytes(raw)


def changed_metadata(raw: bytes, key: str = "dispfx") -> SearchStrategy[bytes]:
    """Return safetensors files with one changed entry of JSON among their metadata."""
    header = safetensors_header(raw)

    def put(text: bytes) -> bytes:
        changed = {**header, "__metadata__": {**header["__metadata__"], key: text.decode("latin-1")}}
        return with_header(raw, json_text(changed))

    return changed_json_text(json.loads(header["__metadata__"][key])).map(put)


def _plans(pruned: Path) -> Kind:
    raw = (pruned / "plan.safetensors").read_bytes()

    def read(folder: Path) -> None:
        plan = Plan.load(folder / "plan.safetensors")
        json.dumps([plan_plain(plan), plan_lines(plan), plan_rows(plan)], allow_nan=False)
        plan_difference(plan, Plan.load(pruned / "plan.safetensors"))
        plan.save(folder / "again.safetensors")
        assert Plan.load(folder / "again.safetensors") == plan

    cases = st.one_of(changed_metadata(raw), changed_metadata(raw), changed_header(raw))
    return Kind("plan", one("plan.safetensors", cases), read, {}, {"plan.safetensors": raw}, 3.0)


def _families(folder: Path) -> Kind:
    program = capture(tiny_transformer("llama"))
    rows_KN = torch.randn(3, sum(site.size for site in program.sites))
    Family.of(program, Budget(0.4), Knots.of_range(0.2, 0.4), rows_KN).save(folder / "family.safetensors")
    raw = (folder / "family.safetensors").read_bytes()

    def read(folder: Path) -> None:
        family = Family.load(folder / "family.safetensors")
        json.dumps([family_plain(family), family_lines(family)], allow_nan=False)
        if 0.2 <= family.largest <= 0.4 and family.plan.fingerprint == program.fingerprint:
            family.at(program, family.largest)
        family.save(folder / "again.safetensors")
        assert Family.load(folder / "again.safetensors").plan == family.plan

    cases = st.one_of(changed_metadata(raw), changed_metadata(raw), changed_header(raw))
    return Kind("family", one("family.safetensors", cases), read, {}, {"family.safetensors": raw}, 2.0)


def _reports(pruned: Path) -> Kind:
    raw = (pruned / "report.json").read_bytes()
    whole = {"plan.safetensors": (pruned / "plan.safetensors").read_bytes()}
    rows = [{"kind": "decode", "speedup": 1.5}, {"kind": "prefill", "speedup": 1.2}]
    speed = {"device": "cpu", "rows": rows}
    step = {"step": 1, "steps": 2, "loss": 1.0, "budget_loss": 0.5, "achieved_ratio": 0.1}
    step |= {"tokens_per_second": 10.0, "seconds_left": 1.0, "bad_steps": 0, "held_out_loss": None}

    def read(folder: Path) -> None:
        to_json(load_report(folder / "report.json"))
        runs = [read_run(folder), read_run(folder)]
        json.dumps([runs_plain(runs), run_rows(runs), run_notes(runs)], allow_nan=False)
        require_record(folder)

    report = one("report.json", changed_json_text(json.loads(raw)))
    beside = st.fixed_dictionaries({
        "report.json": st.just(raw),
        "metrics.jsonl": changed_json_text(step),
        "speed.json": changed_json_text(speed) | st.just(json_text(speed)),
    })  # fmt: skip
    return Kind("report", report | report | beside, read, whole, {"report.json": raw}, 2.0)


def _configs(pruned: Path) -> Kind:
    config = json.loads((pruned / "config.json").read_bytes())
    whole = {name: raw for name, raw in _files(pruned).items() if name != "config.json"}
    valid = {"config.json": json_text(config)}

    def read(folder: Path) -> None:
        read_section(folder)
        read_layout(folder)
        reload.read_plan(folder)

    section = changed_json({"quantization_config": config["quantization_config"]})
    ours = section.map(lambda value: json_text({**config, **value} if isinstance(value, dict) else value))
    return Kind("config", one("config.json", ours | changed_json_text(config)), read, whole, valid, 2.0)


def _modules(pruned: Path) -> Kind:
    """The same, as transformers opens the folder; only our own section, for the rest is its affair."""
    config = json.loads((pruned / "config.json").read_bytes())
    whole = {name: raw for name, raw in _files(pruned).items() if name != "config.json"}
    valid = {"config.json": json_text(config)}
    section = changed_json(config["quantization_config"])
    cases = section.map(lambda value: json_text({**config, "quantization_config": value}))
    return Kind("config, loaded", one("config.json", cases), load_model, whole, valid, 0.1)


def _weights(pruned: Path) -> Kind:
    raw = (pruned / "model.safetensors").read_bytes()

    def read(folder: Path) -> None:
        weights.count_parameters(folder)
        for tensor in weights.read_tensors(folder).values():
            tensor.sum()

    cases = st.one_of(changed_header(raw), changed_metadata(raw, "buffers"))
    return Kind("weights", one("model.safetensors", cases), read, {}, {"model.safetensors": raw}, 2.0)


def _shards() -> Kind:
    names = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    shard = {name: save({f"weight_{index}": torch.ones(3, 4)}) for index, name in enumerate(names)}
    index = {
        "metadata": {"total_size": 96},
        "weight_map": dict(zip(("weight_0", "weight_1"), names, strict=True)),
    }

    def read(folder: Path) -> None:
        weights.count_bytes(folder)
        weights.read_tensors(folder)

    cases = one(weights.INDEX_FILE, changed_json_text(index))
    return Kind("index of shards", cases, read, shard, {weights.INDEX_FILE: json_text(index)})


def _text(name: str, valid: bytes, cases: SearchStrategy[bytes], share: float = 1.0) -> Kind:
    form = name.partition(".")[2]

    def read(folder: Path) -> object:
        return read_text([str(folder / name)], Letters())

    title = {"txt": "text", "safetensors": "tokens"}.get(form, form)
    return Kind(title, one(name, cases), read, {}, {name: valid}, share)


def _texts() -> list[Kind]:
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    text = "Plain words, é and 漢字.\r\nA second line.\n".encode() * 3
    lines = b"".join(json_text({"text": f"line {number}"}) + b"\n" for number in range(4))
    packed, sink = gzip.compress(lines, mtime=0), io.BytesIO()
    table = arrow.table({"text": ["one", "two", "three"] * 4, "number": list(range(12))})
    parquet.write_table(table, sink, row_group_size=4)
    tokens = save({"tokens": torch.arange(40)})
    return [
        _text("a.txt", text, changed_bytes(text)),
        _text("a.jsonl", lines, changed_bytes(lines) | changed_json_text({"text": "x"})),
        _text("a.jsonl.gz", packed, changed_bytes(packed) | changed_bytes(lines).map(gzip.compress)),
        _text("a.parquet", sink.getvalue(), changed_bytes(sink.getvalue())),
        _text("a.safetensors", tokens, changed_header(tokens), 1.5),
    ]


def _gguf(folder: Path) -> Kind:
    path = folder / "valid.gguf"
    write_gguf(path)
    cases = one("model.gguf", changed_bytes(path.read_bytes()))
    return Kind(
        "gguf",
        cases,
        lambda at: load_source(str(at / "model.gguf")),
        {},
        {"model.gguf": path.read_bytes()},
        0.2,
    )


def write_gguf(path: Path) -> None:
    """Write a llama of one layer with a few words."""
    writer = gguf.GGUFWriter(path, "llama")
    for name, value in (("context_length", 32), ("embedding_length", 8), ("block_count", 1),
                        ("feed_forward_length", 12), ("head_count", 2), ("head_count_kv", 2)):  # fmt: skip
        getattr(writer, f"add_{name}")(value)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(16)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["<unk>", "<s>", "</s>", *"abcdefghijklm"])
    writer.add_token_scores([0.0] * 16)
    writer.add_token_types([2, 3, 3, *[1] * 13])
    shapes = {"token_embd": (16, 8), "output": (16, 8), "output_norm": (8,), "blk.0.attn_norm": (8,)}
    shapes |= {"blk.0.ffn_norm": (8,), "blk.0.ffn_gate": (12, 8), "blk.0.ffn_up": (12, 8)}
    shapes |= {"blk.0.ffn_down": (8, 12)} | {f"blk.0.attn_{of}": (8, 8) for of in ("q", "k", "v", "output")}
    numbers = np.random.default_rng(0)
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", numbers.standard_normal(shape, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _programs(archive: Path) -> list[Kind]:
    raw = (archive / "program.pt2").read_bytes()
    valid = {"program.pt2": raw}
    with zipfile.ZipFile(io.BytesIO(raw)) as opened:
        entries = {name: opened.read(name) for name in opened.namelist()}

    def check(folder: Path) -> None:
        check_archive(folder / "program.pt2")
        count_program(folder)

    changed = st.one_of(*(_changed_entry(entries, name) for name in entries if name.endswith(".json")))
    renamed = st.sampled_from(list(entries)).flatmap(
        lambda name: st.sampled_from(ODD_TEXT).map(
            lambda odd: zipped({**entries, f"program/{odd}".encode(errors="ignore").decode(): entries[name]})
        )
    )
    cases = one("program.pt2", st.one_of(changed_bytes(raw), changed, renamed))
    loaded = one("program.pt2", changed)
    return [
        Kind("pt2", cases, check, {}, valid, 0.6),
        Kind("pt2, loaded", loaded, load_program, {}, valid, 0.03),
    ]


def _changed_entry(entries: Mapping[str, bytes], name: str) -> SearchStrategy[bytes]:
    return changed_json_text(json.loads(entries[name])).map(lambda text: zipped({**entries, name: text}))


def zipped(entries: Mapping[str, bytes]) -> bytes:
    """Return a zip file as torch writes it: nothing packed."""
    sink = io.BytesIO()
    with zipfile.ZipFile(sink, "w", zipfile.ZIP_STORED) as target:
        for name, data in entries.items():
            target.writestr(name, data)
    return sink.getvalue()


def onnx_model(location: str, offset: str = "0", length: str = "48") -> bytes:
    """Return an ONNX model that takes a cache and whose weights lie at `location`."""
    weight = numpy_helper.from_array(np.ones((3, 4), np.float32), "weight")
    weight.ClearField("raw_data")
    weight.data_location = TensorProto.EXTERNAL
    for key, value in (("location", location), ("offset", offset), ("length", length)):
        entry = weight.external_data.add()
        entry.key, entry.value = key, value
    inputs = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 3])
        for name in ("x", "attention_mask", "past_key_values.0.key")
    ]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 4])]
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "weight"], ["y"])], "g", inputs, outputs, [weight]
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)]).SerializeToString()


def _onnx() -> list[Kind]:
    whole = {"model.onnx.data": np.ones((3, 4), np.float32).tobytes()}
    raw = onnx_model("model.onnx.data")
    numbers = st.sampled_from(["0", "-1", "48", "999", str(2**60), str(2**70), "", "x", "1e3"])
    places = st.sampled_from([*(text for text in ODD_TEXT if text != "\ud800"), "model.onnx.data", "link"])
    built = st.builds(onnx_model, places, numbers, numbers)

    def read(folder: Path) -> None:
        check_external_data(folder / "model.onnx")
        takes_cache(folder / "model.onnx")
        takes_padding(folder / "model.onnx")

    return [Kind("onnx", one("model.onnx", changed_bytes(raw) | built), read, whole, {"model.onnx": raw})]


def _costs() -> Kind:
    table = {"device": "cpu", "dtype": "float32", "tokens": 1, "rows": [8, 16], "columns": [8, 16]}
    table |= {"seconds": [[1e-6, 2e-6], [2e-6, 3e-6]], "selection_seconds": 1e-7}

    def read(folder: Path) -> None:
        costs = read_costs(folder / "costs.json")
        assert costs.product_seconds(12, 12) > 0

    return Kind(
        "costs", one("costs.json", changed_json_text(table)), read, {}, {"costs.json": json_text(table)}, 2.0
    )


def _states(folder: Path) -> list[Kind]:
    identity = {"decoder": "d", "sites": [["s", 4]], "settings": {"steps": 2}, "budget": {"ratio": 0.3},
                "text": "t", "device": "cpu"}  # fmt: skip
    (folder / "state").mkdir()
    save_state(
        folder / "state", identity, Position(3, 0, 0), {"generator": torch.zeros(4, dtype=torch.uint8)}
    )
    raw = (folder / "state" / "learning.safetensors").read_bytes()

    def read(at: Path) -> None:
        saved_step(at)
        load_state(at, identity)

    cases = one("learning.safetensors", changed_metadata(raw) | changed_header(raw))
    return [Kind("state", cases, read, {}, {"learning.safetensors": raw})]
