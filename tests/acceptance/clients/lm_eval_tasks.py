"""lm-evaluation-harness: choices, likelihoods, answers and chats, measured as by its own transformers backend."""

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

from common import MODEL, URL, check

WORDS = ("the", "cat", "bear", "boat", "tea", "happy", "went", "to", "sleep", "red", "is", "and", "story", "little")
BEGINNINGS = (
    "Once upon a time",
    "The cat is",
    "A little bear",
    "Tell me a story",
    "The boat went",
    "How do I make tea?",
)
DATA = "dataset_path: json\ndataset_kwargs: {data_files: {test: rows.jsonl}}\ntest_split: test\ndoc_to_text: '{{q}}'\n"
TASKS = {
    "chosen": "output_type: multiple_choice\ndoc_to_choice: '{{choices}}'\ndoc_to_target: '{{gold}}'\n"
    "metric_list: [{metric: acc}, {metric: acc_norm}]\n",
    "continued": "output_type: loglikelihood\ndoc_to_target: ' {{choices[gold]}}'\n"
    "metric_list: [{metric: perplexity}, {metric: acc}]\n",
    "answered": "output_type: generate_until\ndoc_to_target: '{{choices[gold]}}'\n"
    "generation_kwargs: {until: ['.'], max_gen_toks: 12, do_sample: false}\nmetric_list: [{metric: exact_match}]\n",
}
SERVED = f"model=demo,tokenizer={MODEL},num_concurrent=4,max_retries=1,add_bos_token=True,base_url={URL}/v1"
OWN = f"pretrained={MODEL},dtype=float32,add_bos_token=True"


def rows(count: int) -> list[dict[str, Any]]:
    """Rows with a beginning and three continuations, one of which is the right one."""
    rng = random.Random(5)
    texts = [[" ".join(rng.choices(WORDS, k=rng.randint(1, 3))) for _ in range(3)] for _ in range(count)]
    return [{"q": rng.choice(BEGINNINGS), "choices": choices, "gold": rng.randrange(3)} for choices in texts]


def evaluate(name: str, tasks: str, model: str, where: str, *more: str) -> dict[str, Any]:
    """Evaluate tasks. Returns the results of each task, and the model's answers to every row."""
    command = [sys.executable, "-m", "lm_eval", "--model", model, "--model_args", where, "--tasks", tasks]
    command += ["--include_path", ".", "--output_path", name, "--log_samples", "--batch_size", "1", *more]
    subprocess.run(command, timeout=240, check=True)
    (found,) = Path(name).rglob("results*.json")
    samples = {path.name.split("_")[1]: path.read_text().splitlines() for path in Path(name).rglob("samples_*.jsonl")}
    said = {task: [json.loads(line)["filtered_resps"] for line in lines] for task, lines in samples.items()}
    return {"results": json.loads(found.read_text())["results"], "said": said}


Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows(24)))
for name, task in TASKS.items():
    Path(f"{name}.yaml").write_text(f"task: {name}\n{task}{DATA}")
ours = evaluate("served", ",".join(TASKS), "local-completions", f"{SERVED}/completions")
own = evaluate("own", ",".join(TASKS), "hf", OWN, "--device", "cpu")
for name in TASKS:
    measured = {key: value for key, value in own["results"][name].items() if isinstance(value, float)}
    print(name, measured)
    check(measured)
    for key, value in measured.items():
        if abs(ours["results"][name][key] - value) > 1e-3 * max(1.0, abs(value)):
            raise SystemExit(f"{name}: {key} is {ours['results'][name][key]} over HTTP, {value} with transformers")
if ours["said"]["answered"] != own["said"]["answered"]:
    raise SystemExit("the answers differ")
chats = evaluate("chats", "answered", "local-chat-completions", f"{SERVED}/chat/completions", "--apply_chat_template")
own_chats = evaluate("own_chats", "answered", "hf", OWN, "--device", "cpu", "--apply_chat_template")
check(any(any(said) for said in chats["said"]["answered"]))
if chats["said"]["answered"] != own_chats["said"]["answered"]:
    raise SystemExit("the answers of chats differ")
