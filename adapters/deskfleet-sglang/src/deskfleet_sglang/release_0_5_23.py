"""SGLang 0.5.23: what the plug-in replaces, wraps or relies on, by SHA-256 of its source text.

A digest is that of `deskfleet_engram.host.source_sha256`. Another release gets another file, after its tests passed.
"""

from __future__ import annotations

from collections.abc import Mapping

VERSION = "0.5.23"

SOURCES: Mapping[str, str] = {
    "sglang.srt.plugins.load_plugins": "cd2a423a31293f61ca0e01cfeb4ca9ba554b8be1b464e0130cec49aca18fa89e",
    "sglang.srt.plugins.hook_registry.HookRegistry": (
        "84240a183d866c5baf102eaa9b387806c71f984503f78ec938e4cbfd1ddb7ac6"
    ),
    "sglang.srt.plugins.hook_registry._wrap_fn": (
        "864f78c5d65446667245a8d38a1e51652f1c3b9d81e988befb350f29a6efcd17"
    ),
    "sglang.srt.layers.engram._HostTable": "678d6631828c7dbb16ea0f28bc4a2fd8c50bce19104b57cb5e81c0b2c470736d",
    "sglang.srt.layers.engram.EngramEmbedding": (
        "88dea0225e849f3b53e221919ebdf5b13538f3890a4b2bfcbf9f9c629078fc20"
    ),
    "sglang.srt.layers.engram.Engram": "5e19cb4156cf8d01fe3de9ebd2111416ad01d364ce4dd1840477c090545e70ba",
    "sglang.srt.layers.engram.EngramHasher": (
        "8ce95af8405c04f9bcb8bdfe7f36c8f7bdc1a18a3df6158237f67f274d40ab1e"
    ),
    "sglang.srt.layers.engram.EngramLayout": (
        "452dbe195919caa3f48eaec7d7f5ead8665f509156d4102f1b961730b8cfe581"
    ),
    "sglang.srt.layers.engram.compute_engram_hash_ids": (
        "a153f3882bd7940ade77d93e823defbb43a26d9d8e72aaae625c42515f531f9a"
    ),
    "sglang.srt.layers.engram.compute_hash_multipliers": (
        "421857f6ae3f4c76342e1691bd6fd0610240eeceee7aa14e38034fe25f856fda"
    ),
    "sglang.srt.layers.engram.shard_range": (
        "c13ff61a7251f1988a896d20e57cb9d708ccffd0e12d7ccd0a6e2dbedfe7664d"
    ),
    "sglang.srt.layers.engram_staging.EngramRowStager": (
        "b0de40bbdbed5a3ac657359b915c1cf2957f368e471fd40c4cc70b5ff5f52a74"
    ),
    "sglang.kernels.ops.embeddings.engram_gather.engram_gather": (
        "9488014cf90aa632a58230b8b2978ef0a8a52abf21bb4b8ff33c3f2d0e224a84"
    ),
    "sglang.kernels.ops.embeddings.engram_gather._engram_gather_kernel": (
        "50eef55d019f2c0f2a2b33085850925ea7ef84c49b9460d4d83b197eb7438920"
    ),
    "sglang.srt.model_executor.model_runner_components.ngram_embedding_manager.NgramEmbeddingManager": (
        "efefe6a457c5cd24aa97f7cf47a215278d4099c6e221b1d0953032fa06e1b42c"
    ),
    "sglang.srt.managers.scheduler.Scheduler.process_batch_result": (
        "a67c683e53477b437143ae9836a19bb2b2c3024bda821624891389e07c1feb9a"
    ),
}

__all__ = ["SOURCES", "VERSION"]
