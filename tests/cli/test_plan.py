"""`kvtier plan`: figures follow from the machine and the model, and impossible demands end in a sentence."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    BambaConfig,
    DeepseekV3Config,
    FalconConfig,
    FalconH1Config,
    Gemma3TextConfig,
    GPT2Config,
    JambaConfig,
    LlamaConfig,
    MixtralConfig,
    Qwen2MoeConfig,
    Qwen3Config,
    Zamba2Config,
)
from transformers.cache_utils import DynamicLayer
from transformers.utils import logging

from kvtier import ConfigError
from kvtier import profile as profiles
from kvtier.cli.config import completed_config, read_config
from kvtier.cli.main import main
from kvtier.cli.plan import report
from kvtier.cli.plan.report import millions
from kvtier.hf.models.checkpoint import config as model_config
from kvtier.hf.models.checkpoint import weights
from kvtier.hf.models.checkpoint.weights import count_weights
from kvtier.kernels import launch
from kvtier.memory import measured
from kvtier.planning.hardware.machines import MACHINES
from kvtier.planning.hardware.model_size import divided, model_size
from kvtier.planning.hardware.profile import HardwareProfile
from kvtier.planning.simulation.outlook import Demand, foresee

LLAMA_8B = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
LLAMA_70B = LLAMA_8B | {
    "num_hidden_layers": 80,
    "hidden_size": 8192,
    "num_attention_heads": 64,
    "intermediate_size": 28672,
}

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA_8B))
    return path


def plan(capsys: pytest.CaptureFixture[str], *args: object) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of `kvtier plan`."""
    try:
        status = main(["plan", *map(str, args)])
    except SystemExit as end:
        status = int(end.code or 0)
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    return status, out, err


def planned(capsys: pytest.CaptureFixture[str], *args: object) -> dict[str, Any]:
    status, out, err = plan(capsys, *args, "--json")
    assert status == 0, err
    found: dict[str, Any] = json.loads(out)
    return found


#: Of all configs below.
TINY = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "vocab_size": 50,
}
MLA = TINY | {
    "num_key_value_heads": 4,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}


@pytest.mark.parametrize(
    "made",
    [
        LlamaConfig(num_hidden_layers=3, **TINY),
        Qwen3Config(num_hidden_layers=3, **TINY),
        MixtralConfig(num_hidden_layers=2, **TINY),
        GPT2Config(n_embd=64, n_layer=3, n_head=4, vocab_size=50, n_positions=8),
        FalconConfig(num_hidden_layers=3, hidden_size=64, num_attention_heads=4, vocab_size=50),
        AutoConfig.for_model("mimo_v2_flash", num_hidden_layers=1, head_dim=24, v_head_dim=16, **TINY),
        DeepseekV3Config(num_hidden_layers=2, first_k_dense_replace=0, q_lora_rank=16, **MLA),
        DeepseekV3Config(num_hidden_layers=3, first_k_dense_replace=1, q_lora_rank=None, **MLA),
    ],
    ids=lambda x: x.model_type,
)
def test_the_weights_and_the_kv_of_a_config_are_those_of_the_model(made: Any) -> None:
    size = model_size(made.to_dict() | {"dtype": "float32"})
    model = AutoModelForCausalLM.from_config(made)
    cached = model(torch.ones(1, 1, dtype=torch.long), use_cache=True).past_key_values.layers
    assert size.layers * size.kv_bytes == sum(x.nbytes for layer in cached for x in (layer.keys, layer.values))
    real = sum(x.numel() for x in model.parameters())
    assert size.parameters == pytest.approx(real, rel=0.03)  # norms, biases and positions are left out
    assert size.active <= size.parameters


def test_sizes_come_from_the_part_that_holds_the_text_and_only_full_attention_is_tiered() -> None:
    text = LLAMA_8B | {"layer_types": ["sliding_attention", "full_attention"] * 16}
    size = model_size({"model_type": "gemma3", "text_config": text, "vision_config": {"hidden_size": 7}})
    assert (size.layers, size.kv_heads, size.head_dim, size.kv_bytes) == (16, 8, 128, 4096)
    assert size.parameters == model_size(LLAMA_8B).parameters
    assert model_size(LLAMA_8B).parameters == pytest.approx(8.03e9, rel=0.01)
    assert model_size(LLAMA_70B).parameters == pytest.approx(70.6e9, rel=0.01)


@pytest.mark.parametrize(
    ("change", "layers", "tied"),
    [
        ({}, 32, False),
        ({"model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": False}, 32, False),
        ({"model_type": "gemma2", "sliding_window": 4096, "head_dim": 128}, 16, True),
        ({"model_type": "gemma3_text", "sliding_window": 512, "sliding_window_pattern": 8, "head_dim": 128}, 4, True),
        ({"model_type": "a model of next year"}, 32, False),
    ],
    ids=lambda x: x.get("model_type", "llama") if isinstance(x, dict) else "",
)
def test_what_a_file_leaves_to_its_model_type_is_what_the_cache_sees(
    change: dict[str, Any], layers: int, tied: bool, tmp_path: Path
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({k: x for k, x in LLAMA_8B.items() if k != "tie_word_embeddings"} | change))
    size = model_size(read_config(str(path)))
    assert size.layers == layers
    assert (size.embedding == 0) == tied
    assert size.itemsize == 2


def test_of_a_model_of_windows_alone_it_says_what_it_takes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B | {"model_type": "mistral", "sliding_window": 4096}))
    status, out, err = plan(capsys, tmp_path, "--batch", 2)
    assert status == 0, err
    assert "0 layers with full attention, 32 with a window of 4,096" in out
    assert "8.03 billion weights (15 GiB, counted)" in out
    assert "nothing is tiered" in out
    assert re.search(r"windows, states +1 GiB ", out)  # 2 sequences x 32 layers x 4,096 tokens x 4 KiB
    assert "longest context" not in out, "nothing grows, and the config names no positions"
    out = plan(capsys, tmp_path, "--device", "cpu")[1]
    assert re.search(r"windows, states +512 MiB   on the host besides", out)
    assert "all on the host" in out
    assert "device" not in out


#: Layers of which kind a model of each type has, with one in three that grows.
MIXED: list[tuple[Any, tuple[int, int, int]]] = [
    (BambaConfig(attn_layer_indices=[1], num_hidden_layers=3, mamba_n_heads=8, mamba_d_head=16, **TINY), (1, 2, 0)),
    (FalconH1Config(num_hidden_layers=3, mamba_d_ssm=None, mamba_n_heads=8, mamba_d_head=16, **TINY), (0, 3, 3)),
    (
        Zamba2Config(
            **TINY | {"num_key_value_heads": 4},
            num_hidden_layers=3,
            layers_block_type=["mamba", "hybrid", "mamba"],
            attention_head_dim=32,
            attention_hidden_size=128,
            n_mamba_heads=8,
            mamba_headdim=16,
            mamba_ngroups=1,
        ),
        (0, 3, 1),
    ),
    (JambaConfig(num_hidden_layers=3, attn_layer_period=3, attn_layer_offset=1, mamba_dt_rank=4, **TINY), (1, 2, 0)),
]


