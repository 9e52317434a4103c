"""The entry point `vllm.general_plugins`: vLLM calls `register` in each of its processes.

Importing this module imports no vLLM, so that other programs can list entry points quickly.
"""


def register() -> None:
    """Let vLLM serve pruned folders."""
    from dispfx.serving.weight_format import install

    install()
