"""`kvtier bench`: a table or JSON of a simulated engine, and sentences for what cannot be."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from kvtier.cli.bench import simulated
from kvtier.cli.main import main
from kvtier.errors import ConfigError
from kvtier.scheduling.simulation.outcome import Request


def test_a_generated_load_as_a_table_and_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["bench", "--count", "30", "--rate", "50", "--tenants", "2"]
    assert main(options) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(
        "Simulated: llama-3.1-8b on h100 by its datasheet; 30 requests, generated: 50 in a second."
    )
    assert main([*options, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["simulated"] is True
    assert set(found["schedulers"]) == {"fcfs", "fair"}
    assert f"{found['schedulers']['fair']['ttft_p99']:.4g}" in printed


def test_a_figure_that_nothing_has_is_null_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--count", "2", "--output", "1", "--scheduler", "fcfs", "--json"]) == 0

    def refused(name: str) -> None:
        raise AssertionError(f"JSON has no {name}")

    found = json.loads(capsys.readouterr().out, parse_constant=refused)["schedulers"]["fcfs"]
    assert found["tpot_mean"] is None, "no answer has a second token"
    assert found["ttft_mean"] > 0


def test_conversations_are_re_used_by_a_stateful_engine(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["bench", "--turns", "4", "--count", "40", "--scheduler", "fcfs", "--json"]
    reused = []
    for more in ([], ["--stateful"]):
        assert main([*options, *more]) == 0
        reused.append(json.loads(capsys.readouterr().out)["schedulers"]["fcfs"]["reused"])
    assert reused[0] == 0.0 < reused[1]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--azure", "none.csv"], "none.csv: not an Azure LLM inference trace: No such file or directory."),
        (["--mooncake", "none.jsonl"], "none.jsonl: not a Mooncake trace: No such file or directory."),
        (["--azure", __file__], "not an Azure LLM inference trace: 'TIMESTAMP' is missing."),
        (["--azure", "none.csv", "--rate", "8"], "--rate is of a generated load: leave it away with --azure."),
        (["--mooncake", "none.jsonl", "--prompt", "512"], "--prompt is of a generated load"),
        (["--rate-scale", "2"], "--rate-scale is of a trace: leave it away."),
        (["--turns", "3", "--tenants", "2"], "--tenants is of generated requests without --turns"),
        (["--device", "abacus"], "No machine 'abacus' is known"),
        (["--scheduler", "luck"], "scheduler='luck'"),
        (["--device-budget", "1MiB"], "takes more blocks than the 0 of the device"),
        (["--device", "rtx4090"], "16GiB and the weights of llama-3.1-8b, 15 GiB, are more than the 22.4 GiB"),
        (["--count", "5", "--plot", "bench"], "the ending of the name"),
        (["--count", "5", "--plot", "none/bench.png"], "there is no folder 'none'"),
        (["--count", "5", "--plot", ""], "the ending of the name"),
    ],
)
def test_what_cannot_be_is_said(options: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *options]) == 2
    printed = capsys.readouterr()
    assert words in printed.err
    assert printed.out == "", "it is said before anything is simulated"


def test_generated_lengths_have_the_mean_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Request] = []

    def took(requests: list[Request], *_: Any, **__: Any) -> Any:
        seen[:] = requests
        raise ConfigError("enough")

    monkeypatch.setattr(simulated, "simulate", took)
    for prompt, output in ((512, 128), (65536, 128), (512, 65536)):
        assert main(["bench", "--count", "2000", "--prompt", str(prompt), "--output", str(output)]) == 2
        assert sum(x.prompt for x in seen) / 2000 == pytest.approx(prompt, rel=0.1)
        assert sum(x.output for x in seen) / 2000 == pytest.approx(output, rel=0.1)


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        *(
            ("--turns", value, f"{value!r} is no number of 2 or more")
            for value in ("nan", "0", "1.9", "-3", "inf", "x")
        ),
        *(("--rate", value, f"{value!r} is no positive number") for value in ("nan", "0", "-1", "inf", "x")),
    ],
)
def test_numbers_that_no_load_can_have_are_said(
    option: str, value: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["bench", "--count", "5", option, value])
    assert words in capsys.readouterr().err


def test_a_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "bench.png"
    assert main(["bench", "--count", "10", "--plot", str(file)]) == 0
    assert file.read_bytes().startswith(b"\x89PNG")


# Measured

#: A small model that was really trained.
TRAINED = Path(__file__).resolve().parents[2] / "examples" / "pylm"
MEASURE = ["bench", "--measure", str(TRAINED), "--host-budget", "64MiB", "--count", "6"]


def test_an_engine_of_a_model_serves_a_load_for_real(capsys: pytest.CaptureFixture[str]) -> None:
    options, level = [*MEASURE, "--rate", "50", "--prompt", "20", "--output", "4"], logging.getLogger("kvtier").level
    assert main([*options, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["simulated"] is False
    assert (found["device"], found["dtype"], found["runner"]) == ("cpu", "float32", "packed")
    for name in ("fcfs", "fair"):
        figures = found["schedulers"][name]
        assert 0 < figures["ttft_mean"] < figures["seconds"]
        assert figures["rows"] >= 1
    assert main([*options, "--scheduler", "fcfs"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert logging.getLogger("kvtier").level == level, "what a command logs is no business of what comes behind it"
    assert lines[0].startswith(f"Measured: {TRAINED} on cpu, float32, packed; 6 requests, generated: 50 in a second.")
    assert [line.split()[0] for line in lines[3:]] == ["scheduler", "fcfs"]


@pytest.mark.parametrize("stateful", [False, True])
def test_a_trace_whose_prompts_have_beginnings_in_common(
    stateful: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "trace.jsonl"
    row = {"input_length": 1536, "output_length": 64, "hash_ids": [1, 2, 3]}
    file.write_text("".join(json.dumps(row | {"timestamp": time}) + "\n" for time in (0, 400, 800)))
    options = [*MEASURE, "--mooncake", str(file), "--length-scale", "0.0625", "--block-size", "16", "--json"]
    assert main([*options, *(["--stateful"] if stateful else [])]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["load"] == "Mooncake trace at 1 x its rate, lengths x 0.0625"
    for figures in found["schedulers"].values():
        assert figures["reused"] == pytest.approx(2 * 95 / (3 * 96) if stateful else 0)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--model", "llama-3.1-8b"], "--model is of a simulated engine: leave it away with --measure."),
        (["--scheduler", "luck"], "scheduler='luck'"),
        (["--host-budget", "much"], "--host-budget"),
        (["--device", "h100"], "--device h100"),
        (["--dtype", "float3"], "--dtype 'float3'"),
        (["--prompt", "100k"], "A smaller --prompt or --output makes requests shorter."),
        (["--host-budget", "640KiB", "--prompt", "200"], "does not fit"),
        (["--host-budget", "640KiB", "--prompt", "200"], "A smaller --prompt or --output makes requests shorter."),
        (["--rate-scale", "2"], "--rate-scale is of a trace: leave it away."),
    ],
)
def test_what_cannot_be_measured_is_said(options: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*MEASURE, *options]) == 2
    printed = capsys.readouterr()
    assert words in printed.err
    assert printed.out == ""


def test_options_of_a_measured_engine_are_refused_without_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--block-size", "16"]) == 2
    assert "--block-size is of a measured engine: give --measure MODEL, too." in capsys.readouterr().err
    assert main(["bench", "--measure", "no-such-folder/at-all", "--count", "1"]) == 2
    assert "no-such-folder/at-all" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("trace", "length", "scale"),
    [("azure", 9, "1e308"), ("mooncake", 9, "1e306"), ("mooncake", 10**400, "1")],
    ids=["azure", "mooncake", "long"],
)
def test_lengths_that_are_no_numbers_are_said(
    trace: str, length: int, scale: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = {
        "azure": f"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.97,{length},{length}\n",
        "mooncake": f'{{"timestamp": 0, "input_length": {length}, "output_length": 1, "hash_ids": [1]}}\n',
    }
    file = tmp_path / "trace"
    file.write_text(rows[trace])
    assert main(["bench", f"--{trace}", str(file), "--length-scale", scale]) == 2
    assert f"Lengths x {float(scale):g} are more than there are numbers for" in capsys.readouterr().err


def test_lengths_of_a_trace_are_scaled_where_it_is_simulated_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text(json.dumps({"timestamp": 0, "input_length": 1024, "output_length": 64, "hash_ids": [1, 2]}))
    options = ["bench", "--mooncake", str(file), "--json", "--length-scale"]
    assert main([*options, "0.125"]) == 0
    assert json.loads(capsys.readouterr().out)["block_size"] == 64
    assert main([*options, "0.1"]) == 2
    assert "the trace's blocks of 512 tokens would have 51.2" in capsys.readouterr().err
