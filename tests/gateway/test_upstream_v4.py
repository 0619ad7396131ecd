"""`deskfleet gateway` in front of engines that serve DeepSeek-V4-Flash: the real command, the published config.json.

The tokenizer is the tiny one, without the tokens that V4 does not have: the system's, and the image's.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from chat_scripts import CHECKPOINT, HELLO, TOOLS, says, text_of
from openai import AsyncOpenAI
from test_upstream_cli import gateway, run
from upstream_scripts import server_of

from deskfleet.gateway.thinking import HEADER

CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "torch_dtype": "bfloat16",
    "vocab_size": 129280,
    "hidden_size": 4096,
    "num_hidden_layers": 43,
    "hidden_act": "silu",
    "num_attention_heads": 64,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 1024,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "sliding_window": 128,
    "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0],
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 512,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 65536,
    },
    "max_position_embeddings": 1048576,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 2048,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "num_hash_layers": 3,
    "swiglu_limit": 10.0,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "rms_norm_eps": 1e-6,
    "num_nextn_predict_layers": 1,
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "use_cache": True,
    "expert_dtype": "fp4",
    "quantization_config": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "scale_fmt": "ue8m0",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    },
    "transformers_version": "4.57.1",
}
ABSENT = ("<｜System｜>", "<｜deepseek_image｜>")
BOS = "<｜begin▁of▁sentence｜>"
CALL = (
    '\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="weather">\n'
    '<｜DSML｜parameter name="city" string="true">Oslo</｜DSML｜parameter>\n'
    "</｜DSML｜invoke>\n</｜DSML｜tool_calls>"
)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    directory = tmp_path / "DeepSeek-V4-Flash"
    directory.mkdir()
    tokenizer = (CHECKPOINT / "tokenizer.json").read_text(encoding="utf-8")
    for number, token in enumerate(ABSENT):
        assert f'"{token}"' in tokenizer
        tokenizer = tokenizer.replace(f'"{token}"', f'"<｜place▁holder▁no▁{700 + number}｜>"')
    (directory / "tokenizer.json").write_text(tokenizer, encoding="utf-8")
    (directory / "config.json").write_text(json.dumps(CONFIG))
    return directory


def flags(url: str, engine: str, checkpoint: Path) -> tuple[str, ...]:
    return ("--upstream", url, "--engine", engine, "--checkpoint", str(checkpoint), "--port", "0", "--json")


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
async def test_prompts_and_answers_are_v4_s(engine: str, checkpoint: Path) -> None:
    script = {"now": says("Hm.</think>ok" + CALL)}
    async with (
        server_of(engine, lambda request: script["now"]) as server,
        gateway(*flags(server.url, engine, checkpoint)) as running,
        AsyncOpenAI(base_url=f"{running.ready['url']}/v1", api_key="x", max_retries=0) as client,
        aiohttp.ClientSession() as session,
    ):
        ready = running.ready
        assert (ready["model"], ready["max_model_len"]) == ("DeepSeek-V4-Flash", server.max_model_len)
        async with session.get(f"{ready['url']}/v1/models") as response:
            assert (await response.json())["data"][0]["max_model_len"] == server.max_model_len
        server.requests.clear()
        messages: list[Any] = [{"role": "system", "content": "Be brief."}, *HELLO]
        answer = await client.chat.completions.create(model=ready["model"], messages=messages, tools=TOOLS)
        choice = answer.choices[0]
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", "ok")
        assert choice.message.reasoning_content == "Hm."  # type: ignore[attr-defined]
        assert json.loads(choice.message.tool_calls[0].function.arguments) == {"city": "Oslo"}
        script["now"] = says("ok")
        body = {"model": ready["model"], "messages": messages, "enable_thinking": False}
        async with session.post(f"{ready['url']}/v1/chat/completions", json=body) as response:
            assert response.status == 200
            assert response.headers[HEADER].startswith("off; ")
        async with session.post(f"{ready['url']}/tokenize", json=body) as response:
            counted = (await response.json())["tokens"]
    thinking, plain = (text_of(request.prompt_token_ids) for request in server.requests)
    assert thinking.startswith((f"{BOS}Reasoning Effort: ", f"{BOS}Be brief."))
    assert 'by writing a "<｜DSML｜tool_calls>" block' in thinking
    assert thinking.endswith("<｜User｜>hello<｜Assistant｜><think>")
    assert plain == text_of(counted) == f"{BOS}Be brief.<｜User｜>hello<｜Assistant｜></think>"
    assert "<｜System｜>" not in thinking + plain


async def test_an_image_is_refused_and_a_wrong_config_is_named(checkpoint: Path) -> None:
    async with server_of("vllm", says("ok")) as server:
        async with (
            gateway(*flags(server.url, "vllm", checkpoint)) as running,
            aiohttp.ClientSession() as session,
        ):
            image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
            body = {"model": "DeepSeek-V4-Flash", "messages": [{"role": "user", "content": [image]}]}
            async with session.post(f"{running.ready['url']}/v1/chat/completions", json=body) as response:
                assert response.status == 400
                assert "image" in (await response.json())["error"]["message"]
        (checkpoint / "config.json").write_text(json.dumps({**CONFIG, "eos_token_id": 7}))
        code, told, _ = await run(*flags(server.url, "vllm", checkpoint))
        assert code == 3
        assert "<｜end▁of▁sentence｜> is 1" in json.dumps(told, ensure_ascii=False)
