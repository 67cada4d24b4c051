"""guidellm: synthetic chats, four at a time for six seconds, and no failure."""

import json
import subprocess
import sys
from pathlib import Path

from common import MODEL, URL, check

command = [str(Path(sys.executable).with_name("guidellm")), "run", "--disable-console"]
command += ["--backend", f"kind=openai_http,target={URL},model=demo", "--tokenizer", f"kind=hf_auto,model={MODEL}"]
command += ["--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=16", "--profile", "kind=concurrent,streams=4"]
command += ["--constraint", "kind=max_duration,seconds=6", "--output", "kind=json,path=report.json"]
subprocess.run(command, timeout=200, check=True)
(benchmark,) = json.loads(Path("report.json").read_text())["benchmarks"]
made = benchmark["metrics"]["request_totals"]
print(made)
check(made["successful"])
check(not made["errored"])
