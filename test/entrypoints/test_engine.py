"""`sgl.Engine` with the plugin installed: with VeriCache (case X3), and stock."""

import json
import subprocess
import sys

import pytest

from sglang_vericache.embedded_model import ensure_embedded_model

pytestmark = pytest.mark.slow

# Each engine has a process of its own: SGLang keeps global state.
PROGRAM = """
import json, sys
import sglang as sgl

if __name__ == "__main__":
    options, requests = json.loads(sys.argv[1])
    engine = sgl.Engine(max_total_tokens=8192, max_running_requests=4, **options)
    answers = []
    for custom_params in requests:
        sampling = {"temperature": 0.0, "max_new_tokens": 12, "custom_params": custom_params}
        try:
            answers.append(engine.generate("The capital of France is" * 40, sampling))
        except ValueError as error:
            answers.append({"error": str(error)})
    print("ANSWERS", json.dumps(answers))
    engine.shutdown()
"""
UNKNOWN = {"vericache": {"enabeld": False}}


def generate(tmp_path, options, requests):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    options = {"model_path": str(ensure_embedded_model())} | options
    command = [sys.executable, str(program), json.dumps([options, requests])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    lines = [line for line in done.stdout.splitlines() if line.startswith("ANSWERS ")]
    assert lines, done.stdout + done.stderr
    return json.loads(lines[0].removeprefix("ANSWERS "))


def test_engine_with_vericache(tmp_path):
    options = {"vericache_draft_len": 4, "vericache_compressor": "streaming"}
    requests = [None, {"vericache": {"enabled": False}}, UNKNOWN]
    drafting, plain, refused = generate(tmp_path, options, requests)
    assert drafting["output_ids"] == plain["output_ids"]
    assert drafting["meta_info"]["vericache"]["drafted"] > 0
    assert plain["meta_info"]["vericache"]["drafted"] == 0
    assert "'enabeld'" in refused["error"]


@pytest.mark.long
def test_stock_engine_is_left_alone(tmp_path):
    options = {
        "device": "cpu",
        "attention_backend": "torch_native",
        "disable_overlap_schedule": True,
    }
    (answer,) = generate(tmp_path, options, [UNKNOWN])
    assert len(answer["output_ids"]) == 12
    assert "vericache" not in answer["meta_info"]