@pytest.mark.parametrize(("made", "kinds"), MIXED, ids=[made.model_type for made, _ in MIXED])
def test_layers_of_a_saved_config_are_those_of_the_cache(
    made: Any, kinds: tuple[int, int, int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made.save_pretrained(tmp_path)  # which writes infinity in a way of its own
    size = planned(capsys, tmp_path, "--context", "4k")["size"]
    assert (size["layers"], size["recurrent"], size["growing"]) == kinds


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("made", [made for made, _ in MIXED], ids=[made.model_type for made, _ in MIXED])
def test_what_is_not_tiered_is_what_the_cache_of_the_model_holds(made: Any, dtype: str) -> None:
    config, _ = completed_config(made.to_dict() | {"dtype": dtype})
    size = model_size(config)
    model = AutoModelForCausalLM.from_config(made, dtype=getattr(torch, dtype))
    cached = model(torch.ones(1, 40, dtype=torch.long), use_cache=True).past_key_values.layers
    rest = [x for x in cached if type(x) is not DynamicLayer]
    keys = sum(
        x.nbytes
        for layer in rest
        for x in (getattr(layer, "keys", None), getattr(layer, "values", None))
        if x is not None
    )
    held = sum(x.nbytes for layer in rest for x in tensors_of(layer))
    assert size.growing_bytes(40) == keys
    assert size.bounded_bytes(40) == pytest.approx(held - keys, rel=0.1)


def test_kv_that_grows_and_is_not_tiered_takes_its_part_of_the_device(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = LLAMA_8B | {"mamba_d_ssm": None, "mamba_n_heads": 64, "mamba_d_head": 128, "head_dim": 128}
    (tmp_path / "config.json").write_text(json.dumps(sizes | {"model_type": "falcon_h1"}))
    short, long = (planned(capsys, tmp_path, "--context", x) for x in ("8k", "64k"))
    taken = short["demand_per_device"]["device_bytes"] - long["demand_per_device"]["device_bytes"]
    assert taken == (64 - 8) * 1024 * 32 * 4096
    speeds = [x["outlook_per_device"]["speeds"][0]["seconds"] for x in (short, long)]
    assert speeds[1] - speeds[0] == pytest.approx(taken / (MACHINES["h100"].device_memory * 0.8), rel=0.01)
    status, out, err = plan(capsys, tmp_path, "--context", "64k")
    assert status == 0, err
    assert "nothing is tiered" in out
    assert re.search(r"KV not tiered +8 GiB ", out)
    status, _, err = plan(capsys, tmp_path, "--context", long["longest_context"] + 64)
    assert (status, "KV that grows and is not tiered" in err) == (2, True)
    assert plan(capsys, tmp_path, "--context", long["longest_context"])[0] == 0


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"model_type": "a model of next year"}, "knows no decoder of type 'a model of next year'"),
        ({"model_type": "gemma3_text", "rms_norm_eps": "small"}, "refuses the config"),
    ],
    ids=["unknown", "refused"],
)
def test_a_plan_says_where_it_takes_all_layers_for_full_attention(
    change: dict[str, Any], why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B | change))
    status, out, err = plan(capsys, tmp_path)
    assert status == 0, err
    assert "Which layers have full attention is not known" in out
    assert out.count(why) == 2, "also where the weights are estimated"
    assert "(15 GiB, estimated)" in out
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B | change | {"layer_types": ["full_attention"] * 32}))
    assert "is not known" not in plan(capsys, tmp_path)[1]
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    assert "is not known" not in plan(capsys, tmp_path)[1]


SPARSE = TINY | {"num_hidden_layers": 6, "num_experts": 8, "num_experts_per_tok": 2}
IN_TURN: dict[str, int] = {
    "expert_layer_period": 3,
    "expert_layer_offset": 1,
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    "mamba_dt_rank": 4,
}


