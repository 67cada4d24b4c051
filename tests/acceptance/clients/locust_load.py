"""locust: twenty users for five seconds, and no failure."""

import subprocess
import sys
from pathlib import Path

from common import URL, check

FILE = """
from locust import HttpUser, task

class Reader(HttpUser):
    @task
    def story(self):
        body = {"model": "demo", "messages": [{"role": "user", "content": "A story."}], "max_tokens": 8}
        self.client.post("/v1/chat/completions", json=body)
"""
Path("stories.py").write_text(FILE)
how = "-f stories.py --headless -u 20 -r 20 -t 5s --only-summary --host"
done = subprocess.run([sys.executable, "-m", "locust", *how.split(), URL], timeout=120, check=False)
check(done.returncode == 0)
