"""The model card says what was done, and links only where a link leads somewhere."""

import dataclasses

from dispfx.report import CacheBytes, FolderContents, Report, SiteWidth, model_card


def test_the_card_tells_the_whole_story(report: Report):
    card = model_card(report, FolderContents("out/demo", onnx=True), base_model="demo", data="text.txt")
    for expected in (
        "# demo\n",
        "30.0% of the prunable weights",
        "| parameters | 922,112 | 701,204 |",
        "| perplexity | 3.200 | 3.280 |",
        "40 windows of 128 tokens without overlap, 5,080 predicted tokens",
        "the last 10% of the text, never learned from",
        'AutoModelForCausalLM.from_pretrained("demo")',
        "dispfx verify demo",
        "onnx/model.onnx",
        "learned from text.txt; figures measured on text of that kind flatter them.",
        "Seed 7",
        "torch 2.13.0",
        "| lowered = gated | 2 × 9 | 1.20e-07 | 1e-05 |",
        "| reloaded = lowered | 1 × 17 | 0.00e+00 | equal bits |",
        "- `layers.1.mlp`: a softmax over a labelled dimension",
        report.command,
    ):
        assert expected in card, expected


def test_a_card_with_pruned_values_names_both_caches(report: Report):
    """The cache of transformers keeps its size; only a plan without heads and values says that it must."""
    keeps = "so the KV cache keeps its size"
    assert keeps in model_card(report, FolderContents("out"), base_model="demo")
    sites = (*report.sites, SiteWidth("layers.0.attention.values", "values", 64, 48))
    pruned = dataclasses.replace(report, sites=sites, cache=CacheBytes(2048, 2048, 1792))
    card = model_card(pruned, FolderContents("out"), base_model="demo")
    assert keeps not in card
    assert "| KV cache, bytes per token | 2,048 | 2,048 |" in card
    assert "| KV cache, bytes per token, ONNX | 2,048 | 1,792 |" in card


def test_a_graph_alone_is_opened_by_dispfx(report: Report):
    card = model_card(report, FolderContents("out/demo", as_modules=False), base_model="demo")
    assert 'dispfx.load("demo")' in card and "from_pretrained" not in card


def test_only_a_hub_id_becomes_a_link(report: Report):
    linked = model_card(report, FolderContents("out"), base_model="owner/name", on_hub=True)
    assert "base_model: owner/name" in linked.split("---")[1]
    local = model_card(report, FolderContents("out"), base_model="folder/name")
    assert "base_model" not in local


def test_what_was_not_done_is_not_claimed(report: Report):
    bare = dataclasses.replace(report, perplexity=None, refused=(), verify=(), skills={})
    card = model_card(bare, FolderContents("out"), base_model="demo")
    for absent in ("erplexity", "Verified", "Left dense", "ONNX", "learned from", "skill"):
        assert absent not in card, absent


def test_the_front_matter_is_yaml_between_two_rules(report: Report):
    lines = model_card(report, FolderContents("out"), base_model="owner/name", on_hub=True).splitlines()
    end = lines.index("---", 1)
    assert lines[0] == "---"
    assert all(": " in line for line in lines[1:end])


def test_a_card_names_no_tokenizer_where_there_is_none(report: Report):
    for as_modules in (True, False):
        card = model_card(
            report, FolderContents("out", as_modules=as_modules, tokenizer=False), base_model="demo"
        )
        assert "okenizer" not in card and "dispfx generate" not in card and "dispfx verify out" in card


def test_a_card_imports_the_code_that_registers_the_class_and_names_no_command_without_it(report: Report):
    card = model_card(report, FolderContents("out", code="mine"), base_model="mine:build")
    assert "import mine  #" in card and card.index("import mine") < card.index("from_pretrained")
    assert "dispfx verify" not in card and "dispfx generate" not in card
    graph = model_card(report, FolderContents("out", code="mine", as_modules=False), base_model="mine:build")
    assert "import mine" not in graph and "dispfx verify out" in graph


def test_a_card_of_pruned_heads_says_what_they_leave_of_the_cache(report: Report):
    assert "the KV cache keeps its size" in model_card(report, FolderContents("out"), base_model="demo")
    heads = dataclasses.replace(report, sites=(*report.sites, SiteWidth("layers.0.heads", "heads", 8, 5)))
    card = model_card(heads, FolderContents("out"), base_model="demo")
    assert "Attention keeps 5 of 8 key/value heads." in card and "keeps its size" not in card
    measured = dataclasses.replace(heads, cache=CacheBytes(2048, 1280))
    card = model_card(measured, FolderContents("out"), base_model="demo")
    assert "5 of 8 key/value heads, and the KV cache 1,280 of 2,048 bytes per token." in card


def test_a_card_says_whether_the_stream_keeps_its_width(report: Report):
    assert "stream keeps its full width" in model_card(report, FolderContents("out"), base_model="demo")
    sites = (SiteWidth("stream", "stream", 128, 96),)
    card = model_card(dataclasses.replace(report, sites=sites), FolderContents("out"), base_model="demo")
    assert "full width" not in card and "the residual stream keeps one subset of its features" in card


def test_values_that_go_with_their_heads_are_not_counted_as_kept(report: Report):
    sites = (
        SiteWidth("layers.0.attn.heads", "heads", 8, 4),
        SiteWidth("layers.0.attn.values", "values", 64, 48),
    )
    card = model_card(dataclasses.replace(report, sites=sites), FolderContents("out"), base_model="demo")
    assert "Attention keeps 4 of 8 key/value heads and 24 of 64 features of values." in card