@pytest.mark.parametrize(
    "made",
    [
        JambaConfig(**SPARSE, **IN_TURN),
        Qwen2MoeConfig(**SPARSE, moe_intermediate_size=32, decoder_sparse_step=2, mlp_only_layers=[3]),
        DeepseekV3Config(num_hidden_layers=6, first_k_dense_replace=4, q_lora_rank=16, **MLA),
        MixtralConfig(**SPARSE, num_local_experts=8, tie_word_embeddings=True),
        GPT2Config(n_embd=64, n_layer=3, n_head=4, vocab_size=50, n_positions=8),
    ],
    ids=lambda x: x.model_type,
)
def test_weights_are_counted_in_the_model(made: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made.save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_config(made)
    found = count_weights(made.to_dict())
    assert found.parameters == sum(x.numel() for x in model.parameters())
    routed = sum(x.numel() for name, x in model.named_parameters() if ".experts." in name)
    tables = {id(x.weight): x.weight.numel() for x in model.modules() if isinstance(x, torch.nn.Embedding)}
    output = model.get_output_embeddings().weight
    idle = sum(n for key, n in tables.items() if key != id(output))
    experts = getattr(made, "num_local_experts", 0) or getattr(made, "num_experts", 0)
    assert found.embedding == idle
    assert found.active == found.parameters - idle - (routed * (experts - 2) // experts if routed else 0)
    assert found.words == sum((tables | {id(output): output.numel()}).values())
    told = planned(capsys, tmp_path, "--context", "64")
    assert (told["weights"], told["size"]["parameters"]) == ("counted", found.parameters)
    assert (told["size"]["active"], told["size"]["embedding"]) == (found.active, found.embedding)


@pytest.mark.parametrize(
    "made",
    [
        JambaConfig(**SPARSE, **IN_TURN),
        Qwen2MoeConfig(
            **SPARSE,
            moe_intermediate_size=32,
            shared_expert_intermediate_size=8,
            decoder_sparse_step=2,
            mlp_only_layers=[3],
        ),
        DeepseekV3Config(num_hidden_layers=6, first_k_dense_replace=4, q_lora_rank=16, **MLA),
    ],
    ids=lambda x: x.model_type,
)
def test_an_estimate_knows_which_layers_have_experts(made: Any) -> None:
    config, _ = completed_config(made.to_dict())
    estimated, counted = model_size(config), model_size(config, count_weights(made.to_dict()))
    assert estimated.parameters == pytest.approx(counted.parameters, rel=0.1)
    assert estimated.active == pytest.approx(counted.active, rel=0.2)


def test_a_host_expands_latents_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    DeepseekV3Config(num_hidden_layers=4, max_position_embeddings=2**20).save_pretrained(tmp_path)
    steps = [
        planned(capsys, tmp_path, "--device", "cpu", "--context", x)["outlook_per_device"]["speeds"][0]["seconds"]
        for x in ("1k", "64k")
    ]
    products = 4 * 63 * 1024 * 2 * 512 * 128 * 256 / (0.6 * MACHINES["cpu"].flops)
    assert products < steps[1] - steps[0] < 2 * products


@pytest.mark.parametrize("budget", [[], ["--device-budget", "auto"], ["--device-budget", "8GiB"]], ids=" ".join)
def test_the_longest_context_leaves_room_for_a_dense_layer(
    budget: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = DeepseekV3Config(num_hidden_layers=4, max_position_embeddings=2**30)
    made.save_pretrained(tmp_path)
    args = (tmp_path, "--device", "h200", "--batch", 4, "--host-budget", "64GiB", *budget)
    most = planned(capsys, *args, "--context", "64k")["longest_context"]
    assert plan(capsys, *args, "--context", most)[0] == 0
    assert plan(capsys, *args, "--context", most + 128)[0] == 2


@pytest.mark.parametrize("budget", [[], ["--device-budget", "70%"], ["--device-budget", "8GiB"]], ids=" ".join)
def test_the_longest_context_has_full_windows(
    budget: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Gemma3TextConfig(num_hidden_layers=12, sliding_window=4096, max_position_embeddings=2**30).save_pretrained(tmp_path)
    args = (tmp_path, "--batch", 8, "--host-budget", "1GiB", *budget)
    most = planned(capsys, *args, "--context", 64)["longest_context"]
    assert plan(capsys, *args, "--context", most)[0] == 0
    assert plan(capsys, *args, "--context", most + 64)[0] == 2


def test_the_longest_context_leaves_the_slot_that_blocks_move_through(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = (config, "--device-budget", "8GiB", "--host-budget", "8GiB", "--context")
    most = planned(capsys, *args, "32k")["longest_context"]
    assert most == 128 * 1024 - 64
    assert f"at most {most:,} tokens do" in plan(capsys, *args, "1000k")[2]
    assert plan(capsys, *args, most)[0] == 0
    assert plan(capsys, *args, most + 64)[0] == 2


def test_latents_that_are_not_fetched_ahead_pass_the_link_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    DeepseekV3Config(num_hidden_layers=4, max_position_embeddings=2**20).save_pretrained(tmp_path)
    args = ("--device", "h200", "--batch", 4, "--context", "128k", "--device-budget", "128MiB")
    found = planned(capsys, tmp_path, *args)["outlook_per_device"]
    (speed,) = found["speeds"]
    assert (speed["name"], speed["host_bytes"]) == ("all-fetch", 0)
    assert speed["fetched_bytes"] > 0.9 * found["host_kv"]
    assert speed["seconds"] >= speed["fetched_bytes"] / (0.85 * MACHINES["h200"].link)


def test_a_model_that_cannot_be_built_is_estimated_and_it_is_said(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = plan(capsys, config)[1]
    assert "8.03 billion weights (15 GiB, counted)" in counted
    assert "estimated from" not in counted
    monkeypatch.setattr(weights, "MOST_LAYERS", 31)
    out = plan(capsys, config)[1]
    assert "8.03 billion weights (15 GiB, estimated)" in out
    assert "The weights are estimated from the config's sizes: it has more than 31 layers." in out


def test_counting_leaves_nothing_behind(capsys: pytest.CaptureFixture[str]) -> None:
    logging.set_verbosity_warning()
    before = torch.get_default_dtype(), torch.empty(0).device, logging.WARNING
    count_weights(LLAMA_70B)
    assert (torch.get_default_dtype(), torch.empty(0).device, logging.get_verbosity()) == before
    assert capsys.readouterr() == ("", "")


def test_latents_are_expanded_in_each_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = DeepseekV3Config(max_position_embeddings=2**20)  # 671 billion weights
    made.save_pretrained(tmp_path)
    args = (tmp_path, "--device", "h200", "--devices", 16)
    short, long = (planned(capsys, *args, "--context", x) for x in ("1k", "128k"))
    where, past = MACHINES["h200"], 61 * (128 - 1) * 1024
    heads, rank, nope, rope, values = 128, 512, 128, 64, 128
    products = 2 * rank * heads * (nope + values) / 16 / (0.6 * where.flops)
    made_and_read = heads * (nope + values) + heads * (nope + rope)  # by `kv_b_proj`, and put together
    moved = 2 * 2 * (made_and_read / 16 + rank + rope) + 2 * (rank + rope)  # written and read; the latents as they are
    seconds = [x["outlook_per_device"]["speeds"][0]["seconds"] for x in (short, long)]
    expected = past * (products + moved / (0.8 * where.device_memory))
    assert seconds[1] - seconds[0] == pytest.approx(expected, rel=0.01)
    assert seconds[1] > 0.05, "ten times as long as to read the weights"
    taken = short["demand_per_device"]["device_bytes"] - long["demand_per_device"]["device_bytes"]
    assert taken == 127 * 1024 * 2 * (made_and_read // 16 + rank + rope)
    assert "a layer, dense" in plan(capsys, *args, "--context", "128k")[1]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_hidden_layers": None}, "no num_hidden_layers"),
        ({"is_encoder_decoder": True}, "encoder-decoder"),
        ({"hidden_size": "wide"}, "hidden_size is 'wide'"),
        ({"num_key_value_heads": 5}, "no multiple of 5"),
        ({"num_key_value_heads": 0}, "no multiple of 0"),
        ({"layer_types": ["dummy"] * 32}, "nothing to plan"),
    ],
)
def test_a_config_without_sizes_is_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        model_size(LLAMA_8B | change)


def test_latents_without_positions_are_latents() -> None:
    size = model_size(LLAMA_8B | MLA | {"qk_rope_head_dim": 0, "head_dim": 0})
    assert (size.latent, size.kv_bytes, size.expanded) == (32, 32 * 2, 4 * (2 * 16 + 16))


def test_what_fits_is_on_the_device_and_what_does_not_is_slower(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = (config, "--batch", 4, "--device-budget", "8GiB")
    small, large = (planned(capsys, *args, "--context", x)["outlook_per_device"] for x in ("4k", "32k"))
    assert small["host_kv"] == 0
    assert [x["name"] for x in small["speeds"]] == ["all on the device"]
    assert large["kv_bytes"] == 4 * 32768 * 32 * 4096
    assert large["device_kv"] + large["host_kv"] == large["kv_bytes"]
    speeds = {x["name"]: x["seconds"] for x in large["speeds"]}
    assert speeds["adaptive"] <= 1.02 * min(speeds.values())
    assert speeds["adaptive"] > small["speeds"][0]["seconds"]
    assert all(times >= 0.99 for _, times in large["changes"]), "more of something makes it slower"


def test_a_dense_model_reads_the_same_weights_for_one_token_as_for_some() -> None:
    profile = HardwareProfile.estimate("h100", model_size(LLAMA_8B))
    assert profile.linear is not None
    assert profile.linear.seconds(1) == profile.linear.seconds(8)


def test_latents_are_whole_on_each_device_and_no_host_attends_to_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    latent = LLAMA_8B | MLA | {"n_routed_experts": 0, "num_attention_heads": 32, "num_key_value_heads": 32}
    size = model_size(latent)
    assert divided(size, 4).kv_bytes == size.kv_bytes == 2 * (32 + 8)
    (tmp_path / "config.json").write_text(json.dumps(latent))
    found = planned(capsys, tmp_path, "--device-budget", "128MiB", "--context", "128k")["outlook_per_device"]
    assert [(x["name"], x["host_bytes"]) for x in found["speeds"]] == [("all-fetch", 0)]


def test_what_is_advised_is_taken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wide = LLAMA_70B | {"num_attention_heads": 60, "num_key_value_heads": 12, "hidden_size": 7680, "head_dim": 128}
    for name, machine, config in (
        ("70B", "h100", LLAMA_70B),
        ("twelve heads", "rtx4090", wide),
        ("one head", "rtx4090", LLAMA_8B | {"num_key_value_heads": 1, "num_hidden_layers": 80}),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config))
        status, _, err = plan(capsys, tmp_path, "--device", machine, "--context", "4k")
        assert status == 2, name
        advised = re.search(r"With --devices (\d+) there is", err)
        if advised is None:
            assert name == "one head"
            assert "smaller weights" in err
            continue
        status, _, err = plan(capsys, tmp_path, "--device", machine, "--context", "4k", "--devices", advised[1])
        assert status == 0, (name, err)


WINDOWS = LLAMA_8B | {"model_type": "gemma3_text", "sliding_window": 1024, "sliding_window_pattern": 8, "head_dim": 128}
RECURRENT = LLAMA_8B | {
    "model_type": "qwen3_next",
    "layer_types": ["linear_attention", "full_attention"] * 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}


@pytest.mark.parametrize("content", [WINDOWS, RECURRENT], ids=["windows", "states"])
def test_windows_and_states_of_all_sequences_take_their_part_of_the_device(
    content: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(content))
    few, many = (planned(capsys, tmp_path, "--batch", n, "--context", "32k") for n in (1, 33))
    each = {"windows": 28 * 1024 * 4096, "states": 16 * (4 * 32 * 128 * 128 + 2 * 4 * 8192)}[
        "windows" if content is WINDOWS else "states"
    ]
    taken = few["demand_per_device"]["device_bytes"] - many["demand_per_device"]["device_bytes"]
    assert taken == 32 * each
    assert "windows, states" in plan(capsys, tmp_path, "--context", "32k")[1]
    status, _, err = plan(capsys, tmp_path, "--batch", 6000, "--context", "32k", "--device-budget", "8GiB")
    assert status == 2
    assert "windows and states" in err


#: Models with windows or states, by their types, for a Transformers may not know all of them.
BOUNDED: dict[str, dict[str, Any]] = {
    "gemma3_text": {"num_hidden_layers": 8, "sliding_window": 16, "head_dim": 32},
    "gemma4_text": {"num_hidden_layers": 6, "sliding_window": 16, "head_dim": 32, "global_head_dim": 128}
    | {"num_global_key_value_heads": 1, "attention_k_eq_v": True, "vocab_size_per_layer_input": 50},
    "qwen3_next": {"num_hidden_layers": 8, "head_dim": 32, "num_experts": 4, "num_experts_per_tok": 2},
    "lfm2": {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"], "conv_L_cache": 5},
    "kimi_linear": MLA
    | {
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "linear_num_heads": 2,
        "linear_head_dim": 24,
        "pad_token_id": 0,
    },
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", BOUNDED)
def test_windows_and_states_are_those_of_the_model(kind: str, dtype: str) -> None:
    if kind not in CONFIG_MAPPING:
        pytest.skip("this version of Transformers does not know it")
    config = AutoConfig.for_model(kind, **(TINY | BOUNDED[kind]))
    size = model_size(completed_config(config.to_dict() | {"dtype": dtype})[0])
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    cached = model(torch.ones(1, 40, dtype=torch.long), use_cache=True).past_key_values.layers
    full = [x for x in cached if type(x) is DynamicLayer]
    held = sum(x.numel() * x.element_size() for layer in cached if layer not in full for x in tensors_of(layer))
    assert len(full) == size.layers
    if not size.latent:  # which `DynamicCache` has as keys and values
        assert 40 * size.layers * size.kv_bytes == sum(x.keys.nbytes + x.values.nbytes for x in full)
    assert size.bounded_bytes(40) == pytest.approx(held, rel=0.1)  # a window keeps one token less


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("dim", [None, 24])
def test_the_states_of_minimax_are_those_of_its_own_cache(dtype: str, dim: int | None) -> None:
    options = {"num_hidden_layers": 4, "head_dim": dim, "num_local_experts": 2, "block_size": 16}
    config = AutoConfig.for_model("minimax", **(TINY | options))
    size = model_size(completed_config(config.to_dict() | {"dtype": dtype})[0])
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    states = model(torch.ones(1, 40, dtype=torch.long), use_cache=True).past_key_values.linear_cache
    held = [x.numel() * x.element_size() for x in states if isinstance(x, torch.Tensor)]
    assert (size.recurrent, size.state_bytes) == (2, sum(held))


@pytest.mark.parametrize(
    ("content", "layers"),
    [
        ({"model_type": "nemotron_h", "num_hidden_layers": 4, "hybrid_override_pattern": "M*-*"}, 2),
        ({"model_type": "xglm", "num_layers": 3}, 3),
        ({"model_type": "kosmos-2", "text_config": {"layers": 3}}, 3),
    ],
    ids=lambda x: x["model_type"] if isinstance(x, dict) else "",
)
def test_sizes_have_whatever_names_their_model_type_gives_them(content: dict[str, Any], layers: int) -> None:
    assert model_size(completed_config(content)[0]).layers == layers


@pytest.mark.parametrize("kind", ["mamba", "falcon_mamba"])
def test_a_model_without_attention_needs_no_heads(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"num_hidden_layers": 3, "hidden_size": 64, "state_size": 8, "vocab_size": 50}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, "dtype": "float32", **sizes}))
    status, out, _ = plan(capsys, tmp_path)
    assert (status, "0 layers with full attention, 3 with a recurrent state\n" in out) == (0, True)
    assert "KV head" not in out
    assert planned(capsys, tmp_path)["size"]["state_bytes"] == 3 * 128 * (8 + 4) * 4
    status, _, err = plan(capsys, tmp_path, "--devices", "2")
    assert (status, "has no KV heads" in err) == (2, True)
    for huge in (["--context", "9" * 400], ["--batch", "9" * 400]):
        status, _, err = plan(capsys, tmp_path, *huge)
        assert (status, "are at most" in err) == (2, True), err


def tensors_of(layer: Any) -> list[torch.Tensor]:
    """Of a layer of Transformers' cache, with those in its lists and mappings."""
    found: list[torch.Tensor] = []
    for x in vars(layer).values():
        each = list(x.values()) if isinstance(x, dict) else x if isinstance(x, (list, tuple)) else [x]
        found += [y for y in each if isinstance(y, torch.Tensor) and y.is_floating_point()]
    return found


@pytest.mark.parametrize(
    ("quantised", "bits"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 8),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, 4),
        ({"quant_method": "gptq", "bits": 3}, 3),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 4),
        ({"quant_method": "mxfp4"}, 4),
        ({"quant_method": "quanto", "weights": "int8"}, 8),
        ({"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": {"num_bits": 8}}}}, 8),
    ],
    ids=lambda x: x["quant_method"] if isinstance(x, dict) else "",
)
def test_quantised_weights_take_what_they_take(quantised: dict[str, Any], bits: int, tmp_path: Path) -> None:
    whole, words = model_size(LLAMA_8B), 2 * 128256 * 4096
    for content in (LLAMA_8B, {"model_type": "gemma3", "text_config": LLAMA_8B}):
        size = model_size(content | {"quantization_config": quantised})
        assert size.weight_bytes == pytest.approx((whole.parameters - words) * bits / 8 + 2 * words, rel=1e-6)
        assert size.kv_bytes == whole.kv_bytes
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B | {"quantization_config": quantised}))
    assert model_size(read_config(str(tmp_path))).weight_bytes == size.weight_bytes
    slow, fast = (HardwareProfile.estimate("h100", x).linear for x in (whole, size))
    assert slow is not None
    assert fast is not None
    assert fast.seconds(1) < slow.seconds(1)


