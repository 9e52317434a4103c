"""inspect, verify, export and generate."""

import json
from pathlib import Path

import pytest

from dispfx.analysis.coverage import Coverage, Ungated
from dispfx.settings.learning_settings import LearnSettings
from dispfx.verification.equivalence import Verification
from tests.cli.asked import asked
from tests.report.test_estimate import estimate
from tests.report.test_sites import program

HOLDS = Verification("reloaded = lowered", (1, 17), 0.0, 0.0, 0.0)
REACHED = Coverage(900, 1000, (Ungated("not read by the graph", 100, ("mlp.spare.weight",)),))
FAILS = Verification("onnx = lowered", (2, 9), 1.0, 0.5, 1e-4)


@pytest.fixture(autouse=True)
def _covered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in of a program has no graph to be asked about its weights."""
    monkeypatch.setattr("dispfx.analysis.coverage.coverage", lambda program: Coverage(1, 1, (), {}))


@pytest.fixture
def written(tmp_path: Path) -> Path:
    (tmp_path / "report.json").write_text("{}")
    return tmp_path


def test_inspect_shows_sites_and_refusals(dispfx, replaced):
    inspect = replaced("inspect", program(refused=1))
    estimated = replaced("estimate", estimate())
    fitted = replaced("settings_of", LearnSettings())
    replaced("coverage", REACHED)
    result = dispfx("inspect", "demo", "--skip", "layers.0.mlp", "--dtype", "float32", "--seq-len", 64)
    assert result.exit_code == 0, result.output
    given = asked(inspect)
    assert given["model"] == "demo" and list(given["skip"]) == ["layers.0.mlp"]
    assert inspect.call_args.kwargs["config_only"] is False
    assert estimated.call_args.args == (inspect.return_value, fitted.return_value)
    assert fitted.call_args.args[0] is inspect.return_value
    settings = fitted.call_args.args[1]
    assert (settings.seq_len, settings.batch_size) == (64, 8), "the demo's own where nothing was chosen"
    assert "H100" in result.stdout
    assert "layers.{0…2}.attention.read" in result.stdout and "left dense" in result.stdout
    assert "not gated: 100 (10.0%): not read by the graph (mlp.spare.weight)" in result.stdout


def test_inspect_as_json_is_one_document(dispfx, replaced):
    replaced("inspect", program())
    replaced("settings_of", LearnSettings())
    replaced("coverage", REACHED)
    replaced("estimate", estimate())
    shown = json.loads(dispfx("inspect", "demo", "--json").stdout)
    assert shown["ungated"] == [
        {"reason": "not read by the graph", "parameters": 100, "paths": ["mlp.spare.weight"]}
    ]
    assert len(shown["sites"]) == 6 and shown["estimate"]["bytes"]["peak"] == estimate().peak_bytes
    assert dispfx("inspect", "demo", "--quiet").output == ""


def test_inspect_can_be_told_to_read_no_weights(dispfx, replaced):
    inspect = replaced("inspect", program())
    replaced("settings_of", LearnSettings())
    replaced("coverage", REACHED)
    replaced("estimate", estimate())
    assert dispfx("inspect", "demo", "--config-only").exit_code == 0
    assert inspect.call_args.kwargs["config_only"] is True


def test_a_config_alone_can_be_inspected_and_nothing_else(dispfx, tmp_path: Path):
    config = {"model_type": "llama", "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config | {"num_hidden_layers": 1, "vocab_size": 32, "dtype": "bfloat16"}))
    for model in (file, tmp_path):
        result = dispfx("inspect", model, "--json", "--seq-len", 8)
        assert result.exit_code == 0, result.output
        shown = json.loads(result.stdout)
        assert (shown["measured"], shown["dtype"], len(shown["sites"])) == (False, "bfloat16", 5)
        assert shown["estimate"]["bytes"]["weights_by_dtype"]["bfloat16"] == 2 * shown["parameters"]
    text = tmp_path / "text.txt"
    text.write_text("text")
    result = dispfx("compile", file, "--ratio", 0.3, "--data", text, "--out", tmp_path / "out")
    assert result.exit_code == 2 and "MODEL is only a config" in " ".join(result.stderr.split())


def test_verify_shows_each_comparison(dispfx, replaced, written: Path):
    verify = replaced("verify", [HOLDS])
    result = dispfx("verify", written)
    assert result.exit_code == 0 and "reloaded = lowered" in result.stdout
    assert verify.call_args.args == (written,)


def test_verify_says_where_there_is_nothing_to_compare(dispfx, replaced, written: Path):
    replaced("verify", [])
    result = dispfx("verify", written)
    assert result.exit_code == 0 and "nothing to compare" in result.stdout


def test_verify_shows_all_and_fails_with_our_exit_code_where_one_does_not_hold(dispfx, replaced, written):
    replaced("verify", [HOLDS, FAILS])
    result = dispfx("verify", written)
    assert result.exit_code == 1
    assert "reloaded = lowered" in result.stdout and "FAILED" in result.stdout
    assert "onnx = lowered" in result.stderr

    as_json = dispfx("verify", written, "--json")
    assert as_json.exit_code == 1
    assert json.loads(as_json.stdout)["verify"][1]["max_rel_error"] == 0.5


@pytest.mark.parametrize(
    "verb", [["verify"], ["export", "--onnx"], ["generate", "--prompt=a", "--runtime=onnx"]]
)
def test_a_folder_that_dispfx_did_not_write_is_refused(dispfx, tmp_path: Path, verb: list[str]):
    result = dispfx(*verb, tmp_path)
    assert result.exit_code == 2 and "did not write it" in result.stderr
    assert dispfx(*verb, tmp_path / "absent").exit_code == 2


def test_export_names_what_it_wrote(dispfx, replaced, written: Path):
    export = replaced("export", [written / "onnx" / "model.onnx"])
    result = dispfx("export", written, "--onnx")
    assert result.exit_code == 0 and result.stdout.strip() == str(written / "onnx" / "model.onnx")
    assert asked(export)["onnx"] is True and asked(export)["pt2"] is False


def test_export_of_nothing_is_refused(dispfx, replaced, written: Path):
    export = replaced("export")
    result = dispfx("export", written)
    assert result.exit_code == 2 and "--onnx" in result.stderr and not export.called


def test_generate_prints_the_text(dispfx, replaced):
    generate = replaced("generate", "once upon a time")
    result = dispfx("generate", "demo", "--prompt", "once", "--max-new-tokens", 3, "--temperature", 0.5)
    assert result.exit_code == 0 and result.stdout == "once upon a time\n"
    given = asked(generate)
    assert (given["model"], given["prompt"], given["max_new_tokens"]) == ("demo", "once", 3)
    assert json.loads(dispfx("generate", "demo", "--prompt", "once", "--json").stdout) == {
        "prompt": "once",
        "text": "once upon a time",
    }
