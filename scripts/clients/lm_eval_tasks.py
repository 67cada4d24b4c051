"""lm-evaluation-harness: choices by likelihood (local-completions), answers (local-chat-completions)."""

import json
import subprocess
import sys
from pathlib import Path

from common import MODEL, URL, check

ROWS = [
    {"q": "Once upon a", "choices": ["time", "boat"], "gold": 0},
    {"q": "The cat is", "choices": ["stone", "happy"], "gold": 1},
]
DATA = "dataset_path: json\ndataset_kwargs: {data_files: {test: rows.jsonl}}\ntest_split: test\ndoc_to_text: '{{q}}'\n"
CHOICES = (
    "task: chosen\noutput_type: multiple_choice\ndoc_to_choice: '{{choices}}'\ndoc_to_target: '{{gold}}'\n"
    "metric_list: [{metric: acc}]\n"
)
ANSWERS = (
    "task: answered\noutput_type: generate_until\ndoc_to_target: '{{choices[gold]}}'\n"
    "generation_kwargs: {until: ['.'], max_gen_toks: 8}\nmetric_list: [{metric: exact_match}]\n"
)
Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
Path("chosen.yaml").write_text(CHOICES + DATA)
Path("answered.yaml").write_text(ANSWERS + DATA)


def evaluate(task: str, model: str, route: str, *more: str) -> None:
    where = f"model=demo,base_url={URL}/v1/{route},tokenizer={MODEL},num_concurrent=2,max_retries=1"
    command = [sys.executable, "-m", "lm_eval", "--model", model, "--model_args", where, "--tasks", task]
    command += ["--include_path", ".", "--output_path", task, *more]
    subprocess.run(command, timeout=240, check=True)
    (results,) = Path(task).rglob("results*.json")
    check(task in json.loads(results.read_text())["results"])


evaluate("chosen", "local-completions", "completions")
evaluate("answered", "local-chat-completions", "chat/completions", "--apply_chat_template")