def test_weights_of_an_unknown_number_of_bits_are_refused() -> None:
    with pytest.raises(ConfigError, match='add "bits"'):
        model_size(LLAMA_8B | {"quantization_config": {"quant_method": "of next year"}})


def test_more_budget_gives_what_was_said_of_it() -> None:
    size = model_size(LLAMA_8B)
    profile = HardwareProfile.estimate("h100", size)
    demand = Demand(16384, 4, 4 * 2**30, 64 * 2**30)
    now = foresee(size, profile, demand)
    what, times = now.changes[0]
    assert what == "1 GiB more device budget"
    then = foresee(size, profile, Demand(16384, 4, 5 * 2**30, 64 * 2**30))
    assert then.speeds[0].tokens == pytest.approx(times * now.speeds[0].tokens)


@pytest.mark.parametrize(("batch", "context", "budget"), [(4, 131072, 60), (1, 131072, 12), (1, 32768, 3.7)])
def test_a_plan_is_bound_by_compute_where_it_is_as_fast_as_with_all_on_the_device(
    batch: int, context: int, budget: float
) -> None:
    size = model_size(LLAMA_8B)
    profile = HardwareProfile.estimate("h100", size)
    (resident,) = foresee(size, profile, Demand(context, batch, 2**40, 2**38)).speeds
    found = foresee(size, profile, Demand(context, batch, int(budget * 2**30), 2**38), changes=False)
    for x in found.speeds:
        assert (x.binding == "compute") == (x.seconds <= 1.05 * resident.seconds), x.name
        assert x.binding != "host" or x.host_bytes
        assert x.binding != "link" or x.fetched_bytes


def test_budgets_that_a_cache_refuses_are_refused() -> None:
    size = model_size(LLAMA_8B)
    profile = HardwareProfile.estimate("h100", size)
    slot = 64 * size.kv_bytes
    least, whole = 2 * size.layers * slot + 2 * slot, 2 * size.layers * 16 * slot  # two sequences of 1,000 tokens
    rest = whole - least + slot  # all of the device holds blocks, but for the slot that they pass through
    assert foresee(size, profile, Demand(1000, 2, least, rest)).host_kv == whole - least
    with pytest.raises(ConfigError, match=r"needs? at least 16\.5 MiB of the device"):
        foresee(size, profile, Demand(1000, 2, least - 1, 2**40))
    with pytest.raises(ConfigError, match=r"needs? at least .* of the host"):
        foresee(size, profile, Demand(1000, 2, least, rest - 1))


def test_a_divided_model_has_its_part_of_everything() -> None:
    size = model_size(LLAMA_70B)
    part = divided(size, 4)
    assert 4 * part.kv_bytes == size.kv_bytes
    assert part.parameters == size.parameters // 4
    with pytest.raises(ConfigError, match="8 KV heads"):
        divided(size, 3)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--context", "100m"], "do not fit"),
        (["--context", "0"], "number of tokens"),
        (["--context", "128kb"], "number of tokens"),
        (["--batch", "-1"], "not a positive number"),
        (["--device", "tpu"], "No machine 'tpu'"),
        (["--devices", "3"], "cannot be divided"),
        (["--device-budget", "much"], "'much' is not a size"),
        (["--device-budget", "-1GiB"], "'-1GiB' is not a size"),
        (["--device-budget", "-1"], "'-1' is not a size"),
        (["--device-budget", "1"], "and its budget is 1 byte"),
        (["--device-budget", "150%"], "not a share in (0, 1]"),
        (["--device-budget", "1.0", "--device", "l40s", "--batch", "99", "--context", "1m"], "do not fit"),
        (["--host-budget", "auto"], "not a positive number of bytes"),
        (["--device", "cpu", "--host-budget", "1KiB"], "do not fit 1 KiB on the host: not even a block"),
        (["--context", "100m", "--batch", "2"], "tokens of each do."),
        (["--profile", "missing.json"], "missing.json"),
        (["--profile", __file__], "no hardware profile"),
        (["--profile", "any.json", "--devices", "2"], "one device"),
        (["--device", "cpu", "--device-budget", "8GiB"], "leave --device-budget away"),
        (["--device-budget", "500GiB"], "more than the 74.5 GiB of each device"),
        (["--devices", "8", "--batch", "8", "--context", "1m"], "Of each of 8 devices"),
        (["--plot", "plan.nothing"], "plan.nothing"),
        (["--plot", "no/folder/plan.png"], "there is no folder 'no/folder'"),
        (["--plot", "."], "what kind of picture"),
    ],
)
def test_an_impossible_demand_ends_in_a_sentence(
    args: list[str], said: str, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = plan(capsys, config, *args)
    assert status == 2
    assert said in err
    assert out == "", "nothing is shown before it is refused"


def test_a_device_budget_is_written_as_anywhere(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def budget(*args: str) -> int:
        return int(planned(capsys, config, "--device", "h100", *args)["demand_per_device"]["device_bytes"])

    model = model_size(LLAMA_8B, count_weights(LLAMA_8B))
    free = MACHINES["h100"].device_bytes - model.weight_bytes
    assert budget("--device-budget", "50%") == budget("--device-budget", "0.5") == free // 2
    assert budget("--device-budget", "auto") == budget() == free - MACHINES["h100"].device_bytes // 10
    assert budget("--device-budget", "1_000_000_000") == 10**9


def test_a_profile_has_nothing_to_take_a_share_of(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "profile.json"
    path.write_text(HardwareProfile.estimate("a100", model_size(LLAMA_8B)).to_json())
    for size in ("50%", "auto"):
        status, _, err = plan(capsys, config, "--profile", path, "--device-budget", size)
        assert (status, "give --device-budget in bytes" in err) == (2, True)


def test_memory_that_a_device_does_not_have_is_hypothetical(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = (config, "--device", "h100", "--batch", 32, "--context", "64k")
    assert "more device budget" in plan(capsys, *args)[1]
    assert re.search(r"more device budget .*hypothetical: the device has 0 bytes left", plan(capsys, *args)[1])
    out = plan(capsys, *args, "--device-budget", "16GiB")[1]
    assert "4 GiB more device budget" in out
    assert "hypothetical" not in out
    left = planned(capsys, *args, "--device-budget", "50GiB")["unused_per_device"]
    assert 0 < left < 12.5 * 2**30
    assert "hypothetical" in plan(capsys, *args, "--device-budget", "50GiB")[1]


def test_all_fetch_says_where_it_cannot_fetch_all(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = (config, "--device", "h100", "--batch", 4, "--context", "128k", "--device-budget")
    for budget, all_of_it in (("32GiB", True), ("2GiB", False)):
        (found,) = (
            x for x in planned(capsys, *args, budget)["outlook_per_device"]["speeds"] if x["name"] == "all-fetch"
        )
        assert (found["host_bytes"] == 0) == all_of_it
        assert ("has no room to fetch all of a layer in time" in plan(capsys, *args, budget)[1]) != all_of_it


def test_a_reader_that_leaves_ends_a_command_silently(config: Path) -> None:
    command = [sys.executable, "-m", "kvtier", "plan", str(config)]
    env = {name: x for name, x in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT, env=env) as run:
        assert run.stdout is not None
        assert run.stderr is not None
        run.stdout.close()  # as `head` does
        assert run.stderr.read() == b""
    assert run.returncode == 141


def test_an_unknown_name_without_a_network_is_told_at_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def unreachable(*args: Any, **options: Any) -> None:
        raise OSError("no route")

    def config_of(name: str, **options: Any) -> Any:
        asked.append(options)
        raise OSError(f"{name} is not in the cache")

    monkeypatch.setattr(model_config.HfApi, "model_info", unreachable)
    monkeypatch.setattr(model_config.PretrainedConfig, "get_config_dict", config_of)
    status, _, err = plan(capsys, "org/unknown")
    assert (status, "'org/unknown'" in err, "org/unknown is not in the cache" in err) == (2, True, True)
    assert asked == [{"local_files_only": True}], "a file that is asked for is asked for again and again"
    monkeypatch.setattr(model_config.HfApi, "model_info", lambda *args, **options: None)
    plan(capsys, "org/unknown")
    assert asked[-1] == {"local_files_only": False}


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--plot", ""], "what kind of picture"),
        (["--plot", "plan"], "what kind of picture"),
        (["--profile", ""], "this is a folder"),
    ],
)
def test_an_option_without_a_name_is_not_left_out(
    args: list[str], said: str, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, _, err = plan(capsys, config, *args)
    assert (status, said in err) == (2, True)


@pytest.mark.parametrize("text", [False, True])
def test_more_layers_than_any_model_has_are_refused_at_once(
    text: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = LLAMA_8B | {"num_hidden_layers": 10**9}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llava", "text_config": sizes} if text else sizes))
    status, _, err = plan(capsys, tmp_path)
    assert (status, "num_hidden_layers is larger than" in err) == (2, True)


def test_devices_together_copy_no_faster_than_their_host_reads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_70B | {"num_hidden_layers": 20}))
    for devices in (2, 8):
        args = ("--devices", devices, "--device-budget", "256MiB", "--context", "64k")
        outlook = planned(capsys, tmp_path, *args)["outlook_per_device"]
        (fetching,) = (x for x in outlook["speeds"] if x["name"] == "all-fetch")
        assert devices * fetching["fetched_bytes"] / fetching["seconds"] <= MACHINES["h100"].host_memory


@pytest.mark.parametrize("command", [["plan", "--device-budget", "1GiB", "--profile"], ["replay"]])
def test_a_file_of_other_bytes_ends_in_a_sentence(
    command: list[str], config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bytes"
    path.write_bytes(bytes(range(255, 0, -1)))
    command = [command[0], str(config), *command[1:]] if command[0] == "plan" else command
    assert main([*command, str(path)]) == 2
    assert "kvtier: " in capsys.readouterr().err


def test_with_whatever_device_budget_there_is_a_plan_or_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B | {"num_hidden_layers": 1}))
    block = 64 * 4096
    for blocks in range(3):
        status, _, err = plan(capsys, tmp_path, "--context", "32k", "--device-budget", blocks * block + 1)
        assert status == 2
        assert "1 sequence of 32,768 tokens needs at least 768 KiB of the device" in err
    for blocks in range(3, 8):
        found = planned(capsys, tmp_path, "--context", "32k", "--device-budget", blocks * block + 1)
        assert found["outlook_per_device"]["speeds"][0]["seconds"] > 0


def test_the_machine_that_is_assumed_is_said_and_how_to_name_another(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, _ = plan(capsys, config)
    assert (status, "so an h100 is assumed" in out, "--device takes h200" in out) == (0, True, True)
    named = plan(capsys, config, "--device", "h100")[1]
    assert "assumed" not in named
    assert [x for x in out.splitlines() if "assumed" not in x] == named.splitlines()


def test_a_plan_stays_within_the_models_positions_unless_it_is_asked_to_go_beyond(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B | {"max_position_embeddings": 8192}))
    found = planned(capsys, tmp_path)
    assert (found["demand_per_device"]["context"], found["positions"]) == (8192, 8192)
    out = plan(capsys, tmp_path)[1]
    assert "longest context        8,192   tokens of 1 sequence, all positions of the model; there is room for" in out
    assert "Note" not in out
    beyond = plan(capsys, tmp_path, "--context", "16k", "--batch", "2")[1]
    assert "KV of 2 sequences of 16,384 tokens: 4 GiB" in beyond
    assert "Note: 16,384 tokens fit, but the model has only 8,192 positions" in beyond
    for stretched in ({"rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 8192}}, {}):
        of_text = {"model_type": "llava", "text_config": LLAMA_8B | {"max_position_embeddings": 8192} | stretched}
        (tmp_path / "config.json").write_text(json.dumps(of_text))
        assert planned(capsys, tmp_path)["positions"] == (32768 if stretched else 8192)


def test_what_a_config_does_not_say_is_no_limit(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert planned(capsys, config)["demand_per_device"]["context"] == 32768
    assert "positions" not in plan(capsys, config)[1]


@pytest.mark.parametrize(
    ("weights", "said"),
    [
        (1_026_000_000_000, "1,026 billion"),
        (8_030_000_000, "8.03 billion"),
        (999_885_952, "1 billion"),
        (999_400_000, "999 million"),
        (3_540_000, "3.54 million"),
        (999, "999"),
    ],
)
def test_weights_are_counted_in_words(weights: int, said: str) -> None:
    assert millions(weights) == said


@pytest.mark.parametrize("name", ["./nope", "a/b/c", "~/nope", "nope.json"])
def test_what_is_not_there_is_named_as_it_was_written(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", name]) == 2
    assert capsys.readouterr().err.startswith(f"kvtier: There is no {name}: give")


def test_a_folder_without_a_config_is_not_taken_for_a_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(capsys, tmp_path)[2].startswith(f"kvtier: There is no config.json in {tmp_path}: ")


def test_no_option_of_calibrate_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate", "--block-size", "0"]) == 2
    assert "block_size=0" in capsys.readouterr().err


def test_weights_that_do_not_fit_say_how_many_devices_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_70B))
    status, _, err = plan(capsys, tmp_path, "--device", "h100")
    assert status == 2
    assert "With --devices 2 there is." in err
    status, out, err = plan(capsys, tmp_path, "--device", "h100", "--devices", "2", "--context", "4k")
    assert status == 0, err
    assert "all on the device" in out


@pytest.mark.parametrize("content", ["", "[]", "{", '{"model_type": "clip"}', "[" * 100_000])
def test_a_file_that_is_no_config_is_refused(content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(content)
    assert plan(capsys, tmp_path)[0] == 2
    assert plan(capsys, tmp_path / "missing" / "config.json")[0] == 2


def test_a_machine_without_a_device_attends_on_the_host(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = plan(capsys, config, "--device", "cpu")
    assert status == 0, err
    assert "all on the host" in out


def test_a_plan_of_a_cpu_says_what_float32_takes(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = "take float32, with 2 x the KV"
    assert said in plan(capsys, config, "--device", "cpu")[1]
    assert said not in plan(capsys, config, "--device", "h100")[1]
    (tmp_path / "whole").mkdir()
    (tmp_path / "whole" / "config.json").write_text(json.dumps(json.loads(config.read_text()) | {"dtype": "float32"}))
    assert "float32, with" not in plan(capsys, tmp_path / "whole", "--device", "cpu")[1]


def test_times_are_written_without_powers_of_ten() -> None:
    times = {
        0.000298: "0.298 ms",
        0.0264: "26.4 ms",
        0.328: "0.328 s",
        43.61: "43.6 s",
        999.4: "999 s",
        2106.6: "2,107 s",
    }
    assert {seconds: report._time(seconds) for seconds in times} == times


def test_speeds_are_written_without_powers_of_ten(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Many short sequences have many tokens per second; a long one has steps of many milliseconds."""
    for options in (("h100", "--context", "1k", "--batch", 256), ("cpu", "--context", "32m", "--host-budget", "8TiB")):
        args = (config, "--device", *options)
        first = planned(capsys, *args)["outlook_per_device"]["speeds"][0]
        assert max(1e3 * first["seconds"], first["tokens"]) > 10_000
        said, *_ = (x.split() for x in plan(capsys, *args)[1].splitlines() if x.startswith(first["name"] + " "))
        figures = [float(x.replace(",", "")) for x in said[len(first["name"].split()) :][:2]]
        assert figures == pytest.approx([1e3 * first["seconds"], first["tokens"]], rel=1e-3)
        assert not any("e+" in x for x in said)


def test_a_profile_of_a_machine_without_a_device_needs_no_budget_of_one(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "profile.json"
    profile = replace(HardwareProfile.estimate("cpu", model_size(LLAMA_8B)), name=launch.machine(torch.device("cpu")))
    path.write_text(profile.to_json())
    status, out, err = plan(capsys, config, "--profile", path)
    assert (status, "all on the host" in out) == (0, True), err
    status, _, err = plan(capsys, config, "--profile", path, "--device-budget", "8GiB")
    assert (status, "leave --device-budget away" in err) == (2, True)


def test_what_would_change_a_plan_of_some_devices_is_of_each(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_70B | {"num_hidden_layers": 20}))
    args = ("--context", "128k", "--device-budget", "1GiB", "--devices")
    for devices in (4, 8):
        out = plan(capsys, tmp_path, *args, devices)[1]
        assert "with, for each device\n  256 MiB more device budget" in out


def test_a_measured_profile_is_told_from_estimates(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    size = model_size(LLAMA_8B)
    profile = HardwareProfile.estimate("a100", size)
    assert profile.linear is not None
    path = tmp_path / "profile.json"
    path.write_text(profile.with_part("linear", profile.linear).to_json())
    status, _, err = plan(capsys, config, "--profile", path)
    assert status == 2
    assert "--device-budget" in err
    status, out, err = plan(capsys, config, "--profile", path, "--device-budget", "2GiB", "--context", "32k")
    assert status == 0, err
    assert "measured: linear" in out


def test_a_profile_of_another_model_is_refused(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profile = HardwareProfile.estimate("a100", model_size(LLAMA_8B))
    path = tmp_path / "profile.json"
    its_own = measured.model_name(LlamaConfig(**LLAMA_8B))
    for model, status in (
        (its_own, 0),
        (its_own.replace("bfloat16", "float16"), 0),
        (its_own.replace("hidden_layers 32", "hidden_layers 16"), 2),
        (its_own.replace("model llama", "model qwen3"), 2),
    ):
        path.write_text(replace(profile, model=model).to_json())
        found, _, err = plan(capsys, config, "--profile", path, "--device-budget", "2GiB", "--context", "32k")
        assert found == status, err
        if status:
            assert "another model" in err
            assert "16, not 32" in err or "qwen3, not llama" in err


def test_a_file_that_is_no_profile_is_refused(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "profile.json"
    for content in (b"", b"\xff\xfe\x00", b"{}"):
        path.write_bytes(content)
        status, _, err = plan(capsys, config, "--profile", path, "--device-budget", "2GiB")
        assert (status, "no hardware profile" in err, str(path) in err) == (2, True, True)


def test_a_picture_of_no_kind_is_refused_before_the_plan(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    status, out, err = plan(capsys, config, "--plot", "plan.nothing")
    assert (status, out, "no kind of picture '.nothing', but" in err) == (2, "", True)


def test_the_picture_is_drawn(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "plan.png"
    status, out, err = plan(capsys, config, "--context", "8k", "--device-budget", "512MiB", "--plot", path)
    assert status == 0, err
    assert path.read_bytes().startswith(b"\x89PNG")
    assert str(path) in out


ENDLESS = {"factor": math.inf, "original_max_position_embeddings": 64}
NO_EXPERTS = MLA | {"n_routed_experts": 0}


@pytest.mark.parametrize(
    ("change", "options"),
    [
        ({"quantization_config": 7}, []),
        ({"dtype": ["bfloat16"]}, []),
        ({"model_type": ["llama"]}, []),
        ({"text_config": "llama"}, []),
        ({"max_position_embeddings": 64, "rope_scaling": ENDLESS}, []),
        ({"model_type": "deepseek_v3", "num_hidden_layers": 1, "first_k_dense_replace": 0} | NO_EXPERTS, []),
        ({}, ["--context", "9" * 400]),
        ({}, ["--batch", "9" * 400]),
    ],
)
def test_nonsense_ends_in_a_sentence_or_a_plan(
    change: dict[str, Any], options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA_8B | change))
    status = main(["plan", str(path), *options])
    assert status in (0, 2)
    assert (status == 2) == capsys.readouterr().err.startswith("kvtier: ")


def test_a_home_of_nobody_is_no_place(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "~no-such-user/config.json"]) == 2
    assert "no-such-user" in capsys.readouterr().err


def stored_file(folder: Path, values: dict[str, Any], machine: str = "NVIDIA H100 80GB HBM3, capability 9.0") -> Path:
    """A file as `kvtier calibrate` stores it."""
    path = folder / "profile-stored.json"
    path.write_text(json.dumps({"machine": machine, "values": values}))
    return path


def test_the_stored_file_of_a_machine_is_a_profile_and_what_it_lacks_is_an_estimate(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    estimate = HardwareProfile.estimate("h100", model_size(LLAMA_8B))
    name = measured.model_name(LlamaConfig(**LLAMA_8B))
    values: dict[str, Any] = {
        measured.LINK: {part: estimate.part_as_json(part) for part in ("up", "down", "together")},
        measured.HOST: {"host": estimate.part_as_json("host")},
        "model other, hidden_layers 2, bfloat16": {"linear": {"value": "damaged", "error": 0.0}},
    }
    budget = ("--device-budget", "8GiB", "--json")
    status, out, err = plan(capsys, config, "--profile", stored_file(tmp_path, values), *budget)
    assert status == 0, err
    found = json.loads(out)
    assert found["profile"]["measured"] == ["down", "host", "together", "up"]
    assert found["profile"]["name"].startswith("NVIDIA H100")
    named = json.loads(plan(capsys, config, "--device", "h100", *budget)[1])
    assert found["outlook_per_device"] == named["outlook_per_device"]
    slower = replace(estimate.linear, tokens=1e-2) if hasattr(estimate.linear, "tokens") else estimate.linear
    assert slower is not None
    values[name] = {"linear": {"value": slower.as_json(), "error": 0.01}}
    special = "host attention, 8 KV heads of 128, bfloat16, blocks of 64, avx512"
    values[special] = {"host": estimate.part_as_json("host") | {"error": 0.123}}
    found = json.loads(plan(capsys, config, "--profile", stored_file(tmp_path, values), *budget)[1])
    assert found["profile"]["model"] == name
    assert "linear" in found["profile"]["measured"]
    assert found["profile"]["parts"]["host"]["error"] == 0.123, "blocks of the model's shape"


def test_of_several_that_fit_a_profile_gives_what_is_closest_and_then_what_is_newest(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVTIER_PROFILE", str(tmp_path / "profiles"))
    machine, estimate = "NVIDIA H100 80GB HBM3, capability 9.0", HardwareProfile.estimate("h100", model_size(LLAMA_8B))
    name = measured.model_name(LlamaConfig(**LLAMA_8B)).removesuffix("bfloat16")
    host = "host attention, 8 KV heads of 128"

    def used(*stored: str) -> tuple[str, float]:
        """What is taken of these names, stored in this order: the model, and the error of the host's part."""
        for error, each in enumerate(stored):
            part = "host" if each.startswith("host") else "linear"
            path = profiles.store(machine, each, {part: estimate.part_as_json(part) | {"error": error / 64}})
        found = planned(capsys, config, "--profile", path, "--device-budget", "8GiB")["profile"]
        path.unlink()
        return found["model"].removeprefix(name), found["parts"]["host"]["error"]

    # Of the same sizes, by dtype: the model's own, one of as many bytes, any.
    for stored, best in (
        (("float32", "bfloat16"), "bfloat16"),
        (("bfloat16", "float32"), "bfloat16"),
        (("float16", "float32"), "float16"),
        (("float16", "float8_e4m3fn"), "float16"),
        (("float8_e4m3fn", "float32"), "float32"),
        (("float32", "float8_e4m3fn"), "float8_e4m3fn"),
    ):
        assert used(f"{host}, float32, blocks of 64, avx2", *(name + x for x in stored))[0] == best
    # Of attention likewise; then by the block that is planned with; then the newest.
    for attention, newest in (
        (("bfloat16, blocks of 64, torch", "float32, blocks of 64, avx512"), 0),
        (("float16, blocks of 16, avx512", "float32, blocks of 64, avx512"), 0),
        (("bfloat16, blocks of 64, avx512", "bfloat16, blocks of 8, avx512"), 0),
        (("bfloat16, blocks of 64, torch", "bfloat16, blocks of 64, avx512"), 1),
        (("bfloat16, blocks of 16, avx512", "bfloat16, blocks of 8, avx2"), 1),
    ):
        assert used(*(f"{host}, {x}" for x in attention))[1] == newest / 64
    # A model of which more sizes are known fits better than one whose config leaves them away.
    vague = name.replace("key_value_heads 8", "key_value_heads None") + "bfloat16"
    assert used(f"{host}, float32, blocks of 64, avx2", vague, name + "float32")[0] == "float32"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"machine": "cpu, x", "values": {}}, "Nothing that is stored of cpu, x can be read"),
        ({"machine": "cpu, x", "values": {"link rates": {"up": 3}}}, "Nothing that is stored"),
        ({"machine": 3, "values": {}}, "names no machine"),
        ({"machine": "cpu, x"}, "has no values"),
    ],
)
def test_a_stored_file_of_nothing_ends_in_a_sentence(
    content: dict[str, Any], said: str, config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "p.json").write_text(json.dumps(content))
    status, _, err = plan(capsys, config, "--profile", tmp_path / "p.json")
    assert (status, said in err) == (2, True), err


def test_a_machine_that_was_not_calibrated_says_so(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVTIER_PROFILE", str(tmp_path / "profiles"))
    status, _, err = plan(capsys, config, "--profile", "this")
    assert (status, "`kvtier calibrate` measures it" in err) == (2, True)
